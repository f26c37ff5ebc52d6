package nodegroupview_test

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroupview"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricelist"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const patience = 20 * time.Second

var plane *capitest.ControlPlane

func TestMain(m *testing.M) { capitest.Main(m, &plane) }

type fixture struct {
	*testing.T

	namespace      string
	manager        manager.Manager
	templates      cache.Cache
	cluster        types.NamespacedName
	cache          *watchcache.Cache[*agentv1alpha1.NodeGroup]
	held           *watchcache.Cache[nodegroup.NodeGroup]
	registry       *prometheus.Registry
	prices         *prometheus.Registry // metrics of the price list
	pricesPatience time.Duration        // how long groups wait for it
	nodes          *learned.Nodes
	clock          *clocktesting.FakePassiveClock // the clock of what is learned
	now            clock.PassiveClock             // the View's clock: by default the real one
	config         *rest.Config                   // the account of the View
}

// start runs a View for a new namespace with one Cluster, and waits until its view is
// complete.
func start(t *testing.T, before ...func(f *fixture)) *fixture {
	t.Helper()
	f := &fixture{
		T: t, namespace: plane.Namespace(t), registry: prometheus.NewRegistry(), prices: prometheus.NewRegistry(), config: plane.Config,
		now: clock.RealClock{},
	}
	f.cluster = types.NamespacedName{Namespace: f.namespace, Name: "spoke"}
	f.cache = watchcache.New(watchcache.Options[*agentv1alpha1.NodeGroup]{Equal: nodegroupview.Equal, Buffer: 100, Heartbeat: time.Minute})
	f.held = watchcache.New(watchcache.Options[nodegroup.NodeGroup]{Equal: nodegroupview.EqualHeld, Buffer: 100, Heartbeat: time.Minute})
	plane.Create(t, capitest.NewCluster(f.namespace, "spoke"))
	for _, do := range before {
		do(f)
	}
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	scope := hub.NewScope([]string{f.namespace}, nil)
	caches, err := scope.CacheOptions()
	require.NoError(t, err)
	mgr, err := manager.New(f.config, manager.Options{
		Scheme: scheme, Cache: caches, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0", Logger: logr.Discard(),
		Controller: hub.Controllers(),
	})
	require.NoError(t, err)
	require.NoError(t, hub.Index(t.Context(), mgr.GetFieldIndexer()))
	engine := claims.New(claims.Config{
		Client: mgr.GetClient(), Reader: mgr.GetAPIReader(), Indexes: claims.Indexes{Group: hub.ByDeployment},
		Failure: protocol.FailurePolicy{CoolDown: coolDown},
	})
	f.clock = clocktesting.NewFakePassiveClock(time.Now())
	nodes, err := learned.New(learned.Config{Client: mgr.GetClient(), Clock: f.clock})
	require.NoError(t, err)
	prices, err := pricelist.New(mgr, pricelist.Config{
		ConfigMap: types.NamespacedName{Namespace: f.namespace, Name: "prices"}, Recorder: mgr.GetEventRecorder("test"), Registerer: f.prices,
		Patience: f.pricesPatience,
	})
	require.NoError(t, err)
	f.nodes = nodes
	caches.ReaderFailOnMissingInformer = true
	templates, err := hub.AddCache(mgr, caches)
	require.NoError(t, err)
	f.manager, f.templates = mgr, templates
	c, err := nodegroupview.New(nodegroupview.Config{
		Cache: f.cache, Held: f.held, Templates: templates, Scope: scope, Recorder: mgr.GetEventRecorder("test"), Registerer: f.registry,
		Settings:    capacity.Settings{SyncedLabels: []*regexp.Regexp{regexp.MustCompile(`^synced\.example\.com/`)}},
		CoolingDown: engine.CoolingDown, Clock: f.now,
		Learned: nodes, PriceList: prices, Pricing: pricing.Policy{Coefficients: pricing.DefaultCoefficients},
	})
	require.NoError(t, err)
	require.NoError(t, c.SetupWithManager(mgr))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	select {
	case <-f.cache.Ready():
	case <-time.After(patience):
		t.Fatal("the view is not complete")
	}
	return f
}

// coolDown is long enough to be seen, also where times are in whole seconds and the machine is
// busy, and short enough to wait for.
const coolDown = 8 * time.Second

