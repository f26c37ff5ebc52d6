package claims

import (
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// TestProtocolAgainstInPlaceUpdates does the same as [TestProtocolAgainstAdversary], but Cluster
// API rolls a change out by moving Machines from the old MachineSet to the new one, which updates
// them in place.
func TestProtocolAgainstInPlaceUpdates(t *testing.T) {
	inOneGoroutine(t)
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, worldOptions{
			groups: 1, floor: rapid.Int32Range(0, 2).Draw(t, "floor"),
			maximum:  rapid.SampledFrom([]string{"", "", "4"}).Draw(t, "max"),
			strategy: clusterv1.RollingUpdateMachineDeploymentStrategyType,
		})
		w.inPlace = true
		w.plan(rapid.Bool().Draw(t, "outsiders"))
		delete(w.actions, "the hub is moved")
		w.actions["rollout"] = func() {
			if w.rarely(2) {
				w.rollout(w.anyGroup())
			}
		}
		w.runHistory()
	})
}

// An in-place update is coordinated by annotations. Each MachineSet has those that the
// MachineDeployment's last reconcile gave it. An old MachineSet has the name of the one that it
// moves its Machines to. The new one has the names of those that it receives Machines from, and of
// the Machines that were moved to it and that its replicas count. A moved Machine is not counted
// before that; its update begins then.

// updating is on a Machine while it is updated in place, once the update has begun.
const updating = "test/update-began"

// noted are the annotations of an in-place update on a MachineSet.
var noted = []string{
	clusterv1.MachineSetMoveMachinesToMachineSetAnnotation, clusterv1.MachineSetReceiveMachinesFromMachineSetsAnnotation,
	clusterv1.AcknowledgedMoveAnnotation,
}

func carriesNote(o metav1.Object, key string) bool {
	_, yes := o.GetAnnotations()[key]
	return yes
}

// planInPlace plans a rolling update that is done in place, and returns the annotations of each
// MachineSet.
func (w *world) planInPlace(plan map[string]int32, newest string, sets []*clusterv1.MachineSet, replicas int32) map[string]map[string]string {
	notes := map[string]map[string]string{}
	for _, s := range sets {
		notes[s.Name] = map[string]string{}
	}
	at := slices.IndexFunc(sets, func(s *clusterv1.MachineSet) bool { return s.Name == newest })
	known := strings.Split(sets[at].Annotations[clusterv1.AcknowledgedMoveAnnotation], ",")
	var names []string
	inProgress, available := false, int32(0)
	for _, s := range sets {
		for _, m := range w.machinesOf(s) {
			inProgress = inProgress || carriesNote(m, clusterv1.UpdateInProgressAnnotation)
			if s.Name != newest {
				continue
			}
			if protocol.Alive(m) && protocol.HasNode(m) {
				available++
			}
			if carriesNote(m, clusterv1.PendingAcknowledgeMoveAnnotation) {
				names = append(names, m.Name)
				if !slices.Contains(known, m.Name) {
					plan[newest]++
				}
			}
		}
	}
	if len(names) > 0 {
		notes[newest][clusterv1.AcknowledgedMoveAnnotation] = strings.Join(names, ",")
	}
	before := maps.Clone(plan)
	w.planRollingUpdate(plan, newest, sets, replicas)
	if cut := before[newest] - plan[newest]; cut > 0 {
		w.licensed[newest] += int(cut) // the surge of a rollout, or Machines that were moved in its place
	}
	if before[newest] >= replicas {
		return notes
	}
	var sources []string
	for _, s := range sets {
		have := protocol.Count(w.machinesOf(s))
		if s.Name == newest {
			inProgress = inProgress || have != before[newest] || available != before[newest]
			continue
		}
		inProgress = inProgress || before[s.Name] < have || plan[s.Name] < before[s.Name]
		if have > 0 {
			sources = append(sources, s.Name)
			notes[s.Name][clusterv1.MachineSetMoveMachinesToMachineSetAnnotation] = newest
		}
	}
	if len(sources) == 0 {
		return notes
	}
	notes[newest][clusterv1.MachineSetReceiveMachinesFromMachineSetsAnnotation] = strings.Join(sources, ",")
	if up := plan[newest] - before[newest]; up > 0 { // Machines are moved rather than made
		up = max(0, up-w.maxSurge())
		if up == 0 && !inProgress {
			up = 1
		}
		plan[newest] = before[newest] + up
	}
	return notes
}

