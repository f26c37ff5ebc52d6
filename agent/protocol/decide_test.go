package protocol

import (
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

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
)

func TestAFirstClaimRaisesReplicasAndLeavesTheFloorAlone(t *testing.T) {
	s := atRest(2, nil).withMachine("a", "", node).withMachine("b", "", node).withClaim("c", "", "")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(3), d.Replicas)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, map[string]Assignment{"c": {}}, d.Ledger.Pending)
	assert.True(t, d.Urgent)
}

func TestClaimsThatWaitTogetherAreEnteredInOneWrite(t *testing.T) {
	s := atRest(0, nil)
	for _, id := range []string{"a", "b", "c", "d"} {
		s.withClaim(id, "", "")
	}
	d := Decide(s)
	assert.Equal(t, int32(4), d.Replicas)
	assert.Len(t, d.Ledger.Pending, 4)
}

func TestASpareIsUsedBeforeReplicasAreRaised(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).withMachine("a", "", nil).withClaim("c", "", "")
	d := Decide(s)
	assert.Equal(t, int32(1), d.Replicas)
	assert.Equal(t, Assignment{Machine: "a", UID: "a"}, d.Ledger.Pending["c"])
}

func TestAtTheMaxSizeClaimsAreRefused(t *testing.T) {
	s := atRest(3, &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Floor: 3}).withClaim("c", "", "")
	s.Group.Max = new(int32(3))
	d := Decide(s)
	assert.Nil(t, d.Ledger)
	assert.Equal(t, eligibility.AtMaxSize, d.Refused["c"].Reason)
}

func TestAShortageIsMadeGoodUpToTheMaxSize(t *testing.T) {
	three := int32(3)
	s := atRest(2, &Ledger{Version: 1, Floor: 2, LastReplicas: 2, Pending: map[string]Assignment{"a": {}, "b": {}}}).
		withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "")
	assert.Equal(t, int32(4), Decide(s).Replicas)
	s.Group.Max = &three
	assert.Equal(t, three, Decide(s).Replicas)
}

// A cool-down keeps new claims out. A claim that was entered before is still owed its Machine. With
// a used-up quota no claim can get one.
func TestAClaimWhoseMachineJoinedUnseenIsOwedAnotherOne(t *testing.T) {
	for reason, replicas := range map[eligibility.Reason]int32{"": 2, eligibility.CoolingDown: 2, eligibility.QuotaExceeded: 1, eligibility.Paused: 1} {
		s := atRest(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
			withClaim("c", v1alpha1.PhasePending, "").withMachine("joined", "", node)
		switch reason {
		case "":
		case eligibility.QuotaExceeded:
			s.Quota = "none is left"
		default:
			s.Group = s.Group.With(&eligibility.Refusal{Reason: reason})
		}
		d := Decide(s)
		assert.Equal(t, replicas, d.Replicas, "%q", reason)
		assert.False(t, d.HasSpare, "%q: the Machine that joined has no owner once the other one was ordered", reason)
	}
}

// A report that nothing runs on the Node may still come. Then the claim gets this Machine.
func TestAMachineThatJoinedJustNowIsNotReplacedBeforeItsReport(t *testing.T) {
	joined := func(ago time.Duration) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).withClaim("c", v1alpha1.PhasePending, "")
		return s.withMachine("m", "", func(m *clusterv1.Machine) {
			node(m)
			m.Status.LastUpdated = metav1.NewTime(s.Now.Add(-ago))
		})
	}
	s := joined(time.Second)
	d := Decide(s)
	assert.Equal(t, int32(1), d.Replicas)
	assert.False(t, d.HasSpare)
	assert.Equal(t, reportDue+skew-time.Second, d.RequeueAfter, "nothing else wakes the agent if no report comes")

	s.Nodes = map[string]bool{"sim://m": false}
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, types.UID("m"), d.Ledger.Pending["c"].UID)
	assert.Equal(t, int32(1), d.Replicas)

	s = joined(time.Second)
	s.Nodes = map[string]bool{"sim://m": true}
	assert.Equal(t, int32(2), Decide(s).Replicas, "something runs on it")
	s = joined(time.Second)
	s.Machines[0].Annotations = map[string]string{v1alpha1.NodeRegisteredAtAnnotation: "2026-01-01T00:00:00Z"}
	assert.Equal(t, int32(2), Decide(s).Replicas, "something was reported to run on it before Cluster API saw the Node")

	s = joined(time.Second)
	s.ReportsNodes = func(string) bool { return false }
	assert.Equal(t, int32(2), Decide(s).Replicas, "no report is to come")

	s = joined(reportDue + skew)
	assert.Equal(t, int32(2), Decide(s).Replicas, "no report came")
	s.Started = s.Now.Add(-time.Second)
	d = Decide(s)
	assert.Equal(t, int32(1), d.Replicas, "an agent that has just started has no report yet")
	assert.Equal(t, reportDue+skew-time.Second, d.RequeueAfter)
}

// Else the claim would get it after the next report, and the Machine that was ordered would be a
// spare.
func TestASpareThatJoinedJustNowIsForTheNextClaim(t *testing.T) {
	joined := func(ago time.Duration) *Decision {
		s := atRest(1, &Ledger{Version: 1, LastReplicas: 1, Spare: 1}).withClaim("c", "", "")
		return Decide(s.withMachine("m", "", func(m *clusterv1.Machine) {
			node(m)
			m.Status.LastUpdated = metav1.NewTime(s.Now.Add(-ago))
		}))
	}
	d := joined(time.Second)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, map[string]Assignment{"c": {}}, d.Ledger.Pending)
	assert.Equal(t, int32(1), d.Replicas)
	assert.Equal(t, int32(2), joined(time.Hour).Replicas)

	s := atRest(2, &Ledger{Version: 1, LastReplicas: 2, Spare: 1}).withClaim("c", "", "").withClaim("other", v1alpha1.PhaseBound, "other")
	s.withMachine("m", "", func(m *clusterv1.Machine) {
		node(m)
		m.Status.LastUpdated = metav1.NewTime(s.Now)
	}).withMachine("other", "other", node)
	s.Machines[1].DeletionTimestamp = new(metav1.NewTime(s.Now))
	assert.Equal(t, int32(3), Decide(s).Replicas, "a shortage would not be noticed while a Machine is being deleted")
}

func TestAtTheMaxSizeSparesThatNoClaimMayHaveMakeRoom(t *testing.T) {
	three := int32(3)
	s := atRest(3, &Ledger{Version: 1, Floor: 1, LastReplicas: 3, Spare: 1, Pending: map[string]Assignment{"c": {}}}).
		withClaim("c", v1alpha1.PhasePending, "").withMachine("a", "", node).withMachine("b", "", node).withMachine("x", "", node)
	s.Group.Max = &three
	assert.Nil(t, Decide(s).Ledger, "within the grace period")
	s.SpareSince = s.Now.Add(-time.Hour)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Len(t, d.Ledger.Releasing, 1, "the spare; not what is the claim's replica or the user's")
	assert.True(t, d.Removes)
	assert.Contains(t, d.Ledger.Pending, "c")
}

// The Machines that were made for the claims joined before an agent could assign them. The claims
// own every replica that the max size allows, so there is no spare.
func TestAtTheMaxSizeMachinesThatNoClaimMayHaveMakeRoom(t *testing.T) {
	full := func(size, floor int32, claims ...string) *Snapshot {
		s := atRest(size, &Ledger{Version: 1, Floor: floor, LastReplicas: size, Pending: map[string]Assignment{}})
		for _, id := range claims {
			s.Ledger.Pending[id] = Assignment{}
			s.withClaim(id, v1alpha1.PhasePending, "")
		}
		s.Group.Max = &size
		s.SpareSince = s.Now.Add(-time.Hour)
		return s
	}
	t.Run("within the grace period they stay", func(t *testing.T) {
		s := full(2, 0, "a", "b").withMachine("x", "", node).withMachine("y", "", node)
		s.SpareSince = time.Time{}
		d := Decide(s)
		assert.Nil(t, d.Ledger)
		assert.True(t, d.HasSpare, "or the grace period would never begin")
		assert.Equal(t, s.SpareGrace, d.RequeueAfter)
	})
	t.Run("one for each claim that waits", func(t *testing.T) {
		s := full(2, 0, "a", "b").withMachine("x", "", node).withMachine("y", "", node)
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Len(t, d.Ledger.Releasing, 2)
		assert.Len(t, d.Ledger.Pending, 2, "the claims keep their replicas")
		assert.Equal(t, int32(2), d.Replicas)
		assert.True(t, d.Removes)
	})
	t.Run("the user's stay", func(t *testing.T) {
		s := full(3, 2, "a").withMachine("x", "", node).withMachine("y", "", node).withMachine("z", "", node)
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Len(t, d.Ledger.Releasing, 1)
	})
	t.Run("a release that is under way makes room as well", func(t *testing.T) {
		s := full(3, 0, "a").withClaim("old", v1alpha1.PhaseReleasing, "m").withMachine("x", "", node).withMachine("y", "", node).
			withMachine("m", "old", node)
		s.Ledger.Releasing = map[types.UID]Release{"m": {Machine: "m", Claim: "old"}}
		s.Ledger.Floor = 1
		assert.Nil(t, Decide(s).Ledger)
	})
	t.Run("not while a person has set replicas above the max size", func(t *testing.T) {
		s := full(3, 1, "a", "b").withMachine("x", "", node).withMachine("y", "", node).withMachine("z", "", node)
		s.Group.Max = new(int32(2))
		assert.Nil(t, Decide(s).Ledger, "replicas would not be raised to 3 again")
	})
	t.Run("one that a claim may have yet stays", func(t *testing.T) {
		s := full(2, 0, "a", "b").withMachine("x", "", node).withMachine("unseen", "", func(m *clusterv1.Machine) { m.Spec.ProviderID = "sim://unseen" })
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Len(t, d.Ledger.Releasing, 1)
		assert.Contains(t, d.Ledger.Releasing, types.UID("x"))
	})
	t.Run("nor do the user's go in its place", func(t *testing.T) {
		s := full(3, 2, "a", "b").withMachine("x", "", node).withMachine("y", "", node) // the floor was raised
		s.withMachine("joined just now", "", func(m *clusterv1.Machine) {
			node(m)
			m.Status.LastUpdated = metav1.NewTime(s.Now)
		})
		d := Decide(s)
		assert.Nil(t, d.Ledger)
		assert.Positive(t, d.RequeueAfter)
	})
	t.Run("its replica is the claim's once it is gone", func(t *testing.T) {
		s := full(1, 0, "a").withMachine("x", "", completed)
		s.Ledger.Releasing = map[types.UID]Release{"x": {Machine: "x"}}
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.True(t, d.Ledger.Releasing["x"].Decremented)
		assert.Equal(t, int32(1), d.Replicas)
	})
}

