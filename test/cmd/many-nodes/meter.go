package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/world"
)

// meter tells what the agent and the shim do, by their own metrics.
type meter struct {
	world *world.World
}

// counters since the processes began, and sizes now.
type counters struct {
	calls                                          map[string]float64
	agentReads, agentWrites, shimReads, shimWrites float64
	agentMemory, shimMemory, cpu                   float64
}

func (meter) head() {
	say("%-28s %10s %12s %12s %12s %12s %12s %10s %8s %8s", "phase", "seconds",
		"agent calls", "agent reads", "agent writes", "shim reads", "shim writes", "agent MB", "shim MB", "cores")
}

// phase runs something and says what it cost, in total and for each of so many nodes and minute.
func (m meter) phase(ctx context.Context, name string, nodes int, do func(context.Context) error) error {
	before, err := m.read(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := do(ctx); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := m.read(ctx)
	if err != nil {
		return err
	}
	calls := map[string]float64{}
	var total float64
	for method, n := range after.calls {
		if more := n - before.calls[method]; more > 0 {
			calls[method], total = more, total+more
		}
	}
	row := []float64{
		total, after.agentReads - before.agentReads, after.agentWrites - before.agentWrites,
		after.shimReads - before.shimReads, after.shimWrites - before.shimWrites,
	}
	say("%-28s %10.0f %12.0f %12.0f %12.0f %12.0f %12.0f %10.0f %8.0f %8.2f", name, took.Seconds(), row[0], row[1], row[2], row[3], row[4],
		after.agentMemory/1e6, after.shimMemory/1e6, (after.cpu-before.cpu)/took.Seconds())
	share := func(name, format string, of float64) {
		each := lo.Map(row, func(n float64, _ int) any { return n / of })
		say("%-28s %10s"+strings.Repeat(" "+format, len(each)), append([]any{name, ""}, each...)...)
	}
	share("  each node", "%12.3f", float64(nodes))
	share("  each node and minute", "%12.4f", float64(nodes)*took.Minutes())
	say("  calls: %v", calls)
	return nil
}

func (m meter) read(ctx context.Context) (counters, error) {
	state := m.world.Sandbox.State()
	for _, component := range []string{sandbox.AgentName(0), sandbox.Shim} {
		if restarts := m.world.Status(component).Restarts; restarts > 0 {
			return counters{}, fmt.Errorf("%s died, and began to count anew", component)
		}
	}
	agent, err := scrape(ctx, state.AgentMetrics)
	if err != nil {
		return counters{}, err
	}
	shim, err := scrape(ctx, state.ShimMetrics)
	if err != nil {
		return counters{}, err
	}
	c := counters{
		calls:       map[string]float64{},
		agentMemory: sum(agent, "process_resident_memory_bytes", nil), shimMemory: sum(shim, "process_resident_memory_bytes", nil),
		cpu: sum(agent, "process_cpu_seconds_total", nil) + sum(shim, "process_cpu_seconds_total", nil),
	}
	c.agentReads, c.agentWrites = requests(agent)
	c.shimReads, c.shimWrites = requests(shim)
	if family, ok := agent["grpc_server_started_total"]; ok {
		for _, metric := range family.GetMetric() {
			method := label(metric, "grpc_method")
			c.calls[method] += metric.GetCounter().GetValue()
		}
	} else {
		return counters{}, fmt.Errorf("%s does not tell how often the agent was called", state.AgentMetrics)
	}
	return c, nil
}

// requests returns how often an API server was asked, and asked for a change. A watch counts once.
func requests(families map[string]*dto.MetricFamily) (reads, writes float64) {
	const name = "rest_client_requests_total"
	return sum(families, name, func(m *dto.Metric) bool { return label(m, "method") == http.MethodGet }),
		sum(families, name, func(m *dto.Metric) bool { return label(m, "method") != http.MethodGet })
}

func sum(families map[string]*dto.MetricFamily, name string, which func(*dto.Metric) bool) float64 {
	return lo.SumBy(families[name].GetMetric(), func(m *dto.Metric) float64 {
		if which != nil && !which(m) {
			return 0
		}
		return m.GetCounter().GetValue() + m.GetGauge().GetValue()
	})
}

func label(m *dto.Metric, name string) string {
	pair, _ := lo.Find(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == name })
	return pair.GetValue()
}

func scrape(ctx context.Context, url string) (map[string]*dto.MetricFamily, error) {
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
	for name := range families {
		if strings.HasPrefix(name, "rest_client_requests_total") {
			return families, nil
		}
	}
	return nil, fmt.Errorf("%s does not tell how often the API server was asked", url)
}
