package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	// The workers' version before the upgrade, which is older than the control plane's, and their
	// version after it.
	versionBefore, versionAfter = "v1.36.2", "v1.36.3"
	upgradeWithin               = 8 * time.Minute
)

// TestWorkersAreUpgraded runs a node group with a version older than its control plane's, and then
// upgrades it: with Karpenter, which replaces drifted Nodes within its budgets, and with Cluster
// API, which rolls out the MachineDeployment. More pods are added in the middle of it.
func TestWorkersAreUpgraded(t *testing.T) {
	if testing.Short() {
		t.Skip("not in the short run: replaces every Node, one after the other")
	}
	const pods, more = 4, 2
	for name, strategy := range map[string]clusterv1.MachineDeploymentRolloutStrategyType{
		"by Karpenter, with OnDelete":        clusterv1.OnDeleteMachineDeploymentStrategyType,
		"by Cluster API, with RollingUpdate": clusterv1.RollingUpdateMachineDeploymentStrategyType,
	} {
		t.Run(name, func(t *testing.T) {
			figure := shows(t, "workers are upgraded "+name)
			useCrowd(t)
			deployment := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
			require.NoError(t, w.Hub.Patch(t.Context(), deployment, mergePatch(fmt.Sprintf(
				`{"spec":{"rollout":{"strategy":{"type":%q}},"template":{"spec":{"version":%q}}}}`, strategy, versionBefore))))
			pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "crowd"}}
			require.NoError(t, w.Spoke.Patch(t.Context(), pool, mergePatch(`{"spec":{"disruption":{"budgets":[{"nodes":"1"}]}}}`)))
			known := len(w.Recorder.State().Timelines)
			scale(t, "crowd", pods)
			await(t, 2*time.Minute, running(pods))
			require.Equal(t, map[string]int{versionBefore: pods}, versions(t, "crowd"), "workers keep the version that they are pinned to")

			fewest := watchFewest(t)
			began := time.Now()
			upgrade := mergePatch(fmt.Sprintf(`{"spec":{"template":{"spec":{"version":%q}}}}`, versionAfter))
			require.NoError(t, w.Hub.Patch(t.Context(), deployment, upgrade))
			poll(t, upgradeWithin, func(context.Context) (string, error) {
				return lo.Ternary(versions(t, "crowd")[versionAfter] > 0, "", "a first Machine of the new version"), nil
			})
			scale(t, "crowd", pods+more)
			poll(t, upgradeWithin, func(context.Context) (string, error) {
				have := versions(t, "crowd")
				done := have[versionAfter] == pods+more && len(have) == 1
				return lo.Ternary(done, "", fmt.Sprintf("%d Machines of %s: there are %v", pods+more, versionAfter, have)), nil
			})
			await(t, 2*time.Minute, running(pods+more))
			await(t, 2*time.Minute, crowdRuns(pods+more)) // what a rollout made in advance is a spare for a while
			made := w.Recorder.State().Timelines[known:]
			figure("%d of %d nodes replaced in %.0f s, %d NodeClaims made, at least %d Nodes ready meanwhile", pods, pods+more,
				time.Since(began).Seconds(), len(made), fewest())
			require.LessOrEqual(t, len(made), 2*pods+more, "no node is replaced twice")
			if strategy == clusterv1.OnDeleteMachineDeploymentStrategyType {
				require.Equal(t, pods, lo.CountBy(made, func(j timeline.Timeline) bool { return j.Disrupted == "Drifted" }))
				require.GreaterOrEqual(t, fewest(), pods, "a replacement is there before a Node goes")
			}
		})
	}
}

