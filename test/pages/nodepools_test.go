package pages_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// publishNodePools follows the page in a hub and a spoke whose agent and shim have the option, from
// the first NodePoolSet to its removal.
func publishNodePools(
	ctx context.Context, t *testing.T, page pages.Page, hub, spoke *server, do func(string) string, agent, shim *process,
) {
	t.Helper()
	steps := page.Steps("A NodePoolSet")
	require.Len(t, steps, 2)
	do(steps[0])
	shown := do(steps[1])
	require.Regexp(t, `(?m)^general +1 +1 +0 `, shown, "one Cluster has everything")
	for _, kind := range []string{"NodePool", "ClusterAPINodeClass"} {
		require.Contains(t, shown, kind, "describe shows what is published")
	}
	pools := list(ctx, t, spoke.client, nodePoolKind)
	require.Len(t, pools, 1)
	require.Equal(t, "general", pools[0].GetLabels()["karpenter.cluster.x-k8s.io/published-by"])

	require.NoError(t, await(ctx, func() error {
		production := &unstructured.Unstructured{}
		production.SetGroupVersionKind(spokeKind)
		require.NoError(t, hub.client.Get(ctx, client.ObjectKey{Namespace: "team-a", Name: "production"}, production))
		if status := fmt.Sprint(production.Object["status"]); !strings.Contains(status, "nodePools:") {
			return errors.New("the Spoke shows no NodePools: " + status)
		}
		return nil
	}, agent, shim))
	status := page.Steps("The status in the hub")
	require.Len(t, status, 1)
	shown = do(status[0])
	for _, line := range []string{"  nodePools:\n", "    set: general\n", "  published:\n", "    kind: NodePool\n"} {
		require.Contains(t, shown, line)
	}

	removal := page.Steps("In the spoke")
	require.Len(t, removal, 1)
	do(removal[0])
	require.Empty(t, list(ctx, t, spoke.client, nodePoolKind))
	require.Empty(t, list(ctx, t, spoke.client, nodeClassKind))
}
