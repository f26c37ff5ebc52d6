package autoscaler_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/autoscaler"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroupview"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const group = "fleet/workers"

var (
	spoke = types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	start = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
)

// engine keeps claims. It shows nothing by itself, as the views lag behind in reality too.
type engine struct {
	mu       sync.Mutex
	made     map[string]claims.Request
	released map[string]claims.ReleaseOptions
	refuse   map[int]error // of the nth call to Create
	calls    int
	panics   map[string]bool // calls of Create, as "create 1", and of Release, as "release <ID>"
	whole    error
}

func (e *engine) Create(_ context.Context, r claims.Request) (*v1alpha1.MachineClaim, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls++
	if err := e.refuse[e.calls]; err != nil {
		return nil, err
	}
	e.made[r.ID] = r
	if e.panics[fmt.Sprintf("create %d", e.calls)] {
		panic("a bug")
	}
	return &v1alpha1.MachineClaim{}, nil
}

func (e *engine) Release(_ context.Context, key claims.Key, o claims.ReleaseOptions) (*v1alpha1.MachineClaim, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.panics["release "+key.ID] {
		panic("a bug")
	}
	e.released[key.ID] = o
	return &v1alpha1.MachineClaim{}, nil
}

func (e *engine) UnpausedCluster(context.Context, types.NamespacedName) (*clusterv1.Cluster, error) {
	return nil, e.whole
}

type fixture struct {
	*testing.T
	*autoscaler.Scaler

	engine *engine
	clock  *clocktesting.FakePassiveClock
	groups *watchcache.Cache[nodegroup.NodeGroup]
	claims *watchcache.Cache[*agentv1alpha1.Claim]
}

// newFixture has a node group with two machines of the user, two claims of Karpenter, and a max
// size of 24.
func newFixture(t *testing.T, changes ...func(*nodegroup.NodeGroup)) *fixture {
	t.Helper()
	f := &fixture{
		T: t, clock: clocktesting.NewFakePassiveClock(start),
		engine: &engine{made: map[string]claims.Request{}, released: map[string]claims.ReleaseOptions{}, refuse: map[int]error{}},
		groups: watchcache.New(watchcache.Options[nodegroup.NodeGroup]{Equal: nodegroupview.EqualHeld, Buffer: 1, Heartbeat: time.Minute}),
		claims: watchcache.New(watchcache.Options[*agentv1alpha1.Claim]{
			Equal: func(a, b *agentv1alpha1.Claim) bool { return proto.Equal(a, b) }, Buffer: 1, Heartbeat: time.Minute,
		}),
	}
	f.group("workers", changes...)
	for i := range 2 {
		f.show(fmt.Sprintf("karpenter-%d", i), agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, func(c *agentv1alpha1.Claim) { c.Holder = "karpenter" })
	}
	f.groups.SetReady()
	f.claims.SetReady()
	f.Scaler = autoscaler.New(autoscaler.Config{Engine: f.engine, Groups: f.groups, Claims: f.claims, Clock: f.clock})
	return f
}

func (f *fixture) group(name string, changes ...func(*nodegroup.NodeGroup)) {
	g := nodegroup.NodeGroup{
		Key: types.NamespacedName{Namespace: "fleet", Name: name}, Cluster: spoke, Floor: 2,
		Limits: eligibility.Group{Holder: autoscaler.Holder, Max: new(int32(24)), Replicas: 4},
		Machine: capacity.Description{
			InstanceType: "large", Architecture: "amd64", OperatingSystem: "linux", Zone: "a",
			Resources: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("32Gi"), corev1.ResourcePods: resource.MustParse("110"),
			},
			Overhead: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("2Gi")},
			Labels:   map[string]string{"team": "blue", autoscaler.GPULabel: "h100"},
			Taints:   []corev1.Taint{{Key: "dedicated", Value: "blue", Effect: corev1.TaintEffectNoSchedule}},
		},
		Price: pricing.Price{PerHour: 2},
	}
	for _, change := range changes {
		change(&g)
	}
	f.groups.Set(spoke, g.ID(), g)
}

// show makes the views show a claim of the cluster-autoscaler.
func (f *fixture) show(id string, phase agentv1alpha1.ClaimPhase, changes ...func(*agentv1alpha1.Claim)) {
	c := &agentv1alpha1.Claim{
		ClaimId: id, Holder: autoscaler.Holder, NodeGroupId: group, Phase: phase, CreatedAt: timestamppb.New(start),
	}
	for _, change := range changes {
		change(c)
	}
	f.claims.Set(spoke, id, c)
}

