package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// copies applies a file of the crowd's under another name, with changes, and deletes its objects at
// the end of the test. change may be nil.
func copies(t *testing.T, c client.Client, file, name string, change func(*unstructured.Unstructured)) {
	t.Helper()
	copiesOf(t, c, file, "crowd", name, change)
}

// copiesOf is [copies], for a file whose objects have the name original.
func copiesOf(t *testing.T, c client.Client, file, original, name string, change func(*unstructured.Unstructured)) {
	t.Helper()
	objects, err := manifests.LoadAs(file, original, name)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		for _, o := range objects {
			change(o)
		}
	}
	if err := manifests.ApplyObjects(within(t, soon), c, objects...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		if err := manifests.DeleteObjects(ctx, c, objects...); err != nil {
			t.Error(err)
		}
	})
}

// of returns a change that only applies to objects of one kind.
func of(kind string, change func(*unstructured.Unstructured)) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		if o.GetKind() == kind {
			change(o)
		}
	}
}

func annotated(key, value string) func(*unstructured.Unstructured) {
	return of("MachineDeployment", func(o *unstructured.Unstructured) {
		o.SetAnnotations(lo.Assign(o.GetAnnotations(), map[string]string{key: value}))
	})
}

func set(o *unstructured.Unstructured, value any, path ...string) {
	if err := unstructured.SetNestedField(o.Object, value, path...); err != nil {
		panic(err) // the test's own manifests are at fault
	}
}

// static turns the crowd's NodePool into a static one with this many Nodes.
func static(nodes int64) func(*unstructured.Unstructured) {
	return of("NodePool", func(o *unstructured.Unstructured) { set(o, nodes, "spec", "replicas") })
}

func sizePool(ctx context.Context, name string, nodes int) error {
	pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: name}}
	return w.Spoke.Patch(ctx, pool, mergePatch(fmt.Sprintf(`{"spec":{"replicas":%d}}`, nodes)))
}

// initialized returns a condition: a NodePool has this many Nodes that accept pods, and no others.
func initialized(pool string, nodes int) func(timeline.State) string {
	return func(s timeline.State) string {
		mine := lo.Filter(s.Live(), func(j timeline.Timeline, _ int) bool { return j.NodePool == pool })
		take := lo.CountBy(mine, func(j timeline.Timeline) bool {
			return j.Reached(timeline.Initialized) && !j.Reached(timeline.Deleting)
		})
		return lo.Ternary(take == nodes && len(mine) == nodes, "",
			fmt.Sprintf("NodePool %s to have %d Nodes: it has %d, of which %d take pods", pool, nodes, len(mine), take))
	}
}

func made(pool string) int {
	return lo.CountBy(w.Recorder.State().Timelines, func(j timeline.Timeline) bool { return j.NodePool == pool })
}

func TestAStaticNodePoolHasItsNodesAndOneWithoutRoomStallsNoOther(t *testing.T) {
	figure := shows(t, "static NodePools: grown and shrunk; one that has no room stalls no other pod")
	if testing.Short() {
		t.Skip("not in the short run: needs a feature gate")
	}
	useCrowd(t)
	copies(t, w.Hub, manifests.CrowdHub, "static", annotated(clusterv1.AutoscalerMaxSizeAnnotation, "3"))
	copies(t, w.Spoke, manifests.CrowdSpoke, "static", static(2))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		if err := errors.Join(sizePool(ctx, "static", 0), w.Recorder.Await(ctx, initialized("static", 0))); err != nil {
			t.Error(err)
		}
	})
	size := func(nodes int) {
		t.Helper()
		require.NoError(t, sizePool(within(t, soon), "static", nodes))
	}
	await(t, 2*time.Minute, initialized("static", 2))
	size(3)
	await(t, 2*time.Minute, initialized("static", 3))
	size(1)
	await(t, 2*time.Minute, initialized("static", 1))
	require.Equal(t, 3, made("static"))

	size(6) // there is room for three of them
	await(t, 2*time.Minute, initialized("static", 3))
	before, began := made("static"), time.Now()
	scale(t, "crowd", 3)
	await(t, soon, running(3))
	figure("3 other pods ran after %.0f s", time.Since(began).Seconds())
	poll(t, soon, func(ctx context.Context) (string, error) {
		var all corev1.EventList
		err := w.Spoke.List(ctx, &all)
		told := lo.ContainsBy(all.Items, func(e corev1.Event) bool { return e.Reason == "NoRoomForReplicas" && e.InvolvedObject.Name == "static" })
		return lo.Ternary(told, "", "an event on the NodePool"), err
	})
	poll(t, 4*time.Minute, func(context.Context) (string, error) { // it is still retried, and not every second
		return lo.Ternary(time.Since(began) > 100*time.Second, "", "some time to pass"), nil
	})
	tries := made("static") - before
	figure("%d NodeClaims made in vain in %.0f s", tries, time.Since(began).Seconds())
	require.LessOrEqual(t, tries, 3*5, "three at a time, every half minute")

	annotate(t, "static", clusterv1.AutoscalerMaxSizeAnnotation, `"6"`)
	began = time.Now()
	await(t, 3*time.Minute, initialized("static", 6))
	figure("with room its Nodes were there after %.0f s", time.Since(began).Seconds())
}

