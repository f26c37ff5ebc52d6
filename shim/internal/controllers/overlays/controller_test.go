package overlays_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	karpv1alpha1 "sigs.k8s.io/karpenter/pkg/apis/v1alpha1"
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

// Core itself applies the overlays, but without this controller the second zone would lack them for
// six hours.
func TestOverlaysAreAppliedToANodeGroupThatIsNew(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{group("a", "zone-a")})
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
	store := nodeoverlay.NewInstanceTypeStore()
	core := &counted{Core: nodeoverlay.NewController(w.Clock, w.Kube, w.CloudProvider, store, state.NewCluster(w.Clock, w.Kube, w.CloudProvider))}
	controller := overlays.New(w.Kube, w.CloudProvider, w.Catalogue, core)
	reconciled := func() {
		_, err := controller.Reconcile(w.Context(), reconcile.Request{})
		require.NoError(t, err)
	}
	prices := func() []float64 {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
		require.NoError(t, err)
		applied, err := store.ApplyAll(nodePool.Name, types)
		require.NoError(t, err)
		require.Len(t, applied, 1)
		var prices []float64
		for _, o := range applied[0].Offerings {
			prices = append(prices, o.Price)
		}
		return prices
	}
	reconciled()
	assert.Equal(t, []float64{7}, prices())

	changes := w.Catalogue.Changes()
	w.Agent.AddNodeGroup(group("b", "zone-b"))
	<-changes
	w.Eventually(func() bool { return len(prices()) == 2 }, "the new node group is in the catalogue")
	assert.ElementsMatch(t, []float64{7, 1}, prices(), "core does not know it")
	reconciled()
	assert.Equal(t, []float64{7, 7}, prices())

	calls := core.calls
	w.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
	w.Eventually(func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
		return err == nil && len(types[0].Offerings.Available()) == 1
	}, "the node group is full")
	reconciled()
	assert.Equal(t, calls, core.calls, "what is offered is the same, whether there is room or not")

	for _, id := range []string{"default/a", "default/b"} {
		w.Agent.UpdateNodeGroup(id, func(g *agentv1alpha1.NodeGroup) { g.NodeLabels = map[string]string{"rack": "r1"} })
	}
	w.Eventually(func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
		return err == nil && types[0].Requirements.Has("rack")
	}, "a label that all Nodes of the instance type have")
	reconciled()
	assert.Equal(t, calls+1, core.calls, "an overlay may select it")
}

type counted struct {
	overlays.Core

	calls int
}

func (c *counted) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	c.calls++
	return c.Core.Reconcile(ctx, request)
}
