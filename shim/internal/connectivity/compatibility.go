package connectivity

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	// checkInterval is how often an agent that answers is asked again: it may be upgraded, or
	// rolled back, behind the same address.
	checkInterval = 5 * time.Minute
	// checkRetry is how soon an agent that did not answer is asked again.
	checkRetry = 5 * time.Second
	// maxSkew is how many minor versions the agent and the shim may be apart; see
	// docs/compatibility.md.
	maxSkew = 1
)

// Reasons why an agent and a shim are not compatible.
const (
	// ReasonAPIVersionNotServed means that the agent does not serve the API package that the shim
	// calls.
	ReasonAPIVersionNotServed = "APIVersionNotServed"
	// ReasonFeaturesMissing means that the agent lacks features that the shim relies on.
	ReasonFeaturesMissing = "FeaturesMissing"
	// ReasonVersionSkew means that the versions are further apart than is supported.
	ReasonVersionSkew = "VersionSkew"
)

// apiPackage is the API package that the shim calls.
var apiPackage = string(agentv1alpha1.File_capi_agent_v1alpha1_status_proto.Package())

// required returns the features of an agent that the shim relies on. A feature is added here only
// one minor version after agents have it; see docs/compatibility.md.
func required() []string {
	return []string{features.AdoptMachines, features.ReturnMachines, features.SpokeIDs, features.HeldNodeGroups}
}

var compatible = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
	Namespace: metrics.Namespace, Subsystem: subsystem, Name: "compatible",
	Help: "1 if this shim and the agent that responded last are compatible, 0 otherwise. The condition AgentCompatible contains the reason.",
}, nil, opmetrics.Alpha)

// Compatibility is whether an agent and a shim are compatible. The zero value means that it is not
// known, because no agent has answered yet.
type Compatibility struct {
	// Known is true once an agent has answered.
	Known bool
	// Reason and Message say why they are not compatible, and what to do. They are empty if they
	// are.
	Reason, Message string
}

// Compatible reports whether they are known to be compatible.
func (c Compatibility) Compatible() bool { return c.Known && c.Reason == "" }

// CompatibilityOf compares an agent, by its status, with a shim of a version.
func CompatibilityOf(agent *agentv1alpha1.GetStatusResponse, shim string) Compatibility {
	served := agent.GetServedApiVersions()
	if len(served) == 0 {
		served = []string{agent.GetApiVersion()}
	}
	if !slices.Contains(served, apiPackage) {
		return Compatibility{true, ReasonAPIVersionNotServed, fmt.Sprintf(
			"the agent (version %s) serves the API %s, and this shim (version %s) calls %s: bring them to versions that are at most one minor version apart",
			agent.GetVersion(), strings.Join(served, ", "), shim, apiPackage)}
	}
	if missing := features.Missing(agent.GetFeatures(), required()); len(missing) > 0 {
		return Compatibility{true, ReasonFeaturesMissing, fmt.Sprintf(
			"the agent (version %s) lacks features that this shim (version %s) relies on: %s; upgrade the agent",
			agent.GetVersion(), shim, strings.Join(missing, ", "))}
	}
	if older := skewed(agent.GetVersion(), shim); older != "" {
		return Compatibility{true, ReasonVersionSkew, fmt.Sprintf(
			"the agent (version %s) and this shim (version %s) are more than one minor version apart, which is not supported: upgrade the %s",
			agent.GetVersion(), shim, older)}
	}
	return Compatibility{Known: true}
}

// skewed returns which of the two is too old for the other. It is empty if they are close enough,
// or if one is no release.
func skewed(agent, shim string) string {
	a, err := version.ParseSemantic(agent)
	if err != nil {
		return ""
	}
	s, err := version.ParseSemantic(shim)
	if err != nil {
		return ""
	}
	switch {
	case a.Major() < s.Major(), a.Major() == s.Major() && a.Minor()+maxSkew < s.Minor():
		return "agent"
	case a.Major() > s.Major(), s.Minor()+maxSkew < a.Minor():
		return "shim"
	}
	return ""
}

// CompatibilityConfig configures a [CompatibilityCheck].
type CompatibilityConfig struct {
	// Status describes the agent. REQUIRED.
	Status agentv1alpha1.StatusServiceClient
	// Connection tells when another agent may have answered. REQUIRED.
	Connection Mirror
	// Version is that of this shim.
	Version string
	// Timeout limits a call. REQUIRED.
	Timeout time.Duration
	// Clock provides the time. REQUIRED.
	Clock clock.WithTicker
}

// CompatibilityCheck checks whether the agent and this shim are compatible: at the start, whenever
// the connection was lost, and at intervals.
type CompatibilityCheck struct {
	config  CompatibilityConfig
	changes chan struct{}

	mu     sync.Mutex
	result Compatibility
}

// NewCompatibilityCheck returns a runnable that checks the agent.
func NewCompatibilityCheck(c CompatibilityConfig) *CompatibilityCheck {
	return &CompatibilityCheck{config: c, changes: make(chan struct{}, 1)}
}

// Result returns the result for the agent that answered last.
func (c *CompatibilityCheck) Result() Compatibility {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.result
}

// Changes receives a value after the result has changed. It has one reader.
func (c *CompatibilityCheck) Changes() <-chan struct{} { return c.changes }

// NeedLeaderElection returns false, so that a new leader knows the result at once.
func (*CompatibilityCheck) NeedLeaderElection() bool { return false }

// Start checks the agent until ctx is done.
func (c *CompatibilityCheck) Start(ctx context.Context) error {
	connection, stop := c.config.Connection.StateChanges()
	defer stop()
	for {
		next := checkInterval
		if !c.ask(ctx) {
			next = checkRetry
		}
		timer := c.config.Clock.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-connection:
			timer.Stop()
		case <-timer.C():
		}
	}
}

// ask checks the agent once. It reports whether the agent has answered.
func (c *CompatibilityCheck) ask(ctx context.Context) bool {
	bounded, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	status, err := c.config.Status.GetStatus(bounded, &agentv1alpha1.GetStatusRequest{})
	switch {
	case err == nil:
		c.setResult(ctx, CompatibilityOf(status, c.config.Version), status.GetVersion())
	case grpcstatus.Code(err) == codes.Unimplemented:
		c.setResult(ctx, Compatibility{true, ReasonAPIVersionNotServed, fmt.Sprintf(
			"the server at the agent's address does not serve the API %s that this shim (version %s) calls", apiPackage, c.config.Version)}, "")
	default:
		// The connection's own condition and log have the reason.
		return false
	}
	return true
}

func (c *CompatibilityCheck) setResult(ctx context.Context, result Compatibility, agent string) {
	c.mu.Lock()
	before := c.result
	c.result = result
	c.mu.Unlock()
	compatible.Set(map[bool]float64{true: 1}[result.Compatible()], nil)
	if result == before {
		return
	}
	logger := log.FromContext(ctx).WithValues("agentVersion", agent, "shimVersion", c.config.Version)
	if result.Compatible() {
		logger.Info("the agent and this shim are compatible")
	} else {
		logger.Error(nil, "the agent and this shim are not compatible", "reason", result.Reason, "cause", result.Message)
	}
	select {
	case c.changes <- struct{}{}:
	default: // the reader has not received the last one yet
	}
}
