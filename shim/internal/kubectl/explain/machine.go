package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func (t *story) machine() {
	claim, machine := t.claimed()
	if machine == nil || claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return
	}
	name := machine.GetCluster().GetNamespace() + "/" + machine.GetName()
	describe := fmt.Sprintf("kubectl --context <hub> -n %s describe machine %s", machine.GetCluster().GetNamespace(), machine.GetName())
	step := Step{
		Object: "Machine", Name: name, State: Waiting,
		Message: joined(", ", machine.GetPhase(), prefixed("made ", t.ago(machine.GetCreatedAt().AsTime()))),
	}
	if id := machine.GetProviderId(); id != "" {
		step.Details = append(step.Details, "provider ID "+id)
	}
	if !machine.GetUpToDate() && machine.GetNotUpToDateMessage() != "" {
		step.Details = append(step.Details, "not up to date: "+machine.GetNotUpToDateMessage())
	}
	infrastructure := joined(": ", machine.GetInfrastructureReason(), machine.GetInfrastructureMessage())
	releasing := claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
	switch {
	case machine.GetDeletedAt() != nil:
		step.State = Ending
		t.add(step)
		t.machineGoes(claim, machine, describe)
		return
	case machine.GetNodeName() != "" && t.s.Node != nil, machine.GetNodeName() != "" && t.s.NodeClaim == nil:
		step.State = OK
	case machine.GetProviderId() == "":
		t.add(step)
		t.infrastructure(machine, infrastructure, releasing, describe)
		return
	case releasing:
	case t.s.Node == nil:
		verdict := fmt.Sprintf("The instance of Machine %s exists, and its Node has not joined.", machine.GetName())
		if claim.GetReason() == claimreasons.NodeNotSeen {
			verdict += " " + sentence(claim.GetMessage())
		}
		t.conclude(Waiting, verdict, describe,
			"If it does not join within minutes, read the instance's boot log: bootstrap, network, and the kubelet's way to this API server.")
	}
	t.add(step)
	if infrastructure != "" {
		t.add(Step{Object: "Infrastructure", State: Waiting, Message: infrastructure})
	}
}

// infrastructure explains a machine without a provider ID.
func (t *story) infrastructure(machine *agentv1alpha1.Machine, says string, releasing bool, describe string) {
	step := Step{Object: "Infrastructure", State: Waiting, Message: cmp.Or(says, "reports nothing yet")}
	verdict := fmt.Sprintf("Machine %s waits for its infrastructure, which reports nothing yet.", machine.GetName())
	next := []string{describe}
	if says != "" {
		verdict = fmt.Sprintf("Machine %s waits for its infrastructure: %s", machine.GetName(), sentence(says))
		next = append(next, "If the message is an error, correct its cause. "+
			"The agent gives the machine up at its deadline at the latest (docs/claims.md).")
	}
	if releasing {
		t.add(step)
		return
	}
	t.conclude(Waiting, verdict, next...)
	t.add(step)
}

// hooks is what a step of a Machine's deletion waits for, by Cluster API's reason.
var hooks = map[string]string{
	"WaitingForPreDrainHook": "A pre-drain hook holds the Machine: an annotation pre-drain.delete.hook.machine.cluster.x-k8s.io/… " +
		"that another controller removes.",
	"DrainingNode":           "Cluster API drains the Node.",
	"WaitingForVolumeDetach": "The Node's volumes are still attached.",
	"WaitingForPreTerminateHook": "A pre-terminate hook holds the Machine: an annotation pre-terminate.delete.hook.machine.cluster.x-k8s.io/… " +
		"that another controller removes.",
	"WaitingForInfrastructureDeletion": "The infrastructure provider is removing the instance.",
	"WaitingForBootstrapDeletion":      "The bootstrap provider is removing its object.",
	"DeletingNode":                     "Cluster API is deleting the Node.",
}

// machineGoes explains a machine that is being deleted.
func (t *story) machineGoes(claim *agentv1alpha1.Claim, machine *agentv1alpha1.Machine, describe string) {
	says := joined(": ", machine.GetDeletingReason(), machine.GetDeletingMessage())
	step := Step{Object: "Deletion", State: Ending, Message: fmt.Sprintf("pending for %s: %s", Age(t.s.Now.Sub(machine.GetDeletedAt().AsTime())),
		cmp.Or(says, "Cluster API reports no cause"))}
	t.add(step)
	who := ""
	if claim.GetReason() == claimreasons.MachineDeleting {
		who = " Another actor deletes it, not Karpenter."
	}
	verdict := fmt.Sprintf("Machine %s is being deleted.%s %s", machine.GetName(), who, joined(" ", hooks[machine.GetDeletingReason()],
		sentence(machine.GetDeletingMessage())))
	next := []string{describe}
	if machine.GetDeletingReason() == "DrainingNode" && machine.GetNodeName() != "" {
		next = append(next, fmt.Sprintf("See which pods are left: kubectl get pods -A --field-selector spec.nodeName=%s", machine.GetNodeName()),
			"See which PodDisruptionBudgets allow no disruption: kubectl get pdb -A")
	}
	t.conclude(Ending, strings.TrimSpace(verdict), next...)
}

