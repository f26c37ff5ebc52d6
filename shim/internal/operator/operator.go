// Package operator makes the process that Karpenter core's controllers run in.
//
// Core has a constructor of its own, which binds its servers to all addresses and knows no signals. This one differs in just
// that: addresses can be given, errors are returned, and a signal ends the process in order, in-flight calls cut and the
// lease released.
package operator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/pprof"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/awslabs/operatorpkg/serrors"
	"github.com/go-logr/zapr"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeoverlay"
	"sigs.k8s.io/karpenter/pkg/events"
	coreoperator "sigs.k8s.io/karpenter/pkg/operator"
	"sigs.k8s.io/karpenter/pkg/operator/logging"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"
	"sigs.k8s.io/karpenter/pkg/state/prediction"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/options"
)

// memoryLimitShare is how much of the container's memory the garbage collector may plan with; the rest is for what it does not
// count.
const memoryLimitShare = 0.9

// Logger returns the process's logger, and makes it that of client-go and controller-runtime.
func Logger(ctx context.Context) context.Context {
	logger := serrors.NewLogger(zapr.NewLogger(logging.NewLogger(ctx, "controller")))
	log.SetLogger(logger)
	klog.SetLogger(logger)
	return log.IntoContext(ctx, logger)
}

// New returns core's operator: a manager with the indexes that core reads by, and what core's controllers share. ctx carries
// core's and the shim's options and the logger; every reconcile gets its values.
func New(ctx context.Context, config *rest.Config) (*coreoperator.Operator, error) {
	core := coreoptions.FromContext(ctx)
	if core.MemoryLimit > 0 {
		debug.SetMemoryLimit(int64(float64(core.MemoryLimit) * memoryLimitShare))
	}
	// Leader election has limits of its own, or a burst of other requests would cost the lease.
	leaderConfig := rest.CopyConfig(config)
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = float32(core.KubeClientQPS), core.KubeClientBurst
	config.UserAgent = fmt.Sprintf("%s/%s", coreoperator.AppName, coreoperator.Version)
	leaderConfig.UserAgent = config.UserAgent + " leader-election"

	kubernetesInterface, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	m, err := manager.New(config, managerOptions(ctx, leaderConfig))
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	if err := addIndexes(ctx, m); err != nil {
		return nil, err
	}
	if err := addChecks(m); err != nil {
		return nil, err
	}
	return &coreoperator.Operator{
		Manager:             m,
		KubernetesInterface: kubernetesInterface,
		EventRecorder:       events.NewRecorder(m.GetEventRecorderFor(coreoperator.AppName)), //nolint:staticcheck // core's recorder takes the older interface
		Clock:               clock.RealClock{},
		InstanceTypeStore:   nodeoverlay.NewInstanceTypeStore(),
		PredictionStore:     prediction.NewStore(),
	}, nil
}

func managerOptions(ctx context.Context, leaderConfig *rest.Config) manager.Options {
	core, shim := coreoptions.FromContext(ctx), options.FromContext(ctx)
	managerOptions := manager.Options{
		Logger:                        logging.IgnoreDebugEvents(log.FromContext(ctx)),
		LeaderElection:                !core.DisableLeaderElection,
		LeaderElectionID:              core.LeaderElectionName,
		LeaderElectionNamespace:       core.LeaderElectionNamespace,
		LeaderElectionResourceLock:    resourcelock.LeasesResourceLock,
		LeaderElectionReleaseOnCancel: true,
		LeaderElectionConfig:          leaderConfig,
		Metrics:                       metricsserver.Options{BindAddress: bindAddress(shim.MetricsBindAddress, core.MetricsPort)},
		HealthProbeBindAddress:        bindAddress(shim.HealthProbeBindAddress, core.HealthProbePort),
		BaseContext:                   func() context.Context { return context.WithoutCancel(ctx) },
		Controller: ctrlconfig.Controller{
			EnableWarmup: ptr.To(!core.DisableLeaderElection && !core.DisableControllerWarmup),
		},
	}
	if core.EnableProfiling {
		managerOptions.Metrics.ExtraHandlers = profiling()
	}
	return managerOptions
}

func bindAddress(address string, port int) string {
	if address != "" {
		return address
	}
	return fmt.Sprintf(":%d", port)
}

func profiling() map[string]http.Handler {
	handlers := map[string]http.Handler{
		"/debug/pprof/":        http.HandlerFunc(pprof.Index),
		"/debug/pprof/cmdline": http.HandlerFunc(pprof.Cmdline),
		"/debug/pprof/profile": http.HandlerFunc(pprof.Profile),
		"/debug/pprof/symbol":  http.HandlerFunc(pprof.Symbol),
		"/debug/pprof/trace":   http.HandlerFunc(pprof.Trace),
	}
	for _, profile := range []string{"allocs", "heap", "block", "goroutine", "threadcreate", "mutex"} {
		handlers["/debug/pprof/"+profile] = pprof.Handler(profile)
	}
	return handlers
}