func TestAStandaloneNodeClaimGetsAMachine(t *testing.T) {
	shows(t, "a NodeClaim that a person makes gets a machine, and gives it back")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	useCrowd(t)
	claim := &karpenterv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "by-hand"},
		Spec: karpenterv1.NodeClaimSpec{
			NodeClassRef: &karpenterv1.NodeClassReference{Group: "karpenter.cluster.x-k8s.io", Kind: "ClusterAPINodeClass", Name: "crowd"},
			Requirements: []karpenterv1.NodeSelectorRequirementWithMinValues{
				{Key: corev1.LabelArchStable, Operator: corev1.NodeSelectorOpIn, Values: []string{"amd64"}},
			},
		},
	}
	require.NoError(t, w.Spoke.Create(t.Context(), claim))
	t.Cleanup(func() { _ = client.IgnoreNotFound(w.Spoke.Delete(context.Background(), claim)) })
	await(t, 2*time.Minute, initialized("", 1))
	require.EqualValues(t, 1, crowdReplicas(t))
	require.NoError(t, w.Spoke.Delete(t.Context(), claim))
	await(t, 2*time.Minute, nothingLives)
	poll(t, soon, func(ctx context.Context) (string, error) {
		err := w.Spoke.Get(ctx, client.ObjectKeyFromObject(claim), claim)
		return lo.Ternary(apierrors.IsNotFound(err), "", "the NodeClaim to go"), client.IgnoreNotFound(err)
	})
	await(t, soon, crowdRuns(0))
}

func TestNodesThatExpireAreReplacedOnce(t *testing.T) {
	figure := shows(t, "nodes that expire are replaced, each once in its time")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	useCrowd(t)
	pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "crowd"}}
	require.NoError(t, w.Spoke.Patch(t.Context(), pool, mergePatch(`{"spec":{"template":{"spec":{"expireAfter":"2m"}}}}`)))
	known := len(w.Recorder.State().Timelines)
	mine := func() []timeline.Timeline { return w.Recorder.State().Timelines[known:] }
	scale(t, "crowd", 3)
	await(t, soon, running(3))
	first := lo.SliceToMap(mine(), func(j timeline.Timeline) (types.UID, bool) { return j.UID, true })
	require.Len(t, first, 3)
	poll(t, 5*time.Minute, func(context.Context) (string, error) {
		expired := lo.CountBy(mine(), func(j timeline.Timeline) bool { return first[j.UID] && j.Reached(timeline.Gone) })
		return lo.Ternary(expired == 3, "", fmt.Sprintf("3 NodeClaims to expire: %d have", expired)), nil
	})
	await(t, 2*time.Minute, running(3))
	await(t, 2*time.Minute, crowdRuns(3))
	figure("%d NodeClaims made", len(mine()))
	require.Len(t, mine(), 6, "each is replaced by one, long before that expires")
}

// group creates a copy of the crowd's node group for a NodeClass, with its own name as its
// instance type.
func group(t *testing.T, nodeClass, name, capacityType, perHour, size string) {
	t.Helper()
	groupOf(t, name, nodeClass, name, capacityType, perHour, size)
}