func TestAGroupIsUnavailableWhileItCoolsDown(t *testing.T) {
	f := start(t)
	plane.Create(t, capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0))
	available := func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() }
	f.until("small", available)

	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: f.namespace, Name: v1alpha1.ObjectName("spoke", "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: "spoke", ClaimID: "a", Holder: "karpenter", NodeGroup: "small"},
	}
	plane.Create(t, claim)
	claim.Status.FailedAt = new(metav1.Now())
	claim.Status.Message = "no hosts left"
	require.NoError(t, plane.Client.Status().Update(t.Context(), claim))

	cooling := f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return !available(g) }).GetAvailability()
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, cooling.GetReason())
	require.Contains(t, cooling.GetMessage(), "no hosts left")
	require.NotNil(t, cooling.GetRetryAt())
	f.until("small", available) // by itself
}

func TestTheSettingsOfMachinesApplyToAllNodeGroups(t *testing.T) {
	f := start(t)
	plane.Create(t, capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described, func(md *clusterv1.MachineDeployment) {
		md.Spec.Template.Labels["synced.example.com/team"], md.Spec.Template.Labels["example.com/team"] = "blue", "red"
	}))
	labels := f.until("small", shown).GetNodeLabels()
	require.Equal(t, "blue", labels["synced.example.com/team"])
	require.NotContains(t, labels, "example.com/team")
}

func TestTheClusterAutoscalersGroupsAreAView(t *testing.T) {
	f := start(t)
	md := capitest.NewMachineDeployment(f.namespace, "small", "spoke", 1, described, capitest.Annotated(v1alpha1.HolderAnnotation, "cluster-autoscaler"))
	plane.Create(t, md)
	held := func() (nodegroup.NodeGroup, bool) {
		group, found, err := f.held.Get(f.cluster, f.namespace+"/small")
		require.NoError(t, err)
		return group, found
	}
	reserved := func(g *agentv1alpha1.NodeGroup) bool {
		return g.GetAvailability().GetReason() == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED
	}
	shown := f.until("small", reserved)
	require.Equal(t, "cluster-autoscaler", shown.GetHolder())
	require.True(t, shown.GetHolderAvailability().GetAvailable())
	group, found := held()
	require.True(t, found)
	require.Nil(t, group.Limits.Refusal(), "to its holder it is open")
	require.Equal(t, "4", group.Machine.Resources.Cpu().String())
	f.change(md, func() { delete(md.Annotations, v1alpha1.HolderAnnotation) })
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetHolder() == "" })
	_, found = held()
	require.False(t, found)
	f.change(md, func() { md.Annotations[v1alpha1.HolderAnnotation] = "cluster-autoscaler" })
	f.until("small", reserved)
	require.NoError(t, plane.Client.Delete(t.Context(), md))
	f.until("small", hidden)
	_, found = held()
	require.False(t, found)
}

func (f *fixture) group(name string) *agentv1alpha1.NodeGroup {
	group, found, err := f.cache.Get(f.cluster, f.namespace+"/"+name)
	require.NoError(f, err)
	if !found {
		return nil
	}
	return group
}

// until waits until wanted accepts a node group. It is called with nil if there is none.
func (f *fixture) until(name string, wanted func(*agentv1alpha1.NodeGroup) bool) *agentv1alpha1.NodeGroup {
	f.Helper()
	var group *agentv1alpha1.NodeGroup
	err := wait.PollUntilContextTimeout(f.Context(), 5*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		group = f.group(name)
		return wanted(group), nil
	})
	require.NoError(f, err, "%v", group)
	return group
}

func shown(group *agentv1alpha1.NodeGroup) bool { return group != nil }

func hidden(group *agentv1alpha1.NodeGroup) bool { return group == nil }

func (f *fixture) change(object client.Object, change func()) {
	f.Helper()
	require.NoError(f, plane.Client.Get(f.Context(), client.ObjectKeyFromObject(object), object))
	before, ok := object.DeepCopyObject().(client.Object)
	require.True(f, ok)
	change()
	require.NoError(f, plane.Client.Patch(f.Context(), object, client.MergeFrom(before)))
}

