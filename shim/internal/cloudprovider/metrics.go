package cloudprovider

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"
)

const resultLabel = "result"

var claimsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
	Namespace: metrics.Namespace, Subsystem: "capi", Name: "claims_total",
	Help: "Attempts to claim a machine, by result: claimed, no_capacity, node_class_not_ready, or the reason of the NodeClaim's condition Launched.",
}, []opmetrics.Label{{Name: resultLabel, Help: "Result of the attempt."}}, opmetrics.Alpha)

// These are results of attempts to claim a machine. Others are reasons of the condition Launched.
const (
	resultClaimed           = "claimed"
	resultNoCapacity        = "no_capacity"
	resultNodeClassNotReady = "node_class_not_ready"
	resultError             = "error"
)

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	for _, result := range []string{
		resultClaimed, resultNoCapacity, resultNodeClassNotReady, ReasonNodeGroupsNotFound, ReasonAgentUnreachable, ReasonAgentRefused,
		ReasonClaimConflict, ReasonClaimRejected, ReasonAdoptionFailed, ReasonAdoptionRefused, ReasonClaimFailed,
		ReasonCatalogueNotSynced, ReasonNodeClassNotFound, ReasonOverlaysNotReady, ReasonNodeGroupUnknown, resultError,
	} {
		claimsTotal.Add(0, map[string]string{resultLabel: result})
	}
}

var adoptionsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
	Namespace: metrics.Namespace, Subsystem: "capi", Name: "adoptions_total",
	Help: "Attempts to adopt the machine of a NodeClaim that has no claim, by result: adopted, refused, or error.",
}, []opmetrics.Label{{Name: resultLabel, Help: "Result of the attempt."}}, opmetrics.Alpha)
