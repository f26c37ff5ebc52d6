package failedmachine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// waiting returns a controller, and a NodeClaim that has waited for its machine for so long that
// this was published.
func waiting(t *testing.T) (*shimtest.Env, *Controller, *karpv1.NodeClaim) {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithClock(clk))
	c := New(Config{
		Kube: w.Kube, Live: w.Kube, CloudProvider: w.CloudProvider, Claims: w.Claims, NodeGroups: w.NodeGroups, Agent: w.Client.Claims,
		Cluster: w.Cluster, Recorder: w.Recorder, Unclaimed: w.Unclaimed, Timeout: shimtest.Timeout, Clock: clk,
	})
	nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) {
		nc.CreationTimestamp = metav1.NewTime(clk.Now().Add(-time.Hour))
		nc.StatusConditions().SetUnknown(karpv1.ConditionTypeRegistered)
	})
	_, err := c.requests(w.Kube).Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(nodeClaim)})
	require.NoError(t, err)
	require.Equal(t, []string{"WaitingForMachine"}, w.Recorder.Reasons())
	require.Len(t, c.records, 1)
	return w, c, nodeClaim
}

// A NodeClaim without finalizers is gone before the controller sees that it is being deleted.
func TestNothingIsRememberedOfANodeClaimThatIsGone(t *testing.T) {
	w, c, nodeClaim := waiting(t)
	require.NoError(t, w.Kube.Delete(t.Context(), nodeClaim))
	result, err := c.requests(w.Kube).Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(nodeClaim)})
	require.NoError(t, err)
	require.Zero(t, result)
	require.Empty(t, c.records)
}

func TestAnotherNodeClaimOfTheSameNameIsLookedAtAfresh(t *testing.T) {
	_, c, nodeClaim := waiting(t)
	another := nodeClaim.DeepCopy()
	another.UID = "another"
	clk, _ := c.Clock.(*clocktesting.FakeClock)
	clk.Step(holdFor)
	require.False(t, c.holds(nodeClaim))
	require.True(t, c.holds(another), "the controller has not looked at it")
	c.looksAt(another)
	require.True(t, c.holds(another))
	clk.Step(holdFor)
	require.False(t, c.holds(another))
}
