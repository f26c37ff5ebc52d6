package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	// nodeDeadline is the agents' deadline in this scenario. Machines join within seconds; the rest
	// allows for a machine that is busy with other work.
	nodeDeadline = time.Minute
	// beyondDeadline is how long Cluster API is cut off beyond the deadline.
	beyondDeadline = time.Minute
	// slowly bounds what takes several of Cluster API's connection attempts.
	slowly = 4 * time.Minute
	// nowhere is the URL of an API server that does not exist: only the system's own services may
	// listen on its port.
	nowhere = "https://127.0.0.1:1"
)

// Cluster API loses its access to the spoke and is restarted, so it does not know the Nodes there.
// Kubelets and Karpenter keep working.
func TestNodesThatClusterAPICannotSeeSurvive(t *testing.T) {
	shows(t, "unseen: Nodes survive that Cluster API cannot see, and are not handed to the next claim")
	if testing.Short() {
		t.Skip("not in the short run: lasts longer than the node deadline")
	}
	const before, during = 2, 2
	u := newUnseen(t)
	u.apply(t, manifests.CrowdHub, u.Hub)
	u.registerWithKarpentersTaint(t)
	u.apply(t, manifests.CrowdSpoke, u.Spoke)
	u.apply(t, manifests.CrowdWorkload, u.Spoke)
	require.NoError(t, u.AwaitNodePool(within(t, soon), "crowd"))
	u.run(t, before)
	settle(t, u.Env, settleWithin)

	// One machine has not joined yet: Cluster API has not found its Node, and keeps reporting that
	// while it cannot look again.
	u.hang(t, simv1.StageJoin)
	u.scale(t, before+1)
	var slow clusterv1.Machine
	u.poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		var machines clusterv1.MachineList
		err := u.Hub.List(ctx, &machines, client.InNamespace(sandbox.ClusterNamespace))
		for i := range machines.Items {
			if m := &machines.Items[i]; m.Labels[agentv1.ClaimLabel] != "" && statesNoNode(m) {
				slow = *m
				return "", nil
			}
		}
		return "Cluster API to state that a Machine has no Node", err
	})

	restore := u.cutOff(t)
	u.hang(t, "", slow.Spec.InfrastructureRef.Name)
	u.run(t, before+1)
	u.run(t, before+1+during)
	u.poll(t, soon, func(context.Context) (string, error) { // a pod may run before its NodeClaim shows the Node as registered
		return lo.Ternary(len(u.unseen(t)) == 1+during, "", "Cluster API to have seen none of the Nodes that joined since"), nil
	})
	unseen := u.unseen(t)
	require.Contains(t, lo.Keys(unseen), slow.UID)
	require.True(t, statesNoNode(new(unseen[slow.UID])), "what it stated before, it still states")

	// Every deadline passes.
	kept := u.uids(t)
	youngest := slices.MaxFunc(lo.Values(unseen), func(a, b clusterv1.Machine) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	throughout(t, time.Until(youngest.CreationTimestamp.Add(nodeDeadline+beyondDeadline)), time.Second, func() {
		require.ElementsMatch(t, kept, u.uids(t), "nothing is deleted, and nothing is made in its place")
		require.Empty(t, u.givenUp(t))
		require.ElementsMatch(t, lo.Keys(unseen), lo.Keys(u.unseen(t)))
	})

	// A Node is drained and its claim released. To Cluster API its Machine never had one.
	claim := slow.Labels[agentv1.ClaimLabel]
	u.preferDeletionOnNode(t, slow.Name)
	u.scale(t, before+during)
	u.poll(t, slowly, func(ctx context.Context) (string, error) {
		var m clusterv1.Machine
		if err := u.Hub.Get(ctx, client.ObjectKeyFromObject(&slow), &m); err != nil {
			return "", client.IgnoreNotFound(err)
		}
		return lo.Ternary(m.DeletionTimestamp.IsZero(), "Machine "+slow.Name+" to be deleted", ""), nil
	})
	require.Empty(t, u.givenUp(t))

	restore()
	u.poll(t, slowly, func(ctx context.Context) (string, error) {
		var c agentv1.MachineClaim
		err := u.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: agentv1.ObjectName(sandbox.ClusterName, claim)}, &c)
		ended := c.Status.Phase == agentv1.PhaseEnded && c.Status.Reason == "Released"
		return lo.Ternary(ended, "", fmt.Sprintf("claim %s to end as released: it is %s (%s: %s)",
			claim, c.Status.Phase, c.Status.Reason, c.Status.Message)), err
	})
	require.NoError(t, u.Recorder.Await(within(t, slowly), everyMachineRuns))
	settle(t, u.Env, slowly)
	require.Empty(t, u.givenUp(t))
	require.Len(t, u.uids(t), len(kept)-3, "one Machine, NodeClaim and Node less")
	require.Empty(t, lo.Keys(u.unseen(t)))

	u.scale(t, 0)
	require.NoError(t, u.Recorder.Await(within(t, slowly), noMachines))
	settle(t, u.Env, settleWithin)
	require.Empty(t, faultsInLogs(u.Env, sandbox.AgentName(0), sandbox.AgentName(1), sandbox.Shim))
}

