package outage_test

import (
	"context"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/expiration"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning"
	"sigs.k8s.io/karpenter/pkg/operator/injection"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/outage"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func TestNodesThatCannotBeReplacedAreNotRemoved(t *testing.T) {
	kube := shimtest.FakeKube(interceptor.Funcs{})
	class := func(name string, reachable bool) *karpv1.NodeClassReference {
		nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		require.NoError(t, kube.Create(t.Context(), nodeClass))
		if reachable {
			nodeClass.StatusConditions().SetTrue(v1alpha1.ConditionAgentReachable)
		} else {
			nodeClass.StatusConditions().SetFalse(v1alpha1.ConditionAgentReachable, "Unreachable", "no connection to the agent")
		}
		require.NoError(t, kube.Status().Update(t.Context(), nodeClass))
		return &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: name}
	}
	away, there := class("away", false), class("there", true)
	others := map[string]*karpv1.NodeClassReference{
		"there": there, "gone": {Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: "gone"},
		"foreign": {Group: "karpenter.k8s.aws", Kind: "EC2NodeClass", Name: "away"}, "none": nil,
	}
	line, now := &connection{}, clocktesting.NewFakeClock(time.Now())
	line.state.Connected, line.state.Since = true, now.Now()
	through := outage.Client(kube, line, now)
	now.Step(time.Minute)
	as := func(controller string) context.Context { return injection.WithControllerName(t.Context(), controller) }
	expiring := as((&expiration.Controller{}).Name())
	nodeClaim := func(ref *karpv1.NodeClassReference) *karpv1.NodeClaim {
		nc := &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim"}, Spec: karpv1.NodeClaimSpec{NodeClassRef: ref}}
		require.NoError(t, kube.Create(t.Context(), nc))
		return nc
	}
	for name, ref := range others {
		require.NoError(t, through.Delete(expiring, nodeClaim(ref)), name)
	}
	kept := nodeClaim(away)
	err := through.Delete(expiring, kept)
	require.True(t, apierrors.IsTooManyRequests(err), "%v", err)
	require.ErrorContains(t, err, "until the agent has been reachable")
	require.NoError(t, through.Delete(as("another.controller"), kept), "as a user or another rule of core wants it")

	others["away"] = away
	for name, ref := range others {
		pool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: name}}
		pool.Spec.Template.Spec.NodeClassRef = ref
		require.NoError(t, kube.Create(t.Context(), pool))
	}
	pools := func(ctx context.Context) []string {
		var list karpv1.NodePoolList
		require.NoError(t, through.List(ctx, &list))
		return lo.Map(list.Items, func(pool karpv1.NodePool, _ int) string { return pool.Name })
	}
	require.ElementsMatch(t, []string{"there", "gone", "foreign", "none"}, pools(as((&disruption.Controller{}).Name())))
	require.Len(t, pools(as((&provisioning.Provisioner{}).Name())), 5)

	nodeClass := &v1alpha1.ClusterAPINodeClass{}
	require.NoError(t, kube.Get(t.Context(), client.ObjectKey{Name: "away"}, nodeClass))
	nodeClass.StatusConditions().SetTrue(v1alpha1.ConditionAgentReachable)
	require.NoError(t, kube.Status().Update(t.Context(), nodeClass))
	require.Len(t, pools(as((&disruption.Controller{}).Name())), 5)
	again := nodeClaim(away)
	for _, connected := range []bool{false, true} { // the NodeClass does not know yet that the agent is away again
		line.state.Connected, line.state.Since = connected, now.Now()
		require.True(t, apierrors.IsTooManyRequests(through.Delete(expiring, again)), "connected: %t", connected)
	}
	now.Step(30 * time.Second)
	require.NoError(t, through.Delete(expiring, again))
}

type connection struct{ state agentclient.State }

func (c *connection) State() agentclient.State { return c.state }
