package failedmachine

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// step is a machine's progress from claim to Node.
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

// comes reports whether a Node may still join, so that core must wait for it: the agent alone
// decides for how long.
//
// It returns false, which leaves the timeout to core, in two cases. While the node group is paused,
// other groups may have room. If the agent cannot be sure that there is no Node, this cluster can.
func (c *Controller) comes(claim *agentv1alpha1.Claim) bool {
	if claim.GetReason() == claimreasons.NodeNotSeen {
		return false
	}
	group, known := c.NodeGroups.Get(claim.GetNodeGroupId())
	return !known || wire.AvailabilityFor(group, v1alpha1.Holder).GetReason() != agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED
}

// joinedAt returns when the machine's Node joined, according to Cluster API or this cluster, or the
// zero time if it has not.
func (c *Controller) joinedAt(ctx context.Context, nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) (time.Time, error) {
	var at time.Time
	for _, event := range claim.GetHistory() {
		if event.GetReason() == claimreasons.NodeJoined {
			at = event.GetTime().AsTime()
		}
	}
	if stepOf(claim) == joined && at.IsZero() {
		at = claim.GetMachine().GetCreatedAt().AsTime()
	}
	if !at.IsZero() || stepOf(claim) != provisioned {
		return at, nil
	}
	nodes, err := nodeclaimutils.AllNodesForNodeClaim(ctx, c.Kube, nodeClaim)
	for _, node := range nodes {
		at = node.CreationTimestamp.Time
	}
	return at, err
}

// recordOf returns the record of a NodeClaim, not that of a former one with its name. It must be
// called with c.mu held.
func (c *Controller) recordOf(nodeClaim *karpv1.NodeClaim) record {
	if r := c.records[nodeClaim.Name]; r.uid == nodeClaim.UID {
		return r
	}
	return record{uid: nodeClaim.UID}
}

func (c *Controller) forget(nodeClaim string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.records, nodeClaim)
}

// whereabouts describes the machine's progress, with the reason that the infrastructure or the
// agent gives.
func whereabouts(claim *agentv1alpha1.Claim) string {
	machine := claim.GetMachine()
	var what string
	switch stepOf(claim) {
	case claimed:
		what = fmt.Sprintf("node group %s has not created a machine for it", claim.GetNodeGroupId())
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

// publishProgress publishes the machine's progress on a NodeClaim that has waited for long,
// whenever it changes.
func (c *Controller) publishProgress(nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) {
	if c.Clock.Since(nodeClaim.CreationTimestamp.Time) < publishAfter || !c.Claims.State().Connected {
		return
	}
	where := whereabouts(claim)
	c.mu.Lock()
	r := c.recordOf(nodeClaim)
	news := r.published != where
	r.published = where
	c.records[nodeClaim.Name] = r
	c.mu.Unlock()
	if !news {
		return
	}
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeNormal,
		Reason:         "WaitingForMachine",
		Message:        lo.Substring("Still waiting: "+where+".", 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID), where},
	})
}

// released reports whether the agent has released the claim, which then never gets a Node.
func released(claim *agentv1alpha1.Claim) bool {
	phase := claim.GetPhase()
	return phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING || phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
}

// These are reasons for which a NodeClaim is given up. The others are those of claims that have
// ended.
const (
	// machineFailed is also the reason of events about a machine that the agent gave up.
	machineFailed  = "MachineFailed"
	machineDeleted = "MachineDeleted"
	claimUnknown   = "ClaimUnknown"
	// claimEnded and claimReleased stand for the reason of a claim that has none.
	claimEnded    = "ClaimEnded"
	claimReleased = "ClaimReleased"
)

// verdict returns why a released claim is of no use to its NodeClaim: the reason for the event, and
// a sentence.
func verdict(claim *agentv1alpha1.Claim) (reason, message string) {
	why := lo.CoalesceOrEmpty(claim.GetMessage(), claim.GetReason(), "it reports nothing else")
	switch {
	case claim.GetFailedAt() != nil:
		message = fmt.Sprintf("The hub gave up a machine of node group %s: %s.", claim.GetNodeGroupId(), why)
		if report := infrastructure(claim); report != "" && !strings.Contains(why, "infrastructure of Machine") {
			message = fmt.Sprintf("%s Its infrastructure reports %s.", message, report)
		}
		return machineFailed, message
	case claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		message = fmt.Sprintf("The claim on a machine of node group %s has ended: %s", claim.GetNodeGroupId(), why)
		return lo.CoalesceOrEmpty(claim.GetReason(), claimEnded), message
	}
	message = fmt.Sprintf("The claim on a machine of node group %s was released: %s", claim.GetNodeGroupId(), why)
	return lo.CoalesceOrEmpty(claim.GetReason(), claimReleased), message
}

// infrastructure returns the reason and message of the infrastructure provider for the machine, or
// "".
func infrastructure(claim *agentv1alpha1.Claim) string {
	machine := claim.GetMachine()
	return strings.Trim(machine.GetInfrastructureReason()+": "+machine.GetInfrastructureMessage(), ": ")
}
