package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// consolidated bounds a replacement: Karpenter itself waits before and between its steps.
const consolidated = 4 * time.Minute

func sizes(t *testing.T, what string) (figure func(format string, args ...any)) {
	t.Helper()
	figure = shows(t, what)
	if testing.Short() {
		t.Skip("not in the short run")
	}
	leaveAsFound(t)
	apply(t, w.Hub, manifests.SizesHub)
	apply(t, w.Spoke, manifests.SizesSpoke, manifests.SizesWorkload)
	for _, pool := range []string{"sizes", "sizes-any"} {
		require.NoError(t, w.AwaitNodePool(within(t, soon), pool))
	}
	for _, group := range []string{"sizes-small", "sizes-small-spot", "sizes-big"} {
		poll(t, soon, selected(group, "an estimated price", func(s shimv1.SelectedNodeGroup) bool {
			return s.Available && s.PriceSource == "Estimate" && s.Price != "" && s.Currency == ""
		}))
	}
	goHome(t, "wide", "narrow", "flexible")
	return figure
}

// selected returns a condition for poll about a node group in the status of the NodeClass sizes.
func selected(group, what string, is func(shimv1.SelectedNodeGroup) bool) func(context.Context) (string, error) {
	return selectedBy("sizes", group, what, is)
}

// selectedBy is [selected] for any NodeClass.
func selectedBy(nodeClass, group, what string, is func(shimv1.SelectedNodeGroup) bool) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var class shimv1.ClusterAPINodeClass
		if err := w.Spoke.Get(ctx, client.ObjectKey{Name: nodeClass}, &class); err != nil {
			return "", err
		}
		name := sandbox.ClusterNamespace + "/" + group
		shown, _ := lo.Find(class.Status.Selected, func(s shimv1.SelectedNodeGroup) bool { return s.Name == name })
		if is(shown) {
			return "", nil
		}
		return fmt.Sprintf("%s to have %s: it is %+v", name, what, shown), nil
	}
}

const cpuAnnotation = "capacity.cluster-autoscaler.kubernetes.io/cpu"

// annotate sets an annotation of a node group's MachineDeployment to a JSON string, or removes it
// with null.
func annotate(t *testing.T, group, annotation, value string) {
	t.Helper()
	patchGroup(t, group, fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, annotation, value))
}

// patchGroup merges JSON into a node group's MachineDeployment. It may be called during clean-up.
func patchGroup(t *testing.T, group, patch string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: group}}
	require.NoError(t, w.Hub.Patch(ctx, md, client.RawPatch(types.MergePatchType, []byte(patch))))
}

// described returns a node group as reported by the agent.
func described(t *testing.T, group string) *agentv1alpha1.NodeGroup {
	t.Helper()
	state := w.Sandbox.State()
	answer, err := agentAs(t, state.Paths.ReaderCertificate, state.Paths.ReaderKey).NodeGroups.GetNodeGroup(within(t, soon),
		&agentv1alpha1.GetNodeGroupRequest{Cluster: theCluster(), Id: sandbox.ClusterNamespace + "/" + group})
	require.NoError(t, err)
	return answer.GetNodeGroup()
}

// onOneNodeOf returns a condition: this many pods run, and there is one node, which is of that
// group.
func onOneNodeOf(group string, pods int) func(timeline.State) string {
	return func(s timeline.State) string {
		if missing := running(pods)(s); missing != "" {
			return missing
		}
		groups := lo.Map(s.Live(), func(j timeline.Timeline, _ int) string { return j.Group })
		if !slices.Equal(groups, []string{group}) {
			return fmt.Sprintf("one node, of %s: they are of %v", group, groups)
		}
		return ""
	}
}

