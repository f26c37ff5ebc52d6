package failedmachine

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
)

const reasonLabel = "reason"

var (
	givenUpTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "node_claims_given_up_total",
		Help: "NodeClaims that were deleted because their machine failed or was late.",
	}, []opmetrics.Label{{Name: reasonLabel, Help: "Reason for which the claim ended, or the exceeded deadline."}}, opmetrics.Alpha)
	extensionsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "registration_extensions_total",
		Help: "Number of times Karpenter's registration timeout was extended for a slow machine.",
	}, nil, opmetrics.Alpha)
)

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	for _, reason := range append(claimreasons.All(), machineFailed, machineDeleted, claimUnknown, claimEnded, claimReleased) {
		givenUpTotal.Add(0, map[string]string{reasonLabel: reason})
	}
	extensionsTotal.Add(0, nil)
}
