// Package explore visits every state that a small model can reach, or random runs of one that is too large for that, and
// reports the shortest way to each kind of violation.
package explore

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Act is a transition in a form that costs nothing; [Model.Describe] says it in words. Zero is not a transition.
type Act uint32

// Emit takes one transition: the state that it leads to, and what it violates ("" for nothing). It must not keep next.
type Emit[S any] func(next *S, act Act, violation string)

// Mover is who makes a transition.
type Mover int

// In this order they move in an exhaustive search.
const (
	// Outside is everything that may happen or not: callers, people, failures.
	Outside Mover = iota
	// Controllers go on until there is nothing to do.
	Controllers
	// Live is an agent that reads and writes in one instant.
	Live
	// Stale is every agent that acts on what it read earlier.
	Stale
	// Reads are the stale agents' reads.
	Reads
	movers

	// Patient is the live agent once it has waited long enough for everything that it waits for; it goes on until there is
	// nothing to do. Its transitions are among those of Live.
	Patient
)

// Model is a system of states S. S must hold no pointers: it is copied and hashed.
type Model[S any] interface {
	Initial() S
	// Moves emits every transition of one mover.
	Moves(who Mover, s *S, emit Emit[S])
	// Key is the same for states that need not be told apart.
	Key(s *S) uint64
	// Check returns what a state violates at any time, or "".
	Check(s *S) string
	// CheckAtRest returns what a state violates in which neither the controllers nor a patient agent have anything to do, or "".
	CheckAtRest(s *S) string
	// Exhausted reports that the state has used up a bound of the model, so that it may never come to rest.
	Exhausted(s *S) bool
	Describe(act Act) string
}

// Options bound a run.
type Options struct {
	// States is the largest number of states visited; at least 1.
	States int
	// For is the longest time taken; zero means no limit.
	For time.Duration
	// StopAtFirst ends the run at the first violation.
	StopAtFirst bool
	// Until ends the run at the first violation of this kind, by its first word.
	Until string
	// Ignore are kinds of violations, by their first word, that are not reported.
	Ignore []string
	// FairRunEvery is how many states lie between two from which a fair run must come to rest; zero means 37.
	FairRunEvery int

	// Walks is the number of random runs instead of a search, each of at most Depth steps.
	Walks, Depth int
	Seed         uint64
}

// Result is what a run found.
type Result struct {
	States, Transitions, AtRest, FairRuns int
	// Complete says that every reachable state was visited.
	Complete   bool
	Took       time.Duration
	Violations []Violation
}

// Violation is one kind, with the shortest way there (of a search) or the first one met (of walks).
type Violation struct {
	Kind  string
	Count int
	Trace []string
}

// Report writes the result for people.
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

// add counts a violation and reports whether its kind is new.
func (r *Result) add(kind string, trace func() []string) {
	i := slices.IndexFunc(r.Violations, func(v Violation) bool { return v.Kind == kind })
	if i < 0 {
		r.Violations = append(r.Violations, Violation{Kind: kind, Count: 1, Trace: trace()})
		return
	}
	r.Violations[i].Count++
}

// enough reports whether the run has found what it is to find.
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
				return // what follows a violation says nothing
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

// fairRun lets the controllers and a patient agent take turns until they rest, and returns what is violated then.
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

// weights is how often each mover moves in a random run.
var weights = [movers]int{Outside: 1, Controllers: 4, Live: 2, Stale: 4, Reads: 4}

// Walk takes random runs, and lets each come to rest: it reaches depths that a search does not.
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
