package outage_test

import (
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/node/legacyrepair"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/expiration"
	"sigs.k8s.io/karpenter/pkg/events"

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
	}, w.CloudProvider, w.Recorder, w.Clock)
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
	require.Empty(t, w.Recorder.Reasons(), "it has not waited for long")

	_, err = outage.Patient([]controller.Controller{&disruption.Controller{}}, w.CloudProvider, w.Recorder, w.Clock)
	require.EqualError(t, err, `core has no controller "nodeclaim.expiration" of NodeClaims`)
}

// As with a proxy that ends streams: the agent is never reachable for half a minute, and no
// NodeClass reports that.
func TestExpiryThatWaitsForLongIsReported(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, nil, shimtest.WithClock(clk))
	away(w, false)
	line := &connection{}
	published := record.NewFakeRecorder(10)
	core, err := outage.Patient(
		[]controller.Controller{expiration.NewController(clk, outage.Client(w.Kube, line, clk), w.CloudProvider)},
		w.CloudProvider, events.NewRecorder(published), clk,
	)
	require.NoError(t, err)
	expiry, is := core[0].(reconcile.ObjectReconciler[*karpv1.NodeClaim])
	require.True(t, is)
	nodeClaim := w.NodeClaim("expired", func(nc *karpv1.NodeClaim) {
		nc.CreationTimestamp = metav1.NewTime(clk.Now().Add(-time.Hour)) // it expired long before this process began
		nc.Spec.ExpireAfter = karpv1.MustParseNillableDuration("30m")
	})
	w.Create(nodeClaim)
	began := clk.Now()
	for clk.Since(began) < 15*time.Minute {
		line.state = agentclient.State{Connected: true, Since: clk.Now(), LastError: status.Error(codes.Unavailable, "the stream was ended")}
		result, err := expiry.Reconcile(w.Context(), nodeClaim)
		require.NoError(t, err)
		require.Equal(t, reconcile.Result{RequeueAfter: 30 * time.Second}, result)
		if clk.Since(began) < 10*time.Minute {
			require.Empty(t, published.Events, "after %s", clk.Since(began))
		} else {
			require.Len(t, published.Events, 1, "after %s", clk.Since(began))
		}
		clk.Step(20 * time.Second)
	}
	require.True(t, w.Exists(nodeClaim))
	event := <-published.Events
	require.Contains(t, event, "Warning ExpirationPending")
	require.Contains(t, event, "until the agent has been reachable for 30s")
	require.Contains(t, event, "Unavailable: the stream was ended")

	clk.Step(10 * time.Second)
	_, err = expiry.Reconcile(w.Context(), nodeClaim)
	require.NoError(t, err)
	require.False(t, w.Exists(nodeClaim))
}

// unhealthy creates a NodeClaim and its Node, which has not been Ready for an hour.
func unhealthy(t *testing.T, w *shimtest.Env) (*karpv1.NodeClaim, *corev1.Node) {
	t.Helper()
	nodeClaim := w.NodeClaim("unhealthy", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim://unhealthy" })
	w.Create(nodeClaim)
	node := w.Node(nodeClaim)
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(w.Clock.Now().Add(-time.Hour)),
	}}
	require.NoError(t, w.Kube.Status().Update(w.Context(), node))
	return nodeClaim, node
}

// The agent does not report its machine, so that could not be removed (package adoption). These
// controllers of core heed neither do-not-disrupt nor do-not-repair.
func TestAKeptNodeIsNeitherRepairedNorExpired(t *testing.T) {
	for _, mark := range []string{v1alpha1.KeptAnnotation, v1alpha1.KeptFromRepairAnnotation, v1alpha1.KeptFromExpiryAnnotation} {
		w := shimtest.New(t, nil)
		nodeClaim, node := unhealthy(t, w)
		nodeClaim.CreationTimestamp = metav1.NewTime(w.Clock.Now().Add(-time.Hour))
		nodeClaim.Spec.ExpireAfter = karpv1.MustParseNillableDuration("30m")
		node.Annotations = map[string]string{mark: "true"}
		w.Update(node)
		through := outage.Client(w.Kube, connected, w.Clock)
		repair := legacyrepair.NewController(through, w.CloudProvider, w.Clock, w.Recorder)
		expiry := expiration.NewController(w.Clock, through, w.CloudProvider)

		_, err := repair.Reconcile(w.Context(), node)
		require.ErrorContains(t, err, "until the agent reports its machine", mark)
		_, err = expiry.Reconcile(w.Context(), nodeClaim)
		require.ErrorContains(t, err, "until the agent reports its machine", mark)
		require.True(t, w.Exists(nodeClaim))
		require.NotContains(t, nodeClaim.Annotations, karpv1.NodeClaimTerminationTimestampAnnotationKey)

		node.Annotations = nil
		w.Update(node)
		_, err = repair.Reconcile(w.Context(), node)
		require.NoError(t, err)
		require.False(t, w.Exists(nodeClaim))
	}
}

// Core notes on a NodeClaim when its Node has to be gone, before it deletes it.
func TestARepairThatHasToWaitLeavesNoNote(t *testing.T) {
	w := shimtest.New(t, nil)
	nodeClaim, node := unhealthy(t, w)
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
