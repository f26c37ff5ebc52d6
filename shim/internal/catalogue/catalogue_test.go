package catalogue_test

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func nodePool(class string, taints ...corev1.Taint) *karpv1.NodePool {
	pool := &karpv1.NodePool{}
	pool.Spec.Template.Spec.NodeClassRef = &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: class}
	pool.Spec.Template.Spec.Taints = taints
	return pool
}

func types(tb testing.TB, snapshot *catalogue.Snapshot, pool *karpv1.NodePool) []*cloudprovider.InstanceType {
	tb.Helper()
	template := &pool.Spec.Template.Spec
	class, ok := snapshot.Class(template.NodeClassRef.Name)
	require.True(tb, ok)
	return class.InstanceTypes(template.Taints, template.StartupTaints)
}

func names(types []*cloudprovider.InstanceType) []string {
	return lo.Map(types, func(it *cloudprovider.InstanceType, _ int) string { return it.Name })
}

func TestSelectorsRunOnTheLabelsOfMachineDeployments(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "red", Labels: map[string]string{"team": "red"}},
		{Name: "blue", Labels: map[string]string{"team": "blue"}},
	})
	w.AddNodeClass("red", &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}})
	w.AddNodeClass("empty", &metav1.LabelSelector{})
	w.AddNodeClass("nobody", &metav1.LabelSelector{MatchLabels: map[string]string{"team": "green"}})
	w.AddNodeClass("broken", &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Near"}}})

	snapshot := w.Catalogue.Snapshot()
	assert.Equal(t, []string{"blue", "red"}, names(types(t, snapshot, nodePool(shimtest.NodeClassName))), "no selector selects all")
	assert.Equal(t, []string{"blue", "red"}, names(types(t, snapshot, nodePool("empty"))))
	assert.Equal(t, []string{"red"}, names(types(t, snapshot, nodePool("red"))))
	assert.Empty(t, types(t, snapshot, nodePool("nobody")))
	broken, ok := snapshot.Class("broken")
	require.True(t, ok)
	require.ErrorContains(t, broken.SelectorError, "spec.scalableResourceSelector")
	assert.Empty(t, broken.Groups)
	_, ok = snapshot.Class("missing")
	assert.False(t, ok)
}

func TestChangesOfNodeGroupsShowAndOthersStayTheSameObjects(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}})
	before := types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName))
	w.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Capacity["cpu"] = "16" })
	var after []*cloudprovider.InstanceType
	w.Eventually(func() bool {
		after = types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName))
		return after[0].Capacity.Cpu().String() == "16"
	}, "the change shows")
	assert.Equal(t, "4", before[0].Capacity.Cpu().String(), "what was handed out does not change")
	assert.Same(t, before[1], after[1])
}

func TestTheLastKnownGoodStaysWhileTheAgentIsAway(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Disconnect()
	w.AddNodeClass("later", nil)
	assert.Equal(t, []string{"a"}, names(types(t, w.Catalogue.Snapshot(), nodePool("later"))))
}

func TestThereIsNoSnapshotBeforeTheAgentWasHeardOf(t *testing.T) {
	kube := shimtest.New(t, nil).Kube
	w := shimtest.New(t, nil)
	unheard := catalogue.New(clock.RealClock{}, w.Client.MirrorNodeGroups(w.Cluster), kube, time.Minute) // a mirror that does not run
	go func() { _ = unheard.Start(t.Context()) }()
	unheard.Refresh()
	assert.Nil(t, unheard.Snapshot())
}

func TestAClusterWithoutNodeGroupsHasAnEmptyCatalogue(t *testing.T) {
	w := shimtest.New(t, nil)
	assert.Empty(t, types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName)))
	assert.Zero(t, shimtest.Metric(t, "karpenter_capi_catalogue_node_groups", nil))
	none := shimtest.Scraped(t, time.Now())
	w.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "first"})
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 1 }, "the first group shows")
	w.Eventually(func() bool { return shimtest.Metric(t, "karpenter_capi_catalogue_node_groups", nil) == 1 }, "and is counted")
	scrapes.Record(t, "KarpenterCapiNoNodeGroups", shimtest.Scraped(t, time.Now()), none)
}

