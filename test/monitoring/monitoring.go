// Package monitoring reads what the charts and the docs say about metrics, and evaluates it with
// Prometheus's own engine.
package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
	"github.com/samber/lo"
	"sigs.k8s.io/yaml"
)

// Alert is an alert of a chart.
type Alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// Rules are the content of a file of rules.
type Rules struct {
	Groups []struct {
		Name  string  `json:"name"`
		Rules []Alert `json:"rules"`
	} `json:"groups"`
}

// Alerts returns the alerts of the charts below a repository's root.
func Alerts(root string) ([]Alert, error) {
	files, err := filepath.Glob(filepath.Join(root, "deploy/charts/*/alerts.yaml"))
	if err != nil {
		return nil, err
	}
	var alerts []Alert
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var rules Rules
		if err := yaml.UnmarshalStrict(content, &rules); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, group := range rules.Groups {
			alerts = append(alerts, group.Rules...)
		}
	}
	return alerts, nil
}

// Query is a query of a dashboard.
type Query struct {
	// Dashboard is the file's name, and Panel the panel's title, or the name of a variable.
	Dashboard, Panel string
	Expr             string
}

// variables are what Grafana replaces in a query. Variables that select labels stay: they are in
// strings.
var variables = strings.NewReplacer("$__rate_interval", "5m", "$__interval", "1m", "$__range", "1h")

// Queries returns the queries of the charts' dashboards below a repository's root.
func Queries(root string) ([]Query, error) {
	files, err := filepath.Glob(filepath.Join(root, "deploy/charts/*/dashboards/*.json"))
	if err != nil {
		return nil, err
	}
	var queries []Query
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var dashboard struct {
			Panels []struct {
				Title   string `json:"title"`
				Targets []struct {
					Expr string `json:"expr"`
				} `json:"targets"`
			} `json:"panels"`
			Templating struct {
				List []struct {
					Name  string `json:"name"`
					Type  string `json:"type"`
					Query string `json:"query"`
				} `json:"list"`
			} `json:"templating"`
		}
		if err := json.Unmarshal(content, &dashboard); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, panel := range dashboard.Panels {
			for _, target := range panel.Targets {
				queries = append(queries, Query{Dashboard: filepath.Base(file), Panel: panel.Title, Expr: variables.Replace(target.Expr)})
			}
		}
		for _, variable := range dashboard.Templating.List {
			if variable.Type != "query" {
				continue
			}
			fields := labelValues.FindStringSubmatch(variable.Query)
			if fields == nil {
				return nil, fmt.Errorf("%s: the variable %s is no label_values(): %s", file, variable.Name, variable.Query)
			}
			expr := fmt.Sprintf("sum by (%s) (%s)", fields[2], fields[1])
			queries = append(queries, Query{Dashboard: filepath.Base(file), Panel: variable.Name, Expr: expr})
		}
	}
	return queries, nil
}

var labelValues = regexp.MustCompile(`^label_values\((.+), ?([a-z_]+)\)$`)

// Metrics are the labels of each series name.
type Metrics map[string][]string

// targetLabels are labels that Prometheus adds to every series of a target.
var targetLabels = []string{model.MetricNameLabel, "instance", "job", "namespace", "pod"}

var row = regexp.MustCompile("^\\| `([a-z_0-9]+)` \\| (counter|gauge|histogram|summary) \\| [a-z]* \\| (?:`(.*)`)? ?\\| ")

// ReadMetrics returns the series of the metrics in docs/metrics.md below a repository's root.
func ReadMetrics(root string) (Metrics, error) {
	page, err := os.ReadFile(filepath.Join(root, "docs/metrics.md"))
	if err != nil {
		return nil, err
	}
	// The page does not list Go's own, and names them.
	metrics := Metrics{"process_resident_memory_bytes": nil}
	for line := range strings.Lines(string(page)) {
		fields := row.FindStringSubmatch(line)
		if fields == nil {
			continue
		}
		name := fields[1]
		of := lo.Compact(strings.Split(fields[3], "`, `"))
		switch fields[2] {
		case "histogram":
			metrics[name+"_bucket"] = append([]string{labels.BucketLabel}, of...)
			metrics[name+"_sum"], metrics[name+"_count"] = of, of
		case "summary":
			metrics[name] = append([]string{"quantile"}, of...)
			metrics[name+"_sum"], metrics[name+"_count"] = of, of
		default:
			metrics[name] = of
		}
	}
	if len(metrics) == 1 {
		return nil, errors.New("docs/metrics.md lists no metrics")
	}
	return metrics, nil
}

