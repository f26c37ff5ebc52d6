package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
)

func newMetricsDocs() *cobra.Command {
	return &cobra.Command{
		Use: "metrics-docs", Short: "Describe the metrics, for make generate-docs", Hidden: true, Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return describeMetrics(command.Context(), command.OutOrStdout())
		},
	}
}

// describeMetrics prints a line for each metric of an agent that uses everything: the type that
// serves it, "?" if that is one of several metrics of a collector, a tab, and its description.
// deploy/tools/metrics-docs makes docs/metrics.md of it.
func describeMetrics(ctx context.Context, w io.Writer) error {
	o := options.New()
	o.MetricsBindAddress, o.HealthProbeBindAddress = "0", "0"
	o.Policy, o.PriceList, o.PublishNodePools = "namespace/policy", "namespace/prices", true
	scheme, err := hub.Scheme()
	if err != nil {
		return err
	}
	mapper := meta.NewDefaultRESTMapper(scheme.PrioritizedVersionsAllGroups())
	for kind := range scheme.AllKnownTypes() {
		mapper.Add(kind, meta.RESTScopeNamespace)
	}
	// Nothing is sent to the hub before the agent runs.
	config := agent.Config{Options: o, Hub: &rest.Config{Host: "localhost"}, Mapper: mapper, Registerer: metrics.Registry}
	if _, err := agent.New(ctx, config); err != nil {
		return err
	}
	for _, collector := range append(server.CertificateMetrics("server", nil), server.HandshakeMetric()) {
		if err := metrics.Registry.Register(collector); err != nil {
			return fmt.Errorf("registering the listener's metrics: %w", err)
		}
	}
	registry, ok := metrics.Registry.(*prometheus.Registry)
	if !ok {
		return fmt.Errorf("a registry of type %T does not describe its metrics", metrics.Registry)
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
