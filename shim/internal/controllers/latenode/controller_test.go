package latenode_test

import (
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/state"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/latenode"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const (
	machineID = "sim:///1"
	// patience is how long core waits for the replacements of a Node.
	patience = 10 * time.Minute
)

// env has a NodeClaim, which is also in core's cluster state.
type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	cluster    *state.Cluster
	controller *latenode.Controller
	nodeClaim  *karpv1.NodeClaim
}

func setUp(t *testing.T) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithClock(clk))
	cluster := state.NewCluster(clk, w.Kube, w.CloudProvider)
	return &env{
		Env: w, t: t, clock: clk, cluster: cluster, controller: latenode.New(clk, w.CloudProvider, cluster), nodeClaim: w.Launched("claim"),
	}
}

// join gives the NodeClaim a Node that is initialized.
func (e *env) join() {
	e.t.Helper()
	e.nodeClaim.Status.ProviderID, e.nodeClaim.Status.NodeName = machineID, "node"
	conditions := e.nodeClaim.StatusConditions(status.WithClock(e.clock))
	for _, condition := range []string{karpv1.ConditionTypeRegistered, karpv1.ConditionTypeInitialized} {
		conditions.SetTrue(condition)
	}
	require.NoError(e.t, e.Kube.Status().Update(e.Context(), e.nodeClaim))
	e.cluster.UpdateNodeClaim(e.nodeClaim)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{
			karpv1.NodePoolLabelKey: shimtest.NodePoolName, karpv1.NodeRegisteredLabelKey: "true", karpv1.NodeInitializedLabelKey: "true",
		}},
		Spec: corev1.NodeSpec{ProviderID: machineID},
	}
	require.NoError(e.t, e.cluster.UpdateNode(e.Context(), node))
}

// looked returns after how long the NodeClaim is looked at again, or 0.
func (e *env) looked() time.Duration {
	e.t.Helper()
	result, err := e.controller.Reconcile(e.Context(), e.nodeClaim)
	require.NoError(e.t, err)
	return result.RequeueAfter
}

// disruptable returns why core leaves the Node alone, or nil.
func (e *env) disruptable() error {
	e.t.Helper()
	nodes := e.cluster.DeepCopyNodes()
	require.Len(e.t, nodes, 1)
	return nodes[0].ValidateNodeDisruptable(e.clock)
}

func TestALateNodeIsKeptForAWhile(t *testing.T) {
	e := setUp(t)
	require.Equal(t, patience, e.looked(), "it is not late yet")
	e.clock.Step(25 * time.Minute)
	require.Positive(t, e.looked(), "it may be initialized at any time")
	e.join()
	require.NoError(t, e.disruptable(), "core alone would remove it")
	joined := e.clock.Now()
	for e.clock.Since(joined) < 5*time.Minute {
		again := e.looked()
		require.Positive(t, again)
		require.Error(t, e.disruptable(), "after %s", e.clock.Since(joined))
		e.clock.Step(again)
		require.Error(t, e.disruptable(), "core may look shortly before this controller does")
	}
	assert.Zero(t, e.looked())
	e.clock.Step(time.Minute)
	assert.Zero(t, e.looked())
	assert.NoError(t, e.disruptable(), "core may remove it again")
}

// Core still knows what such a Node is for.
func TestANodeThatJoinsInTimeIsLeftToCore(t *testing.T) {
	e := setUp(t)
	e.clock.Step(patience - time.Second)
	e.join()
	assert.Zero(t, e.looked())
	require.NoError(t, e.disruptable())
	e.clock.Step(time.Hour)
	assert.Zero(t, e.looked())
	assert.NoError(t, e.disruptable())
}

func TestALateNodeThatHasHadPodsIsLeftToCore(t *testing.T) {
	e := setUp(t)
	e.clock.Step(25 * time.Minute)
	e.join()
	require.Positive(t, e.looked())
	e.nodeClaim.Status.LastPodEventTime = metav1.NewTime(e.clock.Now())
	e.clock.Step(time.Minute)
	assert.Zero(t, e.looked())
	assert.NoError(t, e.disruptable())
}

func TestANodeClaimThatGoesIsLeftAlone(t *testing.T) {
	e := setUp(t)
	e.clock.Step(25 * time.Minute)
	e.join()
	now := metav1.NewTime(e.clock.Now())
	e.nodeClaim.DeletionTimestamp = &now
	assert.Zero(t, e.looked())
	assert.False(t, e.cluster.IsNodeNominated(machineID))
}

// Fails if a release of core waits for another time.
func TestCoreWaitsAsLongAsThisControllerBelieves(t *testing.T) {
	assert.Equal(t, patience, disruption.NewQueue(nil, nil, nil, nil, nil).GetMaxRetryDuration())
}
