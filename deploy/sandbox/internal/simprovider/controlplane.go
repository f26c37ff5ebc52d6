package simprovider

import (
	"context"
	"fmt"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// controlPlanePoll is the interval for a control plane that does not answer yet.
const controlPlanePoll = time.Second

// controlPlaneReconciler reports on control planes that it does not run itself.
type controlPlaneReconciler struct {
	hub       client.Client
	workloads clusters
	clock     clock.PassiveClock
}

func (r *controlPlaneReconciler) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).For(&simv1.SimControlPlane{}).Complete(r)
}

// Reconcile reports the control plane as initialized once its API server has returned its version,
// and never reverts that, as the contract requires.
func (r *controlPlaneReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cp := &simv1.SimControlPlane{}
	if err := r.hub.Get(ctx, req.NamespacedName, cp); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if cp.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	cluster, owned := lo.Find(cp.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Cluster" })
	if !owned {
		return reconcile.Result{}, nil // The Cluster controller's write of the owner reference triggers the next reconcile.
	}

	patch := client.MergeFrom(cp.DeepCopy())
	cp.Status.ExternalManagedControlPlane = new(true)
	_, err := r.workloads.serverVersion(ctx, client.ObjectKey{Namespace: cp.Namespace, Name: cluster.Name})
	condition := metav1.Condition{
		Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: clusterv1.AvailableReason,
		ObservedGeneration: cp.Generation,
	}
	result := reconcile.Result{}
	if err != nil {
		condition.Status, condition.Reason, condition.Message = metav1.ConditionFalse, clusterv1.NotAvailableReason, err.Error()
		result.RequeueAfter = controlPlanePoll
	} else {
		cp.Status.Initialization.ControlPlaneInitialized = new(true)
		result.RequeueAfter = r.upgrade(cp)
	}
	meta.SetStatusCondition(&cp.Status.Conditions, condition)
	if err := r.hub.Status().Patch(ctx, cp, patch); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("writing the status: %w", err))
	}
	return result, nil
}

// upgrade sets the reported version of the control plane, and returns how much longer its upgrade
// takes, or 0. An upgrade begins when the provider first observes it, which the condition's time
// records.
func (r *controlPlaneReconciler) upgrade(cp *simv1.SimControlPlane) time.Duration {
	rollingOut := metav1.Condition{
		Type: clusterv1.RollingOutCondition, Status: metav1.ConditionFalse, Reason: clusterv1.NotRollingOutReason,
		ObservedGeneration: cp.Generation, LastTransitionTime: metav1.NewTime(r.clock.Now()),
	}
	var left time.Duration
	if had := cp.Status.Version; had != "" && had != cp.Spec.Version {
		since := rollingOut.LastTransitionTime.Time
		if c := meta.FindStatusCondition(cp.Status.Conditions, rollingOut.Type); c != nil && c.Status == metav1.ConditionTrue {
			since = c.LastTransitionTime.Time
		}
		if left = cp.Spec.UpgradeDelay.Duration - r.clock.Since(since); left > 0 {
			rollingOut.Status, rollingOut.Reason = metav1.ConditionTrue, clusterv1.RollingOutReason
			rollingOut.Message = fmt.Sprintf("Upgrading from %s to %s", had, cp.Spec.Version)
		}
	}
	if left <= 0 {
		cp.Status.Version = cp.Spec.Version
	}
	meta.SetStatusCondition(&cp.Status.Conditions, rollingOut)
	return max(left, 0)
}