// areDrifted waits until all NodeClaims of a NodePool that exist now are drifted or gone, and
// returns when that was. It takes core up to five minutes to look by itself.
func areDrifted(t *testing.T, nodePool string) time.Time {
	t.Helper()
	var nodeClaims karpenterv1.NodeClaimList
	list := func(ctx context.Context) error {
		return w.Spoke.List(ctx, &nodeClaims, client.MatchingLabels{karpenterv1.NodePoolLabelKey: nodePool})
	}
	require.NoError(t, list(t.Context()))
	old := lo.Map(nodeClaims.Items, func(c karpenterv1.NodeClaim, _ int) string { return c.Name })
	require.NotEmpty(t, old)
	poll(t, soon, func(ctx context.Context) (string, error) {
		err := list(ctx)
		left := lo.CountBy(nodeClaims.Items, func(c karpenterv1.NodeClaim) bool {
			return lo.Contains(old, c.Name) && !c.StatusConditions().Get(karpenterv1.ConditionTypeDrifted).IsTrue()
		})
		return lo.Ternary(left == 0, "", fmt.Sprintf("%d of %d NodeClaims to be drifted", left, len(old))), err
	})
	return time.Now()
}

// versions returns the number of a node group's Machines that are not being deleted, by Kubernetes
// version.
func versions(t *testing.T, group string) map[string]int {
	t.Helper()
	return lo.CountValuesBy(lo.Filter(machinesOf(t, group), func(m clusterv1.Machine, _ int) bool { return m.DeletionTimestamp.IsZero() }),
		func(m clusterv1.Machine) string { return m.Spec.Version })
}

