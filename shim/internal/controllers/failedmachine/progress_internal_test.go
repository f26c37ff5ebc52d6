package failedmachine

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type groups map[string]*agentv1alpha1.NodeGroup

func (g groups) Get(id string) (*agentv1alpha1.NodeGroup, bool) {
	group, known := g[id]
	return group, known
}

func TestCoreWaitsNoLongerThanItsOwnTimeWhereTheAgentWouldForEver(t *testing.T) {
	c := &Controller{Config: Config{NodeGroups: groups{
		"fleet/open":   {Availability: &agentv1alpha1.Availability{Available: true}},
		"fleet/full":   {Availability: &agentv1alpha1.Availability{Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE}},
		"fleet/paused": {Availability: &agentv1alpha1.Availability{Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED}},
	}}}
	for _, test := range []struct {
		group, reason string
		comes         bool
	}{
		{"fleet/open", "WaitingForMachine", true},
		{"fleet/full", "WaitingForMachine", true},
		{"fleet/unknown", "WaitingForMachine", true},
		{"fleet/paused", "WaitingForMachine", false},
		{"fleet/paused", "Bound", false},
		{"fleet/open", "NodeNotSeen", false},
	} {
		assert.Equal(t, test.comes, c.comes(&agentv1alpha1.Claim{NodeGroupId: test.group, Reason: test.reason}), "%s %s", test.group, test.reason)
	}
}

func TestTheVerdictNamesWhereAndWhy(t *testing.T) {
	now := timestamppb.Now()
	for name, c := range map[string]struct {
		claim  *agentv1alpha1.Claim
		reason string
		says   []string
	}{
		"failed": {
			&agentv1alpha1.Claim{
				Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, FailedAt: now, Message: "no hosts left",
				Machine: &agentv1alpha1.Machine{InfrastructureReason: "OutOfCapacity", InfrastructureMessage: "rack 7"},
			},
			"MachineFailed",
			[]string{"fleet/small", "no hosts left", "OutOfCapacity: rack 7"},
		},
		"late": {
			&agentv1alpha1.Claim{Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, Reason: "Late", Message: "no Node in 30m0s"},
			"Late",
			[]string{"fleet/small", "no Node in 30m0s"},
		},
		"ended, and nothing more is known": {
			&agentv1alpha1.Claim{Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED},
			"ClaimEnded",
			[]string{"fleet/small", "has ended"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.claim.NodeGroupId = "fleet/small"
			assert.True(t, released(c.claim))
			reason, message := verdict(c.claim)
			assert.Equal(t, c.reason, reason)
			for _, text := range c.says {
				assert.Contains(t, message, text)
			}
		})
	}
	assert.False(t, released(&agentv1alpha1.Claim{Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND}))
}
