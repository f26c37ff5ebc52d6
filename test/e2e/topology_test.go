package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/metrics"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

func TestTheShimRunsInOneClusterWithTheAgents(t *testing.T) {
	figure := shows(t, "agents and shim run in one cluster, which is its own workload cluster")
	if testing.Short() {
		t.Skip("not in the short run: it takes a sandbox of its own")
	}
	h := startHub(t, "e2e-joined", in(sandbox.Joined))
	h.comesAndGoes(t, figure)
}

func TestTheAgentRunsBesideTheShim(t *testing.T) {
	figure := shows(t, "the agent runs beside the shim, with its service account, and is called over a unix socket")
	if testing.Short() {
		t.Skip("not in the short run: it takes a sandbox of its own")
	}
	h := startHub(t, "e2e-sidecar", in(sandbox.Sidecar), func(o *sandbox.Options) { o.Agents = 1 })
	h.comesAndGoes(t, figure)
}

// The kubelet would update a changed secret in the pod; here the file is replaced.
func TestTheShimsKubeconfigIsReplacedThirtyTimes(t *testing.T) {
	figure := shows(t, "the shim runs in the hub, and its kubeconfig of the spoke is replaced 30 times while it works, and what it held before ends")
	if testing.Short() {
		t.Skip("not in the short run: it takes a sandbox of its own")
	}
	h := startHub(t, "e2e-hosted", in(sandbox.HubHosted))
	before := h.source.Status(sandbox.Shim)
	h.run(t, h.source, 1, 0)
	began := time.Now()
	const times = 30
	for i := range times {
		require.NoError(t, h.source.Sandbox.RenewShimKubeconfig(within(t, soon), kubeconfigOf(i)))
		poll(t, soon, h.replaced(i+1))
		if i > 0 {
			last := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ShimNamespace, Name: kubeconfigOf(i - 1)}}
			require.NoError(t, h.source.Spoke.Delete(within(t, soon), last))
		}
		if i == times/2 {
			h.scale(t, 2, 1)
		}
	}
	figure("in %.0f s", time.Since(began).Seconds())
	require.NoError(t, h.source.Recorder.Await(within(t, 2*time.Minute), running(3)))
	h.goes(t)
	h.rests(t, figure)
	require.Equal(t, before.PID, h.source.Status(sandbox.Shim).PID, "it was not restarted")
}

// rests shows what the shim needs while nothing happens, by its own metrics.
func (h hubs) rests(t *testing.T, figure func(format string, args ...any)) {
	t.Helper()
	read := func() metrics.Families {
		families, err := metrics.Read(within(t, soon), h.source.Sandbox.State().ShimMetrics)
		require.NoError(t, err)
		return families
	}
	used := func(f metrics.Families) float64 { return f.Sum("process_cpu_seconds_total", nil) }
	const d = time.Minute
	before := used(read())
	require.Positive(t, before)
	var memory []float64
	throughout(t, d, 5*time.Second, func() { memory = append(memory, read().Sum("process_resident_memory_bytes", nil)) })
	figure("at rest the shim uses %.0f thousandths of a processor and %.0f MiB", (used(read())-before)/d.Seconds()*1000, lo.Max(memory)/(1<<20))
}

func kubeconfigOf(i int) string { return fmt.Sprintf("kubeconfig-%d", i) }

// replaced returns a condition: according to its log, the shim has read this many kubeconfigs after
// the first.
func (h hubs) replaced(times int) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		logged, err := os.ReadFile(filepath.Join(h.source.Sandbox.State().Paths.Logs, sandbox.Shim+".log"))
		n := strings.Count(string(logged), "the spoke's kubeconfig was replaced")
		return lo.Ternary(n >= times, "", fmt.Sprintf("the shim to read %d kubeconfigs: it has read %d", times, n)), err
	}
}

func in(topology sandbox.Topology) func(*sandbox.Options) {
	return func(o *sandbox.Options) { o.Topology = topology }
}

// comesAndGoes runs pods on separate Nodes of both node groups, and then none.
func (h hubs) comesAndGoes(t *testing.T, figure func(format string, args ...any)) {
	t.Helper()
	began := time.Now()
	h.run(t, h.source, 2, 2)
	figure("4 pods on Nodes of their own after %.0f s", time.Since(began).Seconds())
	h.goes(t)
}

// empty removes all pods, and waits until their machines are gone.
func (h hubs) empty(t *testing.T) {
	t.Helper()
	h.scale(t, 0, 0)
	require.NoError(t, h.source.Recorder.Await(within(t, 3*time.Minute), func(s timeline.State) string {
		return lo.Ternary(len(s.Live()) == 0, "", fmt.Sprintf("all NodeClaims to be gone: %d are left", len(s.Live())))
	}))
	h.settle(t)
}

// goes removes all pods, waits until only the team's machines are left, and verifies that the logs
// contain no faults.
func (h hubs) goes(t *testing.T) {
	t.Helper()
	h.empty(t)
	require.Equal(t, map[string]int32{"east": own, "west": 0}, h.holdings(t, h.source).replicas)
	ours := lo.FilterMap(h.source.Sandbox.State().Components, func(c sandbox.ComponentStatus, _ int) (string, bool) {
		return c.Name, c.Name == sandbox.Shim || strings.HasPrefix(c.Name, sandbox.Agent)
	})
	require.Empty(t, faultsInLogsBut(nil, h.source, ours...))
}