// A person removed the claim's entry from the ledger, and the Machine made for it has joined
// meanwhile, so no claim may have that.
func TestAClaimWhoseEntryWasRemovedHasItsReplica(t *testing.T) {
	forgetful := func(replicas, floor int32) *Snapshot {
		s := atRest(replicas, &Ledger{Version: 1, Seq: 4, Floor: floor, LastReplicas: replicas}).withClaim("c", v1alpha1.PhasePending, "")
		for i := range replicas {
			s.withMachine(fmt.Sprint("m", i), "", node)
		}
		s.Group.Max = &replicas
		return s
	}
	for name, test := range map[string]struct {
		change func(s *Snapshot)
		keeps  bool
	}{
		"at the max size":            {func(*Snapshot) {}, true},
		"while the group cools down": {func(s *Snapshot) { s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.CoolingDown}) }, true},
		"when it was never entered":  {func(s *Snapshot) { s.Claims[0].Status.Phase = "" }, false},
		"when the user has it":       {func(s *Snapshot) { s.Ledger.Floor = 3 }, false},
		"in a frozen group":          {func(s *Snapshot) { s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.ReplicasLowered}) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := forgetful(3, 2)
			test.change(s)
			d := Decide(s)
			if !test.keeps {
				assert.Contains(t, d.Refused, "c")
				return
			}
			require.NotNil(t, d.Ledger)
			assert.Contains(t, d.Ledger.Pending, "c")
			assert.Equal(t, int32(3), d.Replicas)
			assert.Empty(t, d.Actions)
		})
	}

	// Room is made for the claim.
	s := forgetful(4, 2)
	s.SpareSince = s.Now.Add(-time.Hour)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Len(t, d.Ledger.Releasing, 1)
}

// A person removed all entries and all releases from the ledger of a full group.
func TestAClaimWhoseEntryWasRemovedWaitsForMachinesThatGo(t *testing.T) {
	three := int32(3)
	s := atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 2, LastReplicas: 3}).withMachine("m0", "", node).withMachine("m1", "", node).
		withMachine("going", "old", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withClaim("old", v1alpha1.PhaseEnded, "going").
		withClaim("c", v1alpha1.PhasePending, "").withClaim("new", "", "")
	s.Group.Max = &three
	d := Decide(s)
	assert.NotContains(t, d.Refused, "c")
	assert.Contains(t, d.Refused, "new")
	assert.NotContains(t, kinds(d), End)

	d = Decide(atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 2, LastReplicas: 3}).withMachine("m0", "", node).withMachine("m1", "", node).
		withClaim("c", v1alpha1.PhasePending, ""))
	require.NotNil(t, d.Ledger)
	assert.Contains(t, d.Ledger.Pending, "c")
}

func TestAClaimWhoseEntryWasRemovedComesBeforeOthers(t *testing.T) {
	for name, change := range map[string]func(s *Snapshot){
		"an older one": func(s *Snapshot) {
			s.withClaim("a", "", "")
			s.Claims[1].CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
		},
		"one that adopts": func(s *Snapshot) {
			s.withClaim("n", "", "")
			s.Claims[1].Spec.Adopt = "m0"
		},
	} {
		t.Run(name, func(t *testing.T) {
			three := int32(3)
			s := atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 2, LastReplicas: 3}).withClaim("c", v1alpha1.PhasePending, "").
				withMachine("m0", "", node).withMachine("m1", "", node) // one has not come yet
			s.Group.Max = &three
			change(s)
			d := Decide(s)
			require.NotNil(t, d.Ledger)
			assert.Contains(t, d.Ledger.Pending, "c")
			assert.NotContains(t, d.Refused, "c")
		})
	}
}

func TestARaiseAboveTheMinSizeIsTheFloorsInFull(t *testing.T) {
	s := atRest(5, &Ledger{Version: 1, Seq: 1, Floor: 0, LastReplicas: 3})
	s.Group.Min = 3
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(5), d.Ledger.Floor, "three by the min size, two by the human")
	assert.Zero(t, d.Ledger.Spare)

	s = atRest(3, &Ledger{Version: 1, Seq: 1, Floor: 0, LastReplicas: 0})
	s.Group.Min = 3
	assert.Equal(t, int32(3), Decide(s).Ledger.Floor, "replicas raised together with the min size")
}

// Because of the max size, replicas are not raised to the min size, and two claims have the
// Machines that it lacks.
func TestARaiseIsOfWhatTheUserHas(t *testing.T) {
	s := atRest(4, &Ledger{Version: 1, Seq: 1, LastReplicas: 3, Min: 3}).
		withMachine("mine", "", node).
		withMachine("a", "a", node).withClaim("a", v1alpha1.PhaseBound, "a").
		withMachine("b", "b", node).withClaim("b", v1alpha1.PhaseBound, "b")
	s.Group.Min, s.Group.Max = 3, new(int32(5))
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, int32(5), d.Replicas, "the min size and two claims")
}

func TestAClaimWithoutRoomWhoseCallIsGoneMovesOn(t *testing.T) {
	one := int32(1)
	s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withClaim("a", v1alpha1.PhaseBound, "m").withMachine("m", "a", node).
		withClaim("b", "", "")
	s.Group.Max = &one
	young := Decide(s)
	assert.NotContains(t, kinds(young), MoveOn, "its call may still be there")
	assert.Positive(t, young.RequeueAfter)
	s.Now = s.Now.Add(2 * AbandonedAfter)
	assert.Contains(t, kinds(Decide(s)), MoveOn)
}

func TestAHumansChangeIsTheFloors(t *testing.T) {
	up := Decide(atRest(5, &Ledger{Version: 1, Seq: 1, Floor: 2, LastReplicas: 3}).withClaim("c", v1alpha1.PhaseBound, "a").withMachine("a", "c", node))
	require.NotNil(t, up.Ledger)
	assert.Equal(t, int32(4), up.Ledger.Floor)
	assert.Equal(t, int32(5), up.Replicas)

	down := Decide(atRest(2, &Ledger{Version: 1, Seq: 1, Floor: 2, LastReplicas: 3}).
		withClaim("c", v1alpha1.PhaseBound, "a").withMachine("a", "c", node))
	require.NotNil(t, down.Ledger)
	assert.Equal(t, int32(1), down.Ledger.Floor)
	assert.Equal(t, int32(2), down.Replicas)
}

func TestNothingIsWrittenWhenNothingChanges(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Seq: 9, Floor: 1, LastReplicas: 2}).
		withMachine("a", "c", node).withMachine("b", "", node).withClaim("c", v1alpha1.PhaseBound, "a")
	s.Claims[0].Status.Machine.NodeName = "node-a"
	d := Decide(s)
	assert.Nil(t, d.Ledger)
	assert.Empty(t, d.Actions)
}

func TestAUsersNodeIsNeverGivenToAClaim(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Seq: 9, Floor: 0, LastReplicas: 2, Pending: map[string]Assignment{"c": {}}}).
		withMachine("a", "", node).withClaim("c", v1alpha1.PhasePending, "")
	d := Decide(s)
	if d.Ledger != nil {
		assert.Empty(t, d.Ledger.Pending["c"].UID)
	}
	// Unless its holder reports that nothing runs there yet.
	s.Nodes = map[string]bool{"sim://a": false}
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, types.UID("a"), d.Ledger.Pending["c"].UID)
}

func TestAReleasedMachineWithoutANodeIsHandedOver(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", nil).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := Decide(s)
	assert.Equal(t, []ActionKind{Unbind}, kinds(d))
	assert.Nil(t, d.Ledger, "no release is begun")
}

func TestAReleasedMachineWithANodeIsHeldAndItsReplicaKept(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", node).withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Contains(t, d.Ledger.Releasing, types.UID("a"))
	assert.Equal(t, int32(1), d.Replicas)

	s.Ledger = d.Ledger
	assert.Contains(t, kinds(Decide(s)), BeginDelete)
}

// remade is a Machine that was being released and that a move or a restore created again: without
// its deletion, and under another UID.
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
			s := atRest(2, ledger).withMachine("m", claim, remade).withMachine("user's", "", node).withClaim("c", v1alpha1.PhaseEnded, "")
			d := Decide(s)
			require.NotNil(t, d.Ledger)
			assert.Equal(t, map[types.UID]Release{"m": {Machine: "m", Claim: claim}}, d.Ledger.Releasing)
			assert.Equal(t, int32(1), d.Ledger.Floor)
			assert.Equal(t, int32(2), d.Replicas)
			s.Ledger = d.Ledger
			assert.Equal(t, []ActionKind{BeginDelete}, kinds(Decide(s)))

			s.Ledger, s.Group = ledger, s.Group.With(&eligibility.Refusal{Reason: eligibility.Paused})
			d = Decide(s)
			require.NotNil(t, d.Ledger)
			assert.Empty(t, d.Ledger.Releasing, "not while it is paused, as for a move")
		})
	}
}

func TestAClaimKeepsItsMachineThatWasMadeAgainDuringItsRelease(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("m", "c", remade).withClaim("c", v1alpha1.PhaseBound, "m")
	s.Claims[0].Status.Machine.NodeName = "node-m"
	d := Decide(s)
	assert.Nil(t, d.Ledger)
	require.Equal(t, []ActionKind{Keep}, kinds(d))

	s.Claims[0].Status.Phase = v1alpha1.PhaseReleasing
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Contains(t, d.Ledger.Releasing, types.UID("m"))
	assert.NotContains(t, kinds(d), Keep)
}

