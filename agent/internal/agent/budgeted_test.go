package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// budget is the limit of bytes in these tests: a few claims.
const budget = 32 << 10

// A Cluster stores no more than its budget in the hub's etcd, with whatever texts its spoke
// chooses, and can get rid of what it stores. No other Cluster is concerned.
func TestAClusterStoresNoMoreBytesThanItMay(t *testing.T) {
	namespace := plane.Namespace(t)
	groups := longNames(t, namespace)
	plane.Create(t, capitest.NewCluster(namespace, "greedy"), capitest.NewCluster(namespace, "modest"),
		capitest.NewMachineDeployment(namespace, "small", "modest", 0))
	o, registry := testOptions(namespace), prometheus.NewRegistry()
	o.MaxClaimBytesPerCluster.Quantity = *resource.NewQuantity(budget, resource.BinarySI)
	r := start(t, agent.Config{Options: o, Registerer: registry})
	empty := scraped(t, registry, time.Now())
	within := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		t.Cleanup(cancel)
		return ctx
	}
	create := func(cluster, id string, validateOnly bool, candidates ...string) error {
		_, err := r.client(namespace, cluster).Claims.CreateClaim(within(), &agentv1alpha1.CreateClaimRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: cluster}, ClaimId: id, Holder: "karpenter",
			DisplayName: strings.Repeat("d", 253), Candidates: candidates, ValidateOnly: validateOnly,
		})
		return err
	}
	release := func(id string) error {
		_, err := r.client(namespace, "greedy").Claims.ReleaseClaim(within(), &agentv1alpha1.ReleaseClaimRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "greedy"}, ClaimId: id, Reason: strings.Repeat("r", 1000),
		})
		return err
	}
	requireFull := func(err error) {
		t.Helper()
		require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
		require.Equal(t, agenterrors.ReasonTooManyClaims, agenterrors.ReasonOf(err))
		delay, given := agenterrors.RetryDelay(err)
		require.True(t, given)
		require.Positive(t, delay)
		require.ErrorContains(t, err, "32Ki")
	}

	made := 0
	require.Eventually(t, func() bool {
		err := create("greedy", fmt.Sprintf("claim-%d", made), false, groups...)
		if err == nil {
			made++
			return made > 100
		}
		requireFull(err)
		return true
	}, patience, 10*time.Millisecond)
	require.Less(t, made, 100)
	require.Greater(t, made, 3)
	requireFull(create("greedy", "one-more", true, groups...))
	requireFull(release("never-made"))
	require.NoError(t, create("greedy", "claim-0", false, groups...), "a call that is repeated is answered as before")
	require.NoError(t, create("modest", "claim-0", false, namespace+"/small"))

	// What is measured is about what the API server stores.
	stored := storedBytes(t, namespace, "greedy")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.InEpsilon(c, storedBytes(t, namespace, "greedy"), gauge(t, registry, "capi_agent_cluster_claim_bytes", "greedy"), 0.15)
	}, patience, 100*time.Millisecond)
	t.Logf("%d claims take up %.0f bytes; measured: %.0f", made, stored, gauge(t, registry, "capi_agent_cluster_claim_bytes", "greedy"))
	require.Less(t, stored, 2.0*budget)
	require.Positive(t, gauge(t, registry, "capi_agent_claim_bytes_refused_total", "greedy"))
	require.InDelta(t, budget, gauge(t, registry, "capi_agent_claim_bytes_limit", ""), 0)
	used := gauge(t, registry, "capi_agent_cluster_claim_bytes", "greedy") / gauge(t, registry, "capi_agent_claim_bytes_limit", "")
	require.Greater(t, used, 0.8)
	scrapes.Record(t, "CapiAgentClaimBytesNearLimit", empty, scraped(t, registry, time.Now()),
		scrapes.Only("cluster", "greedy"), scrapes.Renamed("namespace", namespace, "fleet"))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var events eventsv1.EventList
		assert.NoError(c, plane.Client.List(t.Context(), &events, client.InNamespace(namespace)))
		assert.True(c, slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "Cluster" && e.Regarding.Name == "greedy" && e.Reason == "LimitReached"
		}))
	}, patience, 100*time.Millisecond)

	for i := range made {
		require.NoError(t, release(fmt.Sprintf("claim-%d", i)), "what there is can always be released")
	}
	requireFull(create("greedy", "one-more", false, groups...))
	require.NoError(t, plane.Client.DeleteAllOf(t.Context(), &v1alpha1.MachineClaim{}, client.InNamespace(namespace),
		client.MatchingLabels{v1alpha1.ClusterLabel: "greedy"}))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.NoError(c, create("greedy", "one-more", false, groups...))
	}, patience, 100*time.Millisecond)
}

