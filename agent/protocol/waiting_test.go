package protocol

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// waits is a group in which two claims have waited for the given time. Their deadline is five
// minutes.
func waits(long time.Duration) *Snapshot {
	s := atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Pending: map[string]Assignment{"a": {}, "b": {}}}).
		withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "")
	s.Sets[0].Generation++ // Machines are still being made
	s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
	s.Now = s.Now.Add(long)
	return s
}

func TestAClaimDoesNotFailWhenAMachineIsBeingGivenToIt(t *testing.T) {
	s := waits(5*time.Minute).withMachine("m", "", nil)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	require.Equal(t, types.UID("m"), d.Ledger.Pending["a"].UID, "by a write that may be put off for others")
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	assert.Equal(t, "b", d.Actions[0].Claim.Spec.ClaimID)
}

func TestADeadlineThatPassedWhileNoAgentLookedBeginsAnew(t *testing.T) {
	s := waits(time.Hour)
	require.Equal(t, []ActionKind{WaitAnew, WaitAnew}, kinds(Decide(s)))

	for _, c := range s.Claims {
		c.Status.WaitingSince = new(metav1.NewTime(s.Now))
	}
	d := Decide(s)
	assert.Empty(t, kinds(d), "another agent sees it as well")
	assert.Equal(t, 5*time.Minute, d.RequeueAfter)
	s.Now = s.Now.Add(5 * time.Minute)
	assert.Equal(t, []ActionKind{Fail, Fail}, kinds(Decide(s)))
}

func TestAnAgentThatJustStartedLetsNoClaimFail(t *testing.T) {
	s := waits(5 * time.Minute)
	s.Started = s.Now.Add(-time.Minute)
	d := Decide(s)
	assert.Empty(t, kinds(d), "its holder has not reported yet which Nodes a claim may have")
	assert.Equal(t, time.Minute, d.RequeueAfter)
	s.Now = s.Now.Add(time.Minute)
	assert.Equal(t, []ActionKind{Fail, Fail}, kinds(Decide(s)), "it has now")
}

// The Machine that was ordered for the claim joined before an agent could assign it, shortly before
// the claim's deadline.
func TestAClaimWhoseMachineJoinedTooEarlyHasItsTimeForAnotherOne(t *testing.T) {
	joined := func(ago time.Duration) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"a": {}}}).withClaim("a", v1alpha1.PhasePending, "")
		s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
		s.Now = s.Now.Add(5 * time.Minute)
		return s.withMachine("m", "", func(m *clusterv1.Machine) {
			node(m)
			m.Status.LastUpdated = metav1.NewTime(s.Now.Add(-ago))
		})
	}
	d := Decide(joined(time.Minute))
	assert.Equal(t, []ActionKind{WaitAnew}, kinds(d), "it may turn out to be the claim's")
	assert.Equal(t, int32(1), d.Replicas)
	assert.Equal(t, time.Minute, d.RequeueAfter)
	unsettled := joined(time.Minute)
	unsettled.Sets[0].Generation++
	assert.Equal(t, []ActionKind{WaitAnew}, kinds(Decide(unsettled)), "also while other Machines are being made")

	for _, late := range []time.Duration{0, -time.Minute} { // the deadline passes now, or soon
		s := joined(2*time.Minute - late)
		s.Now = s.Now.Add(late)
		d = Decide(s)
		assert.Equal(t, []ActionKind{WaitAnew}, kinds(d))
		assert.Nil(t, d.Ledger, "another one is ordered once the claim has its time for it")
		s.Claims[0].Status.WaitingSince = new(metav1.NewTime(s.Now))
		d = Decide(s)
		assert.Empty(t, kinds(d))
		assert.Equal(t, int32(2), d.Replicas)
		require.NotNil(t, d.Ledger)
	}
}