// machine gives a claim a machine.
func machine(providerID, node string) func(*agentv1alpha1.Claim) {
	return func(c *agentv1alpha1.Claim) {
		c.Machine = &agentv1alpha1.Machine{Name: "m-" + c.GetClaimId(), ProviderId: providerID, NodeName: node}
	}
}

func failed(at time.Time, class agentv1alpha1.FailureClass, message string) func(*agentv1alpha1.Claim) {
	return func(c *agentv1alpha1.Claim) {
		c.FailedAt, c.FailureClass, c.Message = timestamppb.New(at), class, message
	}
}

const (
	unclassified = agentv1alpha1.FailureClass_FAILURE_CLASS_UNSPECIFIED
	noCapacity   = agentv1alpha1.FailureClass_FAILURE_CLASS_CAPACITY
	noQuota      = agentv1alpha1.FailureClass_FAILURE_CLASS_QUOTA
	timedOut     = agentv1alpha1.FailureClass_FAILURE_CLASS_TIMED_OUT
)

const (
	pending   = agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING
	bound     = agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	releasing = agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
	ended     = agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
)

func (f *fixture) size() autoscaler.Size {
	f.Helper()
	sizes, err := f.Groups(spoke)
	require.NoError(f, err)
	require.Len(f, sizes, 1)
	return sizes[0]
}

func (f *fixture) target() int {
	f.Helper()
	target, err := f.TargetSize(spoke, group)
	require.NoError(f, err)
	return int(target)
}

func (f *fixture) increase(delta int32) error {
	return f.Increase(f.Context(), spoke, group, delta, autoscaler.Origin{RequestID: "r"})
}

func (f *fixture) instances() map[string]autoscaler.Instance {
	f.Helper()
	list, err := f.Instances(spoke, group)
	require.NoError(f, err)
	of := map[string]autoscaler.Instance{}
	for _, instance := range list {
		require.NotContains(f, of, instance.ID)
		of[instance.ID] = instance
	}
	return of
}

func TestTheSizeIsTheAutoscalersClaimsAlone(t *testing.T) {
	f := newFixture(t)
	require.Zero(t, f.target())
	require.Equal(t, int32(20), f.size().Max, "24, less two of the user and two of Karpenter")
	f.show("a", pending)
	f.show("b", bound, machine("test://b", "b"))
	f.show("c", releasing, machine("test://c", "c"))
	f.show("d", ended)
	f.show("e", bound, func(c *agentv1alpha1.Claim) { c.Holder = "cluster-autoscaler-b" })
	require.Equal(t, 2, f.target())
	require.Equal(t, int32(18), f.size().Max, "a machine that is being deleted still has its replica")
	require.Contains(t, f.size().Debug, "1 leaving")
	f.show("f", releasing)
	f.show("g", releasing, machine("test://g", "g"), func(c *agentv1alpha1.Claim) { c.Returned = true })
	require.Equal(t, int32(18), f.size().Max)
	f.group("workers", func(g *nodegroup.NodeGroup) { g.Limits.Max = nil })
	require.Greater(t, f.size().Max, int32(1_000_000), "a group without a max size")
	f.group("workers", func(g *nodegroup.NodeGroup) { g.Limits.Max = new(int32(1)) })
	require.Zero(t, f.size().Max, "never negative")
}

func TestAGroupThatTakesNoClaimsHasNoRoom(t *testing.T) {
	for _, reason := range []eligibility.Reason{eligibility.Paused, eligibility.CoolingDown} {
		f := newFixture(t, func(g *nodegroup.NodeGroup) {
			g.Limits = g.Limits.With(&eligibility.Refusal{Reason: reason, Message: "for a reason"})
		})
		f.show("a", bound, machine("test://a", "a"))
		require.Equal(t, int32(1), f.size().Max)
		require.Contains(t, f.size().Debug, "for a reason")
		err := f.increase(1)
		require.ErrorContains(t, err, "for a reason")
		var noRoom *claims.NoRoomError
		require.Equal(t, reason.NoRoom(), errors.As(err, &noRoom))
		require.Empty(t, f.engine.made)
	}
}

