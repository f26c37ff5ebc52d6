// Package protocol decides what happens to the claims and Machines of one node group. It is pure:
// it has no client, clock, lock or goroutine, so the agent's engine, the property tests and the
// explorer (test/claimmodel) all run the same [Decide].
//
// # Read, decide, write
//
// A [Snapshot] is one reading of a node group: the MachineDeployment and its [Ledger] first, then
// claims, Machines and MachineSets. [Decide] turns it into a [Decision]: the next ledger and
// spec.replicas, which are written together by compare-and-swap, and the [Action]s on other objects
// that the ledger permits as it was read. Package claims does the reading and writing.
//
// # The ledger
//
// Every replica has an owner or is spare. The floor belongs to the user. A claim owns one replica
// while it is pending or a Machine carries its label. A release owns its Machine's replica until
// replicas are decremented for it. The ledger records the floor and what is in flight. Everything
// else is read from the objects, so a lost ledger can be rebuilt.
//
// # Files
//
// decide.go runs the phases in order. They share the decision's books (books.go): the class of each
// Machine and the owner of each replica, under the next ledger so far. The phases are in
// accounting.go (who owns the replicas, and which claims enter), assign.go (which Machine is
// assigned to which claim), floors.go (which Machines are marked as the floor's), releases.go and
// paused.go (how a Machine is removed and replicas are decremented, with one active MachineSet and
// with several), spares.go (Machines that no claim wants) and actions.go (the writes that the
// ledger permits). Facts about Machines are in snapshot.go, nodeless.go and failure.go.
package protocol
