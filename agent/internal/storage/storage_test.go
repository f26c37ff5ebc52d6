package storage_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllertest"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/storage"
)

var (
	production = types.NamespacedName{Namespace: "team-a", Name: "production"}
	staging    = types.NamespacedName{Namespace: "team-a", Name: "staging"}
)

// claimOf returns a claim as the API server sends it, with a message of so many characters.
func claimOf(cluster types.NamespacedName, id, uid string, length int) *v1alpha1.MachineClaim {
	return &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cluster.Namespace, Name: v1alpha1.ObjectName(cluster.Name, id), UID: types.UID(uid), ResourceVersion: strconv.Itoa(1000 + length),
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: cluster.Name, ClaimID: id, NodeGroup: "workers"},
		Status: v1alpha1.MachineClaimStatus{Message: strings.Repeat("x", length)},
	}
}

// environment is a budget on an informer whose events the tests make.
type environment struct {
	*storage.Budget

	recorder  *events.FakeRecorder
	transform toolscache.TransformFunc
	informer  *controllertest.FakeInformer
	made      int
}

// informers are a cache whose objects are those of a client.
type informers struct {
	*informertest.FakeInformers

	client.Reader
}

func (i informers) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	return i.Reader.Get(ctx, key, object, options...)
}

func (i informers) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	return i.Reader.List(ctx, list, options...)
}

var _ cache.Cache = informers{}

func newEnvironment(t *testing.T, limits storage.Limits) *environment {
	t.Helper()
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	of := informers{
		&informertest.FakeInformers{Scheme: scheme},
		fake.NewClientBuilder().WithScheme(scheme).WithRuntimeObjects([]runtime.Object{
			&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: production.Namespace, Name: production.Name}},
		}...).Build(),
	}
	w := &environment{Budget: storage.New(limits), recorder: events.NewFakeRecorder(10)}
	w.transform = w.Measure(hub.Slim)
	require.NoError(t, w.Follow(t.Context(), of, w.recorder))
	w.informer, err = of.FakeInformerFor(t.Context(), &v1alpha1.MachineClaim{})
	require.NoError(t, err)
	return w
}

// read passes a claim through the transform, as the cache does with everything it reads.
func (w *environment) read(t *testing.T, claim *v1alpha1.MachineClaim) *v1alpha1.MachineClaim {
	t.Helper()
	object, err := w.transform(claim.DeepCopy())
	require.NoError(t, err)
	slim, ok := object.(*v1alpha1.MachineClaim)
	require.True(t, ok)
	return slim
}

func TestClaimsAreMeasuredAsTheyAreReadAndForgottenAsTheyGo(t *testing.T) {
	w := newEnvironment(t, storage.Limits{})
	first, second := claimOf(production, "a", "1", 0), claimOf(production, "b", "2", 500)
	second.Spec.Candidates = []string{strings.Repeat("c", 200)} // which the cache does not keep
	other := claimOf(staging, "a", "3", 0)
	for _, c := range []*v1alpha1.MachineClaim{first, second, other} {
		w.informer.Add(w.read(t, c))
	}
	require.Equal(t, storage.Size(first)+storage.Size(second), w.Used(production))
	require.Equal(t, storage.Size(other), w.Used(staging))
	require.Greater(t, storage.Size(second), storage.Size(first)+700)

	grown := claimOf(production, "a", "1", 1000)
	w.informer.Update(w.read(t, first), w.read(t, grown))
	w.informer.Update(grown, grown) // a resync is not read again
	require.Equal(t, storage.Size(grown)+storage.Size(second), w.Used(production))

	// A claim of the same name may be read before the deletion of the last one is processed.
	deleted, again := w.read(t, grown), w.read(t, claimOf(production, "a", "4", 10))
	w.informer.Delete(deleted)
	w.informer.Add(again)
	require.Equal(t, storage.Size(claimOf(production, "a", "4", 10))+storage.Size(second), w.Used(production))

	// An informer transforms the objects of a streamed list twice.
	w.informer.Update(again, w.read(t, w.read(t, claimOf(production, "a", "4", 20))))
	require.Equal(t, storage.Size(claimOf(production, "a", "4", 20))+storage.Size(second), w.Used(production))

	// A list after a missed deletion shows another claim in the place of the last one.
	replaced := w.read(t, claimOf(production, "a", "5", 30))
	w.informer.Update(again, replaced)
	require.Equal(t, storage.Size(claimOf(production, "a", "5", 30))+storage.Size(second), w.Used(production))

	w.informer.Delete(replaced)
	w.informer.Delete(w.read(t, second))
	require.Zero(t, w.Used(production))
	require.Equal(t, storage.Size(other), w.Used(staging))
	require.NoError(t, testutil.CollectAndCompare(w.Collector(), strings.NewReader(fmt.Sprintf(`
		# HELP capi_agent_cluster_claim_bytes Bytes that the claims of a Cluster take up in the hub's etcd, including ended ones. `+
		`Approximate: the API server's own records are counted at a flat rate.
		# TYPE capi_agent_cluster_claim_bytes gauge
		capi_agent_cluster_claim_bytes{cluster="staging",namespace="team-a"} %d
	`, storage.Size(other))), "capi_agent_cluster_claim_bytes", "capi_agent_claim_bytes_limit"))
}

