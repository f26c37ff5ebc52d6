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
	// fitInterval is how often an agent that answers is asked again: it may be upgraded, or rolled
	// back, behind the same address.
	fitInterval = 5 * time.Minute
	// fitRetry is how soon an agent that did not answer is asked again.
	fitRetry = 5 * time.Second
	// maxSkew is how many minor versions the agent and the shim may be apart; see
	// docs/compatibility.md.
	maxSkew = 1
)

// Reasons why an agent and a shim do not fit.
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

// Verdict is whether an agent and a shim are compatible. The zero Verdict means that it is not
// known, because no agent has answered yet.
type Verdict struct {
	// Known is true once an agent has answered.
	Known bool
	// Reason and Message say why they do not fit, and what to do. They are empty if they do.
	Reason, Message string
}

// Fits reports whether they are known to fit.
func (v Verdict) Fits() bool { return v.Known && v.Reason == "" }

// Judge returns the verdict on an agent by its status, for a shim of a version.
func Judge(agent *agentv1alpha1.GetStatusResponse, shim string) Verdict {
	served := agent.GetServedApiVersions()
	if len(served) == 0 {
		served = []string{agent.GetApiVersion()}
	}
	if !slices.Contains(served, apiPackage) {
		return Verdict{true, ReasonAPIVersionNotServed, fmt.Sprintf(
			"the agent (version %s) serves the API %s, and this shim (version %s) calls %s: bring them to versions that are at most one minor version apart",
			agent.GetVersion(), strings.Join(served, ", "), shim, apiPackage)}
	}
	if missing := features.Missing(agent.GetFeatures(), required()); len(missing) > 0 {
		return Verdict{true, ReasonFeaturesMissing, fmt.Sprintf(
			"the agent (version %s) lacks features that this shim (version %s) relies on: %s; upgrade the agent",
			agent.GetVersion(), shim, strings.Join(missing, ", "))}
	}
	if older := skewed(agent.GetVersion(), shim); older != "" {
		return Verdict{true, ReasonVersionSkew, fmt.Sprintf(
			"the agent (version %s) and this shim (version %s) are more than one minor version apart, which is not supported: upgrade the %s",
			agent.GetVersion(), shim, older)}
	}
	return Verdict{Known: true}
}

// skewed returns which of the two is too old for the other. It is empty if they are close enough, or
// if one is no release.
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

// FitConfig configures a [Fit].
type FitConfig struct {
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

// Fit checks whether the agent and this shim are compatible: at the start, whenever the connection
// was lost, and at intervals.
type Fit struct {
	config  FitConfig
	changes chan struct{}

	mu      sync.Mutex
	verdict Verdict
}

// NewFit returns a runnable that judges the agent.
func NewFit(c FitConfig) *Fit { return &Fit{config: c, changes: make(chan struct{}, 1)} }

// Verdict returns the verdict on the agent that answered last.
func (f *Fit) Verdict() Verdict {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.verdict
}

// Changes receives a value after the verdict has changed. It has one reader.
func (f *Fit) Changes() <-chan struct{} { return f.changes }

// NeedLeaderElection returns false, so that a new leader knows the verdict at once.
func (*Fit) NeedLeaderElection() bool { return false }

// Start judges the agent until ctx is done.
func (f *Fit) Start(ctx context.Context) error {
	connection, stop := f.config.Connection.StateChanges()
	defer stop()
	for {
		next := fitInterval
		if !f.ask(ctx) {
			next = fitRetry
		}
		timer := f.config.Clock.NewTimer(next)
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

// ask judges the agent once. It reports whether the agent has answered.
func (f *Fit) ask(ctx context.Context) bool {
	bounded, cancel := context.WithTimeout(ctx, f.config.Timeout)
	defer cancel()
	status, err := f.config.Status.GetStatus(bounded, &agentv1alpha1.GetStatusRequest{})
	switch {
	case err == nil:
		f.judged(ctx, Judge(status, f.config.Version), status.GetVersion())
	case grpcstatus.Code(err) == codes.Unimplemented:
		f.judged(ctx, Verdict{true, ReasonAPIVersionNotServed, fmt.Sprintf(
			"the server at the agent's address does not serve the API %s that this shim (version %s) calls", apiPackage, f.config.Version)}, "")
	default:
		// The connection's own condition and log have the reason.
		return false
	}
	return true
}

func (f *Fit) judged(ctx context.Context, verdict Verdict, agent string) {
	f.mu.Lock()
	before := f.verdict
	f.verdict = verdict
	f.mu.Unlock()
	compatible.Set(map[bool]float64{true: 1}[verdict.Fits()], nil)
	if verdict == before {
		return
	}
	logger := log.FromContext(ctx).WithValues("agentVersion", agent, "shimVersion", f.config.Version)
	if verdict.Fits() {
		logger.Info("the agent and this shim are compatible")
	} else {
		logger.Error(nil, "the agent and this shim are not compatible", "reason", verdict.Reason, "message", verdict.Message)
	}
	select {
	case f.changes <- struct{}{}:
	default: // the reader has not received the last one yet
	}
}
