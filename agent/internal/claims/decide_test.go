package claims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// scene is a snapshot of a node group at rest: everything observed, one MachineSet.
func scene(replicas int32, ledger *Ledger) *snapshot {
	now := newTestTime()
	return &snapshot{
		md: &clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "small", Generation: 3},
			Spec:       clusterv1.MachineDeploymentSpec{ClusterName: clusterName, Replicas: &replicas},
			Status:     clusterv1.MachineDeploymentStatus{ObservedGeneration: 3},
		},
		group:  eligibility.Group{Replicas: replicas},
		ledger: ledger,
		sets: []*clusterv1.MachineSet{{
			ObjectMeta: metav1.ObjectMeta{Name: "small-a"}, Spec: clusterv1.MachineSetSpec{Replicas: &replicas},
		}},
		now:          now,
		unregistered: func(string) bool { return false },
		spareGrace:   time.Minute,
	}
}

func (s *snapshot) withMachine(name, claim string, change func(*clusterv1.Machine)) *snapshot {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), Labels: map[string]string{}, CreationTimestamp: metav1.NewTime(s.now),
		OwnerReferences: []metav1.OwnerReference{{Kind: "MachineSet", Name: "small-a", Controller: new(true)}},
	}}
	if claim != "" {
		m.Labels[v1alpha1.ClaimLabel] = claim
	}
	if change != nil {
		change(m)
	}
	s.machines = append(s.machines, m)
	return s
}

func (s *snapshot) withClaim(id string, phase v1alpha1.Phase, machine string) *snapshot {
	c := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{Name: clusterName + "." + id, CreationTimestamp: metav1.NewTime(s.now)},
		Spec:       v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: id, NodeGroup: "small"},
		Status:     v1alpha1.MachineClaimStatus{Phase: phase},
	}
	if machine != "" {
		c.Status.Machine = &v1alpha1.MachineReference{Name: machine, UID: types.UID(machine)}
	}
	s.claims = append(s.claims, c)
	return s
}

func kinds(d *decision) []actionKind {
	var all []actionKind
	for _, a := range d.actions {
		all = append(all, a.kind)
	}
	return all
}

func infrastructure(reason string) func(*clusterv1.Machine) {
	return func(m *clusterv1.Machine) {
		m.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineInfrastructureReadyCondition, Status: "False", Reason: reason, Message: "no hosts left",
		}}
	}
}

func node(m *clusterv1.Machine) {
	m.Spec.ProviderID, m.Status.NodeRef.Name = "sim://"+m.Name, "node-"+m.Name
}

// booting is a Machine with an instance whose Node Cluster API looks for in vain.
func booting(m *clusterv1.Machine) {
	m.Spec.ProviderID = "sim://" + m.Name
	inspect(m)
}

func TestAFirstClaimRaisesReplicasAndLeavesTheFloorAlone(t *testing.T) {
	s := scene(2, nil).withMachine("a", "", node).withMachine("b", "", node).withClaim("c", "", "")
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(3), d.replicas)
	assert.Equal(t, int32(2), d.ledger.Floor)
	assert.Equal(t, map[string]Named{"c": {}}, d.ledger.Pending)
	assert.True(t, d.urgent)
}

func TestClaimsThatWaitTogetherAreEnteredInOneWrite(t *testing.T) {
	s := scene(0, nil)
	for _, id := range []string{"a", "b", "c", "d"} {
		s.withClaim(id, "", "")
	}
	d := decide(s)
	assert.Equal(t, int32(4), d.replicas)
	assert.Len(t, d.ledger.Pending, 4)
}

func TestASpareIsUsedBeforeReplicasAreRaised(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).withMachine("a", "", nil).withClaim("c", "", "")
	d := decide(s)
	assert.Equal(t, int32(1), d.replicas)
	assert.Equal(t, Named{Machine: "a", UID: "a"}, d.ledger.Pending["c"])
}

func TestAtTheMaxSizeClaimsAreRefused(t *testing.T) {
	s := scene(3, &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Floor: 3}).withClaim("c", "", "")
	s.group.Max = new(int32(3))
	d := decide(s)
	assert.Nil(t, d.ledger)
	assert.Equal(t, eligibility.AtMaxSize, d.refused["c"].Reason)
}

func TestAShortageIsMadeGoodUpToTheMaxSize(t *testing.T) {
	three := int32(3)
	s := scene(2, &Ledger{Version: 1, Floor: 2, LastReplicas: 2, Pending: map[string]Named{"a": {}, "b": {}}}).
		withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "")
	assert.Equal(t, int32(4), decide(s).replicas)
	s.group.Max = &three
	assert.Equal(t, three, decide(s).replicas)
}

