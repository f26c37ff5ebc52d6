package floor_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/floor"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	controller *floor.Controller
	node       *corev1.Node
	reports    int // requested early reports
}

// setUp returns an environment with one machine of the user, whose Node has Karpenter's taint and
// another one.
func setUp(t *testing.T) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Replicas: 1}}, shimtest.WithClock(clk),
		shimtest.WithAgent(fakeagent.WithSpareGracePeriod(time.Hour)))
	response, err := w.Client.Machines.ListMachines(w.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: w.Cluster})
	require.NoError(t, err)
	require.Len(t, response.GetMachines(), 1)
	e := &env{
		Env: w, t: t, clock: clk,
		node: &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "node", CreationTimestamp: metav1.NewTime(clk.Now())},
			Spec: corev1.NodeSpec{
				ProviderID: response.GetMachines()[0].GetProviderId(),
				Taints:     []corev1.Taint{karpv1.UnregisteredNoExecuteTaint, {Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}},
			},
		},
	}
	e.controller = floor.New(clk, w.Kube, w.Unclaimed, func() { e.reports++ }, w.Recorder)
	e.Create(e.node)
	return e
}

// spare creates a spare machine with the provider ID, from a claim that is cancelled.
func (e *env) spare(providerID string) {
	e.t.Helper()
	nodeClaim := e.Launched("claim")
	e.Provision(nodeClaim, providerID)
	_, err := e.Client.Claims.ReleaseClaim(e.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: e.Cluster, ClaimId: string(nodeClaim.UID)})
	require.NoError(e.t, err)
	machines, err := e.Unclaimed.Machines(e.Context())
	require.NoError(e.t, err)
	require.Len(e.t, machines, 2, "the spare, and the user's")
}

// looked reports whether the Node is requeued after one look because it keeps the taint.
func (e *env) looked() bool {
	e.t.Helper()
	e.Get(e.node)
	result, err := e.controller.Reconcile(e.Context(), e.node)
	require.NoError(e.t, err)
	e.Get(e.node)
	if result.RequeueAfter > 0 {
		assert.Len(e.t, e.node.Spec.Taints, 2, "it keeps what is looked at again")
	}
	return result.RequeueAfter > 0
}

func TestPodsAreLetOntoANodeOfTheFloor(t *testing.T) {
	e := setUp(t)
	require.True(t, e.looked(), "it may be registered in a moment")
	e.clock.Step(time.Minute)
	require.False(t, e.looked())
	assert.Equal(t, []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}, e.node.Spec.Taints, "and no other one")
	assert.Equal(t, []string{"FloorNodeReady"}, e.Recorder.Reasons())
	assert.False(t, e.looked(), "it is done")
}

// The agent marks the machine only after the Node was reported.
func TestAnUnregisteredNodeIsSoonReportedToTheAgent(t *testing.T) {
	e := setUp(t)
	e.spare("sim:///1")
	e.node.Spec.ProviderID = "sim:///1"
	require.NoError(t, e.Kube.Update(e.Context(), e.node))
	require.True(t, e.looked())
	assert.Zero(t, e.reports, "it may be registered in a moment")
	e.clock.Step(20 * time.Second)
	require.True(t, e.looked())
	assert.Equal(t, 1, e.reports)
	e.clock.Step(10 * time.Second)
	require.True(t, e.looked())
	assert.Equal(t, 1, e.reports, "the agent knows it")
}

func TestANodeKeepsItsTaintUntilItsMachineIsTheFloors(t *testing.T) {
	for name, change := range map[string]func(*env){
		"a claim has its machine": func(e *env) {
			nodeClaim := e.Launched("claim")
			e.node.Spec.ProviderID = e.Provision(nodeClaim, "sim:///1").GetProviderId()
			require.NoError(t, e.Kube.Update(e.Context(), e.node))
		},
		"its machine is a spare, which the next claim may have": func(e *env) {
			e.spare("sim:///1")
			e.node.Spec.ProviderID = "sim:///1"
			require.NoError(e.t, e.Kube.Update(e.Context(), e.node))
		},
		"a spare has its provider ID as well": func(e *env) { e.spare(e.node.Spec.ProviderID) },
		"its machine is unknown": func(e *env) {
			e.node.Spec.ProviderID = "sim:///other"
			require.NoError(t, e.Kube.Update(e.Context(), e.node))
		},
		"a NodeClaim has it": func(e *env) {
			e.Create(e.NodeClaim("claim", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = e.node.Spec.ProviderID }))
		},
		"the agent is away": func(e *env) { e.Disconnect() },
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			e.t = t
			change(e)
			e.clock.Step(time.Minute)
			assert.True(t, e.looked())
			assert.Empty(t, e.Recorder.Reasons())
		})
	}
}