func TestOnlyFurtherClaimsOfAClusterThatHasUsedUpItsLimitAreRefused(t *testing.T) {
	claim := claimOf(production, "a", "1", 0)
	w := newEnvironment(t, storage.Limits{Bytes: storage.Size(claim)})
	find := func(_ context.Context, key claims.Key) (*v1alpha1.MachineClaim, error) {
		switch key.ID {
		case "a":
			return claim, nil
		case "unreadable":
			return nil, errors.New("the API server does not answer")
		}
		return nil, claims.ErrNotFound
	}
	room := func(cluster types.NamespacedName, id string) error {
		return w.Room(t.Context(), claims.Key{Namespace: cluster.Namespace, Cluster: cluster.Name, ID: id}, find)
	}
	require.NoError(t, room(production, "b"))
	w.informer.Add(w.read(t, claim))
	for range 2 {
		full, ok := errors.AsType[*claims.TooManyError](room(production, "b"))
		require.True(t, ok)
		require.Positive(t, full.RetryAfter)
		require.Contains(t, full.Message, "--max-claim-bytes-per-cluster")
		require.Contains(t, <-w.recorder.Events, "LimitReached")
	}
	require.NoError(t, room(production, "a"), "it exists")
	require.NoError(t, room(production, "unreadable"), "the engine reports it")
	require.NoError(t, room(staging, "b"))
	for name, want := range map[string]float64{"capi_agent_claim_bytes_refused_total": 2, "capi_agent_claim_bytes_limit": float64(storage.Size(claim))} {
		require.InDelta(t, want, value(t, w.Collector(), name), 0, name)
	}

	w.informer.Delete(w.read(t, claim))
	require.NoError(t, room(production, "b"))
}

func TestWithoutALimitNothingIsRefused(t *testing.T) {
	w := newEnvironment(t, storage.Limits{})
	w.informer.Add(w.read(t, claimOf(production, "a", "1", 1000)))
	require.NoError(t, w.Room(t.Context(), claims.Key{Namespace: production.Namespace, Cluster: production.Name, ID: "b"}, nil))
	require.False(t, w.Crowded(production))
}

// attackers are the Clusters of one team, and victim is that of another one.
var (
	attackers = lo.Times(16, func(i int) types.NamespacedName {
		return types.NamespacedName{Namespace: "team-b", Name: fmt.Sprintf("attacker-%d", i)}
	})
	victim = types.NamespacedName{Namespace: "team-a", Name: "victim"}
)

// fill makes claims of a Cluster, until it is refused or has as many as given. It returns how many
// it made, and the refusal.
func (w *environment) fill(
	t *testing.T, cluster types.NamespacedName, most int, claim func(id string) *v1alpha1.MachineClaim,
) (made int, refused error) {
	t.Helper()
	unknown := func(context.Context, claims.Key) (*v1alpha1.MachineClaim, error) { return nil, claims.ErrNotFound }
	for made < most {
		id := strconv.Itoa(w.made)
		if refused = w.Room(t.Context(), claims.Key{Namespace: cluster.Namespace, Cluster: cluster.Name, ID: id}, unknown); refused != nil {
			break
		}
		w.informer.Add(w.read(t, claim(id)))
		w.made++
		made++
	}
	return made, refused
}

// fillAll makes claims of all attackers in turns, until each is refused or there are as many as
// given, and returns how many it made.
func (w *environment) fillAll(
	t *testing.T, most int, claim func(cluster types.NamespacedName, id string) *v1alpha1.MachineClaim,
) (all int, refused error) {
	t.Helper()
	for before := -1; all < most && all != before; {
		before = all
		for _, cluster := range attackers {
			made, err := w.fill(t, cluster, 10, func(id string) *v1alpha1.MachineClaim { return claim(cluster, id) })
			all += made
			if err != nil {
				refused = err
			}
		}
	}
	return all, refused
}

func requireTooMany(t *testing.T, err error, bound claims.Bound, flag string) {
	t.Helper()
	full, ok := errors.AsType[*claims.TooManyError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, bound, full.Bound)
	require.Positive(t, full.RetryAfter)
	require.Contains(t, full.Message, flag)
	require.NotRegexp(t, "[0-9]", full.Message, "what others have is not the caller's business")
}