func TestAtTheMaxSizeSparesThatNoClaimMayHaveMakeRoom(t *testing.T) {
	three := int32(3)
	s := scene(3, &Ledger{Version: 1, Floor: 1, LastReplicas: 3, Spare: 1, Pending: map[string]Named{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "").withMachine("a", "", node).withMachine("b", "", node).withMachine("x", "", node)
	s.group.Max = &three
	assert.Nil(t, decide(s).ledger, "within the grace period")
	s.spareSince = s.now.Add(-time.Hour)
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Len(t, d.ledger.Releasing, 1, "the spare; not what is the claim's replica or the user's")
	assert.Contains(t, d.ledger.Pending, "c")
}

func TestARaiseAboveTheMinSizeIsTheFloorsInFull(t *testing.T) {
	s := scene(5, &Ledger{Version: 1, Seq: 1, Floor: 0, LastReplicas: 3})
	s.group.Min = 3
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(5), d.ledger.Floor, "three by the min size, two by the human")
	assert.Zero(t, d.ledger.Spare)

	s = scene(3, &Ledger{Version: 1, Seq: 1, Floor: 0, LastReplicas: 0})
	s.group.Min = 3
	assert.Equal(t, int32(3), decide(s).ledger.Floor, "replicas raised together with the min size")
}

func TestAClaimWithoutRoomWhoseCallIsGoneMovesOn(t *testing.T) {
	one := int32(1)
	s := scene(1, &Ledger{Version: 1, LastReplicas: 1}).withClaim("a", v1alpha1.PhaseBound, "m").withMachine("m", "a", node).
		withClaim("b", "", "")
	s.group.Max = &one
	young := decide(s)
	assert.NotContains(t, kinds(young), moveOn, "its call may still be there")
	assert.Positive(t, young.again)
	s.now = s.now.Add(2 * abandonedAfter)
	assert.Contains(t, kinds(decide(s)), moveOn)
}

func TestAHumansChangeIsTheFloors(t *testing.T) {
	up := decide(scene(5, &Ledger{Version: 1, Seq: 1, Floor: 2, LastReplicas: 3}).withClaim("c", v1alpha1.PhaseBound, "a").withMachine("a", "c", node))
	require.NotNil(t, up.ledger)
	assert.Equal(t, int32(4), up.ledger.Floor)
	assert.Equal(t, int32(5), up.replicas)

	down := decide(scene(2, &Ledger{Version: 1, Seq: 1, Floor: 2, LastReplicas: 3}).withClaim("c", v1alpha1.PhaseBound, "a").withMachine("a", "c", node))
	require.NotNil(t, down.ledger)
	assert.Equal(t, int32(1), down.ledger.Floor)
	assert.Equal(t, int32(2), down.replicas)
}

func TestNothingIsWrittenWhenNothingChanges(t *testing.T) {
	s := scene(2, &Ledger{Version: 1, Seq: 9, Floor: 1, LastReplicas: 2}).
		withMachine("a", "c", node).withMachine("b", "", node).withClaim("c", v1alpha1.PhaseBound, "a")
	s.claims[0].Status.Machine.NodeName = "node-a"
	d := decide(s)
	assert.Nil(t, d.ledger)
	assert.Empty(t, d.actions)
}

func TestAUsersNodeIsNeverGivenToAClaim(t *testing.T) {
	s := scene(2, &Ledger{Version: 1, Seq: 9, Floor: 0, LastReplicas: 2, Pending: map[string]Named{"c": {}}}).
		withMachine("a", "", node).withClaim("c", v1alpha1.PhasePending, "")
	d := decide(s)
	if d.ledger != nil {
		assert.Empty(t, d.ledger.Pending["c"].UID)
	}
	// Unless its holder says that nothing runs there yet.
	s.unregistered = func(id string) bool { return id == "sim://a" }
	d = decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, types.UID("a"), d.ledger.Pending["c"].UID)
}

func TestAReleasedMachineWithoutANodeIsHandedOver(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", nil).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := decide(s)
	assert.Equal(t, []actionKind{unbind}, kinds(d))
	assert.Nil(t, d.ledger, "no release is begun")
}

func TestAReleasedMachineWithANodeIsHeldAndItsReplicaKept(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", node).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Contains(t, d.ledger.Releasing, types.UID("a"))
	assert.Equal(t, int32(1), d.replicas)

	s.ledger = d.ledger
	assert.Contains(t, kinds(decide(s)), hold)
}

// remade is a Machine that was being released and that a move or a restore made again: without its deletion, under another UID.
func remade(m *clusterv1.Machine) {
	node(m)
	m.Finalizers = []string{v1alpha1.ReleaseFinalizer}
	m.Annotations = map[string]string{
		clusterv1.DeleteMachineAnnotation: v1alpha1.Group, clusterv1.ExcludeNodeDrainingAnnotation: v1alpha1.Group, "example.com/note": "x",
	}
}

func TestTheReleaseOfAMachineThatWasMadeAgainGoesOn(t *testing.T) {
	for name, claim := range map[string]string{"of no claim": "", "of a claim that ended": "c"} {
		t.Run(name, func(t *testing.T) {
			ledger := &Ledger{Version: 1, Seq: 9, Floor: 1, LastReplicas: 2, Releasing: map[types.UID]Release{"before": {Machine: "m"}}}
			s := scene(2, ledger).withMachine("m", claim, remade).withMachine("user's", "", node).withClaim("c", v1alpha1.PhaseEnded, "")
			d := decide(s)
			require.NotNil(t, d.ledger)
			assert.Equal(t, map[types.UID]Release{"m": {Machine: "m", Claim: claim}}, d.ledger.Releasing)
			assert.Equal(t, int32(1), d.ledger.Floor)
			assert.Equal(t, int32(2), d.replicas)
			s.ledger = d.ledger
			assert.Equal(t, []actionKind{hold}, kinds(decide(s)))

			s.ledger, s.group = ledger, s.group.With(&eligibility.Refusal{Reason: eligibility.Paused})
			d = decide(s)
			require.NotNil(t, d.ledger)
			assert.Empty(t, d.ledger.Releasing, "not while it is paused, as for a move")
		})
	}
}