func TestIncreaseMakesClaimsThatCountAtOnce(t *testing.T) {
	f := newFixture(t)
	require.NoError(t, f.increase(20))
	require.Len(t, f.engine.made, 20)
	for _, r := range f.engine.made {
		require.Equal(t, "r", r.RequestID)
		require.Equal(t, []string{"workers"}, r.Candidates)
		require.Equal(t, "cluster-autoscaler", r.Holder)
		require.False(t, r.Holders("karpenter"))
	}
	require.Equal(t, 20, f.target(), "before the views show the claims")
	require.Len(t, f.instances(), 20)
	for i, id := range slices.Sorted(maps.Keys(f.engine.made)) {
		f.show(id, pending)
		require.Equal(t, 20, f.target(), "after %d", i)
	}
	require.Len(t, f.instances(), 20)
	f.show(slices.Sorted(maps.Keys(f.engine.made))[0], ended)
	require.Equal(t, 19, f.target())

	var noRoom *autoscaler.NoRoomError
	require.ErrorAs(t, f.increase(2), &noRoom)
	require.Len(t, f.engine.made, 20)
	require.NoError(t, f.increase(1))
}

func TestARepeatedIncreaseAddsAgain(t *testing.T) {
	f := newFixture(t)
	require.NoError(t, f.increase(2))
	require.NoError(t, f.increase(2))
	require.Equal(t, 4, f.target())
}

func TestClaimsThatTheViewsNeverShowAreForgotten(t *testing.T) {
	f := newFixture(t)
	require.NoError(t, f.increase(2))
	f.clock.SetTime(start.Add(2 * time.Minute))
	require.Zero(t, f.target())
}

func TestAnIncreaseThatFailsLeavesNoClaims(t *testing.T) {
	f := newFixture(t)
	f.engine.refuse[4] = errors.New("the API server did not answer")
	require.ErrorContains(t, f.increase(4), "did not answer")
	require.GreaterOrEqual(t, len(f.engine.released), len(f.engine.made), "what was made, and what may have been")
	for id := range f.engine.made {
		require.Contains(t, f.engine.released, id)
	}
	require.Zero(t, f.target())
}

// The cluster-autoscaler asks for as many again after an error: each time, the machines made so far
// would be thrown away.
func TestAnIncreaseMakesWhatIsAllowed(t *testing.T) {
	for name, refusal := range map[string]error{
		"a cap": &claims.TooManyError{Bound: claims.BoundCreations}, "a quota": &claims.NoRoomError{},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			for call := 4; call <= 20; call++ {
				f.engine.refuse[call] = refusal
			}
			require.NoError(t, f.increase(9))
			require.Equal(t, 3, f.target())
			require.Len(t, f.engine.made, 3)
			require.Empty(t, f.engine.released)
			require.ErrorIs(t, f.increase(6), refusal, "nothing can be made")
			require.Equal(t, 3, f.target())
		})
	}
}

func TestAnIncreaseThatLostARaceIsRepeated(t *testing.T) {
	f := newFixture(t)
	f.engine.refuse[2] = claims.ErrConflict
	require.NoError(t, f.increase(3))
	require.Equal(t, 3, f.target())
	require.Len(t, f.engine.made, 3)
	require.Equal(t, 4, f.engine.calls)
}

// Claims are made and released in goroutines of their own.
func TestAPanicCostsOneCallAlone(t *testing.T) {
	f := newFixture(t)
	f.engine.panics = map[string]bool{"create 2": true}
	require.ErrorContains(t, f.increase(3), "a bug")
	require.Zero(t, f.target())
	require.ElementsMatch(t, slices.Collect(maps.Keys(f.engine.made)), slices.Collect(maps.Keys(f.engine.released)),
		"also the one whose making panicked: it may exist")

	require.NoError(t, f.increase(3))
	var ids []string
	for id := range f.engine.made {
		if _, released := f.engine.released[id]; !released {
			f.show(id, bound, machine("test://"+id, "node-"+id))
			ids = append(ids, id)
		}
	}
	require.Len(t, ids, 3)
	f.engine.panics = map[string]bool{"release " + ids[0]: true}
	nodes := []autoscaler.Node{{ProviderID: "test://" + ids[0]}, {ProviderID: "test://" + ids[1]}}
	require.ErrorContains(t, f.Delete(t.Context(), spoke, group, nodes), "a bug")
	require.NotContains(t, f.engine.released, ids[0])
	require.Contains(t, f.engine.released, ids[1])
	require.Equal(t, 2, f.target())
	f.engine.panics = nil
	require.NoError(t, f.Delete(t.Context(), spoke, group, nodes[:1]))
	require.Contains(t, f.engine.released, ids[0])
}

