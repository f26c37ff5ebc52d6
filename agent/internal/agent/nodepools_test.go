package agent_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// poolsHub is a namespace with the Clusters spoke and other, each with a label of its own name.
type poolsHub struct {
	t         *testing.T
	namespace string
	registry  *prometheus.Registry
	*running
}

func newPoolsHub(t *testing.T) *poolsHub {
	t.Helper()
	h := &poolsHub{t: t, namespace: plane.Namespace(t), registry: prometheus.NewRegistry()}
	for _, name := range []string{"spoke", "other"} {
		cluster := capitest.NewCluster(h.namespace, name)
		cluster.Labels = map[string]string{"pools": name}
		plane.Create(t, cluster)
	}
	h.running = start(t, agent.Config{Options: testOptions(h.namespace), Registerer: h.registry})
	return h
}

// counts requires that a metric shows these numbers of Clusters of the set fleet.
func (h *poolsHub) counts(metric string, applied, failing, waiting int) {
	h.t.Helper()
	var want strings.Builder
	fmt.Fprintf(&want, "# HELP %[1]s Number of Clusters that a NodePoolSet selects, by state: applied, failing, or waiting for the first report.\n"+
		"# TYPE %[1]s gauge\n", metric)
	for state, n := range map[string]int{"applied": applied, "failing": failing, "waiting": waiting} {
		fmt.Fprintf(&want, "%s{namespace=%q,node_pool_set=\"fleet\",state=%q} %d\n", metric, h.namespace, state, n)
	}
	require.NoError(h.t, testutil.GatherAndCompare(h.registry, strings.NewReader(want.String()), metric))
}

// set returns a set that selects the Cluster spoke.
func (h *poolsHub) set(name string, pools ...v1alpha1.PublishedTemplate) *v1alpha1.NodePoolSet {
	return &v1alpha1.NodePoolSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: h.namespace, Name: name},
		Spec: v1alpha1.NodePoolSetSpec{
			ClusterSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"pools": "spoke"}}, NodePools: pools,
		},
	}
}

func pool(name, spec string) v1alpha1.PublishedTemplate {
	return v1alpha1.PublishedTemplate{Name: name, Spec: runtime.RawExtension{Raw: []byte(spec)}}
}

func (h *poolsHub) ref(cluster string) *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: h.namespace, Name: cluster}
}

// published returns what a Cluster's own identity is shown, by kind and name.
func (h *poolsHub) published(ctx context.Context, cluster string) (map[string]*agentv1alpha1.PublishedObject, error) {
	response, err := h.client(h.namespace, cluster).NodePools.ListPublishedObjects(ctx,
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: h.ref(cluster)})
	return lo.KeyBy(response.GetObjects(), client.PublishedKey), err
}

// ready waits until the condition Ready of the set has a reason, and returns the set.
func (h *poolsHub) ready(name, reason string) *v1alpha1.NodePoolSet {
	h.t.Helper()
	set := &v1alpha1.NodePoolSet{}
	eventually(h.t, name+" is "+reason, func(ctx context.Context) (bool, error) {
		if err := plane.Client.Get(ctx, types.NamespacedName{Namespace: h.namespace, Name: name}, set); err != nil {
			return false, err
		}
		c := meta.FindStatusCondition(set.Status.Conditions, v1alpha1.ReadyCondition)
		return c != nil && c.Reason == reason && c.ObservedGeneration == set.Generation, nil
	})
	return set
}

// update changes the set fleet. The agent may write its status meanwhile.
func (h *poolsHub) update(change func(*v1alpha1.NodePoolSet)) {
	h.t.Helper()
	require.NoError(h.t, retry.RetryOnConflict(retry.DefaultRetry, func() error {
		set := &v1alpha1.NodePoolSet{}
		if err := plane.Client.Get(h.t.Context(), types.NamespacedName{Namespace: h.namespace, Name: "fleet"}, set); err != nil {
			return err
		}
		change(set)
		return plane.Client.Update(h.t.Context(), set)
	}))
}

