package main

import (
	"io"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/x/ansi"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// Texts that are longer than a line of the terminal leave no part of the table behind, and the
// table covers no part of them.
func TestLongTextsAndTheTableLeaveEachOtherAlone(t *testing.T) {
	const width, height = 50, 40
	terminal := newTerminal(width, height)
	d := newTable(time.Now(), tea.WithOutput(terminal))
	defer d.close()
	d.program.Send(tea.WindowSizeMsg{Width: width, Height: height})
	steps := lo.Times(8, func(int) sandbox.Step { return sandbox.Step{Name: strings.Repeat("step ", 30), StartedAt: time.Now()} })
	steps = append(steps, sandbox.Step{Name: "last step", StartedAt: time.Now()})
	d.starting(sandbox.State{Steps: steps})
	eventually(t, func(c *assert.CollectT) { require.Contains(c, terminal.text(), "last step") })

	title := "Applying three MachineDeployments to the hub; a NodePool and three Deployments without pods to the spoke"
	note := "kubectl --kubeconfig " + strings.Repeat("/folder", 13) + "/kubeconfig get nodeclaims"
	d.title("%s", title)
	d.note("%s", note)
	eventually(t, func(c *assert.CollectT) { require.Contains(c, spaceless(terminal.text()), "getnodeclaims") })

	d.starting(sandbox.State{Steps: append(steps, sandbox.Step{Name: "new step", StartedAt: time.Now()})})
	eventually(t, func(c *assert.CollectT) { require.Contains(c, terminal.text(), "new step") })
	shown := regexp.MustCompile(` *\d+\.\d s  `).ReplaceAllString(terminal.text(), "")
	table := strings.Index(shown, "  … step")
	require.Positive(t, table)
	require.Equal(t, spaceless(title+note), spaceless(shown[:table]), "\n%s", terminal.text())
	rows := strings.Split(strings.TrimSpace(shown[table:]), "\n")
	require.Len(t, rows, 10, "a line of the table is one line of the terminal:\n%s", terminal.text())
	require.Regexp(t, "^ *… step .*…$", rows[0])
}

func spaceless(text string) string { return strings.Join(strings.Fields(text), "") }

func TestTheTableHasARowForEachNodeClaimThatFits(t *testing.T) {
	state := timeline.State{Nodes: 12}
	for i := range 10 {
		state.Timelines = append(state.Timelines, timeline.Timeline{NodeClaim: "default-" + strconv.Itoa(i)})
	}
	rows := func(height int) (names []string, more bool) {
		text := ansi.Strip(strings.Join(viewFleet(state, time.Minute, height), "\n"))
		return regexp.MustCompile(`default-\d`).FindAllString(text, -1), strings.Contains(text, "more above")
	}
	names, more := rows(aroundTable + 10)
	require.Len(t, names, 10)
	require.False(t, more)
	names, more = rows(aroundTable + 4)
	require.Equal(t, []string{"default-6", "default-7", "default-8", "default-9"}, names, "the newest")
	require.True(t, more)
}

func eventually(t *testing.T, condition func(*assert.CollectT)) {
	t.Helper()
	require.EventuallyWithT(t, condition, 30*time.Second, 20*time.Millisecond)
}

// terminal models the screen of a terminal, which wraps long lines and erases nothing on its own.
type terminal struct {
	width, height int

	mu      sync.Mutex
	rows    [][]rune
	row     int
	column  int
	pending []byte // an incomplete escape sequence
}

func newTerminal(width, height int) *terminal {
	t := &terminal{width: width, height: height}
	for range height {
		t.rows = append(t.rows, t.blank())
	}
	return t
}

func (t *terminal) blank() []rune { return []rune(strings.Repeat(" ", t.width)) }

var sequence = regexp.MustCompile(`^\x1b\[[?]?([0-9;]*)([A-Za-z])`)

// Write implements [io.Writer].
func (t *terminal) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := string(append(t.pending, p...))
	t.pending = nil
	for text != "" {
		if text[0] == '\x1b' {
			match := sequence.FindStringSubmatch(text)
			if match == nil {
				t.pending = []byte(text)
				return len(p), nil
			}
			t.control(match[2], match[1])
			text = text[len(match[0]):]
			continue
		}
		r := []rune(text)[0]
		text = text[len(string(r)):]
		t.put(r)
	}
	return len(p), nil
}

func (t *terminal) control(command, parameter string) {
	n, _ := strconv.Atoi(parameter)
	switch command {
	case "A":
		t.row = max(0, t.row-max(1, n))
	case "K": // to the right, or the whole row
		copy(t.rows[t.row][lo.Ternary(n == 2, 0, min(t.column, t.width)):], t.blank())
	case "J": // below
		copy(t.rows[t.row][min(t.column, t.width):], t.blank())
		for i := t.row + 1; i < t.height; i++ {
			t.rows[i] = t.blank()
		}
	}
}

func (t *terminal) put(r rune) {
	switch r {
	case '\r':
		t.column = 0
	case '\n':
		t.down()
	default:
		if t.column == t.width {
			t.column = 0
			t.down()
		}
		t.rows[t.row][t.column] = r
		t.column++
	}
}

func (t *terminal) down() {
	if t.row++; t.row == t.height {
		t.row--
		t.rows = append(t.rows[1:], t.blank())
	}
}

// text returns the rows that are not empty.
func (t *terminal) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(lo.FilterMap(t.rows, func(row []rune, _ int) (string, bool) {
		line := strings.TrimRight(string(row), " ")
		return line, line != ""
	}), "\n")
}

var _ io.Writer = (*terminal)(nil)