func TestAClaimKeepsItsMachineThatWasMadeAgainDuringItsRelease(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("m", "c", remade).withClaim("c", v1alpha1.PhaseBound, "m")
	s.claims[0].Status.Machine.NodeName = "node-m"
	d := decide(s)
	assert.Nil(t, d.ledger)
	require.Equal(t, []actionKind{keep}, kinds(d))

	s.claims[0].Status.Phase = v1alpha1.PhaseReleasing
	d = decide(s)
	require.NotNil(t, d.ledger)
	assert.Contains(t, d.ledger.Releasing, types.UID("m"))
	assert.NotContains(t, kinds(d), keep)

	m := machineOf("m")
	remade(m)
	e := engineWith(t, m)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	require.NoError(t, e.do(t.Context(), action{kind: keep, machine: m.DeepCopy()}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.False(t, held(m))
	assert.Equal(t, map[string]string{"example.com/note": "x"}, m.Annotations)
}

// A Machine is deleted only with our finalizer on it, also when that was there before.
func TestAMachineThatIsKeptMeanwhileIsNotDeleted(t *testing.T) {
	m := machineOf("m")
	remade(m)
	e := engineWith(t, m)
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	require.NoError(t, hub.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			now := &clusterv1.Machine{}
			require.NoError(t, c.Get(ctx, client.ObjectKeyFromObject(o), now))
			now.Finalizers = []string{clusterv1.MachineFinalizer}
			require.NoError(t, c.Update(ctx, now))
			return c.Delete(ctx, o, opts...)
		},
	})
	require.Error(t, e.do(t.Context(), action{kind: hold, machine: m.DeepCopy()}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.True(t, alive(m))
}

func TestALedgerEditedByHandDeletesNoClaimedMachine(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).
		withMachine("a", "c", node).withClaim("c", v1alpha1.PhaseBound, "a")
	d := decide(s)
	assert.NotContains(t, kinds(d), hold)
	require.NotNil(t, d.ledger)
	assert.Empty(t, d.ledger.Releasing)
}

func TestAWipedLedgerIsRebuiltWithoutTakingOrLeaking(t *testing.T) {
	s := scene(4, nil).
		withMachine("a", "bound", node).withMachine("b", "", node).
		withClaim("bound", v1alpha1.PhaseBound, "a").withClaim("waits", v1alpha1.PhasePending, "").withClaim("new", "", "")
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(2), d.ledger.Floor, "4 replicas less one bound and one entered claim")
	assert.Equal(t, int32(5), d.replicas, "one more for the claim that had not been entered")
}

func TestANoCapacityReasonGivesTheMachineUpAtOnce(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", infrastructure("InsufficientCapacity")).withClaim("c", v1alpha1.PhaseBound, "a")
	s.failure = Failure{Reasons: []string{"InsufficientCapacity"}}
	d := decide(s)
	require.Equal(t, []actionKind{fail}, kinds(d))
	assert.Contains(t, d.actions[0].event.Message, "InsufficientCapacity: no hosts left")

	for _, reason := range []string{"WaitingForHost", "InstanceProvisionFailed", "VMProvisionFailed", "Failed", "InsufficientCapacityMaybe"} {
		s.machines[0].Status.Conditions[0].Reason = reason
		assert.Empty(t, kinds(decide(s)), reason)
	}
}

func TestAFailedClaimsMachineIsNotHandedOver(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", nil).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.claims[0].Status.FailedAt = new(metav1.NewTime(s.now))
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Contains(t, d.ledger.Releasing, types.UID("a"))
}

func TestALateMachineIsReleasedAndOneThatTakesSeveralDeadlinesFails(t *testing.T) {
	failure := Failure{ObjectDeadline: time.Minute, ProviderIDDeadline: 2 * time.Minute, NodeDeadline: 3 * time.Minute}
	bound := func(change func(*clusterv1.Machine), since time.Duration) func() *snapshot {
		return func() *snapshot {
			s := scene(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("a", "c", change).withClaim("c", v1alpha1.PhaseBound, "a")
			s.claims[0].Status.BoundAt = new(metav1.NewTime(s.now.Add(since)))
			s.claims[0].Status.NodeAbsentAt = new(metav1.NewTime(s.now.Add(time.Hour))) // whenever it is looked at
			return s
		}
	}
	for name, test := range map[string]struct {
		make func() *snapshot
		at   time.Duration // from when the Machine was made
		then actionKind
	}{
		"no Machine": {func() *snapshot {
			return scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Named{"c": {}}}).
				withClaim("c", v1alpha1.PhasePending, "")
		}, time.Minute, fail},
		"no provider ID": {bound(nil, 0), 2 * time.Minute, timeOut},
		"no Node":        {bound(booting, 0), 3 * time.Minute, timeOut},
		"no provider ID, and the claim came later": {bound(nil, time.Minute), 3 * time.Minute, timeOut},
		"no Node, and the claim came later":        {bound(booting, 5*time.Minute), 8 * time.Minute, timeOut},
		"no provider ID after three claims' time":  {bound(nil, 5*time.Minute), 6 * time.Minute, fail},
		"no Node after three claims' time":         {bound(booting, 8*time.Minute), 9 * time.Minute, fail},
		"a claim that does not say when it was bound": {func() *snapshot {
			s := bound(nil, 0)()
			s.claims[0].Status.BoundAt = nil
			return s
		}, 2 * time.Minute, timeOut},
	} {
		t.Run(name, func(t *testing.T) {
			s := test.make()
			s.failure = failure
			s.now = s.now.Add(test.at - time.Second)
			early := decide(s)
			assert.Empty(t, kinds(early))
			assert.Equal(t, time.Second, early.again, "and is looked at again in time")
			s.now = s.now.Add(time.Second)
			assert.Equal(t, []actionKind{test.then}, kinds(decide(s)))
		})
	}
}