func message(set *v1alpha1.NodePoolSet) string {
	return meta.FindStatusCondition(set.Status.Conditions, v1alpha1.ReadyCondition).Message
}

func TestNodePoolSetsReachTheSelectedClusters(t *testing.T) {
	t.Parallel()
	h := newPoolsHub(t)
	mirror := h.client(h.namespace, "spoke").MirrorPublishedObjects(h.ref("spoke"))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = mirror.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	shown := func(what string, when func(*agentv1alpha1.PublishedObject) bool) *agentv1alpha1.PublishedObject {
		var object *agentv1alpha1.PublishedObject
		eventually(t, what, func(context.Context) (bool, error) {
			object, _ = mirror.Get("NodePool/default")
			return when(object), nil
		})
		return object
	}

	set := h.set("fleet", pool("default", `{"weight": 10, "big": 9007199254740993, "unknown": {"b": 1, "a": 2}}`))
	set.Spec.NodePools[0].Labels = map[string]v1alpha1.PublishedValue{"team": "a"}
	plane.Create(t, set)
	first := shown("the pool is published", func(o *agentv1alpha1.PublishedObject) bool { return o != nil })
	assert.JSONEq(t, `{"weight": 10, "big": 9007199254740993, "unknown": {"a": 2, "b": 1}}`, first.GetSpecJson(), "as the user wrote it")
	assert.Contains(t, first.GetSpecJson(), "9007199254740993")
	assert.Equal(t, "fleet", first.GetSet())
	assert.Equal(t, map[string]string{"team": "a"}, first.GetLabels())
	assert.Equal(t, agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN, first.GetDeletionPolicy())

	others, err := h.client(h.namespace, "other").NodePools.ListPublishedObjects(t.Context(),
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: h.ref("other")})
	require.NoError(t, err)
	assert.Empty(t, others.GetObjects(), "it is not selected")
	assert.Equal(t, []string{"fleet"}, others.GetSets(), "what it publishes to others does not matter")
	_, err = h.client(h.namespace, "other").NodePools.ListPublishedObjects(t.Context(),
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: h.ref("spoke")})
	assert.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)

	h.update(func(set *v1alpha1.NodePoolSet) {
		set.Spec.NodePools[0].Spec.Raw, set.Spec.DeletionPolicy = []byte(`{"weight": 20}`), v1alpha1.DeletionPolicyDelete
	})
	changed := shown("the change is published", func(o *agentv1alpha1.PublishedObject) bool { return o.GetSpecJson() == `{"weight":20}` })
	assert.NotEqual(t, first.GetRevision(), changed.GetRevision())
	assert.Equal(t, agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE, changed.GetDeletionPolicy())

	h.update(func(set *v1alpha1.NodePoolSet) { set.Spec.ClusterSelector.MatchLabels["pools"] = "other" })
	shown("the pool is published no longer", func(o *agentv1alpha1.PublishedObject) bool { return o == nil })
	selected, err := h.published(t.Context(), "other")
	require.NoError(t, err)
	assert.Contains(t, selected, "NodePool/default", "it is selected now")

	h.update(func(set *v1alpha1.NodePoolSet) { set.Finalizers = []string{"a.example/of-a-tool"} })
	require.NoError(t, plane.Client.Delete(t.Context(), h.set("fleet")))
	leaving, err := h.client(h.namespace, "other").NodePools.ListPublishedObjects(t.Context(),
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: h.ref("other")})
	require.NoError(t, err)
	assert.Empty(t, leaving.GetObjects())
	assert.Empty(t, leaving.GetSets(), "a set that is being deleted removes nothing")
	h.update(func(set *v1alpha1.NodePoolSet) { set.Finalizers = nil })
}

