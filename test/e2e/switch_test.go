package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1alpha1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/migration"
)

// TestNodesOfAnotherProviderAreTakenOver starts agent and shim on what
// karpenter-provider-cluster-api leaves when it is stopped in the middle of its work: NodeClaims
// with the infrastructure's provider IDs and without claims, one that it had not launched yet, one
// that is being deleted, two on one Machine, and a forgotten Machine.
func TestNodesOfAnotherProviderAreTakenOver(t *testing.T) {
	figure := shows(t, "a live switch from another provider: every node goes on running, and what was half done is finished")
	inGroup := lo.Ternary(testing.Short(), 3, 25)
	h := startHub(t, "e2e-switch")
	h.run(t, h.source, inGroup, inGroup)
	before := h.holdings(t, h.source)
	for _, component := range append(lo.Times(agents, sandbox.AgentName), sandbox.Shim) {
		require.NoError(t, h.source.Sandbox.StopComponent(component))
	}
	require.NoError(t, migration.Strip(within(t, settleWithin), h.source))
	pods := podsOn(t, h.source, slices.Collect(maps.Keys(before.nodes)))

	// The replicas that the other provider raised last: for a NodeClaim that it is launching, for
	// one that is being deleted, and for a Machine without a NodeClaim.
	h.scale(t, inGroup, inGroup+1)
	chosen := h.another(t, "west")
	begun := h.nodeClaimOn(t, before, "begun", chosen, migration.NotLaunched(chosen))
	leavingOn := h.another(t, "east")
	leaving := h.nodeClaimOn(t, before, "leaving", leavingOn, migration.Terminating)
	require.NoError(t, h.source.Spoke.Delete(within(t, soon), leaving))
	forgotten := h.another(t, "east")
	shared := h.machine(t, lo.MinBy(slices.Collect(maps.Values(before.claims)), func(a, b holding) bool { return a.machine < b.machine }).machine)
	second := h.nodeClaimOn(t, before, "second", shared, func(*karpenterv1.NodeClaim) {})
	require.NoError(t, h.source.Recorder.Await(within(t, settleWithin), everyMachineRuns))

	watching := watchSpoke(t, h.source)
	for _, component := range lo.Times(agents, sandbox.AgentName) {
		require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), component))
	}
	planned := h.planAdoption(t)
	require.Equal(t, lo.MapEntries(before.claims, func(_ string, c holding) (string, string) {
		return c.nodeClaim, c.machine
	}), machinesByNodeClaim(planned))
	require.Len(t, planned.Unfinished, 2)
	unfinished := lo.SliceToMap(planned.Unfinished, func(p planOf) (name, message string) { return p.Name, p.Message })
	require.Contains(t, unfinished["begun"], "adopts machine "+chosen.Name)
	require.Contains(t, unfinished["leaving"], "its machine "+leavingOn.Name+" is deleted with it")
	require.Len(t, planned.InTheWay, 1)
	require.Equal(t, "second", planned.InTheWay[0].Name)
	require.Contains(t, planned.InTheWay[0].Message, shared.Name)
	left := lo.Map(planned.Left, func(p planOf, _ int) string { return p.Machine })
	require.ElementsMatch(t, append(before.unclaimed, forgotten.Name), left) // Nodes have the names of their Machines
	require.Empty(t, planned.Nodes)
	require.Empty(t, planned.Raised)
	require.Zero(t, planned.Disrupted)
	require.Empty(t, h.claims(t, h.source, agentv1.PhasePending), "nothing is written for a plan")

	began := time.Now()
	require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), sandbox.Shim))
	poll(t, settleWithin, h.holds(before))
	figure("%d nodes were adopted %.1f s after the start of the shim", len(before.claims), time.Since(began).Seconds())
	h.source.Checker.Expected = func() invariants.Expected {
		return invariants.Expected{Shares: map[string]invariants.Share{"east": {Own: own + 1}, "west": {}}}
	}
	poll(t, settleWithin, func(context.Context) (string, error) {
		is := h.holdings(t, h.source)
		claim, adopted := is.claims[string(begun.UID)]
		_, left := is.claims[string(leaving.UID)]
		switch {
		case !adopted || claim.machine != chosen.Name:
			return fmt.Sprintf("NodeClaim begun to have the Machine that was chosen for it: it has %q", claim.machine), nil
		case left || is.replicas["east"] != int32(inGroup+own+1):
			return fmt.Sprintf("NodeClaim leaving to take its Machine with it: east has %d replicas", is.replicas["east"]), nil
		}
		return "", nil
	})
	require.NoError(t, h.source.Recorder.Await(within(t, settleWithin), running(2*inGroup+1)))
	throughout(t, spareGrace+2*syncInterval, time.Second, func() {
		others := lo.Reject(watching.Incidents(), func(what string, _ int) bool {
			return strings.Contains(what, " leaving ") || strings.Contains(what, " "+leavingOn.Name+" ")
		})
		require.Empty(t, others, "what happened to what ran in the spoke")
		is := h.holdings(t, h.source)
		require.Equal(t, map[string]int32{"east": int32(inGroup + own + 1), "west": int32(inGroup + 1)}, is.replicas)
		require.Equal(t, before.nodes, lo.PickByKeys(is.nodes, slices.Collect(maps.Keys(before.nodes))))
		require.Len(t, is.claims, len(before.claims)+1)
	})
	require.Equal(t, pods, podsOn(t, h.source, slices.Collect(maps.Keys(before.nodes))), "no pod was made again")

	h.expectAdopted(t, before)
	planned = h.planAdoption(t)
	require.Empty(t, planned.NodeClaims, "all that could be is adopted")
	require.Empty(t, planned.Unfinished)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		messages, err := h.eventsOf(t.Context(), "second")
		require.NoError(c, err)
		require.Contains(c, strings.Join(messages, "\n"), "belongs to NodeClaim "+before.nodeClaimOn(shared.Name))
	}, soon, 10*time.Millisecond, "the second NodeClaim on a Machine is told of")
	// This follows the event's instructions.
	ofItsOwn := mergePatch(fmt.Sprintf(`{"status":{"providerID":"capi-claim://%s/%s/%s"}}`, sandbox.ClusterNamespace, sandbox.ClusterName, second.UID))
	require.NoError(t, h.source.Spoke.Status().Patch(within(t, soon), second, ofItsOwn))
	require.NoError(t, client.IgnoreNotFound(h.source.Spoke.Delete(within(t, soon), second)))
	h.settle(t)
	require.Contains(t, h.holdings(t, h.source).nodes, shared.Name, "the Node of both stays")

	returned := h.adoptTheUsers(t)
	figure("%d nodes of the user's were adopted, and one was returned", own+1)

	require.NoError(t, migration.AllowDisruption(within(t, settleWithin), h.source))
	h.scale(t, 0, 0)
	require.NoError(t, h.source.Recorder.Await(within(t, 8*time.Minute), nothingLives))
	poll(t, settleWithin, func(context.Context) (string, error) {
		is := h.holdings(t, h.source)
		return lo.Ternary(maps.Equal(is.replicas, map[string]int32{"east": 1, "west": 0}), "",
			fmt.Sprintf("the machine that was returned to be left: replicas are %v", is.replicas)), nil
	})
	require.Equal(t, []string{returned}, h.holdings(t, h.source).unclaimed)
	h.settle(t)
	require.Empty(t, h.faults())
}