// groupOf is [group], with an instance type.
func groupOf(t *testing.T, instanceType, nodeClass, name, capacityType, perHour, size string) {
	t.Helper()
	copies(t, w.Hub, manifests.CrowdHub, name, func(o *unstructured.Unstructured) {
		of("SimMachineTemplate", func(o *unstructured.Unstructured) {
			set(o, instanceType, "spec", "template", "spec", "instanceType")
		})(o)
		of("MachineDeployment", func(o *unstructured.Unstructured) {
			o.SetLabels(lo.Assign(o.GetLabels(), map[string]string{"fleet.example.com/pool": nodeClass}))
			annotated("capacity.cluster-autoscaler.kubernetes.io/labels",
				"karpenter.sh/capacity-type="+capacityType+",node.kubernetes.io/instance-type="+instanceType)(o)
			annotated("cluster.x-k8s.io/machine-current-price", perHour)(o)
			annotated(clusterv1.AutoscalerMaxSizeAnnotation, size)(o)
		})(o)
	})
}

// requirePool creates a copy of the crowd's NodePool, NodeClass and Deployment, with one
// requirement and with consolidation.
func requirePool(t *testing.T, name string, requirement map[string]any) {
	t.Helper()
	copies(t, w.Spoke, manifests.CrowdSpoke, name, of("NodePool", func(o *unstructured.Unstructured) {
		set(o, "WhenEmptyOrUnderutilized", "spec", "disruption", "consolidationPolicy")
		set(o, []any{requirement}, "spec", "template", "spec", "requirements")
	}))
	copies(t, w.Spoke, manifests.CrowdWorkload, name, nil)
	if err := w.AwaitNodePool(within(t, soon), name); err != nil {
		t.Fatal(err)
	}
	goHome(t, name)
}

// where returns the number of live Nodes of each node group.
func where() map[string]int {
	return lo.CountValuesBy(w.Recorder.State().Live(), func(j timeline.Timeline) string { return j.Group })
}

func TestASpotNodeIsReplacedByACheaperOneOnce(t *testing.T) {
	figure := shows(t, "spot to spot: a Node is replaced by one of fifteen cheaper ones, once")
	if testing.Short() {
		t.Skip("not in the short run: needs a feature gate")
	}
	leaveAsFound(t)
	group(t, "spots", "spots-dear", "spot", "9", "3")
	requirePool(t, "spots", map[string]any{"key": karpenterv1.CapacityTypeLabelKey, "operator": "In", "values": []any{"spot"}})
	scale(t, "spots", 1)
	await(t, 2*time.Minute, running(1))
	const cheaper = 15 // with fewer, Karpenter does not consolidate, lest it chase the cheapest
	for i := range cheaper {
		group(t, "spots", fmt.Sprintf("spots-%02d", i), "spot", strconv.Itoa(1+i%5), "3")
	}
	began := time.Now()
	poll(t, 4*time.Minute, func(context.Context) (string, error) {
		return lo.Ternary(where()["spots-00"] == 1 && len(where()) == 1, "", fmt.Sprintf("the Node to be one of the cheapest: %v", where())), nil
	})
	figure("it took %.0f s", time.Since(began).Seconds())
	await(t, soon, running(1))
	settled := time.Now()
	poll(t, 2*time.Minute, func(context.Context) (string, error) {
		return lo.Ternary(time.Since(settled) > 45*time.Second, "", "some time to pass"), nil
	})
	require.Equal(t, 2, made("spots"))
}

func TestMinValuesAreKept(t *testing.T) {
	shows(t, "minValues: nothing is planned with fewer instance types than a NodePool asks for")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	leaveAsFound(t)
	group(t, "varied", "varied-a", "on-demand", "1", "3")
	requirePool(t, "varied", map[string]any{"key": corev1.LabelInstanceTypeStable, "operator": "Exists", "minValues": int64(2)})
	scale(t, "varied", 1)
	poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		var all corev1.EventList
		err := w.Spoke.List(ctx, &all)
		told := lo.ContainsBy(all.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Kind == "NodePool" && e.InvolvedObject.Name == "varied" && strings.Contains(e.Message, "minValues")
		})
		return lo.Ternary(told, "", "an event of the NodePool's that names minValues"), err
	})
	require.Zero(t, made("varied"))
	group(t, "varied", "varied-b", "on-demand", "2", "3")
	await(t, 2*time.Minute, running(1))
	require.Equal(t, map[string]int{"varied-a": 1}, where(), "the cheaper of the two")
	var claims karpenterv1.NodeClaimList
	require.NoError(t, w.Spoke.List(t.Context(), &claims, client.MatchingLabels{karpenterv1.NodePoolLabelKey: "varied"}))
	require.Len(t, claims.Items, 1)
	types, ok := lo.Find(claims.Items[0].Spec.Requirements, func(r karpenterv1.NodeSelectorRequirementWithMinValues) bool {
		return r.Key == corev1.LabelInstanceTypeStable
	})
	require.True(t, ok)
	require.ElementsMatch(t, []string{"varied-a", "varied-b"}, types.Values)
	require.Equal(t, new(2), types.MinValues)
}

