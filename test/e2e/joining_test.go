package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// plannings is how many times Karpenter must re-evaluate the pods before the test concludes that it
// plans no more Nodes for them. It does so every ten seconds.
const plannings = 3

// TestNodesThatWaitForClusterAPIArePlannedOnce lets Nodes join like kubeadm's, with a taint that
// Cluster API removes, and keeps Cluster API from removing it.
func TestNodesThatWaitForClusterAPIArePlannedOnce(t *testing.T) {
	shows(t, "pods get one Node each although Cluster API is late to initialize it")
	useCrowd(t)
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	require.NoError(t, w.Hub.Patch(t.Context(), template, mergePatch(`{"spec":{"template":{"spec":{"stuckAt":"Join"}}}}`)))

	const pods = 8
	known := len(w.Recorder.State().Timelines)
	scale(t, "crowd", pods)
	await(t, 2*time.Minute, reached(pods, timeline.Provisioned))
	pause := func(ctx context.Context, patch string) error {
		return eachMachine(ctx, "crowd", func(m *clusterv1.Machine) error { return w.Hub.Patch(ctx, m, mergePatch(patch)) })
	}
	t.Cleanup(func() {
		if err := pause(context.Background(), `{"metadata":{"annotations":{"cluster.x-k8s.io/paused":null}}}`); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, pause(t.Context(), `{"metadata":{"annotations":{"cluster.x-k8s.io/paused":""}}}`))
	poll(t, soon, func(ctx context.Context) (string, error) {
		return "", eachMachine(ctx, "crowd", func(m *clusterv1.Machine) error {
			return lo.Ternary(conditions.IsTrue(m, clusterv1.PausedCondition), nil, errors.New("Machine "+m.Name+" to be paused"))
		})
	})

	var instances simv1.SimMachineList
	require.NoError(t, w.Hub.List(t.Context(), &instances, client.InNamespace(sandbox.ClusterNamespace)))
	for i := range instances.Items {
		require.NoError(t, w.Hub.Patch(t.Context(), &instances.Items[i], mergePatch(`{"spec":{"stuckAt":null}}`)))
	}
	await(t, soon, reached(pods, timeline.Registered))
	before, err := timesPlanned(t.Context())
	require.NoError(t, err)
	poll(t, 2*soon, func(ctx context.Context) (string, error) {
		now, err := timesPlanned(ctx)
		return lo.Ternary(now >= before+plannings, "", fmt.Sprintf("Karpenter to look %d times at the pods: it did %d times", plannings, now-before)), err
	})
	state := w.Recorder.State()
	require.Len(t, state.Timelines[known:], pods, "one NodeClaim for each pod, and no more")
	require.Empty(t, lo.Filter(state.Live(), func(j timeline.Timeline, _ int) bool { return j.Reached(timeline.Initialized) }))
	var nodes corev1.NodeList
	require.NoError(t, w.Spoke.List(t.Context(), &nodes, client.MatchingLabels{corev1.LabelInstanceTypeStable: "crowd"}))
	for _, node := range nodes.Items {
		require.Contains(t, node.Spec.Taints, clusterv1.NodeUninitializedTaint)
	}

	require.NoError(t, pause(t.Context(), `{"metadata":{"annotations":{"cluster.x-k8s.io/paused":null}}}`))
	await(t, 2*time.Minute, running(pods))
	require.Len(t, w.Recorder.State().Timelines[known:], pods, "no Node is replaced either")
}

// TestNodesThatJoinWithoutKarpentersTaintAreReported lets Nodes join as they do if a bootstrap
// template was not changed for Karpenter.
func TestNodesThatJoinWithoutKarpentersTaintAreReported(t *testing.T) {
	shows(t, "Nodes join without karpenter.sh/unregistered: they are used, and their NodeClass names the node group until one has it")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	useCrowd(t)
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	taints := func(value string) {
		t.Helper()
		require.NoError(t, w.Hub.Patch(within(t, soon), template, mergePatch(`{"spec":{"template":{"spec":{"nodeTaints":`+value+`}}}}`)))
	}
	const missing = "fleet/crowd: its Nodes join without the taint karpenter.sh/unregistered:NoExecute"
	taints(`[{"key":"node.cluster.x-k8s.io/uninitialized","effect":"NoSchedule"}]`)
	scale(t, "crowd", 2)
	await(t, 2*time.Minute, running(2))
	poll(t, soon, conditionSays("crowd", shimv1.ConditionNodeGroupsValid, missing))
	class := &shimv1.ClusterAPINodeClass{}
	require.NoError(t, w.Spoke.Get(within(t, soon), client.ObjectKey{Name: "crowd"}, class))
	require.Equal(t, 1, strings.Count(class.StatusConditions().Get(shimv1.ConditionNodeGroupsValid).Message, missing), "once for two Nodes")
	require.True(t, class.StatusConditions().Root().IsTrue(), "the node group is used all the same")

	taints("null") // the default, which has the taint
	scale(t, "crowd", 3)
	await(t, 2*time.Minute, running(3))
	poll(t, soon, func(ctx context.Context) (string, error) {
		err := w.Spoke.Get(ctx, client.ObjectKeyFromObject(class), class)
		condition := class.StatusConditions().Get(shimv1.ConditionNodeGroupsValid)
		return lo.Ternary(condition.IsTrue(), "", "the node group to be reported no more: "+condition.Message), err
	})
}

func mergePatch(patch string) client.Patch {
	return client.RawPatch(types.MergePatchType, []byte(patch))
}

// reached returns a condition: this many NodeClaims are live, and all of them have reached the
// stage.
func reached(nodeClaims int, stage timeline.Stage) func(timeline.State) string {
	return func(s timeline.State) string {
		live := s.Live()
		have := lo.CountBy(live, func(j timeline.Timeline) bool { return j.Reached(stage) })
		if have >= nodeClaims && have == len(live) {
			return ""
		}
		return fmt.Sprintf("%d NodeClaims to be %s: %d of %d are", nodeClaims, stage, have, len(live))
	}
}

// eachMachine calls do for each Machine of a node group.
func eachMachine(ctx context.Context, group string, do func(*clusterv1.Machine) error) error {
	var machines clusterv1.MachineList
	err := w.Hub.List(ctx, &machines, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: group})
	for i := range machines.Items {
		err = errors.Join(err, client.IgnoreNotFound(do(&machines.Items[i])))
	}
	return err
}

// timesPlanned returns how often Karpenter has planned Nodes for pods.
func timesPlanned(ctx context.Context) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, w.Sandbox.State().ShimMetrics, http.NoBody)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, `karpenter_scheduler_scheduling_duration_seconds_count{controller="provisioner"} `); ok {
			var times int
			_, err := fmt.Sscan(value, &times)
			return times, err
		}
	}
	return 0, fmt.Errorf("%s does not tell how often Karpenter has planned", request.URL)
}
