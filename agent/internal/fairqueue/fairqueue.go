// Package fairqueue provides the order in which owners take turns, however much of each is waiting,
// and queues of controllers whose workers Clusters share in that order. client-go's queues know no
// owners: their order is that of arrival, or of a priority.
package fairqueue

import (
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

// Owner returns the Cluster that a request is about. It is called under the queue's lock, so it
// must return quickly, and must not use the queue. If it does not know the Cluster, it returns any
// fallback that is the same for similar requests.
type Owner func(request reconcile.Request) types.NamespacedName

// Constructor is the type of NewQueue in a controller's options.
type Constructor func(
	controller string, limiter workqueue.TypedRateLimiter[reconcile.Request],
) workqueue.TypedRateLimitingInterface[reconcile.Request]

// New returns a constructor of queues. They behave like a controller's queue without priorities,
// except that owners take turns. The requests of one owner are handed out in the order of their
// arrival.
func New(of Owner) Constructor {
	return func(controller string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
		ready := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[reconcile.Request]{
			Name: controller, Queue: &turns{of: of},
		})
		return workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[reconcile.Request]{
			Name: controller,
			DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[reconcile.Request]{
				Name: controller, Queue: ready,
			}),
		})
	}
}

// turns holds the requests that are ready. It implements [workqueue.Queue]. Its methods are called
// with the queue's lock held.
type turns struct {
	Turns[types.NamespacedName, reconcile.Request]

	of Owner
}

// Touch implements [workqueue.Queue]. A request that is added again keeps its place.
func (*turns) Touch(reconcile.Request) {}

// Push implements [workqueue.Queue].
func (t *turns) Push(request reconcile.Request) {
	t.Turns.Push(ownerOf(t.of, request), request)
}

// ownerOf survives a panic. The queue would be left with a request that it neither hands out nor
// accepts again.
func ownerOf(of Owner, request reconcile.Request) types.NamespacedName {
	owner := types.NamespacedName{Namespace: request.Namespace}
	_ = panics.Confined(log.Log, panics.Objects, "a request waits its turn as if its Cluster were unknown because of a bug in the agent", func() error {
		owner = of(request)
		return nil
	}, "object", request.String())
	return owner
}
