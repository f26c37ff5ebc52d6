package overlays_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	karpv1alpha1 "sigs.k8s.io/karpenter/pkg/apis/v1alpha1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeoverlay"
	"sigs.k8s.io/karpenter/pkg/controllers/state"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/overlays"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func group(name, zone string) *agentv1alpha1.NodeGroup {
	return &agentv1alpha1.NodeGroup{
		Name: name, Zone: zone, InstanceType: "metal", CapacityType: agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND,
		Capacity: map[string]string{"cpu": "4", "memory": "8Gi"}, Price: &agentv1alpha1.Price{PerHour: 1},
	}
}

// env is an environment with a NodePool, an overlay that sets the price 7, and core's own
// controller.
type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	nodePool   *karpv1.NodePool
	store      *nodeoverlay.InstanceTypeStore
	core       *counted
	controller *overlays.Controller
}

func setUp(t *testing.T, groups ...*agentv1alpha1.NodeGroup) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, groups, shimtest.WithClock(clk))
	nodePool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	nodePool.Spec.Template.Spec.NodeClassRef = &karpv1.NodeClassReference{
		Group: "karpenter.cluster.x-k8s.io", Kind: "ClusterAPINodeClass", Name: shimtest.NodeClassName,
	}
	w.Create(nodePool)
	w.Create(&karpv1alpha1.NodeOverlay{
		ObjectMeta: metav1.ObjectMeta{Name: "dear"},
		Spec: karpv1alpha1.NodeOverlaySpec{
			Price: new("7"),
			Requirements: []karpv1alpha1.NodeSelectorRequirement{
				{Key: corev1.LabelInstanceTypeStable, Operator: corev1.NodeSelectorOpIn, Values: []string{"metal"}},
			},
		},
	})
	e := &env{Env: w, t: t, clock: clk, nodePool: nodePool, store: nodeoverlay.NewInstanceTypeStore()}
	e.core = &counted{Core: e.evaluating(w.CloudProvider)}
	e.controller = overlays.New(clk, w.Kube, w.CloudProvider, w.Catalogue, e.core)
	return e
}

// evaluating returns core's controller, with the instance types of the provider.
func (e *env) evaluating(provider cloudprovider.CloudProvider) overlays.Core {
	return nodeoverlay.NewController(e.clock, e.Kube, provider, e.store, state.NewCluster(e.clock, e.Kube, provider))
}

func (e *env) reconciled() reconcile.Result {
	e.t.Helper()
	result, err := e.controller.Reconcile(e.Context(), reconcile.Request{})
	require.NoError(e.t, err)
	return result
}

func (e *env) prices() []float64 {
	e.t.Helper()
	types, err := e.CloudProvider.GetInstanceTypes(e.Context(), e.nodePool)
	require.NoError(e.t, err)
	applied, err := e.store.ApplyAll(e.nodePool.Name, types)
	require.NoError(e.t, err)
	require.Len(e.t, applied, 1)
	var prices []float64
	for _, o := range applied[0].Offerings {
		prices = append(prices, o.Price)
	}
	return prices
}

// Core itself applies the overlays, but without this controller the second zone would lack them for
// six hours.
func TestOverlaysAreAppliedToANodeGroupThatIsNew(t *testing.T) {
	w := setUp(t, group("a", "zone-a"))
	w.reconciled()
	assert.Equal(t, []float64{7}, w.prices())

	changes := w.Catalogue.Changes()
	w.Agent.AddNodeGroup(group("b", "zone-b"))
	<-changes
	w.Eventually(func() bool { return len(w.prices()) == 2 }, "the new node group is in the catalogue")
	assert.ElementsMatch(t, []float64{7, 1}, w.prices(), "core does not know it")
	w.reconciled()
	assert.Equal(t, []float64{7, 7}, w.prices())

	calls := w.core.calls
	w.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
	w.Eventually(func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), w.nodePool)
		return err == nil && len(types[0].Offerings.Available()) == 1
	}, "the node group is full")
	w.reconciled()
	assert.Equal(t, calls, w.core.calls, "what is offered is the same, whether there is room or not")

	for _, id := range []string{"default/a", "default/b"} {
		w.Agent.UpdateNodeGroup(id, func(g *agentv1alpha1.NodeGroup) { g.NodeLabels = map[string]string{"rack": "r1"} })
	}
	w.Eventually(func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), w.nodePool)
		return err == nil && types[0].Requirements.Has("rack")
	}, "a label that all Nodes of the instance type have")
	w.reconciled()
	assert.Equal(t, calls+1, w.core.calls, "an overlay may select it")
}

// Core reports the NodePool, and tries again by itself.
func TestANodePoolWithoutInstanceTypesIsNoReasonToRepeatTheOthers(t *testing.T) {
	w := setUp(t, group("a", "zone-a"))
	broken := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "broken"}}
	broken.Spec.Template.Spec.NodeClassRef = &karpv1.NodeClassReference{
		Group: "karpenter.cluster.x-k8s.io", Kind: "ClusterAPINodeClass", Name: "missing",
	}
	w.Create(broken)
	w.reconciled()
	assert.Equal(t, []float64{7}, w.prices())
	w.clock.Step(time.Minute)
	w.reconciled() // the second time
	calls := w.core.calls
	assert.Equal(t, 10*time.Second, w.reconciled().RequeueAfter, "nothing tells when it gets some")
	assert.Equal(t, calls, w.core.calls)
}

// As core's own controller does after a change of a NodeClass, if it is slow.
func TestOverlaysAreAppliedAgainIfAnOlderEvaluationEndedLast(t *testing.T) {
	w := setUp(t, group("a", "zone-a"))
	types, err := w.CloudProvider.GetInstanceTypes(w.Context(), w.nodePool)
	require.NoError(t, err)
	older := w.evaluating(having{w.CloudProvider, types})
	w.Agent.AddNodeGroup(group("b", "zone-b"))
	w.Eventually(func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), w.nodePool)
		return err == nil && len(types[0].Offerings) == 2
	}, "the new node group is in the catalogue")
	left := w.reconciled().RequeueAfter
	require.Positive(t, left)
	_, err = older.Reconcile(w.Context(), reconcile.Request{})
	require.NoError(t, err)
	require.ElementsMatch(t, []float64{7, 1}, w.prices(), "what was known before")

	w.clock.Step(left / 2)
	assert.Equal(t, left/2, w.reconciled().RequeueAfter, "it is not forgotten when the catalogue changes again")
	w.clock.Step(left / 2)
	assert.Zero(t, w.reconciled())
	assert.Equal(t, []float64{7, 7}, w.prices())
	calls := w.core.calls
	w.clock.Step(time.Hour)
	w.reconciled()
	assert.Equal(t, calls, w.core.calls, "once")
}

// having is a provider that has certain instance types.
type having struct {
	cloudprovider.CloudProvider

	types []*cloudprovider.InstanceType
}

func (h having) GetInstanceTypes(context.Context, *karpv1.NodePool) ([]*cloudprovider.InstanceType, error) {
	return h.types, nil
}

type counted struct {
	overlays.Core

	calls int
}

func (c *counted) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	c.calls++
	return c.Core.Reconcile(ctx, request)
}
