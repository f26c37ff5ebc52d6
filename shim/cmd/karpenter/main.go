// Command karpenter runs Karpenter core in a workload cluster, with machines from an agent in the
// hub.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	"github.com/awslabs/operatorpkg/status"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/metrics"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/overlay"
	"sigs.k8s.io/karpenter/pkg/controllers"
	"sigs.k8s.io/karpenter/pkg/controllers/node/health"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeoverlay"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	coreoperator "sigs.k8s.io/karpenter/pkg/operator"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/adoption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/claimsync"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/failedmachine"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/floor"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/latenode"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/nodeclass"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/nodepools"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/overlays"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/providerid"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/disruptionqueue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/driftcheck"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/identity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubeconfig"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/options"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/outage"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/resumption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/retries"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/staticpool"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

const versionFlag = "version"

func main() {
	if len(os.Args) > 1 && os.Args[1] == planAdoption {
		if err := plan(operator.Signals(context.Background()), os.Args[2:], os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "karpenter %s: %v\n", planAdoption, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "metrics-docs" { // for make generate-docs
		if err := describeMetrics(os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "karpenter metrics-docs: %v\n", err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 2 && strings.TrimLeft(os.Args[1], "-") == versionFlag { // no other option has to be valid for it
		fmt.Println(version())
		return
	}
	ctx, err := parse(context.Background(), os.Args[1:], func(flags *flag.FlagSet) {
		flags.Bool(versionFlag, false, "Print the versions of the shim and of Karpenter, and exit. No other option may be given.")
		flags.Usage = func() {
			fmt.Fprintf(flags.Output(), `Karpenter for Cluster API, which runs in a workload cluster and calls the agent in the management cluster.

Usage:
  karpenter [flags]
  karpenter [command]

Available Commands:
  %s  Show which existing machines Karpenter would adopt

Flags:
`, planAdoption)
			flags.PrintDefaults()
		}
	})
	if err != nil {
		fmt.Fprintf(os.Stderr, "karpenter: %v\n", err)
		os.Exit(2)
	}
	ctx = operator.Signals(operator.Logger(ctx))
	if err := run(ctx); err != nil {
		log.FromContext(ctx).Error(err, "stopping because of an error")
		os.Exit(1)
	}
}

// version returns the release, and the version of Karpenter core that is built in.
func version() string {
	core := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if module.Path == "sigs.k8s.io/karpenter" {
				core = module.Version
			}
		}
	}
	return fmt.Sprintf("%s with Karpenter %s", coreoperator.Version, core)
}

// parse parses core's and the shim's flags like core does, but returns errors instead of panicking.
// more adds further flags.
func parse(ctx context.Context, args []string, more ...func(*flag.FlagSet)) (context.Context, error) {
	flags := &coreoptions.FlagSet{FlagSet: flag.NewFlagSet("karpenter", flag.ContinueOnError)}
	for _, injectable := range coreoptions.Injectables {
		injectable.AddFlags(flags)
	}
	for _, add := range more {
		add(flags.FlagSet)
	}
	for _, injectable := range coreoptions.Injectables {
		if err := injectable.Parse(flags, args...); err != nil {
			return nil, err
		}
		ctx = injectable.ToContext(ctx) //nolint:fatcontext // one value for each injectable, of which there are two
	}
	return ctx, nil
}

func run(ctx context.Context) error {
	opts := options.FromContext(ctx)
	logger := log.FromContext(ctx)
	for _, warning := range opts.Deprecated() {
		logger.Info("a deprecated setting is ignored", "warning", warning)
	}

	setUpCore(opts)
	cluster := &agentv1alpha1.ClusterRef{Namespace: opts.ClusterNamespace, Name: opts.ClusterName}
	held := identity.NewHeld(opts.AgentBootstrapSecret, cluster)
	traces, err := startTracing(ctx)
	if err != nil {
		return err
	}
	defer traces.Shutdown()
	agent, err := agentclient.New(traced(agentOptions(ctx, opts, held), traces.Provider()))
	if err != nil {
		return fmt.Errorf("making the agent's client: %w", err)
	}
	defer func() { _ = agent.Close() }()
	if err := connectivity.RegisterCertificates(crmetrics.Registry, agent.Certificates); err != nil {
		return err
	}
	nodeGroups := agent.MirrorNodeGroups(cluster)
	claims := agent.MirrorClaims(cluster, v1alpha1.Holder)

	config, err := workloadCluster(ctx)
	if err != nil {
		return err
	}
	op, err := operator.New(ctx, config)
	if err != nil {
		return err
	}
	catalogue := catalogue.New(op.Clock, nodeGroups, op.GetClient(), opts.UnavailableOfferingTTL)
	gates := coreoptions.FromContext(ctx).FeatureGates
	catalogue.OfferFullReservations = gates.ReservedCapacity && (gates.TerminateFirstDrift || gates.TerminateFirstRepair)
	if err := catalogue.Watch(ctx, op.GetCache()); err != nil {
		return err
	}
	mirrors := map[string]connectivity.Mirror{"nodegroups": nodeGroups, "claims": claims}
	if err := connectivity.RegisterMirrors(crmetrics.Registry, mirrors); err != nil {
		return err
	}
	connection := connectivity.New(mirrors)
	compatibility := connectivity.NewCompatibilityCheck(connectivity.CompatibilityConfig{
		Status: agent.Status, Connection: nodeGroups, Version: coreoperator.Version, Timeout: opts.AgentTimeout, Clock: clock.RealClock{},
	})
	runnables := []manager.Runnable{everywhere(nodeGroups.Run), everywhere(claims.Run), catalogue, connection, compatibility}
	certificate, keepers := clientCertificate(ctx, opts, op, agent, held, cluster)
	for _, runnable := range append(runnables, keepers...) {
		if err := op.Add(runnable); err != nil {
			return fmt.Errorf("adding to the manager: %w", err)
		}
	}

	var ( // which need the provider
		adopting  *adoption.Controller
		claimSync *claimsync.Controller
	)
	repairs := coreoptions.FromContext(ctx).FeatureGates.NodeRepair && opts.NodeRepairSkipRemediation
	static := staticpool.New(op.GetClient(), op.EventRecorder, opts.UnavailableOfferingTTL)
	finder := unclaimed.New(op.Clock, op.GetClient(), agent, claims, cluster, opts.AgentTimeout)
	provider := cloudprovider.New(cloudprovider.Config{
		Cluster:   cluster,
		Kube:      op.GetClient(),
		Client:    agent,
		Claims:    claims,
		Catalogue: catalogue,
		Overlays:  op.InstanceTypeStore,
		Unclaimed: finder,
		Static:    static,
		Settled:   func() bool { return adopting.Settled() },
		Refused: func() error {
			_, err := claimSync.Refused()
			return err
		},
		Recorder: op.EventRecorder,
		Timeout:  opts.AgentTimeout,
		Clock:    op.Clock,

		RepairAfter:    opts.NodeRepairAfter,
		Repairs:        repairs,
		TracerProvider: traces.Provider(),
	})
	undecorated := metrics.Decorate(provider)
	decorated := overlay.Decorate(undecorated, op.GetClient(), op.InstanceTypeStore)
	repairPolicies, err := health.NewRepairPolicyMatcher(ctx, decorated)
	if err != nil {
		return fmt.Errorf("compiling the repair policies: %w", err)
	}
	clusterState := state.NewCluster(op.Clock, op.GetClient(), decorated, state.WithRepairPolicyMatcher(repairPolicies))
	adopting = adoption.New(adoption.Config{
		Kube: op.GetClient(), CloudProvider: decorated, Provider: provider, Claims: claims, Unclaimed: finder, Agent: agent, Cluster: cluster,
		Recorder: op.EventRecorder, Unmark: clusterState.UnmarkForDeletion,
	})
	failed := failedmachine.New(failedmachine.Config{
		Kube: op.GetClient(), Live: op.GetAPIReader(), CloudProvider: decorated, Claims: claims, NodeGroups: nodeGroups, Agent: agent.Claims,
		Cluster: cluster, Recorder: op.EventRecorder, Unclaimed: finder, Timeout: opts.AgentTimeout, Clock: op.Clock,
	})
	core := controllers.NewControllers(
		ctx, op.Manager, op.Clock, registration.PlanningClient(failed.Client(static.Client(outage.Client(op.GetClient(), nodeGroups, op.Clock)))),
		registration.CoreRecorder(op.EventRecorder, nodePoolExists(ctx, op.GetClient())),
		decorated, undecorated, clusterState,
		op.InstanceTypeStore, op.PredictionStore, controllers.WithRegistrationHook(registration.NewLabels(op.GetClient(), catalogue)),
	)
	if core, err = retries.Soon(core); err != nil {
		return fmt.Errorf("having core try again soon: %w", err)
	}
	if core, err = retries.WhenBack(core, claims, op.GetClient()); err != nil {
		return fmt.Errorf("having core try again when the hub is back: %w", err)
	}
	if core, err = outage.Patient(core, decorated, op.EventRecorder, op.Clock); err != nil {
		return fmt.Errorf("having core wait for the hub: %w", err)
	}
	if core, err = driftcheck.Wrap(core, decorated, claims); err != nil {
		return fmt.Errorf("choosing when core looks for drift: %w", err)
	}
	op.WithControllers(ctx, core...)
	finisher, err := disruptionqueue.New(op.Clock, op.GetClient(), core)
	if err != nil {
		return fmt.Errorf("finishing the disruptions of core: %w", err)
	}
	if err := op.Add(finisher); err != nil {
		return fmt.Errorf("adding to the manager: %w", err)
	}
	resumed, err := resumption.New(op.GetClient(), decorated, provider.Ready, core)
	if err != nil {
		return fmt.Errorf("resuming the work of core: %w", err)
	}
	if err := op.Add(resumed); err != nil {
		return fmt.Errorf("adding to the manager: %w", err)
	}
	claimSync = claimsync.New(claimsync.Config{
		Live: op.GetAPIReader(), CloudProvider: decorated, Agent: agent.Claims, Cluster: cluster, Recorder: op.EventRecorder,
		Reconnected: connection.Reconnected(), Repairs: repairs, Interval: opts.ClaimSyncInterval, Timeout: opts.AgentTimeout, Clock: op.Clock,
	})
	op.WithControllers(ctx,
		claimSync,
		adopting,
		adoption.NewNodes(adoption.NodesConfig{
			Kube: op.GetClient(), Provider: provider, Unclaimed: finder, Catalogue: catalogue, Agent: agent, Cluster: cluster,
			Recorder: op.EventRecorder, Settled: adopting.Settled, Clock: op.Clock,
		}),
		providerid.New(providerid.Config{
			Kube: op.GetClient(), Live: op.GetAPIReader(), CloudProvider: decorated, Claims: claims, Cluster: cluster, Recorder: op.EventRecorder,
		}),
		failed,
		nodeclass.New(nodeclass.Config{
			Kube: op.GetClient(), Catalogue: catalogue, Connection: nodeGroups, Certificate: certificate, Compatibility: compatibility,
			LiveSets: claimSync, Cluster: cluster, Recorder: op.EventRecorder, Grace: opts.HubUnreachableGracePeriod, Clock: op.Clock,
		}),
		floor.New(op.Clock, op.GetClient(), finder, claimSync.Soon, op.EventRecorder),
		latenode.New(op.Clock, decorated, clusterState),
	)
	if coreoptions.FromContext(ctx).FeatureGates.NodeOverlay {
		applying := nodeoverlay.NewController(op.Clock, op.GetClient(), undecorated, op.InstanceTypeStore, clusterState)
		op.WithControllers(ctx, overlays.New(op.Clock, op.GetClient(), undecorated, catalogue, applying))
	}
	if opts.PublishedNodePools {
		published := agent.MirrorPublishedObjects(cluster)
		if err := op.Add(everywhere(published.Run)); err != nil {
			return fmt.Errorf("adding to the manager: %w", err)
		}
		op.WithControllers(ctx, nodepools.New(nodepools.Config{
			Kube: op.GetClient(), Live: op.GetAPIReader(), Published: published, Agent: agent.NodePools, Cluster: cluster, InstanceTypes: decorated,
			Recorder: op.EventRecorder, Timeout: opts.AgentTimeout, Clock: op.Clock,
		}))
	}
	if !coreoptions.FromContext(ctx).DisableClusterStateObservability { // as core does for its own kinds
		recorder := op.GetEventRecorderFor(coreoperator.AppName) //nolint:staticcheck // operatorpkg takes the older interface
		op.WithControllers(ctx, status.NewController[*v1alpha1.ClusterAPINodeClass](op.GetClient(), recorder, status.EmitDeprecatedMetrics))
	}

	logger.Info("starting", "version", coreoperator.Version, "cluster", cluster.GetNamespace()+"/"+cluster.GetName(), "agent", opts.AgentAddress)
	if err := op.Manager.Start(ctx); err != nil {
		return fmt.Errorf("running: %w", err)
	}
	logger.Info("ended")
	return nil
}

// setUpCore sets globals that core's controllers read while they run. It must be called before any
// of them exists.
func setUpCore(opts *options.Options) {
	lifecycle.LaunchTimeout = opts.LaunchTimeout
	karpv1.WellKnownLabels.Insert(opts.NodeLabelKeys()...)
	instancetype.Reservations()
	registration.ExpectTaints()
}

// workloadCluster returns the configuration for the workload cluster: from the file named by
// KUBECONFIG, which is followed until ctx is done, or from the pod that this process runs in.
func workloadCluster(ctx context.Context) (*rest.Config, error) {
	path := os.Getenv(clientcmd.RecommendedConfigPathEnvVar)
	if path == "" {
		config, err := controllerruntime.GetConfig()
		if err != nil {
			return nil, fmt.Errorf("finding the spoke: %w", err)
		}
		return config, nil
	}
	file, err := kubeconfig.Open(path, clock.RealClock{})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", clientcmd.RecommendedConfigPathEnvVar, err)
	}
	go file.Follow(ctx)
	return file.Config(), nil
}

// agentOptions returns the options for the agent's client. The client certificate comes from
// source, or from files if they are set.
func agentOptions(ctx context.Context, opts *options.Options, source certificates.Source) agentclient.Options {
	var mutual *agentclient.TLS
	switch {
	case opts.AgentIdentitySecret.Name != "":
		mutual = &agentclient.TLS{Source: source, ServerName: opts.AgentServerName}
	case opts.AgentTLSCertFile != "":
		mutual = &agentclient.TLS{
			CertFile:   opts.AgentTLSCertFile,
			KeyFile:    opts.AgentTLSKeyFile,
			CAFile:     opts.AgentCAFile,
			ServerName: opts.AgentServerName,
		}
	}
	if mutual != nil {
		mutual.Cluster = &agentv1alpha1.ClusterRef{Namespace: opts.ClusterNamespace, Name: opts.ClusterName}
	}
	return agentclient.Options{
		Address:           opts.AgentAddress,
		TLS:               mutual,
		PlaintextLoopback: opts.AgentPlaintextLoopback,
		Timeout:           opts.AgentTimeout,
		UserAgent:         fmt.Sprintf("%s/%s", coreoperator.AppName, coreoperator.Version),
		Logger:            log.FromContext(ctx).WithName("agent"),
	}
}

func startTracing(ctx context.Context) (*tracing.Tracing, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "" // OTEL_RESOURCE_ATTRIBUTES can name the instance
	}
	return tracing.FromEnvironment(ctx, tracing.Config{
		Service: "karpenter-capi-shim", Version: coreoperator.Version, Instance: host, Log: log.FromContext(ctx).WithName("tracing"),
	})
}

