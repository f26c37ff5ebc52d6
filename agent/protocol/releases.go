package protocol

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// startReleases records the release of Machines whose claims are being released and that cannot be
// handed over. A record of a Machine whose claim is not being released is dropped, for example
// after the ledger was edited by hand, so that no claimed Machine is ever deleted.
func (b *books) startReleases() {
	for uid, r := range b.next.Releasing {
		m := b.machine(uid)
		if m == nil || r.Decremented {
			continue
		}
		if !Alive(m) {
			if !HasFinalizer(m) && r.Set == "" { // another actor deleted it first; its replacement is a spare
				delete(b.next.Releasing, uid)
			}
			continue
		}
		if b.orphaned(ClaimOf(m)) {
			continue
		}
		if c := b.Claim(ClaimOf(m)); c == nil || c.CurrentPhase() != v1alpha1.PhaseReleasing {
			delete(b.next.Releasing, uid)
		}
	}
	kept := b.keepFailed()
	for _, c := range b.Claims {
		if c.CurrentPhase() != v1alpha1.PhaseReleasing || c.Status.Machine == nil || kept[c.Spec.ClaimID] {
			continue
		}
		m := b.machine(c.Status.Machine.UID)
		if m == nil || ClaimOf(m) != c.Spec.ClaimID || b.returned(m.UID) || b.handsOver(m) {
			continue
		}
		if _, begun := b.next.Releasing[m.UID]; begun {
			continue
		}
		if !Alive(m) || b.Group.Has(eligibility.Paused) { // a deletion cannot be undone, and a move loses it
			continue
		}
		if b.release(m, Release{Claim: c.Spec.ClaimID, Drained: c.Status.Drained}) {
			continue
		}
		if crowded := b.crowded(); crowded != nil {
			b.d.explainOnce(c, ReasonReleaseRequested, crowded.Message)
		}
	}
	b.resumeReleases()
}

// resumeReleases records the release of Machines that carry the release finalizer, but live and
// have neither a claim nor a record. A move or a restore creates Machines again without their
// deletion and under another UID. Only their release takes the finalizer off, so nothing else would
// ever remove them.
func (b *books) resumeReleases() {
	if !b.mayShrink() {
		return
	}
	for _, m := range b.Machines {
		if b.class(m) == stranded {
			b.release(m, Release{Claim: ClaimOf(m)})
		}
	}
}

// handsOver reports whether a released claim's Machine is kept for the next claim: it is on its way
// and certainly has no Node yet. A drained Node proves that there is one.
func (s *Snapshot) handsOver(m *clusterv1.Machine) bool {
	if !Alive(m) || HasFinalizer(m) || !s.nodeless(m) || Outdated(m) || s.hasFailed(m) {
		return false
	}
	if c := s.Claim(ClaimOf(m)); c != nil && (c.Status.FailedAt != nil || c.Status.Drained) {
		return false
	}
	_, deleteRequested := m.Annotations[clusterv1.DeleteMachineAnnotation]
	return !deleteRequested
}

// decrement lowers replicas for Machines whose instance is gone and that only our finalizer keeps,
// and drops the records of Machines that are gone.
func (b *books) decrement() {
	var ready []types.UID
	for uid, r := range b.next.Releasing {
		if b.deleted() && r.Set != "" {
			// The whole group is being deleted, and Cluster API must not be paused for that.
			b.recordDecrement(uid)
		}
		m := b.machine(uid)
		switch {
		case m == nil:
			// If decremented, the release is done. Otherwise another actor removed the Machine, and
			// its replacement is a spare. Under pause the lowering is completed below all the same,
			// because the MachineSet may have been lowered already.
			if r.Decremented || r.Set == "" {
				delete(b.next.Releasing, uid)
			} else {
				ready = append(ready, uid)
			}
		case !r.Decremented && DeletionCompleted(m):
			if SetOf(m) == "" && r.Set == "" { // its MachineSet was deleted and orphaned it: it has no replica
				b.recordDecrement(uid)
				continue
			}
			ready = append(ready, uid)
		}
	}
	if len(ready) == 0 || b.deleted() {
		return
	}
	slices.Sort(ready)

	active := b.activeSets()
	sole := len(active) == 1 && !slices.ContainsFunc(ready, func(uid types.UID) bool {
		m := b.machine(uid)
		return m == nil || b.next.Releasing[uid].Set != "" || SetOf(m) != active[0].Name
	})
	if sole && b.Deployment.Status.ObservedGeneration < b.Deployment.Generation {
		return // a template change that was not observed yet would make this the wrong variant
	}
	// A rollout that may not surge begins with an old MachineSet alone. Cluster API charges a
	// lowered MachineDeployment to the replicas that the newest one does not have yet, and leaves
	// the old one as it is.
	if sole && (b.onDelete() || active[0] == b.newest()) {
		// Another writer's lowering may have taken the replicas already. Lowering again would have
		// Cluster API choose another Machine.
		lowerable := b.lowerable(active[0], b.Group.Replicas)
		if lowerable < Count(ready) && b.deletionUnreported(active[0]) {
			return // once it is reported, replicas may be lowered by one more
		}
		b.d.Replicas -= min(Count(ready), lowerable, b.d.Replicas)
		for _, uid := range ready {
			b.recordDecrement(uid)
		}
		b.d.Urgent = true
		return
	}
	b.decrementPaused(ready)
}

// lowerable returns by how much the replicas of a MachineSet, or most if that is less, can be
// lowered without Cluster API choosing another Machine to delete. It counts the Machines that it
// already reports as being deleted first.
func (b *books) lowerable(set *clusterv1.MachineSet, most int32) int32 {
	lowerable := min(ReplicasOf(set), most)
	for _, m := range b.Machines {
		if SetOf(m) == set.Name && !reportedAsDeleting(m) {
			lowerable--
		}
	}
	return max(0, lowerable)
}

// deletionUnreported reports whether a Machine of the set is being deleted, and Cluster API is
// about to report that.
func (b *books) deletionUnreported(set *clusterv1.MachineSet) bool {
	return slices.ContainsFunc(b.Machines, func(m *clusterv1.Machine) bool {
		return SetOf(m) == set.Name && !Alive(m) && !reportedAsDeleting(m) && !b.paused(m)
	})
}

// stampGenerations records the generation that carries this decision's decrements. If claims
// entered in the same write take as many replicas, spec does not change and there is no new
// generation. The present generation is right then, because the MachineSets need not change either.
func (b *books) stampGenerations() {
	generation := b.Deployment.Generation
	if b.d.Replicas != b.Group.Replicas {
		generation++
	}
	for uid, r := range b.next.Releasing {
		if r.Decremented && (b.Ledger == nil || !b.Ledger.Releasing[uid].Decremented) {
			r.Generation = generation
			b.next.Releasing[uid] = r
		}
	}
}

// mayDelete reports whether no live claim has the Machine: its claim is being released or has
// ended, or it has none.
func (s *Snapshot) mayDelete(m *clusterv1.Machine) bool {
	id := ClaimOf(m)
	if s.orphaned(id) {
		return true
	}
	c := s.Claim(id)
	return c != nil && c.CurrentPhase() == v1alpha1.PhaseReleasing
}
