package protocol

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// giveBackPaused is the variant for several active MachineSets, where lowering the MachineDeployment could be charged to
// another one: pause, lower the right MachineSet, then lower the MachineDeployment and unpause in one write. Every step
// can be repeated, and whoever finds it half done completes it.
func (b *books) giveBackPaused(ready []types.UID) {
	value, paused := b.Deployment.Annotations[clusterv1.PausedAnnotation]
	ours := paused && value == v1alpha1.PausedByAgent
	begun := slices.DeleteFunc(slices.Clone(ready), func(uid types.UID) bool { return b.next.Releasing[uid].Set == "" })
	if len(begun) == 0 {
		// Else somebody else paused it: wait for them. Nor while a MachineSet is paused for spares that never came: it would not
		// say that it observed its lowering, and is not unpaused before the MachineDeployment goes on.
		if !paused && b.next.Shrink == nil {
			b.beginPause(ready)
		}
		return
	}
	begun = slices.DeleteFunc(begun, func(uid types.UID) bool {
		// Somebody took our finalizer off before its MachineSet was lowered: it is being replaced, so nothing may be lowered.
		lost := b.machine(uid) == nil && !b.lowered(uid)
		if lost {
			delete(b.next.Releasing, uid)
		}
		return lost
	})
	if ours && IsPaused(b.Deployment.Status.Conditions) {
		begun = b.skipReplaced(begun)
	}
	switch {
	case len(begun) == 0:
		if ours {
			b.d.Pause, b.d.Urgent = PauseRemove, true
		}
	case !paused:
		b.d.Pause, b.d.Urgent = PauseSet, true // our pause was removed; put it back and go on
	case ours && IsPaused(b.Deployment.Status.Conditions) && b.setsLowered(begun):
		b.d.Replicas -= min(Count(begun), b.d.Replicas)
		for _, uid := range begun {
			b.giveBack(uid)
		}
		b.d.Pause, b.d.Urgent = PauseRemove, true
	}
}

// skipReplaced counts replicas as given back that are taken already, by a rollout or by a human's lowering: nothing is lowered
// for those Machines, and what replaces them is a spare. It returns the others. Nothing changes the numbers meanwhile, as the
// MachineDeployment is paused.
func (b *books) skipReplaced(begun []types.UID) []types.UID {
	after, excess := map[string]int32{}, map[string]int32{} // by MachineSet: replicas once all is lowered; Machines beyond them
	for _, set := range b.Sets {
		after[set.Name], excess[set.Name] = ReplicasOf(set), -ReplicasOf(set)
	}
	for _, m := range b.Machines {
		if !b.next.Releasing[m.UID].GivenBack && (!slices.Contains(begun, m.UID) || !b.lowered(m.UID)) {
			excess[SetOf(m)]++
		}
	}
	left := slices.DeleteFunc(slices.Clone(begun), func(uid types.UID) bool {
		name := b.next.Releasing[uid].Set
		switch {
		case b.lowered(uid):
			return false
		case excess[name] > 0 && b.machine(uid) != nil:
			excess[name]--
			b.giveBack(uid)
			return true
		}
		after[name]--
		return false
	})
	// Cluster API cuts a MachineSet that has more replicas than the MachineDeployment down to them, whoever's Machines it has.
	for _, uid := range slices.Clone(left) {
		name := b.next.Releasing[uid].Set
		most := slices.Max(append(slices.Collect(maps.Values(after)), 0))
		if !b.lowered(uid) && most > b.d.Replicas-Count(left) {
			after[name]++
			b.giveBack(uid)
			left = slices.DeleteFunc(left, func(other types.UID) bool { return other == uid })
		}
	}
	return left
}

// unpause takes off our pause where no release needs it: the ledger that did is lost.
func (b *books) unpause() {
	ours := b.Deployment.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
	if ours && b.d.Pause == PauseKeep && !b.lowersUnderPause() {
		b.d.Pause, b.d.Urgent = PauseRemove, true
	}
}

// lowersUnderPause reports whether a release has, or is to have, the MachineDeployment paused.
func (b *books) lowersUnderPause() bool {
	for _, r := range b.next.Releasing {
		if r.Set != "" && !r.GivenBack {
			return true
		}
	}
	return false
}

// beginPause notes which MachineSet each Machine's replica belongs to, and pauses the MachineDeployment in the same write. A MachineSet that is
// paused already observes no lowering: its Machines wait, and the MachineDeployment is not paused for them.
func (b *books) beginPause(ready []types.UID) {
	for _, uid := range ready {
		m := b.machine(uid)
		if m == nil || SetOf(m) == "" {
			continue
		}
		if set := b.set(SetOf(m)); set != nil && marked(set) {
			continue
		}
		r := b.next.Releasing[uid]
		r.Set = SetOf(m)
		b.next.Releasing[uid] = r
		b.d.Pause, b.d.Urgent = PauseSet, true
	}
}

// setsLowered reports whether every MachineSet has given the replicas back and observed it; until then it asks for it.
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
		case set != nil && set.Status.ObservedGeneration < set.Generation:
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

func (s *Snapshot) set(name string) *clusterv1.MachineSet {
	for _, set := range s.Sets {
		if set.Name == name {
			return set
		}
	}
	return nil
}

// lowered reports whether the MachineSet has given the Machine's replica back under pause; one that is gone has.
func (b *books) lowered(uid types.UID) bool {
	r := b.next.Releasing[uid]
	found := b.set(r.Set)
	return found == nil || slices.Contains(ReleasedFrom(found), uid) || r.LoweredAs != "" && slices.Contains(ReleasedFrom(found), r.LoweredAs)
}

// IsPaused reports whether Cluster API says that it leaves the object of these conditions alone.
func IsPaused(conditions []metav1.Condition) bool {
	return slices.ContainsFunc(conditions, func(c metav1.Condition) bool {
		return c.Type == clusterv1.PausedCondition && c.Status == metav1.ConditionTrue
	})
}

// ReleasedFrom returns the UIDs of the Machines that a MachineSet was lowered for under pause.
func ReleasedFrom(set *clusterv1.MachineSet) []types.UID {
	return splitUIDs(set.Annotations[v1alpha1.ReleasedAnnotation])
}
