package v1alpha1

const (
	// NodeGroupAnnotation on a NodeClaim, and on its Node, holds the id of the node group that the machine comes from.
	NodeGroupAnnotation = Group + "/node-group"

	// ReservationLabel on a Node of reserved capacity holds the name of the reservation: one for each reserved node group.
	// Karpenter core counts how much of it is left by this label.
	ReservationLabel = Group + "/reservation"

	// NodeClassFinalizer keeps a ClusterAPINodeClass while NodeClaims refer to it.
	NodeClassFinalizer = Group + "/termination"

	// Holder is the holder of the shim's claims.
	Holder = "karpenter"
)
