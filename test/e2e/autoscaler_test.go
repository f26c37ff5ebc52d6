package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/scaler"
)

// clusterAutoscaler is the environment variable with the path of a real cluster-autoscaler, which
// `make e2e CLUSTER_AUTOSCALER=…` sets. Without it, package scaler makes the same calls.
const clusterAutoscaler = "CLUSTER_AUTOSCALER"

// TestAClusterAutoscalerScales has a node group of the cluster-autoscaler with two Machines of the
// user. Pods make it grow by twenty nodes and shrink again, and the agent is killed on the way up
// and on the way down.
func TestAClusterAutoscalerScales(t *testing.T) {
	binary := os.Getenv(clusterAutoscaler)
	figure := shows(t, "a cluster-autoscaler scales 0 → 20 → 0 nodes through the agent, which is killed meanwhile; the user's stay")
	if testing.Short() {
		t.Skip("not in the short run: it takes minutes")
	}
	const floor, nodes = 2, 20
	killed[t.Name()] = true
	leaveAsFound(t)
	apply(t, w.Hub, manifests.ScaledHub)
	apply(t, w.Spoke, manifests.ScaledWorkload)
	poll(t, 2*time.Minute, nodesRun("scaled", floor))
	users := uidsOf(machinesOf(t, "scaled"))

	certFile, keyFile, err := w.Sandbox.AgentCertificate("autoscaler", sandbox.AutoscalerIdentity)
	require.NoError(t, err)
	conn, err := scaler.Dial(w.Sandbox.State().AgentAddress, certFile, keyFile, w.Sandbox.State().Paths.AgentCA)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	provider := externalgrpc.NewCloudProviderClient(conn)
	groups, err := provider.NodeGroups(within(t, soon), &externalgrpc.NodeGroupsRequest{})
	require.NoError(t, err)
	require.Len(t, groups.GetNodeGroups(), 1, "no group of Karpenter")
	group := groups.GetNodeGroups()[0]
	require.Equal(t, sandbox.ClusterNamespace+"/scaled", group.GetId())
	require.EqualValues(t, 30-floor, group.GetMaxSize())
	target := func() int {
		response, err := provider.NodeGroupTargetSize(within(t, soon), &externalgrpc.NodeGroupTargetSizeRequest{Id: group.GetId()})
		require.NoError(t, err)
		return int(response.GetTargetSize())
	}
	require.Zero(t, target(), "the user's Machines are not the autoscaler's")

	var deleted func() []string
	if binary != "" {
		figure("a real cluster-autoscaler")
		runAutoscaler(t, binary, certFile, keyFile)
	} else {
		s := scaler.New(scaler.Config{
			Conn: conn, Cluster: w.Spoke, Interval: time.Second, UnneededTime: 3 * time.Second, Backoff: 5 * time.Second, Log: t.Logf,
		})
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Run(ctx)
		}()
		t.Cleanup(func() { stop(); <-done })
		deleted = s.Deleted
	}

	began := time.Now()
	scale(t, "scaled", floor+nodes)
	poll(t, 2*time.Minute, func(context.Context) (string, error) {
		made := len(machinesOf(t, "scaled"))
		return lo.Ternary(made > floor, "", "the scale-up to begin"), nil
	})
	restartAgent(t)
	poll(t, 4*time.Minute, podsRun("scaled", floor+nodes))
	// An autoscaler whose call was interrupted may order a machine too many, and then removes it.
	poll(t, 2*time.Minute, func(context.Context) (string, error) {
		return lo.Ternary(target() == nodes, "", fmt.Sprintf("the target size to be %d", nodes)), nil
	})
	poll(t, 2*time.Minute, nodesRun("scaled", floor+nodes))
	figure("up in %.0f s", time.Since(began).Seconds())
	claims := claimsOf(t, "scaled")
	require.Len(t, claims, nodes)
	own := lo.Map(claims, func(c agentv1.MachineClaim, _ int) types.UID {
		require.Equal(t, agentv1.ClusterAutoscaler, c.Spec.Holder)
		require.NotNil(t, c.Status.Machine)
		return c.Status.Machine.UID
	})
	require.Empty(t, lo.Intersect(own, users))
	providerIDs := lo.FilterMap(machinesOf(t, "scaled"), func(m clusterv1.Machine, _ int) (string, bool) {
		return m.Spec.ProviderID, slices.Contains(own, m.UID)
	})
	foreign := userNode(t, users[0])
	_, err = provider.NodeGroupDeleteNodes(within(t, soon), &externalgrpc.NodeGroupDeleteNodesRequest{
		Id: group.GetId(), Nodes: []*externalgrpc.ExternalGrpcNode{{ProviderID: foreign.Spec.ProviderID, Name: foreign.Name}},
	})
	require.ErrorContains(t, err, "FailedPrecondition", "a Machine of the user")

	began = time.Now()
	scale(t, "scaled", 0)
	poll(t, 4*time.Minute, func(context.Context) (string, error) {
		return lo.Ternary(len(claimsOf(t, "scaled")) < nodes, "", "the scale-down to begin"), nil
	})
	restartAgent(t)
	poll(t, 4*time.Minute, nodesRun("scaled", floor))
	figure("down in %.0f s", time.Since(began).Seconds())
	poll(t, soon, func(context.Context) (string, error) {
		return lo.Ternary(target() == 0, "", "the target size to be 0"), nil
	})
	require.ElementsMatch(t, users, uidsOf(machinesOf(t, "scaled")), "exactly the autoscaler's Machines were removed")
	if deleted != nil {
		// A node that was made while another one came may have been unneeded, and gone, before.
		require.Subset(t, deleted(), providerIDs)
		require.NotContains(t, deleted(), foreign.Spec.ProviderID)
	}
}

