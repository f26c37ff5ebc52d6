package protocol

import (
	"maps"
	"slices"

	"github.com/samber/lo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// decrementPaused is the variant for several active MachineSets, or one that is not the newest,
// where Cluster API could charge a lowered MachineDeployment to another MachineSet. It pauses the
// MachineDeployment, lowers the right MachineSet, then lowers the MachineDeployment and unpauses it
// in one write. Every step can be repeated, and any agent that finds the sequence half done
// completes it.
func (b *books) decrementPaused(ready []types.UID) {
	value, paused := b.Deployment.Annotations[clusterv1.PausedAnnotation]
	ours := paused && value == v1alpha1.PausedByAgent
	begun := slices.DeleteFunc(slices.Clone(ready), func(uid types.UID) bool { return b.next.Releasing[uid].Set == "" })
	if len(begun) == 0 {
		// Otherwise another actor paused it: wait. Wait too while a MachineSet is paused for spares
		// that never came. Such a MachineSet would not observe its lowering, and it is not unpaused
		// before the MachineDeployment is reconciled again.
		if !paused && b.next.Shrink == nil {
			b.beginPause(ready)
		}
		return
	}
	begun = slices.DeleteFunc(begun, func(uid types.UID) bool {
		// Another actor took our finalizer off before the MachineSet was lowered. The Machine is
		// being replaced, so nothing may be lowered.
		lost := b.machine(uid) == nil && !b.lowered(uid)
		if lost {
			delete(b.next.Releasing, uid)
			return true
		}
		// A person has paused the MachineSet before it was lowered: it begins anew once it is not
		// paused. Otherwise the MachineDeployment would stay paused for as long.
		r := b.next.Releasing[uid]
		if set := b.set(r.Set); set != nil && hasPausedAnnotation(set) && !b.lowered(uid) {
			r.Set = ""
			b.next.Releasing[uid] = r
			return true
		}
		return false
	})
	if ours && IsPaused(b.Deployment.Status.Conditions) {
		if b.deletionsUnreported(begun) {
			return // once they are reported, replicas may be lowered by more
		}
		begun = b.skipReplaced(begun)
	}
	switch {
	case len(begun) == 0:
		if ours {
			b.d.Pause, b.d.Urgent = PauseRemove, true
		}
	case !paused:
		b.pause() // our pause was removed: set it again and go on
	case ours && IsPaused(b.Deployment.Status.Conditions) && b.setsLowered(begun):
		b.d.Replicas -= min(Count(begun), b.d.Replicas)
		for _, uid := range begun {
			b.recordDecrement(uid)
		}
		b.d.Pause, b.d.Urgent = PauseRemove, true
	}
}

// skipReplaced records the decrement for Machines whose replicas a rollout or another writer's
// lowering has taken already. Nothing is lowered for them, and what replaces them is a spare. It
// returns the others. The numbers do not change meanwhile, because the MachineDeployment is paused.
func (b *books) skipReplaced(begun []types.UID) []types.UID {
	after, lowerable := map[string]int32{}, map[string]int32{} // by MachineSet: replicas after all lowering; by how much they can be lowered
	for _, set := range b.Sets {
		after[set.Name], lowerable[set.Name] = ReplicasOf(set), b.lowerable(set, ReplicasOf(set))
	}
	left := slices.DeleteFunc(slices.Clone(begun), func(uid types.UID) bool {
		name := b.next.Releasing[uid].Set
		switch {
		case b.lowered(uid):
			return false
		case lowerable[name] == 0 && b.machine(uid) != nil:
			b.recordDecrement(uid)
			return true
		}
		lowerable[name]--
		after[name]--
		return false
	})
	// If a MachineSet has more replicas than the MachineDeployment, Cluster API lowers it to that
	// number, whichever Machines it has.
	for _, uid := range slices.Clone(left) {
		name := b.next.Releasing[uid].Set
		most := slices.Max(append(slices.Collect(maps.Values(after)), 0))
		if !b.lowered(uid) && most > b.d.Replicas-Count(left) {
			after[name]++
			b.recordDecrement(uid)
			left = slices.DeleteFunc(left, func(other types.UID) bool { return other == uid })
		}
	}
	return left
}

// deletionsUnreported reports whether a MachineSet can only be lowered for fewer Machines than it
// has to be because Cluster API is about to report that it deletes another one of its Machines.
func (b *books) deletionsUnreported(begun []types.UID) bool {
	return slices.ContainsFunc(b.Sets, func(set *clusterv1.MachineSet) bool {
		return b.awaitsReport(set, Count(lo.Filter(begun, func(uid types.UID, _ int) bool {
			return b.next.Releasing[uid].Set == set.Name && !b.lowered(uid)
		})))
	})
}

// awaitsReport is deletionsUnreported for one MachineSet, which has to be lowered by a number.
func (b *books) awaitsReport(set *clusterv1.MachineSet, by int32) bool {
	return b.lowerable(set, ReplicasOf(set)) < by && b.deletionUnreported(set)
}

// unpause takes off our pause when no release needs it, because the ledger that needed it is lost.
// It drops the record of a pause when no claim waits: a later one waits from when it was made.
func (b *books) unpause() {
	if len(b.next.Pending) == 0 {
		b.next.Paused = nil
	}
	ours := b.Deployment.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
	if ours && b.d.Pause == PauseKeep && !b.lowersUnderPause() {
		b.d.Pause, b.d.Urgent = PauseRemove, true
	}
}

// lowersUnderPause reports whether a release needs the MachineDeployment to be paused.
func (b *books) lowersUnderPause() bool {
	for _, r := range b.next.Releasing {
		if r.Set != "" && !r.Decremented {
			return true
		}
	}
	return false
}

// readyOf returns how many of the Machines are of the MachineSet.
func (b *books) readyOf(set *clusterv1.MachineSet, ready []types.UID) int32 {
	return Count(lo.Filter(ready, func(uid types.UID, _ int) bool {
		m := b.machine(uid)
		return m != nil && SetOf(m) == set.Name
	}))
}

// beginPause records which MachineSet each Machine's replica belongs to, and pauses the
// MachineDeployment in the same write. A MachineSet that is already paused observes no lowering, so
// its Machines wait and do not cause a pause. Nor do those that would wait for a report during the
// pause.
func (b *books) beginPause(ready []types.UID) {
	for _, uid := range ready {
		m := b.machine(uid)
		if m == nil || SetOf(m) == "" {
			continue
		}
		set := b.set(SetOf(m))
		if set != nil && slices.Contains(ReleasedFrom(set), uid) {
			// It was lowered under an earlier pause, which ended because the ledger was lost or a
			// person had paused the MachineSet. Cluster API makes up for that replica, with a
			// Machine that is a spare.
			b.recordDecrement(uid)
			b.d.Urgent = true
			continue
		}
		if set != nil && (hasPausedAnnotation(set) || b.awaitsReport(set, b.readyOf(set, ready))) {
			continue
		}
		r := b.next.Releasing[uid]
		r.Set = SetOf(m)
		b.next.Releasing[uid] = r
		b.pause()
	}
}

// pause pauses the MachineDeployment, and records the pause, because Cluster API's condition will
// only show when this pause ended. See [Snapshot.pauseEnded].
func (b *books) pause() {
	b.d.Pause, b.d.Urgent = PauseSet, true
	b.next.Paused = &Paused{At: b.Now.Unix(), Before: max(0, b.pauseEnded().Unix())}
}

// setsLowered reports whether every MachineSet has been lowered and has observed it. Until then it
// adds the actions that lower them.
func (b *books) setsLowered(begun []types.UID) bool {
	missing := map[string][]types.UID{}
	done := true
	for _, uid := range begun {
		name := b.next.Releasing[uid].Set
		set := b.set(name)
		switch {
		case !b.lowered(uid):
			missing[name] = append(missing[name], uid)
			done = false
		case set != nil && behind(set) && !observedAsPaused(set):
			done = false
		}
	}
	for _, set := range b.Sets {
		if uids := missing[set.Name]; len(uids) > 0 {
			b.d.Actions = append(b.d.Actions, Action{Kind: LowerSet, Set: set, UIDs: uids, Counts: begun})
		}
	}
	return done
}

// observedAsPaused reports whether Cluster API has observed the MachineSet's present generation,
// and leaves it as it is because a person has paused it. Its Machines wait for it: see
// [Snapshot.reconciledFor].
func observedAsPaused(set *clusterv1.MachineSet) bool {
	return hasPausedAnnotation(set) && slices.ContainsFunc(set.Status.Conditions, func(c metav1.Condition) bool {
		return c.Type == clusterv1.PausedCondition && c.Status == metav1.ConditionTrue && c.ObservedGeneration >= set.Generation
	})
}

func (s *Snapshot) set(name string) *clusterv1.MachineSet {
	for _, set := range s.Sets {
		if set.Name == name {
			return set
		}
	}
	return nil
}

// lowered reports whether the Machine's MachineSet was lowered for it under pause. A MachineSet
// that is gone counts as lowered.
func (b *books) lowered(uid types.UID) bool {
	r := b.next.Releasing[uid]
	found := b.set(r.Set)
	return found == nil || slices.Contains(ReleasedFrom(found), uid) || r.LoweredAs != "" && slices.Contains(ReleasedFrom(found), r.LoweredAs)
}

// IsPaused reports whether the conditions state that Cluster API has paused the object.
func IsPaused(conditions []metav1.Condition) bool {
	return slices.ContainsFunc(conditions, func(c metav1.Condition) bool {
		return c.Type == clusterv1.PausedCondition && c.Status == metav1.ConditionTrue
	})
}

// ReleasedFrom returns the UIDs of the Machines that a MachineSet was lowered for under pause.
func ReleasedFrom(set *clusterv1.MachineSet) []types.UID {
	return splitUIDs(set.Annotations[v1alpha1.ReleasedAnnotation])
}