// unseen is a separate sandbox with two active agents, because nothing else can run while Cluster
// API is cut off from its spoke.
type unseen struct{ *testenv.Env }

func newUnseen(t *testing.T) unseen {
	t.Helper()
	own, err := testenv.Start(within(t, startWithin), sandbox.Options{
		Name: "e2e-unseen", Agents: 2,
		AgentArgs: []string{"--machine-node-deadline=" + nodeDeadline.String(), "--spare-grace-period=" + spareGrace.String()},
		ShimEnv:   []string{"CLAIM_SYNC_INTERVAL=5s"},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs: %s", own.Sandbox.State().Paths.Logs)
		}
		own.Stop()
	})
	return unseen{own}
}

func (u unseen) apply(t *testing.T, file string, to client.Client) {
	t.Helper()
	require.NoError(t, manifests.Apply(within(t, soon), to, file))
}

// poll is the function of that name, and also reports the pods without a Node.
func (u unseen) poll(t *testing.T, d time.Duration, condition func(context.Context) (string, error)) {
	t.Helper()
	if err := testenv.Poll(within(t, d), condition); err != nil {
		pending, _ := u.Pending(context.Background())
		t.Fatalf("%v\npods without a Node:\n  %s", err, strings.Join(pending, "\n  "))
	}
}

func (u unseen) scale(t *testing.T, pods int32) {
	t.Helper()
	require.NoError(t, u.Scale(within(t, soon), client.ObjectKey{Namespace: "default", Name: "crowd"}, pods))
}

// run scales to this many pods and waits until all of them run.
func (u unseen) run(t *testing.T, pods int32) {
	t.Helper()
	u.scale(t, pods)
	if err := u.Recorder.Await(within(t, slowly), running(int(pods))); err != nil {
		pending, _ := u.Pending(context.Background())
		t.Fatalf("%v\npods without a Node:\n  %s", err, strings.Join(pending, "\n  "))
	}
}

// hang sets where new machines and the named ones hang; "" for nowhere.
func (u unseen) hang(t *testing.T, at simv1.Stage, machines ...string) {
	t.Helper()
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	require.NoError(t, u.merge(t, template, map[string]any{"spec": map[string]any{"template": map[string]any{"spec": stuck(at)}}}))
	for _, name := range machines {
		m := &simv1.SimMachine{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name}}
		require.NoError(t, u.merge(t, m, map[string]any{"spec": stuck(at)}))
	}
}

// registerWithKarpentersTaint makes kubelets register with only Karpenter's taint, like those of
// bootstrap providers that do not set Cluster API's, which only Cluster API removes.
func (u unseen) registerWithKarpentersTaint(t *testing.T) {
	t.Helper()
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	taints := []corev1.Taint{karpenterv1.UnregisteredNoExecuteTaint}
	change := map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"nodeTaints": taints}}}}
	require.NoError(t, u.merge(t, template, change))
}

func stuck(at simv1.Stage) map[string]any {
	if at == "" {
		return map[string]any{"stuckAt": nil}
	}
	return map[string]any{"stuckAt": at}
}

func (u unseen) merge(t *testing.T, o client.Object, change map[string]any) error {
	t.Helper()
	patch, err := json.Marshal(change)
	if err != nil {
		return err
	}
	return u.Hub.Patch(within(t, soon), o, client.RawPatch(types.MergePatchType, patch))
}