func TestNothingIsConcludedOfAPausedCluster(t *testing.T) {
	t.Parallel()
	h := newPoolsHub(t)
	plane.Create(t, h.set("fleet", pool("default", `{}`)))
	cluster := &clusterv1.Cluster{}
	require.NoError(t, plane.Client.Get(t.Context(), types.NamespacedName{Namespace: h.namespace, Name: "spoke"}, cluster))
	cluster.Spec.Paused = new(true)
	require.NoError(t, plane.Client.Update(t.Context(), cluster))
	_, err := h.published(t.Context(), "spoke")
	assert.Equal(t, agenterrors.ReasonClusterPaused, agenterrors.ReasonOf(err), "%v", err)
}

func TestTheOlderNodePoolSetPublishesWhatTwoName(t *testing.T) {
	t.Parallel()
	h := newPoolsHub(t)
	plane.Create(t, h.set("b", pool("default", `{"weight": 1}`)))
	h.ready("b", v1alpha1.WaitingReason)
	// Their creation times may be in the same second: then the name decides.
	plane.Create(t, h.set("c", pool("default", `{"weight": 2}`), pool("spot", `{"weight": 3}`)))
	younger := h.ready("c", v1alpha1.NotAppliedReason)
	assert.Equal(t, "1 of 1 Clusters: spoke: NodePool default: the NodePoolSet b publishes it, which is older", message(younger))
	published, err := h.published(t.Context(), "spoke")
	require.NoError(t, err)
	assert.Equal(t, "b", published["NodePool/default"].GetSet())
	assert.Equal(t, "c", published["NodePool/spot"].GetSet())

	require.NoError(t, plane.Client.Delete(t.Context(), h.set("b")))
	h.ready("c", v1alpha1.WaitingReason)
	published, err = h.published(t.Context(), "spoke")
	require.NoError(t, err)
	assert.Equal(t, "c", published["NodePool/default"].GetSet(), "it takes over")
}

func TestTheHubShowsWhatSpokesReport(t *testing.T) {
	t.Parallel()
	const clustersMetric = "capi_agent_node_pool_set_clusters"
	h := newPoolsHub(t)
	plane.Create(t, h.set("fleet", pool("default", `{"weight": 1}`), pool("spot", `{"weight": 2}`)))
	h.ready("fleet", v1alpha1.WaitingReason)
	waiting := scraped(t, h.registry, time.Now())
	published, err := h.published(t.Context(), "spoke")
	require.NoError(t, err)
	result := func(name, problem string) *agentv1alpha1.AppliedObject {
		return &agentv1alpha1.AppliedObject{
			Kind: "NodePool", Name: name, Set: "fleet", Revision: published["NodePool/"+name].GetRevision(), Applied: problem == "", Message: problem,
		}
	}
	report := &agentv1alpha1.ReportNodePoolsRequest{
		Cluster: h.ref("spoke"), MoreNodePools: 3,
		Objects: []*agentv1alpha1.AppliedObject{result("spot", ""), result("default", "spec.weight: Invalid value")},
		NodePools: []*agentv1alpha1.NodePoolStatus{
			{Name: "spot", Set: "fleet", Ready: true, Nodes: 2, PendingNodeClaims: 1, PricePerHour: "0.75"}, {Name: "own", Message: "no NodeClass"},
		},
	}
	shim := h.client(h.namespace, "spoke").NodePools
	_, err = shim.ReportNodePools(t.Context(), report)
	require.NoError(t, err)
	failing := h.ready("fleet", v1alpha1.NotAppliedReason)
	assert.Equal(t, "1 of 1 Clusters: spoke: NodePool default: spec.weight: Invalid value", message(failing))
	assert.Equal(t, []int32{1, 0, 1}, []int32{*failing.Status.Clusters, *failing.Status.AppliedClusters, *failing.Status.FailingClusters})
	h.counts(clustersMetric, 0, 1, 0)
	scrapes.Record(t, "CapiAgentNodePoolSetNotApplied", waiting, scraped(t, h.registry, time.Now()), scrapes.Renamed("namespace", h.namespace, "fleet"))

	spoke := &v1alpha1.Spoke{}
	require.NoError(t, plane.Client.Get(t.Context(), types.NamespacedName{Namespace: h.namespace, Name: "spoke"}, spoke))
	assert.Equal(t, []v1alpha1.SpokeNodePool{
		{Name: "own", Message: "no NodeClass"}, {Name: "spot", Set: "fleet", Ready: true, Nodes: 2, PendingNodeClaims: 1, PricePerHour: "0.75"},
	}, spoke.Status.NodePools)
	assert.EqualValues(t, 3, spoke.Status.MoreNodePools)

	_, err = shim.ReportNodePools(t.Context(), report)
	require.NoError(t, err, "nothing has changed")
	changed := proto.CloneOf(report)
	changed.Objects[1] = result("default", "")
	eventually(t, "the change is accepted", func(ctx context.Context) (bool, error) {
		_, err := shim.ReportNodePools(ctx, changed)
		return err == nil, lo.Ternary(status.Code(err) == codes.ResourceExhausted, nil, err)
	})
	applied := h.ready("fleet", v1alpha1.AppliedReason)
	assert.Equal(t, []int32{1, 1, 0}, []int32{*applied.Status.Clusters, *applied.Status.AppliedClusters, *applied.Status.FailingClusters})

	h.update(func(set *v1alpha1.NodePoolSet) { set.Spec.NodePools[0].Spec.Raw = []byte(`{"weight": 9}`) })
	h.ready("fleet", v1alpha1.WaitingReason) // the report is about the content before
	h.counts(clustersMetric, 0, 0, 1)
	require.NoError(t, plane.Client.Delete(t.Context(), h.set("fleet")))
	eventually(t, "the deleted set is not counted", func(context.Context) (bool, error) {
		n, err := testutil.GatherAndCount(h.registry, clustersMetric)
		return n == 0, err
	})
}

