package claims

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Cluster API's controllers, one reconcile at a time. A reconcile reads, plans and then writes its
// plan, whatever happened in between. Reconciles of one object never overlap.

// maxSurge is how many Machines a rollout may create beyond the replicas.
func (w *world) maxSurge() int32 {
	if w.noSurge {
		return 0
	}
	return 1
}

// maxUnavailable is how many Machines may be missing during a rollout.
func (w *world) maxUnavailable() int32 { return 1 - w.maxSurge() }

// reconcile runs one controller on one object, unless that is in progress already. pause lets
// others act.
func (w *world) reconcile(object string, do func(pause func()) bool) bool {
	if w.busy[object] {
		return false
	}
	w.busy[object] = true
	before := w.hub.version
	again := do(func() {
		if !w.fair && w.depth < 2 && w.draw("controller waits", 0, 5) == 0 {
			w.interleave()
		}
	})
	delete(w.busy, object)
	return again || w.hub.version != before
}

// controllers makes each controller do a step on every object of the group.
func (w *world) controllers(group string) {
	for w.deploymentStep(group) {
	}
	for _, s := range w.sets(group) {
		w.setStep(s)
	}
	for _, m := range w.machines(group) {
		w.machineStep(m)
	}
}

func (w *world) setStatus(o client.Object) { w.must(client.IgnoreNotFound(w.hub.update(o, true))) }

func pausedCondition(paused bool) []metav1.Condition {
	status := metav1.ConditionFalse
	if paused {
		status = metav1.ConditionTrue
	}
	return []metav1.Condition{{Type: clusterv1.PausedCondition, Status: status, Reason: "Said"}}
}

// deploymentStep is one reconcile of the MachineDeployment controller. It reports whether it
// changed something.
func (w *world) deploymentStep(group string) bool {
	return w.reconcile(group, func(pause func()) bool {
		md := w.md(group)
		sets := w.sets(group)
		template := w.templates[group]
		_, paused := md.Annotations[clusterv1.PausedAnnotation]
		pause()
		if paused != protocol.IsPaused(md.Status.Conditions) {
			now := w.md(group)
			now.Status.Conditions = pausedCondition(paused)
			w.setStatus(now)
			return true
		}
		if paused {
			return false
		}
		name := fmt.Sprintf("%s-%d", group, template)
		if !slices.ContainsFunc(sets, func(s *clusterv1.MachineSet) bool { return s.Name == name }) {
			zero := int32(0)
			w.must(w.hub.create(&clusterv1.MachineSet{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: namespace, Name: name, Labels: map[string]string{clusterv1.MachineDeploymentNameLabel: group},
					Annotations: map[string]string{clusterv1.RevisionAnnotation: strconv.Itoa(w.templates[group])},
				},
				Spec: clusterv1.MachineSetSpec{ClusterName: clusterName, Replicas: &zero},
			}))
			return true
		}
		onDelete := md.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType
		plan := map[string]int32{}
		for _, s := range sets {
			plan[s.Name] = protocol.ReplicasOf(s)
		}
		var notes map[string]map[string]string
		switch {
		case onDelete:
			w.planOnDelete(plan, name, sets, *md.Spec.Replicas)
		case w.inPlace:
			notes = w.planInPlace(plan, name, sets, *md.Spec.Replicas)
		default:
			w.planRollingUpdate(plan, name, sets, *md.Spec.Replicas)
		}
		pause()
		for _, s := range sets {
			// Forced: without regard to what others wrote meanwhile.
			o, err := w.hub.find(machineSets, s.Name)
			w.must(err)
			now := o.(*clusterv1.MachineSet).DeepCopy() //nolint:forcetypeassert // of the kind
			replicas := plan[s.Name]
			now.Spec.Replicas = &replicas
			delete(now.Annotations, clusterv1.DisableMachineCreateAnnotation)
			annotate(now, notes[s.Name])
			if ledger := md.Annotations[v1alpha1.LedgerAnnotation]; w.copies && ledger != "" {
				metav1.SetMetaDataAnnotation(&now.ObjectMeta, v1alpha1.LedgerAnnotation, ledger)
			}
			if onDelete && s.Name != name {
				metav1.SetMetaDataAnnotation(&now.ObjectMeta, clusterv1.DisableMachineCreateAnnotation, "true")
			}
			w.must(w.hub.update(now, false))
		}
		if md.Status.ObservedGeneration < md.Generation {
			now := w.md(group)
			now.Status.ObservedGeneration = md.Generation
			w.setStatus(now)
		}
		return false
	})
}

