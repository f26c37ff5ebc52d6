package protocol

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// books is a decision in progress: the class of each Machine and the owner of each replica, under
// the next ledger so far. Sums are computed from the entries and never passed from phase to phase.
type books struct {
	*Snapshot

	d      *Decision
	next   *Ledger
	budget *budget
	// assigned holds the Machines that the next ledger assigns to pending claims.
	assigned map[types.UID]bool
	// conditions caches the classes of free Machines, which do not change once the books are open.
	conditions map[types.UID]class
	// floors holds the Machines that are marked as the floor's or about to be: the oldest ones, at
	// most as many as the floor has.
	floors map[types.UID]bool
	// labelOnly counts the Machines that own a replica by their label alone. It does not change
	// after [books.raiseToOwned].
	labelOnly int32
	// covering is how many replicas this decision adds for claims whose Machines have become
	// unusable. They are not spare.
	covering int32
}

// class is a Machine's role in the protocol. Each Machine has exactly one.
type class int

const (
	// claimed means that the label names a claim with a right to the Machine.
	claimed class = iota
	// assigned means that the ledger names the Machine for a claim that waits.
	assigned
	// releasing means that the ledger records the release, and replicas have not been decremented
	// for it yet.
	releasing
	// decremented means that the ledger records the release, replicas have been decremented for it,
	// and nothing replaces the Machine.
	decremented
	// going means that the Machine is being deleted and the ledger has no record of its release.
	going
	// stranded means that the Machine lives, has no owner, and carries the finalizer of a release
	// that no ledger records.
	stranded

	// The remaining classes are free: the Machine lives and no claim or release has it.

	// fresh means that nothing can run on the Machine yet, so a claim may have it.
	fresh
	// suspect means that the Machine may turn out to be fresh: Cluster API has not seen its Node,
	// but does not state that there is none, or the Node joined too recently for a report that
	// nothing runs on it.
	suspect
	// failed means that the Machine is known not to come.
	failed
	// inhabited means that something may run on the Machine, or that it is about to be replaced.
	inhabited
	// ofFloor means that the Machine is the floor's and is marked so, or about to be. Pods may run
	// on it. It may still carry the label of the claim that returned it.
	ofFloor
)

// open begins the books of a decision: it absorbs what others changed, drops entries that are no
// longer needed, and takes back assignments that cannot be kept.
func (s *Snapshot) open() *books {
	b := &books{
		Snapshot:   s,
		d:          &Decision{Replicas: s.Group.Replicas, Refused: map[string]eligibility.Refusal{}, Queued: map[string]bool{}},
		conditions: make(map[types.UID]class),
	}
	b.absorbUserScale()
	b.dropEntries()
	b.dropReturns()
	b.unassign()
	b.assigned = b.next.Assigned()
	b.countFloors()
	b.budget = s.newBudget(b.next, cmp.Or(s.LedgerBudget, LedgerBudget))
	return b
}

