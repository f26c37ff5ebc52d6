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
		Help: "Time at which the agent last accepted the live set, in seconds since 1970. Until it accepts one, the time of the first attempt.",
	}, nil, opmetrics.Alpha)
	errorsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claim_sync_errors_total",
		Help: "Number of failed claim synchronizations.",
	}, nil, opmetrics.Alpha)
	collectedTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claims_collected_total",
		Help: "Claims that the agent released because they had no NodeClaim.",
	}, nil, opmetrics.Alpha)
	keptClaims = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "claims_kept_without_node_claim",
		Help: "Claims without a NodeClaim that the agent keeps, as of the last claim synchronization.",
	}, nil, opmetrics.Alpha)
	unknownClaims = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: subsystem, Name: "node_claims_without_claim",
		Help: "NodeClaims without a live claim, as of the last claim synchronization.",
	}, nil, opmetrics.Alpha)
)

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	errorsTotal.Add(0, nil)
	collectedTotal.Add(0, nil)
}
