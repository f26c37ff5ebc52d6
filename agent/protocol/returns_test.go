package protocol

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// returning is a group in which the user owns one of two Machines, and the claim of the other one
// returns it.
func returning() *Snapshot {
	s := atRest(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Floor: 1}).
		withMachine("mine", "", node).withMachine("b", "c", node).withClaim("c", v1alpha1.PhaseBound, "b")
	s.Claims[0].Status.Machine.NodeName = "node-b"
	s.Claims[0].Status.Returned = true
	return s
}

// recorded is the group after the first ledger write.
func recorded() *Snapshot {
	s := returning()
	s.Ledger = &Ledger{
		Version: 2, Seq: 5, LastReplicas: 2, Floor: 2, Returning: map[types.UID]Returned{"b": {Machine: "b", Claim: "c"}},
	}
	return s
}

func TestAReturnedMachineIsTheFloorsInOneLedgerWrite(t *testing.T) {
	s := returning()
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, map[types.UID]Returned{"b": {Machine: "b", Claim: "c"}}, d.Ledger.Returning)
	assert.Equal(t, 2, d.Ledger.Version, "an older agent leaves it alone")
	assert.Equal(t, int32(2), d.Replicas)
	assert.Equal(t, int32(0), d.Ledger.Spare)
	assert.True(t, d.Urgent)
	assert.Empty(t, d.Actions, "nothing before that is written")
}

func TestTheLabelComesOffOnceTheLedgerHasTheReturn(t *testing.T) {
	s := recorded()
	d := Decide(s)
	assert.Nil(t, d.Ledger, "the floor is raised once")
	assert.Equal(t, []ActionKind{Return}, kinds(d))
	assert.Equal(t, int32(2), d.Replicas)
	assert.Zero(t, d.Claimed, "it may be lowered without harm to a claim")

	s = unlabelled()
	d = Decide(s)
	assert.Nil(t, d.Ledger, "the record stays until the claim has ended")
	assert.Zero(t, d.Claimed)
	require.Equal(t, []ActionKind{End}, kinds(d))
	assert.Equal(t, ReasonReturned, d.Actions[0].Event.Reason)

	s = unlabelled()
	s.Claims = nil // lists leave out ended claims
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Empty(t, d.Ledger.Returning)
	assert.Equal(t, 1, d.Ledger.Version)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Empty(t, d.Actions)
}

// A person may lower replicas by the Machine that was returned, whatever has happened to its claim
// meanwhile.
func TestAReturnedMachineCountsForNoClaim(t *testing.T) {
	for name, lose := range map[string]func(*Snapshot){
		"nothing":           func(*Snapshot) {},
		"the claim":         func(s *Snapshot) { s.Claims = nil },
		"the claim's state": func(s *Snapshot) { s.Claims[0].Status = v1alpha1.MachineClaimStatus{} },
	} {
		t.Run("lost: "+name, func(t *testing.T) {
			s := recorded()
			lose(s)
			assert.Zero(t, Decide(s).Claimed)
		})
	}
}

// unlabelled is the group once the label has come off.
func unlabelled() *Snapshot {
	s := recorded()
	s.Machines[1].Labels = nil
	s.Machines[1].Annotations = map[string]string{v1alpha1.FloorAnnotation: v1alpha1.FloorReturned}
	return s
}

// A user who has no more than the min size keeps that many, and gains one.
func TestAReturnedMachineIsBeyondTheMinSize(t *testing.T) {
	s := returning()
	s.Ledger.Floor, s.Ledger.Min, s.Group.Min = 0, 1, 1
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, int32(2), d.Replicas)
	assert.False(t, d.HasSpare)
}

// Replicas that the max size left no room for are not the user's.
func TestAReturnedMachineFillsTheMinSize(t *testing.T) {
	s := returning()
	s.Ledger.Min, s.Group.Min, s.Group.Max = 2, 2, new(int32(2))
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, int32(2), d.Replicas)
}

func TestAReturnedMachineIsPromisedToNobody(t *testing.T) {
	s := recorded()
	s.Machines[1].Status.NodeRef = clusterv1.MachineNodeReference{} // so that a claim might have it
	s.Machines[1].Spec.ProviderID = ""
	s.withClaim("next", v1alpha1.PhasePending, "")
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, Assignment{}, d.Ledger.Pending["next"])
	assert.Equal(t, int32(3), d.Replicas)
}