func TestALateMachineIsTheNextClaimsUntilItHasTakenSeveralDeadlines(t *testing.T) {
	at := func(age time.Duration) *decision {
		s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Named{"c": {}}}).
			withMachine("a", "", nil).withClaim("c", v1alpha1.PhasePending, "")
		s.failure = Failure{ProviderIDDeadline: 2 * time.Minute}
		s.now = s.now.Add(age)
		s.claims[0].CreationTimestamp = metav1.NewTime(s.now)
		return decide(s)
	}
	late := at(6*time.Minute - time.Second)
	require.NotNil(t, late.ledger)
	assert.Equal(t, "a", late.ledger.Pending["c"].Machine)
	if hopeless := at(6 * time.Minute); hopeless.ledger != nil {
		assert.Empty(t, hopeless.ledger.Pending["c"].Machine)
	}
}

func TestABlockedMachineSetIsExplainedOnTheClaim(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Named{"c": {}}}).withClaim("c", v1alpha1.PhasePending, "")
	s.sets[0].Status.Conditions = []metav1.Condition{{
		Type: clusterv1.MachineSetScalingUpCondition, Status: "True",
		Message: "Scaling up from 0 to 1 replicas is blocked because:\n* the control plane is upgrading\n* KubeadmBootstrapTemplate does not exist",
	}}
	d := decide(s)
	require.Equal(t, []actionKind{explain}, kinds(d))
	const why = "MachineSet small-a makes no Machines: the control plane is upgrading; KubeadmBootstrapTemplate does not exist"
	assert.Equal(t, why, d.actions[0].event.Message)

	entered := v1alpha1.Event{Time: metav1.NewTime(s.now), Reason: ReasonWaitingForMachine, Message: "entered"}
	s.claims[0].Status.Reason, s.claims[0].Status.Message = ReasonWaitingForMachine, why
	s.claims[0].Status.History = []v1alpha1.Event{entered, {Time: metav1.NewTime(s.now), Reason: ReasonWaitingForMachine, Message: why}}
	s.sets[0].Status.Conditions[0].Message = strings.ReplaceAll(s.sets[0].Status.Conditions[0].Message, "from 0 to 1", "from 0 to 200")
	assert.Empty(t, kinds(decide(s)), "once is enough, whatever else is claimed")

	s.sets[0].Status.Conditions[0].Message = "Scaling up from 0 to 200 replicas is blocked because:\n* KubeadmBootstrapTemplate does not exist"
	d = decide(s)
	assert.Empty(t, kinds(d), "nor more than once a minute")
	assert.Equal(t, explainEvery, d.again)
	s.now = s.now.Add(explainEvery)
	assert.Equal(t, []actionKind{explain}, kinds(decide(s)))
}

func TestAGroupCoolsDownAfterAFailure(t *testing.T) {
	now := newTestTime()
	claims := []*v1alpha1.MachineClaim{
		{Spec: v1alpha1.MachineClaimSpec{ClaimID: "old"}, Status: v1alpha1.MachineClaimStatus{FailedAt: new(metav1.NewTime(now.Add(-time.Hour)))}},
		{Spec: v1alpha1.MachineClaimSpec{ClaimID: "new"}, Status: v1alpha1.MachineClaimStatus{FailedAt: new(metav1.NewTime(now))}},
	}
	refusal := coolDownOf("small", claims, now.Add(time.Minute), 3*time.Minute)
	require.NotNil(t, refusal)
	assert.Equal(t, eligibility.CoolingDown, refusal.Reason)
	assert.True(t, refusal.RetryAt.Equal(now.Add(3*time.Minute)))
	assert.Contains(t, refusal.Message, "new")
	assert.Nil(t, coolDownOf("small", claims, now.Add(3*time.Minute), 3*time.Minute))
}

func completed(m *clusterv1.Machine) {
	m.DeletionTimestamp = new(metav1.NewTime(newTestTime()))
	m.Finalizers = []string{v1alpha1.ReleaseFinalizer}
	m.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.MachineDeletingCondition, Status: "True", Reason: clusterv1.MachineDeletingDeletionCompletedReason,
	}}
}

func TestAReplicaIsGivenBackWhenTheInstanceIsGone(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).withMachine("a", "", completed)
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(0), d.replicas)
	assert.Equal(t, Release{Machine: "a", GivenBack: true, Generation: 4}, d.ledger.Releasing["a"])
}

func TestAReplicaThatANewClaimTakesAtOnceWaitsForNoNewGeneration(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).
		withMachine("a", "", completed).withClaim("c", "", "")
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(1), d.replicas, "one given back, one taken")
	assert.Equal(t, int64(3), d.ledger.Releasing["a"].Generation, "spec does not change, so no generation 4 comes")

	s.ledger = d.ledger
	assert.Contains(t, kinds(decide(s)), letGo)
}

func TestAMachineOfAGroupThatIsBeingDeletedIsLetGo(t *testing.T) {
	for name, back := range map[string]Release{"given back": {Machine: "a", GivenBack: true, Generation: 4}, "not given back": {Machine: "a"}} {
		t.Run(name, func(t *testing.T) {
			s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": back}}).withMachine("a", "", completed)
			s.md.DeletionTimestamp = new(metav1.NewTime(s.now))
			s.md.Generation = 4 // Cluster API does not observe generations of what it deletes
			s.group.Refusals = []eligibility.Refusal{{Reason: eligibility.Deleting}}
			assert.Contains(t, kinds(decide(s)), letGo)
		})
	}
}

