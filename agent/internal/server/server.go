// Package server serves the agent's API over gRPC. The services are thin: their data comes from the
// views and the claim engine. Package authz decides who may call.
//
// Metrics, logs and recovery are interceptors of go-grpc-middleware. Those that authorize and limit
// calls are our own: the library's see neither the request, which names the Cluster and the holder,
// nor the end of the call, when its share of the limits is free again.
package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/uuid"
	grpcprometheus "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/reflection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/autoscaler"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// Engine creates, releases and finds claims. [claims.Engine] implements it.
type Engine interface {
	Create(ctx context.Context, request claims.Request) (*v1alpha1.MachineClaim, error)
	Release(ctx context.Context, key claims.Key, options claims.ReleaseOptions) (*v1alpha1.MachineClaim, error)
	Return(ctx context.Context, key claims.Key, may claims.Holders, why string) (*v1alpha1.MachineClaim, error)
	Get(ctx context.Context, key claims.Key) (*v1alpha1.MachineClaim, error)
	List(ctx context.Context, options claims.ListOptions) ([]v1alpha1.MachineClaim, string, error)
	Sync(ctx context.Context, request claims.SyncRequest) (claims.SyncResult, error)
	UnpausedCluster(ctx context.Context, cluster types.NamespacedName) (*clusterv1.Cluster, error)
}

// Config configures a [Server].
type Config struct {
	// Engine is the claim engine. REQUIRED.
	Engine Engine
	// Observe receives what a holder reported about its Cluster's Nodes. REQUIRED.
	Observe func(ctx context.Context, cluster types.NamespacedName, nodes []learned.Node)
	// NodeGroups, Machines and Claims are the views that are served. REQUIRED.
	NodeGroups *watchcache.Cache[*agentv1alpha1.NodeGroup]
	Machines   *watchcache.Cache[*agentv1alpha1.Machine]
	Claims     *watchcache.Cache[*agentv1alpha1.Claim]
	// Clusters is the view of all Clusters at once; see [fleet.All]. REQUIRED.
	Clusters *watchcache.Cache[*agentv1alpha1.Cluster]
	// Show converts a claim that was read live, and adds its Machine. REQUIRED.
	Show func(ctx context.Context, claim *v1alpha1.MachineClaim) (*agentv1alpha1.Claim, error)
	// Onboarded reads the caches, and OnboardedLive the API server. Onboarded is only called once
	// the caches have synced. REQUIRED.
	Onboarded, OnboardedLive OnboardingOf
	// Issuing configures the issuing of certificates. Nil issues none.
	Issuing *Issuing
	// Note receives details of a Cluster's own shim each time the shim has synchronized its claims.
	// Nil discards them.
	Note func(ctx context.Context, cluster types.NamespacedName, contact spokes.Contact)
	// Contact reports whether the hub's API server responds. Nil means that it always does.
	Contact Contact
	// Autoscaler scales for the cluster-autoscaler. Nil does not serve its protocol.
	Autoscaler *autoscaler.Scaler
	// NodePools publishes NodePools and receives their status. Nil does not serve that service.
	NodePools *NodePools
	// Scope determines which Clusters are served.
	Scope hub.Scope
	// Authorizer derives callers from certificates. REQUIRED.
	Authorizer *authz.Authorizer
	// ShutdownGrace is how long calls in flight may take to finish at shutdown. REQUIRED.
	ShutdownGrace time.Duration
	// Version and Commit identify the agent's build.
	Version, Commit string
	// Log receives a line for each call. Zero discards them.
	Log logr.Logger
	// Registerer registers the metrics. Nil registers none.
	Registerer prometheus.Registerer
	// TracerProvider records calls. Nil records none.
	TracerProvider trace.TracerProvider
	// Clock provides the time. Nil means the system clock.
	Clock clock.PassiveClock
	// RightsInterval is how often the rights of watchers are checked again, and whether the callers
	// of open connections are shut out. Zero means every five seconds.
	RightsInterval time.Duration
	// NoReflection leaves out gRPC's reflection.
	NoReflection bool
	// MaxConnectionAge is after what time a connection ends, plus or minus 10 %, so that its client
	// chooses among the agents again and presents its current certificate. Zero means
	// two hours.
	MaxConnectionAge time.Duration
	// Limits bound what a single caller may request at once. The zero value means
	// [limits.Defaults].
	Limits limits.Options
}