// restartAgent kills the agent that the cluster-autoscaler calls, and waits until it serves again.
func restartAgent(t *testing.T) {
	t.Helper()
	name := sandbox.AgentName(0)
	pid := w.Status(name).PID
	if err := w.Sandbox.Kill(name); err != nil {
		t.Fatal(err)
	}
	if err := w.AwaitRestarted(within(t, slow*soon), name, pid); err != nil {
		t.Fatal(err)
	}
}

// nodesRun returns a condition: the node group has this many Machines and replicas, and each has
// its Node.
func nodesRun(group string, machines int) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var md clusterv1.MachineDeployment
		if err := w.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: group}, &md); err != nil {
			return "", err
		}
		var list clusterv1.MachineList
		if err := w.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace),
			client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: group}); err != nil {
			return "", err
		}
		run := lo.CountBy(list.Items, func(m clusterv1.Machine) bool { return m.Status.NodeRef.Name != "" && m.DeletionTimestamp.IsZero() })
		if run == machines && len(list.Items) == machines && int(*md.Spec.Replicas) == machines {
			return "", nil
		}
		return fmt.Sprintf("%s to have %d Machines with Nodes: %d of %d do, with %d replicas",
			group, machines, run, len(list.Items), *md.Spec.Replicas), nil
	}
}

// claimsOf returns the live claims of a node group.
func claimsOf(t *testing.T, group string) []agentv1.MachineClaim {
	t.Helper()
	var list agentv1.MachineClaimList
	options := []client.ListOption{client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: group}}
	if err := w.Hub.List(t.Context(), &list, options...); err != nil {
		t.Fatal(err)
	}
	return lo.Filter(list.Items, func(c agentv1.MachineClaim, _ int) bool {
		return c.CurrentPhase() == agentv1.PhasePending || c.CurrentPhase() == agentv1.PhaseBound
	})
}

func userNode(t *testing.T, machine types.UID) *corev1.Node {
	t.Helper()
	m, found := lo.Find(machinesOf(t, "scaled"), func(m clusterv1.Machine) bool { return m.UID == machine })
	if !found {
		t.Fatalf("Machine %s of the user is gone", machine)
	}
	node := &corev1.Node{}
	if err := w.Spoke.Get(t.Context(), client.ObjectKey{Name: m.Status.NodeRef.Name}, node); err != nil {
		t.Fatal(err)
	}
	return node
}

// runAutoscaler runs a real cluster-autoscaler for the spoke until the end of the test, with the
// configuration of docs/cluster-autoscaler.md and shorter times.
func runAutoscaler(t *testing.T, binary, certFile, keyFile string) {
	t.Helper()
	state := w.Sandbox.State()
	config := filepath.Join(t.TempDir(), "cloud-config.yaml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, "address: %s\nkey: %s\ncert: %s\ncacert: %s\ngrpc_timeout: 30s\n",
		state.AgentAddress, keyFile, certFile, state.Paths.AgentCA), 0o600))
	log, err := os.Create(filepath.Join(state.Paths.Logs, "cluster-autoscaler.log"))
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), binary,
		"--cloud-provider=externalgrpc", "--cloud-config="+config, "--kubeconfig="+state.Paths.SpokeKubeconfig, "--leader-elect=false",
		"--namespace=default", "--address=127.0.0.1:"+freePort(t), "--scan-interval=2s", "--v=4", "--scale-down-unneeded-time=5s",
		"--scale-down-delay-after-add=5s", "--scale-down-delay-after-delete=0s", "--initial-node-group-backoff-duration=5s",
		"--max-node-provision-time=5m")
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have exited
		_ = cmd.Wait()
		_ = log.Close()
	})
}
