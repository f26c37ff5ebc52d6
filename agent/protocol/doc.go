// Package protocol decides what becomes of the claims and Machines of one node group. It is pure: no client, clock, lock or goroutine,
// so that the agent's engine, the property tests and the explorer (test/claimmodel) all ask the same [Decide].
//
// # Read, decide, write
//
// A [Snapshot] is one reading of a node group: the MachineDeployment and its [Ledger] first, then claims, Machines and MachineSets. [Decide]
// turns it into a [Decision]: the next ledger with spec.replicas, which are written together by compare-and-swap, and the [Action]s on other
// objects that the ledger permits as it was read. Package claims reads and writes.
//
// # The ledger
//
// Every replica has an owner: the floor is the user's; a claim that is pending, or whose label a Machine carries, has one; a release keeps
// its Machine's until that is given back; what is left is spare. The ledger records the floor and what is in flight. Everything else is read
// from the objects, so that a lost ledger can be rebuilt.
//
// # Files
//
// decide.go has the phases in their order. They share the decision's books (books.go): in which class each Machine is, and who owns each
// replica, under the next ledger as far as it is known. Their files follow them: accounting.go (who owns the replicas, and which claims
// enter), naming.go (which Machine is promised to whom), floors.go (which one is marked as the floor's), releases.go and paused.go (how a
// Machine goes and its replica is given back, with one active MachineSet and with several), spares.go (what no claim wants), actions.go (the
// writes that the ledger permits). Facts about Machines are in snapshot.go, nodeless.go and failure.go.
package protocol
