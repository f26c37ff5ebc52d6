package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