// TestAClusterOfAClusterClassIsUpgraded changes the single version in the Cluster while all its
// workers are pinned to the old one. It then unpins them, and has one node group upgraded by
// Karpenter and the other by Cluster API.
func TestAClusterOfAClusterClassIsUpgraded(t *testing.T) {
	figure := shows(t, "a Cluster of a ClusterClass is upgraded: workers pinned at first, then by Karpenter and by Cluster API")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	inSandbox(t, sandbox.Options{Name: "e2e-class", TopologyVersion: versionBefore})
	leaveAsFound(t)
	const pods = 3
	// Cluster API creates no Machine for a pinned group once the control plane has another version,
	// unless the group is annotated beforehand.
	const stuck, grows = "crowd", "rolled"
	strategies := map[string]clusterv1.MachineDeploymentRolloutStrategyType{
		stuck: clusterv1.OnDeleteMachineDeploymentStrategyType, grows: clusterv1.RollingUpdateMachineDeploymentStrategyType,
	}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}}
	topology := func(version string, pinned bool) {
		t.Helper()
		var deployments []string
		for _, name := range []string{stuck, grows} {
			annotations := map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "0", clusterv1.AutoscalerMaxSizeAnnotation: "20"}
			if pinned {
				annotations[clusterv1.ClusterTopologyDeferUpgradeAnnotation] = ""
			}
			if name == grows {
				annotations[clusterv1.MachineSetSkipPreflightChecksAnnotation] = string(clusterv1.MachineSetPreflightCheckControlPlaneVersionSkew)
			}
			text, err := json.Marshal(annotations)
			require.NoError(t, err)
			deployments = append(deployments, fmt.Sprintf(`{"class":%q,"name":%q,"rollout":{"strategy":{"type":%q}},"metadata":{"annotations":%s,
				"labels":{"node.cluster.x-k8s.io/karpenter-member":"","fleet.example.com/pool":%q}}}`, sandbox.WorkerClass, name, strategies[name], text, name))
		}
		patch := fmt.Sprintf(`{"spec":{"topology":{"version":%q,"workers":{"machineDeployments":[%s]}}}}`, version, strings.Join(deployments, ","))
		require.NoError(t, w.Hub.Patch(within(t, soon), cluster, mergePatch(patch)))
	}
	topology(versionBefore, true)
	for name := range strategies {
		copies(t, w.Spoke, manifests.CrowdSpoke, name, of("NodePool", func(o *unstructured.Unstructured) {
			set(o, []any{map[string]any{"nodes": "1"}}, "spec", "disruption", "budgets")
		}))
		copies(t, w.Spoke, manifests.CrowdWorkload, name, nil)
		require.NoError(t, w.AwaitNodePool(within(t, soon), name))
	}
	goHome(t, lo.Keys(strategies)...)
	for name := range strategies {
		scale(t, name, pods)
	}
	await(t, 2*time.Minute, running(2*pods))

	topology(versionAfter, true)
	poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		var planes simv1.SimControlPlaneList
		err := w.Hub.List(ctx, &planes, client.InNamespace(sandbox.ClusterNamespace))
		upgraded := lo.EveryBy(planes.Items, func(p simv1.SimControlPlane) bool { return p.Status.Version == versionAfter })
		return lo.Ternary(len(planes.Items) == 1 && upgraded, "", "the control plane's new version"), err
	})
	for name := range strategies {
		scale(t, name, pods+1)
	}
	await(t, 2*time.Minute, func(s timeline.State) string {
		return lo.Ternary(s.Pods.Running == 2*pods+1, "", fmt.Sprintf("%d pods to run: %d do", 2*pods+1, s.Pods.Running))
	})
	require.Equal(t, map[string]int{versionBefore: pods + 1}, versions(t, grows), "it grows in its own version")
	require.Equal(t, map[string]int{versionBefore: pods}, versions(t, stuck))
	poll(t, soon, func(ctx context.Context) (string, error) {
		var claims agentv1.MachineClaimList
		err := w.Hub.List(ctx, &claims, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: stuck})
		told := lo.ContainsBy(claims.Items, func(c agentv1.MachineClaim) bool {
			return strings.Contains(c.Status.Message, "ControlPlaneVersionSkew")
		})
		return lo.Ternary(told, "", "the claim to say what Cluster API waits for"), err
	})
	poll(t, soon, selectedBy(stuck, stuck, "the reason MachinesBlocked", func(s shimv1.SelectedNodeGroup) bool {
		return !s.Available && s.Reason == "MachinesBlocked" && strings.Contains(s.Message, "ControlPlaneVersionSkew")
	}))

	began := time.Now()
	topology(versionAfter, false)
	for name := range strategies {
		poll(t, upgradeWithin, func(context.Context) (string, error) {
			have := versions(t, name)
			done := have[versionAfter] == pods+1 && len(have) == 1
			return lo.Ternary(done, "", fmt.Sprintf("%d Machines of %s in %s: there are %v", pods+1, versionAfter, name, have)), nil
		})
	}
	await(t, 2*time.Minute, running(2*(pods+1)))
	for name, strategy := range strategies {
		figure("%s: %d NodeClaims made for %d Nodes", strategy, made(name), pods+1)
		require.LessOrEqual(t, made(name), 2*(pods+1), "no node is replaced twice")
	}
	drifted := lo.CountValuesBy(lo.Filter(w.Recorder.State().Timelines, func(j timeline.Timeline, _ int) bool { return j.Disrupted == "Drifted" }),
		func(j timeline.Timeline) string { return j.NodePool })
	require.Equal(t, map[string]int{stuck: pods}, drifted, "Karpenter replaced what it was to; the pod that waited got the new version at once")
	require.Equal(t, 2*pods+1, made(stuck))
	figure("both within %.0f s", time.Since(began).Seconds())
}

// watchFewest returns the minimum number of the crowd's Nodes that were ready and schedulable at
// any time since the call.
func watchFewest(t *testing.T) func() int {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	fewest := 1 << 30
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			var nodes corev1.NodeList
			if err := w.Spoke.List(ctx, &nodes, client.MatchingLabels{corev1.LabelInstanceTypeStable: "crowd"}); err != nil {
				return false, nil //nolint:nilerr // it is asked again
			}
			fewest = min(fewest, lo.CountBy(nodes.Items, func(n corev1.Node) bool {
				return n.DeletionTimestamp.IsZero() && lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
					return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
				})
			}))
			return false, nil
		})
	}()
	return func() int {
		stop()
		<-done
		return fewest
	}
}

