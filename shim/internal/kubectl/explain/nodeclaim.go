package explain

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/awslabs/operatorpkg/status"
	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

// karpenter shows what concerns every object: a Karpenter that does not run or that has lost the
// agent.
func (t *story) karpenter() {
	if shim := t.s.Shim; shim != nil && shim.Ready == 0 {
		message := fmt.Sprintf("%d of %d pods are ready", shim.Ready, shim.Wanted)
		t.add(Step{Object: "Karpenter", Name: shim.Name, State: Blocked, Message: message})
		if t.e.State != OK {
			t.settle(Blocked, fmt.Sprintf("Karpenter does not run: of Deployment %s, %s.", shim.Name, message),
				"kubectl -n "+namespaceOf(shim.Name)+" get pods")
		}
	}
	if t.s.NodeClaim == nil {
		return // the NodePools' steps say it
	}
	ref := t.s.NodeClaim.Spec.NodeClassRef
	i := slices.IndexFunc(t.s.NodeClasses, func(c v1alpha1.ClusterAPINodeClass) bool { return ref != nil && c.Name == ref.Name })
	if i < 0 || classTrouble(&t.s.NodeClasses[i]) == "" {
		return
	}
	class := &t.s.NodeClasses[i]
	t.add(Step{Object: "NodeClass", Name: class.Name, State: Blocked, Message: classTrouble(class)})
	if t.e.State != OK {
		t.conclude(Blocked, fmt.Sprintf("ClusterAPINodeClass %s is not ready: %s", class.Name, sentence(classTrouble(class))), classRemedy(class)...)
	}
}

func namespaceOf(name string) string {
	for i := range name {
		if name[i] == '/' {
			return name[:i]
		}
	}
	return name
}

func (t *story) nodeClaim() {
	nodeClaim := t.s.NodeClaim
	if nodeClaim == nil {
		if t.s.Gone != "" {
			t.add(Step{Object: "NodeClaim", Name: t.s.Gone, State: Absent, Message: "does not exist any more"})
		} else if t.s.Entry != Pod {
			t.add(Step{Object: "NodeClaim", State: Absent, Message: "there is none: Karpenter does not manage it"})
		}
		return
	}
	step := Step{Object: "NodeClaim", Name: nodeClaim.Name, State: Waiting, Details: t.nodeClaimDetails(nodeClaim)}
	conditions := nodeClaim.StatusConditions()
	launched, registered := conditions.Get(karpv1.ConditionTypeLaunched), conditions.Get(karpv1.ConditionTypeRegistered)
	initialized := conditions.Get(karpv1.ConditionTypeInitialized)
	describe := "kubectl describe nodeclaim " + nodeClaim.Name
	switch {
	case !nodeClaim.DeletionTimestamp.IsZero():
		step.State = Ending
		step.Message = "has been terminating for " + Age(t.s.Now.Sub(nodeClaim.DeletionTimestamp.Time))
		t.deleting(&step, nodeClaim)
	case v1alpha1.ReturnsMachine(nodeClaim):
		step.State, step.Message = Ending, "returns its machine to the user"
		t.conclude(Ending, "The NodeClaim is returning its machine to the user.", describe)
		if event := newest(t.s.NodeClaimEvents, withReason("MachineNotReturned")); event != nil {
			t.conclude(Blocked, "The machine cannot be returned: "+sentence(event.Message), describe)
		}
	case !launched.IsTrue():
		step.Message = "has not been launched for " + Age(t.s.Now.Sub(nodeClaim.CreationTimestamp.Time))
		step.State = t.launching(launched)
		if why := conditionText(launched); why != "" {
			step.Details = append(step.Details, why)
		}
	case !registered.IsTrue():
		step.Message = "was launched " + t.ago(launched.LastTransitionTime.Time) + ", and waits for its Node"
		t.conclude(Waiting, fmt.Sprintf("NodeClaim %s waits for its Node.", nodeClaim.Name), describe)
		if registered.IsFalse() {
			step.State = Blocked
			t.conclude(Blocked, "The Node cannot be registered: "+sentence(conditionText(registered)), describe)
		}
	case !initialized.IsTrue():
		step.Message = "has its Node " + nodeClaim.Status.NodeName + ", which pods cannot use yet"
		if why := conditionText(initialized); why != "" {
			step.Details = append(step.Details, why)
		}
		t.conclude(Waiting, "The Node has joined and is not usable yet: "+sentence(conditionText(initialized)), initializing(initialized, describe)...)
	default:
		step.State, step.Message = OK, "has its Node "+nodeClaim.Status.NodeName
	}
	t.add(step)
	t.adoption(nodeClaim)
}

// nodeClaimDetails lists what was asked for and what Karpenter thinks of the NodeClaim.
func (t *story) nodeClaimDetails(nodeClaim *karpv1.NodeClaim) []string {
	var details []string
	labels := nodeClaim.Labels
	if text := joined(", ", prefixed("NodePool ", labels[karpv1.NodePoolLabelKey]), prefixed("type ", labels[corev1.LabelInstanceTypeStable]),
		prefixed("zone ", labels[corev1.LabelTopologyZone]), labels[karpv1.CapacityTypeLabelKey]); text != "" {
		details = append(details, text)
	}
	conditions := nodeClaim.StatusConditions()
	if why := conditions.Get(karpv1.ConditionTypeDisruptionReason); why.IsTrue() {
		details = append(details, "Karpenter removes it: "+why.Reason)
	} else if drifted := conditions.Get(karpv1.ConditionTypeDrifted); drifted.IsTrue() {
		details = append(details, "drifted: "+joined(": ", drifted.Reason, drifted.Message))
	}
	if labels[v1alpha1.AdoptedLabel] == "true" {
		details = append(details, "adopted: its machine existed before it")
	}
	return details
}