// traced makes the client propagate traces, unless provider is nil.
func traced(options agentclient.Options, provider trace.TracerProvider) agentclient.Options {
	if provider != nil {
		options.DialOptions = append(options.DialOptions, grpc.WithStatsHandler(tracing.ClientHandler(provider)))
		options.TraceID = tracing.ID
	}
	return options
}

// clientCertificate returns the monitor of the client certificate's expiry, and all runnables that
// maintain the certificate, including that monitor.
func clientCertificate(
	ctx context.Context, opts *options.Options, op *coreoperator.Operator, agent *agentclient.Client, held *certificates.Held,
	cluster *agentv1alpha1.ClusterRef,
) (*connectivity.Expiring, []manager.Runnable) {
	announce := func(ctx context.Context, reason, message string) {
		nodeclass.Announce(ctx, op.GetClient(), op.EventRecorder, reason, message)
	}
	expiring := &connectivity.Expiring{Stats: agent.Certificates, Refused: agent.CertificateRefused, Announce: announce, Clock: clock.RealClock{}}
	if opts.AgentIdentitySecret.Name == "" {
		expiring.Remedy = fmt.Sprintf("Replace %s and %s.", opts.AgentTLSCertFile, opts.AgentTLSKeyFile)
		return expiring, []manager.Runnable{expiring}
	}
	expiring.Remedy = fmt.Sprintf("The leader's log has the reason. If the agent refuses it, run `capi-agent onboard` for the Cluster %s/%s again.",
		cluster.GetNamespace(), cluster.GetName())
	keeper := newKeeper(ctx, opts, op.GetAPIReader(), op.GetClient(), agent, held, cluster, announce)
	return expiring, []manager.Runnable{keeper.Follow(), keeper, expiring}
}

