package panics_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

func makesPanic() { panic("a bug") }

func TestAPanicIsAnErrorThatIsLoggedAndCounted(t *testing.T) {
	var lines []string
	log := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "panics_total", Help: "Panics."})
	err := panics.Confined(log, counter, "something is lost", func() error {
		makesPanic()
		return nil
	}, "of", "one")
	bug, panicked := errors.AsType[*panics.Error](err)
	require.True(t, panicked, "%v", err)
	require.Equal(t, "a bug", bug.Value)
	require.InDelta(t, 1, testutil.ToFloat64(counter), 0)
	require.Len(t, lines, 1)
	for _, part := range []string{"something is lost", `"of"="one"`, "a bug", "makesPanic"} {
		require.Contains(t, lines[0], part)
	}

	other := errors.New("another error")
	require.Equal(t, other, panics.Confined(log, counter, "", func() error { return other }))
	require.NoError(t, panics.Confined(log, counter, "", func() error { return nil }))
	require.InDelta(t, 1, testutil.ToFloat64(counter), 0)
	require.Len(t, lines, 1)
}

// Callers that have found a bug would otherwise fill the log's storage.
func TestAStackIsLoggedOnceAMinute(t *testing.T) {
	var lines []string
	log := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "panics_total", Help: "Panics."})
	for _, message := range []string{"over and over", "over and over", "over and over", "elsewhere"} {
		_ = panics.Confined(log, counter, message, func() error {
			makesPanic()
			return nil
		})
	}
	require.Len(t, lines, 4)
	for i, want := range []bool{true, false, false, true} {
		require.Equal(t, want, strings.Contains(lines[i], "makesPanic"), lines[i])
		require.Contains(t, lines[i], "a bug")
	}
	require.InDelta(t, 4, testutil.ToFloat64(counter), 0)
}

type collector func(chan<- prometheus.Metric)

func (collector) Describe(chan<- *prometheus.Desc) {} // anything

func (c collector) Collect(into chan<- prometheus.Metric) { c(into) }

func TestAPanicOfACollectorCostsItsMetricsAlone(t *testing.T) {
	log := funcr.New(func(string, string) {}, funcr.Options{})
	metric := func(name string) prometheus.Metric {
		return prometheus.MustNewConstMetric(prometheus.NewDesc(name, "", nil, nil), prometheus.GaugeValue, 1)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		panics.Collector(log, collector(func(into chan<- prometheus.Metric) {
			into <- metric("before")
			makesPanic()
			into <- metric("after")
		})),
		panics.Collector(log, collector(func(into chan<- prometheus.Metric) { into <- metric("other") })),
	)
	before := testutil.ToFloat64(panics.Metrics)
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Len(t, families, 2)
	require.Equal(t, "before", families[0].GetName())
	require.Equal(t, "other", families[1].GetName())
	require.InDelta(t, before+1, testutil.ToFloat64(panics.Metrics), 0)
}