func TestALedgerEditedByHandDeletesNoClaimedMachine(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).
		withMachine("a", "c", node).withClaim("c", v1alpha1.PhaseBound, "a")
	d := Decide(s)
	assert.NotContains(t, kinds(d), BeginDelete)
	require.NotNil(t, d.Ledger)
	assert.Empty(t, d.Ledger.Releasing)
}

func TestAWipedLedgerIsRebuiltWithoutTakingOrLeaking(t *testing.T) {
	s := atRest(4, nil).
		withMachine("a", "bound", node).withMachine("b", "", node).
		withClaim("bound", v1alpha1.PhaseBound, "a").withClaim("waits", v1alpha1.PhasePending, "").withClaim("new", "", "")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor, "4 replicas less one bound and one entered claim")
	assert.Equal(t, int32(5), d.Replicas, "one more for the claim that had not been entered")
}

// A person lowered replicas, Cluster API removed the Machine of a claim that was being released,
// and the ledger was lost: what is left is the user's.
func TestAWipedLedgerDoesNotCountAMachineThatGoes(t *testing.T) {
	s := atRest(1, nil).withMachine("user's", "", node).withMachine("a", "c", deleting(clusterv1.MachineDeletingDrainingNodeReason)).
		withClaim("c", v1alpha1.PhaseReleasing, "a")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(1), d.Ledger.Floor)
	assert.Equal(t, int32(1), d.Replicas)
}

func TestANoCapacityReasonGivesTheMachineUpAtOnce(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", infrastructure("InsufficientCapacity")).withClaim("c", v1alpha1.PhaseBound, "a")
	s.Failure = FailurePolicy{Reasons: []string{"InsufficientCapacity"}}
	d := Decide(s)
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	assert.Contains(t, d.Actions[0].Event.Message, "InsufficientCapacity: no hosts left")

	for _, reason := range []string{"WaitingForHost", "InstanceProvisionFailed", "VMProvisionFailed", "Failed", "InsufficientCapacityMaybe"} {
		s.Machines[0].Status.Conditions[0].Reason = reason
		assert.Empty(t, kinds(Decide(s)), reason)
	}
}

func TestAMachineIsGivenUpForWhatIsKnownOfItsProvider(t *testing.T) {
	report := func(kind, reason, message string, age time.Duration) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
			withMachine("a", "c", infrastructure(reason)).withClaim("c", v1alpha1.PhaseBound, "a")
		s.Machines[0].Spec.InfrastructureRef.Kind = kind
		s.Machines[0].Status.Conditions[0].Message = message
		s.Machines[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-age))
		s.Failure = FailurePolicy{Known: true}
		return s
	}
	s := report("AzureMachine", "Failed", "ERROR CODE: ZonalAllocationFailed", 0)
	d := Decide(s)
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	assert.Contains(t, d.Actions[0].Event.Message, "there is no capacity: the infrastructure of Machine a reports Failed: ERROR CODE: Zonal")
	s.Failure.Known = false
	assert.Empty(t, kinds(Decide(s)))
	assert.Empty(t, kinds(Decide(report("AzureMachine", "Failed", "RESPONSE 429", time.Hour))), "it is tried again")

	s = report("Metal3Machine", "NotReady", "* AssociateBareMetalHost: no available host found", 4*time.Minute)
	d = Decide(s)
	assert.Empty(t, kinds(d), "a host may come back")
	assert.Equal(t, 6*time.Minute, d.RequeueAfter)
	s.Now = s.Now.Add(6 * time.Minute)
	assert.Equal(t, []ActionKind{Fail}, kinds(Decide(s)))
	s.Machines[0].Spec.ProviderID = "metal3://a"
	assert.Empty(t, kinds(Decide(s)), "it has come")
}

// A spot instance may be reclaimed between its start and the registration of its Node.
func TestAMachineWhoseInstanceIsLostBeforeItsNodeJoinsIsGivenUp(t *testing.T) {
	lost := func(kind, reason, message string) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
			withMachine("a", "c", booting).withClaim("c", v1alpha1.PhaseBound, "a")
		m := s.Machines[0]
		m.Spec.InfrastructureRef.Kind = kind
		m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
			Type: clusterv1.MachineInfrastructureReadyCondition, Status: metav1.ConditionFalse, Reason: reason, Message: message,
		})
		s.Failure = FailurePolicy{Known: true, NodeDeadline: time.Hour}
		return s
	}
	terminated := func() *Snapshot { return lost("AWSMachine", "InstanceTerminated", "0 of 2 completed") }
	s := terminated()
	d := Decide(s)
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	assert.Equal(t, failures.GivenUp, d.Actions[0].Class)
	assert.Contains(t, d.Actions[0].Event.Message, "the infrastructure of Machine a reports InstanceTerminated")
	assert.True(t, s.hasFailed(s.Machines[0]), "no other claim is given it")

	s = terminated()
	s.Machines[0].Status.Conditions = s.Machines[0].Status.Conditions[1:]
	assert.NotContains(t, kinds(Decide(s)), Fail, "Cluster API has not looked for the Node")
	s = terminated()
	s.Claims[0].Status.NodeRegisteredAt = new(metav1.NewTime(s.Now))
	assert.NotContains(t, kinds(Decide(s)), Fail, "the shim has reported its Node")
	s = terminated()
	node(s.Machines[0])
	assert.NotContains(t, kinds(Decide(s)), Fail, "its Node has joined: Karpenter or a MachineHealthCheck decides")
	assert.NotContains(t, kinds(Decide(lost("AWSMachine", "InstanceStopped", "0 of 2 completed"))), Fail, "it may be started again")
	s = lost("AzureMachine", "Failed", "ERROR CODE: ZonalAllocationFailed")
	assert.NotContains(t, kinds(Decide(s)), Fail, "the report is older than the instance")
	s = terminated()
	s.Failure.Reasons = []string{"InstanceTerminated"}
	assert.Contains(t, kinds(Decide(s)), Fail, "a reason that is also listed means the same")
}

func TestAFailureHasAClass(t *testing.T) {
	const deadline = 2 * time.Minute
	blocked := func(why string) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).withClaim("c", v1alpha1.PhasePending, "")
		s.Now = s.Now.Add(deadline)
		if why != "" {
			s.Sets[0].Status.Conditions = []metav1.Condition{{
				Type: clusterv1.MachineSetScalingUpCondition, Status: "True", Message: "Scaling up from 0 to 1 replicas is blocked because:\n* " + why,
			}}
		}
		return s
	}
	quota := blocked("")
	quota.Quota = "ResourceQuota machines is used up"
	bound := func(reason, message string, age time.Duration) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
			withMachine("m", "c", infrastructure(reason)).withClaim("c", v1alpha1.PhaseBound, "m")
		s.Machines[0].Spec.InfrastructureRef.Kind = "AzureMachine"
		c := &s.Machines[0].Status.Conditions[0]
		c.Message, c.LastTransitionTime = message, s.Machines[0].CreationTimestamp
		s.Now = s.Now.Add(age)
		return s
	}
	for name, test := range map[string]struct {
		s    *Snapshot
		want failures.Class
	}{
		"no capacity":                         {bound("Failed", "ERROR CODE: ZonalAllocationFailed", 0), failures.Capacity},
		"no quota":                            {bound("Failed", "ERROR CODE: QuotaExceeded", 0), failures.Quota},
		"a mistake":                           {bound("Failed", "ERROR CODE: AuthorizationFailed", 5*time.Minute), failures.Configuration},
		"a reason of --failure-reasons":       {bound("NoRoom", "", 0), failures.GivenUp},
		"no infrastructure":                   {bound(clusterv1.MachineInfrastructureDoesNotExistReason, "", time.Hour), failures.GivenUp},
		"nothing final for several deadlines": {bound("Failed", "RESPONSE 429", Patience*deadline), failures.TimedOut},
		"no Machine":                          {blocked(""), failures.TimedOut},
		"no Machine, for another reason":      {blocked("the control plane is upgrading"), failures.TimedOut},
		"no Machine, for a quota":             {quota, failures.Quota},
	} {
		t.Run(name, func(t *testing.T) {
			test.s.Failure = FailurePolicy{Known: true, Reasons: []string{"NoRoom"}, ObjectDeadline: deadline, ProviderIDDeadline: deadline}
			d := Decide(test.s)
			require.Equal(t, []ActionKind{Fail}, kinds(d))
			assert.Equal(t, test.want, d.Actions[0].Class, d.Actions[0].Event.Message)
		})
	}
}

func TestWhereTheMachineSaysNothingItsInfrastructureIsAsked(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", infrastructure("InstanceProvisionFailed")).withClaim("c", v1alpha1.PhaseBound, "a")
	m := s.Machines[0]
	m.Spec.InfrastructureRef.Kind, m.Status.Conditions[0].Message = "AWSMachine", "0 of 2 completed"
	s.Failure = FailurePolicy{Known: true}
	assert.Equal(t, "InstanceReady", s.Failure.See(m))
	d := Decide(s)
	assert.Empty(t, kinds(d))
	assert.Equal(t, reportSoon, d.RequeueAfter, "it is being asked")

	s.Reports = map[types.UID]Report{m.UID: {Reason: "InstanceProvisionFailed", Message: "api error RequestLimitExceeded"}}
	d = Decide(s)
	assert.Empty(t, kinds(d))
	assert.Equal(t, ReportLife, d.RequeueAfter)
	s.Reports[m.UID] = Report{Reason: "InstanceProvisionFailed", Message: "api error InsufficientInstanceCapacity: none left"}
	d = Decide(s)
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	assert.Contains(t, d.Actions[0].Event.Message, "InsufficientInstanceCapacity: none left")
	m.Spec.ProviderID = "aws:///a"
	assert.Empty(t, s.Failure.See(m))
	assert.Empty(t, kinds(Decide(s)))
}

func TestAFailedClaimsMachineIsNotHandedOver(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", nil).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.Claims[0].Status.FailedAt = new(metav1.NewTime(s.Now))
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Contains(t, d.Ledger.Releasing, types.UID("a"))
}