// class returns the class of a Machine under the next ledger.
func (b *books) class(m *clusterv1.Machine) class {
	r, recorded := b.next.Releasing[m.UID]
	switch {
	case recorded && r.Decremented:
		return decremented
	case recorded:
		return releasing
	case !Alive(m):
		return going
	case b.returned(m.UID):
		return ofFloor
	case !b.orphaned(ClaimOf(m)):
		return claimed
	case b.assigned[m.UID]:
		return assigned
	case HasFinalizer(m):
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

// condition returns the class of a free Machine that is not the floor's.
func (b *books) condition(m *clusterv1.Machine) class {
	_, deleteRequested := m.Annotations[clusterv1.DeleteMachineAnnotation]
	kept := deleteRequested || ClaimOf(m) != "" || Outdated(m)
	switch {
	case hasFloorMark(m), slices.Contains(b.next.Marking, m.UID): // more than the floor has now
		return inhabited
	case b.hasFailed(m):
		return failed
	case !kept && (b.nodeless(m) || b.nodeUnregistered(m) && !b.registered(m)):
		return fresh
	case !kept && (!HasNode(m) && m.Spec.ProviderID != "" && !b.registered(m) || b.joinedJustNow(m)):
		return suspect
	}
	return inhabited
}

// free returns the Machines that no claim or release has.
func (b *books) free() []*clusterv1.Machine {
	var free []*clusterv1.Machine
	for _, m := range b.Machines {
		if b.class(m) >= fresh {
			free = append(free, m)
		}
	}
	return free
}

// leaving counts the Machines without a claim that another actor is deleting, and whose replica
// remains, of the floor or of the spare: Cluster API makes another Machine once they are gone. That
// can be long: a Machine is drained first, and its host may have to be cleaned. Machines beyond the
// replicas have lost theirs, to a person who lowered them. In a rollout, the Machine that replaces
// one may exist before it.
func (b *books) leaving() int {
	if b.rollingOut() {
		return 0
	}
	leaving, all := 0, 0
	for _, m := range b.Machines {
		switch class := b.class(m); {
		case class == decremented:
			continue
		case class == going && ClaimOf(m) == "":
			leaving++
		}
		all++
	}
	return max(0, leaving-max(0, all-int(b.Group.Replicas)))
}

// floor returns the number of Machines that claims may not have: what the user owns, and at least
// the min size.
func (b *books) floor() int32 {
	return max(b.next.Floor, b.next.Min)
}

// used counts the replicas that have an owner: the floor, the claims, and the releases for which
// replicas have not been decremented.
func (b *books) used() int32 {
	return b.floor() + clamp(len(b.next.Pending)) + b.labelOnly + b.unreleased()
}

// unreleased counts the recorded releases for which replicas have not been decremented.
func (b *books) unreleased() int32 {
	var n int32
	for _, r := range b.next.Releasing {
		if !r.Decremented {
			n++
		}
	}
	return n
}

// spare returns how many replicas have no owner. It is negative when owners lack replicas.
func (b *books) spare() int32 {
	return b.d.Replicas - b.covering - b.used()
}

// room reports whether the max size allows one more than the given replicas.
func (b *books) room(replicas int32) bool {
	return b.Group.Max == nil || replicas < *b.Group.Max
}

// settled reports whether Cluster API makes no further Machine unless one is ordered: everything is
// observed, there is no rollout, there are as many Machines as replicas, and no other actor is
// deleting one. A Machine that the agent is deleting has its replica, and nothing replaces it,
// while it has the agent's finalizer and replicas have not been decremented for it.
func (b *books) settled() bool {
	if !b.observed(b.Deployment.Generation) || b.rollingOut() || len(b.Machines) != int(b.Group.Replicas) {
		return false
	}
	made := map[string]int32{}
	dying := false
	for _, m := range b.Machines {
		made[SetOf(m)]++
		switch {
		case Alive(m):
		case b.class(m) == releasing && HasFinalizer(m):
			dying = true
		default:
			return false
		}
	}
	// A MachineSet that was lowered keeps its Machine until that is gone, while another one makes
	// its own.
	return !dying || !slices.ContainsFunc(b.Sets, func(set *clusterv1.MachineSet) bool { return made[set.Name] != ReplicasOf(set) })
}

// unusable counts the Machines beyond the floor that no claim may have, and that no claim has. If
// exceptUndecided is set, [books.undecided] ones do not count.
func (b *books) unusable(exceptUndecided bool) int32 {
	n := clamp(b.leaving())
	for _, m := range b.free() {
		if b.class(m) != fresh && (!exceptUndecided || !b.undecided(m)) {
			n++
		}
	}
	return max(0, n-b.floor())
}

// undecided reports whether the Machine is free and the report that decides whether a claim may
// have it may still come.
func (b *books) undecided(m *clusterv1.Machine) bool {
	return b.class(m) == suspect && b.joinedJustNow(m)
}

// waiting counts the claims that have been assigned no Machine yet.
func (b *books) waiting() int { return len(b.waitingClaims()) }

// waitingClaims returns the claims that have been assigned no Machine yet, in no order.
func (b *books) waitingClaims() []*v1alpha1.MachineClaim {
	var waiting []*v1alpha1.MachineClaim
	for id, entry := range b.next.Pending {
		if c := b.Claim(id); entry.UID == "" && c != nil && c.Spec.Adopt == "" {
			waiting = append(waiting, c)
		}
	}
	return waiting
}

// admit enters a claim and reports true, or queues it and reports false if the ledger has no room.
func (b *books) admit(claimID string, entry Assignment) bool {
	if !b.budget.claim(claimID, entry) {
		b.d.Queued[claimID] = true
		return false
	}
	b.setPending(claimID, entry)
	b.d.Urgent = true
	return true
}

// setPending writes a claim's entry.
func (b *books) setPending(claimID string, entry Assignment) {
	b.next.Pending[claimID] = entry
	if entry.UID != "" {
		b.assigned[entry.UID] = true
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

// recordDecrement records that replicas have been decremented for a Machine, by this decision or by
// another writer that lowered them before.
func (b *books) recordDecrement(uid types.UID) {
	r := b.next.Releasing[uid]
	r.Decremented = true
	b.next.Releasing[uid] = r
	b.d.Removes = true
}
