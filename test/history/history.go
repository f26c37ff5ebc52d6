// Package history checks the answers that callers of several agents received about claims. There
// must be an order of all calls, each between its beginning and its end, in which a single agent
// that handles one call at a time could have given the same answers.
package history

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// Kind is the kind of a call.
type Kind string

// The calls on one claim.
const (
	Create  Kind = "CreateClaim"
	Release Kind = "ReleaseClaim"
	Get     Kind = "GetClaim"
)

// Answer is what a caller learned from a call.
type Answer struct {
	Outcome Outcome
	// Machine is the UID of the claim's Machine. Empty if the answer has none.
	Machine string
}

// Outcome is the part of an answer that the order must explain.
type Outcome string

const (
	// Unknown means that no answer arrived, or one that leaves open whether the call had an effect.
	// It may take effect at any later time.
	Unknown Outcome = "unknown"
	// Refused means that no node group admitted the claim.
	Refused Outcome = "refused"
	// Live means that the claim is PENDING or BOUND.
	Live Outcome = "live"
	// Releasing means that the claim is RELEASING.
	Releasing Outcome = "releasing"
	// Ended means that the claim is ENDED. A call that makes a claim and is answered that the claim
	// has ended cannot tell RELEASING from ENDED.
	Ended Outcome = "ended"
	// Missing means that there is no such claim.
	Missing Outcome = "missing"
)

// Recorder records calls. It is safe for concurrent use.
type Recorder struct {
	began time.Time

	mu    sync.Mutex
	calls map[string][]porcupine.Operation
	// told are the claims for which a problem has been reported.
	told map[string]bool
}

// New returns a recorder without calls.
func New() *Recorder {
	return &Recorder{began: time.Now(), calls: map[string][]porcupine.Operation{}, told: map[string]bool{}}
}

// Begin records the beginning of a call. The returned function records the answer and must be
// called once.
func (r *Recorder) Begin(claim string, kind Kind) func(Answer) {
	call := r.now()
	return func(a Answer) {
		end := r.now()
		if a.Outcome == Unknown {
			end = math.MaxInt64
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.calls[claim] = append(r.calls[claim], porcupine.Operation{Input: kind, Call: call, Output: a, Return: end})
	}
}

func (r *Recorder) now() int64 { return int64(time.Since(r.began)) }

// decideWithin bounds the search for the order of one claim's calls.
const decideWithin = 10 * time.Second

// Check checks all calls that have ended. It returns their number, the number of claims, and the
// problems that no earlier check reported.
func (r *Recorder) Check() (calls, claims int, wrong []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(r.calls)) {
		operations := r.calls[id]
		calls, claims = calls+len(operations), claims+1
		if r.told[id] {
			continue
		}
		if result := porcupine.CheckOperationsTimeout(model, operations, decideWithin); result != porcupine.Ok {
			wrong = append(wrong, fmt.Sprintf("no order explains what callers were told about claim %s (%s): %s", id, result, describe(operations)))
			r.told[id] = true
		}
	}
	return calls, claims, wrong
}

func describe(operations []porcupine.Operation) string {
	sorted := slices.Clone(operations)
	slices.SortStableFunc(sorted, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	parts := make([]string, 0, len(sorted))
	for _, o := range sorted {
		a, _ := o.Output.(Answer)
		text := fmt.Sprintf("%.3f s %s: %s", time.Duration(o.Call).Seconds(), o.Input, a.Outcome)
		if a.Machine != "" {
			text += " (" + a.Machine + ")"
		}
		if o.Return != math.MaxInt64 {
			text += fmt.Sprintf(" after %d ms", time.Duration(o.Return-o.Call).Milliseconds())
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

// stage is the progress of a claim. It never decreases.
type stage int

const (
	none stage = iota
	// made means that the claim may still be refused, because no caller was told that it was
	// accepted.
	made
	live
	releasing
	ended
)

// state is the state of one claim in an agent that handles one call at a time.
type state struct {
	stage   stage
	machine string
}

var model = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{state{}} },
	Step: func(before, input, output any) []any {
		s, _ := before.(state)
		kind, _ := input.(Kind)
		a, _ := output.(Answer)
		var after []any
		for _, now := range s.drift() {
			for _, next := range now.answers(kind, a) {
				after = append(after, next)
			}
		}
		return after
	},
}).ToModel()

// drift returns the states that the claim may have reached by itself: a released claim ends, and a
// live one may lose its Machine.
func (s state) drift() []state {
	drifted := []state{s}
	if s.stage == none {
		return drifted
	}
	for _, later := range []stage{releasing, ended} {
		if later > s.stage {
			drifted = append(drifted, state{later, s.machine})
		}
	}
	return drifted
}

// answers returns the possible states of the claim after a call with the given answer, or none if
// the answer is impossible in the current state.
func (s state) answers(kind Kind, a Answer) []state {
	switch kind {
	case Create:
		return s.create(a)
	case Release:
		return s.release(a)
	case Get:
		return s.get(a)
	}
	return nil
}

func (s state) create(a Answer) []state {
	switch {
	case a.Outcome == Unknown && s.stage == none:
		return []state{s, {stage: made}, {stage: ended}}
	case a.Outcome == Unknown:
		return []state{s}
	case a.Outcome == Live && s.stage <= live:
		return []state{{live, s.machine}}
	case a.Outcome == Refused && s.stage == none:
		return []state{s, {stage: ended}}
	case a.Outcome == Refused && s.stage == made:
		return []state{{stage: ended}}
	case a.Outcome == Ended && s.stage >= releasing:
		return []state{s}
	}
	return nil
}

// with returns the state with the answer's Machine, if it has one, and reports whether that is
// consistent.
func (s state) with(machine string) (state, bool) {
	if machine == "" {
		return s, true
	}
	if s.machine != "" && s.machine != machine {
		return s, false
	}
	return state{s.stage, machine}, true
}

func (s state) release(a Answer) []state {
	s, may := s.with(a.Machine)
	switch {
	case !may:
	case a.Outcome == Unknown && s.stage < releasing:
		return []state{s, {releasing, s.machine}, {ended, s.machine}}
	case a.Outcome == Unknown:
		return []state{s}
	case a.Outcome == Releasing && s.stage != none && s.stage <= releasing:
		return []state{{releasing, s.machine}}
	case a.Outcome == Ended && (s.stage == none || s.stage == ended): // for an unknown claim a tombstone is created
		return []state{{ended, s.machine}}
	}
	return nil
}

func (s state) get(a Answer) []state {
	s, may := s.with(a.Machine)
	switch {
	case !may:
	case a.Outcome == Unknown,
		a.Outcome == Live && (s.stage == made || s.stage == live),
		a.Outcome == Releasing && s.stage == releasing,
		a.Outcome == Ended && s.stage == ended,
		a.Outcome == Missing && (s.stage == none || s.stage == ended): // tombstones are dropped eventually
		return []state{s}
	}
	return nil
}
