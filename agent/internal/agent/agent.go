// Package agent assembles the agent from the caches, the views, the claim engine and the server.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/autoscaler"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/configmap"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/contact"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eventlimit"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fleet"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/infrastructure"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/machineview"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroupview"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodepools"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricelist"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/storage"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/version"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
)

// Config configures an [Agent].
type Config struct {
	// Options are the settings, which must be valid. REQUIRED.
	Options *options.Options
	// Hub is the client configuration for the hub's API server. REQUIRED.
	Hub *rest.Config
	// Policy returns the policy in force. Nil means the policy that the options name, if any.
	Policy func() *authz.Policy
	// Log receives the agent's log. Zero discards it.
	Log logr.Logger
	// Mapper maps kinds to resources. Nil means what the hub says, which [New] then asks.
	Mapper meta.RESTMapper
	// Registerer registers the metrics. Nil registers none.
	Registerer prometheus.Registerer
	// TracerProvider records calls and their requests to the hub. Nil records nothing.
	TracerProvider trace.TracerProvider
	// Clock provides the time for the claim engine. Nil means the system clock, corrected by the
	// API server's.
	Clock clock.Clock
	// HubPatience is how long probes of the hub's API server may remain unanswered before calls are
	// rejected. Zero means [HubPatience].
	HubPatience time.Duration
	// SpokeWriteTimeout limits how long a sync waits for the write of its Spoke. Zero means
	// [spokes.WriteTimeout].
	SpokeWriteTimeout time.Duration
}

// Agent is the whole agent. Use [New].
type Agent struct {
	manager manager.Manager
	server  *server.Server
	// recorder records the agent's events about objects of the hub.
	recorder events.EventRecorder
	issuer   *issuer.Authority // nil if it issues no certificates
	file     *authz.PolicyFile // at most one of file and policy is set
	policy   *configmap.Follower[authz.Policy]
	log      logr.Logger
}

// record makes the recorder of events, which the budget uses first.
func (a *Agent) record(ctx context.Context, budget *storage.Budget, registerer prometheus.Registerer) error {
	recorder, err := eventlimit.New(a.manager.GetEventRecorder("capi-agent"), clock.RealClock{}, registerer)
	if err != nil {
		return fmt.Errorf("registering the metric of events: %w", err)
	}
	a.recorder = recorder
	return budget.Follow(ctx, a.manager.GetCache(), a.recorder)
}

