package history_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/history"
)

// told is an answer in a sequence of calls.
type told struct {
	kind   history.Kind
	answer history.Answer
}

func create(o history.Outcome) told  { return told{history.Create, history.Answer{Outcome: o}} }
func release(o history.Outcome) told { return told{history.Release, history.Answer{Outcome: o}} }
func get(o history.Outcome, machine string) told {
	return told{history.Get, history.Answer{Outcome: o, Machine: machine}}
}

func TestWhatCallersMayBeTold(t *testing.T) {
	const (
		unknown, refused, live   = history.Unknown, history.Refused, history.Live
		releasing, ended, absent = history.Releasing, history.Ended, history.Missing
	)
	for name, test := range map[string]struct {
		calls []told
		wrong bool
	}{
		"a whole life": {calls: []told{
			get(absent, ""), create(live), create(live), get(live, ""), get(live, "m"), release(releasing), get(releasing, "m"), get(ended, "m"),
			create(ended), release(ended), get(absent, ""),
		}},
		"an answer that was lost":         {calls: []told{create(unknown), get(absent, ""), get(live, ""), create(live)}},
		"a release whose answer was lost": {calls: []told{create(live), release(unknown), get(live, ""), get(releasing, "")}},
		"a claim that lost its machine":   {calls: []told{create(live), get(live, "m"), get(ended, "m"), release(ended)}},
		"no room, once it was made":       {calls: []told{create(unknown), create(refused), get(ended, "")}},
		"a release before the claim":      {calls: []told{release(ended), create(ended)}},
		"made after its release":          {calls: []told{release(ended), create(live)}, wrong: true},
		"lives after its end":             {calls: []told{create(live), release(releasing), get(ended, ""), get(live, "")}, wrong: true},
		"lives after its release":         {calls: []told{create(live), release(releasing), get(live, "")}, wrong: true},
		"forgotten":                       {calls: []told{create(live), get(absent, ""), get(live, "")}, wrong: true},
		"forgotten before it was made":    {calls: []told{create(live), get(absent, ""), create(live)}, wrong: true},
		"two machines":                    {calls: []told{create(live), get(live, "m"), get(live, "n")}, wrong: true},
		"another machine in the end":      {calls: []told{create(live), get(live, "m"), get(ended, "n")}, wrong: true},
		"another machine in its release": {calls: []told{
			create(live), get(live, "m"), {history.Release, history.Answer{Outcome: releasing, Machine: "n"}},
		}, wrong: true},
		"refused after it was accepted":    {calls: []told{create(live), create(refused)}, wrong: true},
		"a release that is taken back":     {calls: []told{create(live), get(ended, ""), release(releasing)}, wrong: true},
		"an unknown claim being released":  {calls: []told{release(releasing)}, wrong: true},
		"a machine of a claim that is not": {calls: []told{create(refused), get(live, "m")}, wrong: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := history.New()
			for _, call := range test.calls {
				r.Begin("c1", call.kind)(call.answer)
			}
			calls, claims, wrong := r.Check()
			require.Equal(t, len(test.calls), calls)
			require.Equal(t, 1, claims)
			if test.wrong {
				require.Len(t, wrong, 1)
				require.Contains(t, wrong[0], "claim c1")
			} else {
				require.Empty(t, wrong)
			}
		})
	}
}

// Concurrent calls may have been executed in any order.
func TestCallsAtTheSameTime(t *testing.T) {
	for range 20 {
		r := history.New()
		answers := []func(){}
		for _, call := range []told{create(history.Live), get(history.Missing, ""), release(history.Releasing), get(history.Live, "m")} {
			done := r.Begin("c1", call.kind)
			answers = append(answers, func() { done(call.answer) })
		}
		rand.Shuffle(len(answers), func(i, j int) { answers[i], answers[j] = answers[j], answers[i] })
		for _, answer := range answers {
			answer()
		}
		_, _, wrong := r.Check()
		require.Empty(t, wrong)
	}
}
