package explain

import (
	"cmp"
	"fmt"
	"strings"

	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

const objectClaim = "Claim"

// connection shows that the agent could not be asked.
func (t *story) connection() {
	err := t.s.Agent.Err
	if err == nil {
		return
	}
	t.add(Step{Object: "Agent", State: Unknown, Message: "was not asked: " + err.Error(), Details: t.s.Agent.Remedy})
	if !t.hidden() {
		return
	}
	switch t.e.State {
	case OK, Blocked: // known without the agent
		return
	case Waiting, Ending, Unknown, Absent:
	}
	verdict := "The state in the hub is unknown because the agent could not be queried."
	if event := newest(t.s.NodeClaimEvents, withReason("WaitingForMachine")); event != nil {
		verdict = fmt.Sprintf("%s Karpenter reported %s: %s", verdict, t.ago(When(event)), sentence(event.Message))
	}
	t.conclude(Unknown, verdict, t.s.Agent.Remedy...)
}

// ClaimPhase returns a phase as people read it, for example Bound.
func ClaimPhase(phase agentv1alpha1.ClaimPhase) string {
	return Camel(strings.TrimPrefix(phase.String(), "CLAIM_PHASE_"))
}

func (t *story) claim() {
	if t.hidden() {
		return
	}
	claim, machine := t.claimed()
	if claim == nil {
		t.noClaim(machine)
		return
	}
	step := Step{Object: objectClaim, Name: cmp.Or(claim.GetDisplayName(), claim.GetClaimId()), State: OK}
	phase := ClaimPhase(claim.GetPhase())
	step.Message = joined(" ", phase, phaseSince(t, claim))
	if why := joined(": ", claim.GetReason(), claim.GetMessage()); why != "" && claim.GetReason() != phase {
		step.Details = append(step.Details, why)
	}
	switch claim.GetPhase() {
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING:
		step.State = t.claimPending(claim)
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND:
		step.State = t.claimBound(claim)
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		step.State = Ending
		t.claimReleasing(claim)
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		step.State = Ending
		t.claimEnded(claim)
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_UNSPECIFIED:
	}
	t.add(step)
}

// phaseSince says for how long a claim has been in its phase.
func phaseSince(t *story, claim *agentv1alpha1.Claim) string {
	at := claim.GetCreatedAt()
	switch claim.GetPhase() {
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		at = claim.GetReleasedAt()
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		at = claim.GetEndedAt()
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND:
		for _, event := range claim.GetHistory() {
			if event.GetReason() == claimreasons.Bound {
				at = event.GetTime()
			}
		}
	default:
	}
	if !at.IsValid() {
		return ""
	}
	if claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return t.ago(at.AsTime())
	}
	return "for " + Age(t.s.Now.Sub(at.AsTime()))
}

func (t *story) noClaim(machine *agentv1alpha1.Machine) {
	nodeClaim := t.s.NodeClaim
	switch {
	case nodeClaim == nil && machine == nil:
		return
	case nodeClaim == nil && machine.GetClaimId() != "":
		t.add(Step{Object: objectClaim, Name: machine.GetClaimId(), State: Unknown, Message: "was not read"})
	case nodeClaim == nil && machine.GetOwner() == agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR:
		t.add(Step{Object: objectClaim, State: OK, Message: "there is none: the machine belongs to the user (it is part of the floor)"})
		t.conclude(OK, "The machine belongs to the user: it is part of the floor, which Karpenter neither creates nor removes.",
			"To give it to Karpenter, set spec.adoption of the ClusterAPINodeClass: kubectl capi adopt")
	case nodeClaim == nil:
		t.add(Step{Object: objectClaim, State: OK, Message: "there is none: the machine is part of the floor, or a spare"})
		t.conclude(OK, "The machine has no claim: it is part of the floor, or a spare that the next claim gets.",
			"See the size of the floor: kubectl capi groups")
	case !nodeClaim.StatusConditions().IsTrue(karpv1.ConditionTypeLaunched):
		t.add(Step{Object: objectClaim, State: Absent, Message: "there is none yet"})
	case !launchedHere(nodeClaim):
		t.add(Step{Object: objectClaim, State: Absent, Message: "there is none: another provider launched the NodeClaim"})
		t.conclude(Blocked, "Another provider launched the NodeClaim, and its machine has not been adopted.",
			"See what would be adopted, and what is in the way: kubectl capi adopt")
	default:
		t.add(Step{Object: objectClaim, State: Absent, Message: "the agent knows none"})
		if nodeClaim.DeletionTimestamp.IsZero() {
			t.conclude(Blocked, "The NodeClaim was launched, but the agent has no claim for it.",
				"See whether the Cluster was moved or restored (docs/disaster-recovery.md), and whether this is the right agent: kubectl capi claims --all")
		}
	}
}

