package simprovider

import (
	"context"
	"fmt"

	"github.com/samber/lo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// clusterReconciler marks a Cluster as provisioned. Simulated Clusters have no shared
// infrastructure.
type clusterReconciler struct {
	hub client.Client
}

func (r *clusterReconciler) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).For(&simv1.SimCluster{}).Complete(r)
}

// Reconcile reports the infrastructure as provisioned once a Cluster owns it, and never reverts
// that, as the contract requires.
func (r *clusterReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	c := &simv1.SimCluster{}
	if err := r.hub.Get(ctx, req.NamespacedName, c); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	owned := lo.SomeBy(c.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Cluster" })
	if c.DeletionTimestamp != nil || !owned {
		return reconcile.Result{}, nil // The Cluster controller's write of the owner reference triggers the next reconcile.
	}
	patch := client.MergeFrom(c.DeepCopy())
	c.Status.Initialization.Provisioned = new(true)
	if err := r.hub.Status().Patch(ctx, c, patch); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("writing the status: %w", err))
	}
	return reconcile.Result{}, nil
}