// cutOff points Cluster API's kubeconfig of the spoke to an address that does not answer, and
// restarts Cluster API. restore reverts that.
func (u unseen) cutOff(t *testing.T) (restore func()) {
	t.Helper()
	var secret corev1.Secret
	key := client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName + "-kubeconfig"}
	require.NoError(t, u.Hub.Get(within(t, soon), key, &secret))
	working := secret.Data["value"]
	config, err := clientcmd.Load(working)
	require.NoError(t, err)
	for _, cluster := range config.Clusters {
		cluster.Server = nowhere
	}
	broken, err := clientcmd.Write(*config)
	require.NoError(t, err)
	write := func(kubeconfig []byte) {
		require.NoError(t, u.merge(t, &secret, map[string]any{"data": map[string][]byte{"value": kubeconfig}}))
	}
	write(broken)
	pid := u.Status(sandbox.ClusterAPI).PID
	require.NoError(t, u.Sandbox.Kill(sandbox.ClusterAPI))
	require.NoError(t, u.AwaitRestarted(within(t, slowly), sandbox.ClusterAPI, pid))
	return func() { write(working) }
}

// unseen returns the Machines, by UID, whose Node exists and has run pods, but is unknown to
// Cluster API.
func (u unseen) unseen(t *testing.T) map[types.UID]clusterv1.Machine {
	t.Helper()
	state := u.read(t)
	registered := lo.SliceToMap(state.NodeClaims, func(n karpenterv1.NodeClaim) (string, bool) {
		return n.Status.ProviderID, n.StatusConditions().IsTrue(karpenterv1.ConditionTypeRegistered)
	})
	return lo.SliceToMap(lo.Filter(state.Machines, func(m clusterv1.Machine, _ int) bool {
		return !m.Status.NodeRef.IsDefined() && registered[m.Spec.ProviderID]
	}), func(m clusterv1.Machine) (types.UID, clusterv1.Machine) { return m.UID, m })
}

// uids returns the UIDs of all Machines, NodeClaims and Nodes that are not being deleted.
func (u unseen) uids(t *testing.T) []types.UID {
	t.Helper()
	var uids []types.UID
	add := func(o metav1.Object) {
		if o.GetDeletionTimestamp().IsZero() {
			uids = append(uids, o.GetUID())
		}
	}
	state := u.read(t)
	for i := range state.Machines {
		add(&state.Machines[i])
	}
	for i := range state.NodeClaims {
		add(&state.NodeClaims[i])
	}
	for i := range state.Nodes {
		add(&state.Nodes[i])
	}
	return uids
}

// givenUp describes the claims that the agents gave up, or whose Machine they assigned to another
// claim.
func (u unseen) givenUp(t *testing.T) []string {
	t.Helper()
	return lo.FlatMap(u.read(t).Claims, func(c agentv1.MachineClaim, _ int) []string {
		return lo.FilterMap(c.Status.History, func(e agentv1.Event, _ int) (string, bool) {
			return c.Name + ": " + e.Reason + ": " + e.Message, slices.Contains([]string{"Failed", "Late", "HandedOver", "MachineLost", "Collected"}, e.Reason)
		})
	})
}

func (u unseen) read(t *testing.T) invariants.State {
	t.Helper()
	state, err := invariants.Read(within(t, soon), u.Hub, u.Spoke, testenv.Cluster)
	require.NoError(t, err)
	return state
}

// preferDeletionOnNode makes the pods on a Node the first to be removed when their Deployment is
// scaled down.
func (u unseen) preferDeletionOnNode(t *testing.T, node string) {
	t.Helper()
	var pods corev1.PodList
	require.NoError(t, u.Spoke.List(within(t, soon), &pods, client.InNamespace("default")))
	here := lo.Filter(pods.Items, func(p corev1.Pod, _ int) bool { return p.Spec.NodeName == node })
	require.NotEmpty(t, here)
	for i := range here {
		metav1.SetMetaDataAnnotation(&here[i].ObjectMeta, corev1.PodDeletionCost, "-1")
		require.NoError(t, u.Spoke.Update(within(t, soon), &here[i]))
	}
}

// statesNoNode reports whether Cluster API reports that it found no Node of a Machine whose
// instance exists.
func statesNoNode(m *clusterv1.Machine) bool {
	c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineNodeReadyCondition)
	return c != nil && c.Reason == clusterv1.MachineNodeInspectionFailedReason &&
		m.Spec.ProviderID != "" && strings.Contains(c.Message, m.Spec.ProviderID)
}