// Something marks each Machine, so the next one would be marked, too.
func TestMachinesThatAreMarkedAsTheyAreMadeAreNotReplacedForEver(t *testing.T) {
	group := func(annotation string, inTemplate bool) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
			withClaim("c", v1alpha1.PhasePending, "")
		s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
		if inTemplate {
			s.Deployment.Spec.Template.Annotations = map[string]string{annotation: "true"}
		}
		for i := range int32(10) {
			s.withMachine(fmt.Sprint("m", i), "", func(m *clusterv1.Machine) {
				node(m)
				m.Annotations = map[string]string{annotation: "true"}
			})
			d := Decide(s)
			if d.Ledger == nil {
				break
			}
			require.Equal(t, s.Group.Replicas+1, d.Replicas)
			s.Ledger, s.Group.Replicas = d.Ledger, d.Replicas
			s.Deployment.Spec.Replicas, s.Sets[0].Spec.Replicas = &d.Replicas, &d.Replicas
		}
		return s
	}
	fails := func(s *Snapshot, annotation string) {
		s.Now = s.Now.Add(5 * time.Minute)
		d := Decide(s)
		require.Equal(t, []ActionKind{Fail}, kinds(d))
		require.Contains(t, d.Actions[0].Event.Message, annotation)
	}
	for _, annotation := range []string{v1alpha1.FloorAnnotation, clusterv1.DeleteMachineAnnotation, v1alpha1.NodeRegisteredAtAnnotation} {
		t.Run(annotation, func(t *testing.T) {
			s := group(annotation, true)
			require.Len(t, s.Machines, 1)
			fails(s, annotation)

			s = group(annotation, true)
			s.Group.Max = new(int32(1))
			d := Decide(s)
			require.Nil(t, d.Ledger)
			require.False(t, d.HasSpare, "no other one is to make room for")
		})
	}
	for _, annotation := range []string{v1alpha1.FloorAnnotation, clusterv1.DeleteMachineAnnotation} {
		t.Run(annotation+" by another actor", func(t *testing.T) {
			s := group(annotation, false)
			require.Len(t, s.Machines, 2, "the first may have been marked alone")
			fails(s, annotation)
		})
	}
	marked := func(m *clusterv1.Machine) {
		m.Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: "true"}
	}
	s := atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Pending: map[string]Assignment{"a": {}, "b": {}}}).
		withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "").withMachine("x", "", marked).withMachine("y", "", marked)
	require.Equal(t, int32(4), Decide(s).Replicas, "each claim may have another one once")
}

// The Machine made for the claim was marked for deletion before it was assigned, and is still being
// made: its Node decides nothing.
func TestAMachineThatNoClaimMayHaveIsNotWaitedFor(t *testing.T) {
	for name, change := range map[string]func(*clusterv1.Machine){
		"outdated": func(m *clusterv1.Machine) {
			m.Status.Conditions = []metav1.Condition{{
				Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
			}}
		},
		"to be deleted next": func(m *clusterv1.Machine) { m.Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: ""} },
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
				withClaim("c", v1alpha1.PhasePending, "")
			s.Deployment.Spec.Rollout.Strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
			s.withMachine("m", "", func(m *clusterv1.Machine) { m.Spec.ProviderID = "sim://m" })
			require.Equal(t, int32(1), Decide(s).Replicas, "it may turn out to be the claim's")
			change(s.Machines[0])
			require.Equal(t, int32(2), Decide(s).Replicas)
		})
	}
}

// In a large group some Machine is always being drained.
func TestAMachineThatIsBeingReleasedHidesNoShortage(t *testing.T) {
	releasing := func(size int32, change func(*clusterv1.Machine)) *Snapshot {
		return atRest(size, &Ledger{
			Version: 1, Seq: 9, LastReplicas: size, Pending: map[string]Assignment{"c": {}},
			Releasing: map[types.UID]Release{"old": {Machine: "old", Claim: "old"}},
		}).withClaim("c", v1alpha1.PhasePending, "").withClaim("old", v1alpha1.PhaseReleasing, "old").
			withMachine("joined", "", node).withMachine("old", "old", func(m *clusterv1.Machine) {
			node(m)
			m.DeletionTimestamp = new(metav1.NewTime(newTestTime()))
			m.Finalizers = []string{v1alpha1.ReleaseFinalizer, "someone/else"}
			change(m)
		})
	}
	s := releasing(2, func(*clusterv1.Machine) {})
	require.Equal(t, int32(3), Decide(s).Replicas)
	for _, set := range []string{"", "small-a"} {
		s = releasing(2, func(m *clusterv1.Machine) { m.Finalizers = m.Finalizers[1:] })
		s.Ledger.Releasing["old"] = Release{Machine: "old", Claim: "old", Set: set}
		require.Equal(t, int32(2), Decide(s).Replicas, "it will be replaced, and the claim may have that")
	}
	s = releasing(2, func(*clusterv1.Machine) {})
	s.Ledger.Releasing["old"] = Release{Machine: "old", Claim: "old", Decremented: true}
	require.Equal(t, int32(2), Decide(s).Replicas, "it will be replaced, or replicas are lowered for it")
	s = releasing(2, func(*clusterv1.Machine) {})
	s.Deployment.Spec.Rollout.Strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
	s.Sets[0].Spec.Replicas = new(int32(1)) // lowered, and has its Machine until that is gone
	s.Sets = append(s.Sets, &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
	})
	require.Equal(t, int32(2), Decide(s).Replicas, "another MachineSet makes one yet")
	s = releasing(2, func(*clusterv1.Machine) {})
	s.Group.Max = new(int32(2))
	d := Decide(s)
	require.Equal(t, int32(1), d.Unmet)
	require.False(t, d.HasSpare, "the release makes room")
}