// These limit connections and messages.
const (
	// maxAnswerBytes is the largest response that clients accept: the list of a Cluster's claims.
	maxAnswerBytes = 64 << 20
	// maxHeaderBytes is the size limit of a call's metadata.
	maxHeaderBytes = 8 << 10
	// streamWindow and connectionWindow are how many bytes may arrive on a stream, and on a
	// connection, before a handler reads them.
	streamWindow     = 64 << 10
	connectionWindow = 1 << 20
	// handshakeTimeout bounds the time until a connection has an identity.
	handshakeTimeout = 10 * time.Second
	// idleTimeout is after what time a connection without calls is closed. Clients reconnect when
	// they need to.
	idleTimeout = 15 * time.Minute

	maxStreams = 1000
	// defaultConnectionAge is the default of [Config].MaxConnectionAge.
	defaultConnectionAge = 2 * time.Hour
	// connectionAgeGrace is how long the calls and streams of an old connection may take to end.
	connectionAgeGrace   = time.Minute
	keepaliveTime        = 30 * time.Second
	keepaliveTimeout     = 10 * time.Second
	keepaliveMinimumTime = 5 * time.Second
)

// Server serves the API.
type Server struct {
	config   Config
	id       string
	health   *health.Server
	codec    codec
	options  []grpc.ServerOption
	metrics  *grpcprometheus.ServerMetrics
	stopped  chan struct{} // closed at shutdown
	receiver receiver
	limits   *limits.Limiter
	load     *load
	remote   openConnections
	// refusals and closures are the identities whose connections were refused or closed a moment
	// ago.
	refusals, closures seldom
	// listeners are set by Serve.
	listeners atomic.Pointer[[]Listener]
	// certificateRequests counts the calls of IssueCertificate.
	certificateRequests *prometheus.CounterVec
}

// New returns a server.
func New(c Config) (*Server, error) {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.Log.GetSink() == nil {
		c.Log = logr.Discard()
	}
	if c.RightsInterval == 0 {
		c.RightsInterval = defaultRightsInterval
	}
	if c.MaxConnectionAge == 0 {
		c.MaxConnectionAge = defaultConnectionAge
	}
	if c.Limits == (limits.Options{}) {
		c.Limits = limits.Defaults()
	}
	validator, err := validation.New()
	if err != nil {
		return nil, err
	}
	s := &Server{
		config: c, id: uuid.NewString(), health: health.NewServer(), codec: newCodec(), stopped: make(chan struct{}),
		remote:   openConnections{all: map[*connection]connectionInfo{}},
		refusals: newSeldom(clock.RealClock{}), closures: newSeldom(clock.RealClock{}),
		receiver: receiver{validator: validator, timeout: c.Limits.RequestTimeout}, certificateRequests: newCertificateRequests(),
	}
	if s.limits, err = limits.New(c.Limits, c.Clock, c.Registerer); err != nil {
		return nil, err
	}
	s.load = newLoad(s.servedCluster)
	s.limits.Light(lightMethods...)
	s.metrics = grpcprometheus.NewServerMetrics(grpcprometheus.WithServerHandlingTimeHistogram(
		grpcprometheus.WithHistogramBuckets(prometheus.ExponentialBuckets(0.001, 2, 15))))
	if c.Registerer != nil {
		for _, collector := range append(s.collectors(), s.metrics, panics.Collector(c.Log, s.load), s.certificateRequests) {
			if err := c.Registerer.Register(collector); err != nil {
				return nil, fmt.Errorf("registering metrics: %w", err)
			}
		}
	}
	s.options = []grpc.ServerOption{
		grpc.MaxSendMsgSize(maxAnswerBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connectionWindow),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.InTapHandle(cuttable),
		grpc.ForceServerCodecV2(s.codec),
		grpc.MaxConcurrentStreams(maxStreams),
		// The default pool's buffers are up to four times as large as the frame that is read into
		// them.
		experimental.BufferPool(mem.NopBufferPool{}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveMinimumTime, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout, MaxConnectionIdle: idleTimeout,
			MaxConnectionAge: c.MaxConnectionAge, MaxConnectionAgeGrace: connectionAgeGrace,
		}),
		grpc.UnaryInterceptor(s.after(validator)),
		grpc.ChainStreamInterceptor(s.stream(validator)...),
	}
	if c.TracerProvider != nil {
		s.options = append(s.options, grpc.StatsHandler(tracing.ServerHandler(c.TracerProvider, traces, s.mayTrace)))
	}
	for _, service := range append(s.services(), "") {
		s.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	}
	s.health.SetServingStatus(agentv1alpha1.StatusService_ServiceDesc.ServiceName, grpc_health_v1.HealthCheckResponse_SERVING)
	return s, nil
}