func TestRequestsThatMakeNoSense(t *testing.T) {
	f := newFixture(t)
	var invalid *autoscaler.InvalidError
	require.ErrorAs(t, f.increase(0), &invalid)
	require.ErrorAs(t, f.increase(-1), &invalid)
	require.ErrorAs(t, f.Decrease(t.Context(), spoke, group, 0), &invalid)
	require.ErrorAs(t, f.Decrease(t.Context(), spoke, group, 1), &invalid)

	var unknown *autoscaler.UnknownGroupError
	for _, id := range []string{"", "fleet/other", "workers"} {
		_, err := f.TargetSize(spoke, id)
		require.ErrorAs(t, err, &unknown)
		require.ErrorAs(t, f.Increase(t.Context(), spoke, id, 1, autoscaler.Origin{}), &unknown)
		require.ErrorAs(t, f.Delete(t.Context(), spoke, id, nil), &unknown)
		require.ErrorAs(t, f.Decrease(t.Context(), spoke, id, -1), &unknown)
		_, err = f.Template(spoke, id)
		require.ErrorAs(t, err, &unknown)
	}
	require.Empty(t, f.engine.made)
	require.Empty(t, f.engine.released)
}

func TestInstances(t *testing.T) {
	f := newFixture(t)
	id := func(claim string) string { return autoscaler.InstanceID(spoke, claim) }
	f.show("waiting", pending)
	f.show("provisioning", bound, machine("", ""))
	f.show("joining", bound, machine("test://joining", ""))
	f.show("running", bound, machine("test://running", "node"))
	f.show("leaving", releasing, machine("test://leaving", "node"))
	f.show("cancelled", releasing)
	f.show("gone", ended, machine("test://gone", "node"))
	f.show("returned", releasing, machine("test://returned", "node"), func(c *agentv1alpha1.Claim) { c.Returned = true })
	f.show("full", releasing, machine("", ""), failed(start.Add(-time.Minute), noCapacity, "there is no capacity: none in zone a"))
	f.show("limited", ended, machine("", ""), failed(start.Add(-9*time.Minute), noQuota, "no room: exceeded quota"))
	f.show("broken", ended, machine("test://broken", ""), failed(start, timedOut, "no Node joined for Machine m in 30m"))
	f.show("older", ended, machine("", ""), failed(start, unclassified, "there is no capacity: says an agent without classes"))
	f.show("old", ended, machine("", ""), failed(start.Add(-10*time.Minute), noCapacity, "there is no capacity: none"))
	f.show("worn", releasing, machine("test://worn", "node"), failed(start, timedOut, "the node is unhealthy"))
	failure := func(out bool, code, message string) *autoscaler.Failure {
		return &autoscaler.Failure{OutOfResources: out, Code: code, Message: message}
	}
	want := map[string]autoscaler.Instance{}
	for _, instance := range []autoscaler.Instance{
		{ID: id("waiting"), State: autoscaler.Creating},
		{ID: id("provisioning"), State: autoscaler.Creating},
		{ID: "test://joining", State: autoscaler.Creating},
		{ID: "test://running", State: autoscaler.Running},
		{ID: "test://leaving", State: autoscaler.Deleting},
		{ID: "test://worn", State: autoscaler.Deleting},
		{ID: id("full"), State: autoscaler.Creating, Failure: failure(true, "OutOfCapacity", "there is no capacity: none in zone a")},
		{ID: id("limited"), State: autoscaler.Creating, Failure: failure(true, "QuotaExceeded", "no room: exceeded quota")},
		{ID: id("broken"), State: autoscaler.Creating, Failure: failure(false, "ProvisioningFailed", "no Node joined for Machine m in 30m")},
		{
			ID: id("older"), State: autoscaler.Creating,
			Failure: failure(false, "ProvisioningFailed", "there is no capacity: says an agent without classes"),
		},
	} {
		want[instance.ID] = instance
	}
	require.Equal(t, want, f.instances())
	require.Equal(t, 8, f.target(), "those that leave do not count; what failed does, or the cluster-autoscaler would not back off")

	require.NoError(t, f.Delete(t.Context(), spoke, group, []autoscaler.Node{{ProviderID: id("full"), Name: id("full")}}))
	require.Empty(t, f.engine.released, "a failed claim is being released already")
	require.NotContains(t, f.instances(), id("full"), "the failure has been acknowledged")
	require.Equal(t, 7, f.target())
	require.Contains(t, f.instances(), id("limited"))
	f.clock.SetTime(start.Add(time.Minute))
	require.NotContains(t, f.instances(), id("limited"), "after ten minutes")
	require.Equal(t, 6, f.target())
	require.NoError(t, f.increase(13), "there is room for 17: what failed takes none")
	require.NoError(t, f.Decrease(t.Context(), spoke, group, -2))
	require.Equal(t, 17, f.target())
	require.Empty(t, f.engine.released, "what failed goes first")
}

