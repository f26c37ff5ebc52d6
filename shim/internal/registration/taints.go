package registration

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/scheduling"
)

// IsUnregistered reports whether the Node still has the taint that keeps pods away until Karpenter has registered it.
func IsUnregistered(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.MatchTaint(&karpv1.UnregisteredNoExecuteTaint) })
}

// uninitialized is on every Node that a Cluster API bootstrap provider lets join, kubeadm's for one. Cluster API's Machine
// controller removes it once it has found the Node of its Machine and written its labels. The shim does not import Cluster API,
// where it is called NodeUninitializedTaint.
var uninitialized = corev1.Taint{Key: "node.cluster.x-k8s.io/uninitialized", Effect: corev1.TaintEffectNoSchedule}

// ExpectTaints tells core which taints Cluster API removes from new Nodes by itself. Core then plans pods for a Node that still
// has them, instead of launching another Node for the same pods, and holds the NodeClaim for initialized only without them.
//
// Call it before core's controllers are made. Further calls change nothing.
func ExpectTaints() {
	if !scheduling.IsKnownEphemeralTaint(&uninitialized) {
		scheduling.KnownEphemeralTaints = append(scheduling.KnownEphemeralTaints, uninitialized)
	}
}
