package simprovider

import (
	"context"
	"fmt"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// BootstrapData returns the content of a bootstrap Secret, which simulated machines ignore.
func BootstrapData() map[string][]byte {
	return map[string][]byte{"value": []byte("simulated machines need no bootstrap data"), "format": []byte("cloud-config")}
}

// bootstrapReconciler creates the bootstrap Secret of each SimBootstrapConfig.
type bootstrapReconciler struct {
	hub client.Client
}

func (r *bootstrapReconciler) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&simv1.SimBootstrapConfig{}).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.configsOf), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(r)
}

// configsOf returns the configurations of a Cluster, which may have been unpaused.
func (r *bootstrapReconciler) configsOf(ctx context.Context, cluster client.Object) []reconcile.Request {
	configs := &simv1.SimBootstrapConfigList{}
	if err := r.hub.List(ctx, configs, client.InNamespace(cluster.GetNamespace()),
		client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.GetName()}); err != nil {
		log.FromContext(ctx).Error(err, "listing the bootstrap configurations of a Cluster")
		return nil
	}
	return lo.Map(configs.Items, func(c simv1.SimBootstrapConfig, _ int) reconcile.Request {
		return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&c)}
	})
}

// Reconcile creates the Secret once a Machine owns the configuration, unless the configuration or
// its Cluster is paused.
func (r *bootstrapReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	c := &simv1.SimBootstrapConfig{}
	if err := r.hub.Get(ctx, req.NamespacedName, c); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	owned := lo.SomeBy(c.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Machine" })
	if c.DeletionTimestamp != nil || !owned {
		return reconcile.Result{}, nil // The Machine controller's write of the owner reference triggers the next reconcile.
	}
	cluster := &clusterv1.Cluster{}
	err := r.hub.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Labels[clusterv1.ClusterNameLabel]}, cluster)
	if err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("reading the Cluster: %w", err))
	}
	if isPaused(cluster, c) {
		return reconcile.Result{}, nil
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.Namespace, Name: c.Name,
			Labels: map[string]string{clusterv1.ClusterNameLabel: c.Labels[clusterv1.ClusterNameLabel]},
		},
		Type: clusterv1.ClusterSecretType,
		Data: BootstrapData(),
	}
	if err := controllerutil.SetControllerReference(c, secret, r.hub.Scheme()); err != nil {
		return reconcile.Result{}, err
	}
	if err := r.hub.Create(ctx, secret); client.IgnoreAlreadyExists(err) != nil {
		return reconcile.Result{}, fmt.Errorf("making the bootstrap data: %w", err)
	}
	patch := client.MergeFrom(c.DeepCopy())
	c.Status.DataSecretName = secret.Name
	c.Status.Initialization.DataSecretCreated = new(true)
	if err := r.hub.Status().Patch(ctx, c, patch); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("writing the status: %w", err))
	}
	return reconcile.Result{}, nil
}