func TestNodesBelongToTheGroupsOfTheirClaims(t *testing.T) {
	f := newFixture(t)
	f.show("a", bound, machine("test://a", "a"))
	f.show("b", pending)
	f.show("c", releasing, machine("test://c", "c"))
	f.show("failed", ended, failed(start, timedOut, "it will not come"))
	f.show("gone", ended, machine("test://gone", "gone"))
	f.show("returned", bound, machine("test://returned", "x"), func(c *agentv1alpha1.Claim) { c.Returned = true })
	f.show("k", bound, machine("test://k", "k"), func(c *agentv1alpha1.Claim) { c.Holder = "karpenter" })
	for name, c := range map[string]struct {
		node autoscaler.Node
		want bool
	}{
		"a node":                            {autoscaler.Node{ProviderID: "test://a", Name: "a"}, true},
		"a node that leaves":                {autoscaler.Node{ProviderID: "test://c", Name: "c"}, true},
		"what has no machine yet":           {autoscaler.Node{ProviderID: autoscaler.InstanceID(spoke, "b")}, true},
		"what failed":                       {autoscaler.Node{ProviderID: autoscaler.InstanceID(spoke, "failed")}, true},
		"a node that is gone":               {autoscaler.Node{ProviderID: "test://gone", Name: "gone"}, false},
		"one that was returned to the user": {autoscaler.Node{ProviderID: "test://returned", Name: "x"}, false},
		"one of Karpenter":                  {autoscaler.Node{ProviderID: "test://k", Name: "k"}, false},
		"one of the user":                   {autoscaler.Node{ProviderID: "test://u", Name: "u"}, false},
		"one without a provider ID":         {autoscaler.Node{Name: "a"}, false},
		"another Cluster's claim": {
			autoscaler.Node{ProviderID: autoscaler.InstanceID(types.NamespacedName{Namespace: "fleet", Name: "other"}, "b")}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			size, found, err := f.GroupOf(spoke, c.node)
			require.NoError(t, err)
			require.Equal(t, c.want, found)
			if found {
				require.Equal(t, group, size.ID)
			}
		})
	}
}

func TestDeleteReleasesExactlyTheNodesClaims(t *testing.T) {
	f := newFixture(t)
	for _, name := range []string{"a", "b", "c"} {
		f.show(name, bound, machine("test://"+name, name))
	}
	f.show("gone", ended, machine("test://gone", "gone"))
	f.show("k", bound, machine("test://k", "k"), func(c *agentv1alpha1.Claim) { c.Holder = "karpenter" })
	f.group("others", func(*nodegroup.NodeGroup) {})
	f.show("o", bound, machine("test://o", "o"), func(c *agentv1alpha1.Claim) { c.NodeGroupId = "fleet/others" })
	del := func(names ...string) error {
		var nodes []autoscaler.Node
		for _, name := range names {
			nodes = append(nodes, autoscaler.Node{ProviderID: "test://" + name, Name: name})
		}
		return f.Delete(t.Context(), spoke, group, nodes)
	}
	var foreign *autoscaler.ForeignNodeError
	for _, other := range []string{"k", "o", "of-the-user"} {
		require.ErrorAs(t, del("a", other), &foreign)
		require.Empty(t, f.engine.released, "all or none")
	}
	require.NoError(t, del("a", "c", "a", "gone"))
	require.ElementsMatch(t, []string{"a", "c"}, slices.Collect(maps.Keys(f.engine.released)))
	require.False(t, f.engine.released["a"].Drained, "Cluster API looks for itself")
	require.False(t, f.engine.released["a"].Holders("karpenter"))
	require.Equal(t, 1, f.target(), "before the views show it")
	require.Equal(t, autoscaler.Deleting, f.instances()["test://a"].State)

	clear(f.engine.released)
	require.NoError(t, del("a", "c"), "a repeated call")
	require.Empty(t, f.engine.released)
	f.show("a", releasing, machine("test://a", "a"))
	f.show("c", ended, machine("test://c", "c"))
	require.Equal(t, 1, f.target())
	require.NoError(t, del("a", "c"))
	require.Empty(t, f.engine.released)
}