// New assembles an agent. It asks the hub for nothing but [Config.Mapper] before [Agent.Run].
func New(ctx context.Context, c Config) (*Agent, error) {
	if c.Log.GetSink() == nil {
		c.Log = logr.Discard()
	}
	o := c.Options
	a := &Agent{log: c.Log}
	scope := hub.NewScope(o.Namespaces, o.ClusterNames())
	var corrected *hub.Clock
	if c.Clock == nil {
		corrected = hub.NewClock(clock.RealClock{}, c.Log.WithName("clock"))
		c.Clock = corrected
	}
	var err error
	budget := storage.New(storage.Limits{
		Bytes: o.MaxClaimBytesPerCluster.Value(), AllBytes: o.MaxAllClaimBytes.Value(), AllEnded: o.MaxAllEndedClaims,
	})
	watches := contact.NewWatches(c.needed(), c.Log.WithName("hub"))
	if a.manager, err = newManager(c, scope, corrected, budget, watches); err != nil {
		return nil, err
	}
	if err := a.record(ctx, budget, c.Registerer); err != nil {
		return nil, err
	}
	if err := hub.Index(ctx, a.manager.GetFieldIndexer()); err != nil {
		return nil, err
	}
	nodeGroups := newCache(o, nodegroupview.Equal)
	machines := newCache(o, machineview.EqualMachines)
	shownClaims := newCache(o, machineview.EqualClaims)
	held := newCache(o, nodegroupview.EqualHeld)

	var (
		groups *nodegroupview.View
		keeper *spokes.Spokes
	)
	engine := claims.New(claims.Config{
		ReportsNodes: authz.ReportsNodes,
		SpokeOf:      func(cluster types.NamespacedName) string { return keeper.SpokeID(cluster) },
		ReadSpokeOf: func(ctx context.Context, cluster types.NamespacedName) (string, error) {
			return keeper.ReadSpokeID(ctx, cluster)
		},
		Name:    o.InstanceName,
		Indexes: claims.Indexes{Group: hub.ByDeployment, Failed: hub.FailedByDeployment, Cluster: hub.ByCluster}, NotEnded: hub.NotEndedClaims(),
		Client: a.manager.GetClient(), Reader: a.manager.GetAPIReader(), Recorder: a.recorder,
		Clock: c.Clock, SpareGrace: o.SpareGracePeriod, TombstoneRetention: o.TombstoneRetention,
		CollectGrace: o.CollectGracePeriod, TokenLife: o.SyncTokenLifetime,
		Failure: o.FailurePolicy(), Report: infrastructure.NewReports(a.manager.GetAPIReader(), clock.RealClock{}).Of,
		Bounds: claims.Bounds{
			Claims: o.MaxClaimsPerCluster, Ended: o.MaxEndedClaimsPerCluster,
			Creations: o.MaxCreationsPerMinute, Releases: o.MaxReleasesPerWindow, ReleaseWindow: o.ReleaseWindow,
		},
		Crowded: budget.Crowded,
		NoMachines: func(ctx context.Context, md *clusterv1.MachineDeployment) (*eligibility.Refusal, error) {
			return groups.NoMachines(ctx, md)
		},
	})
	if c.Registerer != nil {
		for _, collector := range []prometheus.Collector{
			panics.Collector(c.Log, engine.Collector()), panics.Collector(c.Log, budget.Collector()), watches.Collector(),
		} {
			if err := c.Registerer.Register(collector); err != nil {
				return nil, fmt.Errorf("registering the metrics of the claims and the watches: %w", err)
			}
		}
		if corrected != nil {
			if err := c.Registerer.Register(corrected.Collector()); err != nil {
				return nil, fmt.Errorf("registering the clock's metric: %w", err)
			}
		}
	}
	budgeted := &budgetedEngine{Engine: engine, budget: budget}
	nodes, err := learned.New(learned.Config{Client: a.manager.GetClient(), Registerer: c.Registerer})
	if err != nil {
		return nil, err
	}
	templates, prices, err := a.descriptions(c, scope, watches)
	if err != nil {
		return nil, err
	}
	groups, err = nodegroupview.New(nodegroupview.Config{
		Cache: nodeGroups, Held: held, Templates: templates, Scope: scope, Settings: o.MachineSettings(),
		Recorder: a.recorder, Registerer: c.Registerer,
		CoolingDown: engine.CoolingDown, Clock: engine.Clock, Learned: nodes, Pricing: o.Pricing(), PriceList: prices,
	})
	if err != nil {
		return nil, err
	}
	shown := machineview.New(machineview.Config{Machines: machines, Claims: shownClaims, Scope: scope})
	for _, part := range []interface {
		SetupWithManager(mgr manager.Manager) error
	}{groups, shown, engine} {
		if err := part.SetupWithManager(a.manager); err != nil {
			return nil, err
		}
	}
	if err := a.followPolicy(&c, watches); err != nil {
		return nil, err
	}
	authorizer, err := authz.New(o.TrustDomain, c.Policy, clock.RealClock{})
	if err != nil {
		return nil, err
	}
	probe, err := newProbe(c, scope, a.manager, watches)
	if err != nil {
		return nil, err
	}
	if err := a.manager.Add(manager.RunnableFunc(probe.Run)); err != nil {
		return nil, fmt.Errorf("adding the hub's probe: %w", err)
	}
	if err := a.openIssuer(o, c.Registerer); err != nil {
		return nil, err
	}
	direct, err := client.New(a.manager.GetConfig(), client.Options{Scheme: a.manager.GetScheme(), Mapper: a.manager.GetRESTMapper()})
	if err != nil {
		return nil, fmt.Errorf("making the client of the Spokes: %w", err)
	}
	var shownClusters *fleet.Fleet
	keeper = spokes.New(spokes.Config{
		Client: direct, Namespaces: scope.Namespaces(), Serves: scope.Contains, Clock: clock.RealClock{}, HubTime: c.Clock,
		Log:          c.Log.WithName("spokes"),
		Changed:      func(cluster types.NamespacedName) { shownClusters.Changed(cluster) },
		AgentVersion: version.Version(), APIVersion: server.APIVersion, Recorder: a.recorder,
		WriteTimeout: c.SpokeWriteTimeout,
	})
	clusters := newCache(o, fleet.Equal)
	scaler := autoscaler.New(autoscaler.Config{Engine: budgeted, Groups: held, Claims: shownClaims})
	shownClusters = fleet.New(fleet.Config{
		Cache: clusters, NodeGroups: nodeGroups, Machines: machines, Claims: shownClaims, Spokes: keeper, Scope: scope,
		Gone: forgetting(engine, nodes, scaler),
	})
	if err := shownClusters.SetupWithManager(a.manager); err != nil {
		return nil, err
	}
	if err := a.manager.Add(manager.RunnableFunc(keeper.Run)); err != nil {
		return nil, fmt.Errorf("adding the keeper of Spokes: %w", err)
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(panics.Collector(c.Log, keeper.Collector())); err != nil {
			return nil, fmt.Errorf("registering the Spokes' metrics: %w", err)
		}
	}
	published, err := a.publishing(c, scope, keeper)
	if err != nil {
		return nil, err
	}
	a.server, err = server.New(server.Config{
		NodePools: published,
		Onboarded: onboardingIn(a.manager.GetClient()), OnboardedLive: onboardingIn(a.manager.GetAPIReader()),
		Issuing: a.issuing(o, keeper), Note: a.noteOn(keeper),
		Contact: probe,
		Engine:  budgeted, Observe: nodes.Report, NodeGroups: nodeGroups, Machines: machines, Claims: shownClaims, Show: shown.Show,
		Clusters: clusters, Autoscaler: scaler,
		Scope: scope, Authorizer: authorizer, ShutdownGrace: o.ShutdownGracePeriod, Limits: shareOfHub(o),
		Version: version.Version(), Commit: version.Commit(), Log: c.Log.WithName("grpc"), Registerer: c.Registerer,
		TracerProvider: c.TracerProvider, MaxConnectionAge: o.MaxConnectionAge, NoReflection: !o.GRPCReflection,
	})
	if err != nil {
		return nil, err
	}
	if err := a.manager.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return nil, fmt.Errorf("adding the health check: %w", err)
	}
	checks := map[string]func() error{"synced": a.server.Check, "certificate": a.server.CheckCertificates}
	if a.policy != nil {
		checks["policy"] = a.awaitsPolicy
	}
	for name, check := range checks {
		if err := a.manager.AddReadyzCheck(name, logged(c.Log.WithName(name), check)); err != nil {
			return nil, fmt.Errorf("adding the readiness check: %w", err)
		}
	}
	return a, nil
}

