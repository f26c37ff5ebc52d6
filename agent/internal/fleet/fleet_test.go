package fleet_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fleet"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const patience = 20 * time.Second

var plane *capitest.ControlPlane

func TestMain(m *testing.M) { capitest.Main(m, &plane) }

// shims are Spokes that the test makes.
type shims struct {
	mu  sync.Mutex
	of  map[types.NamespacedName]v1alpha1.SpokeStatus
	err error
	// broken is the Cluster whose status panics.
	broken types.NamespacedName
}

func (s *shims) Read(context.Context) error { return s.err }

func (s *shims) Status(cluster types.NamespacedName) (v1alpha1.SpokeStatus, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cluster == s.broken {
		panic("a bug")
	}
	status, known := s.of[cluster]
	return status, known
}

type fixture struct {
	*testing.T

	namespace  string
	clusters   *watchcache.Cache[*agentv1alpha1.Cluster]
	nodeGroups *watchcache.Cache[*agentv1alpha1.NodeGroup]
	machines   *watchcache.Cache[*agentv1alpha1.Machine]
	claims     *watchcache.Cache[*agentv1alpha1.Claim]
	shims      *shims
	clock      *clocktesting.FakeClock
	fleet      *fleet.Fleet
	gone       sync.Map // the Clusters that Gone was called for
}

func newCache[M proto.Message]() *watchcache.Cache[M] {
	return watchcache.New(watchcache.Options[M]{Equal: func(a, b M) bool { return proto.Equal(a, b) }, Buffer: 100, Heartbeat: time.Minute})
}

// start runs a fleet for a new namespace. The views that it counts are complete.
func start(t *testing.T, before ...func(f *fixture)) *fixture {
	t.Helper()
	f := &fixture{
		T: t, namespace: plane.Namespace(t), shims: &shims{of: map[types.NamespacedName]v1alpha1.SpokeStatus{}},
		clusters: newCache[*agentv1alpha1.Cluster](), nodeGroups: newCache[*agentv1alpha1.NodeGroup](),
		machines: newCache[*agentv1alpha1.Machine](), claims: newCache[*agentv1alpha1.Claim](), clock: clocktesting.NewFakeClock(time.Now()),
	}
	for _, do := range before {
		do(f)
	}
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	scope := hub.NewScope(nil, []types.NamespacedName{f.name("spoke"), f.name("other")})
	caches, err := scope.CacheOptions()
	require.NoError(t, err)
	mgr, err := manager.New(plane.Config, manager.Options{
		Scheme: scheme, Cache: caches, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0", Logger: logr.Discard(),
		Controller: hub.Controllers(),
	})
	require.NoError(t, err)
	f.fleet = fleet.New(fleet.Config{
		Cache: f.clusters, NodeGroups: f.nodeGroups, Machines: f.machines, Claims: f.claims, Spokes: f.shims, Scope: scope, Clock: f.clock,
		Gone: func(cluster types.NamespacedName) { f.gone.Store(cluster, true) },
	})
	require.NoError(t, f.fleet.SetupWithManager(mgr))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	f.nodeGroups.SetReady()
	f.machines.SetReady()
	f.claims.SetReady()
	select {
	case <-f.clusters.Ready():
	case <-time.After(patience):
		t.Fatal("the view is not complete")
	}
	return f
}

func (f *fixture) name(cluster string) types.NamespacedName {
	return types.NamespacedName{Namespace: f.namespace, Name: cluster}
}

// shown returns a Cluster as the view has it, or nil.
func (f *fixture) shown(cluster string) *agentv1alpha1.Cluster {
	f.Helper()
	shown, _, err := f.clusters.Get(fleet.All, fleet.Key(f.name(cluster)))
	require.NoError(f, err)
	return shown
}

// until waits until the Cluster spoke is shown as wanted, and lets the time pass.
func (f *fixture) until(what string, wanted func(*agentv1alpha1.Cluster) bool) {
	f.Helper()
	require.Eventually(f, func() bool {
		f.clock.Step(fleet.Interval)
		return wanted(f.shown("spoke"))
	}, patience, 5*time.Millisecond, what)
}

func phase(p agentv1alpha1.ClaimPhase) *agentv1alpha1.Claim { return &agentv1alpha1.Claim{Phase: p} }

func TestTheSnapshotHasTheServedClustersWithTheirCountsAndShims(t *testing.T) {
	f := start(t, func(f *fixture) {
		for _, name := range []string{"spoke", "other", "unserved"} {
			plane.Create(f.T, capitest.NewCluster(f.namespace, name))
		}
		f.nodeGroups.Set(f.name("spoke"), "a", &agentv1alpha1.NodeGroup{})
		f.machines.Set(f.name("spoke"), "a", &agentv1alpha1.Machine{})
		f.machines.Set(f.name("spoke"), "b", &agentv1alpha1.Machine{})
		f.claims.Set(f.name("spoke"), "a", phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING))
		f.claims.Set(f.name("spoke"), "b", phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND))
		f.claims.Set(f.name("spoke"), "c", phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING))
		f.claims.Set(f.name("spoke"), "d", phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED))
		f.shims.of[f.name("spoke")] = v1alpha1.SpokeStatus{
			ShimVersion: "karpenter/v1.2.3", SpokeID: "an-id", LastSyncTime: new(metav1.Unix(1700000000, 0)),
			Certificate: &v1alpha1.SpokeCertificate{NotAfter: new(metav1.Unix(1800000000, 0))},
			Conditions:  []metav1.Condition{{Type: v1alpha1.ConnectedCondition, Status: metav1.ConditionTrue}},
		}
		// It was onboarded, and has not called yet.
		f.shims.of[f.name("other")] = v1alpha1.SpokeStatus{}
	})
	all, _, err := f.clusters.List(fleet.All)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Nil(t, f.shown("other").GetShim())
	spoke := f.shown("spoke")
	require.NotEmpty(t, spoke.GetUid())
	require.Equal(t, []int32{1, 2, 3, 1}, []int32{spoke.GetNodeGroups(), spoke.GetMachines(), spoke.GetClaims(), spoke.GetPendingClaims()})
	require.True(t, spoke.GetShim().GetConnected())
	require.Equal(t, "karpenter/v1.2.3", spoke.GetShim().GetVersion())
	require.Equal(t, "an-id", spoke.GetShim().GetSpokeId())
	require.Equal(t, int64(1700000000), spoke.GetShim().GetLastSync().GetSeconds())
	require.Equal(t, int64(1800000000), spoke.GetShim().GetCertificateNotAfter().GetSeconds())
}