// uninitialized is Cluster API's taint on Nodes whose Machine it has not found yet.
const uninitialized = "node.cluster.x-k8s.io/uninitialized"

func (t *story) node() {
	node := t.s.Node
	if node == nil {
		if t.s.NodeClaim != nil && t.s.NodeClaim.DeletionTimestamp.IsZero() {
			t.add(Step{Object: "Node", State: Absent, Message: "has not joined"})
		}
		return
	}
	step := Step{Object: "Node", Name: node.Name, State: OK, Message: "is ready"}
	claim, machine := t.claimed()
	describe := "kubectl describe node " + node.Name
	ready := nodeReady(node)
	switch {
	case !node.DeletionTimestamp.IsZero():
		step.State, step.Message = Ending, "has been terminating for "+Age(t.s.Now.Sub(node.DeletionTimestamp.Time))
	case machine.GetProviderId() != "" && node.Spec.ProviderID != "" && machine.GetProviderId() != node.Spec.ProviderID:
		step.State, step.Message = Blocked, fmt.Sprintf("has the provider ID %s, and its Machine %s", node.Spec.ProviderID, machine.GetProviderId())
		t.settle(Blocked, fmt.Sprintf("The provider IDs of Node %s and of its Machine differ, so that they are never matched.", node.Name),
			"Correct the cloud provider's or the kubelet's --provider-id of this node group.")
	case has(node, karpv1.UnregisteredTaintKey) && claim == nil && machine.GetClaimId() == "" && t.s.NodeClaim == nil && !t.hidden():
		step.State, step.Message = Blocked, "has the taint karpenter.sh/unregistered, and no NodeClaim"
		t.conclude(Blocked, "The Node joined with Karpenter's taint, and its Machine has no claim: no pods run there. "+
			"A spare is soon claimed or removed. If the Machine is part of the floor, Karpenter removes the taint within a minute.",
			"If it stays, see whether the node group is paused, or: kubectl taint node "+node.Name+" karpenter.sh/unregistered-")
	case ready != "":
		step.State, step.Message = Waiting, "is not ready: "+ready
		if t.s.NodeClaim == nil || t.s.NodeClaim.StatusConditions().IsTrue(karpv1.ConditionTypeInitialized) {
			t.conclude(Blocked, fmt.Sprintf("Node %s is not ready: %s", node.Name, sentence(ready)), describe)
		} else {
			t.conclude(Waiting, fmt.Sprintf("Node %s has joined and is not ready yet: %s", node.Name, sentence(ready)), describe)
		}
	case has(node, uninitialized):
		step.State, step.Message = Waiting, "carries the taint "+uninitialized
		t.conclude(Waiting, "The Node waits for Cluster API to find its Machine and to remove its taint.",
			"If the taint stays, Cluster API cannot reach this cluster (the Cluster's condition RemoteConnectionProbe), or the Machine is paused.")
	case has(node, karpv1.DisruptedTaintKey):
		step.State, step.Message = Ending, "takes no more pods: Karpenter removes it"
	case node.Spec.Unschedulable:
		step.Details = append(step.Details, "is cordoned")
	}
	if taints := otherTaints(node); len(taints) > 0 {
		step.Details = append(step.Details, "taints: "+some(taints))
	}
	if missing := missingAnnotation(node); missing && t.s.Agent.Err == nil && machine == nil && t.s.Entry == Node {
		t.conclude(OK, "Cluster API has not matched the Node with a Machine of a node group: it belongs to the control plane, to a MachineDeployment "+
			"without the label node.cluster.x-k8s.io/karpenter-member, or to no Machine at all.", "kubectl capi groups")
	}
	t.add(step)
}

// MachineAnnotation is Cluster API's annotation of a Node with the name of its Machine.
const MachineAnnotation = "cluster.x-k8s.io/machine"

func missingAnnotation(node *corev1.Node) bool { return node.Annotations[MachineAnnotation] == "" }

// nodeReady returns why a Node is not ready, or "".
func nodeReady(node *corev1.Node) string {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			if condition.Status == corev1.ConditionTrue {
				return ""
			}
			return joined(": ", condition.Reason, condition.Message)
		}
	}
	return "the kubelet has reported nothing"
}

func has(node *corev1.Node, taint string) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taint })
}

func otherTaints(node *corev1.Node) []string {
	var taints []string
	for _, taint := range node.Spec.Taints {
		taints = append(taints, taint.ToString())
	}
	return taints
}

// hub adds what the management cluster's objects say beyond the agent.
func (t *story) hub() {
	if t.s.Hub.Err != nil {
		t.add(Step{Object: "Hub", State: Unknown, Message: "was not read: " + t.s.Hub.Err.Error()})
		return
	}
	for _, note := range t.s.Hub.Notes {
		t.add(Step{Object: "Hub", Name: note.Object, State: t.e.State, Message: note.Message})
	}
}