func (t *story) claimPending(claim *agentv1alpha1.Claim) State {
	group := t.group(claim.GetNodeGroupId())
	reason := wire.AvailabilityFor(group, v1alpha1.Holder).GetReason()
	blocked := unavailable(group, t.s.Now)
	switch {
	case claim.GetReason() == claimreasons.WriteRefused:
		t.conclude(Blocked, "The hub's API server refuses what the agent writes: "+sentence(claim.GetMessage()),
			"Correct the webhook, policy or quota that refuses it.")
		return Blocked
	case claim.GetAdoptMachine() != "":
		t.conclude(Waiting, fmt.Sprintf("The claim is adopting Machine %s.", claim.GetAdoptMachine()))
		return Waiting
	case group != nil && (reason == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED ||
		reason == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED ||
		reason == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_LOWERED):
		t.conclude(Blocked, fmt.Sprintf("Node group %s creates no machine for the claim. %s", group.GetId(), sentence(blocked)), remedy(group))
		return Blocked
	}
	namespace, name, _ := strings.Cut(claim.GetNodeGroupId(), "/")
	t.conclude(Waiting, fmt.Sprintf("The claim waits for Cluster API to create a Machine of node group %s.", claim.GetNodeGroupId()),
		fmt.Sprintf("If it takes minutes: kubectl --context <hub> -n %s describe machinedeployment %s", namespace, name))
	return Waiting
}

func (t *story) claimBound(claim *agentv1alpha1.Claim) State {
	if claim.GetReason() == claimreasons.OwnerMissing {
		t.conclude(Blocked, "The claim's owner is missing, and its machine is kept: "+sentence(claim.GetMessage()),
			"Decide whether it is still needed; release it by hand if not (docs/troubleshooting.md, claims whose owner is missing).")
		return Blocked
	}
	return OK
}

func (t *story) claimReleasing(claim *agentv1alpha1.Claim) {
	why := sentence(cmp.Or(claim.GetMessage(), claim.GetReason()))
	switch {
	case claim.GetReturned():
		t.conclude(Ending, "The claim is ending, and its machine is returned to the user.")
	case claim.GetFailedAt() != nil:
		t.conclude(Ending, "The machine was given up as failed: "+why,
			"Correct what the message says. The node group refuses claims for its cool-down; Karpenter then tries again.")
	case claim.GetReason() == claimreasons.Late:
		t.conclude(Ending, "The machine is late, and the next claim gets it: "+why,
			"If machines regularly take that long, raise spec.maxNodeProvisionTime of the ClusterAPINodeClass (docs/claims.md).")
	default:
		t.conclude(Ending, "The machine is being released: "+why)
	}
}

// ended describes the end of a claim, by reason.
var ended = map[string]string{
	claimreasons.MachineLost:   "Another actor deleted its Machine: a user, a MachineHealthCheck or a rollout.",
	claimreasons.NodeGroupGone: "Its MachineDeployment was deleted.",
	claimreasons.HandedOver:    "Its machine was late and was handed over to the next claim.",
	claimreasons.Returned:      "Its machine was returned to the user.",
	claimreasons.Cancelled:     "It was released before it had a machine.",
	claimreasons.Released:      "Its machine is gone.",
	claimreasons.NeverMade:     "It was released before it was created.",
	claimreasons.StateLost:     "It was moved or restored without its status.",
}

func (t *story) claimEnded(claim *agentv1alpha1.Claim) {
	why := joined(" ", ended[claim.GetReason()], sentence(claim.GetMessage()))
	var next []string
	switch claim.GetReason() {
	case claimreasons.Failed:
		why = "The machine never came: " + sentence(claim.GetMessage())
		next = []string{"Correct what the message says. The node group refuses claims for its cool-down; Karpenter then tries again."}
	case claimreasons.NoRoom, claimreasons.Refused:
		next = []string{"See why: kubectl capi groups"}
	}
	verdict := fmt.Sprintf("The claim has ended (%s). %s", claim.GetReason(), why)
	if t.s.NodeClaim == nil && t.s.Entry == Pod {
		verdict = fmt.Sprintf("The last attempt, NodeClaim %s, has ended (%s). %s", cmp.Or(claim.GetDisplayName(), t.s.Gone), claim.GetReason(), why)
		if t.e.State == Blocked { // what keeps the next attempt back is the newer cause
			t.e.Verdict += " " + verdict
			return
		}
	}
	t.conclude(Ending, strings.TrimSpace(verdict), next...)
}

// nodeGroup shows the node group of the claim or machine.
func (t *story) nodeGroup() {
	claim, machine := t.claimed()
	group := t.group(cmp.Or(claim.GetNodeGroupId(), machine.GetNodeGroupId()))
	if group == nil || t.s.Agent.Err != nil {
		return
	}
	step := Step{Object: "NodeGroup", Name: group.GetId(), State: OK, Message: Size(group)}
	if why := unavailable(group, t.s.Now); why != "" {
		step.State, step.Details = Blocked, append(step.Details, "accepts no claims: "+why)
	}
	if group.GetRollingOut() {
		step.Details = append(step.Details, "Cluster API is replacing its machines after a template change")
	}
	if n := len(group.GetProblems()); n > 0 {
		step.Details = append(step.Details, fmt.Sprintf("%d values of its description cannot be used: kubectl capi groups %s", n, group.GetId()))
	}
	t.add(step)
}

// Size describes how many machines a node group has and may have.
func Size(group *agentv1alpha1.NodeGroup) string {
	most := "no max size"
	if group.MaxSize != nil {
		most = fmt.Sprintf("at most %d", group.GetMaxSize())
	}
	return fmt.Sprintf("machines: %d, at least %d, %s; floor: %d", group.GetReplicas(), group.GetMinSize(), most, group.GetFloorReplicas())
}
