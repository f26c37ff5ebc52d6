package failedmachine

import (
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// step is how far a machine is, from the claim to the Node.
type step int

const (
	claimed step = iota
	bound
	provisioned
	joined
)

func stepOf(claim *agentv1alpha1.Claim) step {
	machine := claim.GetMachine()
	switch {
	case machine.GetNodeName() != "":
		return joined
	case machine.GetProviderId() != "":
		return provisioned
	case machine != nil:
		return bound
	}
	return claimed
}

// deadlineOf returns when the NodeClaim is given up unless its machine gets on. It counts from the machine's last step: as the
// claim's history tells it, or as this process saw it. A restart forgets what was seen and thus gives more time, never less;
// the total is bounded from the NodeClaim's creation. It is at least one deadline after the agent was last silent, as what happened meanwhile is
// not known.
func (c *Controller) deadlineOf(nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim, now time.Time) time.Time {
	last := nodeClaim.CreationTimestamp.Time
	for _, at := range []time.Time{
		claim.GetCreatedAt().AsTime(), claim.GetMachine().GetCreatedAt().AsTime(), c.observe(nodeClaim.UID, stepOf(claim), now),
	} {
		if at.After(last) {
			last = at
		}
	}
	for _, event := range claim.GetHistory() {
		if at := event.GetTime().AsTime(); at.After(last) {
			last = at
		}
	}
	deadline := last.Add(c.deadline)
	if final := nodeClaim.CreationTimestamp.Add(totalDeadlines * c.deadline); deadline.After(final) {
		deadline = final
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if heard := c.silent.Add(c.deadline); heard.After(deadline) {
		return heard
	}
	return deadline
}

// listen notes that nothing is heard of the agent for a while. A process that begins does not know what was heard before.
func (c *Controller) listen(state agentclient.State) {
	now := c.clock.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent.IsZero() || !state.Connected && now.Sub(state.Since) >= look {
		c.silent = now
	}
}

// observe returns since when the machine has been known to be at its step; the zero time for the first step seen, as it may
// have been reached long ago.
func (c *Controller) observe(uid types.UID, step step, now time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, ok := c.steps[uid]
	switch {
	case !ok:
		c.steps[uid] = reached{step: step}
	case step > before.step:
		c.steps[uid] = reached{step: step, at: now, told: before.told}
	}
	return c.steps[uid].at
}

func (c *Controller) forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.steps, uid)
}

// stuck says what the machine was waiting for.
func stuck(claim *agentv1alpha1.Claim, deadline time.Duration) string {
	return fmt.Sprintf("No progress for %s: %s.", deadline, whereabouts(claim))
}

// whereabouts says how far the machine is, and what is said about it.
func whereabouts(claim *agentv1alpha1.Claim) string {
	machine := claim.GetMachine()
	var what string
	switch stepOf(claim) {
	case claimed:
		what = fmt.Sprintf("node group %s has not made a machine for it", claim.GetNodeGroupId())
	case bound:
		what = fmt.Sprintf("machine %s has no provider ID", machine.GetName())
	case provisioned:
		what = fmt.Sprintf("machine %s has not joined the cluster", machine.GetName())
	case joined:
		what = fmt.Sprintf("Node %s of machine %s has not been registered", machine.GetNodeName(), machine.GetName())
	}
	why := infrastructure(claim)
	if why == "" {
		why = strings.Trim(strings.Join([]string{claim.GetReason(), claim.GetMessage()}, ": "), ": ")
	}
	if why != "" {
		what += " (" + why + ")"
	}
	return what
}

// tell publishes, on a NodeClaim that waits for long, where its machine is, whenever that changes.
func (c *Controller) tell(nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) {
	if c.clock.Since(nodeClaim.CreationTimestamp.Time) < tellAfter || !c.claims.State().Connected {
		return
	}
	where := whereabouts(claim)
	c.mu.Lock()
	known, seen := c.steps[nodeClaim.UID]
	news := seen && known.told != where
	if news {
		known.told = where
		c.steps[nodeClaim.UID] = known
	}
	c.mu.Unlock()
	if !news {
		return
	}
	c.recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeNormal,
		Reason:         "WaitingForMachine",
		Message:        lo.Substring("Still waiting: "+where+".", 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID), where},
	})
}

// released reports whether the agent has taken the claim back: it will get no Node any more.
func released(claim *agentv1alpha1.Claim) bool {
	phase := claim.GetPhase()
	return phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING || phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
}

// verdict says why a claim that was taken back is of no use to its NodeClaim: the reason for the event, and a sentence.
func verdict(claim *agentv1alpha1.Claim) (reason, message string) {
	why := lo.CoalesceOrEmpty(claim.GetMessage(), claim.GetReason(), "it says nothing more")
	switch {
	case claim.GetFailedAt() != nil:
		message = fmt.Sprintf("The management cluster gave up a machine of node group %s: %s.", claim.GetNodeGroupId(), why)
		if report := infrastructure(claim); report != "" && !strings.Contains(why, "infrastructure of Machine") {
			message = fmt.Sprintf("%s Its infrastructure reports %s.", message, report)
		}
		return "MachineFailed", message
	case claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		message = fmt.Sprintf("The claim on a machine of node group %s has ended: %s", claim.GetNodeGroupId(), why)
		return lo.CoalesceOrEmpty(claim.GetReason(), "ClaimEnded"), message
	}
	message = fmt.Sprintf("The claim on a machine of node group %s was released: %s", claim.GetNodeGroupId(), why)
	return lo.CoalesceOrEmpty(claim.GetReason(), "ClaimReleased"), message
}

// infrastructure returns what the infrastructure provider says about the machine, or "".
func infrastructure(claim *agentv1alpha1.Claim) string {
	machine := claim.GetMachine()
	return strings.Trim(machine.GetInfrastructureReason()+": "+machine.GetInfrastructureMessage(), ": ")
}