// adoptTheUsers makes the shim adopt the user's machines, like those of the cluster-autoscaler, and
// return one of them. It returns that machine's Node.
func (h hubs) adoptTheUsers(t *testing.T) string {
	t.Helper()
	before := h.holdings(t, h.source)
	require.Len(t, before.unclaimed, own+1)
	watching := watchSpoke(t, h.source)
	h.source.Checker.Expected = func() invariants.Expected {
		return invariants.Expected{Shares: map[string]invariants.Share{"east": {}, "west": {}}}
	}
	h.setAdoption(t, "All")
	poll(t, settleWithin, func(context.Context) (string, error) {
		missing := len(before.claims) + own + 1 - len(h.holdings(t, h.source).claims)
		return lo.Ternary(missing == 0, "", fmt.Sprintf("%d machines of the user's to be adopted", missing)), nil
	})
	h.settle(t)
	require.Empty(t, h.planAdoption(t).InTheWay)
	require.Equal(t, before.replicas, h.holdings(t, h.source).replicas)
	node := before.unclaimed[0]
	var was corev1.Node
	poll(t, settleWithin, func(context.Context) (string, error) { // core registers and initializes Nodes in its own time
		was = h.node(t, node)
		return lo.Ternary(was.Labels[karpenterv1.NodeInitializedLabelKey] == "true", "", "adopted Node "+node+" to be initialized"), nil
	})
	require.Equal(t, "true", was.Annotations[karpenterv1.DoNotDisruptAnnotationKey])

	h.setAdoption(t, "Never")
	h.source.Checker.Expected = func() invariants.Expected {
		return invariants.Expected{Shares: map[string]invariants.Share{"east": {Own: 1}, "west": {}}}
	}
	nodeClaim := &karpenterv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: node}} // named after its Machine, like the Node
	patch := mergePatch(fmt.Sprintf(`{"metadata":{"annotations":{%q:"true"}}}`, shimv1alpha1.ReturnMachineAnnotation))
	require.NoError(t, h.source.Spoke.Patch(within(t, soon), nodeClaim, patch))
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		err := h.source.Spoke.Get(ctx, client.ObjectKeyFromObject(nodeClaim), nodeClaim)
		return lo.Ternary(apierrors.IsNotFound(err), "", "the NodeClaim whose machine is returned to end"), client.IgnoreNotFound(err)
	})
	is := h.node(t, node)
	require.Equal(t, was.UID, is.UID)
	require.Nil(t, is.DeletionTimestamp)
	require.NotContains(t, is.Finalizers, karpenterv1.TerminationFinalizer)
	require.False(t, is.Spec.Unschedulable)
	h.settle(t)
	require.Equal(t, before.replicas, h.holdings(t, h.source).replicas)
	require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke")
	return node
}

