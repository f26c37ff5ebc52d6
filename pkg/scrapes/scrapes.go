// Package scrapes records what the alerts of the charts look at: the metrics that a component
// serves without the cause of an alert, and with it. A test of the component makes the cause and
// takes both scrapes. test/monitoring evaluates the alert on the recordings. The package is for
// this repository's own tests, in several modules; it is of no use outside.
package scrapes

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// Scrape is what a component has served to Prometheus. The zero value is that of a component that
// did not answer.
type Scrape struct {
	text string
	at   time.Time
}

// Take scrapes a handler of metrics. at is the component's own time.
func Take(tb testing.TB, handler http.Handler, at time.Time) Scrape {
	tb.Helper()
	response := httptest.NewRecorder()
	handler.ServeHTTP(response, httptest.NewRequestWithContext(tb.Context(), http.MethodGet, "/metrics", http.NoBody))
	require.Equal(tb, http.StatusOK, response.Code, response.Body)
	return Scrape{text: response.Body.String(), at: at}
}

// Get scrapes a URL as Prometheus does. The error says why there is no scrape.
func Get(tb testing.TB, url string) (Scrape, error) {
	tb.Helper()
	request, err := http.NewRequestWithContext(tb.Context(), http.MethodGet, url, http.NoBody)
	require.NoError(tb, err)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return Scrape{}, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, response.Status)
	}
	return Scrape{text: string(text), at: time.Now()}, err
}

// Option changes what is recorded.
type Option func(*options)

type options struct {
	// of changes the labels of a series, and reports whether it is recorded.
	of []func(labels map[string]string) (kept bool)
	// growth is the most that is recorded of a counter's growth.
	growth float64
}

// Only leaves out series that have the label with another value, such as those of other tests of
// the process.
func Only(label, value string) Option {
	return func(o *options) {
		o.of = append(o.of, func(labels map[string]string) bool {
			has, found := labels[label]
			return !found || has == value
		})
	}
}

// Renamed replaces the value of a label, such as that of a namespace with a random name.
func Renamed(label, from, to string) Option {
	return func(o *options) {
		o.of = append(o.of, func(labels map[string]string) bool {
			if labels[label] == from {
				labels[label] = to
			}
			return true
		})
	}
}

// Once records a counter that has grown as if it had grown by 1. It is for a cause that the
// component counts again and again, while the test waits for the first time.
func Once() Option { return func(o *options) { o.growth = 1 } }

// Record compares the series of the metrics that an alert reads with the recording in
// testdata/alerts of the test's package. With the environment variable WRITE_SCRAPES, it writes the
// recording instead.
func Record(tb testing.TB, alert string, without, with Scrape, opts ...Option) {
	tb.Helper()
	o := options{growth: math.Inf(1)}
	for _, opt := range opts {
		opt(&o)
	}
	names := metricsOf(tb, alert)
	made := Recording{Test: tb.Name(), Series: o.join(without.samples(tb, names, o), with.samples(tb, names, o))}
	require.NotEmpty(tb, made.Series, "the scrapes have none of the metrics of %s", alert)
	path := filepath.Join("testdata/alerts", alert+".txt")
	if os.Getenv("WRITE_SCRAPES") != "" {
		require.NoError(tb, os.MkdirAll(filepath.Dir(path), 0o755))              //nolint:gosec // as the other folders of the repository
		require.NoError(tb, os.WriteFile(path, []byte(made.text(alert)), 0o644)) //nolint:gosec // as its other files
		tb.Log("wrote", path, "instead of comparing the scrapes with it")
		return
	}
	is, err := Read(path)
	require.NoError(tb, err, rewrite)
	require.Equal(tb, is.Test, made.Test, "%s: %s", path, rewrite)
	require.Equal(tb, is.names(), made.names(), "%s: %s", path, rewrite)
	for i, s := range made.Series {
		was := is.Series[i]
		require.True(tb, was.near(s), "%s has %q, and now it is %q. %s", path, was, s, rewrite)
	}
}

const rewrite = "Run the test with WRITE_SCRAPES=1 to record it anew, then go test ./test/monitoring."

