package protocol

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// releaseSpare begins to remove Machines that no claim has wanted for the grace period, or that
// have to make room for waiting claims. The claims whose wait is to restart because of that keep
// theirs for now: see [books.ready].
func (b *books) releaseSpare() {
	makesRoom := b.blocking() > 0
	removable := b.removable(makesRoom)
	release := removable
	if n := b.waiting(); makesRoom && b.ready(n) < clamp(n) {
		release = release[:min(len(release), int(b.ready(n)))]
	}
	reordered := len(release) < len(removable)
	for _, m := range release {
		if !b.release(m, Release{Claim: ClaimOf(m)}) {
			break
		}
		b.d.Removes, reordered = true, true
	}
	if makesRoom && reordered {
		b.d.reordered = "the node group is full, and a Machine that no claim may have is removed to make room for another one"
	}
}

// removable returns the Machines to remove, in the order in which they go. It never returns the
// floor's Machines, and none during a rollout, whose surge Machines would be mistaken for spares.
// While a claim waits it returns none either, unless no other Machine can be ordered for the claim:
// then it returns those that the claim may not have. If makesRoom is set, they go even if the
// claims own all replicas.
func (b *books) removable(makesRoom bool) []*clusterv1.Machine {
	spare := max(b.spare(), b.blocking())
	if spare <= 0 || !b.mayShrink() {
		return nil
	}
	free := b.free()
	surplus := min(len(free)-int(b.floor()), int(spare))
	free = slices.DeleteFunc(free, func(m *clusterv1.Machine) bool { return b.class(m) == ofFloor })
	// A Machine without infrastructure goes even if a claim waits: no claim can have it, and
	// each reconcile of its MachineSet ends with an error until it is gone.
	gone := slices.DeleteFunc(slices.Clone(free), func(m *clusterv1.Machine) bool { return !b.infrastructureGone(m) })
	waits := (b.next.Unassigned() > 0 || len(b.d.Queued) > 0) && b.d.Unmet == 0
	if waits && len(gone) == 0 {
		return nil
	}
	if !b.graceOver() {
		if makesRoom {
			b.d.awaits = "a Machine that no claim may have is about to make room for another one"
		}
		return nil
	}
	observed := b.observed(b.Deployment.Generation)
	if b.rollingOut() || !observed && len(gone) == 0 {
		return nil
	}
	switch {
	case waits || !observed:
		free = gone
	case b.d.Unmet > 0:
		usable := func(m *clusterv1.Machine) bool { return b.class(m) == fresh || b.class(m) == suspect }
		// The floor keeps Machines that run, not those that a claim may have yet.
		surplus = min(surplus, len(slices.DeleteFunc(b.free(), usable))-int(b.floor()))
		free = slices.DeleteFunc(free, usable)
	}
	// First Machines of claims that ended, because they are certainly not the user's; then those
	// that have no Node, then those that may have none, then the newest.
	slices.SortStableFunc(free, func(x, y *clusterv1.Machine) int {
		if c := cmp.Or(strings.Compare(ClaimOf(y), "")-strings.Compare(ClaimOf(x), ""), b.progress(x)-b.progress(y)); c != 0 {
			return c
		}
		if HasNode(x) != HasNode(y) {
			return lo.Ternary(HasNode(y), -1, 1)
		}
		return y.CreationTimestamp.Compare(x.CreationTimestamp.Time)
	})
	return free[:max(0, min(surplus, len(free)))]
}

// quotaLook is how soon a group is looked at again whose claims wait because a quota is used up.
const quotaLook = 15 * time.Second

// blocking returns how many Machines have to go before the waiting claims can get theirs: the max
// size allows no others, and no claim may have those that are there. Each release that is under way
// makes room for one. That is not certain while a quota is used up, and not true while replicas
// are above the max size: the agent would not raise them to that number again.
func (b *books) blocking() int32 {
	if b.Quota != "" || b.Group.Max != nil && b.d.Replicas > *b.Group.Max {
		return 0
	}
	return max(0, b.d.Unmet-b.unreleased())
}

// graceOver reports whether the spare has existed for the grace period. If not, it asks to be woken
// when it has.
func (b *books) graceOver() bool {
	if b.SpareSince.IsZero() {
		b.d.Wake(b.SpareGrace)
		return false
	}
	left := b.SpareGrace - b.Now.Sub(b.SpareSince)
	if left > 0 {
		b.d.Wake(left)
	}
	return left <= 0
}

// shrink removes spares whose Machines never came because their MachineSet is blocked. If
// replicas were lowered while the MachineSet may still create those Machines, it could delete
// others. So the MachineSet is paused first, and then its Machines are counted. It is unpaused once
// the lowered number has reached it, or when the spare has found another use. The ledger records
// which of the two the pause is for, so that no agent unpauses the MachineSet while another one
// counts.
func (b *books) shrink() {
	// Spares that are Machines are released, not counted down.
	missing := min(b.Group.Replicas-Count(b.Machines), b.spare()-max(0, Count(b.free())-b.floor()))
	active := b.activeSets()
	may := missing > 0 && len(active) == 1 && !b.rollingOut() && b.mayShrink() && !b.deleted() && len(b.d.Queued) == 0
	if b.next.Shrink == nil {
		for _, set := range b.Sets {
			if set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {
				b.next.Shrink = &Shrink{Set: set.Name, Done: true} // the reason is lost
				return
			}
		}
		if may && b.graceOver() && b.observed(b.Deployment.Generation) && !hasPausedAnnotation(active[0]) && !b.lowersUnderPause() {
			b.next.Shrink = &Shrink{Set: active[0].Name}
		}
		return
	}
	set := b.set(b.next.Shrink.Set)
	ours := set != nil && set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
	may = may && active[0] == set
	switch {
	case !b.next.Shrink.Done && may && !hasPausedAnnotation(set):
		if b.observed(b.Deployment.Generation) {
			b.d.Actions = append(b.d.Actions, Action{Kind: PauseMachineSet, Set: set})
		}
	case !b.next.Shrink.Done && may && ours:
		// Do not wait for the MachineSet to observe its replicas: while paused it never will.
		switch {
		case !IsPaused(set.Status.Conditions):
		case b.replicasDistributed():
			b.d.Replicas -= missing
			b.d.Urgent, b.d.Removes = true, true
			b.next.Shrink = &Shrink{Set: set.Name, Done: true}
		case b.scaleDownObserved(): // a raise is put off until it is unpaused
			b.next.Shrink = &Shrink{Set: set.Name, Done: true}
		}
	case !b.next.Shrink.Done:
		b.next.Shrink = &Shrink{Set: b.next.Shrink.Set, Done: true} // the spare has found another use
	case !ours:
		b.next.Shrink = nil
	default:
		// A rollout that began meanwhile waits for the MachineSet to release its Machines, and so
		// does the deletion of the group.
		overtaken := b.deleted() || len(active) != 1 || active[0] != set || !b.onDelete() && b.newest() != set
		if overtaken || b.scaleDownObserved() && b.d.Replicas == b.Group.Replicas {
			b.d.Actions = append(b.d.Actions, Action{Kind: UnpauseMachineSet, Set: set})
		}
	}
}

// hasPausedAnnotation reports whether the MachineSet has the paused annotation, from any actor.
func hasPausedAnnotation(set *clusterv1.MachineSet) bool {
	_, yes := set.Annotations[clusterv1.PausedAnnotation]
	return yes
}
