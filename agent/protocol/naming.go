package protocol

import (
	"maps"
	"slices"

	"github.com/samber/lo"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// unname takes back a promise if the Machine died before the claim became Bound, or was marked as
// the floor's too late.
func (b *books) unname() {
	for id, named := range b.next.Pending {
		if named.UID == "" {
			continue
		}
		if c := b.Claim(id); c == nil || c.CurrentPhase() != v1alpha1.PhasePending {
			continue
		}
		m := b.machine(named.UID)
		floorMarked := m != nil && hasFloorMark(m) && b.Claim(id).Spec.Adopt == ""
		if m == nil || !Alive(m) || Held(m) || floorMarked || ClaimOf(m) != "" && ClaimOf(m) != id {
			named.Machine, named.UID = "", ""
			b.next.Pending[id] = named
		}
	}
}

// name promises free Machines to the waiting claims, oldest first, and leaves the floor as many as
// it owns. If no usable Machine is left, the claim is promised a hopeless one that was made after
// the claim, so that it fails now rather than at its own deadline.
func (b *books) name() {
	free := b.free()
	give := len(free) - int(b.floor())
	usable := lo.Filter(free, func(m *clusterv1.Machine, _ int) bool { return b.class(m) == fresh })
	useless := lo.Filter(free, func(m *clusterv1.Machine, _ int) bool {
		return b.class(m) == hopeless && ClaimOf(m) == "" && !Outdated(m)
	})
	// The one that has progressed furthest comes first.
	slices.SortStableFunc(usable, func(x, y *clusterv1.Machine) int {
		return b.progress(y) - b.progress(x)
	})
	for _, c := range b.Claims {
		if give <= 0 {
			return
		}
		named, pending := b.next.Pending[c.Spec.ClaimID]
		if !pending || named.UID != "" || c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
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
		b.promise(c.Spec.ClaimID, Named{Machine: m.Name, UID: m.UID})
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
// claim has been promised its Machine. A change of releases counts as finished too, so that it is
// not delayed.
func (d *Decision) Finishes(before *Ledger) bool {
	if before == nil || len(d.Ledger.Pending) == 0 || !maps.Equal(d.Ledger.Releasing, before.Releasing) {
		return true
	}
	if d.Ledger.Unnamed() > 0 {
		return false
	}
	for id, named := range d.Ledger.Pending {
		if before.Pending[id] != named {
			return true
		}
	}
	return false
}

// NewlyNamed reports whether the next ledger promises a Machine that the snapshot's does not. If
// ready is set, only Machines with a provider ID count.
func (s *Snapshot) NewlyNamed(next *Ledger, ready bool) bool {
	for id, named := range next.Pending {
		m := s.machine(named.UID)
		if m != nil && (!ready || m.Spec.ProviderID != "") && (s.Ledger == nil || s.Ledger.Pending[id] != named) {
			return true
		}
	}
	return false
}
