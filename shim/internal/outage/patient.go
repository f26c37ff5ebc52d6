package outage

import (
	"context"
	"fmt"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
)

// reportAfter is how long an expired NodeClaim waits before that is reported: most outages are
// shorter.
const reportAfter = 10 * time.Minute

// Patient returns core's controllers, with the one that deletes expired NodeClaims wrapped: where
// [Client] refuses a deletion, it tries again after half a minute, and logs no error. By itself it
// would, after an outage of an hour, wait for another quarter of an hour. A NodeClaim that has
// waited for reportAfter gets an event with the reason. Patient fails if core has no such
// controller.
func Patient(
	core []controller.Controller, cloudProvider cloudprovider.CloudProvider, recorder events.Recorder, clk clock.PassiveClock,
) ([]controller.Controller, error) {
	wrapped, found := operator.Wrap(core, expiring, func(c ofNodeClaims) controller.Controller {
		return patient{c, cloudProvider, recorder, clk, clk.Now()}
	})
	if !found {
		return nil, fmt.Errorf("core has no controller %q of NodeClaims", expiring)
	}
	return wrapped, nil
}

type ofNodeClaims interface {
	Name() string
	reconcile.ObjectReconciler[*karpv1.NodeClaim]
}

type patient struct {
	ofNodeClaims

	cloudProvider cloudprovider.CloudProvider
	recorder      events.Recorder
	clock         clock.PassiveClock
	started       time.Time
}

// Reconcile implements [reconcile.ObjectReconciler].
func (p patient) Reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	result, err := p.ofNodeClaims.Reconcile(ctx, nodeClaim)
	if seconds, is := apierrors.SuggestsClientDelay(err); is && seconds > 0 {
		p.report(nodeClaim, err)
		return reconcile.Result{RequeueAfter: time.Duration(seconds) * time.Second}, nil
	}
	return result, err
}

// report publishes on a NodeClaim why it is not deleted, if it would have been for reportAfter.
// Core deletes a NodeClaim when it expires, or when this process begins.
func (p patient) report(nodeClaim *karpv1.NodeClaim, why error) {
	since := nodeClaim.CreationTimestamp.Add(lo.FromPtr(nodeClaim.Spec.ExpireAfter.Duration))
	if p.started.After(since) {
		since = p.started
	}
	if p.clock.Since(since) < reportAfter {
		return
	}
	p.recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "ExpirationPending",
		Message:        lo.Substring("It has expired. "+why.Error(), 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID)},
		DedupeTimeout:  reportAfter,
	})
}

// Register adds the controller to the manager, as core's own does.
func (p patient) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(p.Name()).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(p.cloudProvider))).
		Complete(reconcile.AsReconciler(m.GetClient(), p))
}
