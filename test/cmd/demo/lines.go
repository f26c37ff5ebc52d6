package main

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// stillStarting is the maximum time without output during the start of the sandbox.
const stillStarting = 5 * time.Second

// lines is a screen in the form of a log.
type lines struct {
	out   io.Writer
	began time.Time

	mu     sync.Mutex
	told   map[string]bool // steps of the sandbox whose end was printed
	state  sandbox.State
	closed chan struct{}
	once   sync.Once
}

func newLines(out io.Writer, began time.Time) *lines {
	l := &lines{out: out, began: began, told: map[string]bool{}, closed: make(chan struct{})}
	fmt.Fprintf(out, "demo: %s; times are seconds since then\n", began.Format(time.RFC3339))
	go l.remind()
	return l
}

func (l *lines) print(at time.Time, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.printLocked(at, text)
}

func (l *lines) printLocked(at time.Time, text string) {
	fmt.Fprintf(l.out, "%8.2f  %s\n", at.Sub(l.began).Seconds(), text)
}

func (l *lines) title(format string, args ...any) {
	l.print(time.Now(), "== "+fmt.Sprintf(format, args...))
}

func (l *lines) note(format string, args ...any) {
	l.print(time.Now(), "   "+fmt.Sprintf(format, args...))
}

func (l *lines) event(e timeline.Event) {
	l.print(e.At, fmt.Sprintf("   %-17s %-26s %s", e.Kind, e.Name, e.What))
}

func (l *lines) starting(state sandbox.State) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = state
	for _, step := range state.Steps {
		if step.DoneAt.IsZero() || l.told[step.Name] {
			continue
		}
		l.told[step.Name] = true
		l.printLocked(step.DoneAt, fmt.Sprintf("   %-34s %s in %.1f s", step.Name,
			lo.Ternary(step.Error == "", "ready", "failed"), step.DoneAt.Sub(step.StartedAt).Seconds()))
	}
}

// remind prints what the start is waiting for.
func (l *lines) remind() {
	ticker := time.NewTicker(stillStarting)
	defer ticker.Stop()
	for {
		select {
		case <-l.closed:
			return
		case now := <-ticker.C:
			l.mu.Lock()
			if l.state.Phase == sandbox.Starting {
				l.printLocked(now, "   waiting for "+strings.Join(unfinished(l.state), ", "))
			}
			l.mu.Unlock()
		}
	}
}

// unfinished returns the steps of the start that are still running.
func unfinished(state sandbox.State) []string {
	return lo.FilterMap(state.Steps, func(s sandbox.Step, _ int) (string, bool) { return s.Name, s.DoneAt.IsZero() })
}

func (l *lines) follow(*timeline.Recorder) {}

func (l *lines) close() { l.once.Do(func() { close(l.closed) }) }