// planOnDelete lowers old MachineSets to the Machines that they have. The newest gets the missing
// replicas, and the oldest one with replicas is charged for the excess.
func (w *world) planOnDelete(plan map[string]int32, newest string, sets []*clusterv1.MachineSet, replicas int32) {
	var sum int32
	for _, s := range sets {
		if have := protocol.Count(w.machinesOf(s)); s.Name != newest && have < plan[s.Name] {
			// Cluster API does not wait for Machines that the MachineSet is just creating: it
			// removes them again.
			w.licensed[s.Name] += int(plan[s.Name] - have)
			plan[s.Name] = have
		}
		sum += plan[s.Name]
	}
	if sum < replicas {
		plan[newest] += replicas - sum
	}
	for ; sum > replicas; sum-- {
		oldest := slices.IndexFunc(sets, func(s *clusterv1.MachineSet) bool { return plan[s.Name] > 0 && s.Name != newest })
		if oldest < 0 || plan[newest] > replicas {
			plan[newest]--
		} else {
			plan[sets[oldest].Name]--
		}
	}
}

// planRollingUpdate raises the newest MachineSet within the surge, and lowers the others by the
// number of its available Machines.
func (w *world) planRollingUpdate(plan map[string]int32, newest string, sets []*clusterv1.MachineSet, replicas int32) {
	var total, available, availableNew int32
	healthy := map[string]int32{}
	for _, s := range sets {
		machines := w.machinesOf(s)
		total += max(plan[s.Name], protocol.Count(machines))
		for _, m := range machines {
			if protocol.Alive(m) && protocol.HasNode(m) {
				available++
				healthy[s.Name]++
				if s.Name == newest {
					availableNew++
				}
			}
		}
	}
	switch {
	case plan[newest] > replicas:
		plan[newest] = replicas
	case plan[newest] < replicas:
		plan[newest] += min(max(0, replicas+w.maxSurge()-total), replicas-plan[newest])
	}
	var sum int32
	for _, n := range plan {
		sum += n
	}
	spare := sum - (replicas - w.maxUnavailable()) - (plan[newest] - availableNew)
	for _, s := range sets {
		if s.Name == newest || spare <= 0 {
			continue
		}
		down := min(spare, plan[s.Name]-min(plan[s.Name], healthy[s.Name])) // unhealthy ones first
		plan[s.Name] -= down
		spare -= down
	}
	down := available - (replicas - w.maxUnavailable())
	for _, s := range sets {
		if s.Name == newest || down <= 0 {
			continue
		}
		n := min(down, plan[s.Name])
		plan[s.Name] -= n
		down -= n
	}
}

func (w *world) machinesOf(s *clusterv1.MachineSet) []*clusterv1.Machine {
	return read(w.hub, allMachines, func(m *clusterv1.Machine) bool { return protocol.SetOf(m) == s.Name })
}

// setStep is one reconcile of the MachineSet controller, based on its cache.
func (w *world) setStep(s *clusterv1.MachineSet) {
	w.reconcile(s.Name, func(pause func()) bool {
		o, err := w.hub.find(machineSets, s.Name)
		w.must(err)
		s := o.(*clusterv1.MachineSet).DeepCopy() //nolint:forcetypeassert // of the kind
		group := s.Labels[clusterv1.MachineDeploymentNameLabel]
		_, paused := s.Annotations[clusterv1.PausedAnnotation]
		if paused != protocol.IsPaused(s.Status.Conditions) {
			pause()
			o, _ := w.hub.find(machineSets, s.Name)
			now := o.(*clusterv1.MachineSet).DeepCopy() //nolint:forcetypeassert // of the kind
			now.Status.Conditions = pausedCondition(paused)
			w.setStatus(now)
			return true
		}
		if paused {
			return false
		}
		mine := w.machinesOf(s)
		old := s.Name != fmt.Sprintf("%s-%d", group, w.templates[group])
		_, mayNot := s.Annotations[clusterv1.DisableMachineCreateAnnotation]
		missing := int(protocol.ReplicasOf(s)) - len(mine)
		wanted := missing
		if mayNot {
			wanted = 0
		}
		if mayNot || w.blocked[group] {
			missing = min(missing, 0)
		}
		pause()
		w.beginUpdates(s, mine)
		for ; missing > 0; missing-- {
			w.makeMachine(s, group)
		}
		excess := -missing - uncounted(s, mine)
		if target := s.Annotations[clusterv1.MachineSetMoveMachinesToMachineSetAnnotation]; excess > 0 && target != "" {
			w.moveMachines(mine, excess, target)
		} else if excess > 0 {
			w.removeMachines(group, mine, excess, old)
		}
		o, _ = w.hub.find(machineSets, s.Name)
		now := o.(*clusterv1.MachineSet).DeepCopy() //nolint:forcetypeassert // of the kind
		scaling := metav1.Condition{
			Type: clusterv1.MachineSetScalingUpCondition, Status: metav1.ConditionFalse, Reason: "Said", ObservedGeneration: s.Generation,
		}
		meta.SetStatusCondition(&now.Status.Conditions, scaling)
		if !w.refused[group] || wanted <= 0 { // else the reconcile ends with an error
			now.Status.ObservedGeneration = s.Generation
		}
		w.setStatus(now)
		return false
	})
}