// A Machine of the floor, or a spare, that others are deleting may take long to go: it is drained,
// and its host is cleaned. Cluster API makes the Machine for the claim meanwhile.
func TestAMachineThatOthersAreDeletingHoldsUpNoClaim(t *testing.T) {
	s := atRest(4, &Ledger{Version: 1, Seq: 9, LastReplicas: 4, Floor: 3, Pending: map[string]Assignment{"c": {}}}).
		withMachine("f1", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withMachine("f2", "", node).withMachine("f3", "", node).
		withMachine("m", "", booting).withClaim("c", v1alpha1.PhasePending, "")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	require.Equal(t, types.UID("m"), d.Ledger.Pending["c"].UID, "what takes the place of f1 is the floor's")

	s = atRest(3, &Ledger{Version: 1, Seq: 9, LastReplicas: 3, Floor: 2, Spare: 1}).
		withMachine("f1", "", node).withMachine("f2", "", node).withMachine("s", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).
		withClaim("c", "", "")
	require.Equal(t, int32(4), Decide(s).Replicas, "the spare is not there to be had")

	s = atRest(4, &Ledger{Version: 1, Seq: 9, LastReplicas: 4, Floor: 3, Pending: map[string]Assignment{"c": {}}}).
		withMachine("f1", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withMachine("f2", "", node).withMachine("f3", "", node).
		withMachine("f4", "", node).withClaim("c", v1alpha1.PhasePending, "") // a user has lowered replicas: f4 is to stay
	s.Failure.ObjectDeadline = 5 * time.Minute
	s.Claims[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-s.Failure.ObjectDeadline - time.Second))
	d = Decide(s)
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	require.Contains(t, d.Actions[0].Event.Message, "Machine f1 is being deleted (DrainingNode)")
}

// In a rollout with surge, or after a person has lowered replicas, a Machine that goes has no
// replica left.
func TestAMachineThatIsReplacedAlreadyTakesNothingFromTheFloor(t *testing.T) {
	old := func(m *clusterv1.Machine) {
		node(m)
		m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
			Type: clusterv1.MachineUpToDateCondition, Status: "False", Reason: clusterv1.MachineNotUpToDateReason,
		})
	}
	s := atRest(4, &Ledger{Version: 1, Seq: 9, LastReplicas: 4, Floor: 3, Pending: map[string]Assignment{"c": {}}}).
		withMachine("f1", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withMachine("f2", "", old).withMachine("f3", "", old).
		withMachine("n1", "", booting).withClaim("c", v1alpha1.PhasePending, "")
	if d := Decide(s); d.Ledger != nil {
		require.Empty(t, d.Ledger.Pending["c"].UID, "n1 replaces f1")
	}

	s = atRest(3, &Ledger{Version: 1, Seq: 9, LastReplicas: 3, Floor: 2, Spare: 1}).
		withMachine("f1", "", node).withMachine("f2", "", node).withMachine("f3", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).
		withMachine("s", "", booting).withClaim("c", "", "")
	s.Group.Max = new(int32(3))
	d := Decide(s)
	require.Empty(t, d.Refused, "there is a spare")
	require.Equal(t, int32(3), d.Replicas)
	require.Equal(t, types.UID("s"), d.Ledger.Pending["c"].UID)
}

// A user lowers replicas by one, and Cluster API takes f2, which is drained for long. That f2 is
// there yet must not keep the replica of a release: it would become another Machine once f2 is
// gone.
func TestAReplicaIsGivenBackWhileAnotherMachineGoes(t *testing.T) {
	s := atRest(3, &Ledger{Version: 1, Seq: 9, LastReplicas: 3, Floor: 1, Releasing: map[types.UID]Release{"m2": {Machine: "m2", Claim: "c2"}}}).
		withMachine("f1", "", node).withMachine("f2", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).
		withMachine("m1", "c1", node).withClaim("c1", v1alpha1.PhaseBound, "m1").
		withMachine("m2", "c2", completed).withClaim("c2", v1alpha1.PhaseReleasing, "m2")
	d := Decide(s)
	require.Equal(t, int32(2), d.Replicas)
	require.True(t, d.Ledger.Releasing["m2"].Decremented)

	s.Machines[1].Status.Conditions = nil // Cluster API may not know yet that it is being deleted
	d = Decide(s)
	require.Equal(t, int32(3), d.Replicas, "it might delete f1 or m1 instead")
	require.Nil(t, d.Ledger, "but it soon knows")

	s = atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Floor: 1, Releasing: map[types.UID]Release{"m2": {Machine: "m2", Claim: "c2"}}}).
		withMachine("f1", "", node).withMachine("m1", "c1", node).withClaim("c1", v1alpha1.PhaseBound, "m1").
		withMachine("m2", "c2", completed).withClaim("c2", v1alpha1.PhaseReleasing, "m2")
	require.Equal(t, int32(2), Decide(s).Replicas, "the lowering has taken the replica of m2")
}