func TestALateMachineIsReleasedAndOneThatTakesSeveralDeadlinesFails(t *testing.T) {
	failure := FailurePolicy{ObjectDeadline: time.Minute, ProviderIDDeadline: 2 * time.Minute, NodeDeadline: 3 * time.Minute}
	bound := func(change func(*clusterv1.Machine), since time.Duration) func() *Snapshot {
		return func() *Snapshot {
			s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("a", "c", change).withClaim("c", v1alpha1.PhaseBound, "a")
			s.Claims[0].Status.BoundAt = new(metav1.NewTime(s.Now.Add(since)))
			s.Claims[0].Status.NodeAbsentAt = new(metav1.NewTime(s.Now.Add(time.Hour))) // at any time of the test
			return s
		}
	}
	for name, test := range map[string]struct {
		make func() *Snapshot
		at   time.Duration // from when the Machine was made
		then ActionKind
	}{
		"no Machine": {func() *Snapshot {
			return atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
				withClaim("c", v1alpha1.PhasePending, "")
		}, time.Minute, Fail},
		"no provider ID": {bound(nil, 0), 2 * time.Minute, TimeOut},
		"no Node":        {bound(booting, 0), 3 * time.Minute, TimeOut},
		"no provider ID, and the claim came later": {bound(nil, time.Minute), 3 * time.Minute, TimeOut},
		"no node, and the claim came later":        {bound(booting, 5*time.Minute), 8 * time.Minute, TimeOut},
		"no provider ID after three claims' time":  {bound(nil, 5*time.Minute), 6 * time.Minute, Fail},
		"no Node after three claims' time":         {bound(booting, 8*time.Minute), 9 * time.Minute, Fail},
		"a claim that does not say when it was bound": {func() *Snapshot {
			s := bound(nil, 0)()
			s.Claims[0].Status.BoundAt = nil
			return s
		}, 2 * time.Minute, TimeOut},
	} {
		t.Run(name, func(t *testing.T) {
			s := test.make()
			s.Failure = failure
			s.Now = s.Now.Add(test.at - time.Second)
			early := Decide(s)
			assert.Empty(t, kinds(early))
			assert.Equal(t, time.Second, early.RequeueAfter, "and is looked at again in time")
			s.Now = s.Now.Add(time.Second)
			assert.Equal(t, []ActionKind{test.then}, kinds(Decide(s)))
		})
	}
}

func TestWhatTheNodeGroupSaysOfDeadlinesCountsBeforeTheClaimAndThatBeforeTheOptions(t *testing.T) {
	const options, claim, group = 2 * time.Minute, 5 * time.Minute, 9 * time.Minute
	for name, test := range map[string]struct {
		change   func(*clusterv1.Machine)
		claim    time.Duration
		group    time.Duration
		deadline time.Duration
		fails    time.Duration
	}{
		"the options, without a provider ID":    {nil, 0, 0, options, Patience * options},
		"the options, without a Node":           {booting, 0, 0, options, Patience * options},
		"the claim, without a provider ID":      {nil, claim, 0, claim, Patience * claim},
		"the claim, without a Node":             {booting, claim, 0, claim, Patience * claim},
		"the node group, without a provider ID": {nil, claim, group, group, Patience * group},
		"the node group, without a Node":        {booting, claim, group, group, Patience * group},
		"the node group's may be the shortest":  {nil, claim, time.Minute, time.Minute, Patience * time.Minute},
		"a claim in a hurry is late only":       {nil, time.Minute, 0, time.Minute, Patience * options},
	} {
		t.Run(name, func(t *testing.T) {
			at := func(age time.Duration) []ActionKind {
				s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("a", "c", test.change).withClaim("c", v1alpha1.PhaseBound, "a")
				s.Failure = FailurePolicy{ProviderIDDeadline: options, NodeDeadline: options}
				s.Group.MaxNodeProvisionTime = test.group
				if test.claim > 0 {
					s.Claims[0].Spec.MaxNodeProvisionTimeSeconds = new(int32(test.claim / time.Second))
				}
				s.Now = s.Now.Add(age)
				s.Claims[0].Status.NodeAbsentAt = new(metav1.NewTime(s.Now))
				return kinds(Decide(s))
			}
			assert.Empty(t, at(test.deadline-time.Second))
			assert.Equal(t, []ActionKind{TimeOut}, at(test.deadline))
			assert.Equal(t, []ActionKind{TimeOut}, at(test.fails-time.Second))
			assert.Equal(t, []ActionKind{Fail}, at(test.fails))
		})
	}
}

// A Machine that a claim waits for beyond the options is not removed before another claim that
// waits as long can have it.
func TestAMachineIsKeptForTheMostPatientClaim(t *testing.T) {
	named := func(patience, ofGroup, age time.Duration) bool {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
			withMachine("a", "", nil).withClaim("c", v1alpha1.PhasePending, "")
		s.Failure = FailurePolicy{ProviderIDDeadline: 2 * time.Minute}
		s.Group.MaxNodeProvisionTime = ofGroup
		s.Claims[0].Spec.MaxNodeProvisionTimeSeconds = new(int32(patience / time.Second))
		s.Now = s.Now.Add(age)
		s.Claims[0].CreationTimestamp = metav1.NewTime(s.Now)
		d := Decide(s)
		return d.Ledger != nil && d.Ledger.Pending["c"].Machine == "a"
	}
	assert.True(t, named(10*time.Minute, 0, 20*time.Minute))
	assert.False(t, named(10*time.Minute, 0, 30*time.Minute))
	assert.True(t, named(time.Minute, 0, 5*time.Minute), "a claim in a hurry makes no machine fail sooner for the others")
	assert.False(t, named(10*time.Minute, 5*time.Minute, 20*time.Minute), "the node group's own time is for all claims")
}

func TestALateMachineIsTheNextClaimsUntilItHasTakenSeveralDeadlines(t *testing.T) {
	at := func(age time.Duration) *Decision {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
			withMachine("a", "", nil).withClaim("c", v1alpha1.PhasePending, "")
		s.Failure = FailurePolicy{ProviderIDDeadline: 2 * time.Minute}
		s.Now = s.Now.Add(age)
		s.Claims[0].CreationTimestamp = metav1.NewTime(s.Now)
		return Decide(s)
	}
	late := at(6*time.Minute - time.Second)
	require.NotNil(t, late.Ledger)
	assert.Equal(t, "a", late.Ledger.Pending["c"].Machine)
	if failed := at(6 * time.Minute); failed.Ledger != nil {
		assert.Empty(t, failed.Ledger.Pending["c"].Machine)
	}
}

func TestABlockedMachineSetIsExplainedOnTheClaim(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).withClaim("c", v1alpha1.PhasePending, "")
	s.Sets[0].Status.Conditions = []metav1.Condition{{
		Type: clusterv1.MachineSetScalingUpCondition, Status: "True",
		Message: "Scaling up from 0 to 1 replicas is blocked because:\n* the control plane is upgrading\n* KubeadmBootstrapTemplate does not exist",
	}}
	d := Decide(s)
	require.Equal(t, []ActionKind{Explain}, kinds(d))
	const why = "MachineSet small-a creates no Machines: the control plane is upgrading; KubeadmBootstrapTemplate does not exist"
	assert.Equal(t, why, d.Actions[0].Event.Message)

	entered := v1alpha1.Event{Time: metav1.NewTime(s.Now), Reason: ReasonWaitingForMachine, Message: "entered"}
	s.Claims[0].Status.Reason, s.Claims[0].Status.Message = ReasonWaitingForMachine, why
	s.Claims[0].Status.History = []v1alpha1.Event{entered, {Time: metav1.NewTime(s.Now), Reason: ReasonWaitingForMachine, Message: why}}
	s.Sets[0].Status.Conditions[0].Message = strings.ReplaceAll(s.Sets[0].Status.Conditions[0].Message, "from 0 to 1", "from 0 to 200")
	assert.Empty(t, kinds(Decide(s)), "once is enough, whatever else is claimed")

	s.Sets[0].Status.Conditions[0].Message = "Scaling up from 0 to 200 replicas is blocked because:\n* KubeadmBootstrapTemplate does not exist"
	d = Decide(s)
	assert.Empty(t, kinds(d), "nor more than once a minute")
	assert.Equal(t, explainEvery, d.RequeueAfter)
	s.Now = s.Now.Add(explainEvery)
	assert.Equal(t, []ActionKind{Explain}, kinds(Decide(s)))
}

func TestAGroupCoolsDownAfterAFailure(t *testing.T) {
	now := newTestTime()
	claims := []*v1alpha1.MachineClaim{
		{Spec: v1alpha1.MachineClaimSpec{ClaimID: "old"}, Status: v1alpha1.MachineClaimStatus{FailedAt: new(metav1.NewTime(now.Add(-time.Hour)))}},
		{Spec: v1alpha1.MachineClaimSpec{ClaimID: "new"}, Status: v1alpha1.MachineClaimStatus{FailedAt: new(metav1.NewTime(now))}},
	}
	refusal := CoolDownOf("small", claims, now.Add(time.Minute), 3*time.Minute)
	require.NotNil(t, refusal)
	assert.Equal(t, eligibility.CoolingDown, refusal.Reason)
	assert.True(t, refusal.RetryAt.Equal(now.Add(3*time.Minute)))
	assert.Contains(t, refusal.Message, "new")
	assert.Nil(t, CoolDownOf("small", claims, now.Add(3*time.Minute), 3*time.Minute))
}

func completed(m *clusterv1.Machine) {
	m.DeletionTimestamp = new(metav1.NewTime(newTestTime()))
	m.Finalizers = []string{v1alpha1.ReleaseFinalizer}
	m.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.MachineDeletingCondition, Status: "True", Reason: clusterv1.MachineDeletingDeletionCompletedReason,
	}}
}

func TestAReplicaIsGivenBackWhenTheInstanceIsGone(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).withMachine("a", "", completed)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(0), d.Replicas)
	assert.Equal(t, Release{Machine: "a", Decremented: true, Generation: 4}, d.Ledger.Releasing["a"])
	assert.True(t, d.Removes, "which MachineSet it is charged to depends on the template")
}

