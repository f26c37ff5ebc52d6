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

var adoptionsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
	Namespace: metrics.Namespace, Subsystem: "capi", Name: "adoptions_total",
	Help: "Attempts to adopt the machine of a NodeClaim that has no claim, by result: adopted, refused, or error.",
}, []opmetrics.Label{{Name: resultLabel, Help: "Result of the attempt."}}, opmetrics.Alpha)