func TestAReturnWaits(t *testing.T) {
	for name, change := range map[string]func(*Snapshot){
		"while the group is paused": func(s *Snapshot) {
			s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.Paused})
		},
		"while the group is frozen": func(s *Snapshot) {
			s.Ledger.Lowered = true
			s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.ReplicasLowered})
		},
		"until the claim's label is on": func(s *Snapshot) {
			s.Machines[1].Labels = nil
			s.Ledger.Pending = map[string]Assignment{"c": {Machine: "b", UID: "b"}}
		},
		"without room in the ledger": func(s *Snapshot) { s.LedgerBudget = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			s := returning()
			change(s)
			d := Decide(s)
			if d.Ledger != nil {
				assert.Empty(t, d.Ledger.Returning)
				assert.Equal(t, int32(1), d.Ledger.Floor)
			}
			assert.NotContains(t, kinds(d), Return)
			assert.NotContains(t, kinds(d), End)
		})
	}
}

// If another actor deletes the Machine in the meantime, its replacement is the user's.
func TestAReturnedMachineThatIsDeletedCountsOnce(t *testing.T) {
	s := recorded()
	s.Machines[1].DeletionTimestamp = &metav1.Time{Time: s.Now}
	d := Decide(s)
	assert.Equal(t, int32(2), d.Replicas)
	assert.Nil(t, d.Ledger)

	for _, s := range []*Snapshot{recorded(), unlabelled()} {
		s.Machines = s.Machines[:1]
		d = Decide(s)
		require.Equal(t, []ActionKind{End}, kinds(d))
		assert.Equal(t, ReasonReturned, d.Actions[0].Event.Reason)
		assert.Nil(t, d.Ledger)
		assert.Zero(t, d.Claimed)
		assert.Equal(t, int32(2), d.Replicas)
	}

	s = unlabelled()
	s.Machines[1].DeletionTimestamp = &metav1.Time{Time: s.Now}
	assert.Equal(t, []ActionKind{End}, kinds(Decide(s)))
}

// The record of a Machine that is gone does not displace another Machine that is marked as the
// floor's.
func TestAReturnedMachineThatIsGoneTakesNoPlaceOfTheFloor(t *testing.T) {
	s := recorded()
	s.Machines = s.Machines[:1]
	s.withMachine("new", "", node)
	for _, m := range s.Machines {
		m.Annotations = map[string]string{v1alpha1.FloorAnnotation: "true"}
	}
	b := s.open()
	assert.Equal(t, ofFloor, b.class(s.Machines[0]))
	assert.Equal(t, ofFloor, b.class(s.Machines[1]))
}

// The holder was promised that its Machine stays. If the floor has fewer Machines than there are
// marks, an older one goes.
func TestAReturnedMachineStaysBeforeOlderOnesOfTheFloor(t *testing.T) {
	s := atRest(3, &Ledger{Version: 1, Seq: 4, LastReplicas: 3, Floor: 2}).
		withMachine("y1", "", node).withMachine("y2", "", node).withMachine("c", "", node)
	s.SpareSince = s.Now.Add(-time.Hour)
	for i, value := range []string{"true", "true", v1alpha1.FloorReturned} {
		s.Machines[i].CreationTimestamp = metav1.NewTime(s.Now.Add(time.Duration(i-9) * time.Hour))
		s.Machines[i].Annotations = map[string]string{v1alpha1.FloorAnnotation: value}
	}
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, []types.UID{"y2"}, slices.Collect(maps.Keys(d.Ledger.Releasing)))
}

// Replicas of failed Machines that are kept are not the user's.
func TestAReturnCountsEveryOtherReplica(t *testing.T) {
	s := returning()
	s.withMachine("failed", "f", node).withClaim("f", v1alpha1.PhaseReleasing, "failed")
	s.Claims[1].Status.FailedAt = &metav1.Time{Time: s.Now}
	s.Group.KeepFailed, s.Group.Replicas, s.Ledger.LastReplicas = 1, 3, 3
	s.Ledger.Min, s.Group.Min, s.Group.Max = 3, 3, new(int32(3))
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
}

// The claim's object is lost while the ledger's record exists: it is not recreated.
func TestTheClaimOfAReturnedMachineIsNotRecreated(t *testing.T) {
	s := recorded()
	s.Claims, s.Lost = nil, map[string]*clusterv1.Machine{"c": s.Machines[1]}
	assert.Equal(t, []ActionKind{Return}, kinds(Decide(s)))
}

// movedOn is the group after a move to another hub, with new UIDs everywhere and no status.
func movedOn(s *Snapshot) *Snapshot {
	s.Deployment.UID, s.Ledger.UID, s.Synced = "new", "old", true
	s.ClusterUID = "new"
	s.Machines[1].UID = "b2"
	s.Claims[0].Spec.ClusterUID, s.Claims[0].Status = "old", v1alpha1.MachineClaimStatus{}
	return s
}