func newKeeper(
	ctx context.Context, opts *options.Options, reader client.Reader, writer client.Writer, agent *agentclient.Client, held *certificates.Held,
	cluster *agentv1alpha1.ClusterRef, announce func(ctx context.Context, reason, message string),
) *identity.Keeper {
	return identity.New(identity.Config{
		Reader:    reader,
		Writer:    writer,
		Identity:  opts.AgentIdentitySecret,
		Bootstrap: opts.AgentBootstrapSecret,
		Cluster:   cluster,
		Held:      held,
		Agent:     agent.Issuer,
		Connect: func(bootstrap certificates.Source) (*agentclient.Client, error) {
			return agentclient.New(agentOptions(ctx, opts, bootstrap))
		},
		Announce: announce,
		Clock:    clock.RealClock{},
	})
}

// everywhere is a runnable for every replica, not only the leader, so that a new leader has all
// data at once.
type everywhere func(context.Context) error

func (f everywhere) Start(ctx context.Context) error { return f(ctx) }

func (everywhere) NeedLeaderElection() bool { return false }

// nodePoolExists reads the cache. A NodePool that cannot be read counts as one that exists.
func nodePoolExists(ctx context.Context, kube client.Reader) func(name string) bool {
	return func(name string) bool {
		return !apierrors.IsNotFound(kube.Get(ctx, client.ObjectKey{Name: name}, &karpv1.NodePool{}))
	}
}