func prefixed(prefix, text string) string {
	if text == "" {
		return ""
	}
	return prefix + text
}

func conditionText(condition *status.Condition) string {
	if condition == nil || condition.IsTrue() || condition.Reason == "AwaitingReconciliation" {
		return ""
	}
	if condition.Reason == condition.Message {
		return condition.Reason
	}
	return joined(": ", condition.Reason, condition.Message)
}

// launching concludes for a NodeClaim that core has not launched.
func (t *story) launching(launched *status.Condition) State {
	why := conditionText(launched)
	if why == "" {
		t.conclude(Waiting, "The NodeClaim is new: Karpenter is about to claim a machine for it.")
		return Waiting
	}
	next := map[string][]string{
		"AgentUnreachable": {
			"See whether the agent runs and can be reached from Karpenter's pods: kubectl --context <hub> -n capi-agent-system get pods",
		},
		"AgentRefused": {
			"Compare the certificate of Karpenter with --cluster-namespace and --cluster-name, and with the agent's policy (docs/install.md).",
			"If the message has the UIDs of two clusters, see \"Claims whose owner is missing\" in docs/troubleshooting.md.",
		},
		"NodeClassNotFound": {
			"Create the ClusterAPINodeClass that spec.nodeClassRef names, or delete the NodeClaim.",
		},
		"NodeGroupsNotFound": {"See what the agent offers: kubectl capi groups"},
		"AdoptionRefused":    {"Make the machine adoptable, as the message says, or delete the NodeClaim."},
	}[launched.Reason]
	t.conclude(Blocked, "No machine could be claimed: "+sentence(why), next...)
	return Blocked
}

// initializing is what to do about a Node that is registered and not initialized.
func initializing(initialized *status.Condition, describe string) []string {
	switch initialized.Reason {
	case "NodeNotReady":
		return []string{"The step Node has the kubelet's reason, usually the network plugin."}
	case "StartupTaintsExist", "KnownEphemeralTaintsExist":
		return []string{"Find out who should remove the taint. Cluster API removes node.cluster.x-k8s.io/uninitialized once it reaches this cluster " +
			"(docs/troubleshooting.md)."}
	case "ResourceNotRegistered":
		return []string{"See whether the device plugin for the resource runs on the Node."}
	default:
		return []string{describe}
	}
}

// deleting describes how far core is with the removal of a NodeClaim.
func (t *story) deleting(step *Step, nodeClaim *karpv1.NodeClaim) {
	conditions := nodeClaim.StatusConditions()
	drained, detached := conditions.Get(karpv1.ConditionTypeDrained), conditions.Get(karpv1.ConditionTypeVolumesDetached)
	describe := "kubectl describe nodeclaim " + nodeClaim.Name
	if event := newest(t.s.NodeClaimEvents, withReason("MachineUnknown", "ReleaseLimited", "DuplicateNodeClaim")); event != nil {
		step.Details = append(step.Details, joined(": ", event.Reason, event.Message))
		t.settle(Blocked, "The NodeClaim cannot be deleted: "+sentence(event.Message), describe)
		return
	}
	switch {
	case t.s.Node == nil || nodeClaim.Status.NodeName == "":
		t.conclude(Ending, "The NodeClaim is being deleted; it has no Node to drain.")
	case !drained.IsTrue():
		step.Details = append(step.Details, prefixed("draining: ", conditionText(drained)))
		t.conclude(Ending, "Karpenter is still draining the Node: "+sentence(cmp.Or(conditionText(drained), "pods are being evicted")),
			fmt.Sprintf("See which pods are left: kubectl get pods -A --field-selector spec.nodeName=%s", nodeClaim.Status.NodeName),
			"See which PodDisruptionBudgets allow no disruption: kubectl get pdb -A")
	case detached != nil && !detached.IsTrue() && conditionText(detached) != "":
		step.Details = append(step.Details, "volumes: "+conditionText(detached))
		t.conclude(Ending, "The Node is drained, and its volumes are still attached.",
			"kubectl get volumeattachments")
	default:
		t.conclude(Ending, "The Node is drained; the machine is being released.")
	}
	step.Details = slices.DeleteFunc(step.Details, func(s string) bool { return s == "" })
}

// adoption adds what hinders the adoption of the NodeClaim's machine.
func (t *story) adoption(nodeClaim *karpv1.NodeClaim) {
	if nodeClaim.DeletionTimestamp != nil {
		return
	}
	event := newest(t.s.NodeClaimEvents, withReason("MachineWithoutClaim", "AdoptionIncomplete", "MachineUnknown", "DuplicateNodeClaim"))
	claim, _ := t.claimed()
	unclaimed := claim == nil && t.s.Agent.Err == nil
	if event == nil || !unclaimed && event.Reason == "MachineWithoutClaim" {
		return
	}
	t.add(Step{Object: "Adoption", State: Blocked, Message: event.Reason, Details: []string{event.Message}})
	t.settle(Blocked, "The machine is not adopted: "+sentence(event.Message), "See what would be adopted, and what is in the way: kubectl capi adopt")
}

// launchedHere reports whether the NodeClaim's machine was claimed, and not made by another
// provider.
func launchedHere(nodeClaim *karpv1.NodeClaim) bool {
	return placeholder.Is(nodeClaim.Status.ProviderID) || nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation] != ""
}
