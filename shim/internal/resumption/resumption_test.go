package resumption_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/controllers/state/informer"
	"sigs.k8s.io/karpenter/pkg/state/cost"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/resumption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// env has a drifted Node of a NodePool, and a shim that has just started.
type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	nodePool   *karpv1.NodePool
	nodeClaim  *karpv1.NodeClaim
	cost       *cost.ClusterCost
	state      *informer.NodeClaimController
	disruption *disruption.Controller
}

func setUp(t *testing.T) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "a", InstanceType: "m5", Labels: map[string]string{"team": "red"}},
		{Name: "b", InstanceType: "m6", Labels: map[string]string{"team": "blue"}, Price: &agentv1alpha1.Price{PerHour: 9}},
	}, shimtest.WithClock(clk))
	nodePool := w.NodePool()
	nodeClaim := w.Launched("claim", shimtest.Registered)
	require.Equal(t, "default/a", nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	w.Get(nodeClass)
	nodeClass.Spec.ScalableResourceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "blue"}}
	w.Update(nodeClass)
	w.Catalogue.Refresh()
	w.Eventually(func() bool {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return len(class.Groups) == 1 && len(class.InstanceTypes(nil, nil)) == 2
	}, "the node group is not selected, and its NodeClaim remembered")
	clk.Step(2 * time.Hour) // core looks at instance types only for NodeClaims that are older than an hour
	w.Unsettled.Store(true)
	e := &env{Env: w, t: t, clock: clk, nodePool: nodePool, nodeClaim: nodeClaim}
	e.cost = cost.NewClusterCost(w.Context(), w.CloudProvider, w.Kube)
	e.state = informer.NewNodeClaimController(w.Kube, w.CloudProvider, state.NewCluster(clk, w.Kube, w.CloudProvider), e.cost)
	e.disruption = disruption.NewController(clk, w.Kube, w.CloudProvider)
	return e
}

func (e *env) request() reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(e.nodeClaim)}
}

func (e *env) drift() (reconcile.Result, error) {
	e.Get(e.nodeClaim)
	return e.disruption.Reconcile(e.Context(), e.nodeClaim)
}

func (e *env) isDrifted() bool {
	e.Get(e.nodeClaim)
	return e.nodeClaim.StatusConditions().Get(karpv1.ConditionTypeDrifted).IsTrue()
}

// This is why the package exists.
func TestCoreItselfTriesAgainLate(t *testing.T) {
	e := setUp(t)
	const outage = time.Hour
	for name, reconciles := range map[string]func() error{
		"state.nodeclaim":      func() error { _, err := e.state.Reconcile(e.Context(), e.request()); return err },
		"nodeclaim.disruption": func() error { _, err := e.drift(); return err },
	} {
		t.Run(name, func(t *testing.T) {
			queue := workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]() // as controller-runtime makes it for each controller
			e.Unsettled.Store(true)
			var elapsed time.Duration
			for {
				e.Unsettled.Store(elapsed < outage)
				if reconciles() == nil {
					break
				}
				elapsed += queue.When(e.request())
			}
			late := elapsed - outage
			t.Logf("%s late", late)
			assert.Greater(t, late, 5*time.Minute)
			assert.LessOrEqual(t, late, 1000*time.Second)
		})
	}
}

func TestWorkOnNodeClaimsResumesWhenTheNodeGroupsAreKnown(t *testing.T) {
	e := setUp(t)
	_, err := e.state.Reconcile(e.Context(), e.request())
	require.Error(t, err)
	_, err = e.drift()
	require.Error(t, err)
	require.Zero(t, e.cost.GetNodepoolCost(e.nodePool))
	require.False(t, e.isDrifted())

	asked := make(chan struct{}, 100)
	ready := func() bool { asked <- struct{}{}; return e.CloudProvider.Ready() }
	r, err := resumption.New(e.Kube, e.CloudProvider, ready, []controller.Controller{e.disruption, e.state})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- r.Start(e.Context()) }()
	<-asked
	assert.Zero(t, e.cost.GetNodepoolCost(e.nodePool))
	e.Unsettled.Store(false)
	require.NoError(t, <-ended)
	assert.Positive(t, e.cost.GetNodepoolCost(e.nodePool))
	assert.True(t, e.isDrifted())
}

