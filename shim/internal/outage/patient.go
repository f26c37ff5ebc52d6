package outage

import (
	"context"
	"fmt"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
)

// Patient returns core's controllers, with the one that deletes expired NodeClaims wrapped: where [Client] refuses
// a deletion, it tries again after half a minute, and logs no error. By itself it would, after an outage of an hour,
// wait for another quarter of an hour. Patient fails if core has no such controller.
func Patient(core []controller.Controller, cloudProvider cloudprovider.CloudProvider) ([]controller.Controller, error) {
	wrapped, found := operator.Wrap(core, expiring, func(c ofNodeClaims) controller.Controller { return patient{c, cloudProvider} })
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
}

// Reconcile implements [reconcile.ObjectReconciler].
func (p patient) Reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	result, err := p.ofNodeClaims.Reconcile(ctx, nodeClaim)
	if seconds, is := apierrors.SuggestsClientDelay(err); is && seconds > 0 {
		return reconcile.Result{RequeueAfter: time.Duration(seconds) * time.Second}, nil
	}
	return result, err
}

// Register adds the controller to the manager, as core's own does.
func (p patient) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(p.Name()).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(p.cloudProvider))).
		Complete(reconcile.AsReconciler(m.GetClient(), p))
}