// The Machine that was made for the claim joined unseen after some minutes, and the group is full.
// What follows takes the grace period and a deletion.
func TestAClaimHasTimeForTheMachineThatAnotherOneMakesRoomFor(t *testing.T) {
	full := func(waited time.Duration) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
			withClaim("c", v1alpha1.PhasePending, "").withMachine("joined", "", node)
		s.Failure, s.Group.Max = FailurePolicy{ObjectDeadline: 5 * time.Minute}, new(int32(1))
		s.Now = s.Now.Add(waited)
		return s
	}
	s := full(5 * time.Minute)
	s.SpareSince = s.Now
	d := Decide(s)
	require.Equal(t, []ActionKind{WaitAnew}, kinds(d), "within the grace period")
	require.Nil(t, d.Ledger)

	s = full(4 * time.Minute)
	s.SpareSince = s.Now.Add(-time.Hour)
	d = Decide(s)
	require.Equal(t, []ActionKind{WaitAnew}, kinds(d), "the deletion takes its time, too")
	require.Nil(t, d.Ledger)
	s.Claims[0].Status.WaitingSince = new(metav1.NewTime(s.Now))
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	require.Contains(t, d.Ledger.Releasing, types.UID("joined"))
	require.Empty(t, kinds(d))

	s.Ledger, s.Now = d.Ledger, s.Now.Add(5*time.Minute)
	require.Contains(t, kinds(Decide(s)), Fail, "a drain that is stuck does not let it wait for ever")
}

// The claims' own Machines joined unseen, and there are spares as well.
func TestSparesThatMakeRoomGoInOneWrite(t *testing.T) {
	s := atRest(9, &Ledger{Version: 1, Seq: 9, LastReplicas: 9, Spare: 8, Pending: map[string]Assignment{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "")
	for i := range 9 {
		s.withMachine(fmt.Sprint("m", i), "", node)
	}
	s.Group.Max, s.SpareSince = new(int32(9)), s.Now.Add(-time.Hour)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	require.Len(t, d.Ledger.Releasing, 8)
}

// Cluster API has not looked for the booting Machine's Node, and the user's Machine is younger.
func TestAMachineWithoutANodeMakesRoomBeforeTheUsersDoes(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Seq: 9, Floor: 1, LastReplicas: 2, Pending: map[string]Assignment{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "").withMachine("booting", "", func(m *clusterv1.Machine) {
		m.Spec.ProviderID = "sim://booting"
		m.Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: ""}
	}).withMachine("of the user", "", node)
	s.Machines[1].CreationTimestamp = metav1.NewTime(s.Now.Add(time.Second))
	s.Group.Max, s.SpareSince = new(int32(2)), s.Now.Add(-time.Hour)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	require.Contains(t, d.Ledger.Releasing, types.UID("booting"))
	require.Len(t, d.Ledger.Releasing, 1)
}

// Removing a Machine orders no other one then.
func TestAWaitDoesNotRestartForRoomThatIsNotMade(t *testing.T) {
	for name, change := range map[string]func(*Snapshot){
		"above the max size": func(s *Snapshot) { s.Group.Max = new(int32(1)) },
		"a quota is used up": func(s *Snapshot) { s.Quota = "none is left" },
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(3, &Ledger{Version: 1, Seq: 9, LastReplicas: 3, Spare: 2, Pending: map[string]Assignment{"c": {}}}).
				withClaim("c", v1alpha1.PhasePending, "").withMachine("x", "", node).withMachine("y", "", node).withMachine("z", "", node)
			s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
			s.Now = s.Now.Add(5 * time.Minute)
			change(s)
			for _, since := range []time.Time{s.Now, s.Now.Add(-time.Hour)} {
				s.SpareSince = since
				d := Decide(s)
				require.Positive(t, d.Unmet)
				require.Contains(t, kinds(d), Fail)
				require.NotContains(t, kinds(d), WaitAnew)
			}
		})
	}
}

// Two Machines were marked once, and others were made since.
func TestAFewMarkedMachinesAreNoReasonToOrderNoOthers(t *testing.T) {
	marked := func(m *clusterv1.Machine) {
		node(m)
		m.Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: "true"}
	}
	s := atRest(3, &Ledger{Version: 1, Seq: 9, LastReplicas: 3, Pending: map[string]Assignment{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "").withMachine("x", "", marked).withMachine("y", "", marked)
	s.withMachine("joined", "", func(m *clusterv1.Machine) {
		node(m)
		m.CreationTimestamp = metav1.NewTime(s.Now.Add(time.Second))
	})
	require.Equal(t, int32(4), Decide(s).Replicas)
}

// The hub refuses each write of one claim's status, or hundreds of claims are due at once.
func TestClaimsWhoseWaitCannotRestartHoldNothingElseUp(t *testing.T) {
	s := atRest(3, &Ledger{Version: 1, Seq: 9, LastReplicas: 3, Pending: map[string]Assignment{"a": {}, "b": {}}}).
		withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "").withClaim("r", v1alpha1.PhaseReleasing, "r").
		withMachine("x", "", node).withMachine("y", "", node).withMachine("r", "r", node)
	s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
	s.Now = s.Now.Add(3 * time.Minute)
	d := Decide(s)
	require.Equal(t, []ActionKind{WaitAnew, WaitAnew}, kinds(d))
	require.NotNil(t, d.Ledger)
	require.Contains(t, d.Ledger.Releasing, types.UID("r"))
	require.Equal(t, int32(3), d.Replicas)

	s.Ledger = d.Ledger
	s.Claims[1].Status.WaitingSince = new(metav1.NewTime(s.Now))
	d = Decide(s)
	require.Equal(t, int32(4), d.Replicas, "for the claim whose wait has restarted")
	require.NotNil(t, d.Ledger)

	s.Group.Max = new(int32(4))
	s.Now = s.Now.Add(10 * time.Second)
	d = Decide(s)
	require.Equal(t, int32(4), d.Replicas, "although there is room for one only")
	s.Group.Max = new(int32(3))
	s.SpareSince = s.Now.Add(-time.Hour)
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	require.Len(t, d.Ledger.Releasing, 2, "one of them makes room")

	s.Group.Max = nil
	s.Now = s.Now.Add(17 * time.Minute)
	s.Claims[1].Status.WaitingSince = new(metav1.NewTime(s.Now))
	require.Equal(t, int32(5), Decide(s).Replicas, "a claim that has waited for so long is to fail")
}

