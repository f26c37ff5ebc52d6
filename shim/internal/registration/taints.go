package registration

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	"sigs.k8s.io/karpenter/pkg/scheduling"
)

// IsUnregistered reports whether the Node still has the taint that keeps pods away until Karpenter
// has registered it.
func IsUnregistered(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.MatchTaint(&karpv1.UnregisteredNoExecuteTaint) })
}

// uninitialized is the taint of every Node that joins through a Cluster API bootstrap provider such
// as kubeadm's. Cluster API's Machine controller removes it once it has found its Machine's Node
// and set its labels. Cluster API, which the shim does not import, names it NodeUninitializedTaint.
var uninitialized = corev1.Taint{Key: "node.cluster.x-k8s.io/uninitialized", Effect: corev1.TaintEffectNoSchedule}

// ExpectTaints registers with core the taints that Cluster API removes from new Nodes. Core then
// plans pods for a Node that still has them, instead of launching another Node for the same pods,
// and considers the NodeClaim initialized only once they are gone.
//
// Call it before core's controllers are constructed. It is idempotent.
func ExpectTaints() {
	if !scheduling.IsKnownEphemeralTaint(&uninitialized) {
		scheduling.KnownEphemeralTaints = append(scheduling.KnownEphemeralTaints, uninitialized)
	}
}

// outdatedRevision is the taint that Cluster API sets on each Node of a MachineSet whose revision
// is not its MachineDeployment's, and keeps there until the Machine is replaced. Cluster API names
// it NodeOutdatedRevisionTaint.
var outdatedRevision = corev1.Taint{Key: "node.cluster.x-k8s.io/outdated-revision", Effect: corev1.TaintEffectPreferNoSchedule}

// stateController is the name of core's controller that reads the Nodes which core plans with.
const stateController = "state.node"

// PlanningClient returns a client for core's controllers with which core plans without the taint of
// outdated Nodes. kube-scheduler places any pod on such a Node, if it prefers no other. Core
// regards the taint like one with the effect NoSchedule. It would launch a second Node for pods
// that wait for the first one to become ready, and move no pods to outdated Nodes. The taint cannot
// be ephemeral, as core then considers no such Node initialized.
//
// Only core's view of Nodes lacks the taint. All other reads, and so all writes, have it.
func PlanningClient(kube client.Client) client.Client { return &planning{Client: kube} }

type planning struct{ client.Client }

func (c *planning) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	if err := c.Client.Get(ctx, key, object, options...); err != nil {
		return err
	}
	if node, is := object.(*corev1.Node); is && injection.GetControllerName(ctx) == stateController {
		// Not in place: the taints may be the cache's.
		node.Spec.Taints = slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(taint corev1.Taint) bool { return taint.MatchTaint(&outdatedRevision) })
	}
	return nil
}
