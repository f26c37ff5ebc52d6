package learned_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
)

var (
	spoke = types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	group = types.NamespacedName{Namespace: "fleet", Name: "group"}
)

type fixture struct {
	*testing.T

	client   client.Client
	nodes    *learned.Nodes
	registry *prometheus.Registry
	clock    *clocktesting.FakeClock
	template clusterv1.MachineSpec
}

func start(t *testing.T) *fixture {
	t.Helper()
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	registry := prometheus.NewRegistry()
	hub := fake.NewClientBuilder().WithScheme(scheme).
		WithIndex(&clusterv1.Machine{}, hub.ByCluster, func(object client.Object) []string {
			machine, ok := object.(*clusterv1.Machine)
			require.True(t, ok)
			return []string{machine.Spec.ClusterName}
		}).Build()
	clk := clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	nodes, err := learned.New(learned.Config{Client: hub, Registerer: registry, Clock: clk})
	require.NoError(t, err)
	f := &fixture{T: t, client: hub, nodes: nodes, registry: registry, clock: clk}
	md := &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: group.Namespace, Name: group.Name, Labels: map[string]string{v1alpha1.MemberLabel: ""}},
	}
	md.Spec.ClusterName, md.Spec.Template.Spec.Version = spoke.Name, "v1.36.3"
	md.Spec.Template.Spec.InfrastructureRef.Name = "small"
	f.template = md.Spec.Template.Spec
	f.create(md)
	f.machine("present", "v1.36.3", "test://a", spoke.Name)
	return f
}

func (f *fixture) create(objects ...client.Object) {
	f.Helper()
	for _, object := range objects {
		require.NoError(f, f.client.Create(f.Context(), object))
	}
}

// machine creates a Machine of the group and its MachineSet.
func (f *fixture) machine(set, version, providerID, cluster string, change ...func(*clusterv1.MachineSpec)) {
	f.Helper()
	ms := &clusterv1.MachineSet{ObjectMeta: metav1.ObjectMeta{Namespace: group.Namespace, Name: set}}
	ms.Spec.Template.Spec.Version, ms.Spec.Template.Spec.InfrastructureRef.Name = version, "small"
	for _, do := range change {
		do(&ms.Spec.Template.Spec)
	}
	require.NoError(f, client.IgnoreAlreadyExists(f.client.Create(f.Context(), ms)))
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
		Namespace: group.Namespace, GenerateName: "machine-", Labels: map[string]string{clusterv1.MachineDeploymentNameLabel: group.Name},
		OwnerReferences: []metav1.OwnerReference{{Kind: "MachineSet", Name: set, UID: "1", Controller: new(true)}},
	}}
	m.Spec.ClusterName, m.Spec.ProviderID = cluster, providerID
	f.create(m)
}

// report reports Nodes and returns the groups whose observations have changed.
func (f *fixture) report(nodes ...learned.Node) []types.NamespacedName {
	f.Helper()
	f.nodes.Report(f.Context(), spoke, nodes)
	var changed []types.NamespacedName
	for {
		select {
		case event := <-f.nodes.Changes():
			changed = append(changed, event.Object)
		default:
			return changed
		}
	}
}

func (f *fixture) known() capacity.Learned { return f.nodes.Of(group, &f.template) }