func (s *Server) services() []string {
	names := []string{
		agentv1alpha1.NodeGroupService_ServiceDesc.ServiceName, agentv1alpha1.ClaimService_ServiceDesc.ServiceName,
		agentv1alpha1.MachineService_ServiceDesc.ServiceName, agentv1alpha1.CertificateService_ServiceDesc.ServiceName,
		agentv1alpha1.ClusterService_ServiceDesc.ServiceName,
	}
	if s.config.Autoscaler != nil {
		names = append(names, externalgrpc.CloudProvider_ServiceDesc.ServiceName)
	}
	if s.config.NodePools != nil {
		names = append(names, agentv1alpha1.NodePoolService_ServiceDesc.ServiceName)
	}
	return names
}

// Synced reports whether every view is complete.
func (s *Server) Synced() bool {
	for _, ready := range s.ready() {
		select {
		case <-ready:
		default:
			return false
		}
	}
	return true
}

// Check returns nil if the agent is ready to be called, and the reason as an error otherwise.
func (s *Server) Check() error {
	switch {
	case s.stopping():
		return errors.New("shutting down")
	case !s.Synced():
		return errors.New("the view of the hub is not complete yet")
	}
	return s.inContact()
}

// CheckCertificates returns an error, with the reason, if a listener shows clients an expired
// certificate, and nil otherwise.
func (s *Server) CheckCertificates() error {
	listeners := s.listeners.Load()
	if listeners == nil {
		return nil
	}
	for _, listener := range *listeners {
		if listener.NotAfter == nil {
			continue
		}
		if end := listener.NotAfter(); !s.config.Clock.Now().Before(end) {
			return fmt.Errorf("the certificate of %s expired at %s, so clients reject it; the agent reads a new one from its files within seconds",
				listener.Addr(), end.UTC().Format(time.RFC3339))
		}
	}
	return nil
}

func (s *Server) stopping() bool {
	select {
	case <-s.stopped:
		return true
	default:
		return false
	}
}

func (s *Server) ready() []<-chan struct{} {
	all := []<-chan struct{}{s.config.NodeGroups.Ready(), s.config.Machines.Ready(), s.config.Claims.Ready(), s.config.Clusters.Ready()}
	if s.config.NodePools != nil {
		all = append(all, s.config.NodePools.Cache.Ready())
	}
	return all
}

// Serve serves on every listener until the context ends. It then waits for calls in flight, at most
// for the grace period, and returns nil. It closes the listeners. It must only be called once.
func (s *Server) Serve(ctx context.Context, listeners ...Listener) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s.listeners.Store(&listeners)
	var running sync.WaitGroup
	servers := make([]*grpc.Server, 0, len(listeners))
	for _, listener := range listeners {
		server := grpc.NewServer(append([]grpc.ServerOption{grpc.Creds(identifying{listener.Credentials, s, listener.Authorities})}, s.options...)...)
		s.register(registrar{Server: server, before: s.before(), receiver: s.receiver})
		servers = append(servers, server)
		s.config.Log.Info("serving", "address", listener.Addr().String(), "network", listener.Addr().Network(), "security", listener.Security)
		running.Go(func() {
			if err := server.Serve(accepting{listener, s}); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("serving on %s: %w", listener.Addr(), err))
			}
		})
	}
	running.Go(func() { s.followReadiness(ctx) })
	running.Go(func() { s.partWithoutContact(ctx) })
	running.Go(func() { s.partWithShutOut(ctx) })
	<-ctx.Done()
	s.shutDown(servers)
	running.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// followReadiness reports to health clients when the services can be used.
func (s *Server) followReadiness(ctx context.Context) {
	for i, ready := range s.ready() {
		select {
		case <-ctx.Done():
			return
		case <-ready:
			// Only node groups can be served from a single view. Claims include their Machines and
			// are created from the state of the caches, so they need all views.
			if i == 0 {
				s.serving(agentv1alpha1.NodeGroupService_ServiceDesc.ServiceName)
			}
		}
	}
	for _, service := range append(s.services(), "") {
		s.serving(service)
	}
	s.config.Log.Info("the view of the hub is complete", "nodeGroups", s.config.NodeGroups.Stats().Objects,
		"machines", s.config.Machines.Stats().Objects, "claims", s.config.Claims.Stats().Objects)
	s.followContact(ctx)
}