// Each Machine joins before it is assigned, say because no agent keeps up.
func TestAClaimDoesNotWaitForEverForOtherMachines(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "").withMachine("m", "", node)
	s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
	for range 19 {
		s.Now = s.Now.Add(time.Minute)
		require.NotContains(t, kinds(Decide(s)), Fail)
		if slices.Contains(kinds(Decide(s)), WaitAnew) {
			s.Claims[0].Status.WaitingSince = new(metav1.NewTime(s.Now))
		}
	}
	s.Now = s.Now.Add(6 * time.Minute)
	s.Claims[0].Status.WaitingSince = new(metav1.NewTime(s.Now.Add(-5 * time.Minute)))
	require.Contains(t, kinds(Decide(s)), Fail)

	s.Deployment.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(s.Now.Add(-5 * time.Minute)),
	}}
	require.NotContains(t, kinds(Decide(s)), Fail, "it did not wait for Machines while the group was paused")
}

func TestAClaimOfAPausedGroupDoesNotFail(t *testing.T) {
	s := waits(5 * time.Minute)
	group := s.Group
	s.Group = group.With(&eligibility.Refusal{Reason: eligibility.Paused})
	assert.Empty(t, kinds(Decide(s)), "Cluster API creates no Machines then")
	s.Now, s.Group = s.Now.Add(time.Hour), group
	assert.Equal(t, []ActionKind{WaitAnew, WaitAnew}, kinds(Decide(s)), "and has its time once it is not paused any more")
}

func TestTheTimeOfAPauseIsNotTimeForAMachine(t *testing.T) {
	s := waits(5 * time.Minute)
	s.Deployment.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(s.Now.Add(-time.Minute)),
	}}
	d := Decide(s)
	assert.Empty(t, kinds(d), "it was paused until a minute ago")
	assert.Equal(t, 4*time.Minute, d.RequeueAfter)
	s.Now = s.Now.Add(4 * time.Minute)
	assert.Equal(t, []ActionKind{Fail, Fail}, kinds(Decide(s)))
}

// The claim may have waited for room in the ledger before.
func TestAClaimsWaitCountsFromWhenItWasEntered(t *testing.T) {
	s := waits(5 * time.Minute)
	for _, c := range s.Claims {
		c.Status.WaitingSince = new(metav1.NewTime(s.Now.Add(-time.Minute)))
	}
	d := Decide(s)
	assert.Empty(t, kinds(d))
	assert.Equal(t, 4*time.Minute, d.RequeueAfter)
}

// Two hundred claims that arrive one after another while a MachineSet is blocked are explained once
// each, although Cluster API's message has another number each time.
func TestExplanationsOfABlockedGroupAreFew(t *testing.T) {
	s := waits(time.Minute)
	writes := 0
	for replicas := range 200 {
		s.Sets[0].Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineSetScalingUpCondition, Status: "True",
			Message: "Scaling up from 0 to " + string(rune('0'+replicas%10)) + " replicas is blocked because:\n* the control plane is upgrading",
		}}
		writes += explained(t, s)
		s.Now = s.Now.Add(time.Second)
	}
	assert.Equal(t, 2, writes)
}

// explained writes the explanations that are due, and returns how many there were.
func explained(t *testing.T, s *Snapshot) int {
	t.Helper()
	actions := Decide(s).Actions
	for _, a := range actions {
		require.Equal(t, Explain, a.Kind)
		a.Event.Time = metav1.NewTime(s.Now)
		a.Claim.Status.History = append(a.Claim.Status.History, a.Event)
		a.Claim.Status.Reason, a.Claim.Status.Message = a.Event.Reason, a.Event.Message
	}
	return len(actions)
}