func TestReservedMachinesAreUsedFirst(t *testing.T) {
	figure := shows(t, "reserved machines are used before others, and not left for cheaper ones")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	useCrowd(t)
	group(t, "mixed", "mixed-reserved", "reserved", "3", "2")
	group(t, "mixed", "mixed-ondemand", "on-demand", "1", "10")
	requirePool(t, "mixed", map[string]any{"key": karpenterv1.CapacityTypeLabelKey, "operator": "In", "values": []any{"reserved", "on-demand"}})
	scale(t, "mixed", 3)
	await(t, 2*time.Minute, running(3))
	full := map[string]int{"mixed-reserved": 2, "mixed-ondemand": 1}
	throughout(t, unconsolidated, time.Second, func() { require.Equal(t, full, where(), "a cheaper machine is no reason to leave a reserved one") })
	planned := made("mixed")
	// The pod that goes is one on a reserved machine, which the pod of the dear one then gets.
	var pods corev1.PodList
	require.NoError(t, w.Spoke.List(t.Context(), &pods, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{"app": "mixed"}))
	var reserved corev1.NodeList
	require.NoError(t, w.Spoke.List(t.Context(), &reserved, client.MatchingLabels{corev1.LabelInstanceTypeStable: "mixed-reserved"}))
	goes, found := lo.Find(pods.Items, func(p corev1.Pod) bool {
		return lo.ContainsBy(reserved.Items, func(n corev1.Node) bool { return n.Name == p.Spec.NodeName })
	})
	require.True(t, found)
	require.NoError(t, w.Spoke.Patch(t.Context(), &goes, mergePatch(fmt.Sprintf(`{"metadata":{"annotations":{%q:"-1"}}}`, corev1.PodDeletionCost))))
	scale(t, "mixed", 2)
	await(t, 2*time.Minute, func(s timeline.State) string {
		if missing := running(2)(s); missing != "" {
			return missing
		}
		return lo.Ternary(len(s.Live()) == 2, "", "two Nodes to be left")
	})
	poll(t, 3*time.Minute, func(context.Context) (string, error) {
		return lo.Ternary(where()["mixed-reserved"] == 2, "", fmt.Sprintf("both pods to be on reserved machines: %v", where())), nil
	})
	figure("%d NodeClaims made for 3 pods, %d after one was gone", planned, made("mixed")-planned)
}

// unconsolidated is how long Karpenter must replace no Node by a cheaper one. It looks every ten
// seconds, looks again fifteen seconds after it found something, and then waits for the new Node.
const unconsolidated = 75 * time.Second