func TestACheaperNodeReplacesAndAPriceListReversesTheChoice(t *testing.T) {
	sizes(t, "price: by the estimate a cheaper node replaces, a price list reverses the choice")
	scale(t, "wide", 1)
	await(t, 2*time.Minute, onOneNodeOf("sizes-big", 1))
	scale(t, "narrow", 1)
	await(t, 2*time.Minute, onOneNodeOf("sizes-big", 2))
	scale(t, "wide", 0)
	await(t, consolidated, onOneNodeOf("sizes-small", 1))

	namespace, name, _ := strings.Cut(sandbox.PriceList, "/")
	list := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Data: map[string]string{"prices.yaml": `
currency: EUR
prices:
- {instanceType: sizes-small, perHour: 2.5}
- {instanceType: sizes-big, perHour: 0.5}
`},
	}
	require.NoError(t, w.Hub.Create(within(t, soon), list))
	t.Cleanup(func() {
		if err := w.Hub.Delete(context.Background(), list); err != nil {
			t.Error(err)
		}
	})
	for group, price := range map[string]string{"sizes-small": "2.5", "sizes-big": "0.5"} {
		poll(t, soon, selected(group, "the list's price", func(s shimv1.SelectedNodeGroup) bool {
			return s.Price == price && s.Currency == "EUR" && s.PriceSource == "PriceList"
		}))
	}
	big := described(t, "sizes-big")
	require.InDelta(t, 0.5, big.GetPrice().GetPerHour(), 0)
	require.Equal(t, "EUR", big.GetPrice().GetCurrency())
	require.Equal(t, agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST, big.GetSources()["price"].GetKind())
	// Karpenter re-evaluates what it found to be optimal only when pods come or go.
	scale(t, "narrow", 2)
	await(t, consolidated, onOneNodeOf("sizes-big", 2))
}

func TestANodeOverlayChangesTheChoice(t *testing.T) {
	sizes(t, "price: a NodeOverlay on top of the estimate changes the choice")
	overlaid(t, "sizes-big")
	scale(t, "narrow", 1)
	await(t, 2*time.Minute, onOneNodeOf("sizes-big", 1))
}

// overlaid makes machines of the instance type the cheapest, by a NodeOverlay, until the test ends.
func overlaid(t *testing.T, instanceType string) {
	t.Helper()
	overlay := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": map[string]any{"name": instanceType},
		"spec": map[string]any{
			"requirements": []any{map[string]any{
				"key": corev1.LabelInstanceTypeStable, "operator": "In", "values": []any{instanceType},
			}},
			"price": "0.0001",
		},
	}}
	require.NoError(t, w.Spoke.Create(within(t, soon), overlay))
	t.Cleanup(func() {
		if err := w.Spoke.Delete(context.Background(), overlay); err != nil {
			t.Error(err)
		}
	})
	poll(t, soon, overlayReady(overlay))
}

// overlayReady returns a condition for poll: Karpenter has evaluated the NodeOverlay.
func overlayReady(overlay *unstructured.Unstructured) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		err := w.Spoke.Get(ctx, client.ObjectKeyFromObject(overlay), overlay)
		conditions, _, _ := unstructured.NestedSlice(overlay.Object, "status", "conditions")
		for _, c := range conditions {
			if is, ok := c.(map[string]any); ok && is["type"] == "Ready" && is["status"] == "True" {
				return "", err
			}
		}
		return fmt.Sprintf("the NodeOverlay to be ready: %v", conditions), err
	}
}

func TestGroupsOfOneInstanceTypeAreMergedAndDifferencesReported(t *testing.T) {
	sizes(t, "instance types: groups of one type are merged, and machines that differ are reported")
	var class shimv1.ClusterAPINodeClass
	require.NoError(t, w.Spoke.Get(within(t, soon), client.ObjectKey{Name: "sizes"}, &class))
	require.Equal(t, int32(3), class.Status.NodeGroups)
	require.Equal(t, int32(2), class.Status.InstanceTypes, "one on demand and spot")

	annotate(t, "sizes-small", cpuAnnotation, `"8"`)
	poll(t, soon, conditionSays("sizes", shimv1.ConditionNodeGroupsValid,
		`fleet/sizes-small: other node groups of instance type "sizes-small" lack cpu beyond 4 of 8`))
	annotate(t, "sizes-small", cpuAnnotation, "null")
	poll(t, soon, func(ctx context.Context) (string, error) {
		err := w.Spoke.Get(ctx, client.ObjectKey{Name: "sizes"}, &class)
		valid := class.StatusConditions().Get(shimv1.ConditionNodeGroupsValid).IsTrue()
		return lo.Ternary(valid, "", "the condition to be True again"), err
	})
}

