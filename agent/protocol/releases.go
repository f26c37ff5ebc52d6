package protocol

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// startReleases enters the Machines of claims that are being released and that cannot be handed over. A record that names a
// Machine whose claim is not being released (somebody edited the ledger) is dropped: no claimed Machine is ever deleted.
func (s *Snapshot) startReleases(d *Decision, next *Ledger) {
	for uid, r := range next.Releasing {
		m := s.machine(uid)
		if m == nil || r.GivenBack {
			continue
		}
		if !Alive(m) {
			if !Held(m) && r.Set == "" { // another actor deleted it before our finalizer was on it: what replaces it is a spare
				delete(next.Releasing, uid)
			}
			continue
		}
		if s.orphaned(ClaimOf(m)) {
			continue
		}
		if c := s.Claim(ClaimOf(m)); c == nil || c.CurrentPhase() != v1alpha1.PhaseReleasing {
			delete(next.Releasing, uid)
		}
	}
	for _, c := range s.Claims {
		if c.CurrentPhase() != v1alpha1.PhaseReleasing || c.Status.Machine == nil {
			continue
		}
		m := s.machine(c.Status.Machine.UID)
		if m == nil || ClaimOf(m) != c.Spec.ClaimID || s.handsOver(m) {
			continue
		}
		if _, begun := next.Releasing[m.UID]; begun {
			continue
		}
		if !Alive(m) || s.Group.Has(eligibility.Paused) { // a deletion could not be taken back, and a move loses it
			continue
		}
		if r := (Release{Machine: m.Name, Claim: c.Spec.ClaimID, Drained: c.Status.Drained}); d.budget.release(m.UID, r) {
			next.Releasing[m.UID] = r
		} else if crowded := s.crowded(); crowded != nil {
			d.explainOnce(c, ReasonReleaseRequested, crowded.Message)
		}
	}
	s.resumeReleases(d, next)
}

// resumeReleases enters the Machines that no claim has and that the finalizer says were being released, although they live and the
// ledger does not record them: a move or a restore makes Machines again without their deletion and under another UID. Nothing
// else would ever take them, as nothing but their release takes that finalizer off.
func (s *Snapshot) resumeReleases(d *Decision, next *Ledger) {
	if !s.mayShrink(next) {
		return
	}
	for _, m := range s.Machines {
		if !Alive(m) || !Held(m) || !s.orphaned(ClaimOf(m)) {
			continue
		}
		r := Release{Machine: m.Name, Claim: ClaimOf(m)}
		if _, recorded := next.Releasing[m.UID]; !recorded && d.budget.release(m.UID, r) {
			next.Releasing[m.UID] = r
		}
	}
}

// handsOver reports whether a Machine whose claim is released should be kept for the next claim instead of being deleted:
// it is on its way and certainly has no Node yet. That its Node was drained proves that there is one.
func (s *Snapshot) handsOver(m *clusterv1.Machine) bool {
	if !Alive(m) || Held(m) || !s.nodeless(m) || Outdated(m) || s.hopeless(m) {
		return false
	}
	if c := s.Claim(ClaimOf(m)); c != nil && (c.Status.FailedAt != nil || c.Status.Drained) {
		return false
	}
	_, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]
	return !marked
}

// giveBack lowers replicas for the Machines that are held by our finalizer only, their instance gone, and drops the records of Machines
// that are gone.
func (s *Snapshot) giveBack(d *Decision, next *Ledger) {
	var ready []types.UID
	for uid, r := range next.Releasing {
		if s.deleted() && r.Set != "" {
			// All of it goes, and Cluster API must not be paused for that.
			r.GivenBack = true
			next.Releasing[uid] = r
		}
		m := s.machine(uid)
		switch {
		case m == nil:
			// Marked: done. Not marked: somebody else removed it, its replacement is a spare. Under pause the lowering
			// is completed below all the same, as the MachineSet may have been lowered already.
			if r.GivenBack || r.Set == "" {
				delete(next.Releasing, uid)
			} else {
				ready = append(ready, uid)
			}
		case !r.GivenBack && DeletionCompleted(m):
			if SetOf(m) == "" && r.Set == "" { // its MachineSet was deleted and left it behind: nothing counts it
				r.GivenBack = true
				next.Releasing[uid] = r
				continue
			}
			ready = append(ready, uid)
		}
	}
	if len(ready) == 0 || s.deleted() {
		return
	}
	slices.Sort(ready)

	active := s.activeSets()
	sole := len(active) == 1 && !slices.ContainsFunc(ready, func(uid types.UID) bool {
		m := s.machine(uid)
		return m == nil || next.Releasing[uid].Set != "" || SetOf(m) != active[0].Name
	})
	if sole {
		if s.Deployment.Status.ObservedGeneration < s.Deployment.Generation {
			return // a template change that is not observed yet would make it the wrong variant
		}
		// Those beyond the MachineSet's replicas a human's lowering has taken already: to lower once more would have Cluster API
		// choose a Machine.
		taken := -ReplicasOf(active[0])
		for _, m := range s.Machines {
			if SetOf(m) == active[0].Name && !next.Releasing[m.UID].GivenBack {
				taken++
			}
		}
		d.Replicas -= min(max(0, Count(ready)-max(0, taken)), d.Replicas)
		for _, uid := range ready {
			r := next.Releasing[uid]
			r.GivenBack = true
			next.Releasing[uid] = r
		}
		d.Urgent = true
		return
	}
	s.giveBackPaused(d, next, ready)
}

// dateGiveBacks notes which generation carries the replicas that this decision gives back. When claims entered in the same
// write take as many, spec does not change and no new generation comes: the present one is right then, as the MachineSets
// need not change either.
func (s *Snapshot) dateGiveBacks(d *Decision, next *Ledger) {
	generation := s.Deployment.Generation
	if d.Replicas != s.Group.Replicas {
		generation++
	}
	for uid, r := range next.Releasing {
		if r.GivenBack && (s.Ledger == nil || !s.Ledger.Releasing[uid].GivenBack) {
			r.Generation = generation
			next.Releasing[uid] = r
		}
	}
}

// mayDelete reports whether no live claim has the Machine: its own was released, or there is none.
func (s *Snapshot) mayDelete(m *clusterv1.Machine) bool {
	id := ClaimOf(m)
	if s.orphaned(id) {
		return true
	}
	c := s.Claim(id)
	return c != nil && c.CurrentPhase() == v1alpha1.PhaseReleasing
}

// GaveBack reports whether the decision lowers replicas for Machines that are gone.
func (d *Decision) GaveBack(before *Ledger) bool {
	if before == nil {
		return false
	}
	for uid, r := range d.Ledger.Releasing {
		if r.GivenBack && !before.Releasing[uid].GivenBack {
			return true
		}
	}
	return false
}