func TestDecreaseReleasesWhatHasNoNode(t *testing.T) {
	f := newFixture(t)
	at := func(minute int) func(*agentv1alpha1.Claim) {
		return func(c *agentv1alpha1.Claim) {
			c.CreatedAt = timestamppb.New(start.Add(time.Duration(minute) * time.Minute))
		}
	}
	f.show("running", bound, machine("test://a", "a"), at(5))
	f.show("old", pending, at(1))
	f.show("new", pending, at(2))
	f.show("joining", bound, machine("test://j", ""), at(3))
	var existing *autoscaler.ExistingNodesError
	require.ErrorAs(t, f.Decrease(t.Context(), spoke, group, -4), &existing)
	require.Empty(t, f.engine.released)
	require.NoError(t, f.Decrease(t.Context(), spoke, group, -1))
	require.Equal(t, []string{"new"}, slices.Collect(maps.Keys(f.engine.released)))
	require.Equal(t, 3, f.target())
	f.show("booting", bound, machine("", ""), at(1)) // older than the one that is joining
	require.NoError(t, f.Decrease(t.Context(), spoke, group, -2))
	require.ElementsMatch(t, []string{"new", "old", "booting"}, slices.Collect(maps.Keys(f.engine.released)))
	require.NoError(t, f.Decrease(t.Context(), spoke, group, -1))
	require.Contains(t, f.engine.released, "joining")
	require.Equal(t, 1, f.target())
	require.ErrorAs(t, f.Decrease(t.Context(), spoke, group, -1), &existing)
}

func TestTheTemplateIsANodeAsItWouldJoin(t *testing.T) {
	f := newFixture(t)
	node, err := f.Template(spoke, group)
	require.NoError(t, err)
	require.Equal(t, "blue", node.Labels["team"])
	require.Equal(t, "large", node.Labels[corev1.LabelInstanceTypeStable])
	require.Equal(t, "a", node.Labels[corev1.LabelTopologyZone])
	require.Equal(t, node.Name, node.Labels[corev1.LabelHostname])
	require.Equal(t, []corev1.Taint{{Key: "dedicated", Value: "blue", Effect: corev1.TaintEffectNoSchedule}}, node.Spec.Taints)
	require.Equal(t, "32Gi", node.Status.Capacity.Memory().String())
	require.Equal(t, "30Gi", node.Status.Allocatable.Memory().String())
	require.Equal(t, "8", node.Status.Allocatable.Cpu().String())
	require.Equal(t, corev1.NodeReady, node.Status.Conditions[0].Type)
	kinds, err := f.GPUTypes(spoke)
	require.NoError(t, err)
	require.Equal(t, []string{"h100"}, kinds)
}

func TestPrices(t *testing.T) {
	f := newFixture(t)
	f.show("a", bound, machine("test://a", "a"))
	template, err := f.Template(spoke, group)
	require.NoError(t, err)
	for name, node := range map[string]autoscaler.Node{
		"a node":                  {ProviderID: "test://a", Name: "a"},
		"a template":              {ProviderID: template.Spec.ProviderID, Name: template.Name},
		"a simulated node":        {Name: "template-node-for-" + group + "-8301921"},
		"one of several":          {Name: "template-node-for-" + group + "-8301921-3"},
		"what has no machine yet": {ProviderID: autoscaler.InstanceID(spoke, "a")},
	} {
		price, err := f.NodePrice(spoke, node, 90*time.Minute)
		require.NoError(t, err, name)
		require.InDelta(t, 3, price, 1e-9, name)
	}
	var unknown *autoscaler.UnknownNodeError
	_, err = f.NodePrice(spoke, autoscaler.Node{ProviderID: "test://u", Name: "template-node-for-other-1"}, time.Hour)
	require.ErrorAs(t, err, &unknown)

	f.group("small", func(g *nodegroup.NodeGroup) {
		g.Price.PerHour = 0.1
		g.Machine.Resources = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("4Gi")}
	})
	pod := func(cpu, memory string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory),
			}}}}},
		}
	}
	price, err := f.PodPrice(spoke, pod("500m", "1Gi"), time.Hour)
	require.NoError(t, err)
	require.InDelta(t, 0.05, price, 1e-9, "half of the cheapest machine")
	price, err = f.PodPrice(spoke, pod("4", "8Gi"), time.Hour)
	require.NoError(t, err)
	require.InDelta(t, 1, price, 1e-9, "half of the only one that is large enough")
	var unpriced *autoscaler.UnpricedPodError
	_, err = f.PodPrice(spoke, pod("9", "1Gi"), time.Hour)
	require.ErrorAs(t, err, &unpriced)
}

