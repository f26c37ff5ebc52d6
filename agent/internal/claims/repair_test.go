package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// skipsRemediation returns the value of the annotation that MachineHealthChecks heed.
func skipsRemediation(t *testing.T, e *Engine, machine string) string {
	t.Helper()
	m := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: machine}, m))
	return m.Annotations[clusterv1.MachineSkipRemediationAnnotation]
}

// A change of the holder's setting reaches the Machines of all its claims.
func TestMachinesFollowWhetherTheirHolderRepairs(t *testing.T) {
	e, round := syncing(t, nil, spoke)
	m := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: "a"}, m))
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.ClaimHolderAnnotation, holder)
	require.NoError(t, e.Client.Update(t.Context(), m))
	step := func() {
		t.Helper()
		_, err := e.group(namespace, "small").run(t.Context())
		require.NoError(t, err)
	}
	sync := func(repairs *bool) string {
		t.Helper()
		_, err := round(SyncRequest{Spoke: spoke, LiveIDs: []string{"a"}, HolderRepairs: repairs})
		require.NoError(t, err)
		step()
		return skipsRemediation(t, e, "a")
	}
	require.Empty(t, sync(nil))
	require.Equal(t, v1alpha1.Group, sync(new(true)))
	require.Equal(t, v1alpha1.Group, sync(nil), "a holder that does not know the field changes nothing")

	require.NoError(t, e.Client.Delete(t.Context(), claimNamed(t, e, "a")))
	require.True(t, claimNamed(t, e, "a").Spec.HolderRepairs, "the claim that is made again from its Machine")
	step()
	require.Equal(t, v1alpha1.Group, sync(nil))

	require.Empty(t, sync(new(false)))
}

// The next claim may have another holder, and the floor's Machines have none.
func TestTheMarkForMachineHealthChecksComesAndGoesWithTheClaim(t *testing.T) {
	for name, off := range map[string]func(*Engine, *v1alpha1.MachineClaim, *clusterv1.Machine) error{
		"hand-over": func(e *Engine, c *v1alpha1.MachineClaim, m *clusterv1.Machine) error {
			return e.do(t.Context(), protocol.Action{Kind: protocol.Unbind, Claim: c, Machine: m})
		},
		"return": func(e *Engine, c *v1alpha1.MachineClaim, m *clusterv1.Machine) error {
			return e.do(t.Context(), protocol.Action{Kind: protocol.Return, Claim: c, Machine: m})
		},
	} {
		t.Run(name, func(t *testing.T) {
			e, m := engineWithMachine(t)
			c := e.newClaim(Request{Namespace: namespace, Cluster: clusterName, ID: "c", Holder: holder, HolderRepairs: true}, &clusterv1.Cluster{}, "small")
			require.NoError(t, e.label(t.Context(), c, m))
			require.Equal(t, v1alpha1.Group, skipsRemediation(t, e, m.Name), "in the same write as the label")
			require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: m.Name}, m))
			require.NoError(t, off(e, c, m))
			assert.Empty(t, skipsRemediation(t, e, m.Name))
		})
	}
}
