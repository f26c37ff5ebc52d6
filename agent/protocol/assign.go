package protocol

import (
	"maps"
	"slices"

	"github.com/samber/lo"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// unassign takes back an assignment if the Machine died before the claim became Bound, or was
// marked as the floor's too late. The label of the claim shows that the claim did become Bound,
// and that its status was lost.
func (b *books) unassign() {
	for id, entry := range b.next.Pending {
		if entry.UID == "" {
			continue
		}
		if c := b.Claim(id); c == nil || c.CurrentPhase() != v1alpha1.PhasePending {
			continue
		}
		if b.labelled(id) != nil {
			continue
		}
		m := b.machine(entry.UID)
		floorMarked := m != nil && hasFloorMark(m) && b.Claim(id).Spec.Adopt == ""
		if m == nil || !Alive(m) || HasFinalizer(m) || floorMarked || ClaimOf(m) != "" {
			entry.Machine, entry.UID = "", ""
			b.next.Pending[id] = entry
		}
	}
}

// assign assigns free Machines to the waiting claims, oldest first, and leaves the floor as many as
// it owns, those that take the place of Machines which others are deleting included. If no usable
// Machine is left, the claim is assigned a failed one that was made after the claim, so that it
// fails now rather than at its own deadline.
func (b *books) assign() {
	free := b.free()
	give := len(free) + b.leaving() - int(b.floor())
	usable := lo.Filter(free, func(m *clusterv1.Machine, _ int) bool { return b.class(m) == fresh })
	useless := lo.Filter(free, func(m *clusterv1.Machine, _ int) bool {
		return b.class(m) == failed && ClaimOf(m) == "" && !Outdated(m)
	})
	// The one that has progressed furthest comes first.
	slices.SortStableFunc(usable, func(x, y *clusterv1.Machine) int {
		return b.progress(y) - b.progress(x)
	})
	for _, c := range b.Claims {
		if give <= 0 {
			return
		}
		entry, pending := b.next.Pending[c.Spec.ClaimID]
		if !pending || entry.UID != "" || c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" || b.labelled(c.Spec.ClaimID) != nil {
			continue
		}
		var m *clusterv1.Machine
		if len(usable) > 0 {
			m, usable = usable[0], usable[1:]
		} else if i := slices.IndexFunc(useless, func(m *clusterv1.Machine) bool {
			return !m.CreationTimestamp.Before(&c.CreationTimestamp)
		}); i >= 0 {
			m, b.d.Urgent = useless[i], true
			useless = slices.Delete(useless, i, i+1)
		} else {
			continue
		}
		give--
		b.setPending(c.Spec.ClaimID, Assignment{Machine: m.Name, UID: m.UID})
	}
}

// progress ranks Machines by how far they are: 0 without an instance, 1 without a Node, 2 if there
// may be a Node.
func (s *Snapshot) progress(m *clusterv1.Machine) int {
	switch {
	case m.Spec.ProviderID == "" && !HasNode(m):
		return 0
	case s.nodeless(m):
		return 1
	}
	return 2
}

// Finishes reports whether no further write of pending entries is expected soon: every pending
// claim has been assigned its Machine. A change of releases counts as finished too, so that it is
// not delayed.
func (d *Decision) Finishes(before *Ledger) bool {
	if before == nil || len(d.Ledger.Pending) == 0 || !maps.Equal(d.Ledger.Releasing, before.Releasing) {
		return true
	}
	if d.Ledger.Unassigned() > 0 {
		return false
	}
	for id, entry := range d.Ledger.Pending {
		if before.Pending[id] != entry {
			return true
		}
	}
	return false
}

// NewlyAssigned reports whether the next ledger assigns a Machine that the snapshot's does not. If
// ready is set, only Machines with a provider ID count.
func (s *Snapshot) NewlyAssigned(next *Ledger, ready bool) bool {
	for id, entry := range next.Pending {
		m := s.machine(entry.UID)
		if m != nil && (!ready || m.Spec.ProviderID != "") && (s.Ledger == nil || s.Ledger.Pending[id] != entry) {
			return true
		}
	}
	return false
}
