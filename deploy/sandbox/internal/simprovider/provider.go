package simprovider

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// Run runs the provider against the hub until the context ends. It serves health probes at
// healthAddress.
func Run(ctx context.Context, hub *rest.Config, healthAddress string) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, simv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	hub = rest.CopyConfig(hub)
	hub.QPS, hub.Burst = 100, 200
	mgr, err := ctrl.NewManager(hub, ctrl.Options{
		Scheme:                 scheme,
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: healthAddress,
		Client:                 client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.Secret{}}}},
	})
	if err != nil {
		return fmt.Errorf("creating the manager: %w", err)
	}
	workloads := newWorkloads(mgr.GetClient())
	for _, setup := range []func(ctrl.Manager) error{
		(&templateReconciler{hub: mgr.GetClient()}).setup,
		(&clusterReconciler{hub: mgr.GetClient()}).setup,
		(&bootstrapReconciler{hub: mgr.GetClient()}).setup,
		(&controlPlaneReconciler{hub: mgr.GetClient(), workloads: workloads, clock: clock.RealClock{}}).setup,
		(&machineReconciler{hub: mgr.GetClient(), workloads: workloads, clock: clock.RealClock{}}).setup,
	} {
		if err := setup(mgr); err != nil {
			return fmt.Errorf("setting a controller up: %w", err)
		}
	}
	if err := mgr.AddReadyzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	return mgr.Start(ctx)
}
