package conformance

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"
)

// Checks determines which behaviours are checked, and on which target.
type Checks struct {
	// NewEnv is called for each behaviour that is checked. It must register its cleanup with the
	// test. REQUIRED.
	NewEnv func(tb testing.TB) Env
	// Lacks returns what the behaviour needs and the target lacks, or an empty string. If the
	// target lacks something, the behaviour is skipped. Nil means that the target lacks nothing.
	Lacks func(Behaviour) string
	// Profiles are the profiles whose behaviours are checked. Empty means all.
	Profiles []Profile
	// Only selects behaviours by their ID. Nil means all.
	Only func(id string) bool
	// Progress is called with each result once it is known. OPTIONAL.
	Progress func(Result)
}

// Check checks the behaviours one after the other, as [Run] does in a Go test. When the context
// ends, the remaining behaviours fail.
func Check(ctx context.Context, o Checks) Verdict {
	verdict := Verdict{Began: time.Now()}
	for _, area := range areas {
		for _, c := range area.cases {
			b := c.behaviour(area.name)
			if len(o.Profiles) > 0 && !slices.Contains(o.Profiles, b.Profile) || o.Only != nil && !o.Only(b.ID) {
				continue
			}
			result := o.check(ctx, c, b)
			verdict.Results = append(verdict.Results, result)
			if o.Progress != nil {
				o.Progress(result)
			}
		}
	}
	verdict.Seconds = time.Since(verdict.Began).Seconds()
	return verdict
}

func (o Checks) check(ctx context.Context, c testCase, b Behaviour) Result {
	result := Result{ID: b.ID, Area: b.Area, Behaviour: b.Sentence, Profile: b.Profile}
	if o.Lacks != nil {
		if lacks := o.Lacks(b); lacks != "" {
			result.Outcome, result.Message = Skipped, lacks
			return result
		}
	}
	began := time.Now()
	a := try(ctx, b.ID, func(tb testing.TB) {
		tb.Helper()
		runCase(tb, o.NewEnv, c)
	})
	result.Seconds = time.Since(began).Seconds()
	result.Message = strings.TrimSpace(strings.Join(a.messages, "\n"))
	switch {
	case a.failed:
		result.Outcome = Failed
	case a.skipped:
		result.Outcome = Skipped
	default:
		result.Outcome = Passed
	}
	return result
}