// A Cluster with much of what all Clusters may have gets no more, also from an agent that has just
// started. Another one, which has little, is served as before.
func TestEndedClaimsOfAllClustersAreLimitedTogether(t *testing.T) {
	// allBytes is less than what each Cluster may have in any case, so no call is refused because
	// of it.
	const assured, allBytes = 500, 512 << 10
	namespace := plane.Namespace(t)
	plane.Create(t, capitest.NewCluster(namespace, "greedy"), capitest.NewCluster(namespace, "modest"),
		capitest.NewMachineDeployment(namespace, "large", "greedy", 0), capitest.NewMachineDeployment(namespace, "small", "modest", 0))
	o := testOptions(namespace)
	o.MaxAllEndedClaims = assured / 2
	o.MaxAllClaimBytes.Quantity = *resource.NewQuantity(allBytes, resource.BinarySI)
	for _, unknown := range []string{"before", "after"} {
		registry := prometheus.NewRegistry()
		r := start(t, agent.Config{Options: o, Registerer: registry})
		empty := scraped(t, registry, time.Now())
		release := func(cluster, id string) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := r.client(namespace, cluster).Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
				Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: cluster}, ClaimId: id,
			})
			return err
		}
		create := func(cluster, id, group string) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := r.client(namespace, cluster).Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
				Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: cluster}, ClaimId: id, Holder: "karpenter",
				Candidates: []string{namespace + "/" + group},
			})
			return err
		}
		for i := range assured {
			require.NoError(t, release("greedy", fmt.Sprintf("unknown-%d", i)), "the first time, and when it is repeated")
		}
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			assert.GreaterOrEqual(c, gauge(t, registry, "capi_agent_all_ended_claims", ""), float64(assured))
		}, patience, 100*time.Millisecond)
		for _, err := range []error{release("greedy", unknown), create("greedy", unknown, "large")} {
			require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
			require.Equal(t, agenterrors.ReasonTooManyClaims, agenterrors.ReasonOf(err))
			require.ErrorContains(t, err, "--max-all-ended-claims")
		}
		require.NoError(t, release("modest", unknown))
		require.NoError(t, create("modest", "claim-"+unknown, "small"))
		require.InDelta(t, assured/2, gauge(t, registry, "capi_agent_all_ended_claims_limit", ""), 0)
		require.InDelta(t, allBytes, gauge(t, registry, "capi_agent_all_claim_bytes_limit", ""), 0)
		ofEnded := gauge(t, registry, "capi_agent_all_ended_claims", "") / gauge(t, registry, "capi_agent_all_ended_claims_limit", "")
		ofBytes := gauge(t, registry, "capi_agent_all_claim_bytes", "") / gauge(t, registry, "capi_agent_all_claim_bytes_limit", "")
		t.Logf("of what all Clusters may have: %.2f of the ended claims, %.2f of the bytes", ofEnded, ofBytes)
		require.Greater(t, ofEnded, 0.8)
		require.Greater(t, ofBytes, 0.8)
		if unknown == "before" {
			scrapes.Record(t, "CapiAgentAllEndedClaimsNearLimit", empty, scraped(t, registry, time.Now()))
			scrapes.Record(t, "CapiAgentAllClaimBytesNearLimit", empty, scraped(t, registry, time.Now()))
		}
		r.stop()
	}
}

