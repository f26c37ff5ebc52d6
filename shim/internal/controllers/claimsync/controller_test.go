package claimsync_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/claimsync"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const interval = time.Minute

func newController(w *shimtest.Env, reconnected <-chan event.GenericEvent, interval time.Duration) *claimsync.Controller {
	return claimsync.New(claimsync.Config{
		Live: w.Kube, CloudProvider: w.CloudProvider, Agent: w.Client.Claims, Cluster: w.Cluster, Recorder: w.Recorder,
		Reconnected: reconnected, Interval: interval, Timeout: shimtest.Timeout, Clock: clock.RealClock{},
	})
}

func setUp(t *testing.T, options ...shimtest.Option) (*shimtest.Env, *claimsync.Controller) {
	t.Helper()
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, options...)
	return w, newController(w, nil, interval)
}

func phase(w *shimtest.Env, nodeClaim *karpv1.NodeClaim) agentv1alpha1.ClaimPhase {
	return w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetPhase()
}

func sync(t *testing.T, w *shimtest.Env, c *claimsync.Controller) {
	t.Helper()
	result, err := c.Reconcile(w.Context())
	require.NoError(t, err)
	assert.Equal(t, interval, result.RequeueAfter)
}

func TestClaimsThatNoNodeClaimOwnsAreReleased(t *testing.T) {
	w, c := setUp(t)
	kept := w.Launched("kept")
	deleting := w.Launched("deleting", func(nc *karpv1.NodeClaim) { nc.Finalizers = []string{karpv1.TerminationFinalizer} })
	require.NoError(t, w.Kube.Delete(w.Context(), deleting))
	orphan := w.Launched("orphan")
	require.NoError(t, w.Kube.Delete(w.Context(), orphan))
	sync(t, w, c)
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, orphan))
	assert.NotEqual(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, kept))
	assert.NotEqual(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, deleting), "core still drains it")
}

// The catalogue also lists NodeClaims, in a goroutine of its own, so state shared by the
// interceptors must be atomic.

func TestAClaimMadeAfterTheTokenIsSafe(t *testing.T) {
	var (
		begun atomic.Pointer[shimtest.Env]
		raced atomic.Bool
		late  atomic.Pointer[karpv1.NodeClaim]
	)
	w, c := setUp(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			err := under.List(ctx, list, options...)
			// Core creates a NodeClaim and its claim right after the set was read.
			w := begun.Load()
			if _, ok := list.(*karpv1.NodeClaimList); !ok || w == nil || w.Agent.Calls("ListClaims") == 0 || !raced.CompareAndSwap(false, true) {
				return err
			}
			nodeClaim := w.NodeClaim("late")
			_, createErr := w.CloudProvider.Create(w.Context(), nodeClaim)
			late.Store(nodeClaim)
			return errors.Join(err, createErr)
		},
	}))
	begun.Store(w)
	sync(t, w, c)
	require.Eventually(t, func() bool { return late.Load() != nil }, shimtest.Timeout, time.Millisecond, "the race happened")
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, phase(w, late.Load()))
}

func TestTheTokenComesBeforeTheSet(t *testing.T) {
	var begun atomic.Pointer[shimtest.Env]
	var after atomic.Bool
	w, c := setUp(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			w := begun.Load()
			if _, ok := list.(*karpv1.NodeClaimList); ok && w != nil && w.Agent.Calls("ListClaims") == 1 && w.Agent.Calls("SyncClaims") == 0 {
				after.Store(true)
			}
			return under.List(ctx, list, options...)
		},
	}))
	begun.Store(w)
	sync(t, w, c)
	assert.True(t, after.Load(), "the set is read with the token at hand, and before it is sent")
}

func TestNoSetNoCollection(t *testing.T) {
	var fail atomic.Bool
	w, c := setUp(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*karpv1.NodeClaimList); ok && fail.Load() {
				return errors.New("the API server is away")
			}
			return under.List(ctx, list, options...)
		},
	}))
	orphan := w.Launched("orphan")
	require.NoError(t, w.Kube.Delete(w.Context(), orphan))
	fail.Store(true)
	_, err := c.Reconcile(w.Context())
	require.Error(t, err)
	assert.Zero(t, w.Agent.Calls("SyncClaims"))
	assert.NotEqual(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, orphan))
}