// overtaken is a client that is overtaken by another actor right after it has read a NodeClaim.
type overtaken struct {
	client.Client

	by func()
}

func (o *overtaken) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	err := o.Client.Get(ctx, key, object, options...)
	if by := o.by; by != nil {
		o.by = nil
		by()
	}
	return err
}

// Core's own worker handles the deletion of a NodeClaim while an older version of it is being told
// to core.
func TestANodeClaimThatIsDeletedMeanwhileIsForgotten(t *testing.T) {
	e := setUp(t)
	cluster := state.NewCluster(e.clock, e.Kube, e.CloudProvider)
	own := informer.NewNodeClaimController(e.Kube, e.CloudProvider, cluster, e.cost)
	reader := &overtaken{Client: e.Kube, by: func() {
		e.Get(e.nodeClaim)
		e.nodeClaim.Finalizers = nil
		e.Update(e.nodeClaim)
		require.NoError(t, e.Kube.Delete(e.Context(), e.nodeClaim))
		_, err := own.Reconcile(e.Context(), e.request())
		require.NoError(t, err)
	}}
	shared := informer.NewNodeClaimController(reader, e.CloudProvider, cluster, e.cost)
	asked := make(chan struct{}, 100)
	ready := func() bool { asked <- struct{}{}; return e.CloudProvider.Ready() }
	r, err := resumption.New(e.Kube, e.CloudProvider, ready, []controller.Controller{e.disruption, shared})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- r.Start(e.Context()) }()
	<-asked
	e.Unsettled.Store(false)
	require.NoError(t, <-ended)
	require.Nil(t, reader.by)
	require.False(t, cluster.NodeClaimExists(e.nodeClaim.Name))
}

// unevaluated is a provider whose NodeOverlays are not applied yet.
type unevaluated struct {
	cloudprovider.CloudProvider

	asked     chan struct{}
	evaluated atomic.Bool
}

func (u *unevaluated) GetInstanceTypes(ctx context.Context, nodePool *karpv1.NodePool) ([]*cloudprovider.InstanceType, error) {
	select {
	case u.asked <- struct{}{}:
	default:
	}
	if !u.evaluated.Load() {
		return nil, cloudprovider.NewUnevaluatedNodePoolError(nodePool.Name)
	}
	return u.CloudProvider.GetInstanceTypes(ctx, nodePool)
}

func TestWorkResumesWhenTheOverlaysAreApplied(t *testing.T) {
	e := setUp(t)
	provider := &unevaluated{CloudProvider: e.CloudProvider, asked: make(chan struct{}, 1)}
	e.Unsettled.Store(false)
	r, err := resumption.New(e.Kube, provider, e.CloudProvider.Ready, []controller.Controller{e.disruption, e.state})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- r.Start(e.Context()) }()
	<-provider.asked
	assert.False(t, e.isDrifted())
	provider.evaluated.Store(true)
	require.NoError(t, <-ended)
	assert.True(t, e.isDrifted())
}

func TestNothingIsRepeatedWhenTheNodeGroupsAreKnownAtOnce(t *testing.T) {
	e := setUp(t)
	e.Unsettled.Store(false)
	r, err := resumption.New(e.Kube, e.CloudProvider, e.CloudProvider.Ready, []controller.Controller{e.state, e.disruption})
	require.NoError(t, err)
	require.NoError(t, r.Start(e.Context()))
	assert.Zero(t, e.cost.GetNodepoolCost(e.nodePool), "core's own controllers do it")
}

// Another release of core may name or write its controllers differently.
func TestAControllerThatCoreDoesNotHaveIsNamed(t *testing.T) {
	e := setUp(t)
	for missing, core := range map[string][]controller.Controller{
		"state.nodeclaim":      {e.disruption},
		"nodeclaim.disruption": {e.state},
	} {
		_, err := resumption.New(e.Kube, e.CloudProvider, e.CloudProvider.Ready, core)
		assert.ErrorContains(t, err, missing)
	}
}
