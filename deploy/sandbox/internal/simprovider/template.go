package simprovider

import (
	"context"
	"fmt"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// templateReconciler publishes what a machine of each template offers, as the contract for scaling
// from zero specifies.
type templateReconciler struct {
	hub client.Client
}

func (r *templateReconciler) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).For(&simv1.SimMachineTemplate{}).Complete(r)
}

// Reconcile copies the announced capacity and platform to the template's status.
func (r *templateReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	t := &simv1.SimMachineTemplate{}
	if err := r.hub.Get(ctx, req.NamespacedName, t); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if t.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	patch := client.MergeFrom(t.DeepCopy())
	t.Status.Capacity = t.Spec.Template.Spec.Capacity
	t.Status.NodeInfo = simv1.NodeInfo{}
	if t.Status.Capacity != nil {
		t.Status.NodeInfo = t.Spec.Template.Spec.NodeInfo
	}
	if err := r.hub.Status().Patch(ctx, t, patch); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("announcing the capacity: %w", err))
	}
	return reconcile.Result{}, nil
}