func (w *world) makeMachine(s *clusterv1.MachineSet, group string) {
	m := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: fmt.Sprintf("%s-%d", s.Name, w.hub.created+1), Finalizers: []string{capiHolds},
			Labels: map[string]string{
				clusterv1.MachineDeploymentNameLabel: group, clusterv1.MachineSetNameLabel: s.Name, clusterv1.ClusterNameLabel: clusterName,
			},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: clusterv1.GroupVersion.String(), Kind: "MachineSet", Name: s.Name, UID: s.UID, Controller: new(true),
			}},
		},
		Spec: clusterv1.MachineSpec{
			ClusterName: clusterName, InfrastructureRef: clusterv1.ContractVersionedObjectReference{Kind: "TestMachine", Name: s.Name},
		},
	}
	w.must(w.hub.create(m))
	if w.rollingOut(group) {
		w.surge[m.UID] = true
	}
}

// removeMachines deletes the excess: first the Machines that the controller's cache knows to be
// deleted already, then the adversary's choice, which is wider than Cluster API's.
func (w *world) removeMachines(group string, mine []*clusterv1.Machine, n int, old bool) {
	var others []*clusterv1.Machine
	for _, m := range mine {
		if w.seen[m.UID] {
			n--
		} else {
			others = append(others, m)
		}
	}
	replaced := old && w.md(group).Spec.Rollout.Strategy.Type != clusterv1.OnDeleteMachineDeploymentStrategyType
	for ; n > 0 && len(others) > 0; n-- {
		i := w.pick(len(others))
		if marked := slices.IndexFunc(others, w.resurrected); marked >= 0 {
			i = marked
		}
		victim := others[i]
		others = slices.Delete(others, i, i+1)
		w.seen[victim.UID] = true
		o, err := w.hub.find(allMachines, victim.Name)
		if err != nil || o.GetUID() != victim.UID || !o.GetDeletionTimestamp().IsZero() {
			continue
		}
		w.checkVictim(o.(*clusterv1.Machine), replaced) //nolint:forcetypeassert // of the kind
		w.must(w.hub.remove(victim, nil))
	}
}

// resurrected reports whether a Machine lives again because the hub was moved after its replica had
// been given back, or after its MachineSet was lowered for it under pause. It still has the mark
// that makes Cluster API remove it before all others.
func (w *world) resurrected(m *clusterv1.Machine) bool {
	_, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]
	l := w.ledger(m.Labels[clusterv1.MachineDeploymentNameLabel])
	if !marked || l == nil {
		return false
	}
	lowered := func(uid types.UID) bool {
		return slices.ContainsFunc(w.sets(m.Labels[clusterv1.MachineDeploymentNameLabel]), func(set *clusterv1.MachineSet) bool {
			return set.Name == protocol.SetOf(m) && slices.Contains(protocol.ReleasedFrom(set), uid)
		})
	}
	for uid, r := range l.Releasing {
		if r.Machine == m.Name && (r.Decremented || uid != m.UID && lowered(uid) || r.LoweredAs != "" && lowered(r.LoweredAs)) {
			return true
		}
	}
	return false
}

