package protocol

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// claimedGroup is a group with a floor of running Machines and the given number of bound claims,
// whose replicas another writer has set.
func claimedGroup(floor, claims, replicas int32) *Snapshot {
	s := atRest(replicas, &Ledger{Version: 1, Seq: 1, Floor: floor, LastReplicas: floor + claims})
	for i := range floor {
		s.withMachine("f"+strconv.Itoa(int(i)), "", node)
	}
	for i := range claims {
		id, name := "c"+strconv.Itoa(int(i)), "m"+strconv.Itoa(int(i))
		s.withMachine(name, id, node).withClaim(id, v1alpha1.PhaseBound, name)
		s.Claims[i].Status.Machine.NodeName = "node-" + name
	}
	return s
}

func managedBy(manager string, at time.Time, fields string) metav1.ManagedFieldsEntry {
	return metav1.ManagedFieldsEntry{
		Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, Time: &metav1.Time{Time: at},
		FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
	}
}

func TestReplicasLoweredBelowWhatIsClaimedFreezeTheGroup(t *testing.T) {
	for _, replicas := range []int32{0, 3, 9} {
		s := claimedGroup(3, 10, replicas)
		s.SpareSince = s.Now.Add(-time.Hour)
		s.Deployment.ManagedFields = []metav1.ManagedFieldsEntry{
			managedBy(v1alpha1.FieldManager, s.Now, `{"f:spec":{"f:replicas":{}}}`),
			managedBy("kubectl", s.Now.Add(-time.Hour), `{"f:spec":{"f:replicas":{}}}`),
			managedBy("argocd-controller", s.Now.Add(-time.Minute), `{"f:spec":{"f:replicas":{},"f:template":{}}}`),
			managedBy("manager", s.Now, `{"f:status":{"f:replicas":{}}}`),
		}
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.True(t, d.Ledger.Lowered)
		assert.Equal(t, replicas, d.Replicas, "nothing is raised back")
		assert.Equal(t, int32(3), d.Ledger.Floor, "the floor is not recomputed")
		assert.Empty(t, d.Ledger.Releasing, "nothing is removed")
		assert.Contains(t, d.Lowered, "argocd-controller", "the writer is named")
		assert.Contains(t, d.Lowered, v1alpha1.ReplicasLoweredAnnotation, "and what to do")
		assert.True(t, d.Urgent)
	}
}

func TestOneWriteAtOrAboveWhatIsClaimedMovesTheFloor(t *testing.T) {
	for replicas, floor := range map[int32]int32{10: 0, 11: 1, 12: 2, 13: 3, 15: 5} {
		d := Decide(claimedGroup(3, 10, replicas))
		if replicas == 13 {
			assert.Nil(t, d.Ledger)
			continue
		}
		require.NotNil(t, d.Ledger)
		assert.False(t, d.Ledger.Lowered)
		assert.Equal(t, floor, d.Ledger.Floor, "replicas set to %d", replicas)
		assert.Equal(t, replicas, d.Replicas)
	}
}

// frozen is the same group later: the annotation is set, and Cluster API has removed Machines of
// its choice.
func frozen(floor, claims, replicas int32) *Snapshot {
	s := claimedGroup(floor, claims, replicas)
	s.Ledger.Lowered = true
	s.SpareSince = s.Now.Add(-time.Hour)
	s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.ReplicasLowered, Message: "frozen"}}
	return s
}

func TestAFrozenGroupChangesNothingOfItsOwn(t *testing.T) {
	for _, replicas := range []int32{0, 3, 9, 13, 20} {
		s := frozen(3, 10, replicas).withClaim("new", "", "")
		d := Decide(s)
		assert.Nil(t, d.Ledger, "replicas set to %d", replicas)
		assert.Equal(t, eligibility.ReplicasLowered, d.Refused["new"].Reason)
	}
}

func TestAFrozenGroupStillReleasesClaims(t *testing.T) {
	s := frozen(3, 10, 3)
	s.Claims[0].Status.Phase = v1alpha1.PhaseReleasing
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, map[types.UID]Release{"m0": {Machine: "m0", Claim: "c0"}}, d.Ledger.Releasing)
	assert.Equal(t, int32(3), d.Ledger.Floor)
	assert.True(t, d.Ledger.Lowered)
}

func TestWhenAPersonClearsItTheUserHasTheFloorThatTheUserHad(t *testing.T) {
	s := frozen(3, 2, 3) // eight of ten claimed Machines are gone, and their claims have ended
	s.Ledger.LastReplicas = 13
	s.Group.Refusals = nil
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.False(t, d.Ledger.Lowered)
	assert.Equal(t, int32(3), d.Ledger.Floor)
	assert.Equal(t, int32(5), d.Replicas, "the floor and the two claims that are left")
	assert.Empty(t, d.Ledger.Releasing)
}

// The writer may replace the whole object, including the ledger.
func TestReplicasLoweredTogetherWithALostLedgerFreezeTheGroupAsWell(t *testing.T) {
	s := claimedGroup(0, 10, 3)
	s.Ledger = nil
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.True(t, d.Ledger.Lowered)
	assert.Equal(t, int32(3), d.Replicas)
}

// syncs is a tool that sets replicas to its number at the given time. It returns the decision that
// follows.
func syncs(t *testing.T, s *Snapshot, at time.Time, replicas int32) *Decision {
	t.Helper()
	s.Now, s.Group.Replicas = at, replicas
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	s.Ledger, s.Group.Replicas = d.Ledger, d.Replicas
	return d
}

