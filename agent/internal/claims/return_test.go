package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

func TestOnlyAClaimWithAMachineIsReturned(t *testing.T) {
	key := func(id string) Key { return Key{Namespace: namespace, Cluster: clusterName, ID: id} }
	claim := func(phase v1alpha1.Phase) *v1alpha1.MachineClaim {
		return &v1alpha1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: key("a").object().Name},
			Spec:       v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", NodeGroup: "group", Holder: "spoke"},
			Status:     v1alpha1.MachineClaimStatus{Phase: phase},
		}
	}
	for phase, refused := range map[v1alpha1.Phase]string{
		v1alpha1.PhasePending:   "no Machine yet",
		v1alpha1.PhaseReleasing: "being released",
		v1alpha1.PhaseBound:     "",
		v1alpha1.PhaseEnded:     "",
	} {
		t.Run(string(phase), func(t *testing.T) {
			e := engineWith(t, groupOf("group", 1, nil), claim(phase))
			c, err := e.Return(t.Context(), key("a"), nil, "")
			stored, getErr := e.Get(t.Context(), key("a"))
			require.NoError(t, getErr)
			if refused != "" {
				var is *NotReturnableError
				require.ErrorAs(t, err, &is)
				require.ErrorContains(t, err, refused)
				assert.False(t, stored.Status.Returned)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, "a", c.Spec.ClaimID)
			assert.Equal(t, phase == v1alpha1.PhaseBound, stored.Status.Returned, "what has ended stays as it is")
		})
	}
	_, err := engineWith(t, groupOf("group", 1, nil)).Return(t.Context(), key("b"), nil, "")
	require.ErrorIs(t, err, ErrNotFound)
}

func TestAMachineThatIsBeingDeletedIsNotReturned(t *testing.T) {
	m := joining("m", "a")
	m.DeletionTimestamp, m.Finalizers = &metav1.Time{Time: newTestTime()}, []string{"example.com/held"}
	e := quiet(engineWith(t, groupOf("small", 1, nil), m, boundTo(m, "a", holder)))
	_, err := e.Return(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"}, nil, "")
	var is *NotReturnableError
	require.ErrorAs(t, err, &is)
	assert.False(t, claimNamed(t, e, "a").Status.Returned)
}

// The claim's owner is about to go, and ends the claim by that. Nothing is left to collect or to
// report.
func TestALiveSetLeavesAClaimAloneThatReturnsItsMachine(t *testing.T) {
	for _, registered := range []bool{false, true} {
		e, sync := syncing(t, func(id string, c *v1alpha1.MachineClaim) {
			c.Status.Returned = id == "a"
			if registered {
				c.Status.NodeRegisteredAt = &metav1.Time{Time: newTestTime()}
			}
		}, spoke, spoke)
		result, err := sync(SyncRequest{Spoke: spoke, LiveIDs: []string{"b"}})
		require.NoError(t, err)
		assert.Empty(t, result.Collected)
		assert.Empty(t, result.Kept)
		assert.Equal(t, v1alpha1.PhaseBound, claimNamed(t, e, "a").Status.Phase)
	}
}

// Another provider that is gone marked the Machine, or a person who wanted it removed before it was
// claimed.
func TestAdoptedMachinesAreNotMarkedForRemoval(t *testing.T) {
	e, m := engineWithMachine(t)
	m.Annotations[clusterv1.DeleteMachineAnnotation] = "by-another-provider"
	require.NoError(t, e.Client.Update(t.Context(), m))
	require.NoError(t, e.label(t.Context(), &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClaimID: "a", Holder: holder}}, m))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.NotContains(t, m.Annotations, clusterv1.DeleteMachineAnnotation)
	assert.Equal(t, "a", m.Labels[v1alpha1.ClaimLabel])
}

// The id is that of a NodeClaim that runs on this Machine, and has no other id to try with.
func TestAClaimThatCannotAdoptLeavesItsID(t *testing.T) {
	sizes := map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "1", clusterv1.AutoscalerMaxSizeAnnotation: "1"}
	m := joining("m", "")
	c := boundTo(m, "a", holder)
	c.Spec.Adopt, c.Status = "m", v1alpha1.MachineClaimStatus{}
	e := engineWith(t, groupOf("small", 1, sizes), m, c)
	e.spawn = func(run func()) { run() }
	stored := claimNamed(t, e, "a")
	_, err := e.enterOrMoveOn(t.Context(), stored)
	var full *NoRoomError
	require.ErrorAs(t, err, &full)
	_, err = e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.ErrorIs(t, err, ErrNotFound)

	md := groupOf("small", 1, nil)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(md), md))
	md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "0"
	require.NoError(t, e.Client.Update(t.Context(), md))
	_, err = e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "a", Holder: holder, Candidates: []string{"small"}, Adopt: "m",
	})
	require.NoError(t, err)
}
