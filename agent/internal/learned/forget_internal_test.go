package learned

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

// A shim may report any Nodes, and a hub may have many Clusters in the course of time.
func TestOnlyNodesOfMachinesAreKeptAndOnlyWhileTheClusterExists(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, clusterv1.AddToScheme(scheme))
	machine := &clusterv1.Machine{}
	machine.Namespace, machine.Name = "fleet", "a"
	machine.Spec.ClusterName, machine.Spec.ProviderID = "spoke", "test://a"
	n, err := New(Config{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(machine).
		WithIndex(machine, hub.ByCluster, func(client.Object) []string { return []string{"spoke"} }).Build()})
	require.NoError(t, err)
	spoke := types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	nodes := []Node{{ProviderID: "test://a", Unregistered: true}}
	for i := range 1000 {
		nodes = append(nodes, Node{ProviderID: fmt.Sprintf("test://invented-%d", i), Unregistered: true})
	}
	n.Report(t.Context(), spoke, nodes)
	require.Len(t, n.waiting[spoke], 1)
	require.Contains(t, n.waiting[spoke], "test://a")

	n.ForgetCluster(spoke)
	assert.Empty(t, n.waiting)
	assert.Empty(t, n.reportedAt)
	assert.Empty(t, n.strandedOf)
}