func list(pairs ...string) corev1.ResourceList {
	quantities := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		quantities[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return quantities
}

func texts(list corev1.ResourceList) map[string]string {
	quantities := map[string]string{}
	for name, quantity := range list {
		quantities[string(name)] = quantity.String()
	}
	return quantities
}

func TestLeastCapacityAndMostOverheadAreKept(t *testing.T) {
	f := start(t)
	f.machine("present", "v1.36.3", "test://b", spoke.Name)
	small := learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4", "memory", "15Gi"), Allocatable: list("cpu", "3", "memory", "14Gi")}
	large := learned.Node{ProviderID: "test://b", Capacity: list("cpu", "4", "memory", "16Gi"), Allocatable: list("cpu", "4", "memory", "14Gi")}
	require.Equal(t, []types.NamespacedName{group}, f.report(small, large))
	require.Equal(t, map[string]string{"cpu": "4", "memory": "15Gi"}, texts(f.known().Capacity))
	require.Equal(t, map[string]string{"cpu": "1", "memory": "2Gi"}, texts(f.known().Overhead))
	require.Equal(t, map[string]string{"cpu": "3", "memory": "14Gi"}, texts(f.known().Allocatable))
	require.Empty(t, f.report(large, small), "the same again is nothing new")
	require.Empty(t, f.report(), "and stays known when the Nodes are gone")
	require.Equal(t, "15Gi", texts(f.known().Capacity)["memory"])
	require.Len(t, f.report(large), 1)
	require.Equal(t, map[string]string{"cpu": "4", "memory": "16Gi"}, texts(f.known().Capacity), "the worse Node is gone")
	require.Equal(t, map[string]string{"cpu": "0", "memory": "2Gi"}, texts(f.known().Overhead))
}

func TestWhatNotAllNodesHaveIsNotLearned(t *testing.T) {
	f := start(t)
	f.machine("present", "v1.36.3", "test://b", spoke.Name)
	all := learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4", "memory", "16Gi", "nvidia.com/gpu", "2", "hugepages-2Mi", "1Gi")}
	f.report(all)
	require.Len(t, f.known().Capacity, 4)
	none := learned.Node{ProviderID: "test://b", Capacity: list("cpu", "4", "hugepages-2Mi", "0")}
	require.Len(t, f.report(all, none), 1)
	require.Equal(t, map[string]string{"cpu": "4", "memory": "16Gi"}, texts(f.known().Capacity))
	require.Empty(t, f.report(none, all), "in whatever order")
	none.Capacity = all.Capacity
	require.Len(t, f.report(all, none), 1)
	require.Len(t, f.known().Capacity, 4)
}

func TestOnlyRegisteredNodesOfThePresentTemplateTeach(t *testing.T) {
	has := list("cpu", "4")
	for name, prepare := range map[string]func(*fixture) learned.Node{
		"no Machine": func(*fixture) learned.Node { return learned.Node{ProviderID: "test://nobody", Capacity: has} },
		"no id":      func(*fixture) learned.Node { return learned.Node{Capacity: has} },
		"unregistered": func(*fixture) learned.Node {
			return learned.Node{ProviderID: "test://a", Capacity: has, Unregistered: true}
		},
		"another infrastructure template": func(f *fixture) learned.Node {
			f.machine("old", "v1.36.3", "test://old", spoke.Name, large)
			return learned.Node{ProviderID: "test://old", Capacity: has}
		},
		"another Cluster's Machine": func(f *fixture) learned.Node {
			f.machine("present", "v1.36.3", "test://theirs", "other")
			return learned.Node{ProviderID: "test://theirs", Capacity: has}
		},
		"two Machines": func(f *fixture) learned.Node {
			f.machine("present", "v1.36.3", "test://twice", spoke.Name)
			f.machine("present", "v1.36.3", "test://twice", spoke.Name)
			return learned.Node{ProviderID: "test://twice", Capacity: has}
		},
		"not opted in": func(f *fixture) learned.Node {
			md := &clusterv1.MachineDeployment{}
			require.NoError(f, f.client.Get(f.Context(), group, md))
			delete(md.Labels, v1alpha1.MemberLabel)
			require.NoError(f, f.client.Update(f.Context(), md))
			return learned.Node{ProviderID: "test://a", Capacity: has}
		},
		"deleted": func(f *fixture) learned.Node {
			md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: group.Namespace, Name: group.Name}}
			require.NoError(f, f.client.Delete(f.Context(), md))
			return learned.Node{ProviderID: "test://a", Capacity: has}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			require.Empty(t, f.report(prepare(f)))
			require.Empty(t, f.known().Capacity)
		})
	}
}

