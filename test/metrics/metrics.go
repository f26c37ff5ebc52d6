// Package metrics reads the metrics of the sandbox's components.
package metrics

import (
	"context"
	"fmt"
	"net/http"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/samber/lo"
)

// Families are metric families by name.
type Families map[string]*dto.MetricFamily

// Labels are the labels that a metric must have.
type Labels map[string]string

// Read returns the metrics served at the URL.
func Read(ctx context.Context, url string) (Families, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	return families, nil
}

// Of returns the metrics of a family that have the labels.
func (f Families) Of(name string, labels Labels) []*dto.Metric {
	return lo.Filter(f[name].GetMetric(), func(m *dto.Metric, _ int) bool {
		for label, value := range labels {
			if Label(m, label) != value {
				return false
			}
		}
		return true
	})
}

// Sum returns the sum of the gauges and counters that have the labels.
func (f Families) Sum(name string, labels Labels) float64 {
	return lo.SumBy(f.Of(name, labels), func(m *dto.Metric) float64 { return m.GetCounter().GetValue() + m.GetGauge().GetValue() })
}

// Label returns the value of a metric's label, or "".
func Label(m *dto.Metric, name string) string {
	pair, _ := lo.Find(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == name })
	return pair.GetValue()
}
