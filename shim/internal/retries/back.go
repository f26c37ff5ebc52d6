package retries

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
)

// lifecycle is the name of core's controller that launches NodeClaims, and removes the machines of
// those that are deleted.
const lifecycle = "nodeclaim.lifecycle"

// catalogueDelay is the time in which the shim works through a new view of the node groups.
const catalogueDelay = 2 * time.Second

// Hub is a mirror of objects of the hub.
type Hub interface {
	State() agentclient.State
	StateChanges() (changes <-chan struct{}, stop func())
}

// WhenBack returns core's controllers, with the one named above wrapped so that it tries again as
// soon as the mirror is connected, with each NodeClaim that waits for the hub. By itself it waits
// for up to a minute for each, and then tries ten a second. Until all are launched, core plans no
// Node and disrupts none. kube reads NodeClaims from a cache. WhenBack fails if core has no such
// controller.
func WhenBack(core []controller.Controller, hub Hub, kube client.Reader) ([]controller.Controller, error) {
	wrapped, found := operator.Wrap(core, lifecycle, func(c ofNodeClaims) controller.Controller { return back{c, hub, kube} })
	if !found {
		return nil, fmt.Errorf("core has no controller %q of NodeClaims", lifecycle)
	}
	return wrapped, nil
}

type ofNodeClaims interface {
	controller.Controller
	Name() string
	reconcile.ObjectReconciler[*karpv1.NodeClaim]
}

type back struct {
	ofNodeClaims

	hub  Hub
	kube client.Reader
}

// Register adds core's controller to the manager as core does, and adds a source to it.
func (b back) Register(ctx context.Context, m manager.Manager) error {
	watching := &watching{Manager: m, source: b.waiting()}
	if err := b.ofNodeClaims.Register(ctx, watching); err != nil {
		return err
	}
	if !watching.added {
		return fmt.Errorf("core's controller %q was not seen when it was added to the manager", lifecycle)
	}
	return nil
}

// watching is a manager that adds a source to the controller that is added to it.
type watching struct {
	manager.Manager

	source source.Source
	added  bool
}

// Add implements [manager.Manager].
func (w *watching) Add(runnable manager.Runnable) error {
	if c, is := runnable.(interface {
		Watch(from source.Source) error
	}); is {
		w.added = true
		return errors.Join(c.Watch(w.source), w.Manager.Add(runnable))
	}
	return w.Manager.Add(runnable)
}

// waiting returns a source that enqueues the NodeClaims without a machine, and those that are being
// deleted, whenever the mirror connects: at once, and again when the node groups are known.
func (b back) waiting() source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go func() {
			changes, stop := b.hub.StateChanges()
			defer stop()
			connected := false
			for {
				was := connected
				if connected = b.hub.State().Connected; connected && !was {
					b.enqueue(ctx, queue)
				}
				select {
				case <-ctx.Done():
					return
				case <-changes:
				}
			}
		}()
		return nil
	})
}

func (b back) enqueue(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	nodeClaims := &karpv1.NodeClaimList{}
	if err := b.kube.List(ctx, nodeClaims, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "listing the NodeClaims that wait for the hub")
		return
	}
	var requests []client.ObjectKey
	for i := range nodeClaims.Items {
		if c := &nodeClaims.Items[i]; c.Status.ProviderID == "" || !c.DeletionTimestamp.IsZero() {
			requests = append(requests, client.ObjectKeyFromObject(c))
		}
	}
	add := func() {
		for _, key := range requests {
			queue.Add(reconcile.Request{NamespacedName: key})
		}
	}
	add()
	time.AfterFunc(catalogueDelay, add) // AddAfter would be dropped for those that still are in the queue
}