func described(md *clusterv1.MachineDeployment) {
	capitest.Annotated(capacity.CPUAnnotation, "4")(md)
	capitest.Annotated(capacity.MemoryAnnotation, "16Gi")(md)
}

func problemFields(group *agentv1alpha1.NodeGroup) []string {
	var fields []string
	for _, problem := range group.GetProblems() {
		fields = append(fields, problem.GetField())
	}
	return fields
}

func TestGroupsThatExistAtTheStartAreInTheFirstView(t *testing.T) {
	f := start(t, func(f *fixture) {
		for _, name := range []string{"a", "b", "c"} {
			plane.Create(f.T, capitest.NewInfrastructureTemplate(f.namespace, name, nil),
				capitest.NewMachineDeployment(f.namespace, name, "spoke", 0, described))
		}
		outsider := capitest.NewMachineDeployment(f.namespace, "outsider", "spoke", 0, described)
		delete(outsider.Labels, v1alpha1.MemberLabel)
		plane.Create(f.T, outsider)
	})
	groups, _, err := f.cache.List(f.cluster)
	require.NoError(t, err)
	require.Len(t, groups, 3)
	for _, group := range groups {
		require.Empty(t, group.GetProblems())
		require.True(t, group.GetAvailability().GetAvailable())
	}
}

func TestOptingInAndOut(t *testing.T) {
	f := start(t)
	md := capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described)
	delete(md.Labels, v1alpha1.MemberLabel)
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "small", nil), md)
	f.change(md, func() { md.Labels[v1alpha1.MemberLabel] = "" })
	f.until("small", shown)
	f.change(md, func() { delete(md.Labels, v1alpha1.MemberLabel) })
	f.until("small", hidden)
	f.change(md, func() { md.Labels[v1alpha1.MemberLabel] = "" })
	f.until("small", shown)
	require.NoError(t, plane.Client.Delete(t.Context(), md))
	f.until("small", hidden)
}

func TestInfrastructureTemplateIsFollowed(t *testing.T) {
	f := start(t)
	plane.Create(t, capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0))
	group := f.until("small", shown)
	require.Contains(t, problemFields(group), "spec.template.spec.infrastructureRef")
	require.Contains(t, problemFields(group), capacity.AnnotationField(capacity.CPUAnnotation))

	template := capitest.NewInfrastructureTemplate(f.namespace, "small", nil)
	plane.Create(t, template)
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool {
		return !slices.Contains(problemFields(g), "spec.template.spec.infrastructureRef")
	})
	template.Object["status"] = map[string]any{
		"capacity": map[string]any{"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": int64(1)}, "nodeInfo": map[string]any{"architecture": "arm64"},
	}
	plane.SetStatus(t, template)
	group = f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetCapacity()["cpu"] == "8" })
	require.Empty(t, group.GetProblems())
	require.Equal(t, "1", group.GetCapacity()["nvidia.com/gpu"])
	require.Equal(t, "arm64", group.GetArchitecture())
	require.Equal(t, agentv1alpha1.SourceKind_SOURCE_KIND_INFRASTRUCTURE_TEMPLATE, group.GetSources()["capacity.cpu"].GetKind())
	require.NoError(t, plane.Client.Delete(t.Context(), template))
	group = f.until("small", func(g *agentv1alpha1.NodeGroup) bool {
		return slices.Contains(problemFields(g), "spec.template.spec.infrastructureRef")
	})
	require.Equal(t, "arm64", group.GetArchitecture(), "its existing machines are what they were")
}