func TestMarkedGroupsAreUnavailableForAWhile(t *testing.T) {
	marked := func(ttl time.Duration) (w *shimtest.Env, available func() int) {
		w = shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}}, shimtest.WithUnavailableTTL(ttl))
		w.Catalogue.MarkUnavailable("default/a")
		return w, func() int {
			return lo.CountBy(types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName)), func(it *cloudprovider.InstanceType) bool {
				return len(it.Offerings.Available()) > 0
			})
		}
	}
	w, available := marked(time.Hour)
	w.Eventually(func() bool { return available() == 1 }, "the mark shows")
	w, available = marked(2 * time.Second)
	begun := time.Now()
	w.Eventually(func() bool { return available() == 1 || time.Since(begun) > 2*time.Second }, "the mark shows, or is forgotten already")
	w.Eventually(func() bool { return available() == 2 }, "the mark is forgotten")
}

func TestAMarkEndsWhenTheAgentHasRoomAgain(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithUnavailableTTL(time.Hour))
	available := func() bool {
		return len(types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName))[0].Offerings.Available()) > 0
	}
	w.Catalogue.MarkUnavailable("default/a")
	w.Eventually(func() bool { return !available() }, "the mark shows")
	w.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Capacity["cpu"] = "2" })
	w.Eventually(func() bool {
		group, _ := w.Catalogue.Snapshot().Group("default/a")
		return group.Capacity.Cpu().String() == "2"
	}, "the change shows")
	assert.False(t, available(), "what the agent said before it refused ends no mark")
	w.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
	w.Eventually(func() bool {
		group, _ := w.Catalogue.Snapshot().Group("default/a")
		return !group.Available
	}, "the agent says the same")
	w.Agent.Unblock("default/a")
	w.Eventually(available, "the agent's word counts again")
}

func TestMarkedGroupsAreUnavailable(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Catalogue.MarkUnavailable("default/a")
	w.Eventually(func() bool {
		return len(types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName))[0].Offerings.Available()) == 0
	}, "the mark shows")
	group, ok := w.Catalogue.Snapshot().Group("default/a")
	require.True(t, ok)
	assert.False(t, w.Catalogue.Available(group))
	assert.False(t, w.Catalogue.Snapshot().Available(group))
}

func TestTaintedGroupsAreForNodePoolsThatDeclareTheTaint(t *testing.T) {
	taint := corev1.Taint{Key: "dedicated", Value: "gpu", Effect: corev1.TaintEffectNoSchedule}
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "plain"},
		{Name: "gpu", Taints: []*agentv1alpha1.Taint{{Key: "dedicated", Value: "gpu", Effect: "NoSchedule"}}},
	})
	check := func() {
		snapshot := w.Catalogue.Snapshot()
		assert.Equal(t, []string{"plain"}, names(types(t, snapshot, nodePool(shimtest.NodeClassName))))
		assert.Equal(t, []string{"gpu", "plain"}, names(types(t, snapshot, nodePool(shimtest.NodeClassName, taint))))
		startup := nodePool(shimtest.NodeClassName)
		startup.Spec.Template.Spec.StartupTaints = []corev1.Taint{taint}
		assert.Equal(t, []string{"gpu", "plain"}, names(types(t, snapshot, startup)))
	}
	check()
	before := types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName, taint))
	w.Agent.UpdateNodeGroup("default/plain", func(g *agentv1alpha1.NodeGroup) { g.Capacity["cpu"] = "2" })
	w.Eventually(func() bool {
		group, _ := w.Catalogue.Snapshot().Group("default/plain")
		return group.Capacity.Cpu().String() == "2"
	}, "the change shows")
	check()
	assert.NotSame(t, before[1], types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName, taint))[1])
}