// A Node has the labels that the agent reports for it. Further labels of the MachineDeployment or
// of the Machines stay in the hub. Pods can select on whatever a NodePool may name.
func TestANodeCarriesWhatItsGroupPromises(t *testing.T) {
	shows(t, "labels: a Node carries what its group promises, and no more")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	leaveAsFound(t)
	apply(t, w.Hub, manifests.LabelledHub)
	apply(t, w.Spoke, manifests.LabelledSpoke)
	require.NoError(t, w.AwaitNodePool(within(t, soon), "labelled"))
	promised := described(t, "labelled")
	require.Empty(t, promised.GetProblems())
	require.Equal(t, "zone-b", promised.GetZone())
	require.Len(t, promised.GetTaints(), 1)
	for _, key := range []string{"fleet.example.com/rack", "node.cluster.x-k8s.io/team", "node-role.kubernetes.io/worker"} {
		require.Contains(t, promised.GetNodeLabels(), key)
	}
	inTheHub := []string{"fleet.example.com/stays-in-the-hub", "fleet.example.com/owner", "cluster.x-k8s.io/deployment-name"}
	for _, key := range inTheHub {
		require.NotContains(t, promised.GetNodeLabels(), key)
	}

	// On its own Nodes, Karpenter sets what was promised. This Node only has what the kubelet and
	// Cluster API set.
	raise := func(replicas int) {
		t.Helper()
		patchGroup(t, "labelled", fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas))
	}
	raise(1)
	t.Cleanup(func() {
		raise(0)
		ctx, cancel := context.WithTimeout(context.Background(), settleWithin)
		defer cancel()
		if err := w.Recorder.Await(ctx, noMachines); err != nil {
			t.Error(err)
		}
	})
	poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		var nodes corev1.NodeList
		if err := w.Spoke.List(ctx, &nodes, client.MatchingLabels{corev1.LabelInstanceTypeStable: "labelled"}); err != nil || len(nodes.Items) != 1 {
			return fmt.Sprintf("one Node: there are %d", len(nodes.Items)), err
		}
		node := nodes.Items[0]
		for key, value := range promised.GetNodeLabels() {
			if is, has := node.Labels[key]; !has || is != value {
				return fmt.Sprintf("the Node to have %s=%s: it has %v", key, value, node.Labels), nil
			}
		}
		if extra := lo.Intersect(inTheHub, lo.Keys(node.Labels)); len(extra) > 0 {
			return fmt.Sprintf("the Node not to have %v", extra), nil
		}
		for _, taint := range promised.GetTaints() {
			if !lo.ContainsBy(node.Spec.Taints, func(is corev1.Taint) bool {
				return is.Key == taint.GetKey() && is.Value == taint.GetValue() && string(is.Effect) == taint.GetEffect()
			}) {
				return fmt.Sprintf("the Node to have the taint %v: it has %v", taint, node.Spec.Taints), nil
			}
		}
		return "", nil
	})

	goHome(t, "labelled")
	scale(t, "labelled", 1)
	await(t, 2*time.Minute, onOneNodeOf("labelled", 1))
}

func TestSpotIsPreferredWhereItIsCheaperAndAllowed(t *testing.T) {
	sizes(t, "price: spot is preferred where it is cheaper and allowed")
	scale(t, "flexible", 1)
	await(t, 2*time.Minute, onOneNodeOf("sizes-small-spot", 1))
	scale(t, "flexible", 0)
	await(t, 2*time.Minute, nothingLives)
	scale(t, "narrow", 1)
	await(t, 2*time.Minute, onOneNodeOf("sizes-small", 1))
}

func TestWhatNodesShowIsLearned(t *testing.T) {
	sizes(t, "discovery: what a Node shows beyond its description is learned")
	scale(t, "wide", 1)
	await(t, 2*time.Minute, onOneNodeOf("sizes-big", 1))
	state := w.Sandbox.State()
	reader := agentAs(t, state.Paths.ReaderCertificate, state.Paths.ReaderKey)
	poll(t, soon, func(ctx context.Context) (string, error) {
		answer, err := reader.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{
			Cluster: theCluster(), Id: sandbox.ClusterNamespace + "/sizes-big",
		})
		if err != nil {
			return "", err
		}
		group := answer.GetNodeGroup()
		learned := func(path string) bool {
			return group.GetSources()[path].GetKind() == agentv1alpha1.SourceKind_SOURCE_KIND_LEARNED
		}
		nic, memory := group.GetCapacity()["example.com/nic"], group.GetOverhead()["memory"]
		// Of the 64 GiB described, the kubelet has 63, and reserves 100 MiB of them.
		if nic == "2" && learned("capacity.example.com/nic") && memory == "1124Mi" && learned("overhead.memory") && len(group.GetProblems()) == 0 {
			return "", nil
		}
		return fmt.Sprintf("the agent to have learned from the Node: it has %q of example.com/nic, an overhead of %q memory, %v, %v",
			nic, memory, group.GetSources(), group.GetProblems()), nil
	})
}