func TestKindsThatCannotBeResolvedAreProblemsOfTheirGroupsAlone(t *testing.T) {
	f := start(t)
	unlabelled := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "strangetemplates." + f.namespace + ".example.com"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: f.namespace + ".example.com", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{
				Kind: "StrangeTemplate", ListKind: "StrangeTemplateList", Plural: "strangetemplates", Singular: "strangetemplate",
			},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}},
			}},
		},
	}
	plane.Create(t, unlabelled)
	missing := capitest.NewMachineDeployment(f.namespace, "missing", "spoke", 0, described)
	missing.Spec.Template.Spec.InfrastructureRef.Kind = "AbsentTemplate"
	strange := capitest.NewMachineDeployment(f.namespace, "strange", "spoke", 0, described)
	strange.Spec.Template.Spec.InfrastructureRef.Kind = "StrangeTemplate"
	strange.Spec.Template.Spec.InfrastructureRef.APIGroup = unlabelled.Spec.Group
	plane.Create(t, missing, strange, capitest.NewInfrastructureTemplate(f.namespace, "good", nil),
		capitest.NewMachineDeployment(f.namespace, "good", "spoke", 0, described))
	require.Contains(t, f.until("missing", shown).GetProblems()[0].GetMessage(), "absenttemplates."+capitest.InfrastructureGroup+" does not exist")
	require.Contains(t, f.until("strange", shown).GetProblems()[0].GetMessage(), "no contract label")
	require.Empty(t, f.until("good", shown).GetProblems())
	require.Equal(t, "4", f.group("missing").GetCapacity()["cpu"])
}

// While a provider is upgraded, its CRD has a new version that only its webhook can convert to, and
// the webhook does not answer.
func TestAGroupKeepsItsDescriptionWhileItsTemplateCannotBeRead(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Now())
	f := start(t, func(f *fixture) { f.now = now })
	anything := &apiextensionsv1.CustomResourceValidation{
		OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: new(true)},
	}
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{
			Name: "machinetemplates." + f.namespace + ".example.com", Labels: map[string]string{"cluster.x-k8s.io/v1beta2": "v1"},
		},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: f.namespace + ".example.com", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{
				Kind: "MachineTemplate", ListKind: "MachineTemplateList", Plural: "machinetemplates", Singular: "machinetemplate",
			},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{
				{Name: "v1", Served: true, Storage: true, Schema: anything}, {Name: "v2", Served: true, Schema: anything},
			},
		},
	}
	plane.Create(t, crd)
	template := capitest.NewInfrastructureTemplate(f.namespace, "small", nil)
	template.SetAPIVersion(crd.Spec.Group + "/v1")
	template.SetKind("MachineTemplate")
	template.Object["status"] = map[string]any{"capacity": map[string]any{"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": int64(1)}}
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		require.NoError(t, plane.Client.Create(f.Context(), template.DeepCopy()))
	}, patience, 50*time.Millisecond, "the new kind is served")
	other := template.DeepCopy()
	other.SetName("other")
	plane.Create(t, other)
	small := capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0)
	small.Spec.Template.Spec.InfrastructureRef.Kind, small.Spec.Template.Spec.InfrastructureRef.APIGroup = "MachineTemplate", crd.Spec.Group
	plane.Create(t, small)
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetCapacity()["cpu"] == "8" })

	f.change(crd, func() {
		crd.Labels["cluster.x-k8s.io/v1beta2"] = "v1_v2"
		crd.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{
			Strategy: apiextensionsv1.WebhookConverter,
			Webhook: &apiextensionsv1.WebhookConversion{
				ClientConfig:             &apiextensionsv1.WebhookClientConfig{URL: new("https://127.0.0.1:1/convert")},
				ConversionReviewVersions: []string{"v1"},
			},
		}
	})
	now.SetTime(now.Now().Add(time.Hour)) // versions are looked up again
	f.change(small, func() { capitest.Annotated(capacity.MaxPodsAnnotation, "20")(small) })
	during := f.until("small", func(g *agentv1alpha1.NodeGroup) bool {
		return g.GetCapacity()["pods"] == "20" && len(g.GetProblems()) > 0
	})
	require.Equal(t, "8", during.GetCapacity()["cpu"])
	require.Equal(t, "1", during.GetCapacity()["nvidia.com/gpu"])
	require.Equal(t, []string{"spec.template.spec.infrastructureRef"}, problemFields(during))
	synced, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.True(t, f.manager.GetCache().WaitForCacheSync(synced), "controllers that start now do not wait for the watch of the templates")

	f.change(small, func() { small.Spec.Template.Spec.InfrastructureRef.Name = "other" })
	unknown := f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetCapacity()["cpu"] == "" })
	require.False(t, unknown.GetAvailability().GetAvailable(), "its machines may have another architecture than the default")
	require.Contains(t, unknown.GetAvailability().GetMessage(), "its infrastructure template has not been read yet")
	f.change(small, func() { small.Spec.Template.Spec.InfrastructureRef.Name = "small" })
	f.change(crd, func() { crd.Spec.Conversion = nil })
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool {
		return g.GetCapacity()["cpu"] == "8" && len(g.GetProblems()) == 0
	})
	err := f.templates.Get(t.Context(), client.ObjectKeyFromObject(template), template)
	require.ErrorAs(t, err, new(*cache.ErrResourceNotCached), "the version that is read no longer is not watched")
}