// annotate sets the annotations that a reconcile planned on a MachineSet.
func annotate(s *clusterv1.MachineSet, notes map[string]string) {
	for _, key := range noted {
		delete(s.Annotations, key)
		if text, is := notes[key]; is {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, key, text)
		}
	}
}

// present returns the present version of a Machine, nil when it is gone.
func (w *world) present(m *clusterv1.Machine) *clusterv1.Machine {
	o, err := w.hub.find(allMachines, m.Name)
	if err != nil || o.GetUID() != m.UID {
		return nil
	}
	return o.(*clusterv1.Machine).DeepCopy() //nolint:forcetypeassert // of the kind
}

// beginUpdates begins the in-place updates of the Machines that were moved to the MachineSet and
// that its replicas count.
func (w *world) beginUpdates(s *clusterv1.MachineSet, mine []*clusterv1.Machine) {
	receives := s.Annotations[clusterv1.MachineSetReceiveMachinesFromMachineSetsAnnotation] != ""
	counted := strings.Split(s.Annotations[clusterv1.AcknowledgedMoveAnnotation], ",")
	for _, m := range mine {
		waits := receives && carriesNote(m, clusterv1.PendingAcknowledgeMoveAnnotation) && !slices.Contains(counted, m.Name)
		if !carriesNote(m, clusterv1.UpdateInProgressAnnotation) || carriesNote(m, updating) || waits {
			continue
		}
		if now := w.present(m); now != nil {
			delete(now.Annotations, clusterv1.PendingAcknowledgeMoveAnnotation)
			metav1.SetMetaDataAnnotation(&now.ObjectMeta, updating, "")
			w.must(w.hub.update(now, false))
		}
	}
}

// uncounted returns how many of a MachineSet's Machines were moved to it and are not in its
// replicas yet.
func uncounted(s *clusterv1.MachineSet, mine []*clusterv1.Machine) int {
	if s.Annotations[clusterv1.MachineSetReceiveMachinesFromMachineSetsAnnotation] == "" {
		return 0
	}
	n := 0
	for _, m := range mine {
		if carriesNote(m, clusterv1.PendingAcknowledgeMoveAnnotation) {
			n++
		}
	}
	return n
}

// moveMachines moves a MachineSet's excess Machines to another one. Machines that its cache knows
// to be deleted count first.
func (w *world) moveMachines(mine []*clusterv1.Machine, n int, target string) {
	o, err := w.hub.find(machineSets, target)
	w.must(err)
	to := o.(*clusterv1.MachineSet) //nolint:forcetypeassert // of the kind
	if !strings.Contains(to.Annotations[clusterv1.MachineSetReceiveMachinesFromMachineSetsAnnotation], protocol.SetOf(mine[0])) {
		return
	}
	var others []*clusterv1.Machine
	for _, m := range mine {
		switch {
		case w.seen[m.UID]:
			n--
		case protocol.HasNode(m) && !carriesNote(m, clusterv1.UpdateInProgressAnnotation):
			others = append(others, m)
		}
	}
	for ; n > 0 && len(others) > 0; n-- {
		i := w.pick(len(others))
		now := w.present(others[i])
		others = slices.Delete(others, i, i+1)
		if now == nil {
			continue
		}
		now.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: clusterv1.GroupVersion.String(), Kind: "MachineSet", Name: to.Name, UID: to.UID, Controller: new(true),
		}}
		metav1.SetMetaDataAnnotation(&now.ObjectMeta, clusterv1.UpdateInProgressAnnotation, "")
		metav1.SetMetaDataAnnotation(&now.ObjectMeta, clusterv1.PendingAcknowledgeMoveAnnotation, "")
		w.must(w.hub.update(now, false))
	}
}
