package adoption

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"
)

var (
	awaited = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "node_claims_awaited",
		Help: "NodeClaims that have not been checked for adoption since this process began to act. Nothing is planned or disrupted until there is none.",
	}, nil, opmetrics.Alpha)
	returnsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "returns_total",
		Help: "NodeClaims that were detached from their machine, which is the user's from then on.",
	}, nil, opmetrics.Alpha)
)