func TestProblemsAreReportedOnceEachAndCounted(t *testing.T) {
	f := start(t)
	md := capitest.NewMachineDeployment(f.namespace, "bad", "spoke", 0, described,
		capitest.Annotated(capacity.CPUAnnotation, "lots"), capitest.Sized("-1", "x"))
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "bad", nil), md)
	group := f.until("bad", shown)
	require.ElementsMatch(t, []string{
		capacity.AnnotationField(capacity.CPUAnnotation),
		capacity.AnnotationField(clusterv1.AutoscalerMinSizeAnnotation), capacity.AnnotationField(clusterv1.AutoscalerMaxSizeAnnotation),
	}, problemFields(group))
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID, group.GetAvailability().GetReason())
	problems := func() float64 {
		families, err := f.registry.Gather()
		require.NoError(t, err)
		if len(families) == 0 {
			return 0
		}
		return families[0].GetMetric()[0].GetGauge().GetValue()
	}
	require.InDelta(t, 3, problems(), 0)
	bad := scraped(t, f.registry)

	// This changes the same object again. It keeps its problems, and has one more.
	f.change(md, func() { md.Annotations[capacity.MemoryAnnotation] = "-1Gi" })
	f.until("bad", func(g *agentv1alpha1.NodeGroup) bool { return len(g.GetProblems()) == 4 })
	notes := func() []string {
		var list eventsv1.EventList
		require.NoError(t, plane.Client.List(t.Context(), &list, client.InNamespace(f.namespace)))
		var texts []string
		for _, event := range list.Items {
			require.Equal(t, "bad", event.Regarding.Name)
			require.Nil(t, event.Series, "the event was sent more than once: %s", event.Note)
			texts = append(texts, event.Note)
		}
		return texts
	}
	require.Eventually(t, func() bool { return len(notes()) == 4 }, patience, 20*time.Millisecond)
	require.True(t, slices.ContainsFunc(notes(), func(note string) bool {
		return strings.Contains(note, capacity.CPUAnnotation) && strings.Contains(note, `"lots"`)
	}))

	f.change(md, func() {
		md.Annotations = map[string]string{capacity.CPUAnnotation: "4", capacity.MemoryAnnotation: "16Gi"}
	})
	f.until("bad", func(g *agentv1alpha1.NodeGroup) bool { return len(g.GetProblems()) == 0 })
	require.Zero(t, problems())
	scrapes.Record(t, "CapiAgentNodeGroupProblems", scraped(t, f.registry), bad, scrapes.Renamed("namespace", f.namespace, "fleet"))
	require.NoError(t, plane.Client.Delete(t.Context(), md))
	f.until("bad", hidden)
	require.Zero(t, testutil.CollectAndCount(f.registry, "capi_agent_node_group_problems"))
}

func TestPausedAndDeletedClusters(t *testing.T) {
	f := start(t)
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "small", nil),
		capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described))
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() })
	reason := func(want agentv1alpha1.UnavailableReason) func(g *agentv1alpha1.NodeGroup) bool {
		return func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetReason() == want }
	}
	cluster := capitest.NewCluster(f.namespace, "spoke")
	f.change(cluster, func() { cluster.Spec.Paused = new(true) })
	f.until("small", reason(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED))
	f.change(cluster, func() { cluster.Spec.Paused = nil })
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() })
	require.NoError(t, plane.Client.Delete(t.Context(), cluster))
	f.until("small", reason(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_DELETING))
}

func TestWhatSaysNothingNewIsNoChange(t *testing.T) {
	f := start(t)
	md := capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described)
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "small", nil), md)
	f.until("small", shown)
	generation := f.cache.Generation()
	f.change(md, func() { md.Annotations["example.com/note"] = "says nothing about machines" })
	before := md.DeepCopy()
	md.Status.Replicas = ptr.To[int32](0)
	md.Status.ObservedGeneration = md.Generation
	require.NoError(t, plane.Client.Status().Patch(t.Context(), md, client.MergeFrom(before)))
	f.change(md, func() { md.Annotations[capacity.CPUAnnotation] = "8" })
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetCapacity()["cpu"] == "8" })
	require.Equal(t, generation+1, f.cache.Generation())
}

