package claimsync

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"
)

const subsystem = "capi"

var (
	lastSuccess = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claim_sync_last_success_timestamp_seconds",
		Help: "When the agent last took the set of NodeClaims.",
	}, nil, opmetrics.Alpha)
	errorsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claim_sync_errors_total",
		Help: "Rounds of claim sync that failed.",
	}, nil, opmetrics.Alpha)
	collectedTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claims_collected_total",
		Help: "Claims that the agent released because no NodeClaim owned them.",
	}, nil, opmetrics.Alpha)
	keptClaims = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claims_kept_without_node_claim",
		Help: "Claims that no NodeClaim owns and that the agent keeps, as of the last round of claim sync.",
	}, nil, opmetrics.Alpha)
	unknownClaims = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "node_claims_without_claim",
		Help: "NodeClaims that the agent knows no live claim for, as of the last round of claim sync.",
	}, nil, opmetrics.Alpha)
)

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	errorsTotal.Add(0, nil)
	collectedTotal.Add(0, nil)
}
