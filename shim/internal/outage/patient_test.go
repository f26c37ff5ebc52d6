package outage_test

import (
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/node/legacyrepair"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/expiration"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/outage"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// away says on the NodeClass whether the agent is away.
func away(w *shimtest.Env, is bool) {
	class := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	w.Get(class)
	if is {
		class.StatusConditions().SetFalse(v1alpha1.ConditionAgentReachable, "Unreachable", "no connection to the agent")
	} else {
		class.StatusConditions().SetTrue(v1alpha1.ConditionAgentReachable)
	}
	if err := w.Kube.Status().Update(w.Context(), class); err != nil {
		panic(err)
	}
}

// connected is a connection that has lasted.
var connected = &connection{state: agentclient.State{Connected: true}}

func TestExpiryWaitsForTheHubWithoutAnError(t *testing.T) {
	w := shimtest.New(t, nil, shimtest.WithClock(clocktesting.NewFakeClock(time.Now())))
	core, err := outage.Patient([]controller.Controller{
		&disruption.Controller{}, expiration.NewController(w.Clock, outage.Client(w.Kube, connected, w.Clock), w.CloudProvider),
	}, w.CloudProvider)
	require.NoError(t, err)
	expiry, is := core[1].(reconcile.ObjectReconciler[*karpv1.NodeClaim])
	require.True(t, is)
	nodeClaim := w.NodeClaim("expired", func(nc *karpv1.NodeClaim) {
		nc.CreationTimestamp = metav1.NewTime(w.Clock.Now().Add(-time.Hour))
		nc.Spec.ExpireAfter = karpv1.MustParseNillableDuration("30m")
	})
	w.Create(nodeClaim)

	away(w, true)
	result, err := expiry.Reconcile(w.Context(), nodeClaim)
	require.NoError(t, err)
	require.Equal(t, reconcile.Result{RequeueAfter: 30 * time.Second}, result)
	require.True(t, w.Exists(nodeClaim))
	away(w, false)
	result, err = expiry.Reconcile(w.Context(), nodeClaim)
	require.NoError(t, err)
	require.Zero(t, result)
	require.False(t, w.Exists(nodeClaim))

	_, err = outage.Patient([]controller.Controller{&disruption.Controller{}}, w.CloudProvider)
	require.EqualError(t, err, `core has no controller "nodeclaim.expiration" of NodeClaims`)
}

// Core notes on a NodeClaim when its Node has to be gone, before it deletes it.
func TestARepairThatHasToWaitLeavesNoNote(t *testing.T) {
	w := shimtest.New(t, nil)
	nodeClaim := w.NodeClaim("unhealthy", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim://unhealthy" })
	w.Create(nodeClaim)
	node := w.Node(nodeClaim)
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(w.Clock.Now().Add(-time.Hour)),
	}}
	repair := legacyrepair.NewController(outage.Client(w.Kube, connected, w.Clock), w.CloudProvider, w.Clock, w.Recorder)

	away(w, true)
	_, err := repair.Reconcile(w.Context(), node)
	require.ErrorContains(t, err, "until the agent has been reachable")
	require.True(t, w.Exists(nodeClaim))
	require.NotContains(t, nodeClaim.Annotations, karpv1.NodeClaimTerminationTimestampAnnotationKey)
	away(w, false)
	_, err = repair.Reconcile(w.Context(), node)
	require.NoError(t, err)
	require.False(t, w.Exists(nodeClaim))
}
