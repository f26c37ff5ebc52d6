// Package retries makes controllers of core try again soon after the hub was away.
//
// Some controllers of core do one thing over and over for the whole cluster, and retry with
// controller-runtime's default: after an outage of half an hour, they would do nothing for another
// ten minutes.
package retries

import (
	"context"
	"fmt"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/awslabs/operatorpkg/reconciler"
	"github.com/awslabs/operatorpkg/singleton"
	"k8s.io/client-go/util/workqueue"
	controllerruntime "sigs.k8s.io/controller-runtime"
	runtimecontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
)

// Names of the controllers of core that fail while the agent is away: its instance types and
// machines are unknown, or no NodePool is Ready.
const (
	disruption        = "disruption"
	garbageCollection = "nodeclaim.garbagecollection"
)

// Longest is the longest time until the next try.
const Longest = 30 * time.Second

// Limiter returns the limiter of the controllers' retries.
func Limiter() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Second, Longest)
}

// Soon returns core's controllers, with the two named above wrapped so that they retry after at
// most [Longest]. It fails if one of them is missing, or reconciles single objects.
func Soon(core []controller.Controller) ([]controller.Controller, error) {
	for _, name := range []string{disruption, garbageCollection} {
		wrapped, found := operator.Wrap(core, name, func(c repeated) controller.Controller { return soon{c} })
		if !found {
			return nil, fmt.Errorf("core has no controller %q that works on the whole cluster", name)
		}
		core = wrapped
	}
	return core, nil
}

// repeated is a controller that does one thing over and over.
type repeated interface {
	Name() string
	Reconcile(ctx context.Context) (reconciler.Result, error)
}

type soon struct{ repeated }

// Register adds the controller to the manager, as core's own does apart from the limiter.
func (s soon) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(s.Name()).
		WatchesRawSource(singleton.Source()).
		WithOptions(runtimecontroller.Options{RateLimiter: Limiter()}).
		Complete(singleton.AsReconciler(s))
}
