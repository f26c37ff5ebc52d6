// Package claimreasons names the reasons that an agent reports for the state of claims, and the
// reason of Cluster API by which callers decide about a claim's machine.
//
// Names are append-only, because agents and callers may be of different versions, and hubs keep
// reasons in MachineClaims: a name never changes its meaning, and the name of a reason that is gone
// is never used again. Callers must expect reasons that they do not know.
package claimreasons

// Reasons of claims (Claim.reason) and of events in their history (ClaimEvent.reason). [All] lists
// them, in the order in which they were added.
const (
	// WaitingForMachine means that replicas were raised, and that Cluster API has not created a
	// Machine yet.
	WaitingForMachine = "WaitingForMachine"
	// Bound means that the claim has a Machine.
	Bound = "Bound"
	// NodeJoined means that the machine's Node joined.
	NodeJoined = "NodeJoined"
	// ReleaseRequested means that the holder released the claim.
	ReleaseRequested = "ReleaseRequested"
	// Collected means that the claim was released because its holder's live set did not contain it.
	Collected = "Collected"
	// OwnerMissing means that the claim is kept although its holder's live set does not contain it.
	OwnerMissing = "OwnerMissing"
	// Released means that the claim ended with its machine.
	Released = "Released"
	// HandedOver means that the claim ended and left its machine to the next claim.
	HandedOver = "HandedOver"
	// ReturnRequested means that the holder asked to return the machine to the user.
	ReturnRequested = "ReturnRequested"
	// Returned means that the claim ended and left its machine to the user.
	Returned = "Returned"
	// Cancelled means that the claim ended before it had a machine.
	Cancelled = "Cancelled"
	// MachineDeleting means that another actor is deleting the machine.
	MachineDeleting = "MachineDeleting"
	// MachineLost means that the claim ended because its machine was deleted by another actor.
	MachineLost = "MachineLost"
	// Failed means that the machine will not become a Node.
	Failed = "Failed"
	// Late means that the machine missed a deadline and is left to the next claim.
	Late = "Late"
	// NodeNotSeen means that a deadline has passed, and that the agent keeps the machine because
	// its Node may exist.
	NodeNotSeen = "NodeNotSeen"
	// WaitingForInfrastructure means that the infrastructure has been reporting an obstacle for a
	// while.
	WaitingForInfrastructure = "WaitingForInfrastructure"
	// WaitingForNode means that the machine is booting.
	WaitingForNode = "WaitingForNode"
	// NoRoom means that the claim ended because no candidate admitted it, at least one for lack of
	// room.
	NoRoom = "NoRoom"
	// Refused means that the claim ended because no candidate admitted it, none for lack of room.
	Refused = "Refused"
	// NodeGroupGone means that the claim ended with its MachineDeployment.
	NodeGroupGone = "NodeGroupGone"
	// NeverMade means that the claim was released before it was made.
	NeverMade = "NeverMade"
	// WriteRefused means that the hub's API server refuses a write that the claim needs.
	WriteRefused = "WriteRefused"
	// StateLost means that the claim ended because it was moved or restored without its status, and
	// nothing in the hub shows where it was.
	StateLost = "StateLost"
	// Binding means that the claim's Machine is about to be labelled.
	Binding = "Binding"
)

// All returns every reason of claims and of their events, in the order in which they were added.
func All() []string {
	return []string{
		WaitingForMachine, Bound, NodeJoined, ReleaseRequested, Collected, OwnerMissing, Released, HandedOver, ReturnRequested,
		Returned, Cancelled, MachineDeleting, MachineLost, Failed, Late, NodeNotSeen, WaitingForInfrastructure, WaitingForNode, NoRoom, Refused,
		NodeGroupGone, NeverMade, WriteRefused, StateLost, Binding,
	}
}

// InfrastructureDeleted is Cluster API's reason (Machine.infrastructure_reason) for a Machine whose
// infrastructure object existed and is gone. Nothing recreates it.
const InfrastructureDeleted = "ObjectDeleted"