// forgetting returns a function that lets all of them forget a Cluster.
func forgetting(all ...interface {
	ForgetCluster(cluster types.NamespacedName)
},
) func(types.NamespacedName) {
	return func(cluster types.NamespacedName) {
		for _, each := range all {
			each.ForgetCluster(cluster)
		}
	}
}

// publishing sets up the publication of NodePools. It returns nil if it is not configured.
func (a *Agent) publishing(c Config, scope hub.Scope, keeper *spokes.Spokes) (*server.NodePools, error) {
	if !c.Options.PublishNodePools {
		return nil, nil
	}
	objects := newCache(c.Options, nodepools.Equal)
	publisher, err := nodepools.New(nodepools.Config{
		Cache: objects, Scope: scope, Recorder: a.recorder, Registerer: c.Registerer,
	})
	if err != nil {
		return nil, err
	}
	if err := publisher.SetupWithManager(a.manager); err != nil {
		return nil, err
	}
	return &server.NodePools{Cache: objects, List: publisher.List, Report: keeper.Report}, nil
}

// policyKind is the name of the policy's ConfigMap among the followed kinds.
const policyKind = "policy"

// followsPolicy reports whether the policy is read from a ConfigMap.
func (c Config) followsPolicy() bool {
	return c.Policy == nil && c.Options.PolicyFile == "" && c.Options.Policy != ""
}