// Check returns an error unless the expression is valid and names only metrics that exist, with
// labels that they have.
func (m Metrics) Check(expr string) error {
	parsed, err := parser.ParseExpr(expr)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	var wrong []error
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		name, _ := lo.Find(selector.LabelMatchers, func(matcher *labels.Matcher) bool { return matcher.Name == model.MetricNameLabel })
		if name == nil || name.Type != labels.MatchEqual {
			wrong = append(wrong, fmt.Errorf("%s names no metric", selector))
			return nil
		}
		of, exists := m[name.Value]
		if !exists {
			wrong = append(wrong, fmt.Errorf("there is no metric %s", name.Value))
		}
		of = slices.Concat(of, targetLabels)
		for _, label := range of {
			known[label] = true
		}
		for _, matcher := range selector.LabelMatchers {
			if !lo.Contains(of, matcher.Name) {
				wrong = append(wrong, fmt.Errorf("%s has no label %s", name.Value, matcher.Name))
			}
		}
		return nil
	})
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		var named []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			named = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				named = slices.Concat(n.VectorMatching.MatchingLabels, n.VectorMatching.Include)
			}
		}
		for _, label := range named {
			if !known[label] {
				wrong = append(wrong, fmt.Errorf("no metric of the expression has the label %s", label))
			}
		}
		return nil
	})
	return errors.Join(wrong...)
}

// Step is the time between two samples of the series that [Load] parses.
const Step = time.Minute

// Series are series with their samples.
type Series []*storage.SeriesEntry

// NewSeries returns a series with a value at each of the times, which ascend.
func NewSeries(of labels.Labels, at []time.Time, values []float64) *storage.SeriesEntry {
	return storage.NewListSeries(of, lo.Map(at, func(t time.Time, i int) chunks.Sample { return sample{at: t.UnixMilli(), value: values[i]} }))
}

// Load parses series, one a line, as in Prometheus's own tests of rules: with a sample each [Step]
// from time zero on, `name{label="value"} 0+1x10` has the values 0 to 10.
func Load(lines string) (Series, error) {
	var series Series
	for line := range strings.Lines(lines) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		of, values, err := parser.ParseSeriesDesc(line)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", line, err)
		}
		var samples []chunks.Sample
		for i, v := range values {
			if !v.Omitted {
				samples = append(samples, sample{at: int64(i) * Step.Milliseconds(), value: v.Value})
			}
		}
		series = append(series, storage.NewListSeries(of, samples))
	}
	return series, nil
}

type sample struct {
	at    int64
	value float64
}

func (s sample) T() int64                    { return s.at }
func (s sample) ST() int64                   { return 0 }
func (s sample) F() float64                  { return s.value }
func (sample) H() *histogram.Histogram       { return nil }
func (sample) FH() *histogram.FloatHistogram { return nil }
func (sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample         { return s }

// Querier implements [storage.Queryable].
func (s Series) Querier(int64, int64) (storage.Querier, error) { return querier{s}, nil }

type querier struct{ Series }

// Select implements [storage.Querier].
func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	return &seriesSet{rest: lo.Filter(q.Series, func(s *storage.SeriesEntry, _ int) bool {
		return lo.EveryBy(matchers, func(m *labels.Matcher) bool { return m.Matches(s.Lset.Get(m.Name)) })
	})}
}

func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, fs.ErrInvalid
}

func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, fs.ErrInvalid
}

func (querier) Close() error { return nil }

type seriesSet struct {
	rest    []*storage.SeriesEntry
	current *storage.SeriesEntry
}

func (s *seriesSet) Next() bool {
	if len(s.rest) == 0 {
		return false
	}
	s.current, s.rest = s.rest[0], s.rest[1:]
	return true
}

func (s *seriesSet) At() storage.Series              { return s.current }
func (*seriesSet) Err() error                        { return nil }
func (*seriesSet) Warnings() annotations.Annotations { return nil }

// Engine evaluates expressions.
type Engine struct{ *promql.Engine }

// NewEngine returns an engine with Prometheus's defaults.
func NewEngine() Engine {
	return Engine{promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1_000_000, Timeout: time.Minute, EnableAtModifier: true, EnableNegativeOffset: true,
	})}
}

// Eval returns the result of an expression at a time after zero.
func (e Engine) Eval(ctx context.Context, series Series, expr string, at time.Duration) (promql.Vector, error) {
	query, err := e.NewInstantQuery(ctx, series, nil, expr, time.UnixMilli(at.Milliseconds()))
	if err != nil {
		return nil, err
	}
	defer query.Close()
	result := query.Exec(ctx)
	if result.Err != nil {
		return nil, result.Err
	}
	vector, err := result.Vector()
	if err != nil {
		return nil, err
	}
	// The result belongs to the query.
	return append(promql.Vector(nil), vector...), nil
}

// Firing returns the labels of each instance of an alert that fires at a time after zero.
func (e Engine) Firing(ctx context.Context, series Series, a Alert, at time.Duration) ([]labels.Labels, error) {
	wait, err := a.Wait()
	if err != nil {
		return nil, err
	}
	var firing []labels.Labels
	for since := at - wait; since <= at; since += Step {
		vector, err := e.Eval(ctx, series, a.Expr, since)
		if err != nil {
			return nil, err
		}
		now := lo.Map(vector, func(s promql.Sample, _ int) labels.Labels {
			return labels.NewBuilder(s.Metric).Del(model.MetricNameLabel).Labels()
		})
		if since == at-wait {
			firing = now
			continue
		}
		firing = lo.Filter(firing, func(f labels.Labels, _ int) bool {
			return lo.ContainsBy(now, func(n labels.Labels) bool { return labels.Equal(f, n) })
		})
	}
	return firing, nil
}