// Cluster API observes a generation without distributing the replicas when it repairs managed
// fields first.
func TestAMachineIsKeptUntilItsReplicaIsTakenOff(t *testing.T) {
	releasing := map[types.UID]Release{"a": {Machine: "a", Decremented: true, Generation: 3}}
	s := atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Releasing: releasing}).
		withMachine("a", "", completed).withMachine("b", "", node)
	s.Sets[0].Spec.Replicas = new(int32(3))
	assert.NotContains(t, kinds(Decide(s)), RemoveFinalizer, "the MachineSet would replace it, and then lose any other one")
	s.Sets[0].Spec.Replicas = new(int32(2))
	assert.Contains(t, kinds(Decide(s)), RemoveFinalizer)
}

// A person has paused an old MachineSet, and changed the MachineDeployment since.
func TestAMachineWaitsForItsOwnMachineSetAlone(t *testing.T) {
	for _, own := range []bool{false, true} {
		releasing := map[types.UID]Release{"a": {Machine: "a", Decremented: true, Generation: 3}}
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: releasing}).
			withMachine("a", "", completed)
		paused := &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{Name: "small-old", Generation: 8, Annotations: map[string]string{clusterv1.PausedAnnotation: ""}},
			Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(0))},
		}
		s.Sets = append(s.Sets, paused)
		if own {
			s.Machines[0].OwnerReferences[0].Name = paused.Name
		}
		assert.Equal(t, !own, slices.Contains(kinds(Decide(s)), RemoveFinalizer), "its own: %t", own)
	}
}

// Cluster API goes on deleting the Node of a Machine that the agent keeps.
func TestAMachineWhoseNodeCannotBeDeletedAgainIsGone(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).withMachine("a", "", completed)
	s.Machines[0].Status.Conditions[0].Reason = clusterv1.MachineDeletingDeletingNodeReason
	assert.Zero(t, Decide(s).Replicas)
	s.Machines[0].Finalizers = append(s.Machines[0].Finalizers, clusterv1.MachineFinalizer)
	assert.Equal(t, int32(1), Decide(s).Replicas, "for the first time, while Cluster API holds it")
}

// fails makes each reconcile of a MachineSet end with an error.
func fails(set *clusterv1.MachineSet) {
	set.Generation = 7
	set.Status.ObservedGeneration = 6
	set.Status.Conditions = append(set.Status.Conditions, metav1.Condition{
		Type: clusterv1.MachineSetScalingUpCondition, Status: metav1.ConditionTrue, ObservedGeneration: 7,
	})
}

// A quota refuses a Machine, or the infrastructure object of another one is missing. The Machine
// object that is kept would take up what is missing.
func TestNothingWaitsForAMachineSetWhoseReconcilesEndWithAnError(t *testing.T) {
	decremented := &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a", Decremented: true, Generation: 3}}}
	released := func() *Snapshot { return atRest(1, decremented).withMachine("a", "", completed) }
	s := released()
	fails(s.Sets[0])
	assert.Contains(t, kinds(Decide(s)), RemoveFinalizer)
	s.Sets[0].Status.Conditions[0].Status = metav1.ConditionUnknown
	assert.NotContains(t, kinds(Decide(s)), RemoveFinalizer, "it got no further than listing the Machines")
	s = released()
	fails(s.Sets[0])
	s.Sets[0].Generation++
	assert.NotContains(t, kinds(Decide(s)), RemoveFinalizer, "it has not seen the lowering")

	s = atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 1, LastReplicas: 3, Spare: 2}).withMachine("m", "", node)
	s.SpareSince = s.Now.Add(-time.Hour)
	fails(s.Sets[0])
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, &Shrink{Set: s.Sets[0].Name}, d.Ledger.Shrink, "what cannot be created is given back")
}

func TestAReplicaThatANewClaimTakesAtOnceWaitsForNoNewGeneration(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a"}}}).
		withMachine("a", "", completed).withClaim("c", "", "")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(1), d.Replicas, "one given back, one taken")
	assert.Equal(t, int64(3), d.Ledger.Releasing["a"].Generation, "spec does not change, so no generation 4 comes")

	s.Ledger = d.Ledger
	assert.Contains(t, kinds(Decide(s)), RemoveFinalizer)
}

func TestAMachineOfAGroupThatIsBeingDeletedIsLetGo(t *testing.T) {
	for name, back := range map[string]Release{"given back": {Machine: "a", Decremented: true, Generation: 4}, "not given back": {Machine: "a"}} {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": back}}).withMachine("a", "", completed)
			s.Deployment.DeletionTimestamp = new(metav1.NewTime(s.Now))
			s.Deployment.Generation = 4 // Cluster API does not observe generations of what it deletes
			s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Deleting}}
			assert.Contains(t, kinds(Decide(s)), RemoveFinalizer)
		})
	}
}

// Cluster API does not delete anything that is paused.
func TestAGroupThatIsBeingDeletedIsNotKeptPaused(t *testing.T) {
	going := func(ledger *Ledger) *Snapshot {
		s := atRest(1, ledger)
		s.Deployment.DeletionTimestamp = new(metav1.NewTime(s.Now))
		s.Sets[0].Spec.Replicas = new(int32(2)) // Cluster API does not scale what it deletes
		s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Deleting}}
		return s
	}
	t.Run("MachineSet", func(t *testing.T) {
		for _, done := range []bool{false, true} {
			s := going(&Ledger{Version: 1, Seq: 9, LastReplicas: 1, Spare: 1, Shrink: &Shrink{Set: "small-a", Done: done}})
			s.Sets[0].Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
			if !done {
				s.Ledger = Decide(s).Ledger
				require.True(t, s.Ledger.Shrink.Done)
			}
			assert.Contains(t, kinds(Decide(s)), UnpauseMachineSet)
		}
	})
	t.Run("MachineDeployment", func(t *testing.T) {
		s := going(&Ledger{Version: 1, Seq: 9, LastReplicas: 1, Releasing: map[types.UID]Release{"a": {Machine: "a", Set: "small-a"}}})
		s.Deployment.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
		d := Decide(s.withMachine("a", "", completed))
		assert.Equal(t, PauseRemove, d.Pause)
		assert.Equal(t, int32(1), d.Replicas)
		assert.Contains(t, kinds(d), RemoveFinalizer)
	})
}

func TestAMachineWhoseClaimsObjectWasLostKeepsItsClaim(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", node)
	s.Lost = map[string]*clusterv1.Machine{"c": s.Machines[0]}
	s.SpareSince = s.Now.Add(-time.Hour)
	d := Decide(s)
	assert.Nil(t, d.Ledger, "it is no spare")
	assert.Equal(t, []ActionKind{Recreate}, kinds(d))
}

func TestAClaimThatLostItsStatusGetsItsOwnMachineBack(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("a", "c", node).withClaim("c", "", "")
	d := Decide(s)
	assert.Nil(t, d.Ledger, "and no second one")
	assert.Equal(t, []ActionKind{Restore}, kinds(d))
}

func TestAClaimThatLostItsStatusBeforeItsEntryWasDroppedIsRestored(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Assignment{"c": {Machine: "m", UID: "m"}}}).
		withMachine("m", "c", nil).withClaim("c", v1alpha1.PhasePending, "")
	assert.Equal(t, []ActionKind{Restore}, kinds(Decide(s)))
}

// It is restored first. Then it ends with its Machine, like any claim whose Machine another actor
// deletes.
func TestAClaimThatLostItsStatusWhileItsMachineIsDeletedGetsNoOther(t *testing.T) {
	for what, pending := range map[string]map[string]Assignment{
		"before its entry was dropped": {"c": {Machine: "m", UID: "m"}},
		"after its entry was dropped":  nil,
	} {
		for _, phase := range []v1alpha1.Phase{"", v1alpha1.PhasePending} {
			t.Run(what+" "+string(phase), func(t *testing.T) {
				s := atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Spare: 1, Pending: pending}).
					withMachine("m", "c", deleting("")).withMachine("spare", "", nil).withClaim("c", phase, "")
				d := Decide(s)
				require.Equal(t, []ActionKind{Restore}, kinds(d))
				assert.Same(t, s.Machines[0], d.Actions[0].Machine)
				assert.EqualValues(t, 1, d.Claimed, "its replica is not lowered meanwhile")
				if d.Ledger != nil {
					assert.Equal(t, pending, d.Ledger.Pending, "the spare Machine is not assigned to it")
				}
			})
		}
	}
}

// A claim that was released, or that had ended, is not shown as one whose Machine another actor
// deletes.
func TestAClaimThatLostItsStatusWhileItsMachineIsReleasedIsReleasedStill(t *testing.T) {
	goes := func(m *clusterv1.Machine) {
		m.DeletionTimestamp = new(metav1.NewTime(newTestTime()))
		m.Finalizers = []string{clusterv1.MachineFinalizer, v1alpha1.ReleaseFinalizer}
	}
	recorded := Release{Machine: "m", Claim: "c", Decremented: true, Drained: true}
	for what, test := range map[string]struct {
		ledger *Ledger
		want   Release
	}{
		"as the ledger records":    {&Ledger{Version: 1, Seq: 9, Releasing: map[types.UID]Release{"m": recorded}}, recorded},
		"and the ledger lost that": {&Ledger{Version: 1, Seq: 9, LastReplicas: 1}, Release{Machine: "m", Claim: "c"}},
		"and the ledger was lost":  {nil, Release{Machine: "m", Claim: "c"}},
	} {
		t.Run(what, func(t *testing.T) {
			var replicas int32
			if test.ledger != nil {
				replicas = test.ledger.LastReplicas
			}
			s := atRest(replicas, test.ledger).withMachine("m", "c", goes).withClaim("c", "", "")
			var restored []Action
			for _, a := range Decide(s).Actions {
				if a.Kind == Restore {
					restored = append(restored, a)
				}
			}
			require.Len(t, restored, 1)
			assert.Equal(t, test.want, restored[0].Release)
		})
	}
}