// Cluster API deletes nothing that is paused.
func TestAGroupThatIsBeingDeletedIsNotKeptPaused(t *testing.T) {
	going := func(ledger *Ledger) *snapshot {
		s := scene(1, ledger)
		s.md.DeletionTimestamp = new(metav1.NewTime(s.now))
		s.sets[0].Spec.Replicas = new(int32(2)) // Cluster API does not scale what it deletes
		s.group.Refusals = []eligibility.Refusal{{Reason: eligibility.Deleting}}
		return s
	}
	t.Run("MachineSet", func(t *testing.T) {
		for _, done := range []bool{false, true} {
			s := going(&Ledger{Version: 1, Seq: 9, LastReplicas: 1, Spare: 1, Shrink: &Shrink{Set: "small-a", Done: done}})
			s.sets[0].Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
			if !done {
				s.ledger = decide(s).ledger
				require.True(t, s.ledger.Shrink.Done)
			}
			assert.Contains(t, kinds(decide(s)), unpauseMachineSet)
		}
	})
	t.Run("MachineDeployment", func(t *testing.T) {
		s := going(&Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a", Set: "small-a"}}})
		s.md.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
		d := decide(s.withMachine("a", "", completed))
		assert.Equal(t, pauseRemove, d.pause)
		assert.Equal(t, int32(1), d.replicas)
		assert.Contains(t, kinds(d), letGo)
	})
}

func TestAMachineWhoseClaimsObjectWasLostKeepsItsClaim(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", node)
	s.lost = map[string]*clusterv1.Machine{"c": s.machines[0]}
	s.spareSince = s.now.Add(-time.Hour)
	d := decide(s)
	assert.Nil(t, d.ledger, "it is no spare")
	assert.Equal(t, []actionKind{recreate}, kinds(d))
}

func TestAClaimThatLostItsStatusGetsItsOwnMachineBack(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", node).withClaim("c", "", "")
	d := decide(s)
	assert.Nil(t, d.ledger, "and no second one")
	assert.Equal(t, []actionKind{restore}, kinds(d))
}

func TestAClaimThatLostItsStatusBeforeItsEntryWasDroppedIsRestored(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Named{"c": {Machine: "m", UID: "m"}}}).
		withMachine("m", "c", nil).withClaim("c", v1alpha1.PhasePending, "")
	assert.Equal(t, []actionKind{restore}, kinds(decide(s)))
}

func TestAFailingMachineIsNobodysNext(t *testing.T) {
	failing := Failure{Reasons: []string{"InsufficientCapacity"}}
	released := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", infrastructure("InsufficientCapacity")).withClaim("c", v1alpha1.PhaseReleasing, "a")
	released.failure = failing
	d := decide(released)
	require.NotNil(t, d.ledger, "it is released, not handed over")
	assert.Contains(t, d.ledger.Releasing, types.UID("a"))

	waiting := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Named{"c": {}}}).
		withMachine("a", "", infrastructure("InsufficientCapacity")).withClaim("c", v1alpha1.PhasePending, "")
	waiting.failure = failing
	waiting.machines[0].CreationTimestamp = metav1.NewTime(waiting.now.Add(-time.Minute)) // it failed somebody else
	if d := decide(waiting); d.ledger != nil {
		assert.Empty(t, d.ledger.Pending["c"].UID)
	}
}

func TestAClaimLastsUntilItsMachineIsGone(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.NewTime(newTestTime())) }).
		withClaim("c", v1alpha1.PhaseBound, "a")
	assert.Equal(t, []actionKind{explain}, kinds(decide(s)), "its instance may still run")

	s.machines = nil
	assert.Equal(t, []actionKind{end}, kinds(decide(s)))
}

func deleting(reason string) func(*clusterv1.Machine) {
	return func(m *clusterv1.Machine) {
		node(m)
		m.DeletionTimestamp = new(metav1.NewTime(newTestTime()))
		m.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineDeletingCondition, Status: "True", Reason: reason, Message: "cannot evict pod default/web-0",
		}}
	}
}

func releasingLedger(r Release) *Ledger {
	return &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Releasing: map[types.UID]Release{"a": r}}
}

func TestAMachineThatSomebodyElseDeletesIsHeldByAHook(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).
		withMachine("a", "c", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.claims[0].Status.Drained = true
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, Release{Machine: "a", Claim: "c", Drained: true, Hook: true}, d.ledger.Releasing["a"])
	assert.Equal(t, int32(1), d.replicas)
}

