package fakeagent

import (
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Manual is the delay, in [Infrastructure], of a step that never happens by itself: the test does
// it.
const Manual time.Duration = -1

// Infrastructure is how long after the previous step each step of a machine's life happens by
// itself. Zero means at once, [Manual] only when the test does it.
type Infrastructure struct {
	// Appear is the time from the claim to the Machine object.
	Appear time.Duration
	// Provision is the time from the Machine object to its provider ID.
	Provision time.Duration
	// Join is the time from the provider ID to the Node.
	Join time.Duration
	// Terminate is the time from the start of the Machine's deletion until it is gone.
	Terminate time.Duration
}

// Option configures an [Agent].
type Option func(*settings)

type settings struct {
	clock          clock.WithTickerAndDelayedExecution
	logger         logr.Logger
	heartbeat      time.Duration
	watchBuffer    int
	infrastructure Infrastructure
	spareGrace     time.Duration
	coolDown       time.Duration
	tokenLifetime  time.Duration
	version        string
	apiVersions    []string
	features       []string
	trustDomain    string
	authority      *Authority
	clusters       []*agentv1alpha1.ClusterRef
}

func defaults() settings {
	return settings{
		clock:          clock.RealClock{},
		logger:         logr.Discard(),
		heartbeat:      client.DefaultHeartbeatInterval,
		watchBuffer:    1024,
		infrastructure: Infrastructure{Provision: Manual, Join: Manual},
		tokenLifetime:  time.Hour,
		version:        "devel",
		apiVersions:    []string{"capi.agent.v1alpha1"},
		features:       features.Served(features.Configured{features.ClusterAutoscaler: false}),
		trustDomain:    TrustDomain,
		clusters:       []*agentv1alpha1.ClusterRef{DefaultCluster()},
	}
}

// WithClock sets the clock of all delays, time stamps and heartbeats, and of the mirrors of the
// agent's clients.
func WithClock(c clock.WithTickerAndDelayedExecution) Option {
	return func(s *settings) { s.clock = c }
}

// WithLogger sets the logger of the agent and its clients.
func WithLogger(logger logr.Logger) Option {
	return func(s *settings) { s.logger = logger }
}

// WithHeartbeatInterval sets how long a stream may be idle before a heartbeat is sent. The default
// is [client.DefaultHeartbeatInterval].
func WithHeartbeatInterval(interval time.Duration) Option {
	return func(s *settings) { s.heartbeat = interval }
}

// WithWatchBuffer sets how many changes are kept for a slow reader of a stream before it gets a
// resync. The default is 1024.
func WithWatchBuffer(changes int) Option {
	return func(s *settings) { s.watchBuffer = changes }
}

// WithInfrastructure sets how machines progress by themselves.
func WithInfrastructure(infrastructure Infrastructure) Option {
	return func(s *settings) { s.infrastructure = infrastructure }
}

// WithSpareGracePeriod sets how long a spare machine is kept for the next claim. The default is 0.
func WithSpareGracePeriod(period time.Duration) Option {
	return func(s *settings) { s.spareGrace = period }
}

// WithCoolDown sets how long a node group refuses claims after a claim was released as failed, by
// [Agent.GiveUp] or by its caller. The default of 0 disables the cool-down.
func WithCoolDown(period time.Duration) Option {
	return func(s *settings) { s.coolDown = period }
}

// WithTokenLifetime sets how long a token of ListClaims is valid. The default is one hour.
func WithTokenLifetime(lifetime time.Duration) Option {
	return func(s *settings) { s.tokenLifetime = lifetime }
}

// WithFeatures sets the features that GetStatus lists; see package features. The default is those
// of this fake. Without names it is like an agent that is older than the list. The fake does all
// that it can do in any case.
func WithFeatures(names ...string) Option {
	return func(s *settings) { s.features = names }
}

// WithAPIVersions sets the API packages that GetStatus lists as served. Without names it is like an
// agent that is older than the list.
func WithAPIVersions(packages ...string) Option {
	return func(s *settings) { s.apiVersions = packages }
}

// WithVersion sets the version that GetStatus reports. The default is `devel`.
func WithVersion(version string) Option {
	return func(s *settings) { s.version = version }
}

// WithTrustDomain sets the SPIFFE trust domain of the callers. Default [TrustDomain].
func WithTrustDomain(domain string) Option {
	return func(s *settings) { s.trustDomain = domain }
}

// WithAuthority sets the authority that signs the certificates of onboarded Clusters. Default: one
// that is created when it is needed.
func WithAuthority(authority *Authority) Option {
	return func(s *settings) { s.authority = authority }
}

// WithClusters sets the initial Clusters. Default: only [DefaultCluster].
func WithClusters(clusters ...*agentv1alpha1.ClusterRef) Option {
	return func(s *settings) { s.clusters = clusters }
}
