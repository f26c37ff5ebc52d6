package e2e_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// TestNodesOfTheOtherProviderItselfAreTakenOver lets karpenter-provider-cluster-api make Nodes, and
// kills it while it makes more and removes one. Then agent and shim take over, and finally the test
// goes back to it. The Go module proxy does not have its module, so the binary is passed: make e2e
// PEER=<binary>. Its metrics server listens on all interfaces.
func TestNodesOfTheOtherProviderItselfAreTakenOver(t *testing.T) {
	figure := shows(t, "a live switch from the other provider's own binary, killed at work: every node goes on running")
	binary := os.Getenv("PEER")
	if binary == "" {
		t.Skip("needs PEER=<binary of karpenter-provider-cluster-api>")
	}
	const pods, late = 8, 4
	h := startHub(t, "e2e-peer")
	for _, component := range append(lo.Times(agents, sandbox.AgentName), sandbox.Shim) {
		require.NoError(t, h.source.Sandbox.StopComponent(component))
	}
	require.NoError(t, manifests.Apply(within(t, soon), h.source.Hub, manifests.PeerHub))
	for _, file := range []string{manifests.PeerSpoke, manifests.PeerWorkload} {
		require.NoError(t, manifests.Apply(within(t, soon), h.source.Spoke, file))
	}
	stop := h.runPeer(t, binary)
	workload := client.ObjectKey{Namespace: "default", Name: "scale-up"}
	require.NoError(t, h.source.Scale(within(t, soon), workload, pods))
	require.NoError(t, h.source.Recorder.Await(within(t, 5*time.Minute), running(pods)))

	// It is killed once it has raised replicas for the next pods, and while the deletion of a
	// NodeClaim is pending.
	require.NoError(t, h.source.Scale(within(t, soon), workload, pods+late))
	poll(t, settleWithin, func(context.Context) (string, error) {
		now := h.holdings(t, h.source).replicas["peer-md-0"]
		return lo.Ternary(now > pods, "", fmt.Sprintf("the other provider to raise replicas: they are %d", now)), nil
	})
	stop()
	leaving, registered := lo.Find(h.nodeClaims(t), func(nc karpenterv1.NodeClaim) bool {
		return nc.StatusConditions().Get(karpenterv1.ConditionTypeRegistered).IsTrue()
	})
	require.True(t, registered, "a NodeClaim with a Node")
	require.NoError(t, h.source.Spoke.Delete(within(t, soon), &leaving))
	require.NoError(t, h.source.Recorder.Await(within(t, settleWithin), everyMachineRuns))

	going := append(h.podNames(t, leaving.Status.NodeName), leaving.Name, leaving.Status.NodeName)
	had := h.machinesOf(t)
	figure("%d NodeClaims, %d of them without a provider ID, and %d Machines", len(h.nodeClaims(t)), len(h.nodeClaims(t))-len(had), h.machines(t))
	watching := watchSpoke(t, h.source)
	for _, component := range lo.Times(agents, sandbox.AgentName) {
		require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), component))
	}
	planned := h.planAdoption(t)
	duplicates := h.duplicates(t, planned)
	going = append(going, lo.Map(planned.InTheWay, func(p planOf, _ int) string { return p.Name })...)
	require.Zero(t, planned.Disrupted)
	require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), sandbox.Shim))
	poll(t, settleWithin, func(context.Context) (string, error) {
		now := map[string]string{}
		for id, claim := range h.holdings(t, h.source).claims {
			now[id] = claim.providerID
		}
		for _, nc := range h.nodeClaims(t) {
			if nc.UID == leaving.UID {
				return "NodeClaim " + nc.Name + " to go", nil
			}
		}
		for id, providerID := range had {
			if now[id] != providerID && id != string(leaving.UID) && !duplicates[id] {
				return fmt.Sprintf("NodeClaim %s to have a claim on %s: it has %q", id, providerID, now[id]), nil
			}
		}
		return "", nil
	})
	require.NoError(t, h.source.Recorder.Await(within(t, settleWithin), running(pods+late)))
	h.endDuplicates(t, planned)
	h.source.Checker.Expected = func() invariants.Expected { return invariants.Expected{} } // the owner of its surplus is unknown
	h.settle(t)
	others := lo.Reject(watching.Incidents(), func(what string, _ int) bool {
		return lo.SomeBy(going, func(name string) bool { return strings.Contains(what, " "+name+" ") })
	})
	require.Empty(t, others, "what happened to what ran in the spoke")
	figure("%d claims; %d Machines without one; %d NodeClaims shared the Machine of another", len(h.holdings(t, h.source).claims),
		len(h.holdings(t, h.source).unclaimed), len(duplicates))

	require.Empty(t, h.faults())

	left := h.machinesOf(t)
	h.goBack(t)
	watching = watchSpoke(t, h.source)
	stop = h.runPeer(t, binary)
	require.NoError(t, h.source.Scale(within(t, soon), workload, pods+late+2))
	require.NoError(t, h.source.Recorder.Await(within(t, 5*time.Minute), running(pods+late+2)))
	throughout(t, soon, time.Second, func() {
		require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke")
	})
	stop()
	ids := lo.PickByKeys(h.machinesOf(t), lo.Keys(left)) // NodeClaims that it creates itself may share a Machine again
	require.Empty(t, lo.FindDuplicates(lo.Values(ids)), "a Machine has one NodeClaim")
	require.Len(t, ids, len(left))
	figure("and back: %d NodeClaims", len(ids))
}

