package engine

import (
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// decision is the explored part of the decision of [protocol.Decide] on a snapshot. It omits what
// is written only for users.
type decision struct {
	write    bool
	urgent   bool
	removes  bool  // Machines or replicas, depending on the template
	lowered  bool  // the ledger write freezes the group
	enters   uint8 // mask of claims: the decision only enters this one
	ledger   ledger
	replicas uint8
	pause    protocol.PauseChange
	refused  uint8 // mask of claims

	actions [maxClaims + maxMachines + 2*maxSets]action
	n       int
}

// action is one write on one object. Its kind determines which of its numbers are used.
type action struct {
	kind                kind
	claim, machine, set uint8
	uids                uint8 // mask of Machines
	lost                bool  // of end: the claim is reported to have lost its Machine
	released            bool  // of end: the release is reported as complete
}

type kind uint8

const (
	markAdmitted kind = iota + 1
	bind
	restore
	label
	unbind
	end
	beginDelete
	keep
	removeFinalizer
	pauseMachineSet
	unpauseMachineSet
	lowerSet
	markReturned
)

// kinds are the explored actions. The others write only for users, or need what the model does not
// have: deadlines and lost objects.
var kinds = map[protocol.ActionKind]kind{
	protocol.MarkAdmitted: markAdmitted, protocol.Bind: bind, protocol.Restore: restore, protocol.Label: label, protocol.Unbind: unbind,
	protocol.End: end,
	// In the model, only calls move claims.
	protocol.MoveOn:      end,
	protocol.BeginDelete: beginDelete, protocol.Keep: keep, protocol.RemoveFinalizer: removeFinalizer, protocol.PauseMachineSet: pauseMachineSet,
	protocol.UnpauseMachineSet: unpauseMachineSet, protocol.LowerSet: lowerSet, protocol.Return: markReturned,
}

// question is the input of a decision.
type question struct {
	s         snapshot
	graceOver bool
}

// remembered limits the number of cached decisions, to save memory.
const remembered = 1 << 19

// decide calls the agent's protocol, or returns its cached decision on the same input.
func (p *Protocol) decide(s *snapshot, graceOver bool) decision {
	q := question{*s, graceOver}
	for i := range q.s.sets { // not part of a snapshot
		q.s.sets[i].saw, q.s.sets[i].foreign, q.s.sets[i].counted = 0, 0, 0
	}
	if d, known := p.decisions[q]; known {
		return d
	}
	read := p.snapshot(&q.s, graceOver)
	decided := protocol.Decide(read)
	d := p.translate(&q.s, decided)
	for c := range p.Claims {
		if p.AtOnce && decided.EntersOnly(read, name("c", c)) {
			d.enters |= bit(c)
		}
	}
	if p.decisions == nil || len(p.decisions) >= remembered {
		p.decisions = map[question]decision{}
	}
	p.decisions[q] = d
	return d
}

const (
	namespace   = "default"
	clusterName = "workload"
	groupName   = "group"
	// generation is the generation of the MachineDeployment and of each MachineSet.
	generation = 10
)

var now = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// name returns a name that ends in the number.
func name(kind string, i int) string { return kind + strconv.Itoa(i) }

func number(name string) uint8 { return name[len(name)-1] - '0' }

// snapshot returns the group as an agent reads it.
func (p *Protocol) snapshot(s *snapshot, graceOver bool) *protocol.Snapshot {
	md := p.deploymentOf(&s.md)
	out := &protocol.Snapshot{
		Deployment: md, Group: eligibility.Of(md, &clusterv1.Cluster{}), Now: now,
		SpareGrace: time.Minute,
	}
	if graceOver {
		out.SpareSince = now.Add(-time.Hour)
	}
	if s.ledger.present != 0 {
		out.Ledger = ledgerOf(s)
	}
	for i, c := range s.claims {
		if c.phase != unmade {
			out.Claims = append(out.Claims, known(&p.claims, keyed[claim]{i, c}, claimOf))
		}
	}
	for i, set := range s.sets {
		if set.exists != 0 {
			out.Sets = append(out.Sets, known(&p.sets, keyed[machineSet]{i, set}, setOf))
		}
	}
	for i, m := range s.machines {
		if m.exists() {
			out.Machines = append(out.Machines, known(&p.machinesOf, keyed[machine]{i, m}, machineOf))
		}
	}
	return out
}

// keyed is an object of the model with its number.
type keyed[T comparable] struct {
	i int
	x T
}

// known builds an object once and caches it: decisions do not modify their input.
func known[K comparable, V any](all *map[K]V, key K, build func(K) V) V {
	if v, is := (*all)[key]; is {
		return v
	}
	if *all == nil {
		*all = map[K]V{}
	}
	v := build(key)
	(*all)[key] = v
	return v
}

func status(yes uint8) metav1.ConditionStatus {
	if yes != 0 {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

func pausedBy(who uint8) map[string]string {
	switch who {
	case byAgent:
		return map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
	case byHuman:
		return map[string]string{clusterv1.PausedAnnotation: "a human"}
	}
	return map[string]string{}
}

func (p *Protocol) deploymentOf(d *deployment) *clusterv1.MachineDeployment {
	md := &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: groupName, Generation: generation, Annotations: pausedBy(d.paused),
			Labels: map[string]string{v1alpha1.MemberLabel: ""},
		},
		Spec: clusterv1.MachineDeploymentSpec{ClusterName: clusterName, Replicas: new(int32(d.replicas))},
		Status: clusterv1.MachineDeploymentStatus{
			ObservedGeneration: observedGeneration(d),
			Conditions:         []metav1.Condition{{Type: clusterv1.PausedCondition, Status: status(d.isPaused)}},
		},
	}
	if !p.RollingUpdate {
		md.Spec.Rollout.Strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
	}
	if d.max > 0 {
		md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = size(d.max)
	}
	if d.min > 0 {
		md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = size(d.min)
	}
	if d.frozen != 0 {
		md.Annotations[v1alpha1.ReplicasLoweredAnnotation] = "lowered"
	}
	return md
}

func size(n uint8) string {
	if n == unreadable {
		return "many"
	}
	return strconv.Itoa(int(n))
}

func observedGeneration(d *deployment) int64 {
	if d.observed != 0 {
		return generation
	}
	return generation - 1
}

func claimOf(of keyed[claim]) *v1alpha1.MachineClaim {
	c := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: name("claim", of.i), CreationTimestamp: metav1.NewTime(now.Add(time.Duration(of.i-60) * time.Minute)),
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: name("c", of.i), NodeGroup: groupName},
	}
	c.Status.Phase = [...]v1alpha1.Phase{
		made: "", pending: v1alpha1.PhasePending, bound: v1alpha1.PhaseBound, releasing: v1alpha1.PhaseReleasing, ended: v1alpha1.PhaseEnded,
	}[of.x.phase]
	if of.x.machine != 0 {
		machine := name("m", int(of.x.machine)-1)
		c.Status.Machine = &v1alpha1.MachineReference{Name: machine, UID: types.UID(machine), NodeName: "node-" + machine}
	}
	c.Status.Returned = of.x.returns != 0
	if of.x.adopt != 0 {
		c.Spec.Adopt = name("m", int(of.x.adopt)-1)
	}
	return c
}