func TestAClaimWhoseStatusNamesAnotherMachineIsRestoredWhileItsOwnIsDeleted(t *testing.T) {
	for _, phase := range []v1alpha1.Phase{v1alpha1.PhaseBound, v1alpha1.PhaseReleasing} {
		s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("m", "c", deleting("")).withClaim("c", phase, "former")
		assert.Equal(t, []ActionKind{Restore}, kinds(Decide(s)), phase)
	}
}

func TestAClaimIsRestoredToTheMachineThatIsNotBeingDeleted(t *testing.T) {
	for _, names := range [][]string{{"a", "b"}, {"b", "a"}} { // Machines are in the order of their names
		s := atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2}).
			withMachine(names[0], "c", deleting("")).withMachine(names[1], "c", nil).withClaim("c", "", "")
		d := Decide(s)
		require.Equal(t, []ActionKind{Restore}, kinds(d))
		assert.Equal(t, names[1], d.Actions[0].Machine.Name)
	}
}

// Another version of the agent may have cleared the entry.
func TestAClaimThatLostItsStatusIsAssignedNoMachine(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Spare: 1, Pending: map[string]Assignment{"c": {}}}).
		withMachine("m", "c", deleting("")).withMachine("spare", "", nil).withClaim("c", v1alpha1.PhasePending, "")
	d := Decide(s)
	require.Equal(t, []ActionKind{Restore}, kinds(d))
	if d.Ledger != nil {
		assert.Empty(t, d.Ledger.Pending["c"])
	}
}

func TestAFailingMachineIsNobodysNext(t *testing.T) {
	failing := FailurePolicy{Reasons: []string{"InsufficientCapacity"}}
	released := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", infrastructure("InsufficientCapacity")).withClaim("c", v1alpha1.PhaseReleasing, "a")
	released.Failure = failing
	d := Decide(released)
	require.NotNil(t, d.Ledger, "it is released, not handed over")
	assert.Contains(t, d.Ledger.Releasing, types.UID("a"))

	waiting := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
		withMachine("a", "", infrastructure("InsufficientCapacity")).withClaim("c", v1alpha1.PhasePending, "")
	waiting.Failure = failing
	waiting.Machines[0].CreationTimestamp = metav1.NewTime(waiting.Now.Add(-time.Minute)) // it failed for an earlier claim
	if d := Decide(waiting); d.Ledger != nil {
		assert.Empty(t, d.Ledger.Pending["c"].UID)
	}
}

func TestAClaimLastsUntilItsMachineIsGone(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).
		withMachine("a", "c", func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.NewTime(newTestTime())) }).
		withClaim("c", v1alpha1.PhaseBound, "a")
	assert.Equal(t, []ActionKind{Explain}, kinds(Decide(s)), "its instance may still run")

	s.Machines = nil
	assert.Equal(t, []ActionKind{End}, kinds(Decide(s)))
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

// Another actor began to delete the Machine of a claim whose release was requested. The Machine
// goes without the agent, and its replacement is a spare.
func TestAMachineThatAnotherActorDeletesFirstGoesWithoutTheAgent(t *testing.T) {
	for name, ledger := range map[string]*Ledger{
		"before its release is recorded": {Version: 1, Seq: 1, LastReplicas: 1},
		"after that":                     releasingLedger(Release{Machine: "a", Claim: "c"}),
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, ledger).withClaim("c", v1alpha1.PhaseReleasing, "a").
				withMachine("a", "c", deleting(clusterv1.MachineDeletingDrainingNodeReason))
			d := Decide(s)
			if d.Ledger != nil {
				s.Ledger = d.Ledger
			}
			assert.Empty(t, s.Ledger.Releasing)
			assert.Empty(t, kinds(Decide(s)), "the claim ends when the Machine is gone")
			s.Machines = nil
			assert.Equal(t, []ActionKind{End}, kinds(Decide(s)))
		})
	}
}

// Earlier versions put a pre-terminate hook on such a Machine.
func TestAHookOfAnEarlierVersionIsTakenOff(t *testing.T) {
	hooked := func(m *clusterv1.Machine) {
		deleting(clusterv1.MachineDeletingWaitingForPreTerminateHookReason)(m)
		m.Annotations = map[string]string{v1alpha1.ReleaseHook: ""}
	}
	unlet := releasingLedger(Release{Machine: "a", Claim: "c", Decremented: true, Generation: 4})
	for name, ledger := range map[string]*Ledger{
		"its replica is there":                 releasingLedger(Release{Machine: "a", Claim: "c"}),
		"its replica was given back":           releasingLedger(Release{Machine: "a", Claim: "c", Decremented: true, Generation: 3}),
		"nothing is known of it":               {Version: 1, Seq: 1, LastReplicas: 1},
		"not before the lowering was observed": unlet,
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, ledger).withMachine("a", "c", hooked).withClaim("c", v1alpha1.PhaseReleasing, "a")
			if d := Decide(s); d.Ledger != nil {
				s.Ledger = d.Ledger
			}
			if ledger == unlet {
				assert.Empty(t, kinds(Decide(s)))
				return
			}
			assert.Equal(t, []ActionKind{RemoveFinalizer}, kinds(Decide(s)))
		})
	}
}

func TestADeletionThatTakesLongIsExplained(t *testing.T) {
	s := atRest(1, releasingLedger(Release{Machine: "a", Claim: "c"})).
		withMachine("a", "c", deleting(clusterv1.MachineDeletingDrainingNodeReason)).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.Machines[0].Finalizers = []string{clusterv1.MachineFinalizer, v1alpha1.ReleaseFinalizer}
	d := Decide(s)
	assert.Empty(t, d.Actions)
	assert.Equal(t, slowDeletion, d.RequeueAfter)
	s.Now = s.Now.Add(slowDeletion)
	d = Decide(s)
	require.Equal(t, []ActionKind{Explain}, kinds(d))
	assert.Equal(t, clusterv1.MachineDeletingDrainingNodeReason, d.Actions[0].Event.Reason)
	assert.Contains(t, d.Actions[0].Event.Message, "cannot evict pod default/web-0")
	s.Claims[0].Status.Reason = clusterv1.MachineDeletingDrainingNodeReason
	assert.Empty(t, Decide(s).Actions, "once")
}

func TestAdoptingTakesASpareElseTheUsers(t *testing.T) {
	for name, test := range map[string]struct {
		floor, replicas, minimum int32
		maximum                  *int32
		wantFloor, wantReplicas  int32
		wantAdopted, wantRefusal bool
		above                    bool
		wantReason               eligibility.Reason
	}{
		"a spare":                             {floor: 1, replicas: 2, wantFloor: 1, wantReplicas: 2},
		"the user's":                          {floor: 2, replicas: 2, wantFloor: 1, wantReplicas: 2, wantAdopted: true},
		"at the min size replicas are raised": {floor: 2, replicas: 2, minimum: 2, wantFloor: 2, wantReplicas: 3},
		"at the min and the max size": {
			floor: 2, replicas: 2, minimum: 2, maximum: new(int32(2)), wantRefusal: true, wantReason: eligibility.AtMaxSize,
		},
		"at the min size, and only above it": {
			floor: 2, replicas: 2, minimum: 2, above: true, wantRefusal: true, wantReason: eligibility.NotAdoptable,
		},
		"above the min size":          {floor: 2, replicas: 2, minimum: 1, above: true, wantFloor: 1, wantReplicas: 2, wantAdopted: true},
		"a spare beside the min size": {floor: 1, replicas: 2, minimum: 1, above: true, wantFloor: 1, wantReplicas: 2},
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(test.replicas, &Ledger{Version: 1, Seq: 4, LastReplicas: test.replicas, Floor: test.floor, Min: test.minimum}).
				withMachine("a", "", node).withMachine("b", "", node).withClaim("c", "", "")
			s.Claims[0].Spec.Adopt, s.Claims[0].Spec.AdoptAboveMinSize = "b", test.above
			s.Group.Min, s.Group.Max = test.minimum, test.maximum
			d := Decide(s)
			if test.wantRefusal {
				assert.Equal(t, test.wantReason, d.Refused["c"].Reason)
				assert.Nil(t, d.Ledger)
				return
			}
			require.NotNil(t, d.Ledger)
			assert.Equal(t, Assignment{Machine: "b", UID: "b", Adopted: test.wantAdopted}, d.Ledger.Pending["c"])
			assert.Equal(t, test.wantFloor, d.Ledger.Floor)
			assert.Equal(t, test.wantReplicas, d.Replicas)
		})
	}
}

func TestWhatCannotBeAdoptedIsRefusedWithTheReason(t *testing.T) {
	for name, test := range map[string]struct {
		snapshot *Snapshot
		want     string
	}{
		"missing": {atRest(1, nil).withMachine("b", "", node), "does not exist"},
		"claimed": {atRest(1, nil).withMachine("a", "other", node).withClaim("other", v1alpha1.PhaseBound, "a"), "already has a claim"},
		"promised": {
			atRest(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Assignment{"other": {Machine: "a", UID: "a"}}}).
				withMachine("a", "", nil).withClaim("other", v1alpha1.PhasePending, ""), "already has a claim",
		},
		"going": {atRest(1, nil).withMachine("a", "", deleting("")), "is being deleted"},
		"labelled": {
			atRest(1, nil).withMachine("a", "old", node).withClaim("old", v1alpha1.PhaseEnded, ""), "carries the label of a claim that has ended",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := test.snapshot.withClaim("c", "", "")
			s.Claims[len(s.Claims)-1].Spec.Adopt = "a"
			d := Decide(s)
			assert.Equal(t, eligibility.NotAdoptable, d.Refused["c"].Reason)
			assert.Contains(t, d.Refused["c"].Message, test.want)
		})
	}
}

func TestAnAdoptionThatIsTakenBackLeavesTheMachineWithTheUser(t *testing.T) {
	s := atRest(2, &Ledger{
		Version: 1, Seq: 4, LastReplicas: 2, Floor: 1, Pending: map[string]Assignment{"c": {Machine: "b", UID: "b", Adopted: true}},
	}).withMachine("a", "", node).withMachine("b", "", node).withClaim("c", v1alpha1.PhaseReleasing, "")
	s.Claims[0].Spec.Adopt = "b"
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Empty(t, d.Ledger.Pending)
	assert.Equal(t, int32(2), d.Replicas)
	assert.False(t, d.HasSpare)
}

