package fakeagent

import (
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Manual is the delay, in [Infrastructure], of what never happens by itself: the test does it.
const Manual time.Duration = -1

// Infrastructure says how long after the step before it each step of a machine's life happens by itself. Zero is at once,
// [Manual] only when the test says so.
type Infrastructure struct {
	// Appear is from the claim to the Machine object.
	Appear time.Duration
	// Provision is from the Machine object to its provider ID.
	Provision time.Duration
	// Join is from the provider ID to the Node.
	Join time.Duration
	// Terminate is from the request to delete the Machine until it is gone.
	Terminate time.Duration
}

// Option changes how an [Agent] is made.
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
		trustDomain:    TrustDomain,
		clusters:       []*agentv1alpha1.ClusterRef{DefaultCluster()},
	}
}

// WithClock makes every delay, time stamp and heartbeat follow the clock, and the mirrors of the agent's clients too.
func WithClock(c clock.WithTickerAndDelayedExecution) Option {
	return func(s *settings) { s.clock = c }
}

// WithLogger gives the agent's clients a logger.
func WithLogger(logger logr.Logger) Option {
	return func(s *settings) { s.logger = logger }
}

// WithHeartbeatInterval sets how long a stream may be quiet before a heartbeat is sent. Default
// [client.DefaultHeartbeatInterval].
func WithHeartbeatInterval(interval time.Duration) Option {
	return func(s *settings) { s.heartbeat = interval }
}

// WithWatchBuffer sets how many changes are kept for a slow reader of a stream before it gets a resync. Default 1024.
func WithWatchBuffer(changes int) Option {
	return func(s *settings) { s.watchBuffer = changes }
}

// WithInfrastructure sets how machines get on by themselves.
func WithInfrastructure(infrastructure Infrastructure) Option {
	return func(s *settings) { s.infrastructure = infrastructure }
}

// WithSpareGracePeriod sets how long a machine that lost its claim before it had a Node is kept for the next claim. Default 0.
func WithSpareGracePeriod(period time.Duration) Option {
	return func(s *settings) { s.spareGrace = period }
}

// WithCoolDown sets how long a node group is left alone after a claim was released whose machine had failed
// ([Agent.GiveUp], or as the release said). Default 0: not at all.
func WithCoolDown(period time.Duration) Option {
	return func(s *settings) { s.coolDown = period }
}

// WithTokenLifetime sets how long a token of ListClaims can be used. Default one hour.
func WithTokenLifetime(lifetime time.Duration) Option {
	return func(s *settings) { s.tokenLifetime = lifetime }
}

// WithVersion sets the version that GetStatus reports. Default `devel`.
func WithVersion(version string) Option {
	return func(s *settings) { s.version = version }
}

// WithTrustDomain sets the SPIFFE trust domain of the callers. Default [TrustDomain].
func WithTrustDomain(domain string) Option {
	return func(s *settings) { s.trustDomain = domain }
}

// WithAuthority sets what signs the certificates of onboarded Clusters. Default: one that is made when it is needed.
func WithAuthority(authority *Authority) Option {
	return func(s *settings) { s.authority = authority }
}

// WithClusters sets which Clusters there are at first. Default: [DefaultCluster] alone.
func WithClusters(clusters ...*agentv1alpha1.ClusterRef) Option {
	return func(s *settings) { s.clusters = clusters }
}
