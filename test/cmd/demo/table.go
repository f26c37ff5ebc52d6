package main

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/lipgloss"
	"github.com/charmbracelet/lipgloss/table"
	"github.com/charmbracelet/x/ansi"
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
	// assumedWidth is the width of the terminal until it is known.
	assumedWidth = 120
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
	width   *atomic.Int64 // of the terminal
	ended   chan struct{}
	once    sync.Once
}

func newTable(began time.Time, options ...tea.ProgramOption) *drawn {
	width := &atomic.Int64{}
	width.Store(assumedWidth)
	// The demo handles signals and the keyboard itself: Ctrl-C is a signal to it.
	options = append([]tea.ProgramOption{tea.WithInput(nil), tea.WithoutSignalHandler()}, options...)
	program := tea.NewProgram(&model{began: began, height: 40, width: width}, options...)
	d := &drawn{program: program, began: began, width: width, ended: make(chan struct{})}
	go func() {
		defer close(d.ended)
		_, _ = program.Run()
	}()
	return d
}

// print writes a text above the table, with the time before it. It does not wait for a program that
// has ended. Lines are wrapped here: what a terminal wraps itself is written over rows of the table
// without erasing the rest of them.
func (d *drawn) print(text string) {
	stamp := fmt.Sprintf("%7.1f s  ", time.Since(d.began).Seconds())
	room := max(1, int(d.width.Load())-len(stamp))
	text = strings.ReplaceAll(ansi.Wrap(text, room, "/"), "\n", "\n"+strings.Repeat(" ", len(stamp)))
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		d.program.Println(faint.Render(stamp) + text)
	}()
	select {
	case <-printed:
	case <-d.ended:
	}
}

func (d *drawn) title(format string, args ...any) {
	d.print(bold.Render(fmt.Sprintf(format, args...)))
}

func (d *drawn) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if strings.HasPrefix(text, "waiting for ") {
		d.program.Send(waitingFor(text)) // shown as the table's own line: it would fill the screen
		return
	}
	d.program.Send(waitingFor(""))
	d.print(text)
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
	began    time.Time
	width    *atomic.Int64
	height   int
	sandbox  sandbox.State
	recorder *timeline.Recorder
	waiting  string
}

func (m *model) Init() tea.Cmd { return tick() }

func tick() tea.Cmd { return tea.Tick(redrawEvery, func(t time.Time) tea.Msg { return redraw(t) }) }

func (m *model) Update(message tea.Msg) (tea.Model, tea.Cmd) {
	switch message := message.(type) {
	case tea.WindowSizeMsg:
		m.width.Store(int64(message.Width))
		m.height = message.Height
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
	var lines []string
	if m.recorder == nil {
		lines = append(viewStart(m.sandbox), "")
	} else {
		lines = append(viewFleet(m.recorder.State(), time.Since(m.began), m.height), faint.Render(m.waiting), "")
	}
	return strings.Join(lo.Map(lines, func(line string, _ int) string {
		return ansi.Truncate(line, int(m.width.Load()), "…")
	}), "\n")
}

// viewStart shows the progress of the sandbox's start.
func viewStart(state sandbox.State) []string {
	return lo.Map(state.Steps, func(s sandbox.Step, _ int) string {
		switch {
		case s.DoneAt.IsZero():
			return going.Render(fmt.Sprintf("  … %-34s %.0f s", s.Name, time.Since(s.StartedAt).Seconds()))
		case s.Error != "":
			return fmt.Sprintf("  ✗ %-34s %s", s.Name, firstLine(s.Error))
		default:
			return good.Render("  ✓ ") + fmt.Sprintf("%-34s %.1f s", s.Name, s.DoneAt.Sub(s.StartedAt).Seconds())
		}
	})
}

// viewFleet shows what the recorder has seen, with a row for each NodeClaim, or only for the newest
// ones if not all of them fit into the height.
func viewFleet(state timeline.State, elapsed time.Duration, height int) []string {
	pods := fmt.Sprintf("pods  %s waiting  %s starting  %s running    nodes %d",
		going.Render(strconv.Itoa(state.Pods.Waiting)), going.Render(strconv.Itoa(state.Pods.Starting)),
		good.Render(strconv.Itoa(state.Pods.Running)), state.Nodes)
	groups := strings.Join(lo.Map(state.Groups, func(g timeline.Group, _ int) string {
		return fmt.Sprintf("%s %s", g.Name, faint.Render(fmt.Sprintf("replicas %d, machines %d, claims %d", g.Replicas, g.Machines, g.Claims)))
	}), "    ")
	lines := []string{"", fmt.Sprintf("%s  %s", bold.Render(fmt.Sprintf("%.0f s", elapsed.Seconds())), pods), groups}

	shown := lo.Filter(state.Timelines, func(j timeline.Timeline, _ int) bool {
		return !j.Reached(timeline.Gone) || time.Since(j.At(timeline.Gone)) < shownAfterEnd
	})
	hidden := max(0, len(shown)-max(3, height-aroundTable))
	t := table.New().Border(lipgloss.NormalBorder()).BorderStyle(faint).
		Headers("NODECLAIM", "CLAIM", "GROUP", "MACHINE", "NODE", "launched", "bound", "provisioned", "registered", "ready", "")
	for _, j := range shown[hidden:] {
		took := func(stage timeline.Stage) string {
			d, ok := j.Took(timeline.Created, stage)
			return lo.Ternary(ok, fmt.Sprintf("%.2f s", d.Seconds()), "")
		}
		t.Row(j.NodeClaim, j.ClaimPhase, j.Group, j.Machine, j.Node,
			took(timeline.Launched), took(timeline.Bound), took(timeline.Provisioned), took(timeline.Registered), took(timeline.Initialized), outcome(j))
	}
	if hidden > 0 {
		lines = append(lines, faint.Render(fmt.Sprintf("%d more above", hidden)))
	}
	return append(lines, strings.Split(t.String(), "\n")...)
}

// outcome describes the end of a NodeClaim.
func outcome(j timeline.Timeline) string {
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