func TestRolloutsAreSeenThoughTheyAreStatus(t *testing.T) {
	f := start(t)
	md := capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described, capitest.RollingUpdate)
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "small", nil), md)
	require.False(t, f.until("small", shown).GetRollingOut())
	condition := func(status metav1.ConditionStatus) {
		before := md.DeepCopy()
		meta.SetStatusCondition(&md.Status.Conditions, metav1.Condition{
			Type: clusterv1.MachineDeploymentRollingOutCondition, Status: status, Reason: "Test",
		})
		require.NoError(t, plane.Client.Status().Patch(t.Context(), md, client.MergeFrom(before)))
	}
	condition(metav1.ConditionTrue)
	group := f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return g.GetRollingOut() })
	require.True(t, group.GetAvailability().GetAvailable())
	condition(metav1.ConditionFalse)
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool { return !g.GetRollingOut() })
}

func TestQuotaThatIsUsedUpMakesTheNamespacesGroupsUnavailable(t *testing.T) {
	f := start(t)
	for _, name := range []string{"a", "b"} {
		plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, name, nil),
			capitest.NewMachineDeployment(f.namespace, name, "spoke", 0, described))
	}
	available := func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() }
	f.until("a", available)
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "machines"}}
	plane.Create(t, quota)
	used := func(used, hard string) {
		quota.Status.Hard = corev1.ResourceList{eligibility.MachineCount: resource.MustParse(hard)}
		quota.Status.Used = corev1.ResourceList{eligibility.MachineCount: resource.MustParse(used)}
		plane.SetStatus(t, quota)
	}
	used("3", "3")
	for _, name := range []string{"a", "b"} {
		shown := f.until(name, func(g *agentv1alpha1.NodeGroup) bool { return !available(g) }).GetAvailability()
		require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED, shown.GetReason())
		require.Equal(t, "ResourceQuota machines allows 3 count/machines.cluster.x-k8s.io and 3 are used; raise spec.hard, or remove Machines",
			shown.GetMessage())
	}
	used("3", "4")
	f.until("a", available)
	used("4", "4")
	f.until("a", func(g *agentv1alpha1.NodeGroup) bool { return !available(g) })
	require.NoError(t, plane.Client.Delete(t.Context(), quota))
	f.until("b", available)
}

func TestAGroupWhoseMachinesAreBlockedIsUnavailable(t *testing.T) {
	f := start(t)
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "a", nil),
		capitest.NewMachineDeployment(f.namespace, "a", "spoke", 1, described))
	available := func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() }
	f.until("a", available)
	newSet := func(name, cluster, revision string) *clusterv1.MachineSet {
		labels := map[string]string{clusterv1.ClusterNameLabel: cluster, clusterv1.MachineDeploymentNameLabel: "a"}
		set := &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: f.namespace, Name: name, Labels: labels, Annotations: map[string]string{clusterv1.RevisionAnnotation: revision},
			},
			Spec: clusterv1.MachineSetSpec{
				ClusterName: cluster, Replicas: new(int32(1)), Selector: metav1.LabelSelector{MatchLabels: labels},
				Template: capitest.NewMachineDeployment(f.namespace, "a", cluster, 1, described).Spec.Template,
			},
		}
		set.Spec.Template.Labels = labels
		plane.Create(t, set)
		return set
	}
	scaling := func(set *clusterv1.MachineSet, message string) {
		set.Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineSetScalingUpCondition, Status: metav1.ConditionTrue, Reason: "Scaling", Message: message,
			LastTransitionTime: metav1.Now(),
		}}
		plane.SetStatus(t, set)
	}
	const blocked = "Scaling up from 0 to 1 replicas is blocked because:\n* the control plane is upgrading"
	first := newSet("a-1", "spoke", "1")
	// This MachineSet was left by a MachineDeployment of the same name in another Cluster.
	scaling(newSet("a-0", "another", "7"), blocked)
	scaling(first, blocked)
	shown := f.until("a", func(g *agentv1alpha1.NodeGroup) bool { return !available(g) }).GetAvailability()
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED, shown.GetReason())
	require.Equal(t, "Cluster API creates no Machines: the control plane is upgrading", shown.GetMessage())
	scaling(first, "Scaling up from 0 to 1 replicas")
	f.until("a", available)
	scaling(first, blocked)
	f.until("a", func(g *agentv1alpha1.NodeGroup) bool { return !available(g) })
	second := newSet("a-2", "spoke", "2") // additional replicas go to this one
	f.until("a", available)
	require.NoError(t, plane.Client.Delete(t.Context(), second))
	f.until("a", func(g *agentv1alpha1.NodeGroup) bool { return !available(g) })
	require.NoError(t, plane.Client.Delete(t.Context(), first))
	f.until("a", available)
}

