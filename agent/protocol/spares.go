package protocol

import (
	"cmp"
	"slices"
	"strings"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// releaseSpare begins to remove Machines that nobody has wanted for the grace period: never during a rollout, whose surge
// Machines would be taken for spares, and never the floor's. Nor while a claim waits, unless the max size allows no other Machine
// for it: then those go that it may not have.
func (s *Snapshot) releaseSpare(d *Decision, next *Ledger, spare int32) int32 {
	if spare <= 0 || !s.mayShrink(next) {
		return spare
	}
	free := s.free(next)
	surplus := min(len(free)-int(s.floor(next)), int(spare))
	// A Machine without infrastructure goes whoever waits: nobody can have it, and Cluster API sees to no other one before.
	gone := slices.DeleteFunc(slices.Clone(free), func(m *clusterv1.Machine) bool { return !s.gone(m) })
	waits := (next.Unnamed() > 0 || len(d.Queued) > 0) && d.Unmet == 0
	if waits && len(gone) == 0 || !s.graceOver(d) {
		return spare
	}
	observed := s.observed(s.Deployment.Generation)
	if s.rollingOut() || !observed && len(gone) == 0 {
		return spare
	}
	switch {
	case waits || !observed:
		free = gone
	case d.Unmet > 0:
		free = slices.DeleteFunc(free, s.usable)
	}
	surplus = min(surplus, len(free))
	if surplus <= 0 {
		return spare
	}
	// Those of claims that ended first, as they are certainly not the user's; then those without a Node, then the newest.
	slices.SortStableFunc(free, func(a, b *clusterv1.Machine) int {
		if c := cmp.Or(strings.Compare(ClaimOf(b), "")-strings.Compare(ClaimOf(a), ""), s.progress(a)-s.progress(b)); c != 0 {
			return c
		}
		return b.CreationTimestamp.Compare(a.CreationTimestamp.Time)
	})
	for _, m := range free[:surplus] {
		r := Release{Machine: m.Name, Claim: ClaimOf(m)}
		if !d.budget.release(m.UID, r) {
			break
		}
		next.Releasing[m.UID] = r
		d.Chose = true
		spare--
	}
	return spare
}

// mayShrink reports whether Machines, or replicas, that nobody claims may be removed.
func (s *Snapshot) mayShrink(next *Ledger) bool { return s.Group.MayShrink() && !next.Lowered }

// graceOver reports whether the spare has been there for the grace period, and asks to be woken then.
func (s *Snapshot) graceOver(d *Decision) bool {
	if s.SpareSince.IsZero() {
		d.Wake(s.SpareGrace)
		return false
	}
	left := s.SpareGrace - s.Now.Sub(s.SpareSince)
	if left > 0 {
		d.Wake(left)
	}
	return left <= 0
}

// shrink gives spares back whose Machines never came, because their MachineSet is blocked. Lowering replicas while the
// MachineSet may be making them after all would make it delete others, so it is paused first and its Machines are counted
// then. It is unpaused once the lowered number has reached it, or when the spare found another use. Which of the two it is
// paused for is in the ledger, so that no agent unpauses it while another one counts.
func (s *Snapshot) shrink(d *Decision, next *Ledger, spare int32) int32 {
	// Spares that are Machines are released, not counted down.
	missing := min(s.Group.Replicas-Count(s.Machines), spare-max(0, Count(s.free(next))-s.floor(next)))
	active := s.activeSets()
	may := missing > 0 && len(active) == 1 && !s.rollingOut() && s.mayShrink(next) && !s.deleted() && len(d.Queued) == 0
	if next.Shrink == nil {
		for _, set := range s.Sets {
			if set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {
				next.Shrink = &Shrink{Set: set.Name, Done: true} // the reason is lost
				return spare
			}
		}
		if may && s.graceOver(d) && s.observed(s.Deployment.Generation) && !marked(active[0]) && !lowersUnderPause(next) {
			next.Shrink = &Shrink{Set: active[0].Name}
		}
		return spare
	}
	set := s.set(next.Shrink.Set)
	ours := set != nil && set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
	may = may && active[0] == set
	switch {
	case !next.Shrink.Done && may && !marked(set):
		if s.observed(s.Deployment.Generation) {
			d.Actions = append(d.Actions, Action{Kind: PauseMachineSet, Set: set})
		}
	case !next.Shrink.Done && may && ours:
		// That the MachineSet has observed its replicas is not asked: paused, it never will.
		if IsPaused(set.Status.Conditions) && s.assigned() {
			d.Replicas -= missing
			d.Urgent = true
			next.Shrink = &Shrink{Set: set.Name, Done: true}
			return spare - missing
		}
	case !next.Shrink.Done:
		next.Shrink = &Shrink{Set: next.Shrink.Set, Done: true} // the spare found another use
	case !ours:
		next.Shrink = nil
	default:
		// A rollout that began meanwhile waits for the MachineSet to let its Machines go, and so does the deletion of the group.
		overtaken := s.deleted() || len(active) != 1 || active[0] != set || !s.onDelete() && s.newest() != set
		if overtaken || s.allLowered() && d.Replicas == s.Group.Replicas {
			d.Actions = append(d.Actions, Action{Kind: UnpauseMachineSet, Set: set})
		}
	}
	return spare
}

// marked reports whether somebody wants the MachineSet paused.
func marked(set *clusterv1.MachineSet) bool {
	_, yes := set.Annotations[clusterv1.PausedAnnotation]
	return yes
}

// Shrank reports whether the decision lowers replicas for spares whose Machines never came.
func (d *Decision) Shrank(before *Ledger) bool {
	return before != nil && before.Shrink != nil && !before.Shrink.Done && d.Ledger.Shrink != nil && d.Ledger.Shrink.Done
}
