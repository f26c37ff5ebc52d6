package registration

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
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