// TestNodesStayWhereOneOfferingHasTwoPrices has two node groups that Karpenter cannot tell apart, a
// cheap one that is full and a dear one, and a third whose price lies between theirs. If the price
// of the offering followed the room in its groups, Karpenter would replace the cheap Nodes with
// those of the third group as soon as theirs was full, and those again as soon as it was not.
func TestNodesStayWhereOneOfferingHasTwoPrices(t *testing.T) {
	figure := shows(t, "two prices in one offering: Nodes stay where they are, with the cheap group full and not full")
	if testing.Short() {
		t.Skip("not in the short run: waits for what must not happen")
	}
	leaveAsFound(t)
	const class, cheap, dear, between = "priced", "priced-cheap", "priced-dear", "priced-between"
	groupOf(t, "priced", class, cheap, "on-demand", "1", "2")
	groupOf(t, "priced", class, dear, "on-demand", "3", "10")
	group(t, class, between, "on-demand", "2", "10")
	// Without a zone, Karpenter would look up prices in the zones of existing Nodes, which the dear
	// group has none of.
	for name, instanceType := range map[string]string{cheap: "priced", dear: "priced", between: between} {
		annotate(t, name, "capacity.cluster-autoscaler.kubernetes.io/labels",
			fmt.Sprintf("%q", "karpenter.sh/capacity-type=on-demand,node.kubernetes.io/instance-type="+instanceType+",topology.kubernetes.io/zone=zone-a"))
	}
	requirePool(t, class, map[string]any{"key": karpenterv1.CapacityTypeLabelKey, "operator": "In", "values": []any{"on-demand"}})
	poll(t, soon, conditionSays(class, shimv1.ConditionNodeGroupsValid, "priced-dear costs 3 and fleet/priced-cheap 1"))
	// The other Node may go to a cheaper machine once: Karpenter expects one as long as the dear
	// group has room.
	stay := func(least, nodeClaims int) {
		t.Helper()
		throughout(t, unconsolidated, time.Second, func() {
			require.GreaterOrEqual(t, where()[cheap], least, "Nodes of the cheap group stay: %v", where())
			require.LessOrEqual(t, made(class), nodeClaims)
		})
		figure("%v, %d NodeClaims after %v", where(), made(class), unconsolidated)
	}
	scale(t, class, 2)
	await(t, 2*time.Minute, running(2))
	require.Equal(t, map[string]int{cheap: 2}, where())
	stay(2, 2) // it is full now
	scale(t, class, 3)
	await(t, 2*time.Minute, running(3))
	stay(2, 4)
	annotate(t, cheap, clusterv1.AutoscalerMaxSizeAnnotation, `"4"`) // it has room again, and keeps it
	poll(t, soon, selectedBy(class, cheap, "room", func(s shimv1.SelectedNodeGroup) bool { return s.Available }))
	scale(t, class, 4) // Karpenter looks at its Nodes again when there is another one
	await(t, 2*time.Minute, running(4))
	stay(3, 5)
}

// TestBudgetsAreKept has Nodes drift while the NodePool's budgets allow none of them to be replaced
// today, and then two at a time.
func TestBudgetsAreKept(t *testing.T) {
	figure := shows(t, "budgets: none for a reason on a schedule, while others go; then no more at once than their number")
	if testing.Short() {
		t.Skip("not in the short run: replaces Nodes and waits for what must not happen")
	}
	useCrowd(t)
	const pods, atOnce = 6, 2
	patchGroup(t, "crowd", fmt.Sprintf(`{"spec":{"rollout":{"strategy":{"type":%q}},"template":{"spec":{"version":%q}}}}`,
		clusterv1.OnDeleteMachineDeploymentStrategyType, versionBefore))
	pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "crowd"}}
	budgets := func(text string) {
		t.Helper()
		require.NoError(t, w.Spoke.Patch(within(t, soon), pool, mergePatch(fmt.Sprintf(`{"spec":{"disruption":{"budgets":%s}}}`, text))))
	}
	// Whatever the time is, this budget counts now: a window of a day opens every hour.
	budgets(`[{"nodes":"0","reasons":["Drifted"],"schedule":"0 * * * *","duration":"24h"},{"nodes":"100%"}]`)
	scale(t, "crowd", pods+1)
	await(t, 2*time.Minute, running(pods+1))
	known := made("crowd")
	patchGroup(t, "crowd", fmt.Sprintf(`{"spec":{"template":{"spec":{"version":%q}}}}`, versionAfter))
	nodeClaims := func() []karpenterv1.NodeClaim {
		t.Helper()
		var all karpenterv1.NodeClaimList
		require.NoError(t, w.Spoke.List(within(t, soon), &all, client.MatchingLabels{karpenterv1.NodePoolLabelKey: "crowd"}))
		return all.Items
	}
	poll(t, 6*time.Minute, func(context.Context) (string, error) {
		drifted := lo.CountBy(nodeClaims(), func(n karpenterv1.NodeClaim) bool {
			return n.StatusConditions().Get(karpenterv1.ConditionTypeDrifted).IsTrue()
		})
		return lo.Ternary(drifted == pods+1, "", fmt.Sprintf("%d NodeClaims to drift: %d have", pods+1, drifted)), nil
	})
	throughout(t, undisturbed, time.Second, func() { require.Equal(t, map[string]int{versionBefore: pods + 1}, versions(t, "crowd")) })
	scale(t, "crowd", pods) // the budget is only for drift
	await(t, 2*time.Minute, crowdRuns(pods))
	require.Equal(t, map[string]int{versionBefore: pods}, versions(t, "crowd"))
	require.Equal(t, known, made("crowd"))

	most, began := 0, time.Now()
	budgets(fmt.Sprintf(`[{"nodes":"%d"}]`, atOnce))
	poll(t, upgradeWithin, func(context.Context) (string, error) {
		have := versions(t, "crowd")
		disrupted := lo.CountBy(nodeClaims(), func(n karpenterv1.NodeClaim) bool {
			conditions := n.StatusConditions()
			goes := !n.DeletionTimestamp.IsZero() || conditions.Get(karpenterv1.ConditionTypeDisruptionReason).IsTrue()
			// A drained Node whose instance is being removed does not count any more.
			return goes && !conditions.Get(karpenterv1.ConditionTypeInstanceTerminating).IsTrue()
		})
		most = max(most, disrupted)
		require.LessOrEqual(t, disrupted, atOnce, "Nodes that are being replaced")
		done := have[versionAfter] == pods && len(have) == 1
		return lo.Ternary(done, "", fmt.Sprintf("%d Machines of %s: there are %v", pods, versionAfter, have)), nil
	})
	await(t, 2*time.Minute, running(pods))
	await(t, 2*time.Minute, crowdRuns(pods))
	require.Positive(t, most, "Nodes that were seen to be replaced")
	figure("%d Nodes replaced in %.0f s, at most %d at once", pods, time.Since(began).Seconds(), most)
	require.Equal(t, pods, made("crowd")-known, "each is replaced once")
}

