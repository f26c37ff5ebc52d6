package e2e_test

import (
	"bytes"
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
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// answerWithin is how long `kubectl capi why` may take.
const answerWithin = time.Second

// TestThePluginSaysWhy asks the plugin about a pod that no machine can run, about one whose machine
// is on its way, and about one that runs.
func TestThePluginSaysWhy(t *testing.T) {
	figure := shows(t, "kubectl capi says why a pod waits: nothing fits it, its machine boots; and on what a running one runs")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	useCrowd(t)
	plugin := newPlugin(t)

	unfit := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "unfit"},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{"fleet.example.com/use": "crowd"},
			Containers: []corev1.Container{{Name: "app", Image: "registry.k8s.io/pause:3.10", Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64")},
			}}},
		},
	}
	require.NoError(t, w.Spoke.Create(within(t, soon), unfit))
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(w.Spoke.Delete(context.Background(), unfit, client.GracePeriodSeconds(0))); err != nil {
			t.Error(err)
		}
	})
	plugin.eventually("pod", unfit.Name, "blocked", "No node group fits the pod", "the pod requests 64 of cpu")

	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	require.NoError(t, w.Hub.Patch(within(t, soon), template, mergePatch(`{"spec":{"template":{"spec":{"stuckAt":"Boot"}}}}`)))
	boot := func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		var instances simv1.SimMachineList
		require.NoError(t, w.Hub.List(ctx, &instances, client.InNamespace(sandbox.ClusterNamespace)))
		for i := range instances.Items {
			patched := w.Hub.Patch(ctx, &instances.Items[i], mergePatch(`{"spec":{"stuckAt":null}}`))
			require.NoError(t, client.IgnoreNotFound(patched))
		}
	}
	t.Cleanup(boot) // else a failure costs minutes, because the machine would have to be given up first
	scale(t, "crowd", 1)
	await(t, 2*time.Minute, reached(1, timeline.Bound))
	waiting := w.Recorder.State().Live()[0]
	pod := crowdPod(t)
	for _, entry := range [][2]string{{"pod", pod}, {"nodeclaim", waiting.NodeClaim}, {"machine", waiting.Machine}} {
		said := plugin.eventually(entry[0], entry[1], "waiting", "Machine "+waiting.Machine+" waits for its infrastructure", "booting")
		require.Subset(t, said.objects(), []string{"NodeClaim", "Claim", "NodeGroup", "Machine", "Infrastructure", "Node"}, entry[0])
	}
	say("%s", plugin.run("why", "pod", pod))
	require.Regexp(t, `Hub +Machine fleet/`+waiting.Machine+` +InfrastructureReady is False`,
		plugin.run("why", "machine", waiting.Machine, "--hub-kubeconfig="+w.Sandbox.State().Paths.HubKubeconfig), "with what the hub's own objects say")

	boot()
	poll(t, 2*time.Minute, podsRun("crowd", 1))
	said := plugin.eventually("pod", pod, "ok", "The pod runs on Node")
	require.Subset(t, said.objects(), []string{"Pod", "NodeClaim", "Claim", "NodeGroup", "Machine", "Node"})
	node := w.Recorder.State().Live()[0].Node
	plugin.eventually("node", node, "ok", "Nothing is wrong with it")
	slowest := lo.Max(plugin.took)
	figure("an answer took at most %v (n=%d)", rounded(slowest), len(plugin.took))
	require.Less(t, slowest, slow*answerWithin)

	require.Regexp(t, `fleet/crowd +crowd +- +on-demand +1 +0 +120 `, plugin.run("groups"))
	require.Contains(t, plugin.run("claims"), waiting.NodeClaim)
	require.Contains(t, plugin.run("spokes", "--hub-kubeconfig="+w.Sandbox.State().Paths.HubKubeconfig), "True (Synchronized)")
	require.NotEmpty(t, plugin.run("adopt"))
}

// crowdPod returns the name of a pod of the crowd.
func crowdPod(t *testing.T) string {
	t.Helper()
	var pods corev1.PodList
	err := w.Spoke.List(within(t, soon), &pods, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{"app": "crowd"})
	if err != nil || len(pods.Items) == 0 {
		t.Fatalf("looking for a pod: %d, %v", len(pods.Items), err)
	}
	return pods.Items[0].Name
}

// plugin runs kubectl-capi like a user of the spoke.
type plugin struct {
	t     *testing.T
	flags []string
	took  []time.Duration
}

func newPlugin(t *testing.T) *plugin {
	t.Helper()
	state := w.Sandbox.State()
	dir := t.TempDir()
	for from, to := range map[string]string{
		state.Paths.ClientCertificate: "tls.crt", state.Paths.ClientKey: "tls.key", state.Paths.AgentCA: "ca.crt",
	} {
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return &plugin{t: t, flags: []string{
		"--kubeconfig=" + state.Paths.SpokeKubeconfig, "--agent-address=" + state.AgentAddress, "--tls-dir=" + dir, "--cluster=" + testenv.Cluster.String(),
	}}
}

// run returns what the plugin writes.
func (p *plugin) run(args ...string) string {
	p.t.Helper()
	out, err := p.try(args...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

func (p *plugin) try(args ...string) (string, error) {
	var out, errOut bytes.Buffer
	command := exec.CommandContext(within(p.t, soon), filepath.Join(root(p.t), "bin", "kubectl-capi"), append(args, p.flags...)...)
	command.Stdout, command.Stderr = &out, &errOut
	began := time.Now()
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("kubectl-capi %s: %w: %s", strings.Join(args, " "), err, errOut.String())
	}
	if args[0] == "why" {
		p.took = append(p.took, time.Since(began))
	}
	return out.String(), nil
}

// answer is what `why` says.
type answer struct {
	State   string `json:"state"`
	Verdict string `json:"verdict"`
	Steps   []step `json:"steps"`
}

type step struct {
	Object  string `json:"object"`
	Message string `json:"message"`
}

func (a answer) objects() []string {
	return lo.Map(a.Steps, func(s step, _ int) string { return s.Object })
}

// eventually asks until the answer has the state, and its verdict the parts.
func (p *plugin) eventually(kind, name, state string, parts ...string) answer {
	p.t.Helper()
	var said answer
	poll(p.t, soon, func(context.Context) (string, error) {
		out, err := p.try("why", kind, name, "--output=json")
		if err != nil {
			return "", err
		}
		said = answer{}
		if err := json.Unmarshal([]byte(out), &said); err != nil {
			return "", err
		}
		if said.State == state && lo.EveryBy(parts, func(part string) bool { return strings.Contains(said.Verdict, part) }) {
			return "", nil
		}
		return fmt.Sprintf("%s %s to be %s with %q: %s", kind, name, state, parts, out), nil
	})
	return said
}
