// Package operator sets up the process that runs Karpenter core's controllers.
//
// Core's own constructor binds its servers to all addresses and does not handle signals. This one
// differs only in that addresses are configurable, errors are returned, and a signal ends the
// process in order: calls in flight are canceled and the lease is released.
package operator

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/pprof"
	"path/filepath"
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
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
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

// memoryLimitShare is the share of the container's memory that the garbage collector may use. The
// rest is for memory that it does not account for.
const memoryLimitShare = 0.9

// Logger returns a context with the process's logger, and also sets that logger for client-go and
// controller-runtime.
func Logger(ctx context.Context) context.Context {
	logger := serrors.NewLogger(zapr.NewLogger(logging.NewLogger(ctx, "controller")))
	log.SetLogger(logger)
	klog.SetLogger(logger)
	return log.IntoContext(ctx, logger)
}

// New returns core's operator: a manager with the indexes that core requires, and the objects that
// core's controllers share. ctx carries core's and the shim's options and the logger; every
// reconcile gets its values.
func New(ctx context.Context, config *rest.Config) (*coreoperator.Operator, error) {
	core := coreoptions.FromContext(ctx)
	if core.MemoryLimit > 0 {
		debug.SetMemoryLimit(int64(float64(core.MemoryLimit) * memoryLimitShare))
	}
	// Leader election has its own rate limit, so that a burst of other requests does not cost the
	// lease.
	leaderConfig := rest.CopyConfig(config)
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = float32(core.KubeClientQPS), core.KubeClientBurst
	config.UserAgent = fmt.Sprintf("%s/%s", coreoperator.AppName, coreoperator.Version)
	leaderConfig.UserAgent = config.UserAgent + " leader-election"

	kubernetesInterface, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	managerOptions, err := managerOptions(ctx, leaderConfig)
	if err != nil {
		return nil, err
	}
	m, err := manager.New(config, managerOptions)
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	if err := addIndexes(ctx, m); err != nil {
		return nil, err
	}
	if err := addChecks(m); err != nil {
		return nil, err
	}
	recorder := m.GetEventRecorderFor(coreoperator.AppName) //nolint:staticcheck // core's recorder takes the older interface
	return &coreoperator.Operator{
		Manager:             m,
		KubernetesInterface: kubernetesInterface,
		EventRecorder:       events.NewRecorder(recorder),
		Clock:               clock.RealClock{},
		InstanceTypeStore:   nodeoverlay.NewInstanceTypeStore(),
		PredictionStore:     prediction.NewStore(),
	}, nil
}

func managerOptions(ctx context.Context, leaderConfig *rest.Config) (manager.Options, error) {
	core := coreoptions.FromContext(ctx)
	metrics, err := metricsOptions(ctx)
	return manager.Options{
		Logger:                        logging.IgnoreDebugEvents(log.FromContext(ctx)),
		LeaderElection:                !core.DisableLeaderElection,
		LeaderElectionID:              core.LeaderElectionName,
		LeaderElectionNamespace:       core.LeaderElectionNamespace,
		LeaderElectionResourceLock:    resourcelock.LeasesResourceLock,
		LeaderElectionReleaseOnCancel: true,
		LeaderElectionConfig:          leaderConfig,
		Metrics:                       metrics,
		HealthProbeBindAddress:        bindAddress(options.FromContext(ctx).HealthProbeBindAddress, core.HealthProbePort),
		BaseContext:                   func() context.Context { return context.WithoutCancel(ctx) },
		Controller: ctrlconfig.Controller{
			EnableWarmup: new(!core.DisableLeaderElection && !core.DisableControllerWarmup),
			// The priority queue can deadlock on shutdown, and the lease would not be released:
			// controller-runtime issue 3538, in all releases for this Kubernetes version.
			UsePriorityQueue: new(false),
		},
	}, err
}

// Rate limit, per second and burst, for authenticating and authorizing readers of metrics: anyone
// who can connect causes such requests.
const (
	reviewQPS   = 5
	reviewBurst = 10
)

