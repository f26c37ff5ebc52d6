package protocol

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// returning is a group in which the user owns one of two Machines, and the other one's claim returns it.
func returning() *Snapshot {
	s := scene(2, &Ledger{Version: 1, Seq: 4, LastReplicas: 2, Floor: 1}).
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

	s = recorded()
	delete(s.Machines[1].Labels, v1alpha1.ClaimLabel)
	s.Machines[1].Annotations = map[string]string{v1alpha1.FloorAnnotation: "true"}
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Empty(t, d.Ledger.Returning)
	assert.Equal(t, 1, d.Ledger.Version)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	require.Equal(t, []ActionKind{End}, kinds(d))
	assert.Equal(t, ReasonReturned, d.Actions[0].Event.Reason)
}

// A user who has no more than the min size keeps it, and has one more than that.
func TestAReturnedMachineIsBeyondTheMinSize(t *testing.T) {
	s := returning()
	s.Ledger.Floor, s.Ledger.Min, s.Group.Min = 0, 1, 1
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, int32(2), d.Replicas)
	assert.False(t, d.Spare)
}

// What the max size left no room for, the user does not have.
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
	assert.Equal(t, Named{}, d.Ledger.Pending["next"])
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
			s.Ledger.Pending = map[string]Named{"c": {Machine: "b", UID: "b"}}
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

	s = recorded()
	s.Machines = s.Machines[:1]
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Empty(t, d.Ledger.Returning)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	assert.Equal(t, int32(2), d.Replicas)
}

// The claim's object is lost with the ledger's record in place: it is not made again.
func TestTheClaimOfAReturnedMachineIsNotRecreated(t *testing.T) {
	s := recorded()
	s.Claims, s.Lost = nil, map[string]*clusterv1.Machine{"c": s.Machines[1]}
	assert.Equal(t, []ActionKind{Return}, kinds(Decide(s)))
}

func TestAReturnIsFoundAgainAfterAMove(t *testing.T) {
	s := recorded()
	s.Deployment.UID, s.Ledger.UID, s.Synced = "new", "old", true
	s.Machines[1].UID = "b2"
	s.Claims[0].Status.Machine.UID = "b2"
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, map[types.UID]Returned{"b2": {Machine: "b", Claim: "c"}}, d.Ledger.Returning)
	assert.Equal(t, int32(2), d.Ledger.Floor)
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
}

// The ledger was wiped between its write and the end of the label: the floor is what the claims do not explain, and the return begins anew.
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