// needed names the kinds without which nothing is served.
func (c Config) needed() []string {
	kinds := slices.Collect(maps.Keys(followed()))
	if c.followsPolicy() {
		kinds = append(kinds, policyKind)
	}
	return kinds
}

// followPolicy sets c.Policy to the policy that the options name, unless c.Policy is already set.
func (a *Agent) followPolicy(c *Config, watches *contact.Watches) error {
	o := c.Options
	var err error
	switch {
	case c.Policy != nil:
	case o.PolicyFile != "":
		if a.file, err = authz.LoadPolicyFile(o.PolicyFile, o.TrustDomain, c.Log); err != nil {
			return fmt.Errorf("--policy-file: %w", err)
		}
		if c.Registerer != nil {
			if err := c.Registerer.Register(a.file.Collector()); err != nil {
				return fmt.Errorf("registering the metric of the policy file: %w", err)
			}
		}
		c.Policy = a.file.Current
	case c.followsPolicy():
		a.policy, err = configmap.New(a.manager, configmap.Config[authz.Policy]{
			Name: o.PolicyName(), Key: authz.PolicyKey, What: "policy", Recorder: a.recorder, Registerer: c.Registerer,
			Parse: func(content []byte) (*authz.Policy, error) { return authz.ParsePolicy(content, o.TrustDomain) },
			// Denials must survive the deletion of the ConfigMap.
			Lasting: true,
			// While it cannot be followed, denials would have no effect: nothing is served until
			// the API server has answered for it again. What has changed meanwhile is then read
			// within half a minute.
			WatchFailed: watches.FailedAs(policyKind),
		})
		if err != nil {
			return err
		}
		c.Policy = a.policy.Current
	}
	return nil
}

// awaitsPolicy returns an error while the agent serves nothing because it has no policy, and nil
// otherwise.
func (a *Agent) awaitsPolicy() error {
	if a.policy == nil || a.policy.Current() != nil {
		return nil
	}
	return errors.New(a.policy.Problem())
}

// shareOfHub returns the limits of callers. No single caller can use more over all kinds than half
// of the agent's request rate to the hub for one; [limits.Hub] limits all callers together.
func shareOfHub(o *options.Options) limits.Options {
	l := o.Limits
	l.HubRequestsPerSecond, l.HubRequestBurst = float64(o.KubeAPIQPS)/2, o.KubeAPIBurst
	return l
}

// descriptions returns what describes node groups in addition to their MachineDeployments. There
// may be no price list.
func (a *Agent) descriptions(c Config, scope hub.Scope, watches *contact.Watches) (cache.Cache, *pricelist.Follower, error) {
	prices, err := a.followPrices(c, watches)
	if err != nil {
		return nil, nil, err
	}
	templates, err := templateCache(a.manager, scope, watches)
	return templates, prices, err
}