func TestAChangeOfATaintedGroupIsAnnounced(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "gpu", Taints: []*agentv1alpha1.Taint{{Key: "dedicated", Value: "gpu", Effect: "NoSchedule"}}},
	})
	pool := nodePool(shimtest.NodeClassName, corev1.Taint{Key: "dedicated", Value: "gpu", Effect: corev1.TaintEffectNoSchedule})
	require.Len(t, types(t, w.Catalogue.Snapshot(), pool), 1)
	rebuilt := func() {
		t.Helper()
		for range 2 { // the first may have begun earlier
			before := w.Catalogue.Snapshot()
			w.Catalogue.Refresh()
			w.Eventually(func() bool { return w.Catalogue.Snapshot() != before }, "another snapshot")
		}
	}
	rebuilt()
	changes := w.Catalogue.Changes()
	rebuilt()
	require.Empty(t, changes, "nothing has changed")

	w.Agent.UpdateNodeGroup("default/gpu", func(g *agentv1alpha1.NodeGroup) { g.NodeLabels = map[string]string{"rack": "r1"} })
	w.Eventually(func() bool { return types(t, w.Catalogue.Snapshot(), pool)[0].Requirements.Has("rack") }, "the label shows")
	w.Eventually(func() bool { return len(changes) == 1 }, "a NodeOverlay may select the label")
}

func TestProblemsOfSelectedGroupsAreTold(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "good", Labels: map[string]string{"team": "red"}},
		{
			Name:     "odd",
			Labels:   map[string]string{"team": "blue"},
			Problems: []*agentv1alpha1.Problem{{Field: "metadata.annotations[cpu]", Value: "many", Message: "no quantity"}},
		},
		{Name: "unusable", Labels: map[string]string{"team": "blue"}, InstanceType: "no label!"},
	})
	w.AddNodeClass("red", &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}})
	red, _ := w.Catalogue.Snapshot().Class("red")
	assert.Empty(t, red.Problems)
	all, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
	require.Len(t, all.Problems, 2)
	assert.Contains(t, all.Problems[0], "default/odd")
	assert.Contains(t, all.Problems[0], "metadata.annotations[cpu]")
	assert.Contains(t, all.Problems[1], "default/unusable")
	assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_catalogue_node_groups_unusable", nil), 0)
	assert.Len(t, all.Groups, 2, "one bad group disturbs no other")
	assert.Equal(t, 2, w.Catalogue.Snapshot().Len())

	told := shimtest.Scraped(t, time.Now())
	w.Agent.RemoveNodeGroup("default/unusable")
	w.Eventually(func() bool { return shimtest.Metric(t, "karpenter_capi_catalogue_node_groups_unusable", nil) == 0 }, "it is gone")
	scrapes.Record(t, "KarpenterCapiNodeGroupsUnusable", shimtest.Scraped(t, time.Now()), told)
}

func TestGroupsBeyondTheNumberOfTaintsAreNamed(t *testing.T) {
	tainted := func(i int) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{
			Name:   fmt.Sprintf("group-%02d", i),
			Taints: []*agentv1alpha1.Taint{{Key: "team", Value: "t0", Effect: "NoSchedule"}, {Key: "team", Value: fmt.Sprint("t", i), Effect: "NoSchedule"}},
		}
	}
	w := shimtest.New(t, lo.Times(64, tainted))
	class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
	assert.Empty(t, class.Problems)

	for i := 64; i < 69; i++ {
		w.Agent.AddNodeGroup(tainted(i))
	}
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 69 }, "all groups are known")
	class, _ = w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
	require.Len(t, class.Problems, 1)
	assert.Contains(t, class.Problems[0], "default/group-64, default/group-65, default/group-66 and 2 more: Karpenter launches nothing from them")
	assert.Contains(t, class.Problems[0], "more than 64 different taints: use fewer, or")
	declares := func(value string) corev1.Taint {
		return corev1.Taint{Key: "team", Value: value, Effect: corev1.TaintEffectNoSchedule}
	}
	pool := nodePool(shimtest.NodeClassName, declares("t0"), declares("t63"), declares("t64"))
	assert.Equal(t, []string{"group-00", "group-63"}, names(types(t, w.Catalogue.Snapshot(), pool)))
}

// The default decides nothing, and is not reported.
func TestADriftPolicyThatDecidesNothingIsTold(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "karpenter", RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE},
		{Name: "cluster-api", RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ROLLING_UPDATE},
	})
	class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
	assert.Empty(t, class.Problems)
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	for i, action := range []v1alpha1.DriftAction{v1alpha1.DriftIgnore, v1alpha1.DriftReplace} {
		w.Get(nodeClass)
		nodeClass.Spec.Drift.MachineNotUpToDate, nodeClass.Generation = action, int64(i+2)
		w.Update(nodeClass)
		w.Eventually(func() bool {
			class, _ = w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
			return class.Generation == nodeClass.Generation
		}, "the NodeClass is known")
		require.Len(t, class.Problems, 1, action)
		assert.Contains(t, class.Problems[0], "default/cluster-api: Cluster API replaces the Machines itself (strategy RollingUpdate)")
	}
	w.Agent.UpdateNodeGroup("default/cluster-api", func(g *agentv1alpha1.NodeGroup) {
		g.RolloutStrategy = agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE
	})
	w.Eventually(func() bool {
		class, _ = w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return len(class.Problems) == 0
	}, "the other strategy shows")
}

