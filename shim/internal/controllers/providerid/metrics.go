package providerid

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"
)

const registeredLabel = "registered"

var (
	patchesTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "provider_id_patches_total",
		Help: "NodeClaims whose provider ID was set to that of their machine. With registered=true, Karpenter core had restored the placeholder.",
	}, []opmetrics.Label{{Name: registeredLabel, Help: "Whether the NodeClaim was registered before."}}, opmetrics.Alpha)
	conflictsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "provider_id_conflicts_total",
		Help: "Number of times a NodeClaim's provider ID could not be set because it, or another NodeClaim, has a conflicting one.",
	}, nil, opmetrics.Alpha)
)

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	conflictsTotal.Add(0, nil)
}
