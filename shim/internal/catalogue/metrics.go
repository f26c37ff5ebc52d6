package catalogue

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"
)

var (
	nodeGroups = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: "capi_catalogue", Name: "node_groups",
		Help: "Number of node groups that pods can be scheduled on.",
	}, nil, opmetrics.Alpha)
	nodeGroupsUnusable = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: "capi_catalogue", Name: "node_groups_unusable",
		Help: "Number of node groups that pods cannot be scheduled on because a value in their description is not a valid node label.",
	}, nil, opmetrics.Alpha)
	rebuildSeconds = opmetrics.NewPrometheusHistogram(crmetrics.Registry, prometheus.HistogramOpts{
		Namespace: metrics.Namespace, Subsystem: "capi_catalogue", Name: "rebuild_duration_seconds",
		Help:    "Time taken to build a snapshot of the catalogue, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
	}, nil, opmetrics.Alpha)
)