func TestOptions(t *testing.T) {
	f := newFixture(t)
	defaults := autoscaler.Options{UtilizationThreshold: 0.5, UnneededTime: 10 * time.Minute, IgnoreDaemonSets: true}
	o, replaced, err := f.Options(spoke, group, defaults)
	require.NoError(t, err)
	require.False(t, replaced)
	require.Equal(t, defaults, o)
	f.group("workers", func(g *nodegroup.NodeGroup) { g.Autoscaling.UnneededTime = new(time.Minute) })
	o, replaced, err = f.Options(spoke, group, defaults)
	require.NoError(t, err)
	require.True(t, replaced)
	require.Equal(t, autoscaler.Options{UtilizationThreshold: 0.5, UnneededTime: time.Minute, IgnoreDaemonSets: true}, o)
}

func TestNothingIsAnsweredFromAnIncompleteView(t *testing.T) {
	groups := watchcache.New(watchcache.Options[nodegroup.NodeGroup]{Equal: nodegroupview.EqualHeld, Buffer: 1, Heartbeat: time.Minute})
	f := newFixture(t)
	s := autoscaler.New(autoscaler.Config{Engine: f.engine, Groups: groups, Claims: f.claims})
	_, err := s.Groups(spoke)
	require.ErrorIs(t, err, watchcache.ErrNotReady)
	require.ErrorIs(t, s.Check(t.Context(), spoke), watchcache.ErrNotReady)
	f.engine.whole = claims.ErrClusterPaused
	require.ErrorIs(t, f.Check(t.Context(), spoke), claims.ErrClusterPaused)
	require.Zero(t, f.target())
	f.groups.Close()
	_, err = f.TargetSize(spoke, group)
	require.ErrorIs(t, err, watchcache.ErrClosed)
}

func TestOtherClustersAreInvisible(t *testing.T) {
	f := newFixture(t)
	other := types.NamespacedName{Namespace: "fleet", Name: "other"}
	sizes, err := f.Groups(other)
	require.NoError(t, err)
	require.Empty(t, sizes)
	f.show("a", bound, machine("test://a", "a"))
	_, found, err := f.GroupOf(other, autoscaler.Node{ProviderID: "test://a", Name: "a"})
	require.NoError(t, err)
	require.False(t, found)
}

// held is a clock that stops the first who asks it for the time.
type held struct {
	*clocktesting.FakePassiveClock

	stopped         atomic.Bool
	asked, released chan struct{}
}

func (h *held) Now() time.Time {
	if h.stopped.CompareAndSwap(false, true) {
		close(h.asked)
		<-h.released
	}
	return h.FakePassiveClock.Now()
}

// Whatever is done under a Cluster's lock takes longer, the more claims the Cluster has.
func TestAClusterWaitsForNoOther(t *testing.T) {
	f := newFixture(t)
	stopped := &held{FakePassiveClock: f.clock, asked: make(chan struct{}), released: make(chan struct{})}
	scaler := autoscaler.New(autoscaler.Config{Engine: f.engine, Groups: f.groups, Claims: f.claims, Clock: stopped})
	ended := make(chan error, 1)
	go func() {
		_, err := scaler.Groups(spoke)
		ended <- err
	}()
	<-stopped.asked
	others := make(chan error, 1)
	go func() {
		_, err := scaler.Groups(types.NamespacedName{Namespace: "fleet", Name: "other"})
		others <- err
	}()
	select {
	case err := <-others:
		require.NoError(t, err)
	case <-time.After(30 * time.Second):
		t.Error("a Cluster waits for another")
	}
	close(stopped.released)
	require.NoError(t, <-ended)
}