// A class whose groups have no zone is usual in a cluster with a single one, and no problem there.
func TestMissingZonesAreToldWhereZonesMatter(t *testing.T) {
	problems := func(w *shimtest.Env) []string {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return class.Problems
	}
	launched := func(w *shimtest.Env, name, zone string) {
		w.Create(w.NodeClaim(name, func(nc *karpv1.NodeClaim) {
			nc.Labels[corev1.LabelTopologyZone] = zone
			nc.Labels[corev1.LabelInstanceTypeStable], nc.Labels[karpv1.CapacityTypeLabelKey] = "a", "on-demand"
			nc.Annotations = map[string]string{v1alpha1.NodeGroupAnnotation: "default/a"}
		}))
		w.Eventually(func() bool {
			return lo.SomeBy(types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName)), func(it *cloudprovider.InstanceType) bool {
				_, ok := it.OfferingPrice(zone, "on-demand")
				return ok
			})
		}, "the zone is known")
	}
	groups := []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}}
	for name, matters := range map[string]struct {
		do   func(w *shimtest.Env)
		want string
	}{
		"the NodePool requires one": {
			do: func(w *shimtest.Env) {
				pool := nodePool(shimtest.NodeClassName)
				pool.Name = "zonal"
				pool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
					{Key: corev1.LabelTopologyZone, Operator: corev1.NodeSelectorOpIn, Values: []string{"z1"}},
				}
				w.Create(pool)
			},
			want: "but NodePool zonal names the label topology.kubernetes.io/zone",
		},
		"the NodePool assigns one, by the label's old name": {
			do: func(w *shimtest.Env) {
				pool := nodePool(shimtest.NodeClassName)
				pool.Name = "zonal"
				pool.Spec.Template.Labels = map[string]string{corev1.LabelFailureDomainBetaZone: "z1"}
				w.Create(pool)
			},
			want: "but NodePool zonal names the label topology.kubernetes.io/zone",
		},
		"the machines are in several": {
			do: func(w *shimtest.Env) {
				launched(w, "one", "z1")
				assert.Empty(t, problems(w), "a single zone does no harm")
				launched(w, "two", "z2")
			},
			want: "but their Nodes are in the zones z1, z2",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, groups)
			assert.Empty(t, problems(w))
			matters.do(w)
			w.Eventually(func() bool { return len(problems(w)) > 0 }, "missing zones are a problem")
			require.Len(t, problems(w), 1)
			assert.Contains(t, problems(w)[0], "default/a, default/b: no zone, like all node groups of the class, "+matters.want)
			assert.Contains(t, problems(w)[0], "set spec.template.spec.failureDomain")
		})
	}
}

func TestZonesOfMachinesAreRememberedByTheirNodeClaims(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	offered := func(zone string) bool {
		_, ok := types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName))[0].OfferingPrice(zone, "on-demand")
		return ok
	}
	assert.True(t, offered(instancetype.ZoneNone))
	w.Catalogue.ObserveZone("default/a", "z1")
	w.Eventually(func() bool { return offered("z1") }, "a zone that was told")
	w.Create(w.NodeClaim("old", func(nc *karpv1.NodeClaim) {
		nc.Labels[corev1.LabelTopologyZone] = "z2"
		nc.Labels[corev1.LabelInstanceTypeStable], nc.Labels[karpv1.CapacityTypeLabelKey] = "default.a", "on-demand"
		nc.Annotations = map[string]string{v1alpha1.NodeGroupAnnotation: "default/a"}
	}))
	w.Eventually(func() bool { return offered("z2") }, "a zone that a NodeClaim remembers")
	assert.False(t, offered("z3"))
}

