package panics_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

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
	message := unique(t)
	err := panics.Confined(log, counter, message, func() error {
		makesPanic()
		return nil
	}, "of", "one")
	bug, panicked := errors.AsType[*panics.Error](err)
	require.True(t, panicked, "%v", err)
	require.Equal(t, "a bug", bug.Value)
	require.InDelta(t, 1, testutil.ToFloat64(counter), 0)
	require.Len(t, lines, 1)
	for _, part := range []string{message, `"of"="one"`, "a bug", "makesPanic"} {
		require.Contains(t, lines[0], part)
	}

	other := errors.New("another error")
	require.Equal(t, other, panics.Confined(log, counter, "", func() error { return other }))
	require.NoError(t, panics.Confined(log, counter, "", func() error { return nil }))
	require.InDelta(t, 1, testutil.ToFloat64(counter), 0)
	require.Len(t, lines, 1)
}

// Callers that have found a bug would otherwise fill the log's storage. Another bug has its own
// stack.
func TestAStackIsLoggedOnceAMinuteForEachPlace(t *testing.T) {
	var lines []string
	log := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "panics_total", Help: "Panics."})
	message := unique(t)
	index := func(all []int) { lines = append(lines, strconv.Itoa(all[0])) }
	for _, do := range []func(){makesPanic, makesPanic, func() { index(nil) }, makesPanic, func() { index(nil) }, func() { index(nil) }} {
		_ = panics.Confined(log, counter, message, func() error {
			do()
			return nil
		})
	}
	require.Len(t, lines, 6)
	for i, want := range []bool{true, false, true, false, false, false} {
		require.Equal(t, want, strings.Contains(lines[i], "panics_test.go"), "%d: %s", i, lines[i])
	}
	require.Contains(t, lines[3], "a bug")
	require.InDelta(t, 6, testutil.ToFloat64(counter), 0)
}

// unique returns a message whose panics have not been logged yet.
func unique(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("%s at %d", t.Name(), time.Now().UnixNano())
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
