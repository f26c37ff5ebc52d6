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
		Help: "NodeClaims that were given their machine's provider ID. With registered=true, core had written the placeholder back.",
	}, []opmetrics.Label{{Name: registeredLabel, Help: "Whether the NodeClaim was registered before."}}, opmetrics.Alpha)
	conflictsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "provider_id_conflicts_total",
		Help: "Times a NodeClaim could not be given its machine's provider ID, as it or another NodeClaim has a contradicting one.",
	}, nil, opmetrics.Alpha)
)

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	conflictsTotal.Add(0, nil)
}
