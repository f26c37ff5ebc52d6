package protocol

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// books is a decision in progress: the class of each Machine and the owner of each replica, under the next ledger so far. Sums are computed
// from the entries, never passed from phase to phase.
type books struct {
	*Snapshot

	d      *Decision
	next   *Ledger
	budget *budget
	// promised are the Machines that the next ledger names for pending claims.
	promised map[types.UID]bool
	// conditions caches the classes of free Machines, which do not change once the books are open.
	conditions map[types.UID]class
	// floors are the Machines that are marked as the floor's, or about to be: the oldest ones, at most as many as the floor has.
	floors map[types.UID]bool
	// labelOnly counts the Machines that have a replica by their label alone. It does not change after [books.meet].
	labelOnly int32
	// covering are replicas raised for claims whose Machines nobody can have any more. Until they are written, they are not spare.
	covering int32
}

// class is what one Machine is to the protocol. Each Machine is in exactly one.
type class int

const (
	// claimed means that the label names a claim that has a right to it.
	claimed class = iota
	// promised means that the ledger names it for a claim that waits.
	promised
	// releasing means that the ledger records its release, and that its replica was not given back yet.
	releasing
	// givenBack means that the ledger records its release, and that nothing replaces it.
	givenBack
	// going means that it is being deleted, and that its release is not recorded.
	going
	// stranded means that it lives, is nobody's, and carries the finalizer of a release that no ledger records.
	stranded

	// The others are free: they live, and nobody has them.

	// fresh means that nothing can run on it yet, so that a claim may have it.
	fresh
	// suspect means that Cluster API has not seen its Node, but does not state either that there is none.
	suspect
	// hopeless means that it is known not to come.
	hopeless
	// inhabited means that something may run on it, or that it is about to be replaced.
	inhabited
	// ofFloor means that it is one of the floor's, and marked so or about to be: pods may run on it. Its label may be that of a claim that
	// returned it.
	ofFloor
)

// open begins the books of a decision: what others changed is folded in, and entries are dropped that have done their service.
func (s *Snapshot) open() *books {
	b := &books{
		Snapshot:   s,
		d:          &Decision{Replicas: s.Group.Replicas, Refused: map[string]eligibility.Refusal{}, Queued: map[string]bool{}},
		conditions: make(map[types.UID]class),
	}
	b.fold()
	b.dropEntries()
	b.dropReturns()
	b.unname()
	b.promised = b.next.Promised()
	b.countFloors()
	b.budget = s.newBudget(b.next, cmp.Or(s.LedgerBudget, LedgerBudget))
	return b
}

// class returns what a Machine is under the next ledger.
func (b *books) class(m *clusterv1.Machine) class {
	r, recorded := b.next.Releasing[m.UID]
	switch {
	case recorded && r.GivenBack:
		return givenBack
	case recorded:
		return releasing
	case !Alive(m):
		return going
	case b.returned(m.UID):
		return ofFloor
	case !b.orphaned(ClaimOf(m)):
		return claimed
	case b.promised[m.UID]:
		return promised
	case Held(m):
		return stranded
	case b.floors[m.UID]:
		return ofFloor
	}
	c, known := b.conditions[m.UID]
	if !known {
		c = b.condition(m)
		b.conditions[m.UID] = c
	}
	return c
}

// condition returns what a free Machine is good for.
func (b *books) condition(m *clusterv1.Machine) class {
	_, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]
	kept := marked || ClaimOf(m) != "" || Outdated(m)
	switch {
	case hasFloorMark(m), slices.Contains(b.next.Marking, m.UID): // beyond what the floor has now
		return inhabited
	case b.hopeless(m):
		return hopeless
	case !kept && (b.nodeless(m) || b.shut(m) && !b.registered(m)):
		return fresh
	case !HasNode(m) && m.Spec.ProviderID != "" && !b.registered(m):
		return suspect
	}
	return inhabited
}

// free returns the Machines that nobody has.
func (b *books) free() []*clusterv1.Machine {
	var free []*clusterv1.Machine
	for _, m := range b.Machines {
		if b.class(m) >= fresh {
			free = append(free, m)
		}
	}
	return free
}

// floor is the number of machines that are not the claims' to have: what the user owns, and at least the min size.
func (b *books) floor() int32 {
	return max(b.next.Floor, b.next.Min)
}

// used counts the replicas that have an owner: the floor, claims, and releases that have not given theirs back.
func (b *books) used() int32 {
	return b.floor() + clamp(len(b.next.Pending)) + b.labelOnly + b.unreleased()
}

// unreleased counts the recorded releases that have not given their replica back.
func (b *books) unreleased() int32 {
	var n int32
	for _, r := range b.next.Releasing {
		if !r.GivenBack {
			n++
		}
	}
	return n
}

// spare is how many replicas are nobody's; less than zero when owners are owed some.
func (b *books) spare() int32 {
	return b.d.Replicas - b.covering - b.used()
}

// room reports whether the max size allows as many replicas and one more.
func (b *books) room(replicas int32) bool {
	return b.Group.Max == nil || replicas < *b.Group.Max
}

// unusable counts the free Machines beyond the floor that no claim may have.
func (b *books) unusable() int32 {
	var n int32
	for _, m := range b.free() {
		if b.class(m) != fresh {
			n++
		}
	}
	return max(0, n-b.floor())
}

// waiting counts the claims that a Machine is still to be named for.
func (b *books) waiting() int {
	n := 0
	for id, named := range b.next.Pending {
		if c := b.Claim(id); named.UID == "" && c != nil && c.Spec.Adopt == "" {
			n++
		}
	}
	return n
}

// admit enters a claim, or has it wait when there is no room in the ledger. It reports which.
func (b *books) admit(claimID string, named Named) bool {
	if !b.budget.claim(claimID, named) {
		b.d.Queued[claimID] = true
		return false
	}
	b.promise(claimID, named)
	b.d.Urgent = true
	return true
}

// promise writes a claim's entry.
func (b *books) promise(claimID string, named Named) {
	b.next.Pending[claimID] = named
	if named.UID != "" {
		b.promised[named.UID] = true
	}
}

// release records a Machine's release, and reports whether there was room for that in the ledger.
func (b *books) release(m *clusterv1.Machine, r Release) bool {
	r.Machine = m.Name
	if !b.budget.release(m.UID, r) {
		return false
	}
	b.next.Releasing[m.UID] = r
	return true
}

// giveBack records that a Machine's replica is given back: by this decision, or by whoever lowered replicas before it.
func (b *books) giveBack(uid types.UID) {
	r := b.next.Releasing[uid]
	r.GivenBack = true
	b.next.Releasing[uid] = r
	b.d.Removes = true
}