// metricsOptions returns the options of the metrics server, or an error if the configured
// certificate cannot be used.
func metricsOptions(ctx context.Context) (metricsserver.Options, error) {
	core, shim := coreoptions.FromContext(ctx), options.FromContext(ctx)
	served := metricsserver.Options{BindAddress: bindAddress(shim.MetricsBindAddress, core.MetricsPort)}
	if core.EnableProfiling {
		served.ExtraHandlers = profiling()
	}
	if !shim.MetricsSecure || served.BindAddress == "0" {
		return served, nil
	}
	served.SecureServing = true
	served.FilterProvider = func(config *rest.Config, client *http.Client) (metricsserver.Filter, error) {
		config = rest.CopyConfig(config)
		config.QPS, config.Burst = reviewQPS, reviewBurst
		return filters.WithAuthenticationAndAuthorization(config, client)
	}
	served.TLSOpts = []func(*tls.Config){func(config *tls.Config) { config.MinVersion = tls.VersionTLS13 }}
	if shim.MetricsTLSCertFile == "" {
		return served, nil // controller-runtime generates a certificate
	}
	// If the files were missing, controller-runtime would also generate one.
	if _, err := tls.LoadX509KeyPair(shim.MetricsTLSCertFile, shim.MetricsTLSKeyFile); err != nil {
		return served, fmt.Errorf("--metrics-tls-cert-file: %w", err)
	}
	certFile, err := filepath.Abs(shim.MetricsTLSCertFile)
	if err != nil {
		return served, fmt.Errorf("--metrics-tls-cert-file: %w", err)
	}
	keyFile, err := filepath.Abs(shim.MetricsTLSKeyFile)
	if err != nil {
		return served, fmt.Errorf("--metrics-tls-key-file: %w", err)
	}
	// controller-runtime joins both names to one folder, but the two files may be in different
	// folders.
	served.CertDir, served.CertName, served.KeyName = "/", certFile, keyFile
	return served, nil
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

// Index describes a field by which objects of a kind are looked up.
type Index struct {
	// Object determines the kind.
	Object client.Object
	// Field is the name that readers pass.
	Field string
	// Values returns an object's values of the field.
	Values client.IndexerFunc
}

func index[T client.Object](object T, field string, value func(T) string) Index {
	return Index{Object: object, Field: field, Values: func(o client.Object) []string {
		if typed, ok := o.(T); ok {
			return []string{value(typed)}
		}
		return nil
	}}
}

// Indexes returns the indexes that core's controllers and the shim's require.
func Indexes() []Index {
	nodeClaim, nodePool := &karpv1.NodeClaim{}, &karpv1.NodePool{}
	claimed := func(nc *karpv1.NodeClaim) *karpv1.NodeClassReference { return nc.Spec.NodeClassRef }
	pooled := func(np *karpv1.NodePool) *karpv1.NodeClassReference { return np.Spec.Template.Spec.NodeClassRef }
	return []Index{
		index(&corev1.Pod{}, "spec.nodeName", func(p *corev1.Pod) string { return p.Spec.NodeName }),
		index(&corev1.Node{}, "spec.providerID", func(n *corev1.Node) string { return n.Spec.ProviderID }),
		index(&storagev1.VolumeAttachment{}, "spec.nodeName", func(a *storagev1.VolumeAttachment) string { return a.Spec.NodeName }),
		index(nodeClaim, "status.providerID", func(nc *karpv1.NodeClaim) string { return nc.Status.ProviderID }),
		index(nodeClaim, "spec.nodeClassRef.group", func(nc *karpv1.NodeClaim) string { return claimed(nc).Group }),
		index(nodeClaim, "spec.nodeClassRef.kind", func(nc *karpv1.NodeClaim) string { return claimed(nc).Kind }),
		index(nodeClaim, "spec.nodeClassRef.name", func(nc *karpv1.NodeClaim) string { return claimed(nc).Name }),
		index(nodePool, "spec.template.spec.nodeClassRef.group", func(np *karpv1.NodePool) string { return pooled(np).Group }),
		index(nodePool, "spec.template.spec.nodeClassRef.kind", func(np *karpv1.NodePool) string { return pooled(np).Kind }),
		index(nodePool, "spec.template.spec.nodeClassRef.name", func(np *karpv1.NodePool) string { return pooled(np).Name }),
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

// Signals returns a child of ctx that SIGTERM or SIGINT cancels. A second signal ends the process
// at once.
func Signals(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(controllerruntime.SetupSignalHandler(), cancel)
	return ctx
}
