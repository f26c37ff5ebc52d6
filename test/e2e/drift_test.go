package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// undisturbed is how long nothing may happen to Nodes that drift policies protect: three rounds of
// Karpenter's disruption, which looks for drifted Nodes every ten seconds.
const undisturbed = 30 * time.Second

// TestTheDriftPolicyDecidesWhatIsReplaced has two Nodes of a node group that the NodeClass no
// longer selects, and then two whose machine template has changed. Each time the policy first is to
// ignore that, and then to replace the Nodes.
func TestTheDriftPolicyDecidesWhatIsReplaced(t *testing.T) {
	figure := shows(t, "the drift policy of a NodeClass: Nodes stay with Ignore, and are replaced once with Replace")
	if testing.Short() {
		t.Skip("not in the short run: waits for what must not happen")
	}
	leaveAsFound(t)
	const (
		class, before, after = "drifting", "drifting-before", "drifting-after"

		pods  = 2
		color = "fleet.example.com/color"
	)
	group(t, class, before, "on-demand", "1", "5") // the cheaper one
	group(t, class, after, "on-demand", "2", "5")
	for _, name := range []string{before, after} {
		patchGroup(t, name, fmt.Sprintf(`{"metadata":{"labels":{%q:%q}},"spec":{"rollout":{"strategy":{"type":%q}},"template":{"spec":{"version":%q}}}}`,
			color, name, clusterv1.OnDeleteMachineDeploymentStrategyType, versionBefore))
	}
	copies(t, w.Spoke, manifests.CrowdSpoke, class, nil)
	copies(t, w.Spoke, manifests.CrowdWorkload, class, nil)
	require.NoError(t, w.AwaitNodePool(within(t, soon), class))
	poll(t, soon, selects(class, 2))
	goHome(t, class)
	t.Cleanup(func() { // empty Nodes need a budget, too
		pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: class}}
		if err := w.Spoke.Patch(context.Background(), pool, mergePatch(`{"spec":{"disruption":{"budgets":[{"nodes":"100%"}]}}}`)); err != nil {
			t.Error(err)
		}
	})
	nodeClass := &shimv1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: class}}
	pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: class}}
	change := func(o client.Object, patch string) {
		t.Helper()
		require.NoError(t, w.Spoke.Patch(within(t, soon), o, mergePatch(patch)))
	}
	budget := func(nodes string) {
		t.Helper()
		change(pool, fmt.Sprintf(`{"spec":{"disruption":{"budgets":[{"nodes":%q}]}}}`, nodes))
	}
	nodeClaims := func(ctx context.Context) ([]karpenterv1.NodeClaim, error) {
		var all karpenterv1.NodeClaimList
		err := w.Spoke.List(ctx, &all, client.MatchingLabels{karpenterv1.NodePoolLabelKey: class})
		return all.Items, err
	}
	uids := func() []types.UID {
		t.Helper()
		all, err := nodeClaims(within(t, soon))
		require.NoError(t, err)
		return lo.Map(all, func(n karpenterv1.NodeClaim, _ int) types.UID { return n.UID })
	}
	// look makes Karpenter look at the NodeClaims, which it does every five minutes, and whenever
	// their NodeClass is written.
	looks := 0
	look := func(ctx context.Context) error {
		looks++
		return w.Spoke.Patch(ctx, nodeClass, mergePatch(fmt.Sprintf(`{"metadata":{"annotations":{"fleet.example.com/looks":"%d"}}}`, looks)))
	}
	// stay fails the test if a NodeClaim drifts, or is replaced.
	stay := func(what string) {
		t.Helper()
		first := uids()
		require.Len(t, first, pods)
		throughout(t, undisturbed, time.Second, func() {
			require.NoError(t, look(t.Context()))
			all, err := nodeClaims(t.Context())
			require.NoError(t, err)
			for _, n := range all {
				require.Contains(t, first, n.UID, what)
				require.Nil(t, n.DeletionTimestamp, what)
				require.False(t, n.StatusConditions().Get(karpenterv1.ConditionTypeDrifted).IsTrue(), "%s: %s", what, n.Name)
			}
			require.Len(t, all, pods, what)
		})
		figure("%s: ignored for %v", what, undisturbed)
	}
	// replaced waits until all NodeClaims have drifted for a reason, and then have been replaced.
	// The budget holds them until the condition was seen.
	replaced := func(reason string, machines func() bool) {
		t.Helper()
		known := made(class)
		poll(t, soon, func(ctx context.Context) (string, error) {
			if err := look(ctx); err != nil {
				return "", err
			}
			all, err := nodeClaims(ctx)
			drifted := lo.CountBy(all, func(n karpenterv1.NodeClaim) bool {
				c := n.StatusConditions().Get(karpenterv1.ConditionTypeDrifted)
				return c.IsTrue() && c.Reason == reason
			})
			done := drifted == pods && len(all) == pods
			return lo.Ternary(done, "", fmt.Sprintf("%d NodeClaims to drift for %s: %d of %d do", pods, reason, drifted, len(all))), err
		})
		began := time.Now()
		budget("100%")
		poll(t, 4*time.Minute, func(context.Context) (string, error) {
			return lo.Ternary(machines(), "", fmt.Sprintf("the Nodes to be replaced for %s: they are of %v", reason, where())), nil
		})
		await(t, 2*time.Minute, running(pods))
		await(t, 2*time.Minute, func(s timeline.State) string {
			return lo.Ternary(len(s.Live()) == pods, "", fmt.Sprintf("%d NodeClaims to be left: there are %d", pods, len(s.Live())))
		})
		require.Equal(t, pods, made(class)-known, "each is replaced once")
		figure("%s: %d Nodes replaced in %.0f s", reason, pods, time.Since(began).Seconds())
	}

	scale(t, class, pods)
	await(t, 2*time.Minute, running(pods))
	require.Equal(t, map[string]int{before: pods}, where())
	change(nodeClass, fmt.Sprintf(`{"spec":{"drift":{"nodeGroupNotSelected":"Ignore","machineNotUpToDate":"Ignore"},
		"scalableResourceSelector":{"matchLabels":{%q:%q}}}}`, color, after))
	poll(t, soon, selects(class, 1))
	stay("the node group is not selected any more")
	budget("0")
	change(nodeClass, `{"spec":{"drift":{"nodeGroupNotSelected":"Replace"}}}`)
	replaced("NodeGroupNotSelected", func() bool { return where()[after] == pods && len(where()) == 1 })

	patchGroup(t, after, fmt.Sprintf(`{"spec":{"template":{"spec":{"version":%q}}}}`, versionAfter))
	state := w.Sandbox.State()
	reader := agentAs(t, state.Paths.ReaderCertificate, state.Paths.ReaderKey)
	poll(t, soon, func(ctx context.Context) (string, error) {
		answer, err := reader.Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{
			Cluster: theCluster(), NodeGroupId: sandbox.ClusterNamespace + "/" + after,
		})
		outdated := lo.CountBy(answer.GetMachines(), func(m *agentv1alpha1.Machine) bool { return !m.GetUpToDate() })
		return lo.Ternary(outdated == pods, "", fmt.Sprintf("the agent to report %d outdated machines: it reports %d", pods, outdated)), err
	})
	stay("the machine template has changed")
	require.Equal(t, map[string]int{versionBefore: pods}, versions(t, after))
	budget("0")
	change(nodeClass, `{"spec":{"drift":{"machineNotUpToDate":"Replace"}}}`)
	replaced("MachineNotUpToDate", func() bool {
		have := versions(t, after)
		return have[versionAfter] == pods && len(have) == 1
	})
}
