package monitoring

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunks"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// Recorded is what a test of a component has recorded for an alert.
type Recorded struct {
	scrapes.Recording

	// Package is the folder of the test's package.
	Package string
}

// Recordings returns the recordings below a repository's root, by the alert's name.
func Recordings(root string) (map[string]Recorded, error) {
	_ = os.Getenv("TESTED_FILES") // declares the recordings as inputs of the test cache
	recordings := map[string]Recorded{}
	for _, module := range []string{"agent", "shim"} {
		err := filepath.WalkDir(filepath.Join(root, module), func(path string, _ fs.DirEntry, err error) error {
			folder := filepath.Dir(path)
			if err != nil || filepath.Ext(path) != ".txt" || !strings.HasSuffix(folder, "testdata/alerts") {
				return err
			}
			alert := strings.TrimSuffix(filepath.Base(path), ".txt")
			if _, found := recordings[alert]; found {
				return fmt.Errorf("%s: there is another recording of this alert in %s", path, recordings[alert].Package)
			}
			recording, err := scrapes.Read(path)
			recordings[alert] = Recorded{Recording: recording, Package: filepath.Dir(filepath.Dir(folder))}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if len(recordings) == 0 {
		return nil, errors.New("there are no recordings")
	}
	return recordings, nil
}

// Course is how a component is scraped, once each [Step].
type Course struct {
	// Target are the labels of the scraped target. As with honorLabels, a series keeps its own of
	// the same name.
	Target map[string]string
	// From and Until are the times of the first and the last scrape, after zero.
	From, Until time.Duration
	// Begins is when the cause is made. It lasts until the end. It is never made if this is after
	// Until.
	Begins time.Duration
	// Repeats means that the cause is made anew in each Step, so that counters go on growing.
	// Otherwise, it is made once.
	Repeats bool
}

// Unfold returns the series of a recording with the sample of its first scrape until the cause is
// made, and then with that of its second. Times in the first move on, as those of a certificate
// that is always renewed.
func Unfold(recording scrapes.Recording, c Course) (Series, error) {
	var series Series
	for _, s := range recording.Series {
		own, err := parser.ParseMetric(s.Name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		of := map[string]string{}
		maps.Copy(of, c.Target)
		own.Range(func(l labels.Label) { of[l.Name] = l.Value })
		var samples []chunks.Sample
		for at := c.From; at <= c.Until; at += Step {
			if v, found := c.value(s, at); found {
				samples = append(samples, sample{at: at.Milliseconds(), value: v})
			}
		}
		series = append(series, storage.NewListSeries(labels.FromMap(of), samples))
	}
	return series, nil
}

// value returns the sample of a series at a time, and false if it has none.
func (c Course) value(s scrapes.Series, at time.Duration) (v float64, found bool) {
	if at < c.Begins {
		if s.Without.FromNow {
			return at.Seconds() + s.Without.Number, true
		}
		return s.Without.Number, s.Without.Found
	}
	switch with := s.With; {
	case !with.Found:
		// Prometheus marks the end of a series, so that it is not taken as it was for five minutes.
		return math.Float64frombits(value.StaleNaN), at == c.Begins
	case with.FromNow:
		return c.Begins.Seconds() + with.Number, true
	case s.Kind == scrapes.Counter && c.Repeats:
		return with.Number * float64(1+(at-c.Begins)/Step), true
	default:
		return with.Number, true
	}
}

// Firings evaluates an alert in each [Step], as Prometheus does. It returns when the alert first
// fires, and the labels of its instances that fire then; none if it does not fire.
func (e Engine) Firings(
	ctx context.Context, series Series, a Alert, from, until time.Duration,
) (at time.Duration, firing []labels.Labels, err error) {
	wait, err := a.Wait()
	if err != nil {
		return 0, nil, err
	}
	pending := map[string]time.Duration{}
	for at = from; at <= until; at += Step {
		vector, err := e.Eval(ctx, series, a.Expr, at)
		if err != nil {
			return 0, nil, err
		}
		since := map[string]time.Duration{}
		for _, s := range vector {
			of := labels.NewBuilder(s.Metric).Del(model.MetricNameLabel).Labels()
			begun, found := pending[of.String()]
			if !found {
				begun = at
			}
			since[of.String()] = begun
			if at-begun >= wait {
				firing = append(firing, of)
			}
		}
		if len(firing) > 0 {
			return at, firing, nil
		}
		pending = since
	}
	return 0, nil, nil
}

// Wait returns how long the condition of the alert must hold before it fires.
func (a Alert) Wait() (time.Duration, error) {
	if a.For == "" {
		return 0, nil
	}
	return time.ParseDuration(a.For)
}

// Window returns the longest time that the alert looks back.
func (a Alert) Window() (time.Duration, error) {
	parsed, err := parser.ParseExpr(a.Expr)
	if err != nil {
		return 0, err
	}
	window := time.Duration(0)
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		if m, is := node.(*parser.MatrixSelector); is {
			window = max(window, m.Range)
		}
		return nil
	})
	return window, nil
}