func TestPriceListIsFollowedAndABadOneIsNotUsed(t *testing.T) {
	f := start(t)
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "small", nil),
		capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described))
	source := func(g *agentv1alpha1.NodeGroup) *agentv1alpha1.ValueSource { return g.GetSources()["price"] }
	require.Equal(t, agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE, source(f.until("small", shown)).GetKind())

	list := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "prices"},
		Data:       map[string]string{pricelist.Key: "currency: EUR\nprices: [{instanceType: small, perHour: 7}]"},
	}
	plane.Create(t, list)
	price := func(wanted float64) func(g *agentv1alpha1.NodeGroup) bool {
		return func(g *agentv1alpha1.NodeGroup) bool { return g.GetPrice().GetPerHour() == wanted }
	}
	group := f.until("small", price(7))
	require.Equal(t, "EUR", group.GetPrice().GetCurrency())
	require.Equal(t, agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST, source(group).GetKind())
	require.Equal(t, "ConfigMap "+f.namespace+"/prices instanceType=small", source(group).GetDetail())
	metric := func(name string, wanted int) {
		require.Eventually(t, func() bool {
			return int(gauge(t, f.prices, name)) == wanted
		}, patience, 10*time.Millisecond, name)
	}
	metric("capi_agent_price_list_usable", 1)
	metric("capi_agent_price_list_entries", 1)
	valid := scraped(t, f.prices)

	f.change(list, func() { list.Data[pricelist.Key] = "prices: [{instanceType: small, perHour: -1}]" })
	metric("capi_agent_price_list_usable", 0)
	scrapes.Record(t, "CapiAgentPriceListInvalid", valid, scraped(t, f.prices))
	require.Eventually(t, func() bool {
		var events eventsv1.EventList
		require.NoError(t, plane.Client.List(t.Context(), &events, client.InNamespace(f.namespace)))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "ConfigMap" && e.Reason == "InvalidPriceList" && strings.Contains(e.Note, "data[prices.yaml]: prices[0].perHour: -1")
		})
	}, patience, 20*time.Millisecond)
	require.True(t, price(7)(f.group("small")), "the last good list stays")
	metric("capi_agent_price_list_entries", 1)

	f.change(list, func() { list.Data[pricelist.Key] = "prices: [{instanceType: small, perHour: 8}]" })
	f.until("small", price(8))
	metric("capi_agent_price_list_usable", 1)
	require.NoError(t, plane.Client.Delete(t.Context(), list))
	f.until("small", func(g *agentv1alpha1.NodeGroup) bool {
		return source(g).GetKind() == agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE
	})
}

// scraped returns metrics as the agent serves them.
func scraped(t *testing.T, registry *prometheus.Registry) scrapes.Scrape {
	t.Helper()
	return scrapes.Take(t, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), time.Now())
}

func gauge(t *testing.T, registry *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return -1
}