func TestAnIncompleteSetIsNotSent(t *testing.T) {
	var cut atomic.Bool
	w, c := setUp(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			err := under.List(ctx, list, options...)
			if claims, ok := list.(*karpv1.NodeClaimList); ok && cut.Load() {
				claims.Continue = "more"
			}
			return err
		},
	}))
	cut.Store(true)
	_, err := c.Reconcile(w.Context())
	require.ErrorContains(t, err, "incomplete")
	assert.Zero(t, w.Agent.Calls("SyncClaims"))
}

func TestTheAgentBeingAwayIsAnErrorAndTheNextRoundTakesANewToken(t *testing.T) {
	w, c := setUp(t)
	w.Disconnect()
	_, err := c.Reconcile(w.Context())
	require.Error(t, err)
	w.Reconnect()
	w.Agent.Fail("SyncClaims", 1, agenterrors.StaleToken("too old"))
	_, err = c.Reconcile(w.Context())
	require.Error(t, err)
	before := w.Agent.Calls("ListClaims")
	sync(t, w, c)
	assert.Equal(t, before+1, w.Agent.Calls("ListClaims"))
}

// A process that starts while every set is refused has no success to count from.
func TestTheAgeOfTheLastSetCountsFromTheFirstAttempt(t *testing.T) {
	const metric = "karpenter_capi_claim_sync_last_success_timestamp_seconds"
	clk := clocktesting.NewFakeClock(time.Unix(1_900_000_000, 0))
	w, c := setUp(t)
	c.Clock = clk
	w.Disconnect()
	for range 2 {
		_, err := c.Reconcile(w.Context())
		require.Error(t, err)
		assert.InDelta(t, 1_900_000_000, shimtest.Metric(t, metric, nil), 0)
		clk.Step(time.Minute)
	}
	w.Reconnect()
	sync(t, w, c)
	assert.InDelta(t, 1_900_000_120, shimtest.Metric(t, metric, nil), 0)
	accepted := shimtest.Scraped(t, clk.Now())

	age := func() float64 { return float64(clk.Now().Unix()) - shimtest.Metric(t, metric, nil) }
	w.Disconnect()
	for range 11 {
		assert.LessOrEqual(t, age(), 600.0)
		clk.Step(time.Minute)
		_, err := c.Reconcile(w.Context())
		require.Error(t, err)
	}
	assert.Greater(t, age(), 600.0)
	scrapes.Record(t, "KarpenterCapiClaimSyncStale", accepted, shimtest.Scraped(t, clk.Now()))
}

func TestNodeClaimsWithoutAClaimAreCounted(t *testing.T) {
	w, c := setUp(t)
	w.Launched("claimed")
	sync(t, w, c)
	assert.InDelta(t, 0, shimtest.Metric(t, "karpenter_capi_node_claims_without_claim", nil), 0)
	assert.InDelta(t, time.Now().Unix(), shimtest.Metric(t, "karpenter_capi_claim_sync_last_success_timestamp_seconds", nil), 60)
	claimed := shimtest.Scraped(t, time.Now())
	w.Create(w.NodeClaim("unclaimed"))
	sync(t, w, c)
	assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_node_claims_without_claim", nil), 0)
	scrapes.Record(t, "KarpenterCapiNodeClaimsWithoutClaim", claimed, shimtest.Scraped(t, time.Now()))
}

func TestForeignNodeClaimsAreNotInTheSet(t *testing.T) {
	w, c := setUp(t)
	ours := w.Launched("ours")
	w.Create(w.NodeClaim("foreign", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Kind = "EC2NodeClass" }))
	sync(t, w, c)
	sent, _ := w.Agent.Requests("SyncClaims")[0].(*agentv1alpha1.SyncClaimsRequest)
	assert.Equal(t, []string{string(ours.UID)}, sent.GetLiveClaimIds())
	assert.Equal(t, "karpenter", sent.GetHolder())
}

