package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/metrics"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// meter measures what the agent and the shim do, by their own metrics.
type meter struct {
	env *testenv.Env
}

// counters are totals since the processes began, and current sizes.
type counters struct {
	calls                                          map[string]float64
	agentReads, agentWrites, shimReads, shimWrites float64
	agentMemory, shimMemory, cpu                   float64
}

func (meter) head() {
	say("%-28s %10s %12s %12s %12s %12s %12s %10s %8s %8s", "phase", "seconds",
		"agent calls", "agent reads", "agent writes", "shim reads", "shim writes", "agent MB", "shim MB", "cores")
}

// cost is what a phase cost.
type cost struct {
	calls                                          map[string]float64 // to the agent, by method
	agentReads, agentWrites, shimReads, shimWrites float64
}

// phase runs do, and reports and returns its cost, in total and per node and minute.
func (m meter) phase(ctx context.Context, name string, nodes int, do func(context.Context) error) (cost, error) {
	before, err := m.read(ctx)
	if err != nil {
		return cost{}, err
	}
	began := time.Now()
	if err := do(ctx); err != nil {
		return cost{}, err
	}
	took := time.Since(began)
	after, err := m.read(ctx)
	if err != nil {
		return cost{}, err
	}
	is := cost{
		calls:      map[string]float64{},
		agentReads: after.agentReads - before.agentReads, agentWrites: after.agentWrites - before.agentWrites,
		shimReads: after.shimReads - before.shimReads, shimWrites: after.shimWrites - before.shimWrites,
	}
	for method, n := range after.calls {
		if more := n - before.calls[method]; more > 0 {
			is.calls[method] = more
		}
	}
	row := []float64{lo.Sum(lo.Values(is.calls)), is.agentReads, is.agentWrites, is.shimReads, is.shimWrites}
	say("%-28s %10.0f %12.0f %12.0f %12.0f %12.0f %12.0f %10.0f %8.0f %8.2f", name, took.Seconds(), row[0], row[1], row[2], row[3], row[4],
		after.agentMemory/1e6, after.shimMemory/1e6, (after.cpu-before.cpu)/took.Seconds())
	share := func(name, format string, of float64) {
		each := lo.Map(row, func(n float64, _ int) any { return n / of })
		say("%-28s %10s"+strings.Repeat(" "+format, len(each)), append([]any{name, ""}, each...)...)
	}
	share("  each node", "%12.3f", float64(nodes))
	share("  each node and minute", "%12.4f", float64(nodes)*took.Minutes())
	say("  calls: %v", is.calls)
	return is, nil
}

func (m meter) read(ctx context.Context) (counters, error) {
	state := m.env.Sandbox.State()
	for _, component := range []string{sandbox.AgentName(0), sandbox.Shim} {
		if restarts := m.env.Status(component).Restarts; restarts > 0 {
			return counters{}, fmt.Errorf("%s died, and its counters were reset", component)
		}
	}
	agent, err := metrics.Read(ctx, state.AgentMetrics)
	if err != nil {
		return counters{}, err
	}
	shim, err := metrics.Read(ctx, state.ShimMetrics)
	if err != nil {
		return counters{}, err
	}
	c := counters{
		calls:       map[string]float64{},
		agentMemory: agent.Sum("process_resident_memory_bytes", nil), shimMemory: shim.Sum("process_resident_memory_bytes", nil),
		cpu: agent.Sum("process_cpu_seconds_total", nil) + shim.Sum("process_cpu_seconds_total", nil),
	}
	if c.agentReads, c.agentWrites, err = requests(agent, "rest_client_requests_total"); err != nil {
		return counters{}, fmt.Errorf("%s: %w", state.AgentMetrics, err)
	}
	// Karpenter counts with a metric of its own.
	if c.shimReads, c.shimWrites, err = requests(shim, "client_go_request_total"); err != nil {
		return counters{}, fmt.Errorf("%s: %w", state.ShimMetrics, err)
	}
	family, ok := agent["grpc_server_started_total"]
	if !ok {
		return counters{}, fmt.Errorf("%s does not tell how often the agent was called", state.AgentMetrics)
	}
	for _, metric := range family.GetMetric() {
		c.calls[metrics.Label(metric, "grpc_method")] += metric.GetCounter().GetValue()
	}
	return c, nil
}

// requests returns the number of requests to an API server, reads and writes, by the metric that
// counts them. A watch counts once.
func requests(of metrics.Families, name string) (reads, writes float64, err error) {
	if _, counted := of[name]; !counted {
		return 0, 0, fmt.Errorf("there is no metric %s, which tells how often the API server was asked", name)
	}
	reads = of.Sum(name, metrics.Labels{"method": http.MethodGet})
	return reads, of.Sum(name, nil) - reads, nil
}
