package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1alpha1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/cost"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/migration"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// many is the number of Nodes of each of two node groups.
const many = 250

// manyWithin bounds the adoption of all of them. The actual time is printed. Without NodeClaims it
// is measured from the change of the NodeClass until [hubs.adopted] is satisfied, because core
// registers the Nodes afterwards, in its own time. With NodeClaims it is measured from the start of
// the shim's process, including its election, until [hubs.nodesAdopted] is satisfied as well. Here
// the time mostly reflects that all control planes share one machine; `make bench` measures the
// agents alone.
const manyWithin = 20 * time.Minute

// writesEach is the maximum number of writes to the hub per adoption, besides those to the
// MachineDeployment, which all share.
const writesEach = 3

// TestManyNodesAreTakenOver adopts many at once: first users' Nodes, such as those of the
// cluster-autoscaler, and then NodeClaims that another provider leaves.
func TestManyNodesAreTakenOver(t *testing.T) {
	figure := shows(t, fmt.Sprintf("%d nodes are taken over: with NodeClaims, and without", 2*many))
	if testing.Short() {
		t.Skip("not in the short run: five hundred Nodes")
	}
	h := startHub(t, "e2e-many", func(o *sandbox.Options) { o.AuditHub = true })
	require.NoError(t, manifests.Apply(within(t, soon), h.source.Hub, manifests.MoveHub))
	require.NoError(t, manifests.Apply(within(t, soon), h.source.Spoke, manifests.MoveSpoke))
	require.NoError(t, h.source.AwaitNodePool(within(t, soon), "move"))
	for _, name := range []string{"east", "west"} {
		md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name}}
		patch := mergePatch(fmt.Sprintf(`{"metadata":{"annotations":{%q:"%d"}},"spec":{"replicas":%d}}`,
			clusterv1.AutoscalerMaxSizeAnnotation, many, many))
		require.NoError(t, h.source.Hub.Patch(within(t, soon), md, patch))
	}
	require.NoError(t, h.source.Recorder.Await(within(t, 15*time.Minute), func(s timeline.State) string {
		machines := lo.SumBy(s.Groups, func(g timeline.Group) int { return g.Machines })
		return lo.Ternary(machines == 2*many, everyMachineRuns(s), fmt.Sprintf("%d Machines to be made: %d are", 2*many, machines))
	}))
	h.source.Checker.Expected = func() invariants.Expected {
		return invariants.Expected{Shares: map[string]invariants.Share{"east": {}, "west": {}}}
	}
	// The cost of an unclaimed Machine is not part of the cost of its adoption.
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		state, err := invariants.Read(ctx, h.source.Hub, h.source.Spoke, testenv.Cluster)
		if err != nil {
			return "", err
		}
		marked := lo.CountBy(state.Machines, func(m clusterv1.Machine) bool { return m.Annotations[agentv1.FloorAnnotation] != "" })
		return lo.Ternary(marked == 2*many, "", fmt.Sprintf("%d Machines to be marked as the floor's: %d are", 2*many, marked)), nil
	})
	log, err := cost.Open(h.source.Sandbox.State().Paths.HubAudit)
	require.NoError(t, err)

	began := time.Now()
	class := &shimv1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "move"}}
	patch := mergePatch(`{"spec":{"adoption":{"machines":"All","nodesPerMinute":6000}}}`)
	require.NoError(t, h.source.Spoke.Patch(within(t, soon), class, patch))
	poll(t, manyWithin, h.adopted)
	took := time.Since(began)
	figure("without NodeClaims: %.0f s, %.2f writes each", took.Seconds(), writes(t, log))
	h.settle(t)
	before := h.holdings(t, h.source)
	poll(t, settleWithin, h.nodesAdopted) // core registers them in its own time
	h.expectAdopted(t, before)

	for _, component := range append(lo.Times(agents, sandbox.AgentName), sandbox.Shim) {
		require.NoError(t, h.source.Sandbox.StopComponent(component))
	}
	require.NoError(t, migration.Strip(within(t, 10*time.Minute), h.source))
	left, err := invariants.Read(within(t, soon), h.source.Hub, h.source.Spoke, testenv.Cluster)
	require.NoError(t, err)
	for i := range left.Nodes {
		require.True(t, isDisguised(&left.Nodes[i]), "what the shim wrote on Node %s is gone", left.Nodes[i].Name)
	}
	for i := range left.NodeClaims {
		require.True(t, isDisguised(&left.NodeClaims[i]), "what the shim wrote on NodeClaim %s is gone", left.NodeClaims[i].Name)
	}
	watching := watchSpoke(t, h.source)
	for _, component := range lo.Times(agents, sandbox.AgentName) {
		require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), component))
	}
	_, err = log.Next(cost.AgentUser)
	require.NoError(t, err)
	began = time.Now()
	require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), sandbox.Shim))
	poll(t, manyWithin, h.adopted)
	poll(t, manyWithin, h.nodesAdopted)
	took = time.Since(began)
	figure("with NodeClaims: %.0f s from the start of the shim, %.2f writes each", took.Seconds(), writes(t, log))
	poll(t, soon, h.holds(before))
	h.settle(t)
	h.expectAdopted(t, before)
	require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke")
	is := h.holdings(t, h.source)
	require.Equal(t, before.nodes, is.nodes)
	require.Equal(t, before.replicas, is.replicas)
	require.Empty(t, h.faults())
}

