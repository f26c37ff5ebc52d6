// Package overlays makes core evaluate NodeOverlays again when the catalogue of node groups has
// changed.
//
// Core stores the effects of overlays by the requirements of each offering. It evaluates them again
// only on a change of an overlay, a NodePool or a node class, and every six hours. Until then,
// offerings of a new node group, or offerings that another label now distinguishes, would lack
// their overlays.
package overlays

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"slices"

	"github.com/samber/lo"
	"k8s.io/client-go/util/workqueue"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
)

const name = "nodeoverlay.refresh"

// Catalogue notifies of its changes.
type Catalogue interface {
	Changes() <-chan struct{}
}

// Core is core's own controller, which applies the overlays.
type Core interface {
	Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error)
}

// Controller triggers core's overlay controller.
type Controller struct {
	kube          client.Client
	cloudProvider cloudprovider.CloudProvider
	catalogue     Catalogue
	core          Core
	applied       uint64 // hash of the offerings that overlays were last applied to; used by one goroutine at a time
}

// New returns the controller. cloudProvider must be the one without overlays applied.
func New(kube client.Client, cloudProvider cloudprovider.CloudProvider, catalogue Catalogue, core Core) *Controller {
	return &Controller{kube: kube, cloudProvider: cloudProvider, catalogue: catalogue, core: core}
}

// Reconcile makes core apply all overlays if there are offerings that core has not seen.
func (c *Controller) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	offered, err := c.offered(ctx)
	if err != nil || offered == c.applied {
		return reconcile.Result{}, err
	}
	result, err := c.core.Reconcile(ctx, reconcile.Request{})
	if err != nil || result.Requeue { //nolint:staticcheck // that is how core says that it lost a race
		return reconcile.Result{Requeue: result.Requeue}, err //nolint:staticcheck // the same
	}
	c.applied = offered
	log.FromContext(ctx).V(1).Info("applied node overlays to what the node groups offer now")
	return reconcile.Result{}, nil
}

// offered returns a hash of what identifies offerings to core, over all NodePools.
func (c *Controller) offered(ctx context.Context) (uint64, error) {
	nodePools := &karpv1.NodePoolList{}
	if err := c.kube.List(ctx, nodePools); err != nil {
		return 0, fmt.Errorf("listing NodePools: %w", err)
	}
	sum := fnv.New64a()
	for i := range nodePools.Items {
		nodePool := &nodePools.Items[i]
		types, err := c.cloudProvider.GetInstanceTypes(ctx, nodePool)
		if err != nil {
			continue // its node class does not exist or selects nothing: core skips the NodePool, too
		}
		lines := lo.FlatMap(types, func(t *cloudprovider.InstanceType, _ int) []string {
			return lo.Map(t.Offerings, func(o *cloudprovider.Offering, _ int) string {
				return nodePool.Name + "\x00" + t.Name + "\x00" + t.Requirements.String() + "\x00" + o.Requirements.String() + "\n"
			})
		})
		slices.Sort(lines)
		for _, line := range lines {
			_, _ = io.WriteString(sum, line)
		}
	}
	return sum.Sum64(), nil
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		WatchesRawSource(source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			changes := c.catalogue.Changes()
			queue.Add(reconcile.Request{}) // for a snapshot made earlier
			go func() {
				for {
					select {
					case <-ctx.Done():
						return
					case <-changes:
						queue.Add(reconcile.Request{})
					}
				}
			}()
			return nil
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Complete(c)
}