// troubled is a group with a claim that was bound just now, to a Machine whose infrastructure
// reports something that passes.
func troubled() (*Snapshot, *v1alpha1.MachineClaim) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("m", "c", infrastructure("RequestLimited")).withClaim("c", v1alpha1.PhaseBound, "m")
	bound := metav1.NewTime(s.Now)
	c := s.Claims[0]
	c.Status.Reason, c.Status.Message, c.Status.BoundAt = ReasonBound, "bound to Machine m", &bound
	c.Status.History = []v1alpha1.Event{{Time: bound, Reason: ReasonBound}}
	return s, c
}

func TestABoundClaimThatWaitsForLongShowsWhatItsInfrastructureReports(t *testing.T) {
	s, c := troubled()
	condition := &s.Machines[0].Status.Conditions[0]
	d := Decide(s)
	require.Empty(t, kinds(d), "most Machines come before that")
	require.Equal(t, slowInfrastructure, d.RequeueAfter)

	writes := 0
	for attempt := range 30 {
		s.Now = s.Now.Add(time.Minute)
		condition.Message = fmt.Sprintf("attempt %d", attempt)
		writes += explained(t, s)
	}
	assert.Equal(t, 1, writes, "another attempt is no news")
	assert.Equal(t, "WaitingForInfrastructure", c.Status.Reason)
	assert.Equal(t, "the infrastructure of Machine m reports RequestLimited: attempt 2", c.Status.Message)

	condition.Reason, condition.Message = "NoHost", strings.Repeat("é", MaxMessage)
	require.Equal(t, 1, explained(t, s))
	assert.Contains(t, c.Status.Message, "reports NoHost: é")
	assert.LessOrEqual(t, len(c.Status.Message), MaxMessage)
	s.Now = s.Now.Add(time.Hour)
	require.Zero(t, explained(t, s))

	condition.Reason = strings.Repeat("R", MaxMessage)
	require.Equal(t, 1, explained(t, s))
	s.Now = s.Now.Add(time.Hour)
	require.Zero(t, explained(t, s), "a reason that fills the message")

	condition.Status = metav1.ConditionTrue
	require.Equal(t, 1, explained(t, s), "what holds no longer is not shown")
	assert.Equal(t, "WaitingForNode", c.Status.Reason)
	s.Now = s.Now.Add(time.Hour)
	require.Zero(t, explained(t, s))
}

func TestTroubleThatComesAndGoesIsExplainedOnceAMinute(t *testing.T) {
	s, _ := troubled()
	condition := &s.Machines[0].Status.Conditions[0]
	s.Now = s.Now.Add(slowInfrastructure)
	writes := 0
	for i := range 10 * 60 {
		condition.Reason = []string{"RequestLimited", "NoHost"}[i%2]
		condition.Status = []metav1.ConditionStatus{"False", "False", "True"}[i%3]
		writes += explained(t, s)
		s.Now = s.Now.Add(time.Second)
	}
	assert.InDelta(t, 10, writes, 1)
}

func TestWhatIsWrongWithAClaimMattersMoreThanItsInfrastructure(t *testing.T) {
	for _, reason := range []string{ReasonOwnerMissing, ReasonWriteRefused, ReasonNodeNotSeen} {
		s, c := troubled()
		c.Status.Reason = reason
		s.Now = s.Now.Add(time.Hour)
		assert.Zero(t, explained(t, s), reason)
	}
	s, _ := troubled()
	s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.Paused})
	s.Now = s.Now.Add(time.Hour)
	assert.Zero(t, explained(t, s), "nothing is expected of a paused group")
}

// Once its Node has joined, a Machine needs no explanation, whatever its infrastructure reported.
func TestAMachineWithItsNodeIsNotExplained(t *testing.T) {
	s, c := troubled()
	node(s.Machines[0])
	c.Status.Machine.NodeName = "node-m"
	s.Now = s.Now.Add(time.Hour)
	assert.Zero(t, explained(t, s))
}

// The texts are those of Cluster API 1.14.
func TestWhenAMachineSetMakesNoMachines(t *testing.T) {
	for message, test := range map[string]struct {
		status metav1.ConditionStatus
		want   string
	}{
		"Scaling up from 0 to 2 replicas is blocked because:\n* Control plane fleet/spoke is upgrading (\"ControlPlaneIsStable\" preflight check failed)": {
			metav1.ConditionTrue, `Control plane fleet/spoke is upgrading ("ControlPlaneIsStable" preflight check failed)`,
		},
		"Scaling up from 0 to 2 replicas is blocked because:\n* a\n* SimMachineTemplate does not exist": {
			metav1.ConditionTrue, "a; SimMachineTemplate does not exist",
		},
		"Scaling up from 0 to 2 replicas":                                       {metav1.ConditionTrue, ""},
		"Scaling up would be blocked because SimMachineTemplate does not exist": {metav1.ConditionFalse, ""},
		"Please check controller logs for errors":                               {metav1.ConditionUnknown, ""},
	} {
		set := &clusterv1.MachineSet{}
		set.Status.Conditions = []metav1.Condition{{Type: clusterv1.MachineSetScalingUpCondition, Status: test.status, Message: message}}
		assert.Equal(t, test.want, Blocked(set), message)
	}
	assert.Empty(t, Blocked(&clusterv1.MachineSet{}))
}

