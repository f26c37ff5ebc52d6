package invariants_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
)

func TestWhatPeopleKnowIsComparedWithWhatIsThere(t *testing.T) {
	const holder = "karpenter"
	mine := invariants.Expected{Shares: map[string]invariants.Share{"small": {Own: 1}}, Wanted: []string{claimID}, Holder: holder}
	for _, tc := range []struct {
		name     string
		change   func(*fixture)
		expected func(*invariants.Expected)
		rule     invariants.Rule
		count    int
	}{
		{name: "as it should be"},
		{name: "groups that are not checked", expected: func(e *invariants.Expected) {
			e.Shares = nil
		}},
		{name: "claims of another holder", expected: func(e *invariants.Expected) { e.Wanted, e.Holder = nil, "chaos" }},
		{
			name: "Machines that were not requested, whatever the ledger contains", rule: invariants.NothingLeaked, count: 2,
			change: func(s *fixture) {
				s.ledger(`{"v":1,"seq":7,"floor":3,"lastReplicas":4}`)
				s.hub = append(s.hub, machine("one", ""), machine("two", ""))
			},
		},
		{
			name:   "Machines that may be the user's",
			change: func(s *fixture) { s.hub = append(s.hub, machine("one", ""), machine("two", "")) },
			expected: func(e *invariants.Expected) {
				e.Shares["small"] = invariants.Share{Own: 1, Unclear: 2}
			},
		},
		{
			name: "the user's Machine is gone", rule: invariants.NothingTaken, count: 1,
			change: func(s *fixture) { s.own = nil },
		},
		{
			name: "a wanted claim has ended", rule: invariants.WantedClaims, count: 1,
			change: func(s *fixture) {
				s.claim.Status.Phase = agentv1.PhaseEnded
				s.claimed = nil
			},
		},
		{
			name: "an unwanted claim lives", rule: invariants.UnwantedClaims, count: 1,
			expected: func(e *invariants.Expected) { e.Wanted, e.Shares = nil, nil },
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := atRest()
			if tc.change != nil {
				tc.change(s)
			}
			e := mine
			e.Shares = map[string]invariants.Share{"small": {Own: 1}}
			if tc.expected != nil {
				tc.expected(&e)
			}
			found := s.read(t).Against(e)
			if tc.rule == "" {
				require.Empty(t, found)
			} else {
				require.Len(t, found, 1)
				require.Equal(t, tc.rule, found[0].Rule)
				require.Equal(t, tc.count, found[0].Count)
			}
		})
	}
}