func TestWhyNothingCanBeHadIsInTheNodeClass(t *testing.T) {
	sizes(t, "availability: max size, pause and quota are in the NodeClass with reason and message")
	available := func(s shimv1.SelectedNodeGroup) bool { return s.Available }
	refused := func(reason string) func(shimv1.SelectedNodeGroup) bool {
		return func(s shimv1.SelectedNodeGroup) bool { return !s.Available && s.Reason == reason && s.Message != "" }
	}
	annotate(t, "sizes-big", clusterv1.AutoscalerMaxSizeAnnotation, `"0"`)
	t.Cleanup(func() { // what is paused is not deleted
		if t.Failed() {
			annotate(t, "sizes-small-spot", clusterv1.PausedAnnotation, "null")
		}
	})
	annotate(t, "sizes-small-spot", clusterv1.PausedAnnotation, `"true"`)
	poll(t, soon, selected("sizes-small-spot", "no room while it is paused", refused("Paused")))
	poll(t, soon, selected("sizes-big", "no room for its max size", refused("AtMaxSize")))
	poll(t, soon, selected("sizes-small", "room", available))
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, described(t, "sizes-big").GetAvailability().GetReason())
	annotate(t, "sizes-small-spot", clusterv1.PausedAnnotation, "null")
	poll(t, soon, selected("sizes-small-spot", "room again", available))

	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "machines"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/machines.cluster.x-k8s.io": resource.MustParse("0")}},
	}
	require.NoError(t, w.Hub.Create(within(t, soon), quota))
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(w.Hub.Delete(context.Background(), quota)); err != nil {
			t.Error(err)
		}
	})
	// The sandbox's hub has no controller that computes quotas.
	quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: quota.Spec.Hard}
	require.NoError(t, w.Hub.Status().Update(within(t, soon), quota))
	poll(t, soon, selected("sizes-small", "no room for the quota", refused("QuotaExceeded")))
	require.NoError(t, w.Hub.Delete(within(t, soon), quota))
	poll(t, soon, selected("sizes-small", "room again", available))
}

// The status of a NodeClass is written from the snapshot, at once when a condition turns, so it
// can only be newer than the snapshot.
func TestAChangeInTheHubIsInTheShimsSnapshotWithinHalfASecond(t *testing.T) {
	figure := sizes(t, "snapshot: a change in the hub is in the shim's")
	const rounds, bound = 20, 500 * time.Millisecond
	spoke, err := client.NewWithWatch(w.Sandbox.SpokeConfig(), client.Options{Scheme: testenv.Scheme()})
	require.NoError(t, err)
	ctx := within(t, 2*time.Minute)
	watch, err := spoke.Watch(ctx, &shimv1.ClusterAPINodeClassList{}, client.MatchingFields{"metadata.name": "sizes"})
	require.NoError(t, err)
	defer watch.Stop()
	until := func(valid bool) {
		t.Helper()
		for {
			select {
			case <-ctx.Done():
				t.Fatalf("the condition %s never became %t", shimv1.ConditionNodeGroupsValid, valid)
			case event, open := <-watch.ResultChan():
				require.True(t, open, "the watch ended")
				class, ok := event.Object.(*shimv1.ClusterAPINodeClass)
				if ok && class.StatusConditions().Get(shimv1.ConditionNodeGroupsValid).IsTrue() == valid {
					return
				}
			}
		}
	}
	until(true)
	var took []time.Duration
	for i := range rounds {
		value := `"many"`
		if i%2 == 1 {
			value = "null"
		}
		began := time.Now()
		annotate(t, "sizes-big", cpuAnnotation, value)
		until(i%2 == 1)
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	figure("median %s, longest %s, of %d", rounded(took[rounds/2]), rounded(took[rounds-1]), rounds)
	require.Less(t, took[rounds/2], bound)
}