func TestKnownOnlyOfTheTemplateAndUntilForgotten(t *testing.T) {
	f := start(t)
	node := learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4")}
	f.report(node)
	require.NotEmpty(t, f.known().Capacity)
	another := f.template
	large(&another)
	require.Empty(t, f.nodes.Of(group, &another).Capacity)
	f.nodes.Forget(group)
	require.Empty(t, f.known().Capacity)
	require.Equal(t, []types.NamespacedName{group}, f.report(node))
	require.NotEmpty(t, f.known().Capacity)

	f.change(large)
	require.Empty(t, f.report(node))
	f.machine("next", "v1.36.3", "test://next", spoke.Name, large)
	f.report(node, learned.Node{ProviderID: "test://next", Capacity: list("cpu", "8")})
	require.Empty(t, f.known().Capacity, "what the old template's Nodes showed is gone")
	require.Equal(t, "8", texts(f.nodes.Of(group, &another).Capacity)["cpu"])
}

func large(template *clusterv1.MachineSpec) { template.InfrastructureRef.Name = "large" }

// change changes the group's template.
func (f *fixture) change(do func(*clusterv1.MachineSpec)) {
	f.Helper()
	md := &clusterv1.MachineDeployment{}
	require.NoError(f, f.client.Get(f.Context(), group, md))
	do(&md.Spec.Template.Spec)
	require.NoError(f, f.client.Update(f.Context(), md))
}

// Without a capacity, a group gets no claims, so it would never get the Node that shows it.
func TestNodesOfAnEarlierVersionCountUntilThereIsOneOfThePresent(t *testing.T) {
	f := start(t)
	place := map[string]string{corev1.LabelTopologyZone: "a", corev1.LabelTopologyRegion: "r", corev1.LabelArchStable: "arm64"}
	old := learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4"), Labels: place}
	f.report(old)
	require.Equal(t, place, f.known().Labels)
	newer := func(template *clusterv1.MachineSpec) { template.Version = "v1.37.0" }
	f.change(newer)
	next := f.template
	newer(&next)
	cpu := func() string { return texts(f.nodes.Of(group, &next).Capacity)["cpu"] }
	moved := map[string]string{corev1.LabelArchStable: "arm64"} // a new version may be in another zone
	require.Equal(t, "4", cpu(), "before the next report")
	require.Equal(t, moved, f.nodes.Of(group, &next).Labels)
	f.report(old)
	require.Equal(t, "4", cpu())
	require.Equal(t, moved, f.nodes.Of(group, &next).Labels)

	f.nodes.Forget(group)
	require.Len(t, f.report(old), 1)
	require.Equal(t, "4", cpu(), "the agent was restarted")

	f.machine("next", "v1.37.0", "test://next", spoke.Name)
	require.Len(t, f.report(old, learned.Node{ProviderID: "test://next", Capacity: list("cpu", "5")}), 1)
	require.Equal(t, "5", cpu())
	require.Empty(t, f.report(old))
	require.Equal(t, "5", cpu(), "there was one of the present version")
}

func TestResourcesWithImpossibleNamesAreNotLearned(t *testing.T) {
	f := start(t)
	f.report(learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4", "hugepages-1Gi", "2Gi", "hugepages-", "1", "hugepages-x", "1",
		"hugepages-0", "1", "hugepages-2Mi\n", "1", "hugepages-"+strings.Repeat("1", 60), "1", "example.com/"+strings.Repeat("a", 64), "1")})
	require.Equal(t, map[string]string{"cpu": "4", "hugepages-1Gi": "2Gi"}, texts(f.known().Capacity))
}

