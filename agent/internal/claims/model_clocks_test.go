package claims

import (
	"errors"
	"testing"
	"time"

	"k8s.io/utils/clock"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// TestProtocolAgainstClocks does the same as [TestProtocolAgainstAdversary], but with deadlines and
// cool-downs, and with agents whose clocks are ahead of the API server's or behind it, each by up
// to a minute. So two of them may differ by two minutes.
func TestProtocolAgainstClocks(t *testing.T) {
	inOneGoroutine(t)
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, worldOptions{
			groups: rapid.IntRange(1, 2).Draw(t, "groups"), floor: rapid.Int32Range(0, 1).Draw(t, "floor"),
			maximum:  rapid.SampledFrom([]string{"", "", "3"}).Draw(t, "max"),
			strategy: clusterv1.OnDeleteMachineDeploymentStrategyType,
			skew:     time.Minute,
			failure: protocol.FailurePolicy{
				ObjectDeadline: 5 * time.Minute, ProviderIDDeadline: 5 * time.Minute, NodeDeadline: 5 * time.Minute, CoolDown: 3 * time.Minute,
			},
		})
		w.plan(rapid.Bool().Draw(t, "outsiders"))
		w.actions["time"] = func() { w.clock.Step(time.Duration(w.draw("seconds", 1, 90)) * time.Second) }
		w.actions["time (again)"] = w.actions["time"]
		w.actions["holder"] = func() { // as about every minute
			w.listClaims(w.anyAgent())
			w.readOwners()
			w.sync(w.anyAgent())
		}
		w.runHistory()
	})
}

// skewed is the clock of a process: the API server's clock, ahead or behind.
type skewed struct {
	clock.Clock

	by time.Duration
}

func (c skewed) Now() time.Time                   { return c.Clock.Now().Add(c.by) }
func (c skewed) Since(at time.Time) time.Duration { return c.Now().Sub(at) }

// newClock returns the clock of a new process, wherever that runs.
func (w *world) newClock() clock.Clock {
	if w.skew == 0 {
		return w.clock
	}
	most := int(w.skew / time.Second)
	return skewed{w.clock, time.Duration(w.draw("its clock is ahead by seconds", -most, most)) * time.Second}
}

// noteWait records when, by the world's clock, an agent dated what a claim waits for.
func (w *world) noteWait(was, is *v1alpha1.MachineClaim) {
	if !is.Status.WaitingSince.Equal(was.Status.WaitingSince) || !is.Status.BoundAt.Equal(was.Status.BoundAt) {
		w.since[is.Spec.ClaimID] = w.clock.Now()
	}
}

// checkGivenUp checks a claim whose agent gives its Machine up: the deadline is over by any clock,
// within the difference of two clocks. The owner sees this and makes another claim.
func (w *world) checkGivenUp(o *owner, c *v1alpha1.MachineClaim) {
	id, began, given := c.Spec.ClaimID, w.since[c.Spec.ClaimID], w.failure.ObjectDeadline // all deadlines are equal
	if c.Status.Machine != nil {
		for _, m := range w.machines(c.Spec.NodeGroup) {
			if m.UID == c.Status.Machine.UID && protocol.HasNode(m) {
				w.t.Fatalf("I3: claim %s is given up (%s) though its Machine has a Node\n%s", id, c.Status.Reason, w.describe())
			}
			if m.UID == c.Status.Machine.UID && c.Status.Reason == protocol.ReasonFailed {
				began, given = m.CreationTimestamp.Time, protocol.Patience*given
			}
		}
	}
	if waited := w.clock.Since(began); waited < given-2*w.skew {
		w.t.Fatalf("I3: claim %s is given up (%s) after %s of %s\n%s", id, c.Status.Reason, waited, given, w.describe())
	}
	if c.Status.Reason == protocol.ReasonFailed {
		w.failed[c.Spec.NodeGroup] = w.clock.Now()
	}
	o.alive = false
}

// checkCooling checks a refusal: no group cools down longer than the cool-down plus the difference
// of two clocks.
func (w *world) checkCooling(err error) {
	var (
		noRoom  *NoRoomError
		refused *RefusedError
		said    []eligibility.Refusal
	)
	switch {
	case errors.As(err, &noRoom):
		said = noRoom.Candidates
	case errors.As(err, &refused):
		said = refused.Candidates
	}
	for _, r := range said {
		if since := w.clock.Since(w.failed[r.NodeGroup]); r.Reason == eligibility.CoolingDown && since > w.failure.CoolDown+2*w.skew {
			w.t.Fatalf("I2: %s still cools down %s after a claim failed there\n%s", r.NodeGroup, since, w.describe())
		}
	}
}