func TestAReturnGoesOnAfterAMove(t *testing.T) {
	d := Decide(movedOn(recorded()))
	require.Equal(t, []ActionKind{Restore}, kinds(d))
	assert.True(t, d.Actions[0].Returned)

	s := movedOn(recorded())
	s.Claims[0].Status = v1alpha1.MachineClaimStatus{
		Phase: v1alpha1.PhaseBound, Returned: true, Machine: &v1alpha1.MachineReference{Name: "b", UID: "b2"},
	}
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, map[types.UID]Returned{"b2": {Machine: "b", Claim: "c"}}, d.Ledger.Returning)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, []ActionKind{Return}, kinds(d))

	d = Decide(movedOn(unlabelled()))
	require.Equal(t, []ActionKind{End}, kinds(d), "the ledger knows what has become of it")
	assert.Equal(t, ReasonReturned, d.Actions[0].Event.Reason)
}

// The claim's owner is about to go, and no live set decides about it.
func TestAReturnWaitsForNoLiveSetAfterAMove(t *testing.T) {
	s := movedOn(recorded())
	s.Synced = false
	s.Claims[0].Spec.Spoke = "spoke"
	s.Claims[0].Status = v1alpha1.MachineClaimStatus{
		Phase: v1alpha1.PhaseBound, Returned: true, Machine: &v1alpha1.MachineReference{Name: "b", UID: "b2"},
	}
	d := Decide(s)
	assert.False(t, d.Held)
	assert.Equal(t, []ActionKind{Return}, kinds(d))
}

// A release that is requested while the claim's status is lost takes nothing from the user.
func TestAReturnedMachineIsNotReleased(t *testing.T) {
	for _, s := range []*Snapshot{recorded(), unlabelled()} {
		s.Claims[0].Status.Phase, s.Claims[0].Status.Returned = v1alpha1.PhaseReleasing, false
		d := Decide(s)
		assert.Nil(t, d.Ledger)
		assert.Equal(t, int32(2), d.Replicas)
		assert.NotContains(t, kinds(d), BeginDelete)
		assert.Contains(t, []ActionKind{Return, End}, kinds(d)[0])
		if kinds(d)[0] == End {
			assert.Equal(t, ReasonReturned, d.Actions[0].Event.Reason)
		}
	}
}

// If another writer removes the label before the ledger records the return, the Machine is returned
// nevertheless.
func TestAMachineIsReturnedWithoutItsLabel(t *testing.T) {
	s := returning()
	s.Machines[1].Labels = nil
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, map[types.UID]Returned{"b": {Machine: "b", Claim: "c"}}, d.Ledger.Returning)
	assert.NotContains(t, kinds(d), End)

	// The record was lost after the Machine got its mark: the floor has it already.
	s = returning()
	s.Ledger.Floor, s.Machines[1].Labels, s.Machines[1].Annotations = 2, nil, unlabelled().Machines[1].Annotations
	d = Decide(s)
	assert.Nil(t, d.Ledger)
	assert.Equal(t, []ActionKind{End}, kinds(d))
}

func TestAMachineThatIsBeingReturnedIsNotAdopted(t *testing.T) {
	s := unlabelled().withClaim("next", v1alpha1.PhasePending, "")
	s.Claims[1].Spec.Adopt = "b"
	assert.Equal(t, eligibility.NotAdoptable, Decide(s).Refused["next"].Reason)
}

// The mark shows which Machine a person or the cluster-autoscaler is about to remove.
func TestAMachineThatIsToBeRemovedIsAdoptedOnlyByAClaimThatNeedsIt(t *testing.T) {
	for _, spare := range []bool{true, false} {
		s := atRest(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Floor: 1}).withMachine("m", "", node).withClaim("c", v1alpha1.PhasePending, "")
		s.Machines[0].Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: ""}
		s.Claims[0].Spec.Adopt, s.Claims[0].Spec.AdoptAboveMinSize = "m", spare
		_, refused := Decide(s).Refused["c"]
		assert.Equal(t, spare, refused)
	}
}

func TestAMachineOfAGroupThatIsGoneIsReturnedWithoutALedger(t *testing.T) {
	s := returning()
	s.Ledger = nil
	d := DecideGone(s)
	assert.Equal(t, []ActionKind{Return}, kinds(d))
	s = returning()
	s.Ledger = nil
	delete(s.Machines[1].Labels, v1alpha1.ClaimLabel)
	assert.Equal(t, []ActionKind{End}, kinds(DecideGone(s)))
	s = returning()
	s.Ledger, s.Machines[1].DeletionTimestamp = nil, &metav1.Time{Time: s.Now}
	assert.Empty(t, kinds(DecideGone(s)), "it goes with the group")
}

// The ledger was wiped after its write and before the label came off. The floor is what the claims
// do not explain, and the return begins again.
func TestAReturnAfterTheLedgerWasWipedRaisesTheFloorOnce(t *testing.T) {
	s := returning()
	s.Ledger = nil
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, int32(2), d.Replicas)

	s = returning()
	s.Ledger = nil
	delete(s.Machines[1].Labels, v1alpha1.ClaimLabel)
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor+int32(len(d.Ledger.Pending)), "each replica counts once")
}