func TestTheHookIsPutOnAndTheReplicaIsGivenBackWhenItHolds(t *testing.T) {
	s := scene(1, releasingLedger(Release{Machine: "a", Claim: "c", Hook: true})).
		withMachine("a", "c", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := decide(s)
	assert.Nil(t, d.ledger)
	assert.Contains(t, kinds(d), hook)

	s = scene(1, releasingLedger(Release{Machine: "a", Claim: "c", Hook: true})).
		withMachine("a", "c", deleting(clusterv1.MachineDeletingWaitingForPreTerminateHookReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.machines[0].Annotations = map[string]string{v1alpha1.ReleaseHook: ""}
	d = decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(0), d.replicas)
	assert.True(t, d.ledger.Releasing["a"].GivenBack)
	assert.NotContains(t, kinds(d), letGo, "not before Cluster API has seen it")
}

func TestAHookOfSomebodyElseHoldsNothingOfOurs(t *testing.T) {
	s := scene(1, releasingLedger(Release{Machine: "a", Claim: "c", Hook: true})).
		withMachine("a", "c", deleting(clusterv1.MachineDeletingWaitingForPreTerminateHookReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := decide(s)
	assert.Equal(t, int32(1), d.replicas)
	assert.Contains(t, kinds(d), hook)
}

func TestAReleaseThatIsOvertakenGoesOnWithAHook(t *testing.T) {
	s := scene(1, releasingLedger(Release{Machine: "a", Claim: "c"})).
		withMachine("a", "c", deleting("")).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.True(t, d.ledger.Releasing["a"].Hook)
	assert.NotContains(t, kinds(d), hold, "a finalizer cannot be added any more")
}

func TestAHookThatComesTooLateIsGivenUp(t *testing.T) {
	for _, r := range []Release{{Machine: "a", Claim: "c"}, {Machine: "a", Claim: "c", Hook: true}} {
		s := scene(1, releasingLedger(r)).
			withMachine("a", "c", deleting(clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
		d := decide(s)
		require.NotNil(t, d.ledger)
		assert.Empty(t, d.ledger.Releasing)
		assert.Equal(t, int32(1), d.replicas, "its replacement is a spare")
	}
}

func TestAHookThatNobodyKnowsOfIsTakenOff(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).
		withMachine("a", "", deleting(clusterv1.MachineDeletingWaitingForPreTerminateHookReason))
	s.machines[0].Annotations = map[string]string{v1alpha1.ReleaseHook: ""}
	assert.Contains(t, kinds(decide(s)), letGo)
}

func TestADeletionThatTakesLongIsExplained(t *testing.T) {
	s := scene(1, releasingLedger(Release{Machine: "a", Claim: "c"})).
		withMachine("a", "c", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.machines[0].Finalizers = []string{clusterv1.MachineFinalizer, v1alpha1.ReleaseFinalizer}
	d := decide(s)
	assert.Empty(t, d.actions)
	assert.Equal(t, slowDeletion, d.again)
	s.now = s.now.Add(slowDeletion)
	d = decide(s)
	require.Equal(t, []actionKind{explain}, kinds(d))
	assert.Equal(t, clusterv1.MachineDeletingDrainingNodeReason, d.actions[0].event.Reason)
	assert.Contains(t, d.actions[0].event.Message, "cannot evict pod default/web-0")
	s.claims[0].Status.Reason = clusterv1.MachineDeletingDrainingNodeReason
	assert.Empty(t, decide(s).actions, "once")
}

func TestAdoptingTakesASpareElseTheUsers(t *testing.T) {
	for name, test := range map[string]struct {
		floor, replicas, minimum int32
		maximum                  *int32
		wantFloor, wantReplicas  int32
		wantAdopted, wantRefusal bool
	}{
		"a spare":                             {floor: 1, replicas: 2, wantFloor: 1, wantReplicas: 2},
		"the user's":                          {floor: 2, replicas: 2, wantFloor: 1, wantReplicas: 2, wantAdopted: true},
		"at the min size replicas are raised": {floor: 2, replicas: 2, minimum: 2, wantFloor: 2, wantReplicas: 3},
		"at the min and the max size":         {floor: 2, replicas: 2, minimum: 2, maximum: new(int32(2)), wantRefusal: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := scene(test.replicas, &Ledger{Version: 1, Seq: 4, LastReplicas: test.replicas, Floor: test.floor, Min: test.minimum}).
				withMachine("a", "", node).withMachine("b", "", node).withClaim("c", "", "")
			s.claims[0].Spec.Adopt = "b"
			s.group.Min, s.group.Max = test.minimum, test.maximum
			d := decide(s)
			if test.wantRefusal {
				assert.Equal(t, eligibility.AtMaxSize, d.refused["c"].Reason)
				assert.Nil(t, d.ledger)
				return
			}
			require.NotNil(t, d.ledger)
			assert.Equal(t, Named{Machine: "b", UID: "b", Adopted: test.wantAdopted}, d.ledger.Pending["c"])
			assert.Equal(t, test.wantFloor, d.ledger.Floor)
			assert.Equal(t, test.wantReplicas, d.replicas)
		})
	}
}

func TestWhatCannotBeAdoptedIsRefusedWithTheReason(t *testing.T) {
	for name, test := range map[string]struct {
		scene *snapshot
		want  string
	}{
		"missing": {scene(1, nil).withMachine("b", "", node), "does not exist"},
		"claimed": {scene(1, nil).withMachine("a", "other", node).withClaim("other", v1alpha1.PhaseBound, "a"), "has a claim already"},
		"promised": {
			scene(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Named{"other": {Machine: "a", UID: "a"}}}).
				withMachine("a", "", nil).withClaim("other", v1alpha1.PhasePending, ""), "has a claim already",
		},
		"going": {scene(1, nil).withMachine("a", "", deleting("")), "is being deleted"},
	} {
		t.Run(name, func(t *testing.T) {
			s := test.scene.withClaim("c", "", "")
			s.claims[len(s.claims)-1].Spec.Adopt = "a"
			d := decide(s)
			assert.Equal(t, eligibility.NotAdoptable, d.refused["c"].Reason)
			assert.Contains(t, d.refused["c"].Message, test.want)
		})
	}
}

func TestAnAdoptionThatIsTakenBackLeavesTheMachineWithTheUser(t *testing.T) {
	s := scene(2, &Ledger{
		Version: 1, Seq: 4, LastReplicas: 2, Floor: 1, Pending: map[string]Named{"c": {Machine: "b", UID: "b", Adopted: true}},
	}).withMachine("a", "", node).withMachine("b", "", node).withClaim("c", v1alpha1.PhaseReleasing, "")
	s.claims[0].Spec.Adopt = "b"
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, int32(2), d.ledger.Floor)
	assert.Empty(t, d.ledger.Pending)
	assert.Equal(t, int32(2), d.replicas)
	assert.False(t, d.spare)
}

func TestAnAdoptionWhoseMachineDiesEnds(t *testing.T) {
	s := scene(2, &Ledger{
		Version: 1, Seq: 4, LastReplicas: 2, Floor: 1, Pending: map[string]Named{"c": {Adopted: true}},
	}).withMachine("a", "", node).withMachine("d", "", nil).withClaim("c", v1alpha1.PhasePending, "")
	s.claims[0].Spec.Adopt = "b"
	d := decide(s)
	assert.Equal(t, []actionKind{end}, kinds(d), "it gets no other Machine")
}

func TestAClaimFailsWithAMachineThatWillNotCome(t *testing.T) {
	s := scene(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Pending: map[string]Named{"b": {}, "c": {}}})
	s.failure = Failure{Reasons: []string{"NoCapacity"}}
	s.withMachine("bad", "", infrastructure("NoCapacity")).withMachine("good", "", nil).
		withClaim("b", v1alpha1.PhasePending, "").withClaim("c", v1alpha1.PhasePending, "")
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, "good", d.ledger.Pending["b"].Machine)
	assert.Equal(t, "bad", d.ledger.Pending["c"].Machine)
	assert.True(t, d.urgent)
	assert.Equal(t, int32(2), d.replicas, "no further Machine is asked for where they fail")

	s.machines[0].CreationTimestamp = metav1.NewTime(s.now.Add(-time.Hour))
	assert.Empty(t, decide(s).ledger.Pending["c"], "one that failed before the claim was made is not its Machine")
}

// A rollout waits until the MachineSet says that it let its Machines go, which it does not while it is paused.
func TestAMachineSetThatARolloutWaitsForIsUnpaused(t *testing.T) {
	for _, tc := range []struct {
		name     string
		strategy clusterv1.MachineDeploymentRolloutStrategyType
		revision string
		unpaused bool
	}{
		{name: "a rollout waits", strategy: clusterv1.RollingUpdateMachineDeploymentStrategyType, revision: "2", unpaused: true},
		{name: "nothing is rolled out", strategy: clusterv1.RollingUpdateMachineDeploymentStrategyType, revision: "0"},
		{name: "on deletion only", strategy: clusterv1.OnDeleteMachineDeploymentStrategyType, revision: "2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := scene(2, &Ledger{Version: 1, Seq: 1, Floor: 2, LastReplicas: 2, Shrink: &Shrink{Set: "small-a", Done: true}})
			s.md.Spec.Rollout.Strategy.Type = tc.strategy
			paused := s.sets[0]
			paused.Spec.Replicas = new(int32(3)) // it has not been told of the lowering
			paused.Annotations = map[string]string{
				clusterv1.PausedAnnotation: v1alpha1.PausedByAgent, clusterv1.RevisionAnnotation: "1",
			}
			s.sets = append(s.sets, &clusterv1.MachineSet{
				ObjectMeta: metav1.ObjectMeta{Name: "small-b", Annotations: map[string]string{clusterv1.RevisionAnnotation: tc.revision}},
				Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(0))},
			})
			d := decide(s.withMachine("a", "", node).withMachine("b", "", node))
			assert.Equal(t, tc.unpaused, slices.Contains(kinds(d), unpauseMachineSet))
		})
	}
}

