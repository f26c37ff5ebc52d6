package dashboards

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/storage"
	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/test/monitoring"
)

// Interval is the time between two scrapes.
const Interval = 2 * time.Second

// Source is a component whose metrics are recorded.
type Source struct {
	// Pod and Job are labels of all its series.
	Pod, Job string
	// URL returns where its metrics are served now.
	URL func() string
}

// Recording keeps metrics in memory. Its methods must not be called concurrently.
type Recording struct {
	engine  *promql.Engine
	symbols *labels.SymbolTable
	series  map[string]*recorded
	// From and To are the times of the first and the last scrape.
	From, To time.Time
}

// recorded is one series.
type recorded struct {
	of     labels.Labels
	at     []time.Time
	values []float64
}

// NewRecording returns an empty recording.
func NewRecording() *Recording {
	return &Recording{symbols: labels.NewSymbolTable(), series: map[string]*recorded{}, engine: promql.NewEngine(promql.EngineOpts{
		MaxSamples: 10_000_000, Timeout: time.Minute, EnableAtModifier: true, EnableNegativeOffset: true,
		// A component that was killed has no values, as with Prometheus's own markers of staleness.
		LookbackDelta: 3 * Interval,
	})}
}

// Record scrapes the sources every [Interval] until the context ends. A source that does not answer
// is left out: it may have been killed.
func (r *Recording) Record(ctx context.Context, sources ...Source) error {
	ticker := time.NewTicker(Interval)
	defer ticker.Stop()
	for {
		if err := r.Scrape(ctx, time.Now(), sources...); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Scrape records the sources once, as of the given time.
func (r *Recording) Scrape(ctx context.Context, at time.Time, sources ...Source) error {
	for _, source := range sources {
		body, err := Metrics(ctx, source.URL())
		if err != nil {
			continue
		}
		if err := r.add(body, source, at); err != nil {
			return fmt.Errorf("the metrics of %s: %w", source.Pod, err)
		}
	}
	if r.From.IsZero() {
		r.From = at
	}
	r.To = at
	return nil
}

// Metrics returns what a component serves at the address. It waits for at most [Interval].
func Metrics(ctx context.Context, url string) (body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, Interval)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	return io.ReadAll(response.Body)
}

func (r *Recording) add(body []byte, source Source, at time.Time) error {
	for parser := textparse.NewPromParser(body, r.symbols, false); ; {
		entry, err := parser.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if entry != textparse.EntrySeries {
			continue
		}
		var of labels.Labels
		parser.Labels(&of)
		_, _, value := parser.Series()
		of = labels.NewBuilder(of).Set("job", source.Job).Set("pod", source.Pod).Set("instance", source.Pod).Labels()
		s := r.series[of.String()]
		if s == nil {
			s = &recorded{of: of}
			r.series[of.String()] = s
		}
		s.at, s.values = append(s.at, at), append(s.values, value)
	}
}

// all returns every series.
func (r *Recording) all() monitoring.Series {
	return lo.MapToSlice(r.series, func(_ string, s *recorded) *storage.SeriesEntry { return monitoring.NewSeries(s.of, s.at, s.values) })
}

// during returns the values of an expression during the recording.
func (r *Recording) during(ctx context.Context, expr string) (promql.Matrix, error) {
	from := r.From
	if strings.Contains(expr, " offset ") {
		// Before, everything that the counters had at the first scrape would seem to have just happened.
		from = from.Add(window)
	}
	query, err := r.engine.NewRangeQuery(ctx, r.all(), nil, selected.Replace(expr), from, r.To, Interval)
	if err != nil {
		return nil, err
	}
	defer query.Close()
	result := query.Exec(ctx)
	if result.Err != nil {
		return nil, result.Err
	}
	matrix, err := result.Matrix()
	if err != nil {
		return nil, err
	}
	// The result belongs to the query.
	kept := make(promql.Matrix, 0, len(matrix))
	for _, series := range matrix {
		kept = append(kept, promql.Series{Metric: series.Metric, Floats: append([]promql.FPoint(nil), series.Floats...)})
	}
	return kept, nil
}