func TestNodesAreReported(t *testing.T) {
	w, c := setUp(t)
	w.Create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "joining", Labels: map[string]string{
			corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "windows", corev1.LabelTopologyZone: "z1", corev1.LabelHostname: "joining",
		}},
		Spec: corev1.NodeSpec{ProviderID: "sim:///1", Taints: []corev1.Taint{karpv1.UnregisteredNoExecuteTaint}},
		Status: corev1.NodeStatus{
			Capacity:    corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("15Gi")},
			Allocatable: corev1.ResourceList{"cpu": resource.MustParse("3900m")},
			NodeInfo:    corev1.NodeSystemInfo{Architecture: "arm64", OperatingSystem: "linux"},
		},
	})
	w.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "running"}, Spec: corev1.NodeSpec{ProviderID: "sim:///2"}})
	w.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}})
	for name, labels := range map[string]map[string]string{
		"starting": {karpv1.NodeRegisteredLabelKey: "true"},
		"started":  {karpv1.NodeRegisteredLabelKey: "true", karpv1.NodeInitializedLabelKey: "true"},
	} {
		w.Create(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: corev1.NodeSpec{ProviderID: "sim:///" + name},
			Status: corev1.NodeStatus{Capacity: corev1.ResourceList{"cpu": resource.MustParse("4")}},
		})
	}
	sync(t, w, c)
	reports := map[string]*agentv1alpha1.NodeReport{}
	for _, report := range w.Agent.NodeReports(w.Cluster) {
		reports[report.GetProviderId()] = report
	}
	require.Len(t, reports, 4)
	assert.Empty(t, reports["sim:///starting"].GetCapacity(), "its device plugins may not be there yet")
	assert.NotEmpty(t, reports["sim:///started"].GetCapacity())
	assert.True(t, reports["sim:///1"].GetUnregistered())
	assert.Equal(t, map[string]string{
		corev1.LabelArchStable: "arm64", corev1.LabelOSStable: "linux", corev1.LabelTopologyZone: "z1",
	}, reports["sim:///1"].GetLabels(), "what the kubelet says the machine is")
	assert.Empty(t, reports["sim:///2"].GetLabels())
	assert.Equal(t, map[string]string{"cpu": "4", "memory": "15Gi"}, reports["sim:///1"].GetCapacity())
	assert.Equal(t, map[string]string{"cpu": "3900m"}, reports["sim:///1"].GetAllocatable())
	assert.False(t, reports["sim:///2"].GetUnregistered())
}

func lastSync(t *testing.T, w *shimtest.Env) *agentv1alpha1.SyncClaimsRequest {
	t.Helper()
	requests := w.Agent.Requests("SyncClaims")
	require.NotEmpty(t, requests)
	sent, ok := requests[len(requests)-1].(*agentv1alpha1.SyncClaimsRequest)
	require.True(t, ok)
	return sent
}

func TestTheMessageStaysBelowTheLimit(t *testing.T) {
	const nodes = 3000
	identity := func(i int) string { return fmt.Sprintf("sim:///%04d/%s", i, strings.Repeat("x", 800)) }
	all := make([]corev1.Node, nodes)
	for i := range all {
		all[i] = corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprint("n", i), CreationTimestamp: metav1.Unix(int64(i), 0),
				Labels: map[string]string{corev1.LabelTopologyZone: strings.Repeat("z", 250)},
			},
			Spec: corev1.NodeSpec{ProviderID: identity(i), Taints: []corev1.Taint{karpv1.UnregisteredNoExecuteTaint}},
		}
	}
	w, c := setUp(t, listing(all...))
	sync(t, w, c)
	sent := lastSync(t, w)
	assert.Less(t, proto.Size(sent), 4<<20)
	require.Len(t, sent.GetNodes(), nodes)
	assert.True(t, sent.GetNodesComplete(), "each of them is there")
	described := 0
	for i, node := range sent.GetNodes() {
		require.Equal(t, identity(nodes-1-i), node.GetProviderId())
		require.True(t, node.GetUnregistered())
		if len(node.GetLabels()) > 0 {
			require.Equal(t, i, described, "the newest are described")
			described++
		}
	}
	assert.NotZero(t, described)
	assert.Less(t, described, nodes)
}

func listing(nodes ...corev1.Node) shimtest.Option {
	return shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if into, ok := list.(*corev1.NodeList); ok {
				into.Items = nodes
				return nil
			}
			return under.List(ctx, list, options...)
		},
	})
}

func nodeWith(providerID string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: corev1.NodeSpec{ProviderID: providerID}}
}

// A Node that did not fit is not an absent one.
func TestAListOfNodesThatIsCutOffIsNotCalledComplete(t *testing.T) {
	nodes := make([]corev1.Node, 1800)
	for i := range nodes {
		nodes[i] = nodeWith(fmt.Sprint(i, strings.Repeat("x", 2000)))
	}
	w, c := setUp(t, listing(nodes...))
	sync(t, w, c)
	sent := lastSync(t, w)
	assert.Less(t, proto.Size(sent), 4<<20)
	assert.Less(t, len(sent.GetNodes()), len(nodes))
	assert.NotEmpty(t, sent.GetNodes())
	assert.False(t, sent.GetNodesComplete())
}