// duplicates returns the UIDs of the NodeClaims that the plan reports in the way. At times the
// other provider assigns one Machine to several NodeClaims; nothing else may be in the way.
func (h hubs) duplicates(t *testing.T, planned plan) map[string]bool {
	t.Helper()
	byName := lo.KeyBy(h.nodeClaims(t), func(nc karpenterv1.NodeClaim) string { return nc.Name })
	uids := map[string]bool{}
	for _, p := range planned.InTheWay {
		require.Contains(t, p.Message, "has the same provider ID as NodeClaim", p.Name)
		nc, known := byName[p.Name]
		require.True(t, known, p.Name)
		uids[string(nc.UID)] = true
	}
	return uids
}

// endDuplicates follows the instructions of each one's event, and deletes it.
func (h hubs) endDuplicates(t *testing.T, planned plan) {
	t.Helper()
	for _, duplicate := range planned.InTheWay {
		var advice string
		poll(t, settleWithin, func(ctx context.Context) (string, error) {
			messages, err := h.eventsOf(ctx, duplicate.Name)
			for _, message := range messages {
				if _, command, found := strings.Cut(message, "kubectl patch "); found {
					advice = "kubectl patch " + command
				}
			}
			return lo.Ternary(advice != "", "", "an event that says how to end NodeClaim "+duplicate.Name), err
		})
		script := fmt.Sprintf("set -e; %s; kubectl delete nodeclaim %s --wait --timeout=1m", advice, duplicate.Name)
		command := exec.CommandContext(within(t, settleWithin), "bash", "-c", script)
		command.Env = append(os.Environ(), "KUBECONFIG="+h.source.Sandbox.State().Paths.SpokeKubeconfig,
			"PATH="+filepath.Join(root(t), "bin")+":"+os.Getenv("PATH"))
		out, err := command.CombinedOutput()
		require.NoError(t, err, string(out))
	}
}

// goBack follows docs/migrate-from-karpenter-provider-cluster-api.md, section "Going back".
func (h hubs) goBack(t *testing.T) {
	t.Helper()
	hub := h.source.Sandbox.State().Paths.HubKubeconfig
	command := func(name string, arguments ...string) {
		t.Helper()
		binary := filepath.Join(root(t), "bin", name)
		out, err := exec.CommandContext(within(t, settleWithin), binary, append(arguments, "--kubeconfig="+hub)...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	require.NoError(t, h.source.Sandbox.StopComponent(sandbox.Shim))
	command("kubectl", "-n", sandbox.ClusterNamespace, "label", "machines", "-l", agentv1.ClaimLabel, agentv1.MemberLabel+"=")
	for _, component := range lo.Times(agents, sandbox.AgentName) {
		require.NoError(t, h.source.Sandbox.StopComponent(component))
	}
	var bindings admissionv1.ValidatingAdmissionPolicyBindingList
	require.NoError(t, h.source.Hub.List(within(t, soon), &bindings))
	for i := range bindings.Items {
		require.NoError(t, h.source.Hub.Delete(within(t, soon), &bindings.Items[i]))
	}
	command("capi-agent", "uninstall")
}

// runPeer runs the other provider against hub and spoke, as an administrator, until kill is called.
func (h hubs) runPeer(t *testing.T, binary string) (kill func()) {
	t.Helper()
	paths := h.source.Sandbox.State().Paths
	log, err := os.Create(filepath.Join(paths.Logs, "peer.log"))
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), binary,
		"--cluster-api-kubeconfig="+paths.HubKubeconfig, "--metrics-port="+freePort(t), "--health-probe-port="+freePort(t))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+paths.SpokeKubeconfig, "DISABLE_LEADER_ELECTION=true", "SYSTEM_NAMESPACE=default")
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	kill = func() {
		_ = cmd.Process.Kill() // it may have exited
		_ = cmd.Wait()
	}
	t.Cleanup(func() {
		kill()
		_ = log.Close()
	})
	return kill
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}

func (h hubs) nodeClaims(t *testing.T) []karpenterv1.NodeClaim {
	t.Helper()
	var list karpenterv1.NodeClaimList
	require.NoError(t, h.source.Spoke.List(within(t, soon), &list))
	return list.Items
}

// podNames returns the names of the pods on a Node.
func (h hubs) podNames(t *testing.T, node string) []string {
	t.Helper()
	require.NotEmpty(t, node, "the Node whose pods are to move")
	var list corev1.PodList
	require.NoError(t, h.source.Spoke.List(within(t, soon), &list))
	return lo.FilterMap(list.Items, func(p corev1.Pod, _ int) (string, bool) { return p.Name, p.Spec.NodeName == node })
}

// machinesOf returns the NodeClaims' provider IDs, by the NodeClaim's UID.
func (h hubs) machinesOf(t *testing.T) map[string]string {
	t.Helper()
	ids := map[string]string{}
	for _, nc := range h.nodeClaims(t) {
		if nc.Status.ProviderID != "" {
			ids[string(nc.UID)] = nc.Status.ProviderID
		}
	}
	return ids
}

func (h hubs) machines(t *testing.T) int {
	t.Helper()
	var list clusterv1.MachineList
	require.NoError(t, h.source.Hub.List(within(t, soon), &list, client.InNamespace(sandbox.ClusterNamespace)))
	return len(list.Items)
}