func manyGroups(n int) []*agentv1alpha1.NodeGroup {
	return lo.Times(n, func(i int) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{
			Name: fmt.Sprintf("group-%04d", i), InstanceType: fmt.Sprintf("type-%03d", i/4), Zone: fmt.Sprint("z", i%4),
			NodeLabels: map[string]string{"team": "red"},
		}
	})
}

// Every claim changes the replicas of a node group, and thereby the catalogue. In a spoke of
// thousands of nodes, a list copies thousands of NodeClaims each time.
func TestARebuildListsNoNodeClaims(t *testing.T) {
	var mu sync.Mutex
	lists := map[string]int{}
	listed := func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(lists)
	}
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, kube client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			mu.Lock()
			lists[strings.TrimSuffix(reflect.TypeOf(list).Elem().Name(), "List")]++
			mu.Unlock()
			return kube.List(ctx, list, options...)
		},
	}))
	for i := range 3 {
		w.Create(w.NodeClaim(strconv.Itoa(i), func(nc *karpv1.NodeClaim) {
			nc.Labels[corev1.LabelTopologyZone] = fmt.Sprint("z", i) // which the group does not have
			nc.Labels[corev1.LabelInstanceTypeStable], nc.Labels[karpv1.CapacityTypeLabelKey] = "default.a", "on-demand"
			nc.Annotations = map[string]string{v1alpha1.NodeGroupAnnotation: "default/a"}
		}))
		w.Eventually(func() bool {
			_, ok := types(t, w.Catalogue.Snapshot(), nodePool(shimtest.NodeClassName))[0].OfferingPrice(fmt.Sprint("z", i), "on-demand")
			return ok
		}, "what the NodeClaim remembers shows")
	}
	before := listed()
	for cpu := range 3 {
		w.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Capacity["cpu"] = strconv.Itoa(10 + cpu) })
		w.Eventually(func() bool {
			group, _ := w.Catalogue.Snapshot().Group("default/a")
			return group.Capacity.Cpu().String() == strconv.Itoa(10+cpu)
		}, "the change shows")
	}
	after := listed()
	assert.GreaterOrEqual(t, after["ClusterAPINodeClass"], before["ClusterAPINodeClass"]+3, "the catalogue was built again")
	assert.Equal(t, 1, after["NodeClaim"], "the informer's first list")
	assert.ElementsMatch(t, []string{"ClusterAPINodeClass", "NodePool", "NodeClaim"}, lo.Keys(after), "nothing else grows with the nodes")
}

// Core asks for the one with the greater weight first.
func TestNodePoolsThatNameManyValuesAreToldApart(t *testing.T) {
	racks := func(last int) (names []string) {
		for i := range 5 {
			names = append(names, fmt.Sprintf("r%d", i))
		}
		return append(names, fmt.Sprintf("r%d", last))
	}
	w := shimtest.New(t, lo.Times(10, func(i int) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{
			Name: fmt.Sprint("g", i), InstanceType: "metal", NodeLabels: map[string]string{"example.com/rack": fmt.Sprint("r", i)},
		}
	}))
	pool := func(last int) *karpv1.NodePool {
		nodePool := nodePool(shimtest.NodeClassName)
		nodePool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
			{Key: "example.com/rack", Operator: corev1.NodeSelectorOpIn, Values: racks(last)},
		}
		return nodePool
	}
	offered := func(last int) []string {
		class, ok := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		require.True(t, ok)
		return lo.FlatMap(class.For(pool(last))[0].Offerings, func(o *cloudprovider.Offering, _ int) []string {
			return o.Requirements.Get("example.com/rack").Values()
		})
	}
	assert.ElementsMatch(t, racks(7), offered(7))
	assert.ElementsMatch(t, racks(8), offered(8), "not those of the other NodePool")
}

func TestAnUnchangedCatalogueIsReadWithoutAllocating(t *testing.T) {
	w := shimtest.New(t, manyGroups(100))
	pool := nodePool(shimtest.NodeClassName)
	w.Eventually(func() bool { // the whole process is measured, and the catalogue may be about to be built once more
		return testing.AllocsPerRun(100, func() { types(t, w.Catalogue.Snapshot(), pool) }) == 0
	}, "nothing is allocated")
}