func (s *Server) serving(service string) {
	s.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_SERVING)
}

// shutDown rejects new calls, ends the streams, and waits for the calls in flight.
func (s *Server) shutDown(servers []*grpc.Server) {
	s.health.Shutdown()
	close(s.stopped)
	s.config.NodeGroups.Close()
	s.config.Machines.Close()
	s.config.Claims.Close()
	s.config.Clusters.Close()
	if s.config.NodePools != nil {
		s.config.NodePools.Cache.Close()
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		var all sync.WaitGroup
		for _, server := range servers {
			all.Go(server.GracefulStop)
		}
		all.Wait()
	}()
	grace := time.NewTimer(s.config.ShutdownGrace)
	defer grace.Stop()
	select {
	case <-drained:
	case <-grace.C:
		s.config.Log.Info("calls in flight were aborted: the grace period has passed", "grace", s.config.ShutdownGrace.String())
		for _, server := range servers {
			server.Stop()
		}
		<-drained
	}
}

func (s *Server) register(server registrar) {
	agentv1alpha1.RegisterNodeGroupServiceServer(server, &nodeGroups{Server: s})
	agentv1alpha1.RegisterClaimServiceServer(server, &claimService{Server: s})
	agentv1alpha1.RegisterMachineServiceServer(server, &machines{Server: s})
	agentv1alpha1.RegisterClusterServiceServer(server, &clusterService{Server: s})
	agentv1alpha1.RegisterStatusServiceServer(server, &status{Server: s})
	agentv1alpha1.RegisterCertificateServiceServer(server, &certificateService{Server: s})
	if s.config.Autoscaler != nil {
		externalgrpc.RegisterCloudProviderServer(server, &autoscalerService{Server: s})
	}
	if s.config.NodePools != nil {
		agentv1alpha1.RegisterNodePoolServiceServer(server, &nodePoolService{Server: s})
	}
	grpc_health_v1.RegisterHealthServer(server, s.health)
	if !s.config.NoReflection {
		reflection.Register(server)
	}
	s.metrics.InitializeMetrics(server)
}

// collectors returns metrics of the views and of the state of the server.
func (s *Server) collectors() []prometheus.Collector {
	type view struct {
		name  string
		stats func() watchcache.Stats
	}
	var all []prometheus.Collector
	views := []view{
		{"node_groups", s.config.NodeGroups.Stats},
		{"machines", s.config.Machines.Stats},
		{"claims", s.config.Claims.Stats},
		{"clusters", s.config.Clusters.Stats},
	}
	if s.config.NodePools != nil {
		views = append(views, view{"published_objects", s.config.NodePools.Cache.Stats})
	}
	for _, v := range views {
		labels := prometheus.Labels{"view": v.name}
		all = append(all,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "capi_agent_view_objects", Help: "Number of objects in a view.", ConstLabels: labels,
			}, func() float64 { return float64(v.stats().Objects) }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "capi_agent_view_watchers", Help: "Number of watch streams on a view.", ConstLabels: labels,
			}, func() float64 { return float64(v.stats().Subscribers) }),
			prometheus.NewCounterFunc(prometheus.CounterOpts{
				Name: "capi_agent_view_resyncs_total", Help: "Number of new snapshots sent to watch streams that were too slow.", ConstLabels: labels,
			}, func() float64 { return float64(v.stats().Resyncs) }),
		)
	}
	return append(all,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "capi_agent_build_info", Help: "Always 1. The labels contain the version of the agent.",
			ConstLabels: prometheus.Labels{"version": s.config.Version, "commit": s.config.Commit},
		}, func() float64 { return 1 }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "capi_agent_catalogue_generation", Help: "Number of changes to node groups since the agent started.",
		}, func() float64 { return float64(s.config.NodeGroups.Generation()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "capi_agent_hub_reachable", Help: "1 if the hub's API server responds, 0 otherwise.",
		}, func() float64 {
			if s.inContact() == nil {
				return 1
			}
			return 0
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "capi_agent_synced", Help: "1 if the agent's views of the hub are complete, 0 otherwise.",
		}, func() float64 {
			if s.Synced() {
				return 1
			}
			return 0
		}))
}
