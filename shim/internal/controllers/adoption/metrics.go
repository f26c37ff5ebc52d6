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
		Help: "NodeClaims that have not been checked for adoption since this process became the leader. " +
			"Nothing is provisioned or disrupted until all have been checked.",
	}, nil, opmetrics.Alpha)
	returnsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
		Namespace: metrics.Namespace, Subsystem: "capi", Name: "returns_total",
		Help: "NodeClaims whose machine was returned to the user.",
	}, nil, opmetrics.Alpha)
)
