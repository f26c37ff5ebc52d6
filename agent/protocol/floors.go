package protocol

import (
	"slices"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// settlingAtOnce is how many Machines are on their way to being marked as the floor's at a time, so that they do not fill the ledger.
const settlingAtOnce = 16

// settle chooses Machines to be marked as the floor's, where fewer than it owns can run pods: of those on whose Nodes nothing but Karpenter's taint
// keeps pods from running. Nobody but the registration of a NodeClaim takes that off, which these never have. The ledger comes
// first, so that none of them is promised to a claim any more when the mark is read and the taint goes.
func (b *books) settle() {
	if b.Group.Has(eligibility.Paused) || b.Group.Has(eligibility.NotMember) || b.deleted() {
		return
	}
	open := lo.CountBy(b.free(), func(m *clusterv1.Machine) bool {
		c := b.class(m)
		return c == floors || c == suspect || c == inhabited && !b.tainted(m)
	})
	missing := int(b.floor()) - open
	settling := slices.DeleteFunc(slices.Clone(b.next.Settling), func(uid types.UID) bool { return b.promised[uid] })
	for _, m := range b.Machines { // oldest first
		if missing <= 0 || len(settling) >= settlingAtOnce {
			break
		}
		_, leaves := m.Annotations[clusterv1.DeleteMachineAnnotation]
		if b.class(m) < fresh || b.floors[m.UID] || leaves || ClaimOf(m) != "" || !b.tainted(m) || !b.budget.settle() {
			continue
		}
		missing--
		b.floors[m.UID] = true
		settling = append(settling, m.UID)
	}
	b.next.Settling = settling
}

// tainted reports whether the Machine's Node is there, and its holder reports that no pod may run on it yet.
func (s *Snapshot) tainted(m *clusterv1.Machine) bool {
	return m.Spec.ProviderID != "" && !s.registered(m) && s.Unregistered(m.Spec.ProviderID)
}

// settles reports whether the Machine is still to be marked as the floor's.
func (s *Snapshot) settles(m *clusterv1.Machine) bool {
	return Alive(m) && !Held(m) && ClaimOf(m) == "" && !isFloors(m)
}

// countFloors finds the Machines that are marked as the floor's, or are about to be, and that the floor still has: it may have been
// lowered since.
func (b *books) countFloors() {
	b.floors = map[types.UID]bool{}
	for _, m := range b.Machines { // oldest first
		_, releasing := b.next.Releasing[m.UID]
		marked := isFloors(m) || slices.Contains(b.next.Settling, m.UID)
		if marked && Alive(m) && !Held(m) && !releasing && b.orphaned(ClaimOf(m)) && !b.promised[m.UID] && len(b.floors) < int(b.floor()) {
			b.floors[m.UID] = true
		}
	}
}

// isFloors reports whether the Machine is marked as one of the floor's.
func isFloors(m *clusterv1.Machine) bool {
	_, yes := m.Annotations[v1alpha1.FloorAnnotation]
	return yes
}
