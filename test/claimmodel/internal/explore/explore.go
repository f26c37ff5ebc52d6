// Package explore visits every state that a small model can reach, or takes random runs of a model
// that is too large for that, and reports the shortest path to each kind of violation.
package explore

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Act encodes a transition compactly. [Model.Describe] describes it in words. Zero is not a
// transition.
type Act uint32

// Emit takes one transition: the resulting state, and what it violates, or "". It must not retain
// next.
type Emit[S any] func(next *S, act Act, violation string)

// Mover is the actor of a transition.
type Mover int

// In an exhaustive search they move in this order.
const (
	// Outside is everything that may or may not happen: callers, users, failures.
	Outside Mover = iota
	// Controllers continue until there is nothing left to do.
	Controllers
	// Live is an agent that reads and writes in one instant.
	Live
	// Stale is every agent that acts on an earlier reading.
	Stale
	// Reads are the stale agents' reads.
	Reads
	movers

	// Patient is the live agent after all of its waits have expired. It continues until there is
	// nothing left to do. Its transitions are a subset of Live's.
	Patient
)

// Model is a system of states S. S must not contain pointers: it is copied and hashed.
type Model[S any] interface {
	Initial() S
	// Moves emits every transition of one mover.
	Moves(who Mover, s *S, emit Emit[S])
	// Key returns the same value for states that need not be distinguished.
	Key(s *S) uint64
	// Check returns what a state violates of the rules that must always hold, or "".
	Check(s *S) string
	// CheckAtRest returns what a state at rest violates, or "". At rest, neither the controllers
	// nor a patient agent have anything to do.
	CheckAtRest(s *S) string
	// Exhausted reports whether the state has reached a limit of the model and may therefore never
	// come to rest.
	Exhausted(s *S) bool
	Describe(act Act) string
}

// Options limits a run.
type Options struct {
	// States is the maximum number of states visited; at least 1.
	States int
	// For is the maximum duration. Zero means no limit.
	For time.Duration
	// StopAtFirst ends the run at the first violation.
	StopAtFirst bool
	// Until ends the run at the first violation of this kind, given by its first word.
	Until string
	// Ignore lists kinds of violations, by first word, that are not reported.
	Ignore []string
	// FairRunEvery is the number of states between two fair runs, each of which must come to rest.
	// Zero means 37.
	FairRunEvery int

	// Walks is the number of random runs, instead of a search. Each takes at most Depth steps.
	Walks, Depth int
	Seed         uint64
}

// Result is the result of a run.
type Result struct {
	States, Transitions, AtRest, FairRuns int
	// Complete is set if every reachable state was visited.
	Complete   bool
	Took       time.Duration
	Violations []Violation
}

// Violation is one kind of violation, with the shortest path to it (of a search) or the first one
// found (of walks).
type Violation struct {
	Kind  string
	Count int
	Trace []string
}

// Report writes the result as text.
func (r *Result) Report(to io.Writer) {
	fmt.Fprintf(to, "states=%d transitions=%d complete=%v at-rest=%d fair-runs=%d seconds=%.1f violations=%d\n",
		r.States, r.Transitions, r.Complete, r.AtRest, r.FairRuns, r.Took.Seconds(), len(r.Violations))
	for _, v := range r.Violations {
		fmt.Fprintf(to, "VIOLATION %s (%d times)\n", v.Kind, v.Count)
		for i, step := range v.Trace {
			fmt.Fprintf(to, "  %3d  %s\n", i+1, step)
		}
	}
}

// add counts a violation.
func (r *Result) add(kind string, trace func() []string) {
	i := slices.IndexFunc(r.Violations, func(v Violation) bool { return v.Kind == kind })
	if i < 0 {
		r.Violations = append(r.Violations, Violation{Kind: kind, Count: 1, Trace: trace()})
		return
	}
	r.Violations[i].Count++
}

// enough reports whether the run may end because of the violations found.
func (r *Result) enough(o *Options) bool {
	return o.StopAtFirst && len(r.Violations) > 0 ||
		o.Until != "" && slices.ContainsFunc(r.Violations, func(v Violation) bool { return ignored(v.Kind, []string{o.Until}) })
}

func ignored(violation string, kinds []string) bool {
	first, _, _ := strings.Cut(violation, " ")
	return slices.Contains(kinds, first)
}