func TestWhatAYoungNodeDoesNotShowYetIsNotLearned(t *testing.T) {
	f := start(t)
	f.report(learned.Node{
		ProviderID:  "test://a",
		Capacity:    list("cpu", "4", "nvidia.com/gpu", "0", "ephemeral-storage", "0", "attachable-volumes-x", "3", "hugepages-2Mi", "2Mi"),
		Allocatable: list("cpu", "0", "ephemeral-storage", "1Gi"),
	})
	require.Equal(t, map[string]string{"cpu": "4", "hugepages-2Mi": "2Mi"}, texts(f.known().Capacity))
	require.Empty(t, f.known().Overhead)
	f.report(learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4", "nvidia.com/gpu", "2")})
	require.Equal(t, "2", texts(f.known().Capacity)["nvidia.com/gpu"])
}

func TestLabelsThatAllNodesAgreeOnAreLearned(t *testing.T) {
	f := start(t)
	f.machine("present", "v1.36.3", "test://b", spoke.Name)
	node := func(id, zone string) learned.Node {
		return learned.Node{ProviderID: id, Capacity: list("cpu", "4"), Labels: map[string]string{
			corev1.LabelTopologyZone: zone, corev1.LabelArchStable: "arm64", corev1.LabelTopologyRegion: "not a label", "team": "blue",
		}}
	}
	f.report(node("test://a", "z1"))
	require.Equal(t, map[string]string{corev1.LabelTopologyZone: "z1", corev1.LabelArchStable: "arm64"}, f.known().Labels)
	require.Len(t, f.report(node("test://a", "z1"), node("test://b", "z2")), 1)
	require.Equal(t, map[string]string{corev1.LabelArchStable: "arm64"}, f.known().Labels)
	require.Empty(t, f.report(node("test://b", "z2"), node("test://a", "z1")), "in whatever order")
}

func TestWhatIsRememberedIsBounded(t *testing.T) {
	f := start(t)
	has := corev1.ResourceList{}
	for i := range 1000 {
		has[corev1.ResourceName(fmt.Sprintf("example.com/r%d", i))] = resource.MustParse("1")
	}
	f.report(learned.Node{ProviderID: "test://a", Capacity: has})
	require.Len(t, f.known().Capacity, 32)
	require.Empty(t, f.report(learned.Node{ProviderID: "test://a", Capacity: has}))
}

// A call that takes long ends before its report is processed.
func TestAReportOfACallThatHasEndedIsPublished(t *testing.T) {
	f := start(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	node := func(cpu int) []learned.Node {
		resources := list("cpu", strconv.Itoa(cpu), "memory", "8Gi")
		return []learned.Node{{ProviderID: "test://a", Capacity: resources, Allocatable: resources}}
	}
	for cpu := range 50 {
		f.nodes.Report(ended, spoke, node(cpu+1))
		select {
		case change := <-f.nodes.Changes():
			require.Equal(t, group, change.Object)
		default:
			require.FailNow(t, "the change is not published", "report %d", cpu)
		}
	}
	for cpu := range cap(f.nodes.Changes()) + 1 {
		f.nodes.Report(ended, spoke, node(cpu+100))
	}
	for range cap(f.nodes.Changes()) {
		<-f.nodes.Changes()
	}
	require.Equal(t, []types.NamespacedName{group}, f.report(node(cap(f.nodes.Changes())+100)...), "the channel was full")
}

func TestUnusableValuesAreCounted(t *testing.T) {
	f := start(t)
	f.report(learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4"), Unusable: 2}, learned.Node{Unusable: 1})
	require.Equal(t, "4", texts(f.known().Capacity)["cpu"])
	families, err := f.registry.Gather()
	require.NoError(t, err)
	require.Equal(t, 1, testutil.CollectAndCount(f.registry, "capi_agent_node_report_unusable_values_total"))
	require.InDelta(t, 3, families[0].GetMetric()[0].GetCounter().GetValue(), 0)
}

func TestANodeThatDoesNotSayWhatItHasTeachesNothing(t *testing.T) {
	f := start(t)
	f.machine("present", "v1.36.3", "test://b", spoke.Name)
	whole := learned.Node{ProviderID: "test://a", Capacity: list("cpu", "4", "nvidia.com/gpu", "1")}
	require.Equal(t, []types.NamespacedName{group}, f.report(whole))
	require.Empty(t, f.report(whole, learned.Node{ProviderID: "test://b"}), "its device plugin is not there yet")
	require.Equal(t, map[string]string{"cpu": "4", "nvidia.com/gpu": "1"}, texts(f.known().Capacity))
}