// One odd Node must not keep the reports of all others from the agent.
func TestANodeWhoseProviderIDTheAPIDoesNotAllowIsLeftOut(t *testing.T) {
	w, c := setUp(t, listing(nodeWith(strings.Repeat("x", 2049)), nodeWith("sim:///1")))
	sync(t, w, c)
	sent := lastSync(t, w)
	require.Len(t, sent.GetNodes(), 1)
	assert.Equal(t, "sim:///1", sent.GetNodes()[0].GetProviderId())
	assert.True(t, sent.GetNodesComplete(), "no Machine can have it")
}

// The agent infers absence from the list, so it must not be read from a cache that may lag behind,
// nor consist of the first page only.
func TestNodesAreReadPageByPageWithTheTokenAtHand(t *testing.T) {
	var pages, early atomic.Int32
	var begun atomic.Pointer[shimtest.Env]
	w, c := setUp(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			nodes, ok := list.(*corev1.NodeList)
			if !ok {
				return under.List(ctx, list, options...)
			}
			if w := begun.Load(); w == nil || w.Agent.Calls("ListClaims") == 0 {
				early.Add(1)
			}
			var o client.ListOptions
			o.ApplyOptions(options)
			assert.NotZero(t, o.Limit)
			page := pages.Add(1)
			assert.Equal(t, map[int32]string{1: "", 2: "next"}[page], o.Continue)
			*nodes = corev1.NodeList{Items: []corev1.Node{{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", page)}, Spec: corev1.NodeSpec{ProviderID: fmt.Sprint("sim:///", page)},
			}}}
			if page == 1 {
				nodes.Continue = "next"
			}
			return nil
		},
	}))
	begun.Store(w)
	sync(t, w, c)
	sent := lastSync(t, w)
	assert.Len(t, sent.GetNodes(), 2)
	assert.True(t, sent.GetNodesComplete())
	assert.Zero(t, early.Load(), "not before the token")
}

// A list with an unreadable page is not complete.
func TestNodesThatCannotBeReadAreNotReportedAsNone(t *testing.T) {
	w, c := setUp(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*corev1.NodeList); ok {
				return errors.New("the API server is away")
			}
			return under.List(ctx, list, options...)
		},
	}))
	_, err := c.Reconcile(w.Context())
	require.ErrorContains(t, err, "listing Nodes")
	assert.Zero(t, w.Agent.Calls("SyncClaims"))
}

func TestANodeWithMoreResourcesThanAReportHoldsIsReportedWithoutThem(t *testing.T) {
	w, c := setUp(t)
	many := corev1.ResourceList{}
	for i := range 129 {
		many[corev1.ResourceName(fmt.Sprint("example.com/device-", i))] = resource.MustParse("1")
	}
	w.Create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "many"}, Spec: corev1.NodeSpec{ProviderID: "sim:///many"},
		Status: corev1.NodeStatus{Capacity: many, Allocatable: many},
	})
	sync(t, w, c)
	require.Len(t, w.Agent.NodeReports(w.Cluster), 1)
	assert.Empty(t, w.Agent.NodeReports(w.Cluster)[0].GetCapacity())
}

// The kubeconfig or the Cluster's name may be wrong: the two settings are independent.
func TestTheAgentIsToldWhereTheSetWasRead(t *testing.T) {
	w, c := setUp(t)
	w.Launched("kept")
	sync(t, w, c)
	assert.Equal(t, shimtest.SpokeID, lastSync(t, w).GetSpokeId())
	for _, request := range w.Agent.Requests("CreateClaim") {
		made, ok := request.(*agentv1alpha1.CreateClaimRequest)
		require.True(t, ok)
		assert.Equal(t, shimtest.SpokeID, made.GetSpokeId())
	}
}

// A change of the feature gate NodeRepair must reach the agent.
func TestTheAgentLearnsWhetherKarpenterRepairs(t *testing.T) {
	w, c := setUp(t)
	for _, repairs := range []bool{true, false} {
		c.Repairs = repairs
		sync(t, w, c)
		require.NotNil(t, lastSync(t, w).HolderRepairs) // unset is not false
		assert.Equal(t, repairs, lastSync(t, w).GetHolderRepairs())
	}
}

