package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

const (
	// NodeGroupAnnotation on a NodeClaim, and on its Node, holds the id of the node group that the
	// machine comes from.
	NodeGroupAnnotation = Group + "/node-group"

	// ReservationLabel on a Node of reserved capacity holds the name of the reservation: one for
	// each reserved node group. Karpenter core counts how much of it is left by this label.
	ReservationLabel = Group + "/reservation"

	// PeerMachineAnnotation is the annotation that karpenter-provider-cluster-api sets on a
	// NodeClaim before it has launched it: namespace/name of the Machine that it has chosen.
	PeerMachineAnnotation = "cluster.x-k8s.io/machine"
	// PeerMemberLabel is the label that karpenter-provider-cluster-api sets on Machines that it has
	// claimed. Cluster API copies it to their Nodes.
	PeerMemberLabel = "node.cluster.x-k8s.io/karpenter-member"

	// KeptAnnotation is on Nodes that are protected from disruption because the agent does not know
	// their machine. It is removed together with the protection, once the agent does. Its value is
	// "true".
	KeptAnnotation = Group + "/kept"
	// KeptFromRepairAnnotation is the same for the protection from repair. A Node lacks one of the
	// two, or both, if its user had set that protection.
	KeptFromRepairAnnotation = Group + "/kept-from-repair"
	// KeptFromExpiryAnnotation is on each of these Nodes, whatever its user had set. It is what
	// keeps them from expiry, for which core has no annotation.
	KeptFromExpiryAnnotation = Group + "/kept-from-expiry"

	// AdoptedLabel is on NodeClaims that adopted an existing machine, and on their Nodes. Its value
	// is "true".
	AdoptedLabel = Group + "/adopted"

	// AdoptAnnotation on a Node, with the value "true", requests its adoption if the NodeClass has
	// the adoption mode OnRequest.
	AdoptAnnotation = Group + "/adopt"

	// AdoptMachineAnnotation on a NodeClaim holds the name of the Machine that it adopts.
	AdoptMachineAnnotation = Group + "/adopt-machine"

	// ReturnMachineAnnotation on a NodeClaim, with the value "true", returns its machine to the
	// user and deletes the NodeClaim. The Node stays as it is: nothing is drained.
	ReturnMachineAnnotation = Group + "/return-machine"

	// NodeClassFinalizer keeps a ClusterAPINodeClass while NodeClaims refer to it.
	NodeClassFinalizer = Group + "/termination"

	// PublishedByLabel on a NodePool or a ClusterAPINodeClass is the name of the NodePoolSet in the
	// hub that it was created for. Removing it takes the object over: the shim leaves it as it is
	// then.
	PublishedByLabel = Group + "/published-by"
	// PublishedFromAnnotation is <namespace>/<name> of the same NodePoolSet.
	PublishedFromAnnotation = Group + "/published-from"
	// PublishedRevisionAnnotation identifies the content that was last applied.
	PublishedRevisionAnnotation = Group + "/published-revision"
	// PublishedPolicyAnnotation is what happens when the object is published no longer: Retain or
	// Delete.
	PublishedPolicyAnnotation = Group + "/published-deletion-policy"

	// Holder is the holder of the shim's claims.
	Holder = "karpenter"
)

// ReturnsMachine reports whether a NodeClaim has [ReturnMachineAnnotation].
func ReturnsMachine(nodeClaim metav1.Object) bool {
	return nodeClaim.GetAnnotations()[ReturnMachineAnnotation] == "true"
}

// IsKept reports whether a Node has [KeptFromExpiryAnnotation] or, of an earlier version, one of
// the others.
func IsKept(node metav1.Object) bool {
	annotations := node.GetAnnotations()
	return annotations[KeptFromExpiryAnnotation] == "true" || annotations[KeptAnnotation] == "true" ||
		annotations[KeptFromRepairAnnotation] == "true"
}
