package server

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

var (
	callerLabels     = []string{"namespace", "cluster"}
	callsDescription = prometheus.NewDesc("capi_agent_caller_calls_total",
		"Calls of a Cluster's own shim, including refused calls. The series with an empty cluster counts the calls of all other callers.",
		callerLabels, nil)
	refusedDescription = prometheus.NewDesc("capi_agent_caller_refused_calls_total",
		"Calls counted in capi_agent_caller_calls_total that were refused because of a limit or a missing permission.", callerLabels, nil)
	hubRequestsDescription = prometheus.NewDesc("capi_agent_caller_hub_requests_total",
		"Requests to the hub's API server that were made for the calls counted in capi_agent_caller_calls_total.", callerLabels, nil)
)

// load counts what each Cluster's calls cost. Only Clusters that exist have numbers of their own,
// so certificates for invented names cannot make up new ones. All other callers are counted
// together.
type load struct {
	// exists reports whether a Cluster exists and is served.
	exists func(cluster types.NamespacedName) bool

	mu sync.Mutex
	of map[types.NamespacedName]*loadOf
}

// loadOf is the load of a Cluster.
type loadOf struct{ calls, refused, hubRequests int64 }

func newLoad(exists func(cluster types.NamespacedName) bool) *load {
	return &load{exists: exists, of: map[types.NamespacedName]*loadOf{{}: {}}}
}

// add changes the numbers of a caller. change must not block.
func (l *load) add(c caller, change func(*loadOf)) {
	var cluster types.NamespacedName
	if c.problem == "" && c.Onboarding != nil {
		cluster = c.Onboarding.Cluster
	}
	l.mu.Lock()
	known := l.of[cluster]
	l.mu.Unlock()
	if known == nil && !l.exists(cluster) {
		cluster = types.NamespacedName{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[cluster] == nil {
		l.of[cluster] = &loadOf{}
	}
	change(l.of[cluster])
}

// Describe implements [prometheus.Collector].
func (l *load) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- callsDescription
	descriptions <- refusedDescription
	descriptions <- hubRequestsDescription
}

// Collect implements [prometheus.Collector]. It forgets the Clusters that are gone.
func (l *load) Collect(metrics chan<- prometheus.Metric) {
	for cluster, numbers := range l.current() {
		for _, metric := range []struct {
			description *prometheus.Desc
			value       int64
		}{{callsDescription, numbers.calls}, {refusedDescription, numbers.refused}, {hubRequestsDescription, numbers.hubRequests}} {
			metrics <- prometheus.MustNewConstMetric(metric.description, prometheus.CounterValue, float64(metric.value), cluster.Namespace, cluster.Name)
		}
	}
}

func (l *load) current() map[types.NamespacedName]loadOf {
	l.mu.Lock()
	all := make(map[types.NamespacedName]loadOf, len(l.of))
	for cluster, numbers := range l.of {
		all[cluster] = *numbers
	}
	l.mu.Unlock()
	for cluster := range all {
		if cluster != (types.NamespacedName{}) && !l.exists(cluster) {
			delete(all, cluster)
			l.mu.Lock()
			delete(l.of, cluster)
			l.mu.Unlock()
		}
	}
	return all
}

// servedCluster reports whether the agent serves a Cluster. It is false for a Cluster that the caches
// do not show yet.
func (s *Server) servedCluster(cluster types.NamespacedName) bool {
	select {
	case <-s.config.NodeGroups.Ready():
	default:
		return false
	}
	if !s.config.Scope.Contains(cluster) {
		return false
	}
	_, exists, err := s.config.Onboarded(context.Background(), cluster)
	return err == nil && exists
}

func (s *Server) countUnary(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	s.load.add(callerOf(ctx), func(of *loadOf) { of.calls++ })
	response, err := handler(ctx, request)
	s.countRefused(ctx, err)
	return response, err
}

func (s *Server) countStream(service any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	s.load.add(callerOf(stream.Context()), func(of *loadOf) { of.calls++ })
	err := handler(service, stream)
	s.countRefused(stream.Context(), err)
	return err
}

func (s *Server) countRefused(ctx context.Context, err error) {
	switch code := grpcstatus.Code(err); {
	case agenterrors.IsThrottled(err), code == codes.PermissionDenied, code == codes.Unauthenticated:
		s.load.add(callerOf(ctx), func(of *loadOf) { of.refused++ })
	}
}

// countHubRequests adds what an ended call has cost the hub.
func (s *Server) countHubRequests(ctx context.Context, call *limits.Call) {
	if requests := call.HubRequests(); requests > 0 {
		s.load.add(callerOf(ctx), func(of *loadOf) { of.hubRequests += requests })
	}
}