func setOf(of keyed[machineSet]) *clusterv1.MachineSet {
	set := &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Name: name("set", of.i), Generation: generation, Annotations: pausedBy(of.x.paused)},
		Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(of.x.replicas))},
		Status: clusterv1.MachineSetStatus{
			ObservedGeneration: generation - 1,
			Conditions:         []metav1.Condition{{Type: clusterv1.PausedCondition, Status: status(of.x.isPaused)}},
		},
	}
	if of.x.observed != 0 {
		set.Status.ObservedGeneration = generation
	}
	var released []types.UID
	for i := range maxMachines {
		if of.x.released&bit(i) != 0 {
			released = append(released, types.UID(name("m", i)))
		}
	}
	set.Annotations[v1alpha1.ReleasedAnnotation] = protocol.JoinUIDs(released)
	set.Annotations[clusterv1.RevisionAnnotation] = strconv.Itoa(of.i)
	return set
}

func machineOf(of keyed[machine]) *clusterv1.Machine {
	x := name("m", of.i)
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
		Name: x, UID: types.UID(x), Labels: map[string]string{}, Annotations: map[string]string{},
		CreationTimestamp: metav1.NewTime(now.Add(time.Duration(of.i-100) * time.Minute)),
		OwnerReferences:   []metav1.OwnerReference{{Kind: "MachineSet", Name: name("set", int(of.x.set)), Controller: new(true)}},
		Finalizers:        []string{clusterv1.MachineFinalizer},
	}}
	if of.x.label != 0 {
		m.Labels[v1alpha1.ClaimLabel] = name("c", int(of.x.label)-1)
	}
	if of.x.has(finalized) {
		m.Finalizers = append(m.Finalizers, v1alpha1.ReleaseFinalizer)
	}
	if of.x.has(finalized) || of.x.has(marked) {
		m.Annotations[clusterv1.DeleteMachineAnnotation] = v1alpha1.Group
	}
	if of.x.has(floors) {
		m.Annotations[v1alpha1.FloorAnnotation] = "true"
	}
	if of.x.has(outdated) {
		m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
			Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
		})
	}
	reason := ""
	switch of.x.phase {
	case joined:
		m.Status.NodeRef.Name = "node-" + x
	case deleting:
		reason = clusterv1.MachineDeletingDrainingNodeReason
	case held:
		reason = clusterv1.MachineDeletingDeletionCompletedReason
		m.Finalizers = m.Finalizers[1:]
	case absent, fresh, gone:
	}
	if reason != "" {
		m.DeletionTimestamp = &metav1.Time{Time: now}
		m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
			Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: reason,
		})
	}
	return m
}