// followPrices sets up the price list. It returns nil if none is configured.
func (a *Agent) followPrices(c Config, watches *contact.Watches) (*pricelist.Follower, error) {
	if c.Options.PriceList == "" {
		return nil, nil
	}
	return pricelist.New(a.manager, pricelist.Config{
		WatchFailed: watches.FailedAs("price list"),
		ConfigMap:   c.Options.PriceListName(), Recorder: a.recorder, Registerer: c.Registerer,
	})
}

// newManager connects to the hub. The clock is corrected by its responses, unless it is nil. The
// budget measures the claims that the caches read. The watches learn which of theirs fail.
func newManager(c Config, scope hub.Scope, corrected *hub.Clock, budget *storage.Budget, watches *contact.Watches) (manager.Manager, error) {
	scheme, err := hub.Scheme()
	if err != nil {
		return nil, err
	}
	caches, err := scope.CacheOptions()
	if err != nil {
		return nil, err
	}
	caches.DefaultTransform = budget.Measure(caches.DefaultTransform)
	caches.DefaultWatchErrorHandler = watches.Failed
	config := rest.CopyConfig(c.Hub)
	config.QPS = -1 // limits.Hub is the limiter
	// The agent runs in the hub, where processor time is scarcer than bandwidth. The API server
	// compresses each list of a node group's Machines otherwise.
	config.DisableCompression = true
	if corrected != nil {
		config.Wrap(corrected.Transport) // first, because a request that waits here says less of the time
	}
	if c.TracerProvider != nil {
		// Traced comes first, so that its spans do not include the time that requests wait here.
		config.Wrap(hub.Traced)
	}
	config.Wrap(limits.NewHub(float64(c.Options.KubeAPIQPS), c.Options.KubeAPIBurst, hub.Kind).Transport)
	config.Wrap(hub.Lean)
	config.Wrap(hub.Served)
	metrics, err := metricsOptions(c.Options)
	if err != nil {
		return nil, err
	}
	mapper := hub.NewMapper
	if c.Mapper != nil {
		mapper = func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return c.Mapper, nil }
	}
	mgr, err := manager.New(config, manager.Options{
		Scheme:                 scheme,
		MapperProvider:         mapper,
		Cache:                  caches,
		NewCache:               hub.NewCache(c.Log.WithName("hub")),
		Logger:                 c.Log,
		Metrics:                metrics,
		HealthProbeBindAddress: c.Options.HealthProbeBindAddress,
		// Every agent may do every step at any time, so there is no leader.
		LeaderElection:          false,
		GracefulShutdownTimeout: new(c.Options.ShutdownGracePeriod),
		Client:                  client.Options{FieldOwner: "capi-agent"},
		Controller:              hub.Controllers(),
	})
	if err != nil {
		return nil, fmt.Errorf("connecting to the hub: %w", err)
	}
	return mgr, nil
}

// templateCache returns the cache of infrastructure templates.
func templateCache(mgr manager.Manager, scope hub.Scope, watches *contact.Watches) (cache.Cache, error) {
	options, err := scope.CacheOptions()
	if err != nil {
		return nil, err
	}
	options.DefaultWatchErrorHandler = watches.Failed
	options.ReaderFailOnMissingInformer = true
	return hub.AddCache(mgr, options)
}

// These are the parameters of the probe of the hub's API server. A shim learns of an outage after
// at most HubPatience, one probeInterval and one probeTimeout. Two consecutive missing responses
// are an outage; one slow response is not.
const (
	probeInterval = 2 * time.Second
	probeTimeout  = 3 * time.Second
	// HubPatience is the default of [Config.HubPatience].
	HubPatience = 6 * time.Second
)