func (h hubs) setAdoption(t *testing.T, mode string) {
	t.Helper()
	class := &shimv1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "move"}}
	patch := mergePatch(fmt.Sprintf(`{"spec":{"adoption":{"machines":%q}}}`, mode))
	require.NoError(t, h.source.Spoke.Patch(within(t, soon), class, patch))
}

// nodeClaimOn creates a NodeClaim on a Machine, as a copy of the others of its group with the
// change applied.
func (h hubs) nodeClaimOn(
	t *testing.T, like holdings, name string, m *clusterv1.Machine, change func(*karpenterv1.NodeClaim),
) *karpenterv1.NodeClaim {
	t.Helper()
	model := &karpenterv1.NodeClaim{}
	for _, c := range like.claims {
		if c.group == m.Labels[clusterv1.MachineDeploymentNameLabel] {
			require.NoError(t, h.source.Spoke.Get(within(t, soon), client.ObjectKey{Name: c.nodeClaim}, model))
			break
		}
	}
	made, err := migration.AddNodeClaim(within(t, soon), h.source, model, name, m, change)
	require.NoError(t, err)
	return made
}

func (h hubs) another(t *testing.T, group string) *clusterv1.Machine {
	t.Helper()
	m, err := migration.AnotherMachine(within(t, settleWithin), h.source, group)
	require.NoError(t, err)
	return m
}

func (h hubs) machine(t *testing.T, name string) *clusterv1.Machine {
	t.Helper()
	m := &clusterv1.Machine{}
	require.NoError(t, h.source.Hub.Get(within(t, soon), client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: name}, m))
	return m
}

// expectAdopted verifies that the NodeClaims and their Nodes are marked as adopted, protected, and
// labelled like those of new machines.
func (h hubs) expectAdopted(t *testing.T, before holdings) {
	t.Helper()
	for _, had := range before.claims {
		nodeClaim, node := &karpenterv1.NodeClaim{}, h.node(t, had.machine)
		require.NoError(t, h.source.Spoke.Get(within(t, soon), client.ObjectKey{Name: had.nodeClaim}, nodeClaim))
		for _, object := range []client.Object{nodeClaim, &node} {
			require.Equal(t, "true", object.GetLabels()[shimv1alpha1.AdoptedLabel])
			require.NotEmpty(t, object.GetLabels()[corev1.LabelInstanceTypeStable])
			require.Equal(t, "true", object.GetAnnotations()[karpenterv1.DoNotDisruptAnnotationKey])
			require.Equal(t, sandbox.ClusterNamespace+"/"+had.group, object.GetAnnotations()[shimv1alpha1.NodeGroupAnnotation])
		}
		require.Nil(t, nodeClaim.StatusConditions().Get(karpenterv1.ConditionTypeDrifted), had.nodeClaim)
	}
}

// plan is the output of `karpenter plan-adoption -o json`.
type plan struct {
	NodeClaims []planOf `json:"nodeClaims"`
	Nodes      []planOf `json:"nodes"`
	Unfinished []planOf `json:"unfinished"`
	InTheWay   []planOf `json:"inTheWay"`
	Left       []planOf `json:"left"`
	Raised     []planOf `json:"raised"`
	Disrupted  int      `json:"disrupted"`
}

// planOf is the plan of one object. The list that contains it determines which fields are set.
type planOf struct {
	Name      string `json:"name"`
	NodeClaim string `json:"nodeClaim"`
	Machine   string `json:"machine"`
	Message   string `json:"message"`
}

// machinesByNodeClaim returns the machines that NodeClaims would adopt.
func machinesByNodeClaim(p plan) map[string]string {
	return lo.SliceToMap(p.NodeClaims, func(p planOf) (string, string) { return p.NodeClaim, p.Machine })
}

// planAdoption returns the plan, and logs it as users read it.
func (h hubs) planAdoption(t *testing.T) plan {
	t.Helper()
	text, err := h.source.Sandbox.ShimCommand(within(t, settleWithin), "plan-adoption").CombinedOutput()
	if err != nil {
		t.Fatalf("plan-adoption: %v\n%s", err, text)
	}
	t.Logf("plan-adoption:\n%s", text)
	out, err := h.source.Sandbox.ShimCommand(within(t, settleWithin), "plan-adoption", "-o", "json").CombinedOutput()
	var p plan
	if err != nil || json.Unmarshal(out, &p) != nil {
		t.Fatalf("plan-adoption: %v\n%s", err, out)
	}
	return p
}

// eventsOf returns the messages of the events about a NodeClaim.
func (h hubs) eventsOf(ctx context.Context, nodeClaim string) ([]string, error) {
	var list corev1.EventList
	err := h.source.Spoke.List(ctx, &list)
	return lo.FilterMap(list.Items, func(e corev1.Event, _ int) (string, bool) {
		return e.Message, e.InvolvedObject.Kind == "NodeClaim" && e.InvolvedObject.Name == nodeClaim
	}), err
}

// nodeClaimOn returns the NodeClaim whose claim has the Machine.
func (h holdings) nodeClaimOn(machine string) string {
	for _, c := range h.claims {
		if c.machine == machine {
			return c.nodeClaim
		}
	}
	return ""
}