// Index says by which field objects of a kind are looked up.
type Index struct {
	// Object is of the kind.
	Object client.Object
	// Field is the name that readers give.
	Field string
	// Value returns an object's value.
	Value func(client.Object) string
}

// Values is Value for an indexer.
func (i Index) Values(o client.Object) []string { return []string{i.Value(o)} }

// Indexes are those that core's controllers, and ours, read by.
func Indexes() []Index {
	return []Index{
		{&corev1.Pod{}, "spec.nodeName", func(o client.Object) string { return o.(*corev1.Pod).Spec.NodeName }},
		{&corev1.Node{}, "spec.providerID", func(o client.Object) string { return o.(*corev1.Node).Spec.ProviderID }},
		{&storagev1.VolumeAttachment{}, "spec.nodeName", func(o client.Object) string { return o.(*storagev1.VolumeAttachment).Spec.NodeName }},
		{&karpv1.NodeClaim{}, "status.providerID", func(o client.Object) string { return o.(*karpv1.NodeClaim).Status.ProviderID }},
		{&karpv1.NodeClaim{}, "spec.nodeClassRef.group", func(o client.Object) string { return o.(*karpv1.NodeClaim).Spec.NodeClassRef.Group }},
		{&karpv1.NodeClaim{}, "spec.nodeClassRef.kind", func(o client.Object) string { return o.(*karpv1.NodeClaim).Spec.NodeClassRef.Kind }},
		{&karpv1.NodeClaim{}, "spec.nodeClassRef.name", func(o client.Object) string { return o.(*karpv1.NodeClaim).Spec.NodeClassRef.Name }},
		{&karpv1.NodePool{}, "spec.template.spec.nodeClassRef.group", func(o client.Object) string { return o.(*karpv1.NodePool).Spec.Template.Spec.NodeClassRef.Group }},
		{&karpv1.NodePool{}, "spec.template.spec.nodeClassRef.kind", func(o client.Object) string { return o.(*karpv1.NodePool).Spec.Template.Spec.NodeClassRef.Kind }},
		{&karpv1.NodePool{}, "spec.template.spec.nodeClassRef.name", func(o client.Object) string { return o.(*karpv1.NodePool).Spec.Template.Spec.NodeClassRef.Name }},
	}
}

func addIndexes(ctx context.Context, m manager.Manager) error {
	for _, each := range Indexes() {
		err := m.GetFieldIndexer().IndexField(ctx, each.Object, each.Field, each.Values)
		if meta.IsNoMatchError(err) {
			return fmt.Errorf("the CustomResourceDefinition of %T is not installed: %w", each.Object, err)
		}
		if err != nil {
			return fmt.Errorf("indexing %T by %s: %w", each.Object, each.Field, err)
		}
	}
	return nil
}

func addChecks(m manager.Manager) error {
	synced := func(request *http.Request) error {
		if !m.GetCache().WaitForCacheSync(request.Context()) {
			return errors.New("the caches are not synced")
		}
		return nil
	}
	installed := func(*http.Request) error {
		var missing []string
		for _, object := range []client.Object{&karpv1.NodePool{}, &karpv1.NodeClaim{}, &v1alpha1.ClusterAPINodeClass{}} {
			gvk, err := apiutil.GVKForObject(object, scheme.Scheme)
			if err != nil {
				return err
			}
			if _, err := m.GetRESTMapper().RESTMapping(gvk.GroupKind(), gvk.Version); err != nil {
				missing = append(missing, gvk.Kind)
			}
		}
		if len(missing) > 0 {
			slices.Sort(missing)
			return fmt.Errorf("CustomResourceDefinitions are missing: %s", strings.Join(missing, ", "))
		}
		return nil
	}
	return errors.Join(
		m.AddHealthzCheck("healthz", healthz.Ping),
		m.AddReadyzCheck("readyz", healthz.Ping),
		m.AddReadyzCheck("manager", synced),
		m.AddReadyzCheck("crd", installed),
	)
}

// Signals returns a context with ctx's values that ends with SIGTERM or SIGINT; a second signal ends the process at once.
func Signals(ctx context.Context) context.Context {
	return signalled{Context: controllerruntime.SetupSignalHandler(), values: ctx}
}

type signalled struct {
	context.Context

	values context.Context
}

func (s signalled) Value(key any) any {
	if value := s.values.Value(key); value != nil {
		return value
	}
	return s.Context.Value(key)
}
