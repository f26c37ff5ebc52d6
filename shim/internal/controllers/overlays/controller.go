// Package overlays makes core evaluate NodeOverlays again when the catalogue of node groups has
// changed.
//
// Core stores the effects of overlays by the requirements of each offering. It evaluates them again
// only on a change of an overlay, a NodePool or a NodeClass, and every six hours. Until then,
// offerings of a new node group, or offerings that another label now distinguishes, would lack
// their overlays.
//
// Core's own controller runs beside this one, and the evaluation that ends last counts. It may have
// read older offerings. Therefore this controller evaluates a second time some seconds later.
package overlays

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
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

	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

const (
	name = "nodeoverlay.refresh"
	// again is the time until the second evaluation. It exceeds the duration of one that was
	// running.
	again = 10 * time.Second
)

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
	clock         clock.PassiveClock
	kube          client.Client
	cloudProvider cloudprovider.CloudProvider
	catalogue     Catalogue
	core          Core

	// Used by one goroutine at a time.
	applied uint64    // hash of the offerings that overlays were last applied to
	first   time.Time // when they were applied for the first time; zero once they were a second time
}

// New returns the controller. cloudProvider must be the one without overlays applied.
func New(clk clock.PassiveClock, kube client.Client, cloudProvider cloudprovider.CloudProvider, catalogue Catalogue, core Core) *Controller {
	return &Controller{clock: clk, kube: kube, cloudProvider: cloudProvider, catalogue: catalogue, core: core}
}

// Reconcile makes core apply all overlays if there are offerings that core has not seen, and once
// more after that.
func (c *Controller) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	offered, skipped, err := c.offered(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	// Nothing tells when a NodePool without instance types gets some although no offering changes:
	// before the Nodes of a restarted shim are adopted, for example, none has any.
	look := reconcile.Result{RequeueAfter: lo.Ternary(skipped > 0, again, 0)}
	second := offered == c.applied
	if second {
		if c.first.IsZero() {
			return look, nil
		}
		if left := again - c.clock.Since(c.first); left > 0 {
			return reconcile.Result{RequeueAfter: left}, nil
		}
	}
	result, err := c.core.Reconcile(ctx, reconcile.Request{})
	if onlySkipped(err, skipped) {
		err = nil // core tries again by itself
	}
	if err != nil || result.Requeue { //nolint:staticcheck // that is how core says that it lost a race
		return reconcile.Result{Requeue: result.Requeue}, err //nolint:staticcheck // the same
	}
	log.FromContext(ctx).V(1).Info("applied node overlays to what the node groups offer now")
	if second {
		c.first = time.Time{}
		return look, nil
	}
	c.applied, c.first = offered, c.clock.Now()
	return reconcile.Result{RequeueAfter: again}, nil
}

// onlySkipped reports whether core applied the overlays, and its error is only that so many
// NodePools have no instance types.
func onlySkipped(err error, nodePools int) bool {
	return err != nil && nodePools > 0 && strings.HasPrefix(err.Error(), unlisted) && strings.Count(err.Error(), unlisted) == nodePools
}

// unlisted begins core's error for each NodePool without instance types.
const unlisted = "listing instance types for nodepool "

// offered returns a hash of what identifies offerings to core, over all NodePools, and the number
// of NodePools without instance types: their NodeClass does not exist or selects nothing.
func (c *Controller) offered(ctx context.Context) (sum uint64, skipped int, err error) {
	nodePools := &karpv1.NodePoolList{}
	if err := c.kube.List(ctx, nodePools); err != nil {
		return 0, 0, fmt.Errorf("listing NodePools: %w", err)
	}
	hash := fnv.New64a()
	for i := range nodePools.Items {
		nodePool := &nodePools.Items[i]
		types, err := c.cloudProvider.GetInstanceTypes(ctx, nodePool)
		if err != nil {
			skipped++ // core skips it, too
			continue
		}
		lines := lo.FlatMap(types, func(t *cloudprovider.InstanceType, _ int) []string {
			return lo.Map(t.Offerings, func(o *cloudprovider.Offering, _ int) string {
				return nodePool.Name + "\x00" + t.Name + "\x00" + instancetype.RequirementsKey(t.Requirements) + "\x00" +
					instancetype.RequirementsKey(o.Requirements) + "\x00\n"
			})
		})
		slices.Sort(lines)
		for _, line := range lines {
			_, _ = io.WriteString(hash, line)
		}
	}
	return hash.Sum64(), skipped, nil
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
