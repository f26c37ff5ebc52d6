package shimtest

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// Scraped returns the metrics of the process as the shim serves them. at is the time of its clock.
func Scraped(t *testing.T, at time.Time) scrapes.Scrape {
	t.Helper()
	return scrapes.Take(t, promhttp.HandlerFor(crmetrics.Registry, promhttp.HandlerOpts{}), at)
}

// Metric returns the sum of the series of a counter or gauge that have all of the labels, of which
// there must be one. Metrics belong to the process: a counter must be compared with its earlier
// value.
func Metric(t *testing.T, name string, labels map[string]string) float64 {
	t.Helper()
	families, err := crmetrics.Registry.Gather()
	require.NoError(t, err)
	sum, series := 0.0, 0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			matching := 0
			for _, l := range m.GetLabel() {
				if value, wanted := labels[l.GetName()]; wanted && value == l.GetValue() {
					matching++
				}
			}
			if matching == len(labels) {
				series++
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	require.Positive(t, series, "there is no series of %s with the labels %v", name, labels)
	return sum
}