func TestAnAdoptionWhoseMachineDiesEnds(t *testing.T) {
	s := atRest(2, &Ledger{
		Version: 1, Seq: 4, LastReplicas: 2, Floor: 1, Pending: map[string]Assignment{"c": {Adopted: true}},
	}).withMachine("a", "", node).withMachine("d", "", nil).withClaim("c", v1alpha1.PhasePending, "")
	s.Claims[0].Spec.Adopt = "b"
	d := Decide(s)
	assert.Equal(t, []ActionKind{End}, kinds(d), "it gets no other Machine")
}

func TestAClaimFailsWithAMachineThatWillNotCome(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Pending: map[string]Assignment{"b": {}, "c": {}}})
	s.Failure = FailurePolicy{Reasons: []string{"NoCapacity"}}
	s.withMachine("bad", "", infrastructure("NoCapacity")).withMachine("good", "", nil).
		withClaim("b", v1alpha1.PhasePending, "").withClaim("c", v1alpha1.PhasePending, "")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, "good", d.Ledger.Pending["b"].Machine)
	assert.Equal(t, "bad", d.Ledger.Pending["c"].Machine)
	assert.True(t, d.Urgent)
	assert.Equal(t, int32(2), d.Replicas, "no further Machine is asked for where they fail")

	s.Machines[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
	assert.Empty(t, Decide(s).Ledger.Pending["c"], "one that failed before the claim was made is not its Machine")
}

// A rollout waits until the MachineSet reports that it has released its Machines, which it does not
// do while it is paused.
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
			s := atRest(2, &Ledger{Version: 1, Seq: 1, Floor: 2, LastReplicas: 2, Shrink: &Shrink{Set: "small-a", Done: true}})
			s.Deployment.Spec.Rollout.Strategy.Type = tc.strategy
			paused := s.Sets[0]
			paused.Spec.Replicas = new(int32(3)) // the lowering has not reached it
			paused.Annotations = map[string]string{
				clusterv1.PausedAnnotation: v1alpha1.PausedByAgent, clusterv1.RevisionAnnotation: "1",
			}
			s.Sets = append(s.Sets, &clusterv1.MachineSet{
				ObjectMeta: metav1.ObjectMeta{Name: "small-b", Annotations: map[string]string{clusterv1.RevisionAnnotation: tc.revision}},
				Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(0))},
			})
			d := Decide(s.withMachine("a", "", node).withMachine("b", "", node))
			assert.Equal(t, tc.unpaused, slices.Contains(kinds(d), UnpauseMachineSet))
		})
	}
}

// The claim that has the Machine shows it until it has ended: no caller may read that two claims
// have one Machine.
func TestAMachineIsBoundWhenTheClaimThatHandsItOverHasEnded(t *testing.T) {
	ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Pending: map[string]Assignment{"b": {Machine: "m", UID: "m"}}}
	s := atRest(1, ledger).withMachine("m", "", nil).
		withClaim("a", v1alpha1.PhaseReleasing, "m").withClaim("b", v1alpha1.PhasePending, "")
	assert.Equal(t, []ActionKind{End}, kinds(Decide(s)))
	s = atRest(1, ledger).withMachine("m", "", nil).withClaim("a", v1alpha1.PhaseEnded, "m").withClaim("b", v1alpha1.PhasePending, "")
	assert.Equal(t, []ActionKind{Bind}, kinds(Decide(s)))
}

// Cluster API removes a Machine's infrastructure when a call to create the Machine times out, even
// if the Machine was created, and each reconcile of the MachineSet ends with an error until that
// one is gone.
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
			s := atRest(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).withMachine("m", "a", lacks(since)).withClaim("a", v1alpha1.PhaseBound, "m")
			d := Decide(s)
			assert.Equal(t, since == time.Hour, slices.Contains(kinds(d), Fail), since)
			if since < missingAfter {
				assert.LessOrEqual(t, d.RequeueAfter, missingAfter+skew, "it is looked at again")
				assert.Positive(t, d.RequeueAfter)
			}
		}
	})
	t.Run("it is no claim's next", func(t *testing.T) {
		s := atRest(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Spare: 1}).withMachine("m", "", lacks(time.Hour)).withClaim("a", "", "")
		assert.Empty(t, Decide(s).Ledger.Pending["a"].Machine)
	})
	t.Run("it goes although Cluster API is stuck and a claim waits", func(t *testing.T) {
		s := atRest(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Spare: 1, Pending: map[string]Assignment{"a": {}}}).
			withMachine("m", "", lacks(time.Hour)).withClaim("a", v1alpha1.PhasePending, "")
		s.SpareSince = s.Now.Add(-time.Hour)
		s.Sets[0].Generation = 7
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Contains(t, d.Ledger.Releasing, types.UID("m"))
	})
}

func pauseAsAgent(o metav1.Object) {
	o.SetAnnotations(map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent})
}

var saysPaused = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue}}

// pausedForASpare is a group of one Machine with a spare that never came, whose MachineSet the
// agent has paused for that.
func pausedForASpare(shrink *Shrink) *Snapshot {
	s := atRest(2, &Ledger{Version: 1, Seq: 4, Floor: 1, LastReplicas: 2, Shrink: shrink}).withMachine("a", "", node)
	pauseAsAgent(s.Sets[0])
	s.Sets[0].Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue}}
	return s
}

// The grace period of another agent may be over, and that agent may be counting already.
func TestAMachineSetStaysPausedForAnAgentWhoseGracePeriodIsNotOver(t *testing.T) {
	s := pausedForASpare(&Shrink{Set: "small-a"})
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.True(t, d.Ledger.Shrink.Done)
	assert.True(t, d.Removes)
	assert.Equal(t, int32(1), d.Replicas)
	assert.NotContains(t, kinds(d), UnpauseMachineSet)
}

func TestAMachineSetThatIsPausedForAnUnknownReasonIsUnpaused(t *testing.T) {
	s := pausedForASpare(nil)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	require.Equal(t, &Shrink{Set: "small-a", Done: true}, d.Ledger.Shrink)
	assert.Equal(t, int32(2), d.Replicas)
	s.Ledger = d.Ledger
	assert.Contains(t, kinds(Decide(s)), UnpauseMachineSet)
}

// Cluster API defers a raise while the status of a paused MachineSet counts more Machines than its
// spec.
func TestAMachineSetIsUnpausedAlthoughARaiseIsPutOff(t *testing.T) {
	s := pausedForASpare(&Shrink{Set: "small-a", Done: true})
	one := int32(1)
	s.Sets[0].Spec.Replicas = &one
	assert.Contains(t, kinds(Decide(s)), UnpauseMachineSet)
}

// While it is paused it would never get the replicas that Cluster API withholds.
func TestAMachineSetIsUnpausedWhenARaiseIsPutOffBeforeItsSparesAreCounted(t *testing.T) {
	s := atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 2, LastReplicas: 3, Spare: 1, Shrink: &Shrink{Set: "small-a"}}).
		withMachine("m", "", node).withMachine("n", "", node)
	pauseAsAgent(s.Sets[0])
	s.Sets[0].Status.Conditions, s.Sets[0].Spec.Replicas = saysPaused, new(int32(2))
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, &Shrink{Set: "small-a", Done: true}, d.Ledger.Shrink)
	assert.Equal(t, int32(3), d.Replicas, "of those that it was not told of nothing is known")
	s.Ledger = d.Ledger
	assert.Contains(t, kinds(Decide(s)), UnpauseMachineSet)
}

func TestSparesThatNeverCameAreCountedOnceTheTemplateIsSeen(t *testing.T) {
	for _, seen := range []bool{false, true} {
		s := atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 1, LastReplicas: 3, Spare: 2, Shrink: &Shrink{Set: "small-a"}}).withMachine("m", "", node)
		pauseAsAgent(s.Sets[0])
		s.Sets[0].Status.Conditions = saysPaused
		if !seen {
			s.Deployment.Generation++
		}
		d := Decide(s)
		assert.Equal(t, seen, d.Replicas == 1, "replicas %d", d.Replicas)
	}
}

// A MachineDeployment and its MachineSet are not paused at the same time: each would wait for the
// other to be reconciled.
func TestOnePauseAtATime(t *testing.T) {
	t.Run("the MachineSet is", func(t *testing.T) {
		for _, shrinks := range []bool{false, true} {
			ledger := &Ledger{Version: 1, Seq: 4, Floor: 3, LastReplicas: 4, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}
			s := atRest(4, ledger).withMachine("m", "c", completed)
			s.Sets[0].Spec.Replicas = new(int32(3))
			s.Sets = append(s.Sets, &clusterv1.MachineSet{
				ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
			})
			if shrinks {
				ledger.Shrink = &Shrink{Set: "small-b", Done: true}
				pauseAsAgent(s.Sets[1])
			}
			d := Decide(s)
			assert.Equal(t, !shrinks, d.Pause == PauseSet)
			assert.Equal(t, int32(4), d.Replicas)
		}
	})
	t.Run("the MachineDeployment is", func(t *testing.T) {
		for _, lowers := range []bool{false, true} {
			ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Spare: 2, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}
			s := atRest(3, ledger).withMachine("m", "c", deleting("Draining"))
			s.SpareSince = s.Now.Add(-time.Hour)
			if lowers {
				ledger.Releasing["m"] = Release{Machine: "m", Claim: "c", Set: "small-a"}
				s.Machines = nil
				s.withMachine("m", "c", completed)
				pauseAsAgent(s.Deployment)
				s.Deployment.Status.Conditions = saysPaused
			}
			d := Decide(s)
			began := d.Ledger != nil && d.Ledger.Shrink != nil
			assert.Equal(t, !lowers, began)
		}
	})
}

