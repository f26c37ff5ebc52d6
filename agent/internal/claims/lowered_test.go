package claims

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// claimedGroup is a group with a floor of running Machines and that many bound claims, whose replicas another writer has set.
func claimedGroup(floor, claims, replicas int32) *snapshot {
	s := scene(replicas, &Ledger{Version: 1, Seq: 1, Floor: floor, LastReplicas: floor + claims})
	for i := range floor {
		s.withMachine("f"+strconv.Itoa(int(i)), "", node)
	}
	for i := range claims {
		id, name := "c"+strconv.Itoa(int(i)), "m"+strconv.Itoa(int(i))
		s.withMachine(name, id, node).withClaim(id, v1alpha1.PhaseBound, name)
		s.claims[i].Status.Machine.NodeName = "node-" + name
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
		s.spareSince = s.now.Add(-time.Hour)
		s.md.ManagedFields = []metav1.ManagedFieldsEntry{
			managedBy(string(fieldOwner), s.now, `{"f:spec":{"f:replicas":{}}}`),
			managedBy("kubectl", s.now.Add(-time.Hour), `{"f:spec":{"f:replicas":{}}}`),
			managedBy("argocd-controller", s.now.Add(-time.Minute), `{"f:spec":{"f:replicas":{},"f:template":{}}}`),
			managedBy("manager", s.now, `{"f:status":{"f:replicas":{}}}`),
		}
		d := decide(s)
		require.NotNil(t, d.ledger)
		assert.True(t, d.ledger.Lowered)
		assert.Equal(t, replicas, d.replicas, "nothing is raised back")
		assert.Equal(t, int32(3), d.ledger.Floor, "the floor is not recomputed")
		assert.Empty(t, d.ledger.Releasing, "nothing is removed")
		assert.Contains(t, d.lowered, "argocd-controller", "the writer is named")
		assert.Contains(t, d.lowered, v1alpha1.ReplicasLoweredAnnotation, "and what to do")
		assert.True(t, d.urgent)
	}
}

func TestOneWriteAtOrAboveWhatIsClaimedMovesTheFloor(t *testing.T) {
	for replicas, floor := range map[int32]int32{10: 0, 11: 1, 12: 2, 13: 3, 15: 5} {
		d := decide(claimedGroup(3, 10, replicas))
		if replicas == 13 {
			assert.Nil(t, d.ledger)
			continue
		}
		require.NotNil(t, d.ledger)
		assert.False(t, d.ledger.Lowered)
		assert.Equal(t, floor, d.ledger.Floor, "replicas set to %d", replicas)
		assert.Equal(t, replicas, d.replicas)
	}
}

// frozen is the same group later: the annotation is on, and Cluster API has removed Machines of its choice.
func frozen(floor, claims, replicas int32) *snapshot {
	s := claimedGroup(floor, claims, replicas)
	s.ledger.Lowered = true
	s.spareSince = s.now.Add(-time.Hour)
	s.group.Refusals = []eligibility.Refusal{{Reason: eligibility.ReplicasLowered, Message: "frozen"}}
	return s
}

func TestAFrozenGroupChangesNothingOfItsOwn(t *testing.T) {
	for _, replicas := range []int32{0, 3, 9, 13, 20} {
		s := frozen(3, 10, replicas).withClaim("new", "", "")
		d := decide(s)
		assert.Nil(t, d.ledger, "replicas set to %d", replicas)
		assert.Equal(t, eligibility.ReplicasLowered, d.refused["new"].Reason)
	}
}

func TestAFrozenGroupStillReleasesClaims(t *testing.T) {
	s := frozen(3, 10, 3)
	s.claims[0].Status.Phase = v1alpha1.PhaseReleasing
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.Equal(t, map[types.UID]Release{"m0": {Machine: "m0", Claim: "c0"}}, d.ledger.Releasing)
	assert.Equal(t, int32(3), d.ledger.Floor)
	assert.True(t, d.ledger.Lowered)
}

func TestWhenAPersonClearsItTheUserHasTheFloorThatTheUserHad(t *testing.T) {
	s := frozen(3, 2, 3) // eight of ten claimed Machines went, and their claims have ended
	s.ledger.LastReplicas = 13
	s.group.Refusals = nil
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.False(t, d.ledger.Lowered)
	assert.Equal(t, int32(3), d.ledger.Floor)
	assert.Equal(t, int32(5), d.replicas, "the floor and the two claims that are left")
	assert.Empty(t, d.ledger.Releasing)
}

// The writer may replace the whole object, and the ledger with it.
func TestReplicasLoweredTogetherWithALostLedgerFreezeTheGroupAsWell(t *testing.T) {
	s := claimedGroup(0, 10, 3)
	s.ledger = nil
	d := decide(s)
	require.NotNil(t, d.ledger)
	assert.True(t, d.ledger.Lowered)
	assert.Equal(t, int32(3), d.replicas)
}

// On an API server: the annotation and the ledger are one write, the event is a Warning, and taking the annotation off ends it.
func TestAFrozenGroupSaysSoAndEndsWhenTheAnnotationGoes(t *testing.T) {
	md := groupOf("small", 3, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":3,"lastReplicas":4,"spare":0}`,
	})
	*md.Spec.Replicas = 0
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", Holder: "karpenter", NodeGroup: "small"},
		Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseBound, Machine: &v1alpha1.MachineReference{Name: "m", UID: "m"},
		},
	}
	m := machineOf("m")
	m.Labels[v1alpha1.ClaimLabel] = "a"
	e := engineWith(t, md, claim, m)
	recorder := events.NewFakeRecorder(8)
	e.Recorder = recorder

	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)

	key := types.NamespacedName{Namespace: namespace, Name: "small"}
	stored := &clusterv1.MachineDeployment{}
	require.NoError(t, e.Reader.Get(t.Context(), key, stored))
	assert.Contains(t, stored.Annotations[v1alpha1.ReplicasLoweredAnnotation], "spec.replicas to 0")
	assert.Equal(t, int32(0), *stored.Spec.Replicas)
	assert.Contains(t, <-recorder.Events, "Warning "+ReasonReplicasLowered)
	refusal, err := e.refusal(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "b"},
		&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}}, stored)
	require.NoError(t, err)
	require.NotNil(t, refusal)
	assert.Equal(t, eligibility.ReplicasLowered, refusal.Reason)

	before := stored.DeepCopy()
	delete(stored.Annotations, v1alpha1.ReplicasLoweredAnnotation)
	require.NoError(t, e.Client.Patch(t.Context(), stored, client.MergeFrom(before)))
	_, err = e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NoError(t, e.Reader.Get(t.Context(), key, stored))
	assert.Equal(t, int32(4), *stored.Spec.Replicas)
}
