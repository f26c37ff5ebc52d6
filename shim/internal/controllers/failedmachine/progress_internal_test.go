package failedmachine

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestADeadlineIsAtLeastOneAndAtMostFourDeadlinesFromTheCreation(t *testing.T) {
	const deadline = time.Minute
	random := rand.New(rand.NewPCG(1, 2))
	created := time.Now()
	for range 1000 {
		c := &Controller{deadline: deadline, steps: map[types.UID]reached{}}
		nodeClaim := &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{UID: "uid", CreationTimestamp: metav1.NewTime(created)}}
		claim := &agentv1alpha1.Claim{}
		for range random.IntN(40) { // a machine whose story goes on and on
			at := created.Add(time.Duration(random.Int64N(int64(10 * deadline))))
			claim.History = append(claim.History, &agentv1alpha1.ClaimEvent{Time: timestamppb.New(at)})
		}
		got := c.deadlineOf(nodeClaim, claim, created.Add(time.Duration(random.Int64N(int64(10*deadline)))))
		assert.False(t, got.Before(created.Add(deadline)))
		assert.False(t, got.After(created.Add(totalDeadlines*deadline)))
	}
}

func TestStepsAreCountedForwardOnly(t *testing.T) {
	c := &Controller{steps: map[types.UID]reached{}}
	start := time.Now()
	assert.Zero(t, c.observe("uid", bound, start), "it may have been there long ago")
	assert.Equal(t, start.Add(1), c.observe("uid", provisioned, start.Add(1)))
	assert.Equal(t, start.Add(1), c.observe("uid", bound, start.Add(2)), "a step back is no progress")
	assert.Equal(t, start.Add(1), c.observe("uid", provisioned, start.Add(3)))
	c.forget("uid")
	assert.Empty(t, c.steps)
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
