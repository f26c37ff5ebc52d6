package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/awslabs/operatorpkg/status"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
)

// describeMetrics prints a line for each metric of the shim: the type that serves it, "?" if that
// is one of several metrics of a collector, a tab, and its description. deploy/tools/metrics-docs
// makes docs/metrics.md of it.
func describeMetrics(w io.Writer) error {
	if err := connectivity.RegisterMirrors(crmetrics.Registry, map[string]connectivity.Mirror{"nodegroups": nil}); err != nil {
		return err
	}
	if err := connectivity.RegisterCertificates(crmetrics.Registry, nil); err != nil {
		return err
	}
	status.NewController[*v1alpha1.ClusterAPINodeClass](nil, nil, status.EmitDeprecatedMetrics)
	registry, ok := crmetrics.Registry.(*prometheus.Registry)
	if !ok {
		return fmt.Errorf("a registry of type %T does not describe its metrics", crmetrics.Registry)
	}
	all := make(chan *prometheus.Desc, 10_000) // the registry is locked until all are read
	registry.Describe(all)
	close(all)
	for d := range all {
		of := "?"
		if existing := new(prometheus.AlreadyRegisteredError); errors.As(registry.Register(described{d}), existing) {
			of = fmt.Sprintf("%T", existing.ExistingCollector)
		}
		fmt.Fprintf(w, "%s\t%s\n", of, d)
	}
	return nil
}

// described is a collector that claims to serve a metric, so that the registry tells which one
// does.
type described struct{ *prometheus.Desc }

// Describe implements [prometheus.Collector].
func (d described) Describe(all chan<- *prometheus.Desc) { all <- d.Desc }

// Collect implements [prometheus.Collector].
func (described) Collect(chan<- prometheus.Metric) {}