func TestChangesAreShown(t *testing.T) {
	f := start(t)
	require.Nil(t, f.shown("spoke"))
	cluster := capitest.NewCluster(f.namespace, "spoke")
	plane.Create(t, cluster)
	f.until("a new Cluster", func(c *agentv1alpha1.Cluster) bool { return c != nil })

	before := cluster.DeepCopy()
	cluster.Spec.Paused = new(true)
	require.NoError(t, plane.Client.Patch(t.Context(), cluster, client.MergeFrom(before)))
	f.until("a pause", (*agentv1alpha1.Cluster).GetPaused)

	f.claims.Set(f.name("spoke"), "a", phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING))
	f.until("a claim", func(c *agentv1alpha1.Cluster) bool { return c.GetPendingClaims() == 1 })
	f.claims.Remove(f.name("spoke"), "a")
	f.until("its end", func(c *agentv1alpha1.Cluster) bool { return c.GetClaims() == 0 })

	f.shims.mu.Lock()
	f.shims.of[f.name("spoke")] = v1alpha1.SpokeStatus{LastSyncTime: new(metav1.Now())}
	f.shims.mu.Unlock()
	f.fleet.Changed(f.name("spoke"))
	f.until("a shim that was silent", func(c *agentv1alpha1.Cluster) bool { return c.GetShim() != nil && !c.GetShim().GetConnected() })

	f.gone.Clear() // it was not there at first
	f.fleet.Changed(f.name("spoke"))
	f.clock.Step(fleet.Interval)
	f.until("what it is", func(c *agentv1alpha1.Cluster) bool { return c != nil })
	_, gone := f.gone.Load(f.name("spoke"))
	require.False(t, gone)
	require.NoError(t, plane.Client.Delete(t.Context(), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "spoke"}}))
	f.until("its end", func(c *agentv1alpha1.Cluster) bool { return c == nil })
	require.Eventually(t, func() bool { _, gone := f.gone.Load(f.name("spoke")); return gone }, patience, 5*time.Millisecond)
}

// What happens within a second is one change, however often a Cluster's machines change.
func TestCountsAreCollected(t *testing.T) {
	f := start(t, func(f *fixture) { plane.Create(f.T, capitest.NewCluster(f.namespace, "spoke")) })
	// No interval has passed yet: a tick that was not served yet would be served after the changes.
	require.NotNil(t, f.shown("spoke"))
	require.Eventually(t, f.clock.HasWaiters, patience, time.Millisecond, "the fleet waits for the interval")
	subscription, err := f.clusters.Subscribe(fleet.All, nil)
	require.NoError(t, err)
	defer subscription.Close()
	for range 2 { // the Cluster, and the marker
		_, err := subscription.Next(t.Context())
		require.NoError(t, err)
	}
	for i := range 100 {
		f.machines.Set(f.name("spoke"), strconv.Itoa(i), &agentv1alpha1.Machine{})
	}
	require.Zero(t, f.shown("spoke").GetMachines(), "before the interval has passed")
	f.clock.Step(fleet.Interval)
	event, err := subscription.Next(t.Context())
	require.NoError(t, err)
	require.Equal(t, int32(100), event.Object.GetMachines())
}

// A hub without the CustomResourceDefinition of Spokes is served as well.
func TestSpokesThatCannotBeReadDelayNothing(t *testing.T) {
	f := start(t, func(f *fixture) {
		f.shims.err = errors.New("the hub says no")
		plane.Create(f.T, capitest.NewCluster(f.namespace, "spoke"))
	})
	require.NotNil(t, f.shown("spoke"))
}

// What shows the Clusters is no controller.
func TestAPanicCostsOneClusterAlone(t *testing.T) {
	f := start(t, func(f *fixture) {
		for _, name := range []string{"spoke", "other"} {
			plane.Create(f.T, capitest.NewCluster(f.namespace, name))
		}
		f.shims.broken = f.name("other")
	})
	require.NotNil(t, f.shown("spoke"), "the view is complete")
	require.Nil(t, f.shown("other"))
	f.machines.Set(f.name("other"), "m", &agentv1alpha1.Machine{Name: "m"})
	f.machines.Set(f.name("spoke"), "m", &agentv1alpha1.Machine{Name: "m"})
	f.until("it is followed", func(c *agentv1alpha1.Cluster) bool { return c.GetMachines() == 1 })
	f.shims.mu.Lock()
	f.shims.broken = types.NamespacedName{}
	f.shims.mu.Unlock()
	f.machines.Set(f.name("other"), "n", &agentv1alpha1.Machine{Name: "n"})
	f.until("the next change is shown", func(*agentv1alpha1.Cluster) bool { return f.shown("other").GetMachines() == 2 })
}