// An agent that starts reads the claims in a list, which its informer transforms twice.
func TestAnAgentThatStartsMeasuresTheClaimsAsTheyAreStored(t *testing.T) {
	namespace := plane.Namespace(t)
	groups := longNames(t, namespace)
	plane.Create(t, capitest.NewCluster(namespace, "greedy"))
	r := start(t, agent.Config{Options: testOptions(namespace)})
	calls := r.client(namespace, "greedy").Claims
	cluster := &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "greedy"}
	for i := range 5 {
		id := fmt.Sprintf("claim-%d", i)
		_, err := calls.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: cluster, ClaimId: id, Holder: "karpenter", DisplayName: strings.Repeat("d", 253), Candidates: groups,
		})
		require.NoError(t, err)
		_, err = calls.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: cluster, ClaimId: id, Reason: strings.Repeat("r", 1000)})
		require.NoError(t, err)
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var list v1alpha1.MachineClaimList
		assert.NoError(c, plane.Client.List(t.Context(), &list, client.InNamespace(namespace)))
		for i := range list.Items {
			assert.Equal(c, v1alpha1.PhaseEnded, list.Items[i].CurrentPhase()) // it is not written any more
		}
	}, patience, 100*time.Millisecond)
	r.stop()
	registry := prometheus.NewRegistry()
	start(t, agent.Config{Options: testOptions(namespace), Registerer: registry})
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		stored := storedBytes(t, namespace, "greedy")
		assert.InEpsilon(c, stored, gauge(t, registry, "capi_agent_cluster_claim_bytes", "greedy"), 0.15)
	}, patience, 100*time.Millisecond)
}

// longNames makes as many node groups as a claim keeps as candidates, and returns their ids.
func longNames(t *testing.T, namespace string) (ids []string) {
	t.Helper()
	for i := range 16 {
		name := fmt.Sprintf("%02d-%s", i, strings.Repeat("long", 15))
		plane.Create(t, capitest.NewMachineDeployment(namespace, name, "greedy", 0))
		ids = append(ids, namespace+"/"+name)
	}
	return ids
}

// storedBytes returns how long the JSON of a Cluster's claims is, as the API server has it, with
// the managed fields.
func storedBytes(t *testing.T, namespace, cluster string) float64 {
	t.Helper()
	config := rest.CopyConfig(plane.Config)
	config.APIPath, config.GroupVersion = "/apis", &v1alpha1.GroupVersion
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	direct, err := rest.RESTClientFor(config)
	require.NoError(t, err)
	var list v1alpha1.MachineClaimList
	require.NoError(t, plane.Client.List(t.Context(), &list, client.InNamespace(namespace), client.MatchingLabels{v1alpha1.ClusterLabel: cluster}))
	sum := 0
	for i := range list.Items {
		raw, err := direct.Get().Namespace(namespace).Resource("machineclaims").Name(list.Items[i].Name).
			VersionedParams(&metav1.GetOptions{}, metav1.ParameterCodec).DoRaw(t.Context())
		require.NoError(t, err)
		sum += len(raw)
	}
	return float64(sum)
}

// scraped returns metrics as the agent serves them.
func scraped(t *testing.T, registry *prometheus.Registry, at time.Time) scrapes.Scrape {
	t.Helper()
	return scrapes.Take(t, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), at)
}

// gauge returns the value of a metric, for the Cluster if it is given.
func gauge(t *testing.T, registry *prometheus.Registry, name, cluster string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, metric := range family.GetMetric() {
			of := ""
			for _, label := range metric.GetLabel() {
				if label.GetName() == "cluster" {
					of = label.GetValue()
				}
			}
			if of == cluster {
				return metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
			}
		}
	}
	require.Fail(t, "there is no metric "+name+" of "+cluster)
	return 0
}
