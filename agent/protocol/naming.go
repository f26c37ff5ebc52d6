package protocol

import (
	"maps"
	"slices"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// unname takes a promise back whose Machine died before the claim became Bound.
func (s *Snapshot) unname(next *Ledger) {
	for id, named := range next.Pending {
		if named.UID == "" {
			continue
		}
		if c := s.Claim(id); c == nil || c.CurrentPhase() != v1alpha1.PhasePending {
			continue
		}
		m := s.machine(named.UID)
		if m == nil || !Alive(m) || Held(m) || ClaimOf(m) != "" && ClaimOf(m) != id {
			named.Machine, named.UID = "", ""
			next.Pending[id] = named
		}
	}
}

// free returns the Machines that nobody has: alive, without a claim, a promise or a release.
func (s *Snapshot) free(next *Ledger) []*clusterv1.Machine {
	promised := next.Promised()
	var free []*clusterv1.Machine
	for _, m := range s.Machines {
		if !Alive(m) || Held(m) || promised[m.UID] {
			continue
		}
		if !s.orphaned(ClaimOf(m)) {
			continue
		}
		if _, releasing := next.Releasing[m.UID]; releasing {
			continue
		}
		free = append(free, m)
	}
	return free
}

// usable reports whether a free Machine may be given to a claim: nothing can run on it yet. Choosing by count alone could
// take the user's own Node.
func (s *Snapshot) usable(m *clusterv1.Machine) bool {
	if _, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]; marked || ClaimOf(m) != "" || Outdated(m) || s.hopeless(m) {
		return false
	}
	return s.nodeless(m) || m.Spec.ProviderID != "" && !s.registered(m) && s.Unregistered(m.Spec.ProviderID)
}

// Unusable counts the free Machines beyond the floor that no claim may have, because something may run on them.
func (s *Snapshot) Unusable(next *Ledger) int32 {
	var n int32
	for _, m := range s.free(next) {
		if !s.usable(m) {
			n++
		}
	}
	return max(0, n-s.floor(next))
}

// name promises free Machines to the claims that wait, oldest first, and leaves the floor as many as it owns. A claim for which
// there is none gets one that is known not to come, if it was made after the claim: the claim fails with it then, at once.
func (s *Snapshot) name(d *Decision, next *Ledger) {
	free := s.free(next)
	give := len(free) - int(s.floor(next))
	var usable, hopeless []*clusterv1.Machine
	for _, m := range free {
		switch {
		case s.usable(m):
			usable = append(usable, m)
		case s.hopeless(m) && ClaimOf(m) == "" && !Outdated(m):
			hopeless = append(hopeless, m)
		}
	}
	// The one that is furthest on comes first.
	slices.SortStableFunc(usable, func(a, b *clusterv1.Machine) int {
		return s.progress(b) - s.progress(a)
	})
	for _, c := range s.Claims {
		if give <= 0 {
			return
		}
		named, pending := next.Pending[c.Spec.ClaimID]
		if !pending || named.UID != "" || c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
			continue
		}
		var m *clusterv1.Machine
		if len(usable) > 0 {
			m, usable = usable[0], usable[1:]
		} else if i := slices.IndexFunc(hopeless, func(m *clusterv1.Machine) bool {
			return !m.CreationTimestamp.Before(&c.CreationTimestamp)
		}); i >= 0 {
			m, d.Urgent = hopeless[i], true
			hopeless = slices.Delete(hopeless, i, i+1)
		} else {
			continue
		}
		give--
		next.Pending[c.Spec.ClaimID] = Named{Machine: m.Name, UID: m.UID}
	}
}

// progress orders Machines by how far they are: no instance yet, no Node yet, and those that may have one.
func (s *Snapshot) progress(m *clusterv1.Machine) int {
	switch {
	case m.Spec.ProviderID == "" && !HasNode(m):
		return 0
	case s.nodeless(m):
		return 1
	}
	return 2
}

// Finishes reports whether no further write of pending entries follows soon: all claims have their Machine's name now, or
// their label. Changes of releases are not put off for it.
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

// NewlyNamed reports whether the ledger names a Machine that the snapshot's does not name: any, or one that has its provider ID.
func (s *Snapshot) NewlyNamed(next *Ledger, ready bool) bool {
	for id, named := range next.Pending {
		m := s.machine(named.UID)
		if m != nil && (!ready || m.Spec.ProviderID != "") && (s.Ledger == nil || s.Ledger.Pending[id] != named) {
			return true
		}
	}
	return false
}