func TestACapacityBufferKeepsNodesReady(t *testing.T) {
	figure := shows(t, "a CapacityBuffer keeps Nodes ready, and fills up again")
	if testing.Short() {
		t.Skip("not in the short run: needs a feature gate")
	}
	useCrowd(t)
	scale(t, "crowd", 1)
	await(t, soon, running(1))
	buffer := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "autoscaling.x-k8s.io/v1beta1", "kind": "CapacityBuffer",
		"metadata": map[string]any{"namespace": "default", "name": "crowd"},
		"spec": map[string]any{
			"replicas": int64(2), "scalableRef": map[string]any{"apiGroup": "apps", "kind": "Deployment", "name": "crowd"},
		},
	}}
	require.NoError(t, manifests.ApplyObjects(t.Context(), w.Spoke, buffer))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		if err := manifests.DeleteObjects(ctx, w.Spoke, buffer); err != nil {
			t.Error(err)
		}
	})
	await(t, 2*time.Minute, initialized("crowd", 3))
	began := time.Now()
	scale(t, "crowd", 3)
	await(t, soon, running(3))
	figure("2 more pods ran after %.1f s", time.Since(began).Seconds())
	await(t, 2*time.Minute, initialized("crowd", 5))
	require.NoError(t, manifests.DeleteObjects(within(t, soon), w.Spoke, buffer))
	await(t, 2*time.Minute, initialized("crowd", 3))
}