func TestMistakesInNodePoolSetsAreNamed(t *testing.T) {
	t.Parallel()
	h := newPoolsHub(t)
	for name, c := range map[string]struct {
		change func(*v1alpha1.NodePoolSet)
		want   string
	}{
		"no selector": {func(s *v1alpha1.NodePoolSet) { s.Spec.ClusterSelector = nil }, "spec.clusterSelector"},
		"operator": {func(s *v1alpha1.NodePoolSet) {
			s.Spec.ClusterSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Gt"}}}
		}, "clusterSelector.matchExpressions[].operator"},
		"nothing":  {func(s *v1alpha1.NodePoolSet) { s.Spec.NodePools = nil }, "at least one entry of nodePools or nodeClasses"},
		"policy":   {func(s *v1alpha1.NodePoolSet) { s.Spec.DeletionPolicy = "Orphan" }, "spec.deletionPolicy"},
		"bad name": {func(s *v1alpha1.NodePoolSet) { s.Spec.NodePools[0].Name = "Default" }, "spec.nodePools[0].name"},
		"our label": {func(s *v1alpha1.NodePoolSet) {
			s.Spec.NodePools[0].Labels = map[string]v1alpha1.PublishedValue{"karpenter.cluster.x-k8s.io/published-by": "x"}
		}, "are set by the shim"},
		"a list":    {func(s *v1alpha1.NodePoolSet) { s.Spec.NodePools[0].Spec.Raw = []byte(`[]`) }, "spec.nodePools[0].spec"},
		"twice":     {func(s *v1alpha1.NodePoolSet) { s.Spec.NodePools = append(s.Spec.NodePools, s.Spec.NodePools[0]) }, "spec.nodePools[1]"},
		"long name": {func(s *v1alpha1.NodePoolSet) { s.Name = strings.Repeat("a", 64) }, "metadata.name must have at most 63 characters"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := h.set("mistaken", pool("default", `{}`))
			c.change(set)
			err := plane.Client.Create(t.Context(), set)
			require.Error(t, err)
			assert.Contains(t, err.Error(), c.want)
		})
	}
	for name, c := range map[string]struct {
		change func(*v1alpha1.PublishedTemplate)
		want   string
	}{
		"large": {
			func(p *v1alpha1.PublishedTemplate) {
				p.Spec.Raw = fmt.Appendf(nil, `{"a": %q}`, strings.Repeat("x", 40000))
			},
			"spec.nodePools[0].spec: 40008 bytes of JSON, but at most 32768 are published",
		},
		"label": {func(p *v1alpha1.PublishedTemplate) { p.Labels = map[string]v1alpha1.PublishedValue{"a b": "c"} }, "spec.nodePools[0].labels[a b]: "},
	} {
		set := h.set("mistaken-"+name, pool(name, `{}`))
		c.change(&set.Spec.NodePools[0])
		plane.Create(t, set)
		assert.Contains(t, message(h.ready(set.Name, v1alpha1.InvalidReason)), c.want)
		published, err := h.published(t.Context(), "spoke")
		require.NoError(t, err)
		object := published["NodePool/"+name]
		assert.NotEmpty(t, object.GetProblem(), "it is not removed from the spoke")
		assert.Empty(t, object.GetSpecJson())
	}
}

