package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// compression is the factor by which time is compressed for slow machines: one second stands for
// half a minute. The agent's deadlines are flags. Karpenter's quarter of an hour until a NodeClaim
// must have a Node is a constant, as are the shim's constants derived from it, so the shim is built
// with other values.
const compression = 30

func compressed(d time.Duration) time.Duration { return d / compression }

// TestSlowMachinesJoin uses machines that take longer than Karpenter waits for a Node, and one that
// takes longer than the agent does.
func TestSlowMachinesJoin(t *testing.T) {
	figure := shows(t, "machines that take 25 and 90 minutes join, and one that takes longer than its deadline joins for the next NodeClaim")
	if testing.Short() {
		t.Skip("not in the short run: builds a shim")
	}
	inSandbox(t, sandbox.Options{
		Name: "e2e-slow", ShimBinary: hurriedShim(t),
		AgentArgs: []string{ // the defaults, compressed
			"--machine-provider-id-deadline=" + compressed(20*time.Minute).String(),
			"--machine-node-deadline=" + compressed(30*time.Minute).String(),
		},
	})
	leaveAsFound(t)
	const maxProvisionTime = "cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime"
	machines := map[string]struct {
		boot, join time.Duration
		deadline   string
		nodeClaims int
	}{
		"slow":   {boot: 10 * time.Minute, join: 15 * time.Minute, nodeClaims: 1},
		"slower": {boot: 30 * time.Minute, join: 60 * time.Minute, deadline: compressed(2 * time.Hour).String(), nodeClaims: 1},
		"late":   {boot: 10 * time.Minute, join: 40 * time.Minute, nodeClaims: 2},
	}
	seen := map[string]map[types.UID]bool{}
	for name, m := range machines {
		seen[name] = map[types.UID]bool{}
		copies(t, w.Hub, manifests.CrowdHub, name, func(o *unstructured.Unstructured) {
			of("SimMachineTemplate", func(o *unstructured.Unstructured) {
				set(o, compressed(m.boot).String(), "spec", "template", "spec", "bootDelay")
				set(o, compressed(m.join).String(), "spec", "template", "spec", "joinDelay")
			})(o)
			if m.deadline != "" {
				annotated(maxProvisionTime, m.deadline)(o)
			}
		})
		copies(t, w.Spoke, manifests.CrowdSpoke, name, nil)
		copies(t, w.Spoke, manifests.CrowdWorkload, name, nil)
		require.NoError(t, w.AwaitNodePool(within(t, soon), name))
	}
	goHome(t, lo.Keys(machines)...)
	began := time.Now()
	for name := range machines {
		scale(t, name, 1)
	}
	ran := map[string]time.Duration{}
	await(t, 8*time.Minute, func(s timeline.State) string {
		for name := range machines {
			for _, m := range machinesOf(t, name) {
				seen[name][m.UID] = true
			}
			runs := lo.ContainsBy(s.Live(), func(j timeline.Timeline) bool { return j.NodePool == name && j.Reached(timeline.Initialized) })
			if _, known := ran[name]; runs && !known {
				ran[name] = time.Since(began)
			}
		}
		if problem := running(len(machines))(s); problem != "" {
			return problem
		}
		return lo.Ternary(len(ran) == len(machines), "", fmt.Sprintf("a Node of each to be initialized: those of %v are", lo.Keys(ran)))
	})
	for name, m := range machines {
		figure("%s: a Node %.0f minutes after its pod, %d NodeClaims, %d Machines", name, (ran[name] * compression).Minutes(), made(name), len(seen[name]))
		require.Len(t, seen[name], 1, "one Machine is made for "+name)
		require.Equal(t, m.nodeClaims, made(name), name)
		require.True(t, described(t, name).GetAvailability().GetAvailable(), "late is not failed: "+name)
	}
	// Karpenter stops waiting for the replacement of a drifted Node after ten minutes. Its
	// replacement is used nevertheless, although empty Nodes go at once.
	began = time.Now()
	before := machinesOf(t, "slow")
	require.NoError(t, w.Spoke.Patch(t.Context(), &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "slow"}}, mergePatch(
		`{"spec":{"disruption":{"consolidateAfter":"0s"},"template":{"metadata":{"labels":{"fleet.example.com/revision":"second"}}}}}`)))
	poll(t, 6*time.Minute, func(context.Context) (string, error) {
		have := lo.Map(machinesOf(t, "slow"), func(m clusterv1.Machine, _ int) string { return m.Name })
		replaced := len(have) == 1 && have[0] != before[0].Name
		return lo.Ternary(replaced, "", fmt.Sprintf("the drifted machine %s is replaced: there are %v", before[0].Name, have)), nil
	})
	await(t, 2*time.Minute, running(len(machines)))
	figure("slow: a drifted Node is replaced within %.0f minutes, with %d NodeClaims", (time.Since(began) * compression).Minutes(), made("slow")-1)
	require.Equal(t, 2, made("slow"), "a drifted Node is replaced once")
	var groups clusterv1.MachineDeploymentList
	require.NoError(t, w.Hub.List(t.Context(), &groups, client.InNamespace(sandbox.ClusterNamespace)))
	for _, md := range groups.Items {
		require.Equal(t, new(int32(1)), md.Spec.Replicas, md.Name)
	}
	outlivesASilence(t, "slow", 25*time.Minute)
}