// metricsOf returns the names of the metrics that an alert of the charts reads.
func metricsOf(tb testing.TB, alert string) []string {
	tb.Helper()
	_ = os.Getenv("TESTED_CHARTS") // declares the alerts as inputs of the test cache
	root, err := os.Getwd()
	require.NoError(tb, err)
	for !exists(filepath.Join(root, "go.work")) {
		require.NotEqual(tb, root, filepath.Dir(root), "the repository has a go.work")
		root = filepath.Dir(root)
	}
	files, err := filepath.Glob(filepath.Join(root, "deploy/charts/*/alerts.yaml"))
	require.NoError(tb, err)
	for _, file := range files {
		content, err := os.ReadFile(file) //nolint:gosec // a file of the repository
		require.NoError(tb, err)
		var rules struct {
			Groups []struct {
				Rules []struct{ Alert, Expr string }
			}
		}
		require.NoError(tb, yaml.Unmarshal(content, &rules))
		for _, group := range rules.Groups {
			for _, rule := range group.Rules {
				if rule.Alert == alert {
					return metric.FindAllString(rule.Expr, -1)
				}
			}
		}
	}
	require.Fail(tb, "there is no alert "+alert)
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

var (
	metric = regexp.MustCompile(`\b(?:capi_agent|karpenter)_\w+`)
	typed  = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)
	line   = regexp.MustCompile(`(?m)^([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})? (\S+)$`)
	pair   = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)
	moment = regexp.MustCompile(`_(?:timestamp|not_before|not_after)_seconds$`)
)

// samples returns the series of these names in a scrape, by name and labels. The value is that of
// With.
func (s Scrape) samples(tb testing.TB, names []string, o options) map[string]Series {
	tb.Helper()
	types := map[string]string{}
	for _, fields := range typed.FindAllStringSubmatch(s.text, -1) {
		types[fields[1]] = fields[2]
	}
	found := map[string]Series{}
	for _, fields := range line.FindAllStringSubmatch(s.text, -1) {
		name, labels := fields[1], labelsOf(fields[1], fields[2])
		if !slices.Contains(names, name) || !lo.EveryBy(o.of, func(kept func(map[string]string) bool) bool { return kept(labels) }) {
			continue
		}
		value, err := strconv.ParseFloat(fields[3], 64)
		require.NoError(tb, err, fields[0])
		of := Series{Kind: Gauge, Name: name + written(labels), With: Value{Found: true, Number: value}}
		if types[name] == "counter" || types[strings.TrimSuffix(name, "_bucket")] == "histogram" {
			of.Kind = Counter
		}
		// The metrics of certificates are 0 if there is none.
		if moment.MatchString(name) && value != 0 {
			of.With = Value{Found: true, FromNow: true, Number: math.Round(value - float64(s.at.UnixMilli())/1000)}
		}
		found[of.Name] = of
	}
	return found
}

// labelsOf returns the labels of a series. Those of a build differ from one to the next.
func labelsOf(name, text string) map[string]string {
	labels := map[string]string{}
	for _, label := range pair.FindAllStringSubmatch(text, -1) {
		labels[label[1]] = label[2]
		if strings.HasSuffix(name, "_build_info") {
			labels[label[1]] = "any"
		}
	}
	return labels
}

// written returns labels in the notation of Prometheus. Their values are escaped.
func written(labels map[string]string) string {
	if len(labels) == 0 {
		return ""
	}
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		pairs = append(pairs, name+`="`+labels[name]+`"`)
	}
	return "{" + strings.Join(pairs, ",") + "}"
}

// join returns the series of two scrapes. Counters count from the first scrape on. Those that have
// not grown are left out: other tests of the process may have made them. The buckets of a histogram
// are needed all the same.
func (o options) join(without, with map[string]Series) []Series {
	var all []Series
	for _, name := range lo.Union(slices.Collect(maps.Keys(without)), slices.Collect(maps.Keys(with))) {
		before, after := without[name], with[name]
		s := Series{Kind: cmp.Or(before.Kind, after.Kind), Name: name, Without: before.With, With: after.With}
		if s.Kind == Counter && s.With.Found {
			s.With.Number = min(s.With.Number-s.Without.Number, o.growth)
		}
		if s.Kind == Counter {
			s.Without.Number = 0
		}
		if s.Kind == Counter && s.Without.Found && s.With == s.Without && !strings.Contains(name, "_bucket{") {
			continue
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Series) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