func TestADecisionThatOnlyEntersAClaim(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Snapshot)
		only   bool
	}{
		"a group at rest": {change: func(*Snapshot) {}, only: true},
		"the mark of the claim before is not seen yet": {change: func(s *Snapshot) {
			s.Ledger.Pending["before"], s.Ledger.LastReplicas, s.Group.Replicas = Assignment{}, 2, 2
			s.withClaim("before", "", "")
		}, only: true},
		"a Machine is not marked yet as one that its holder repairs": {change: func(s *Snapshot) {
			s.Ledger.LastReplicas, s.Group.Replicas = 2, 2
			s.withMachine("repaired", "r", node).withClaim("r", v1alpha1.PhaseBound, "repaired")
			s.Claims[1].Status.Machine.NodeName, s.Claims[1].Spec.HolderRepairs = s.Machines[1].Status.NodeRef.Name, true
		}, only: true},
		"another claim waits, too": {change: func(s *Snapshot) { s.withClaim("d", "", "") }},
		"a spare Machine": {change: func(s *Snapshot) {
			s.Ledger.Floor, s.Machines = 0, nil
			s.withMachine("spare", "", nil)
		}},
		"the user scaled":              {change: func(s *Snapshot) { s.Ledger.LastReplicas = 5 }},
		"a claim gives its place back": {change: func(s *Snapshot) { s.withClaim("gone", v1alpha1.PhaseReleasing, "") }},
		"a claim is about to be bound": {change: func(s *Snapshot) {
			s.Ledger.Pending["p"] = Assignment{Machine: "own", UID: "own"}
			s.withClaim("p", "", "")
		}},
		"the max size":                         {change: func(s *Snapshot) { s.Group.Max = new(int32(1)) }},
		"a ledger from before a move":          {change: func(s *Snapshot) { s.Ledger.UID, s.Deployment.UID = "before", "after" }},
		"a MachineDeployment without a ledger": {change: func(s *Snapshot) { s.Ledger = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, Seq: 9, Floor: 1, LastReplicas: 1, Pending: map[string]Assignment{}})
			s.withMachine("own", "", node).withClaim("c", "", "")
			test.change(s)
			assert.Equal(t, test.only, Decide(s).EntersOnly(s, "c"))
		})
	}
}

// The agent's own pause hides when a person's pause ended.
func TestNoClaimFailsWhileTheAgentsOwnPauseLasts(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "").withMachine("m", "other", completed)
	s.Failure = FailurePolicy{ObjectDeadline: 5 * time.Minute}
	s.Now = s.Now.Add(5*time.Minute + 10*time.Second)
	s.Deployment.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
	paused := func(status metav1.ConditionStatus, since time.Duration) {
		s.Deployment.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.PausedCondition, Status: status, LastTransitionTime: metav1.NewTime(s.Now.Add(-since)),
		}}
	}
	paused(metav1.ConditionTrue, 3*time.Second)
	require.NotContains(t, kinds(Decide(s)), Fail)
	paused(metav1.ConditionTrue, time.Hour)
	require.Contains(t, kinds(Decide(s)), Fail, "the pause does not end")
	paused(metav1.ConditionFalse, time.Hour)
	require.Contains(t, kinds(Decide(s)), Fail)
}

// Cluster API reports the end of a pause up to a second later.
func TestNoClaimFailsWhenAPersonsPauseHasJustEnded(t *testing.T) {
	s := waits(5*time.Minute + 10*time.Second)
	s.Deployment.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue, LastTransitionTime: metav1.NewTime(s.Now.Add(-time.Hour)),
	}}
	assert.Empty(t, kinds(Decide(s)))
}