// outlivesASilence has a NodeClaim wait for its machine while no agent answers for longer than
// Karpenter waits for a Node. The silence ends once the machine has its Node.
func outlivesASilence(t *testing.T, name string, silence time.Duration) {
	t.Helper()
	figure := shows(t, "a claim in flight outlives a silence of the agents that is longer than Karpenter waits")
	known, has := made(name), len(machinesOf(t, name))
	pods := w.Recorder.State().Pods.Total()
	scale(t, name, int32(has+1))
	await(t, soon, func(s timeline.State) string {
		waits := lo.CountBy(s.Live(), func(j timeline.Timeline) bool {
			return j.NodePool == name && j.Reached(timeline.Launched) && !j.Reached(timeline.Registered)
		})
		return lo.Ternary(waits == 1, "", fmt.Sprintf("one NodeClaim of %s to wait for its Node: %d do", name, waits))
	})
	poll(t, soon, func(context.Context) (string, error) {
		have := len(machinesOf(t, name))
		return lo.Ternary(have == has+1, "", fmt.Sprintf("another Machine of %s: there are %d", name, have)), nil
	})
	nodes := func(ctx context.Context) int {
		t.Helper()
		var all corev1.NodeList
		require.NoError(t, w.Spoke.List(ctx, &all))
		return len(all.Items)
	}
	before, began := nodes(t.Context()), time.Now()
	for _, agent := range lo.Times(agents, sandbox.AgentName) {
		require.NoError(t, w.Sandbox.StopComponent(agent))
	}
	t.Cleanup(func() { // the clean-up of the others needs them
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		for _, agent := range lo.Times(agents, sandbox.AgentName) {
			if err := w.Sandbox.StartComponent(ctx, agent); err != nil {
				t.Error(err)
			}
		}
	})
	throughout(t, compressed(silence), 500*time.Millisecond, func() {
		require.Equal(t, known+1, made(name), "no other NodeClaim is made")
		require.Empty(t, lo.Filter(w.Recorder.State().Live(), func(j timeline.Timeline, _ int) bool { return j.Reached(timeline.Deleting) }))
	})
	poll(t, soon, func(ctx context.Context) (string, error) {
		return lo.Ternary(nodes(ctx) == before+1, "", "the Node of the machine that came meanwhile"), nil
	})
	silent := time.Since(began)
	for _, agent := range lo.Times(agents, sandbox.AgentName) {
		require.NoError(t, w.Sandbox.StartComponent(within(t, soon), agent))
	}
	await(t, 2*time.Minute, running(pods+1))
	figure("%.0f minutes of silence, %d NodeClaim", (silent * compression).Minutes(), made(name)-known)
	require.Equal(t, known+1, made(name))
	require.Len(t, machinesOf(t, name), has+1)
}

// hurriedShim builds the shim with core's and its own constants for slow machines compressed.
func hurriedShim(t *testing.T) string {
	t.Helper()
	dir, repository := t.TempDir(), root(t)
	work, binary := filepath.Join(dir, "go.work"), filepath.Join(dir, "karpenter")
	goes := func(workspace string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = filepath.Join(repository, "shim")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK="+workspace)
		var said strings.Builder
		cmd.Stderr = &said
		out, err := cmd.Output()
		require.NoError(t, err, said.String())
		return strings.TrimSpace(string(out))
	}
	changed := func(from, to string, changes ...string) {
		t.Helper()
		text, err := os.ReadFile(from)
		require.NoError(t, err)
		for i := 0; i < len(changes); i += 2 {
			require.Equal(t, 1, strings.Count(string(text), changes[i]), changes[i])
			text = []byte(strings.Replace(string(text), changes[i], changes[i+1], 1))
		}
		require.NoError(t, os.WriteFile(to, text, 0o600))
	}
	duration := func(d time.Duration) string { return fmt.Sprintf("time.Duration(%d)", compressed(d)) }

	core := filepath.Join(dir, "core")
	original := goes("", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/karpenter")
	require.NoError(t, os.CopyFS(core, os.DirFS(original)))
	liveness := "pkg/controllers/nodeclaim/lifecycle/liveness.go"
	changed(filepath.Join(original, liveness), filepath.Join(core, liveness),
		"registrationTimeout = time.Minute * 15", "registrationTimeout = "+duration(15*time.Minute))
	queue := "pkg/controllers/disruption/queue.go"
	changed(filepath.Join(original, queue), filepath.Join(core, queue),
		"minRetryDuration        = 10 * time.Minute", "minRetryDuration        = "+duration(10*time.Minute))
	controller, hurried := filepath.Join(repository, "shim/internal/controllers/failedmachine/controller.go"), filepath.Join(dir, "controller.go")
	changed(controller, hurried,
		"\tlook = 30 * time.Second", "\tlook = "+duration(30*time.Second),
		"\tregistrationTimeout = 15 * time.Minute", "\tregistrationTimeout = "+duration(15*time.Minute),
		"\textendAfter = 5 * time.Minute", "\textendAfter = "+duration(5*time.Minute))
	keeper, hurriedKeeper := filepath.Join(repository, "shim/internal/controllers/latenode/controller.go"), filepath.Join(dir, "keeper.go")
	changed(keeper, hurriedKeeper, "\tcommandTimeout = 10 * time.Minute", "\tcommandTimeout = "+duration(10*time.Minute))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{controller: hurried, keeper: hurriedKeeper}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	changed(filepath.Join(repository, "go.work.sum"), filepath.Join(dir, "go.work.sum"))
	uses := strings.Fields(goes("", "list", "-m", "-f", "{{.Dir}}"))
	workspace := fmt.Sprintf("go %s\n\nuse (\n\t%s\n)\n\nreplace sigs.k8s.io/karpenter => %s\n",
		strings.TrimPrefix(goes("", "env", "GOVERSION"), "go"), strings.Join(uses, "\n\t"), core)
	require.NoError(t, os.WriteFile(work, []byte(workspace), 0o600))
	goes(work, "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", binary, "./cmd/karpenter")
	return binary
}