// TestAFullReservedGroupIsReplacedInPlace uses all available machines: no Node can be created
// before another one is removed.
func TestAFullReservedGroupIsReplacedInPlace(t *testing.T) {
	figure := shows(t, "a full group of reserved machines: Nodes are drained first and replaced in place, for drift and for repair")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	inSandbox(t, sandbox.Options{
		Name: "e2e-fixed", FeatureGates: []string{"NodeRepair", "TerminateFirstDrift", "TerminateFirstRepair"},
		ShimEnv: []string{"NODE_REPAIR_AFTER=" + repairAfter.String()},
	})
	useCrowd(t)
	const size = 6 // Karpenter does not repair if more than a fifth is unhealthy
	annotate(t, "crowd", "capacity.cluster-autoscaler.kubernetes.io/labels", `"karpenter.sh/capacity-type=reserved"`)
	annotate(t, "crowd", clusterv1.AutoscalerMaxSizeAnnotation, strconv.Quote(strconv.Itoa(size)))
	patchGroup(t, "crowd", `{"spec":{"rollout":{"strategy":{"type":"OnDelete"}},"template":{"spec":{"version":"`+versionBefore+`"}}}}`)
	pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "crowd"}}
	reserved := mergePatch(`{"spec":{"disruption":{"budgets":[{"nodes":"2"}]},"template":{"spec":{"requirements":[
		{"key":"karpenter.sh/capacity-type","operator":"In","values":["reserved"]}]}}}}`)
	require.NoError(t, w.Spoke.Patch(t.Context(), pool, reserved))
	scale(t, "crowd", size)
	await(t, 2*time.Minute, running(size))
	// Core may plan twice with the single free machine, for a pod and for the replacement of
	// another Node: one of both is refused.
	got := func() int {
		return lo.CountBy(w.Recorder.State().Timelines, func(j timeline.Timeline) bool { return j.NodePool == "crowd" && j.Reached(timeline.Launched) })
	}
	var most int
	atMost := func() {
		most = max(most, len(listCrowd(t)))
		require.LessOrEqual(t, most, size, "Machines")
	}

	// drift changes the specification of Nodes, and waits until each was replaced once.
	drift := func(what string, change func()) {
		t.Helper()
		before, first, began := got(), crowdMachines(t), time.Now()
		change()
		poll(t, 5*time.Minute, func(context.Context) (string, error) {
			atMost()
			old := lo.Intersect(first, uidsOf(listCrowd(t)))
			return lo.Ternary(len(old) == 0, "", fmt.Sprintf("all Nodes to be replaced: %d are not", len(old))), nil
		})
		await(t, 2*time.Minute, running(size))
		await(t, 2*time.Minute, crowdRuns(size))
		require.Equal(t, size, got()-before, "each is replaced once")
		figure("%s: %d Nodes drifted, replaced in %.0f s", what, size, time.Since(began).Seconds())
	}
	drift("NodePool", func() {
		change := mergePatch(`{"spec":{"template":{"metadata":{"labels":{"fleet.example.com/generation":"2"}}}}}`)
		require.NoError(t, w.Spoke.Patch(t.Context(), pool, change))
	})
	drift("template", func() { patchGroup(t, "crowd", `{"spec":{"template":{"spec":{"version":"`+versionAfter+`"}}}}`) })
	require.Equal(t, map[string]int{versionAfter: size}, versions(t, "crowd"))
	figure("%d NodeClaims refused", made("crowd")-got())

	sick := listCrowd(t)[0]
	began := time.Now()
	sicken(t, &sick, corev1.ConditionFalse)
	poll(t, 4*time.Minute, func(context.Context) (string, error) {
		atMost()
		return lo.Ternary(!lo.Contains(uidsOf(listCrowd(t)), sick.UID), "", "Machine "+sick.Name+" to be replaced"), nil
	})
	awaitReplaced(t, &sick, size)
	require.Equal(t, 3*size+1, got())
	figure("1 repaired in %.0f s, never more than %d Machines", time.Since(began).Seconds(), most)
}

// TestANodeOverlayAppliesToANodeGroupThatAppearsLater writes the overlay before there is a node
// group that it applies to. Karpenter itself looks at overlays again only when one of them, a
// NodePool or a NodeClass changes, and every six hours.
func TestANodeOverlayAppliesToANodeGroupThatAppearsLater(t *testing.T) {
	figure := shows(t, "a NodeOverlay applies to a node group that appears later")
	if testing.Short() {
		t.Skip("not in the short run: needs a feature gate")
	}
	leaveAsFound(t)
	group(t, "overlaid", "overlaid-first", "on-demand", "1", "3")
	requirePool(t, "overlaid", map[string]any{"key": karpenterv1.CapacityTypeLabelKey, "operator": "In", "values": []any{"on-demand"}})
	overlaid(t, "overlaid-later")
	scale(t, "overlaid", 1)
	await(t, 2*time.Minute, onOneNodeOf("overlaid-first", 1))

	// Its own price is the higher one.
	group(t, "overlaid", "overlaid-later", "on-demand", "5", "3")
	goHome(t, "overlaid") // before the node group is deleted
	poll(t, 2*time.Minute, selectedBy("overlaid", "overlaid-later", "a price of its own", func(s shimv1.SelectedNodeGroup) bool {
		return s.Available && s.Price == "5"
	}))
	began := time.Now()
	scale(t, "overlaid", 2)
	poll(t, consolidated, func(context.Context) (string, error) {
		moved := where()["overlaid-later"] == 2 && len(where()) == 1
		return lo.Ternary(moved, "", fmt.Sprintf("both pods to be on the cheaper machines, by the overlay: %v", where())), nil
	})
	await(t, 2*time.Minute, running(2))
	figure("a new pod and the one that ran are on the later node group after %.0f s, with %d NodeClaims", time.Since(began).Seconds(), made("overlaid"))
}