func TestNodesThatNoClaimWillRegisterAreAProblemOfTheirGroupUntilTheirTaintIsGone(t *testing.T) {
	f := start(t, func(f *fixture) {
		capitest.RunForTest(f.T, plane, capitest.Options{Namespaces: []string{f.namespace}})
	})
	plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, "floor", nil),
		capitest.NewMachineDeployment(f.namespace, "floor", "spoke", 1, described))
	f.until("floor", shown)
	var machine clusterv1.Machine
	require.Eventually(t, func() bool {
		machines := plane.Machines(t, f.namespace, "floor")
		if len(machines) == 1 {
			machine = machines[0]
		}
		return machine.Spec.ProviderID != ""
	}, patience, 10*time.Millisecond)
	report := func(unregistered bool) {
		f.nodes.Report(t.Context(), f.cluster, []learned.Node{{ProviderID: machine.Spec.ProviderID, Unregistered: unregistered}})
	}
	report(true)
	require.Empty(t, f.group("floor").GetProblems())

	for range 11 { // once a minute, like a holder
		f.clock.SetTime(f.clock.Now().Add(time.Minute))
		report(true)
	}
	// The cache may not show the Machine yet.
	group := f.until("floor", func(g *agentv1alpha1.NodeGroup) bool {
		report(true)
		return len(g.GetProblems()) > 0
	})
	require.Equal(t, machine.Name, group.GetProblems()[0].GetValue())
	require.Contains(t, group.GetProblems()[0].GetMessage(), "karpenter.sh/unregistered")
	require.True(t, group.GetAvailability().GetAvailable(), "claims get Machines of their own")
	require.Eventually(t, func() bool {
		var list eventsv1.EventList
		require.NoError(t, plane.Client.List(t.Context(), &list, client.InNamespace(f.namespace)))
		return slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "MachineDeployment" && e.Type == corev1.EventTypeWarning && e.Reason == "InvalidBootstrap" &&
				strings.Contains(e.Note, machine.Name)
		})
	}, patience, 20*time.Millisecond)

	report(false)
	f.until("floor", func(g *agentv1alpha1.NodeGroup) bool { return len(g.GetProblems()) == 0 })
}

func TestNodesTeachOnlyTheirOwnGroup(t *testing.T) {
	f := start(t, func(f *fixture) {
		capitest.RunForTest(f.T, plane, capitest.Options{Namespaces: []string{f.namespace}})
	})
	for _, name := range []string{"a", "b"} {
		plane.Create(t, capitest.NewInfrastructureTemplate(f.namespace, name, nil),
			capitest.NewMachineDeployment(f.namespace, name, "spoke", 1))
		f.until(name, shown)
	}
	var machine clusterv1.Machine
	require.Eventually(t, func() bool {
		machines := plane.Machines(t, f.namespace, "a")
		if len(machines) == 1 {
			machine = machines[0]
		}
		return machine.Spec.ProviderID != ""
	}, patience, 10*time.Millisecond)
	list := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	generation := f.cache.Generation()
	// The cache may not show the Machine yet.
	group := f.until("a", func(g *agentv1alpha1.NodeGroup) bool {
		f.nodes.Report(t.Context(), f.cluster, []learned.Node{{
			ProviderID: machine.Spec.ProviderID, Capacity: list("4", "16Gi"), Allocatable: list("3900m", "15Gi"),
			Labels: map[string]string{corev1.LabelArchStable: "arm64", corev1.LabelTopologyZone: "z"},
		}})
		return g.GetCapacity()["cpu"] == "4"
	})
	require.Equal(t, "1Gi", group.GetOverhead()["memory"])
	require.Equal(t, "arm64", group.GetArchitecture())
	require.Empty(t, group.GetZone())
	require.Equal(t, agentv1alpha1.SourceKind_SOURCE_KIND_LEARNED, group.GetSources()["capacity.cpu"].GetKind())
	require.Empty(t, group.GetProblems())
	require.Equal(t, generation+1, f.cache.Generation(), "the other group was left alone")
	require.NotContains(t, f.group("b").GetCapacity(), "cpu")

	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "a"}}
	revision := group.GetTemplateRevision()
	f.change(md, func() { md.Spec.Template.Spec.Version = "v1.37.0" })
	group = f.until("a", func(g *agentv1alpha1.NodeGroup) bool { return g.GetTemplateRevision() != revision })
	require.Equal(t, "4", group.GetCapacity()["cpu"], "until there is a Node of the new version")
	f.change(md, func() { md.Spec.Template.Spec.InfrastructureRef.Name = "b" })
	f.until("a", func(g *agentv1alpha1.NodeGroup) bool {
		return g.GetCapacity()["cpu"] == "" && len(g.GetOverhead()) == 0
	})
}
