package claims

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// The tests in this file make causes of the alerts in deploy/charts/agent/alerts.yaml.
// test/monitoring has the list of all such tests.

// scraped returns the metrics of the process and of an engine as the agent serves them, at the
// start of the test's time. The first scrape of an engine creates the series of its Clusters, and
// the second one shows them.
func scraped(t *testing.T, e *Engine) scrapes.Scrape {
	t.Helper()
	own := prometheus.NewRegistry()
	own.MustRegister(e.Collector())
	handler := promhttp.HandlerFor(prometheus.Gatherers{metrics.Registry, own}, promhttp.HandlerOpts{})
	scrapes.Take(t, handler, newTestTime())
	return scrapes.Take(t, handler, newTestTime())
}

// record records an alert about the Cluster.
func (g *oneGroup) record(alert string, without, with scrapes.Scrape) {
	g.t.Helper()
	scrapes.Record(g.t, alert, without, with, scrapes.Only("cluster", g.name))
}

// oneGroup is an engine with a Cluster and its only node group. Both have the same name, which must
// be unique, because the metrics belong to the process.
type oneGroup struct {
	*Engine

	t    *testing.T
	now  *clocktesting.FakeClock
	name string
	// takes is how long the hub needs to create a claim.
	takes time.Duration
}

// withOneGroup returns an engine for a Cluster with these annotations.
func withOneGroup(t *testing.T, name string, b Bounds, annotations map[string]string) *oneGroup {
	t.Helper()
	group := groupOf(name, 0, nil)
	group.Spec.ClusterName = name
	g := &oneGroup{t: t, now: clocktesting.NewFakeClock(newTestTime()), name: name, Engine: engineWith(t, group, &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: annotations},
	})}
	g.Clock, g.Bounds = g.now, b
	g.spawn = func(run func()) { run() }
	hub := g.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	g.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if _, isClaim := object.(*v1alpha1.MachineClaim); isClaim {
				g.now.Step(g.takes)
				object.SetCreationTimestamp(metav1.NewTime(g.now.Now())) // as the API server does
			}
			return c.Create(ctx, object, options...)
		},
	})
	t.Cleanup(func() { // which drops the series, so that the test can be repeated
		require.NoError(t, hub.Delete(context.Background(), group))
		require.NoError(t, hub.Delete(context.Background(), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}))
		measured(t, "", nil, g.Collector())
	})
	return g
}

func (g *oneGroup) key(n int) Key {
	return Key{Namespace: namespace, Cluster: g.name, ID: fmt.Sprintf("%s-%d", g.name, n)}
}

// claim creates a claim.
func (g *oneGroup) claim(n int) {
	g.t.Helper()
	_, err := g.Create(g.t.Context(), Request{
		Namespace: namespace, Cluster: g.name, ID: g.key(n).ID, Holder: "karpenter", Candidates: []string{g.name},
	})
	require.NoError(g.t, err)
}

// machine returns a Machine of the node group, which no claim has yet.
func (g *oneGroup) machine(n int) *clusterv1.Machine {
	m := machineOf(fmt.Sprintf("%s-%d", g.name, n))
	m.Labels[clusterv1.MachineDeploymentNameLabel], m.Labels[clusterv1.ClusterNameLabel], m.Spec.ClusterName = g.name, g.name, g.name
	return m
}

// bind creates a Machine, as Cluster API does, for the only claim that waits for one.
func (g *oneGroup) bind(n int) {
	g.t.Helper()
	require.NoError(g.t, g.Client.Create(g.t.Context(), g.machine(n)))
	g.until(n, v1alpha1.PhaseBound)
}

// until reconciles the node group each second until the claim has the phase.
func (g *oneGroup) until(n int, phase v1alpha1.Phase) {
	g.t.Helper()
	var c v1alpha1.MachineClaim
	for range 10 {
		_, err := g.Reconcile(g.t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: g.name}})
		require.NoError(g.t, err)
		require.NoError(g.t, g.Client.Get(g.t.Context(), g.key(n).object(), &c))
		if c.CurrentPhase() == phase {
			return
		}
		g.now.Step(time.Second)
	}
	require.Equal(g.t, phase, c.CurrentPhase())
}

// measured returns the value of a metric of the Cluster.
func (g *oneGroup) measured(name string, more prometheus.Labels) float64 {
	g.t.Helper()
	labels := prometheus.Labels{"namespace": namespace, "cluster": g.name}
	maps.Copy(labels, more)
	return measured(g.t, name, labels, g.Collector())
}