func tombstoneOf(cluster types.NamespacedName, id string) *v1alpha1.MachineClaim {
	c := claimOf(cluster, id, id, 1)
	c.Status.Phase = v1alpha1.PhaseEnded
	return c
}

func TestTheEndedClaimsOfManyClustersStayBelowTheirSum(t *testing.T) {
	const sum = 10000
	w := newEnvironment(t, storage.Limits{AllEnded: sum})
	w.informer.Add(w.read(t, claimOf(victim, "a", "a", 1)))
	all, refused := w.fillAll(t, sum, tombstoneOf)
	requireTooMany(t, refused, claims.BoundAllEnded, "--max-all-ended-claims")
	require.Less(t, all, sum)
	require.Greater(t, all, sum*9/10)
	for _, cluster := range attackers {
		require.True(t, w.Crowded(cluster), cluster)
	}
	require.NoError(t, w.Room(t.Context(), claims.Key{Namespace: "team-b", Cluster: "attacker-0", ID: "a"},
		func(context.Context, claims.Key) (*v1alpha1.MachineClaim, error) {
			return &v1alpha1.MachineClaim{}, nil
		}), "it exists")

	require.False(t, w.Crowded(victim))
	made, err := w.fill(t, victim, 400, func(id string) *v1alpha1.MachineClaim { return tombstoneOf(victim, id) })
	require.NoError(t, err)
	require.Equal(t, 400, made)
	require.False(t, w.Crowded(victim))
	made, err = w.fill(t, victim, 1000, func(id string) *v1alpha1.MachineClaim { return claimOf(victim, id, id, 1) })
	require.NoError(t, err)
	require.Equal(t, 1000, made, "claims that have not ended do not count")
	made, _ = w.fill(t, victim, 1000, func(id string) *v1alpha1.MachineClaim { return tombstoneOf(victim, id) })
	require.Equal(t, 100, made, "what every Cluster may have")
	require.True(t, w.Crowded(victim))
	require.InDelta(t, all+500, value(t, w.Collector(), "capi_agent_all_ended_claims"), 0)
	require.InDelta(t, sum, value(t, w.Collector(), "capi_agent_all_ended_claims_limit"), 0)
}

func TestAClusterAloneMayHaveHalfOfAllEndedClaims(t *testing.T) {
	w := newEnvironment(t, storage.Limits{AllEnded: 2000})
	made, refused := w.fill(t, victim, 2000, func(id string) *v1alpha1.MachineClaim { return tombstoneOf(victim, id) })
	requireTooMany(t, refused, claims.BoundAllEnded, "--max-all-ended-claims")
	require.Equal(t, 1000, made)

	// A claim that is released ends, and the tombstone of another one goes.
	live := claimOf(production, "live", "live", 1)
	w.informer.Add(w.read(t, live))
	ended := claimOf(production, "live", "live", 2)
	ended.Status.Phase = v1alpha1.PhaseEnded
	w.informer.Update(w.read(t, live), w.read(t, ended))
	require.InDelta(t, 1001, value(t, w.Collector(), "capi_agent_all_ended_claims"), 0)
	w.informer.Delete(w.read(t, ended))
	require.InDelta(t, 1000, value(t, w.Collector(), "capi_agent_all_ended_claims"), 0)
}

func TestTheBytesOfManyClustersStayBelowTheirSum(t *testing.T) {
	const sum = 100 << 20
	w := newEnvironment(t, storage.Limits{AllBytes: sum})
	large := func(cluster types.NamespacedName, id string) *v1alpha1.MachineClaim {
		return claimOf(cluster, id, id, 100<<10)
	}
	_, refused := w.fillAll(t, sum/(100<<10), large)
	requireTooMany(t, refused, claims.BoundAllBytes, "--max-all-claim-bytes")
	all := value(t, w.Collector(), "capi_agent_all_claim_bytes")
	require.Less(t, all, float64(sum))
	require.Greater(t, all, 0.9*sum)
	require.InDelta(t, sum, value(t, w.Collector(), "capi_agent_all_claim_bytes_limit"), 0)

	made, err := w.fill(t, victim, 30, func(id string) *v1alpha1.MachineClaim { return large(victim, id) })
	require.NoError(t, err)
	require.Equal(t, 30, made)
}

func value(t *testing.T, collector prometheus.Collector, name string) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector)
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		if family.GetName() == name {
			require.Len(t, family.GetMetric(), 1)
			return family.GetMetric()[0].GetGauge().GetValue() + family.GetMetric()[0].GetCounter().GetValue()
		}
	}
	require.Fail(t, "there is no metric "+name)
	return 0
}