// adopted is satisfied once each of the Machines has a claim, and the claim's NodeClaim has the
// values of its node group.
func (h hubs) adopted(ctx context.Context) (string, error) {
	state, err := invariants.Read(ctx, h.source.Hub, h.source.Spoke, testenv.Cluster)
	if err != nil {
		return "", err
	}
	nodeClaims := lo.KeyBy(state.NodeClaims, func(nc karpenterv1.NodeClaim) string { return string(nc.UID) })
	n := lo.CountBy(state.Claims, func(c agentv1.MachineClaim) bool {
		nc := nodeClaims[c.Spec.ClaimID]
		return c.CurrentPhase() == agentv1.PhaseBound && isAdopted(&nc)
	})
	return lo.Ternary(n == 2*many, "", fmt.Sprintf("%d Machines to be adopted: %d are", 2*many, n)), nil
}

// nodesAdopted is satisfied once the Node of each of the Machines has the values of its NodeClaim.
func (h hubs) nodesAdopted(ctx context.Context) (string, error) {
	var nodes corev1.NodeList
	if err := h.source.Spoke.List(ctx, &nodes); err != nil {
		return "", err
	}
	n := lo.CountBy(nodes.Items, func(n corev1.Node) bool { return isAdopted(&n) })
	return lo.Ternary(n == 2*many, "", fmt.Sprintf("%d Nodes to be adopted: %d are", 2*many, n)), nil
}

func isAdopted(object client.Object) bool {
	return object.GetLabels()[shimv1alpha1.AdoptedLabel] != "" && object.GetAnnotations()[shimv1alpha1.NodeGroupAnnotation] != ""
}

// isDisguised reports whether a Node or a NodeClaim has no traces of an adoption.
func isDisguised(object client.Object) bool {
	_, adopted := object.GetLabels()[shimv1alpha1.AdoptedLabel]
	_, grouped := object.GetAnnotations()[shimv1alpha1.NodeGroupAnnotation]
	_, isProtected := object.GetAnnotations()[karpenterv1.DoNotDisruptAnnotationKey]
	return !adopted && !grouped && !isProtected
}

// writes returns the number of the agents' writes per adoption since the last call, and fails the
// test if there were too many.
func writes(t *testing.T, log *cost.Log) float64 {
	t.Helper()
	requests, err := log.Next(cost.AgentUser)
	require.NoError(t, err)
	n := lo.CountBy(requests, func(r cost.Request) bool {
		shared := strings.HasPrefix(r.Resource, "machinedeployments") || strings.HasPrefix(r.Resource, "spokes") || r.Resource == "events"
		return r.Writes() && !r.Refused() && !shared
	})
	require.LessOrEqual(t, n, writesEach*2*many)
	return float64(n) / (2 * many)
}