// within returns which part of the observations of the Cluster's histogram is at most the upper
// bound of a bucket.
func (g *oneGroup) within(name string, bound float64) float64 {
	g.t.Helper()
	families, err := metrics.Registry.Gather()
	require.NoError(g.t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			of := map[string]string{}
			for _, l := range m.GetLabel() {
				of[l.GetName()] = l.GetValue()
			}
			if family.GetName() != name || of["namespace"] != namespace || of["cluster"] != g.name {
				continue
			}
			for _, bucket := range m.GetHistogram().GetBucket() {
				if bucket.GetUpperBound() == bound {
					return float64(bucket.GetCumulativeCount()) / float64(m.GetHistogram().GetSampleCount())
				}
			}
		}
	}
	require.Fail(g.t, "there is no bucket", "%s of %s, le %v", name, g.name, bound)
	return 0
}

func TestSlowClaimsAndSlowMachinesMissTheObjectives(t *testing.T) {
	g := withOneGroup(t, "slow", Bounds{}, nil)
	claims := func() float64 { return g.within("capi_agent_claim_create_seconds", 2.56) }
	machines := func() float64 { return g.within("capi_agent_claim_bound_seconds", 64) }
	g.claim(0)
	g.bind(0)
	require.GreaterOrEqual(t, claims(), 0.99)
	require.GreaterOrEqual(t, machines(), 0.9)
	fast := scraped(t, g.Engine)

	g.takes = 3 * time.Second
	g.claim(1)
	require.Less(t, claims(), 0.99)
	g.record("CapiAgentClaimsSlow", fast, scraped(t, g.Engine))
	g.now.Step(65 * time.Second)
	g.bind(1)
	require.Less(t, machines(), 0.9)
	g.record("CapiAgentMachinesSlow", fast, scraped(t, g.Engine))
}

func TestMachinesThatAnotherActorDeletesAreCountedByNodeGroup(t *testing.T) {
	g := withOneGroup(t, "loses-machines", Bounds{}, nil)
	lost := func() float64 {
		return g.measured("capi_agent_claims_ended_total", prometheus.Labels{"machine_deployment": g.name, "reason": protocol.ReasonMachineLost})
	}
	for n := range 3 {
		g.claim(n)
		g.bind(n)
	}
	require.Zero(t, lost(), "it increases from zero")
	none := scraped(t, g.Engine)
	for n := range 3 {
		require.NoError(t, g.Client.Delete(t.Context(), g.machine(n)))
		g.until(n, v1alpha1.PhaseEnded)
	}
	require.Greater(t, lost(), 2.0)
	g.record("CapiAgentMachinesLost", none, scraped(t, g.Engine))
}

// A Cluster's own limits replace the agent's.
func TestAClusterThatComesNearItsLimitsIsShown(t *testing.T) {
	const agents = "near-the-agents"
	own := map[string]string{v1alpha1.MaxClaimsAnnotation: "6", v1alpha1.MaxCreationsAnnotation: "6", v1alpha1.MaxReleasesAnnotation: "6"}
	for name, c := range map[string]struct {
		limit       int
		annotations map[string]string
	}{agents: {6, nil}, "near-its-own": {1000, own}} {
		t.Run(name, func(t *testing.T) {
			g := withOneGroup(t, name, Bounds{Claims: c.limit, Creations: c.limit, Releases: c.limit, ReleaseWindow: 10 * time.Minute}, c.annotations)
			of := func(limit string) float64 {
				labels := prometheus.Labels{"limit": limit}
				if c.annotations != nil {
					return g.measured("capi_agent_cluster_limit", labels)
				}
				require.InDelta(t, -1, g.measured("capi_agent_cluster_limit", labels), 0)
				return measured(t, "capi_agent_limit", labels, g.Collector())
			}
			live := func() float64 {
				return g.measured("capi_agent_cluster_claims", prometheus.Labels{"state": "live"}) / of("live")
			}
			creations := func() float64 {
				return g.measured("capi_agent_node_group_recent_creations", prometheus.Labels{"machine_deployment": g.name}) / of("creations")
			}
			releases := func() float64 { return g.measured("capi_agent_cluster_recent_releases", nil) / of("releases") }
			release := func(n int) {
				_, err := g.Release(t.Context(), g.key(n), ReleaseOptions{})
				require.NoError(t, err)
			}
			for n := range 4 {
				g.claim(n)
				g.bind(n)
			}
			require.LessOrEqual(t, live(), 0.8)
			require.LessOrEqual(t, creations(), 0.8)
			farFrom := scraped(t, g.Engine)
			g.claim(4)
			g.bind(4)
			require.Greater(t, live(), 0.8)
			require.Greater(t, creations(), 0.8)
			if name == agents {
				g.record("CapiAgentLimitNear", farFrom, scraped(t, g.Engine))
				g.record("CapiAgentCreationsNearLimit", farFrom, scraped(t, g.Engine))
			}

			for n := range 4 {
				release(n)
			}
			require.LessOrEqual(t, releases(), 0.8)
			farFrom = scraped(t, g.Engine)
			release(4)
			require.Greater(t, releases(), 0.8)
			if name == agents {
				g.record("CapiAgentReleasesNearLimit", farFrom, scraped(t, g.Engine))
			}
			require.Zero(t, g.measured("capi_agent_claims_refused_total", nil))
		})
	}
}
