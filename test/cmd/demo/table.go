package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/lipgloss"
	"github.com/charmbracelet/lipgloss/table"
	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	redrawEvery = 200 * time.Millisecond
	// shownAfterEnd is how long a NodeClaim stays in the table once it is gone.
	shownAfterEnd = 3 * time.Second
	// aroundTable is the number of lines that are not rows.
	aroundTable = 12
)

var (
	bold  = lipgloss.NewStyle().Bold(true)
	faint = lipgloss.NewStyle().Faint(true)
	good  = lipgloss.NewStyle().Foreground(lipgloss.Color("2"))
	going = lipgloss.NewStyle().Foreground(lipgloss.Color("3"))
)

// drawn is a screen with a table at its bottom that is redrawn in place, with titles and notes
// scrolling above it.
type drawn struct {
	program *tea.Program
	began   time.Time
	ended   chan struct{}
	once    sync.Once
}

func newTable(began time.Time) *drawn {
	// The demo handles signals and the keyboard itself: Ctrl-C is a signal to it.
	program := tea.NewProgram(&model{began: began, height: 40, width: 120}, tea.WithInput(nil), tea.WithoutSignalHandler())
	d := &drawn{program: program, began: began, ended: make(chan struct{})}
	go func() {
		defer close(d.ended)
		_, _ = program.Run()
	}()
	return d
}

func (d *drawn) stamp() string {
	return faint.Render(fmt.Sprintf("%7.1f s", time.Since(d.began).Seconds()))
}

// print writes a line above the table. It does not wait for a program that has ended.
func (d *drawn) print(line string) {
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		d.program.Println(line)
	}()
	select {
	case <-printed:
	case <-d.ended:
	}
}

func (d *drawn) title(format string, args ...any) {
	d.print(d.stamp() + "  " + bold.Render(fmt.Sprintf(format, args...)))
}

func (d *drawn) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if strings.HasPrefix(text, "waiting for ") {
		d.program.Send(waitingFor(text)) // shown as the table's own line: it would fill the screen
		return
	}
	d.program.Send(waitingFor(""))
	d.print(d.stamp() + "  " + text)
}

func (d *drawn) event(timeline.Event) {} // the table shows it

func (d *drawn) starting(state sandbox.State) { d.program.Send(state) }

func (d *drawn) follow(recorder *timeline.Recorder) { d.program.Send(recorder) }

func (d *drawn) close() {
	d.once.Do(func() {
		d.program.Quit()
		<-d.ended
	})
}

type (
	waitingFor string
	redraw     time.Time
)

// model is the content of the screen, in the form that its library requires.
type model struct {
	began         time.Time
	width, height int
	sandbox       sandbox.State
	recorder      *timeline.Recorder
	waiting       string
}

func (m *model) Init() tea.Cmd { return tick() }

func tick() tea.Cmd { return tea.Tick(redrawEvery, func(t time.Time) tea.Msg { return redraw(t) }) }

func (m *model) Update(message tea.Msg) (tea.Model, tea.Cmd) {
	switch message := message.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = message.Width, message.Height
	case sandbox.State:
		m.sandbox = message
	case *timeline.Recorder:
		m.recorder = message
	case waitingFor:
		m.waiting = string(message)
	case redraw:
		return m, tick()
	}
	return m, nil
}

func (m *model) View() string {
	if m.recorder == nil {
		return m.viewStart()
	}
	state := m.recorder.State()
	pods := fmt.Sprintf("pods  %s waiting  %s starting  %s running    nodes %d",
		going.Render(strconv.Itoa(state.Pods.Waiting)), going.Render(strconv.Itoa(state.Pods.Starting)),
		good.Render(strconv.Itoa(state.Pods.Running)), state.Nodes)
	groups := strings.Join(lo.Map(state.Groups, func(g timeline.Group, _ int) string {
		return fmt.Sprintf("%s %s", g.Name, faint.Render(fmt.Sprintf("replicas %d, machines %d, claims %d", g.Replicas, g.Machines, g.Claims)))
	}), "    ")
	return strings.Join([]string{
		"", fmt.Sprintf("%s  %s", bold.Render(fmt.Sprintf("%.0f s", time.Since(m.began).Seconds())), pods),
		groups, m.viewJourneys(state), faint.Render(m.waiting), "",
	}, "\n")
}

// viewStart shows the progress of the sandbox's start.
func (m *model) viewStart() string {
	steps := lo.Map(m.sandbox.Steps, func(s sandbox.Step, _ int) string {
		switch {
		case s.DoneAt.IsZero():
			return going.Render(fmt.Sprintf("  … %-34s %.0f s", s.Name, time.Since(s.StartedAt).Seconds()))
		case s.Error != "":
			return fmt.Sprintf("  ✗ %-34s %s", s.Name, s.Error)
		default:
			return good.Render("  ✓ ") + fmt.Sprintf("%-34s %.1f s", s.Name, s.DoneAt.Sub(s.StartedAt).Seconds())
		}
	})
	return strings.Join(append(steps, ""), "\n")
}

// viewJourneys shows a row for each NodeClaim, or only for the newest ones if not all fit.
func (m *model) viewJourneys(state timeline.State) string {
	shown := lo.Filter(state.Timelines, func(j timeline.Timeline, _ int) bool {
		return !j.Reached(timeline.Gone) || time.Since(j.At(timeline.Gone)) < shownAfterEnd
	})
	hidden := max(0, len(shown)-max(3, m.height-aroundTable))
	t := table.New().Border(lipgloss.NormalBorder()).BorderStyle(faint).
		Headers("NODECLAIM", "CLAIM", "GROUP", "MACHINE", "NODE", "launched", "bound", "provisioned", "registered", "ready", "")
	for _, j := range shown[hidden:] {
		took := func(stage timeline.Stage) string {
			d, ok := j.Took(timeline.Created, stage)
			return lo.Ternary(ok, fmt.Sprintf("%.2f s", d.Seconds()), "")
		}
		t.Row(j.NodeClaim, j.ClaimPhase, j.Group, j.Machine, j.Node,
			took(timeline.Launched), took(timeline.Bound), took(timeline.Provisioned), took(timeline.Registered), took(timeline.Initialized), fate(j))
	}
	// A wrapped line would break the redrawing in place.
	drawn := lo.Map(strings.Split(t.String(), "\n"), func(line string, _ int) string {
		return lipgloss.NewStyle().MaxWidth(m.width).Render(line)
	})
	if hidden > 0 {
		drawn = slices.Insert(drawn, 0, faint.Render(fmt.Sprintf("%d more above", hidden)))
	}
	return strings.Join(drawn, "\n")
}

// fate describes the end of a NodeClaim.
func fate(j timeline.Timeline) string {
	switch {
	case j.Reached(timeline.Gone):
		return faint.Render("gone")
	case j.Reached(timeline.Deleting):
		return going.Render("going " + strings.ToLower(j.Disrupted))
	case j.Reached(timeline.Initialized):
		return good.Render("in use")
	default:
		return going.Render("on its way")
	}
}
