package protocol

import (
	"slices"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// markingAtOnce is how many Machines may be on their way to being marked as the floor's at a time,
// so that they do not fill the ledger.
const markingAtOnce = 16

// markFloors chooses Machines to mark as the floor's while fewer Machines can run pods than the
// floor owns. It chooses Machines that only Karpenter's taint keeps pods from: core removes that
// taint when it registers a NodeClaim, and these Machines have none. The next ledger names them
// first, so that none of them is assigned to a claim once the taint goes. Those that the snapshot's
// ledger names are marked now.
func (b *books) markFloors() {
	if b.Group.Has(eligibility.Paused) || b.Group.Has(eligibility.NotMember) || b.deleted() {
		return
	}
	marking := lo.Filter(b.next.Marking, func(uid types.UID, _ int) bool { return b.floors[uid] && !b.assigned[uid] })
	for _, uid := range marking {
		if b.Ledger != nil && slices.Contains(b.Ledger.Marking, uid) {
			b.d.Actions = append(b.d.Actions, Action{Kind: MarkFloor, Machine: b.machine(uid)})
		}
	}
	missing := int(b.floor())
	if missing > 0 {
		missing -= lo.CountBy(b.free(), b.takesPods)
	}
	for _, m := range b.Machines { // oldest first
		if missing <= 0 || len(marking) >= markingAtOnce {
			break
		}
		if b.class(m) < fresh || b.floors[m.UID] || !b.nodeUnregistered(m) || b.replaced(m) || !b.mayMark(m) || !b.budget.mark() {
			continue
		}
		missing--
		b.floors[m.UID] = true
		marking = append(marking, m.UID)
	}
	b.next.Marking = marking
}

// takesPods reports whether pods can run on a free Machine that Cluster API is not about to
// replace.
func (b *books) takesPods(m *clusterv1.Machine) bool {
	switch c := b.class(m); c {
	case ofFloor:
		return true
	case suspect, inhabited:
		return !b.nodeUnregistered(m) && !b.replaced(m)
	case claimed, assigned, releasing, decremented, going, stranded, fresh, failed:
	}
	return false
}

// replaced reports whether Cluster API is about to replace the Machine by itself.
func (s *Snapshot) replaced(m *clusterv1.Machine) bool { return Outdated(m) && !s.onDelete() }

// nodeUnregistered reports whether the Machine's holder reported that its Node exists and that
// Karpenter's taint keeps pods from it.
func (s *Snapshot) nodeUnregistered(m *clusterv1.Machine) bool {
	registered, reported := s.Nodes[m.Spec.ProviderID]
	return m.Spec.ProviderID != "" && reported && !registered
}

// mayMark reports whether the Machine may still be marked as the floor's.
func (s *Snapshot) mayMark(m *clusterv1.Machine) bool {
	_, leaves := m.Annotations[clusterv1.DeleteMachineAnnotation]
	return Alive(m) && !HasFinalizer(m) && !leaves && ClaimOf(m) == "" && !hasFloorMark(m)
}

// countFloors finds the Machines that are marked as the floor's, or about to be, and that still
// belong to the floor, which may have been lowered since.
func (b *books) countFloors() {
	b.floors = map[types.UID]bool{}
	for uid := range b.next.Returning {
		if m := b.machine(uid); m != nil && Alive(m) {
			b.floors[uid] = true
		}
	}
	count := func(marked func(*clusterv1.Machine) bool) {
		for _, m := range b.Machines { // oldest first
			if len(b.floors) >= int(b.floor()) {
				return
			}
			_, releasing := b.next.Releasing[m.UID]
			if marked(m) && Alive(m) && !HasFinalizer(m) && !releasing && b.orphaned(ClaimOf(m)) && !b.assigned[m.UID] {
				b.floors[m.UID] = true
			}
		}
	}
	count(wasReturned) // a claim's holder was promised that it stays
	count(func(m *clusterv1.Machine) bool { return hasFloorMark(m) || slices.Contains(b.next.Marking, m.UID) })
}

// wasReturned reports whether the Machine is one of the floor's because a claim returned it.
func wasReturned(m *clusterv1.Machine) bool {
	return m.Annotations[v1alpha1.FloorAnnotation] == v1alpha1.FloorReturned
}

// hasFloorMark reports whether the Machine is marked as one of the floor's.
func hasFloorMark(m *clusterv1.Machine) bool {
	_, yes := m.Annotations[v1alpha1.FloorAnnotation]
	return yes
}