// Search visits states breadth first.
func Search[S any](m Model[S], o Options) Result {
	begun := time.Now()
	if o.FairRunEvery == 0 {
		o.FairRunEvery = 37
	}
	var (
		r     Result
		seen  = newFingerprints(o.States)
		queue frontier[S]
		past  history
	)
	first := m.Initial()
	seen.add(m.Key(&first))
	queue.push(&first)
	past.push(0, 0)
	r.Complete = true

	for i := 0; queue.more(); i++ {
		late := o.For > 0 && i&4095 == 0 && time.Since(begun) > o.For
		if past.len() >= o.States || late || r.enough(&o) {
			r.Complete = false
			break
		}
		s := queue.pop()
		report := func(kind string, last ...string) {
			r.add(kind, func() []string { return append(past.trace(i, m.Describe), last...) })
		}
		if AtRest(m, &s) {
			r.AtRest++
			if kind := m.CheckAtRest(&s); kind != "" && !m.Exhausted(&s) {
				report(kind)
			}
		} else if i%o.FairRunEvery == 0 {
			r.FairRuns++
			if kind, tail := fairRun(m, s); kind != "" {
				report(kind, tail...)
			}
		}
		emit := func(next *S, act Act, violation string) {
			r.Transitions++
			if violation != "" && !ignored(violation, o.Ignore) {
				report(violation, m.Describe(act))
				return // what follows a violation is meaningless
			}
			if !seen.add(m.Key(next)) {
				return
			}
			if kind := m.Check(next); kind != "" && !ignored(kind, o.Ignore) {
				report(kind, m.Describe(act))
				return
			}
			queue.push(next)
			past.push(i, act)
		}
		for who := range movers {
			m.Moves(who, &s, emit)
		}
	}
	r.States, r.Took = past.len(), time.Since(begun)
	return r
}

// AtRest reports whether neither the controllers nor a patient agent have anything to do.
func AtRest[S any](m Model[S], s *S) bool {
	rest := true
	emit := func(*S, Act, string) { rest = false }
	m.Moves(Controllers, s, emit)
	if rest {
		m.Moves(Patient, s, emit)
	}
	return rest
}

// fairRun alternates between the controllers and a patient agent until they rest, and returns what
// is violated then.
func fairRun[S any](m Model[S], s S) (kind string, tail []string) {
	const longest = 600
	var (
		acts  []Act
		nexts []S
		names []Act
	)
	emit := func(next *S, act Act, _ string) {
		nexts = append(nexts, *next)
		names = append(names, act)
	}
	for turn := range longest {
		nexts, names = nexts[:0], names[:0]
		m.Moves(Controllers, &s, emit)
		m.Moves(Patient, &s, emit)
		if len(nexts) == 0 {
			if kind := m.CheckAtRest(&s); kind != "" && !m.Exhausted(&s) {
				return kind + " (after a fair run)", describe(m, acts)
			}
			return "", nil
		}
		acts = append(acts, names[turn%len(names)])
		s = nexts[turn%len(nexts)]
	}
	if m.Exhausted(&s) {
		return "", nil
	}
	return "L1 never comes to rest", describe(m, acts[longest-12:])
}

func describe[S any](m Model[S], acts []Act) []string {
	steps := make([]string, 0, len(acts))
	for _, act := range acts {
		steps = append(steps, "(fair) "+m.Describe(act))
	}
	return steps
}

// weights are the relative frequencies of the movers in a random run.
var weights = [movers]int{Outside: 1, Controllers: 4, Live: 2, Stale: 4, Reads: 4}

// Walk takes random runs, and lets each come to rest. It reaches depths that a search does not.
func Walk[S any](m Model[S], o Options) Result {
	begun := time.Now()
	random := rand.New(rand.NewPCG(o.Seed, 0))
	var r Result
	for range o.Walks {
		if o.For > 0 && time.Since(begun) > o.For || r.enough(&o) {
			break
		}
		kind, steps, trace := walk(m, o, random)
		r.FairRuns++
		r.Transitions += steps
		if kind != "" {
			r.add(kind, func() []string { return trace })
		}
	}
	r.Took = time.Since(begun)
	return r
}

func walk[S any](m Model[S], o Options, random *rand.Rand) (kind string, steps int, trace []string) {
	type option struct {
		next      S
		act       Act
		violation string
	}
	var (
		options []option
		taken   []Act
	)
	said := func() []string {
		out := make([]string, 0, len(taken))
		for _, act := range taken {
			out = append(out, m.Describe(act))
		}
		return out
	}
	s := m.Initial()
	for range o.Depth {
		options = options[:0]
		emit := func(next *S, act Act, violation string) { options = append(options, option{*next, act, violation}) }
		for order := random.Perm(64); len(options) == 0 && len(order) > 0; order = order[1:] {
			m.Moves(pick(order[0]), &s, emit)
		}
		if len(options) == 0 {
			break
		}
		x := &options[random.IntN(len(options))]
		taken = append(taken, x.act)
		if x.violation != "" && !ignored(x.violation, o.Ignore) {
			return x.violation, len(taken), said()
		}
		s = x.next
		if kind := m.Check(&s); kind != "" && !ignored(kind, o.Ignore) {
			return kind, len(taken), said()
		}
	}
	kind, tail := fairRun(m, s)
	return kind, len(taken), append(said(), tail...)
}

// pick maps 0…63 to movers by weight.
func pick(n int) Mover {
	total := 0
	for _, weight := range weights {
		total += weight
	}
	n %= total
	for who, weight := range weights {
		if n < weight {
			return Mover(who)
		}
		n -= weight
	}
	return Controllers
}