// Each time, Cluster API would remove a Machine of its own choice, and the floor would become
// smaller or larger.
func TestANumberThatIsRestoredTwiceFreezesTheGroup(t *testing.T) {
	for name, by := range map[string]int32{"lowered again": 1, "raised again": -1} {
		t.Run(name, func(t *testing.T) {
			s := claimedGroup(5, 3, 8)
			s.Ledger.Written = &Written{Replicas: 8}
			s.Deployment.ManagedFields = []metav1.ManagedFieldsEntry{managedBy("argocd-controller", s.Now, `{"f:spec":{"f:replicas":{}}}`)}
			at := s.Now
			agent := func() { // served a claim, or released one
				s.Ledger = s.Ledger.Clone()
				s.Ledger.LastReplicas += by
				if by < 0 {
					s.Claims, s.Machines = s.Claims[:len(s.Claims)-1], s.Machines[:len(s.Machines)-1]
					return
				}
				id := "c" + strconv.Itoa(len(s.Claims))
				s.withMachine("of-"+id, id, node).withClaim(id, v1alpha1.PhaseBound, "of-"+id)
			}
			agent()
			first := syncs(t, s, at.Add(time.Minute), 8)
			assert.Empty(t, first.Lowered)
			assert.Equal(t, 5-by, first.Ledger.Floor, "one write moves the floor")
			agent()
			second := syncs(t, s, at.Add(5*time.Minute), 8)
			assert.True(t, second.Ledger.Lowered)
			assert.Equal(t, ReasonReplicasRestored, second.LoweredReason)
			assert.Contains(t, second.Lowered, `field manager "argocd-controller" keeps setting spec.replicas to 8`)
			assert.Equal(t, int32(8), second.Replicas, "nothing is raised back")
			assert.Equal(t, 5-by, second.Ledger.Floor, "the floor stays as it was")

			s.Group = s.Group.With(nil)
			cleared := syncs(t, s, at.Add(time.Hour), 8) // the annotation has been removed
			assert.False(t, cleared.Ledger.Lowered)
			assert.Equal(t, &Written{Replicas: 8}, cleared.Ledger.Written)
			assert.Equal(t, 5-by, cleared.Ledger.Floor)
		})
	}
}

func TestAPersonMayScaleAsOftenAsTheyLike(t *testing.T) {
	for name, numbers := range map[string][]int32{
		"to other numbers":              {9, 10, 9, 10, 8, 9},
		"to one number, and again":      {9, 9},
		"to the number it began with":   {8},
		"to one number, now and then":   {9, 9, 0, 9, 0, 9, 0, 9},
		"to one number, with others in": {9, 9, 10, 9, 9},
	} {
		t.Run(name, func(t *testing.T) {
			s := claimedGroup(5, 3, 8)
			s.Ledger.Written = &Written{Replicas: 8}
			at := s.Now
			for _, n := range numbers {
				if n == 0 {
					at = at.Add(restoredWithin)
					continue
				}
				s.Ledger = s.Ledger.Clone()
				s.Ledger.LastReplicas = n - 1 // the agent's, for a claim that came and went
				at = at.Add(time.Minute)
				assert.Empty(t, syncs(t, s, at, n).Lowered, "%d", n)
			}
		})
	}
}

func TestWhatIsNoToolsDoingFreezesNoGroup(t *testing.T) {
	for name, change := range map[string]func(*Snapshot){
		"a topology":                    func(s *Snapshot) { s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.ReplicasOwned}) },
		"a group that is none any more": func(s *Snapshot) { s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.NotMember}) },
		"a number below the min size":   func(s *Snapshot) { s.Group.Min = 9 },
		"a clock that was far ahead": func(s *Snapshot) {
			s.Ledger.Written = &Written{Replicas: 8, Restored: 1, Since: s.Now.Add(24 * time.Hour).Unix()}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := claimedGroup(5, 3, 8)
			s.Ledger.Written = &Written{Replicas: 8, Restored: 1, Since: s.Now.Unix()}
			s.Ledger.LastReplicas = 9
			change(s)
			d := Decide(s)
			require.NotNil(t, d.Ledger)
			assert.False(t, d.Ledger.Lowered)
		})
	}
}

// A ledger of an older agent records no number yet.
func TestTheFirstNumberThatIsSeenIsTheOneThatIsKept(t *testing.T) {
	s := claimedGroup(5, 3, 8)
	s.Ledger.LastReplicas = 9
	assert.Equal(t, &Written{Replicas: 8}, syncs(t, s, s.Now, 8).Ledger.Written)
}

func TestWhatIsClaimed(t *testing.T) {
	s := claimedGroup(2, 3, 6)
	s.Ledger.Pending = map[string]Assignment{"waits": {}}
	s.withClaim("waits", v1alpha1.PhasePending, "").withClaim("new", "", "") // the latter is entered now
	s.withClaim("ends", v1alpha1.PhaseReleasing, "m-ends").withMachine("m-ends", "ends", node)
	s.withMachine("m-lost", "lost", node) // a move left its claim's object behind
	s.withClaim("bare", "", "").withMachine("m-bare", "bare", node)
	assert.Equal(t, int32(3+1+1+1+1), Decide(s).Claimed)
}

// A copied MachineDeployment has the annotations of the original.
func TestANumberOfClaimsThatIsAnothersIsReplaced(t *testing.T) {
	s := atRest(2, nil)
	assert.Nil(t, Decide(s).Ledger, "a ledger is not begun by being looked at")
	s.Deployment.Annotations = map[string]string{v1alpha1.ClaimedAnnotation: "5"}
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Zero(t, d.Claimed)
	assert.Equal(t, int32(2), d.Ledger.Floor)
	s.Group = s.Group.With(&eligibility.Refusal{Reason: eligibility.NotMember})
	assert.Nil(t, Decide(s).Ledger, "nothing is written to what is no node group")
}