// newProbe returns a probe with its own client, without a rate limit. Waiting behind the agent's
// other requests would look like an outage.
func newProbe(c Config, scope hub.Scope, mgr manager.Manager, watches *contact.Watches) (*contact.Probe, error) {
	config := rest.CopyConfig(c.Hub)
	config.QPS = -1
	config.DisableCompression = true // as the caches have it, so that the probe uses their connection
	reader, err := client.New(config, client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper()})
	if err != nil {
		return nil, fmt.Errorf("making the client that probes the hub: %w", err)
	}
	namespaces := scope.Namespaces()
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	ask := func(ctx context.Context, list client.ObjectList, namespace string) error {
		return unanswered(reader.List(ctx, list, client.Limit(1), client.InNamespace(namespace)))
	}
	lists, policy := followed(), c.Options.PolicyName()
	return contact.New(contact.Config{
		Ask: func(ctx context.Context) error {
			if err := ask(ctx, &v1alpha1.MachineClaimList{}, namespaces[0]); err != nil {
				return err
			}
			return watches.Ask(ctx, func(ctx context.Context, kind string) error {
				if kind == policyKind {
					return unanswered(reader.List(ctx, &corev1.ConfigMapList{}, client.InNamespace(policy.Namespace),
						client.MatchingFields{"metadata.name": policy.Name}))
				}
				for _, namespace := range namespaces {
					if err := ask(ctx, lists[kind](), namespace); err != nil {
						return err
					}
				}
				return nil
			})
		},
		Interval: probeInterval, Timeout: probeTimeout, Patience: cmp.Or(c.HubPatience, HubPatience), Log: c.Log.WithName("hub"),
	}), nil
}

// followed returns the kinds without which nothing is served, by the type of their objects, with
// functions that return empty lists of them.
func followed() map[string]func() client.ObjectList {
	return map[string]func() client.ObjectList{
		typeOf(&clusterv1.Cluster{}):           func() client.ObjectList { return &clusterv1.ClusterList{} },
		typeOf(&clusterv1.MachineDeployment{}): func() client.ObjectList { return &clusterv1.MachineDeploymentList{} },
		typeOf(&clusterv1.MachineSet{}):        func() client.ObjectList { return &clusterv1.MachineSetList{} },
		typeOf(&clusterv1.Machine{}):           func() client.ObjectList { return &clusterv1.MachineList{} },
		typeOf(&v1alpha1.MachineClaim{}):       func() client.ObjectList { return &v1alpha1.MachineClaimList{} },
	}
}

func typeOf(object client.Object) string { return fmt.Sprintf("%T", object) }

// unanswered returns nil if the API server has answered a request of the probe. An error status
// below 500 is an answer, unless it refuses what the caches need: an agent whose account was
// deleted, whose rights were withdrawn or whose CustomResourceDefinition is gone learns of no
// change any more.
func unanswered(err error) error {
	status := apierrors.APIStatus(nil)
	if !errors.As(err, &status) {
		return err
	}
	switch code := status.Status().Code; code {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		return err
	default:
		if code < http.StatusInternalServerError {
			return nil
		}
		return err
	}
}

func newCache[T any](o *options.Options, equal func(a, b T) bool) *watchcache.Cache[T] {
	return watchcache.New(watchcache.Options[T]{Equal: equal, Buffer: o.WatchBuffer, Heartbeat: o.HeartbeatInterval})
}

// Run serves on the listeners until the context ends. The server stops before the rest, so that
// calls in flight can finish.
func (a *Agent) Run(ctx context.Context, listeners ...server.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// This context ends only after the server has stopped.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	if a.issuer != nil {
		defer a.issuer.Close()
	}
	if a.file != nil {
		go a.file.Follow(background)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- a.manager.Start(background)
		cancel()
	}()
	if a.awaitsPolicy() != nil {
		a.log.Info("nothing is served before there is a valid policy", "configMap", a.policy.Name)
		select {
		case <-a.policy.First():
		case <-ctx.Done():
		}
	}
	served := a.server.Serve(ctx, listeners...)
	stop()
	managed := <-ended
	if managed != nil {
		managed = fmt.Errorf("following the hub: %w", managed)
	}
	return errors.Join(served, managed)
}

// Synced reports whether the agent's view of the hub is complete.
func (a *Agent) Synced() bool { return a.server.Synced() }
