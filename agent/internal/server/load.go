package server

import (
	"context"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

var (
	callerLabels     = []string{"namespace", "cluster", "role"}
	callsDescription = prometheus.NewDesc("capi_agent_caller_calls_total",
		"Calls of a Cluster's own shim, including refused calls. The series with an empty cluster count the calls of all other callers, by the "+
			"caller's most privileged role (none: no role).", callerLabels, nil)
	refusedDescription = prometheus.NewDesc("capi_agent_caller_refused_calls_total",
		"Calls counted in capi_agent_caller_calls_total that were refused because of a limit or a missing permission.", callerLabels, nil)
	hubRequestsDescription = prometheus.NewDesc("capi_agent_caller_hub_requests_total",
		"Requests to the hub's API server that were made for the calls counted in capi_agent_caller_calls_total.", callerLabels, nil)
)

// load counts what each Cluster's calls cost. Only Clusters that exist have numbers of their own,
// so certificates for invented names cannot make up new ones. All other callers are counted by
// their role.
type load struct {
	// exists reports whether a Cluster exists and is served.
	exists func(cluster types.NamespacedName) bool

	mu sync.Mutex
	of map[loader]*loadOf
}

// loader is whose calls are counted together. The Cluster is empty for callers that are not a
// Cluster's shim.
type loader struct {
	cluster types.NamespacedName
	role    string
}

// loadOf is the load of a [loader].
type loadOf struct{ calls, refused, hubRequests int64 }

// noRole is the role of callers without a right or an identity.
const noRole = "none"

// roles are the roles that a caller may have besides that of its Cluster, from the one that may do
// most.
var roles = []authz.Role{authz.RoleAdmin, authz.RoleAutoscaler, authz.RoleReader}

func newLoad(exists func(cluster types.NamespacedName) bool) *load {
	l := &load{exists: exists, of: map[loader]*loadOf{}}
	// A counter that appears with its first increment has no increase that a rule could see.
	for _, role := range roles {
		l.of[loader{role: string(role)}] = &loadOf{}
	}
	l.of[loader{role: noRole}] = &loadOf{}
	return l
}

// loaderOf returns whose load a call of the caller is, if its Cluster exists.
func loaderOf(c caller) loader {
	has := c.Roles()
	if c.problem != "" || len(has) == 0 {
		return loader{role: noRole}
	}
	if c.Onboarding != nil {
		if slices.Contains(has, string(authz.RoleBootstrap)) {
			return loader{c.Onboarding.Cluster, string(authz.RoleBootstrap)}
		}
		return loader{c.Onboarding.Cluster, string(authz.RoleCluster)}
	}
	for _, role := range roles {
		if slices.Contains(has, string(role)) {
			return loader{role: string(role)}
		}
	}
	return loader{role: has[0]} // a shim on a unix socket has no certificate that names its Cluster
}

// add changes the numbers of a caller. change must not block.
func (l *load) add(c caller, change func(*loadOf)) {
	of := loaderOf(c)
	l.mu.Lock()
	known := l.of[of]
	l.mu.Unlock()
	if known == nil && !l.exists(of.cluster) {
		of.cluster = types.NamespacedName{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[of] == nil {
		l.of[of] = &loadOf{}
	}
	change(l.of[of])
}

// Describe implements [prometheus.Collector].
func (l *load) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- callsDescription
	descriptions <- refusedDescription
	descriptions <- hubRequestsDescription
}

// Collect implements [prometheus.Collector]. It forgets the Clusters that are gone.
func (l *load) Collect(metrics chan<- prometheus.Metric) {
	for of, numbers := range l.current() {
		for _, metric := range []struct {
			description *prometheus.Desc
			value       int64
		}{{callsDescription, numbers.calls}, {refusedDescription, numbers.refused}, {hubRequestsDescription, numbers.hubRequests}} {
			metrics <- prometheus.MustNewConstMetric(metric.description, prometheus.CounterValue, float64(metric.value),
				of.cluster.Namespace, of.cluster.Name, of.role)
		}
	}
}

func (l *load) current() map[loader]loadOf {
	l.mu.Lock()
	all := make(map[loader]loadOf, len(l.of))
	for of, numbers := range l.of {
		all[of] = *numbers
	}
	l.mu.Unlock()
	for of := range all {
		if of.cluster != (types.NamespacedName{}) && !l.exists(of.cluster) {
			delete(all, of)
			l.mu.Lock()
			delete(l.of, of)
			l.mu.Unlock()
		}
	}
	return all
}

// servedCluster reports whether the agent serves a Cluster. It is false for a Cluster that the
// caches do not show yet.
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