// ledgerOf returns the snapshot's ledger as the agent reads it.
func ledgerOf(s *snapshot) *protocol.Ledger {
	l := (&protocol.Ledger{
		Version: protocol.LedgerVersion, Seq: 1, Floor: int32(s.ledger.floor), LastReplicas: int32(s.ledger.lastReplicas),
		Lowered: s.ledger.lowered != 0, Min: int32(s.ledger.min),
	}).Clone()
	if s.ledger.written != 0 {
		l.Written = &protocol.Written{Replicas: int32(s.ledger.written) - 1, Restored: int32(s.ledger.restored), Since: now.Unix()}
	}
	for c, entry := range s.ledger.pending {
		if entry == noEntry {
			continue
		}
		assignment := protocol.Assignment{Adopted: s.ledger.adopted&bit(c) != 0}
		if entry >= assigned {
			assignment.Machine = name("m", int(entry-assigned))
			assignment.UID = types.UID(assignment.Machine)
		}
		l.Pending[name("c", c)] = assignment
	}
	for c, of := range s.ledger.returned {
		if of != 0 {
			machine := name("m", int(of)-1)
			l.Returning[types.UID(machine)] = protocol.Returned{Machine: machine, Claim: name("c", c)}
		}
	}
	if s.ledger.shrinks != 0 {
		l.Shrink = &protocol.Shrink{Set: name("set", int(s.ledger.shrinks)-1), Done: s.ledger.shrunk != 0}
	}
	for i := range maxMachines {
		if s.ledger.releasing&bit(i) == 0 {
			continue
		}
		r := protocol.Release{Machine: name("m", i), Decremented: s.ledger.decremented&bit(i) != 0}
		if s.ledger.underPause&bit(i) != 0 {
			r.Set = name("set", int(s.machines[i].set))
		}
		if r.Decremented {
			r.Generation = generation
			if s.md.carried&bit(i) != 0 {
				r.Generation = observedGeneration(&s.md)
			}
		}
		l.Releasing[types.UID(r.Machine)] = r
	}
	return l
}

// translate converts a decision to the model's numbers.
func (p *Protocol) translate(s *snapshot, d *protocol.Decision) decision {
	out := decision{
		write: d.Ledger != nil, urgent: d.Urgent, removes: d.Removes, lowered: d.Lowered != "", replicas: uint8(d.Replicas), pause: d.Pause,
	}
	if d.Ledger != nil {
		out.ledger = p.numbers(d.Ledger)
	}
	for id := range d.Refused {
		out.refused |= bit(int(number(id)))
	}
	for _, a := range d.Actions {
		does, explored := kinds[a.Kind]
		if !explored {
			continue
		}
		x := action{kind: does}
		if a.Claim != nil {
			x.claim = number(a.Claim.Spec.ClaimID)
		}
		if a.Machine != nil {
			x.machine = number(a.Machine.Name)
		}
		if a.Set != nil {
			x.set = number(a.Set.Name)
		}
		for _, uid := range a.UIDs {
			x.uids |= bit(int(number(string(uid))))
		}
		if does == end {
			x.lost = s.claims[x.claim].phase == bound && a.Event.Reason != protocol.ReasonReturned
			// A Machine that was handed over is not reported as gone.
			x.released = a.Event.Reason == protocol.ReasonReleased
		}
		out.actions[out.n] = x
		out.n++
	}
	slices.SortFunc(out.actions[:out.n], func(a, b action) int { return int(a.kind) - int(b.kind) })
	return out
}

func (p *Protocol) numbers(from *protocol.Ledger) ledger {
	l := ledger{
		present: 1, floor: uint8(from.Floor), lastReplicas: uint8(from.LastReplicas), lowered: b(from.Lowered), min: uint8(from.Min),
	}
	if from.Written != nil {
		l.written, l.restored = uint8(from.Written.Replicas)+1, uint8(from.Written.Restored)
	}
	for id, assignment := range from.Pending {
		c := number(id)
		l.pending[c] = unassigned
		if assignment.UID != "" {
			l.pending[c] = assigned + number(assignment.Machine)
		}
		if assignment.Adopted {
			l.adopted |= bit(int(c))
		}
	}
	if from.Shrink != nil {
		l.shrinks, l.shrunk = number(from.Shrink.Set)+1, b(from.Shrink.Done)
	}
	for uid, r := range from.Returning {
		l.returned[number(r.Claim)] = number(string(uid)) + 1
	}
	for uid, r := range from.Releasing {
		i := int(number(string(uid)))
		l.releasing |= bit(i)
		if r.Decremented {
			l.decremented |= bit(i)
		}
		if r.Set != "" {
			l.underPause |= bit(i)
		}
	}
	return l
}