func TestEachNodeClassSeesGroupsWithItsOwnKubelets(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}})
	dense := w.AddNodeClass("dense", nil)
	dense.Spec.Kubelet = &v1alpha1.Kubelet{MaxPods: new(int32(250))}
	dense.Generation = 2
	require.NoError(t, w.Kube.Update(w.Context(), dense))
	w.Catalogue.Refresh()
	pods := func(class string) string {
		return types(t, w.Catalogue.Snapshot(), nodePool(class))[0].Capacity.Pods().String()
	}
	w.Eventually(func() bool { return pods("dense") == "250" }, "the description counts")
	assert.Equal(t, "110", pods(shimtest.NodeClassName))

	before := types(t, w.Catalogue.Snapshot(), nodePool("dense"))
	w.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Overhead = map[string]string{"cpu": "100m"} })
	var after []*cloudprovider.InstanceType
	w.Eventually(func() bool {
		after = types(t, w.Catalogue.Snapshot(), nodePool("dense"))
		allocatable := after[0].Allocatable()
		return allocatable.Cpu().String() == "3900m"
	}, "what Nodes showed counts")
	assert.Same(t, before[1], after[1], "one group's change costs the others nothing")
}

func TestTooManyGroupsShowThoseThatNothingCanBeHadFrom(t *testing.T) {
	groups := manyGroups(70)
	w := shimtest.New(t, groups)
	w.Agent.Block("default/group-0069", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "paused", time.Time{})
	w.Eventually(func() bool {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		last := class.Selected[len(class.Selected)-1]
		return len(class.Selected) == v1alpha1.MaxSelectedNodeGroups && last.Name == "default/group-0069" && last.Reason == "Paused"
	}, "the paused group is among the %d", v1alpha1.MaxSelectedNodeGroups)
}

func BenchmarkGetInstanceTypes(b *testing.B) {
	w := shimtest.New(b, manyGroups(1000))
	pool := nodePool(shimtest.NodeClassName)
	b.ReportAllocs()
	for b.Loop() {
		if found, err := w.CloudProvider.GetInstanceTypes(b.Context(), pool); err != nil || len(found) != 250 {
			b.Fatal(len(found), err)
		}
	}
}

// BenchmarkRebuildAfterOneChange measures the time from a change in the agent to the snapshot,
// including the stream.
func BenchmarkRebuildAfterOneChange(b *testing.B) {
	w := shimtest.New(b, manyGroups(1000))
	changes := w.Catalogue.Changes()
	for i := range b.N {
		w.Agent.UpdateNodeGroup("default/group-0000", func(g *agentv1alpha1.NodeGroup) { g.Capacity["cpu"] = strconv.Itoa(i%7 + 1) })
		<-changes
	}
}

// BenchmarkConvertTheWholeCatalogue measures what a provider without snapshots would do on every
// call.
func BenchmarkConvertTheWholeCatalogue(b *testing.B) {
	w := shimtest.New(b, manyGroups(1000))
	sources, _ := w.NodeGroups.List()
	asSaid := instancetype.Conditions{
		Available:     func(g *instancetype.Group) bool { return g.Available },
		ObservedZones: func(*instancetype.Group) []string { return nil },
	}
	b.ReportAllocs()
	for b.Loop() {
		groups := make([]*instancetype.Group, 0, len(sources))
		for _, source := range sources {
			group, err := instancetype.NewGroup(source)
			if err != nil {
				b.Fatal(err)
			}
			groups = append(groups, group)
		}
		if found := instancetype.Build(groups, asSaid, nil, instancetype.Built{}); len(found) != 250 {
			b.Fatal(len(found))
		}
	}
}

// The catalogue is no controller, whose panics controller-runtime recovers.
func TestAPanicLeavesTheLastCatalogueInUse(t *testing.T) {
	var broken, panicked atomic.Bool
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, kube client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, classes := list.(*v1alpha1.ClusterAPINodeClassList); classes && broken.Load() {
				panicked.Store(true)
				panic("a bug")
			}
			return kube.List(ctx, list, options...)
		},
	}))
	broken.Store(true)
	w.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "b"})
	w.Eventually(panicked.Load, "the catalogue is built again")
	assert.Equal(t, 1, w.Catalogue.Snapshot().Len())
	broken.Store(false)
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 2 }, "it is tried again")
}