// Each release from one of several MachineSets pauses the MachineDeployment for seconds. The
// releases of other claims must not let a claim wait for ever.
func TestTheAgentsOwnPausesExtendNoDeadline(t *testing.T) {
	s := waits(0)
	set := *s.Sets[0].DeepCopy()
	set.Name, set.Spec.Replicas = "small-b", new(int32(1))
	s.Sets = append(s.Sets, &set) // it still makes Machines
	s.Sets[0].Generation = s.Sets[0].Status.ObservedGeneration
	paused := func(status metav1.ConditionStatus) {
		delete(s.Deployment.Annotations, clusterv1.PausedAnnotation)
		if status == metav1.ConditionTrue {
			metav1.SetMetaDataAnnotation(&s.Deployment.ObjectMeta, clusterv1.PausedAnnotation, v1alpha1.PausedByAgent)
		}
		s.Deployment.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.PausedCondition, Status: status, LastTransitionTime: metav1.NewTime(s.Now),
		}}
	}
	write := func(change PauseChange) {
		d := Decide(s)
		require.Equal(t, change, d.Pause)
		text := d.Ledger.Encode()
		var err error
		s.Ledger, err = ParseLedger(text)
		require.NoError(t, err)
		s.Group.Replicas, s.Deployment.Spec.Replicas = d.Replicas, &d.Replicas
	}
	began := s.Now
	for s.Now.Sub(began) < 4*time.Minute {
		*s.Sets[0].Spec.Replicas++
		s.Group.Replicas++
		s.Ledger.LastReplicas++
		s.Ledger.Releasing = map[types.UID]Release{"m": {Machine: "m", Claim: "other"}}
		s.Machines = nil
		s.withMachine("m", "other", completed)
		write(PauseSet)
		s.Now = s.Now.Add(time.Second)
		paused(metav1.ConditionTrue)
		require.Equal(t, []ActionKind{LowerSet}, kinds(Decide(s)))
		*s.Sets[0].Spec.Replicas--
		s.Sets[0].Annotations = map[string]string{v1alpha1.ReleasedAnnotation: "m"}
		write(PauseRemove)
		s.Now = s.Now.Add(time.Second)
		paused(metav1.ConditionFalse)
		s.Machines, s.Sets[0].Annotations = nil, nil
		require.NotContains(t, kinds(Decide(s)), Fail)
		s.Now = s.Now.Add(time.Minute)
	}
	s.Now = began.Add(5 * time.Minute)
	require.Equal(t, []ActionKind{Fail, Fail}, kinds(Decide(s)))
}

// Cluster API's condition shows when a pause ended, and not whose it was. The ledger has the
// agent's own.
func TestOnlyThePausesOfOthersAreNotTimeForAMachine(t *testing.T) {
	const deadline, just, yes, no = 5 * time.Minute, 3 * time.Second, metav1.ConditionTrue, metav1.ConditionFalse
	for name, c := range map[string]struct {
		own    *Paused // since the claims were made
		set    bool    // it still lasts
		paused metav1.ConditionStatus
		since  time.Duration // since when the condition is so
		left   time.Duration // of the deadline; zero for none
	}{
		"the agent's own has just ended":        {own: &Paused{At: 355}, paused: no, since: just},
		"another one has just ended":            {paused: no, since: just, left: deadline - just},
		"another one, long after it":            {own: &Paused{At: 200}, paused: no, since: just, left: deadline - just},
		"another one before it":                 {own: &Paused{At: 355, Before: 180}, paused: no, since: just, left: 2 * time.Minute},
		"another one before it, which begins":   {own: &Paused{At: 359, Before: 180}, set: true, paused: no, since: time.Hour, left: 2 * time.Minute},
		"another one until it was set":          {own: &Paused{At: 357, Before: 357}, set: true, paused: yes, since: time.Hour, left: deadline - just},
		"it lasts for longer than the deadline": {own: &Paused{At: 60}, set: true, paused: yes, since: deadline},
		"its end is about to be reported":       {own: &Paused{At: 355}, paused: yes, since: just},
	} {
		t.Run(name, func(t *testing.T) {
			s := waits(6 * time.Minute)
			if c.own != nil {
				began := s.Claims[0].CreationTimestamp.Unix()
				s.Ledger.Paused = &Paused{At: began + c.own.At, Before: lo.Ternary(c.own.Before > 0, began+c.own.Before, 0)}
			}
			if c.set {
				s.Deployment.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
			}
			s.Deployment.Status.Conditions = []metav1.Condition{{
				Type: clusterv1.PausedCondition, Status: c.paused, LastTransitionTime: metav1.NewTime(s.Now.Add(-c.since)),
			}}
			// A release needs the pause.
			s.Ledger.Releasing = map[types.UID]Release{"m": {Machine: "m", Claim: "other", Set: "small-a"}}
			s.withMachine("m", "other", completed)
			d := Decide(s)
			if c.left == 0 {
				assert.Subset(t, kinds(d), []ActionKind{Fail, Fail})
				return
			}
			assert.NotContains(t, kinds(d), Fail)
			assert.Equal(t, c.left, d.RequeueAfter)
		})
	}
}

// At rest, a ledger has no record of a pause. Older agents can read one that has.
func TestTheRecordOfAPauseLastsWhileClaimsWait(t *testing.T) {
	s := waits(time.Minute)
	s.Ledger.Paused = &Paused{At: s.Now.Unix() - 10, Before: 7}
	s.withMachine("m", "", nil)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, s.Ledger.Paused, d.Ledger.Paused)
	assert.Equal(t, 1, d.Ledger.Version)

	s.Claims = nil // they have ended
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Nil(t, d.Ledger.Paused)

	s = atRest(0, &Ledger{Version: 1, Paused: &Paused{At: s.Now.Unix()}})
	assert.Nil(t, Decide(s).Ledger, "it is no reason for a write")
}