// TestAClusterWithoutAClassIsUpgraded upgrades the control plane, which takes a while in which
// Cluster API makes no Machines and claims wait, and then its workers.
func TestAClusterWithoutAClassIsUpgraded(t *testing.T) {
	figure := shows(t, "a Cluster without a ClusterClass is upgraded: claims wait for the control plane and say why; then the workers")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	useCrowd(t)
	const pods, next = 3, "v1.36.4"
	plane := &simv1.SimControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}}
	require.NoError(t, w.Hub.Get(t.Context(), client.ObjectKeyFromObject(plane), plane))
	before := plane.Spec.Version
	setPlane := func(version, delay string) error {
		return w.Hub.Patch(context.Background(), plane, mergePatch(fmt.Sprintf(`{"spec":{"version":%q,"upgradeDelay":%q}}`, version, delay)))
	}
	planeHas := func(version string) {
		t.Helper()
		poll(t, soon, func(ctx context.Context) (string, error) {
			err := w.Hub.Get(ctx, client.ObjectKeyFromObject(plane), plane)
			return lo.Ternary(plane.Status.Version == version, "", "the control plane to have "+version+", not "+plane.Status.Version), err
		})
	}
	t.Cleanup(func() {
		if err := setPlane(before, "1s"); err != nil {
			t.Error(err)
		}
	})
	deployment := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	workersGet := func(version string) {
		t.Helper()
		require.NoError(t, w.Hub.Patch(t.Context(), deployment, mergePatch(fmt.Sprintf(
			`{"spec":{"rollout":{"strategy":{"type":"OnDelete"}},"template":{"spec":{"version":%q}}}}`, version))))
	}
	workersGet(before)
	known := len(w.Recorder.State().Timelines)
	require.NoError(t, setPlane(next, "1h")) // until the claims are seen waiting
	scale(t, "crowd", pods)
	await(t, soon, reached(1, timeline.Claimed)) // the others as well, unless Karpenter planned them later
	poll(t, soon, func(ctx context.Context) (string, error) {
		var claims agentv1.MachineClaimList
		err := w.Hub.List(ctx, &claims, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: "crowd"})
		waiting := lo.FilterMap(claims.Items, func(c agentv1.MachineClaim, _ int) (string, bool) {
			return c.Status.Message, c.CurrentPhase() == agentv1.PhasePending
		})
		told := lo.CountBy(waiting, func(message string) bool { return strings.Contains(message, "is upgrading") })
		return lo.Ternary(told > 0 && told == len(waiting), "", fmt.Sprintf("claims to say that Cluster API waits for the control plane: %q", waiting)), err
	})
	require.Empty(t, listCrowd(t))
	planeHas(before)
	require.NoError(t, setPlane(next, "1s"))
	planeHas(next)
	await(t, 2*time.Minute, running(pods))
	launched := func() int {
		return lo.CountBy(w.Recorder.State().Timelines[known:], func(j timeline.Timeline) bool { return j.Reached(timeline.Launched) })
	}
	require.Equal(t, pods, launched(), "the NodeClaims that waited have the Nodes")
	require.Equal(t, map[string]int{before: pods}, versions(t, "crowd"), "workers keep the version that they are pinned to, behind the control plane")

	began := time.Now()
	workersGet(next)
	found := areDrifted(t, "crowd")
	poll(t, upgradeWithin, func(context.Context) (string, error) {
		have := versions(t, "crowd")
		done := have[next] == pods && len(have) == 1
		return lo.Ternary(done, "", fmt.Sprintf("%d Machines of %s: there are %v", pods, next, have)), nil
	})
	await(t, 2*time.Minute, running(pods))
	await(t, 2*time.Minute, crowdRuns(pods))
	require.Equal(t, 2*pods, launched(), "no node is replaced twice")
	figure("%d waiting NodeClaims have the Nodes; drift was found in %.0f s, the workers followed in %.0f s",
		pods, found.Sub(began).Seconds(), time.Since(began).Seconds())
}