// The MachineDeployment would stay paused for as long as the MachineSet is.
func TestAMachineSetThatAPersonPausedHoldsUpItsOwnReleasesAlone(t *testing.T) {
	ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}
	s := atRest(3, ledger).withMachine("m", "c", completed)
	s.Sets[0].Spec.Replicas = new(int32(2))
	s.Sets = append(s.Sets, &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
	})
	s.Sets[0].Annotations = map[string]string{clusterv1.PausedAnnotation: "maintenance"}
	d := Decide(s)
	assert.Equal(t, PauseKeep, d.Pause)
	assert.Equal(t, int32(3), d.Replicas)

	ledger.Releasing["n"] = Release{Machine: "n", Claim: "d"}
	s.withMachine("n", "d", completed)
	s.Machines[1].OwnerReferences[0].Name = "small-b"
	d = Decide(s)
	assert.Equal(t, PauseSet, d.Pause)
	assert.Equal(t, "small-b", d.Ledger.Releasing["n"].Set)
	assert.Empty(t, d.Ledger.Releasing["m"].Set)

	s.Sets[0].Annotations = nil
	assert.Equal(t, "small-a", Decide(s).Ledger.Releasing["m"].Set)
}

// A person pauses the MachineSet while the agent has paused the MachineDeployment to lower it.
func TestAMachineSetThatAPersonPausesMeanwhileKeepsNothingPaused(t *testing.T) {
	paused := func(lowered bool) *Snapshot {
		s := atRest(3, &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c", Set: "small-a"}}}).
			withMachine("m", "c", completed)
		s.Deployment.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
		s.Deployment.Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: "True"}}
		set := s.Sets[0]
		set.Generation, set.Spec.Replicas = 3, new(int32(2))
		s.Sets = append(s.Sets, &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
		})
		set.Annotations = map[string]string{clusterv1.PausedAnnotation: "maintenance"}
		if lowered {
			set.Annotations[v1alpha1.ReleasedAnnotation], set.Spec.Replicas = "m", new(int32(1))
		}
		return s
	}
	d := Decide(paused(false))
	assert.Equal(t, PauseRemove, d.Pause)
	assert.Empty(t, d.Ledger.Releasing["m"].Set, "it begins anew")
	assert.Equal(t, int32(3), d.Replicas)
	assert.Empty(t, d.Actions)

	s := paused(true)
	assert.Equal(t, PauseKeep, Decide(s).Pause, "Cluster API may not know of it yet")
	s.Sets[0].Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: "True", ObservedGeneration: 3}}
	d = Decide(s)
	assert.Equal(t, PauseRemove, d.Pause)
	assert.Equal(t, int32(2), d.Replicas)
	assert.True(t, d.Ledger.Releasing["m"].Decremented)
}

// Its MachineSet was lowered under a pause that has ended since, because the ledger was lost, or
// because a person had paused the MachineSet when another agent looked. Cluster API has made up for
// the replica, or the MachineDeployment was lowered, too. Lowering it now would take another
// Machine.
func TestAMachineSetThatWasLoweredUnderAnEarlierPauseIsNotLoweredFor(t *testing.T) {
	s := atRest(3, &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}).
		withMachine("m", "c", completed)
	s.Sets[0].Spec.Replicas = new(int32(1))
	s.Sets[0].Annotations = map[string]string{v1alpha1.ReleasedAnnotation: "m"}
	s.Sets = append(s.Sets, &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(2))},
	})
	d := Decide(s)
	assert.Equal(t, PauseKeep, d.Pause)
	assert.Equal(t, int32(3), d.Replicas)
	assert.True(t, d.Ledger.Releasing["m"].Decremented)
}

// Nothing that a person paused is deleted: a deletion cannot be undone, and a move of the Cluster
// loses it.
func TestReleasesWaitWhileTheGroupIsPaused(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 1, LastReplicas: 1}).withMachine("a", "c", node).withClaim("c", v1alpha1.PhaseReleasing, "a")
	group := s.Group
	s.Group = group.With(&eligibility.Refusal{Reason: eligibility.Paused})
	assert.Nil(t, Decide(s).Ledger)
	s.Ledger = releasingLedger(Release{Machine: "a", Claim: "c"})
	assert.Empty(t, kinds(Decide(s)), "also when the release had begun")
	s.Group = group
	assert.Equal(t, []ActionKind{BeginDelete}, kinds(Decide(s)))
}

func TestAReleaseWithoutRoomInTheLedgerIsExplained(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 1, LastReplicas: 1}).withMachine("a", "c", node).withClaim("c", v1alpha1.PhaseReleasing, "a")
	s.Deployment.Annotations = map[string]string{"example.com/large": strings.Repeat("x", 250<<10)}
	d := Decide(s)
	require.Equal(t, []ActionKind{Explain}, kinds(d))
	assert.Contains(t, d.Actions[0].Event.Message, "example.com/large")
}

// Until the pause of the MachineDeployment is observed, Cluster API may still write replicas to its
// MachineSets.
func TestAMachineSetIsLoweredOnceThePauseIsObserved(t *testing.T) {
	for _, observed := range []bool{false, true} {
		ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c", Set: "small-a"}}}
		s := atRest(2, ledger).withMachine("m", "c", completed)
		s.Sets[0].Spec.Replicas = new(int32(1))
		s.Sets = append(s.Sets, &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
		})
		pauseAsAgent(s.Deployment)
		if observed {
			s.Deployment.Status.Conditions = saysPaused
		}
		assert.Equal(t, observed, slices.Contains(kinds(Decide(s)), LowerSet))
	}
}

// Otherwise the entry would name a Machine that another claim may have by then.
func TestAMachineIsHandedOverOnceItsClaimsEntryIsDropped(t *testing.T) {
	for _, entered := range []bool{true, false} {
		ledger := &Ledger{Version: 1, Seq: 4, LastReplicas: 1}
		if entered {
			ledger.Pending = map[string]Assignment{"a": {Machine: "m", UID: "m"}}
		}
		s := atRest(1, ledger).withMachine("m", "a", booting).withClaim("a", v1alpha1.PhaseReleasing, "m")
		assert.Equal(t, !entered, slices.Contains(kinds(Decide(s)), Unbind))
	}
}

// A person may write any label. Only values that a claim may have as its id count.
func TestALabelThatNoClaimCanHaveIsNone(t *testing.T) {
	for value, want := range map[string]string{
		"a": "a", "a-1": "a-1", "7f6c": "7f6c", "": "", "A": "", "a_b": "", "a.b": "", "Test_1": "", "-a": "", "a-": "", "-": "",
		strings.Repeat("a", 63): strings.Repeat("a", 63), strings.Repeat("a", 64): "",
	} {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{v1alpha1.ClaimLabel: value}}}
		assert.Equal(t, want, ClaimOf(m), value)
	}
}

// A rollout without surge lowers the old MachineSet first, and raises the new one as Machines go.
// Cluster API charges a lowered MachineDeployment to what the new one does not have yet.
func TestARolloutThatMayNotSurgeHasItsOldMachineSetLowered(t *testing.T) {
	rollout := func(strategy clusterv1.MachineDeploymentRolloutStrategyType) *Snapshot {
		s := atRest(5, &Ledger{Version: 1, Seq: 4, Floor: 4, LastReplicas: 5, Releasing: map[types.UID]Release{"e": {Machine: "e", Claim: "e"}}})
		s.Deployment.Spec.Rollout.Strategy.Type = strategy
		s.Sets[0].Spec.Replicas, s.Sets[0].Annotations = new(int32(3)), map[string]string{clusterv1.RevisionAnnotation: "1"}
		s.Sets = append(s.Sets, &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{Name: "small-b", Annotations: map[string]string{clusterv1.RevisionAnnotation: "2"}},
			Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(0))},
		})
		for _, name := range []string{"a", "b"} {
			s.withMachine(name, "", deleting(clusterv1.MachineDeletingDrainingNodeReason))
		}
		return s.withMachine("c", "", node).withMachine("d", "", node).withMachine("e", "e", completed).withClaim("e", v1alpha1.PhaseReleasing, "e")
	}
	d := Decide(rollout(clusterv1.RollingUpdateMachineDeploymentStrategyType))
	assert.Equal(t, PauseSet, d.Pause)
	assert.Equal(t, int32(5), d.Replicas)
	assert.Equal(t, "small-a", d.Ledger.Releasing["e"].Set)

	d = Decide(rollout(clusterv1.OnDeleteMachineDeploymentStrategyType))
	assert.Equal(t, PauseKeep, d.Pause)
	assert.Equal(t, int32(4), d.Replicas)
}

// A lowering may have been for the Machine whose deletion Cluster API is about to report.
func TestAPausedReleaseWaitsForTheReportOfAnotherDeletion(t *testing.T) {
	releasing := map[types.UID]Release{"m": {Machine: "m", Claim: "c", Set: "small-a"}}
	s := atRest(3, &Ledger{Version: 1, Seq: 4, Floor: 2, LastReplicas: 3, Releasing: releasing}).
		withMachine("f", "", node).withMachine("x", "", deleting(clusterv1.MachineDeletingDrainingNodeReason)).
		withMachine("m", "c", completed).withMachine("n", "", node)
	s.Machines[3].OwnerReferences[0].Name = "small-b"
	s.Deployment.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
	s.Deployment.Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: "True"}}
	s.Sets[0].Spec.Replicas = new(int32(2))
	s.Sets = append(s.Sets, &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
	})
	x := s.Machines[1]
	reported := x.Status.Conditions
	x.Status.Conditions = nil
	begins := *s
	begins.Ledger, begins.Deployment = s.Ledger.Clone(), s.Deployment.DeepCopy()
	begins.Ledger.Releasing["m"] = Release{Machine: "m", Claim: "c"}
	begins.Deployment.Annotations, begins.Deployment.Status.Conditions = nil, nil
	assert.Equal(t, PauseKeep, Decide(&begins).Pause, "nothing is paused to wait")

	d := Decide(s)
	assert.Nil(t, d.Ledger)
	assert.Equal(t, PauseKeep, d.Pause)
	assert.Empty(t, kinds(d))

	x.Status.Conditions = reported
	assert.Equal(t, []ActionKind{LowerSet}, kinds(Decide(s)))
}