// The agent must know which cluster a set belongs to before it collects by it. Without an identity
// no set is sent.
func TestASetIsNotSentWithoutTheClustersIdentity(t *testing.T) {
	w, c := setUp(t)
	require.NoError(t, w.Kube.Delete(w.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}}))
	_, err := c.Reconcile(w.Context())
	require.ErrorContains(t, err, "kube-system")
	assert.Zero(t, w.Agent.Calls("SyncClaims"))
	assert.NotNil(t, w.Launched("claimed").UID, "claims are made all the same")
}

func TestAShimOfAnotherClusterReleasesNothing(t *testing.T) {
	w, c := setUp(t)
	known, err := c.Refused()
	require.NoError(t, err)
	require.False(t, known, "before the first answer")
	theirs := w.Launched("theirs")
	sync(t, w, c)
	<-c.RefusalChanges()
	sync(t, w, c)
	require.Empty(t, c.RefusalChanges(), "nothing has changed")
	require.NoError(t, w.Kube.Delete(w.Context(), theirs))
	system := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}}
	require.NoError(t, w.Kube.Delete(w.Context(), system))
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: "another-cluster"}})
	_, err = c.Reconcile(w.Context())
	require.Error(t, err)
	assert.True(t, agenterrors.IsSpokeMismatch(err), "%v", err)
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, phase(w, theirs))
	known, refused := c.Refused()
	assert.True(t, known)
	assert.True(t, agenterrors.IsSpokeMismatch(refused), "%v", refused)
	<-c.RefusalChanges()

	require.NoError(t, w.Kube.Delete(w.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}}))
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: shimtest.SpokeID}})
	sync(t, w, c)
	_, refused = c.Refused()
	require.NoError(t, refused)
	<-c.RefusalChanges()
}

// A cluster restored from a backup has lost NodeClaims whose Nodes come back without being
// registered again.
func TestClaimsWhoseNodesWereRegisteredAreReportedAndKept(t *testing.T) {
	w, c := setUp(t)
	lost := w.Launched("lost")
	machine := w.Agent.Provision(w.Cluster, string(lost.UID), "sim:///lost")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "lost"}, Spec: corev1.NodeSpec{ProviderID: machine.GetProviderId()}}
	w.Create(node)
	sync(t, w, c)
	owned := shimtest.Scraped(t, time.Now())
	require.NoError(t, w.Kube.Delete(w.Context(), lost))
	node.Spec.Taints = []corev1.Taint{karpv1.UnregisteredNoExecuteTaint}
	require.NoError(t, w.Kube.Update(w.Context(), node))
	sync(t, w, c)
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, phase(w, lost))
	assert.Contains(t, w.Recorder.Reasons(), "ClaimsKept")
	assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_claims_kept_without_node_claim", nil), 0)
	scrapes.Record(t, "KarpenterCapiClaimsKept", owned, shimtest.Scraped(t, time.Now()))
	assert.Contains(t, strings.Join(w.Recorder.Messages(), "\n"), string(lost.UID), "so that a person finds it")
}

func TestARoundIsDoneAtTheStartWhenAnAgentIsFollowedAgainAndWhenAskedFor(t *testing.T) {
	reconnected := make(chan event.GenericEvent)
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	c := newController(w, reconnected, time.Hour)
	// The manager only runs the controller, which has its own readers, so no API server is called.
	m, err := manager.New(&rest.Config{Host: "127.0.0.1:1"}, manager.Options{
		Metrics: metricsserver.Options{BindAddress: "0"},
		// As in the shim's operator: with the priority queue, stopping can deadlock
		// (controller-runtime issue 3538).
		Controller: config.Controller{UsePriorityQueue: new(false), SkipNameValidation: new(true)},
	})
	require.NoError(t, err)
	require.NoError(t, c.Register(t.Context(), m))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Start(ctx) }()
	w.Eventually(func() bool { return w.Agent.Calls("SyncClaims") == 1 }, "the first round")
	select {
	case reconnected <- event.GenericEvent{}:
	case <-time.After(shimtest.Timeout):
		t.Fatal("there is no listener")
	}
	w.Eventually(func() bool { return w.Agent.Calls("SyncClaims") == 2 }, "a round long before the interval is over")
	c.Soon()
	c.Soon()
	w.Eventually(func() bool { return w.Agent.Calls("SyncClaims") == 3 }, "a round that was asked for")
	cancel()
	require.NoError(t, <-done)
}