// Whoever finds the paused step half done completes it. To merely take the pause off would have Cluster API put the MachineSet's
// replica back, and the release lower it, and the MachineDeployment, for a second Machine.
func TestAPausedStepThatSomebodyLeftIsCompleted(t *testing.T) {
	three := int32(3)
	ledger := &Ledger{Version: 1, Seq: 7, Floor: 2, LastReplicas: 3, Releasing: map[types.UID]Release{
		"gone": {Machine: "gone", Claim: "c", Set: "small-a"},
	}}
	md := groupOf("small", three, map[string]string{
		v1alpha1.LedgerAnnotation: ledger.encode(), clusterv1.PausedAnnotation: v1alpha1.PausedByAgent,
	})
	md.Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue}}
	set := func(name string, replicas int32, annotations map[string]string) *clusterv1.MachineSet {
		return &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: name, Annotations: annotations,
				Labels: map[string]string{clusterv1.MachineDeploymentNameLabel: "small", clusterv1.ClusterNameLabel: clusterName},
			},
			Spec: clusterv1.MachineSetSpec{ClusterName: clusterName, Replicas: &replicas},
		}
	}
	released := machineOf("gone")
	completed(released)
	released.Labels[v1alpha1.ClaimLabel] = "c"
	e := engineWith(t, md, released, set("small-a", 1, map[string]string{v1alpha1.ReleasedAnnotation: "gone"}), set("small-b", 1, nil))
	var written []string
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if err := c.Patch(ctx, o, patch, opts...); err != nil {
				return err
			}
			if md, is := o.(*clusterv1.MachineDeployment); is {
				_, paused := md.Annotations[clusterv1.PausedAnnotation]
				written = append(written, fmt.Sprintf("replicas=%d paused=%t", *md.Spec.Replicas, paused))
			}
			return nil
		},
	})
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NotEmpty(t, written)
	assert.Equal(t, "replicas=2 paused=false", written[0])
}

// Naming is gathered, but not where that leaves Machines to nobody: each that joined too soon is released, and replaced by one that
// may join too soon as well.
func TestAMachineIsNamedAtOnceWhereOthersJoinedTooSoon(t *testing.T) {
	e := engineWith(t)
	e.Coalesce = time.Second
	for _, missed := range []bool{false, true} {
		s := scene(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Pending: map[string]Named{"a": {}, "b": {}}}).
			withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "").withMachine("fresh", "", nil)
		s.sets[0].Generation++ // more Machines are being made, so that nothing is short yet
		if missed {
			s.withMachine("joined", "", node)
		}
		d := decide(s)
		require.NotNil(t, d.ledger)
		require.Equal(t, "fresh", d.ledger.Pending["a"].Machine)
		wait := e.group(namespace, fmt.Sprintf("missed-%t", missed)).coalesce(s, d)
		assert.Equal(t, missed, wait == 0, "%s", wait)
	}
}