// rollingOut reports whether Cluster API is replacing Machines of the group by itself.
func (w *world) rollingOut(group string) bool {
	if w.md(group).Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType {
		return false
	}
	newest := fmt.Sprintf("%s-%d", group, w.templates[group])
	return slices.ContainsFunc(w.sets(group), func(s *clusterv1.MachineSet) bool {
		return s.Name != newest && protocol.ReplicasOf(s) > 0
	})
}

// machineStep is one step of the Machine controller and of the infrastructure behind it.
func (w *world) machineStep(m *clusterv1.Machine) {
	group := m.Labels[clusterv1.MachineDeploymentNameLabel]
	old := protocol.SetOf(m) != fmt.Sprintf("%s-%d", group, w.templates[group])
	switch {
	case protocol.Alive(m) && !slices.Contains(m.Finalizers, capiHolds): // it was moved when its deletion was nearly complete
		m.Finalizers = append(m.Finalizers, capiHolds)
		w.must(w.hub.update(m, false))
	case protocol.Alive(m) && w.slow != nil && w.slow(m):
	case protocol.Alive(m) && m.Spec.ProviderID == "":
		m.Spec.ProviderID = "sim://" + m.Name
		w.must(w.hub.update(m, false))
		inspect(m)
		w.setStatus(m)
	case protocol.Alive(m) && !protocol.HasNode(m):
		m.Status.NodeRef.Name, m.Status.LastUpdated = "node-"+m.Name, metav1.NewTime(w.clock.Now())
		meta.RemoveStatusCondition(&m.Status.Conditions, clusterv1.MachineNodeReadyCondition)
		w.joined[m.UID] = w.events
		w.tainted[m.UID] = w.hub.created%2 == 0
		w.setStatus(m)
	case protocol.Alive(m) && carriesNote(m, updating): // the update completes
		delete(m.Annotations, updating)
		delete(m.Annotations, clusterv1.UpdateInProgressAnnotation)
		w.must(w.hub.update(m, false))
	case protocol.Alive(m) && !old && protocol.Outdated(m):
		m.Status.Conditions = nil
		w.setStatus(m)
	case protocol.Alive(m) && old && !protocol.Outdated(m):
		m.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
		}}
		w.setStatus(m)
	case !protocol.Alive(m) && !w.seen[m.UID]:
		w.seen[m.UID] = true // the manager's cache catches up
	case !protocol.Alive(m) && slices.Contains(m.Finalizers, capiHolds),
		!protocol.Alive(m) && protocol.DeletingReason(m) != clusterv1.MachineDeletingDeletionCompletedReason:
		w.tearDown(m)
	}
}

// inspect makes Cluster API state that it looked for the Machine's Node, as it does while there is
// none.
func inspect(m *clusterv1.Machine) {
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
		Type: clusterv1.MachineNodeReadyCondition, Status: metav1.ConditionUnknown, Reason: clusterv1.MachineNodeInspectionFailedReason,
		Message: "Waiting for a Node with spec.providerID " + m.Spec.ProviderID + " to exist",
	})
}

// tearDown is one step of a Machine's deletion: hooks, then the infrastructure, then the Node.
func (w *world) tearDown(m *clusterv1.Machine) {
	say := func(reason string) bool {
		if protocol.DeletingReason(m) == reason {
			return false
		}
		m.Status.Conditions = []metav1.Condition{{Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: reason}}
		w.setStatus(m)
		return true
	}
	hooks := slices.ContainsFunc(slices.Collect(maps.Keys(m.Annotations)), func(key string) bool {
		return strings.HasPrefix(key, clusterv1.PreTerminateDeleteHookAnnotationPrefix)
	})
	switch {
	case hooks && !gone(m):
		say(clusterv1.MachineDeletingWaitingForPreTerminateHookReason)
	case say(clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason):
	default:
		say(clusterv1.MachineDeletingDeletionCompletedReason)
		m.Finalizers = slices.DeleteFunc(m.Finalizers, func(f string) bool { return f == capiHolds })
		w.must(w.hub.update(m, false))
	}
}

// gone reports whether the Machine's instance is being removed or is gone.
func gone(m *clusterv1.Machine) bool {
	reason := protocol.DeletingReason(m)
	return reason == clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason || reason == clusterv1.MachineDeletingDeletionCompletedReason
}