// A problem quotes what a user wrote. The API server accepts conditions of 32 KiB.
func TestAMistakeOfAnyLengthIsShown(t *testing.T) {
	t.Parallel()
	h := newPoolsHub(t)
	set := h.set("fleet", pool("default", `{}`))
	set.Spec.NodePools[0].Annotations = map[string]v1alpha1.PublishedValue{strings.Repeat("a", 33000): "b"}
	plane.Create(t, set)
	shown := message(h.ready("fleet", v1alpha1.InvalidReason))
	assert.Contains(t, shown, "spec.nodePools[0].annotations[aaa")
	assert.Contains(t, shown, "must be no more than 63")
	assert.Less(t, len(shown), 1024, "an event has no more")
	eventually(t, "there is an event about it", func(ctx context.Context) (bool, error) {
		var list eventsv1.EventList
		err := plane.Client.List(ctx, &list, ctrlclient.InNamespace(h.namespace))
		return lo.ContainsBy(list.Items, func(e eventsv1.Event) bool { return e.Reason == v1alpha1.InvalidReason && e.Note == shown }), err
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// Whether a status can be written depends on what users wrote, on rights and on admission policies.
func TestAStatusThatCannotBeWrittenKeepsNothingFromBeingServed(t *testing.T) {
	t.Parallel()
	h := &poolsHub{t: t, namespace: plane.Namespace(t)}
	cluster := capitest.NewCluster(h.namespace, "spoke")
	cluster.Labels = map[string]string{"pools": "spoke"}
	plane.Create(t, cluster, h.set("a", pool("default", `{}`)), h.set("b", pool("spot", `{}`)))
	config := rest.CopyConfig(hub)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(request *http.Request) (*http.Response, error) {
			if !strings.HasSuffix(request.URL.Path, "/nodepoolsets/a/status") {
				return next.RoundTrip(request)
			}
			return &http.Response{
				StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"text/plain"}}, Body: http.NoBody, Request: request,
			}, nil
		})
	})
	h.running = start(t, agent.Config{Hub: config, Options: testOptions(h.namespace)})
	published, err := h.published(t.Context(), "spoke")
	require.NoError(t, err)
	assert.Contains(t, published, "NodePool/default")
	h.ready("b", v1alpha1.WaitingReason)
}

func TestWithoutTheOptionNothingIsPublished(t *testing.T) {
	t.Parallel()
	namespace := plane.Namespace(t)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"))
	o := testOptions(namespace)
	o.PublishNodePools = false
	r := start(t, agent.Config{Options: o})
	c := r.client(namespace, "spoke")
	_, err := c.NodePools.ListPublishedObjects(t.Context(), &agentv1alpha1.ListPublishedObjectsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"},
	})
	require.Equal(t, codes.Unimplemented, status.Code(err), "%v", err)
	response, err := c.Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
	require.NoError(t, err)
	assert.NotContains(t, response.GetFeatures(), "node-pools")
}