// The one that has it says so until it has ended: nobody is to read that two claims have one Machine.
func TestAMachineIsBoundWhenTheClaimThatHandsItOverHasEnded(t *testing.T) {
	ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Pending: map[string]Named{"b": {Machine: "m", UID: "m"}}}
	s := scene(1, ledger).withMachine("m", "", nil).
		withClaim("a", v1alpha1.PhaseReleasing, "m").withClaim("b", v1alpha1.PhasePending, "")
	assert.Equal(t, []actionKind{end}, kinds(decide(s)))
	s = scene(1, ledger).withMachine("m", "", nil).withClaim("a", v1alpha1.PhaseEnded, "m").withClaim("b", v1alpha1.PhasePending, "")
	assert.Equal(t, []actionKind{bind}, kinds(decide(s)))
}

func TestARestoredClaimThatFailedKeepsItsReason(t *testing.T) {
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a")},
		Spec:       v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseReleasing, FailedAt: new(metav1.NewTime(newTestTime())), Reason: "NoCapacity", Message: "no hosts left",
		},
	}
	e := engineWith(t, claim)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	require.NoError(t, e.restore(t.Context(), action{kind: restore, claim: claim, machine: machineOf("m")}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	assert.Equal(t, "m", claim.Status.Machine.Name)
	assert.Equal(t, "NoCapacity", claim.Status.Reason)
	assert.Equal(t, "no hosts left", claim.Status.Message)
	assert.Equal(t, v1alpha1.PhaseReleasing, claim.Status.Phase)
}

// Cluster API removes a Machine's infrastructure when a call to create the Machine times out, also when the Machine was made, and
// sees to no other Machine of the MachineSet as long as that one is there.
func TestAMachineWithoutInfrastructureIsGivenUp(t *testing.T) {
	lacks := func(since time.Duration) func(*clusterv1.Machine) {
		return func(m *clusterv1.Machine) {
			infrastructure(clusterv1.MachineInfrastructureDoesNotExistReason)(m)
			m.CreationTimestamp = metav1.NewTime(newTestTime().Add(-since))
			m.Status.Conditions[0].LastTransitionTime = m.CreationTimestamp
		}
	}
	t.Run("its claim fails", func(t *testing.T) {
		for _, since := range []time.Duration{time.Second, time.Hour} {
			s := scene(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).withMachine("m", "a", lacks(since)).withClaim("a", v1alpha1.PhaseBound, "m")
			d := decide(s)
			assert.Equal(t, since == time.Hour, slices.Contains(kinds(d), fail), since)
			if since < missingAfter {
				assert.LessOrEqual(t, d.again, missingAfter, "it is looked at again")
				assert.Positive(t, d.again)
			}
		}
	})
	t.Run("it is no claim's next", func(t *testing.T) {
		s := scene(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Spare: 1}).withMachine("m", "", lacks(time.Hour)).withClaim("a", "", "")
		assert.Empty(t, decide(s).ledger.Pending["a"].Machine)
	})
	t.Run("it goes although Cluster API is stuck and a claim waits", func(t *testing.T) {
		s := scene(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Spare: 1, Pending: map[string]Named{"a": {}}}).
			withMachine("m", "", lacks(time.Hour)).withClaim("a", v1alpha1.PhasePending, "")
		s.spareSince = s.now.Add(-time.Hour)
		s.sets[0].Generation = 7
		d := decide(s)
		require.NotNil(t, d.ledger)
		assert.Contains(t, d.ledger.Releasing, types.UID("m"))
	})
}

func pauseAsAgent(o metav1.Object) {
	o.SetAnnotations(map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent})
}

var saysPaused = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue}}

// A template change that Cluster API has not seen yet would make the lowering another MachineSet's.
func TestSparesThatNeverCameAreCountedOnceTheTemplateIsSeen(t *testing.T) {
	for _, seen := range []bool{false, true} {
		s := scene(3, &Ledger{Version: 1, Seq: 4, Floor: 1, LastReplicas: 3, Spare: 2, Shrink: &Shrink{Set: "small-a"}}).withMachine("m", "", node)
		pauseAsAgent(s.sets[0])
		s.sets[0].Status.Conditions = saysPaused
		if !seen {
			s.md.Generation++
		}
		d := decide(s)
		assert.Equal(t, seen, d.replicas == 1, "replicas %d", d.replicas)
	}
}

// Of a MachineDeployment and its MachineSet one at a time is paused: each would wait for what the other says when it is not.
func TestOnePauseAtATime(t *testing.T) {
	t.Run("the MachineSet is", func(t *testing.T) {
		for _, shrinks := range []bool{false, true} {
			ledger := &Ledger{Version: 1, Seq: 4, Floor: 3, LastReplicas: 4, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}
			s := scene(4, ledger).withMachine("m", "c", completed)
			s.sets[0].Spec.Replicas = new(int32(3))
			s.sets = append(s.sets, &clusterv1.MachineSet{
				ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
			})
			if shrinks {
				ledger.Shrink = &Shrink{Set: "small-b", Done: true}
				pauseAsAgent(s.sets[1])
			}
			d := decide(s)
			assert.Equal(t, !shrinks, d.pause == pauseSet)
			assert.Equal(t, int32(4), d.replicas)
		}
	})
	t.Run("the MachineDeployment is", func(t *testing.T) {
		for _, lowers := range []bool{false, true} {
			ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Spare: 2, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}
			s := scene(3, ledger).withMachine("m", "c", deleting("Draining"))
			s.spareSince = s.now.Add(-time.Hour)
			if lowers {
				ledger.Releasing["m"] = Release{Machine: "m", Claim: "c", Set: "small-a"}
				s.machines = nil
				s.withMachine("m", "c", completed)
				pauseAsAgent(s.md)
				s.md.Status.Conditions = saysPaused
			}
			d := decide(s)
			began := d.ledger != nil && d.ledger.Shrink != nil
			assert.Equal(t, !lowers, began)
		}
	})
}
