package claimsync_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/claimsync"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const interval = time.Minute

func world(t *testing.T, options ...shimtest.Option) (*shimtest.World, *claimsync.Controller) {
	t.Helper()
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, options...)
	return w, claimsync.New(clock.RealClock{}, w.Kube, w.Kube, w.CloudProvider, w.Client.Claims, w.Cluster, interval, shimtest.Timeout)
}

func phase(w *shimtest.World, nodeClaim *karpv1.NodeClaim) agentv1alpha1.ClaimPhase {
	return w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetPhase()
}

func sync(t *testing.T, w *shimtest.World, c *claimsync.Controller) {
	t.Helper()
	result, err := c.Reconcile(w.Context())
	require.NoError(t, err)
	assert.Equal(t, interval, result.RequeueAfter)
}

func TestClaimsThatNoNodeClaimOwnsAreReleased(t *testing.T) {
	w, c := world(t)
	kept := w.Launched("kept")
	deleting := w.Launched("deleting", func(nc *karpv1.NodeClaim) { nc.Finalizers = []string{karpv1.TerminationFinalizer} })
	require.NoError(t, w.Kube.Delete(w.Context(), deleting))
	orphan := w.Launched("orphan")
	require.NoError(t, w.Kube.Delete(w.Context(), orphan))
	sync(t, w, c)
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, orphan))
	assert.NotEqual(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, kept))
	assert.NotEqual(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, deleting), "core still drains it")
}

func TestAClaimMadeAfterTheTokenIsSafe(t *testing.T) {
	var w *shimtest.World
	var late *karpv1.NodeClaim
	w, c := world(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			err := under.List(ctx, list, options...)
			// Core creates a NodeClaim and claims for it right after the set was read.
			if _, ok := list.(*karpv1.NodeClaimList); ok && late == nil && w != nil && w.Agent.Calls("ListClaims") > 0 {
				late = w.NodeClaim("late")
				_, createErr := w.CloudProvider.Create(w.Context(), late)
				return errors.Join(err, createErr)
			}
			return err
		},
	}))
	sync(t, w, c)
	require.NotNil(t, late, "the race happened")
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, phase(w, late))
}

func TestTheTokenComesBeforeTheSet(t *testing.T) {
	var order []string
	var w *shimtest.World
	w, c := world(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*karpv1.NodeClaimList); ok && w != nil {
				order = append(order, fmt.Sprintf("tokens=%d syncs=%d", w.Agent.Calls("ListClaims"), w.Agent.Calls("SyncClaims")))
			}
			return under.List(ctx, list, options...)
		},
	}))
	sync(t, w, c)
	assert.Contains(t, order, "tokens=1 syncs=0")
}

func TestNoSetNoCollection(t *testing.T) {
	fail := false
	w, c := world(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*karpv1.NodeClaimList); ok && fail {
				return errors.New("the API server is away")
			}
			return under.List(ctx, list, options...)
		},
	}))
	orphan := w.Launched("orphan")
	require.NoError(t, w.Kube.Delete(w.Context(), orphan))
	fail = true
	_, err := c.Reconcile(w.Context())
	require.Error(t, err)
	assert.Zero(t, w.Agent.Calls("SyncClaims"))
	assert.NotEqual(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, phase(w, orphan))
}

func TestAnIncompleteSetIsNotSent(t *testing.T) {
	w, c := world(t, shimtest.WithInterceptor(interceptor.Funcs{
		List: func(ctx context.Context, under client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			err := under.List(ctx, list, options...)
			if claims, ok := list.(*karpv1.NodeClaimList); ok {
				claims.Continue = "more"
			}
			return err
		},
	}))
	_, err := c.Reconcile(w.Context())
	require.ErrorContains(t, err, "incomplete")
	assert.Zero(t, w.Agent.Calls("SyncClaims"))
}

func TestTheAgentBeingAwayIsAnErrorAndTheNextRoundTakesANewToken(t *testing.T) {
	w, c := world(t)
	w.Disconnect()
	_, err := c.Reconcile(w.Context())
	require.Error(t, err)
	w.Reconnect()
	w.Agent.Fail("SyncClaims", 1, agenterrors.StaleToken("too old"))
	_, err = c.Reconcile(w.Context())
	require.Error(t, err)
	before := w.Agent.Calls("ListClaims")
	sync(t, w, c)
	assert.Equal(t, before+1, w.Agent.Calls("ListClaims"))
}

func TestForeignNodeClaimsAreNotInTheSet(t *testing.T) {
	w, c := world(t)
	ours := w.Launched("ours")
	w.Create(w.NodeClaim("foreign", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Kind = "EC2NodeClass" }))
	sync(t, w, c)
	sent, _ := w.Agent.Requests("SyncClaims")[0].(*agentv1alpha1.SyncClaimsRequest)
	assert.Equal(t, []string{string(ours.UID)}, sent.GetLiveClaimIds())
	assert.Equal(t, "karpenter", sent.GetHolder())
}

func TestNodesAreReported(t *testing.T) {
	w, c := world(t)
	w.Create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "joining"},
		Spec:       corev1.NodeSpec{ProviderID: "sim:///1", Taints: []corev1.Taint{karpv1.UnregisteredNoExecuteTaint}},
		Status: corev1.NodeStatus{
			Capacity:    corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("15Gi")},
			Allocatable: corev1.ResourceList{"cpu": resource.MustParse("3900m")},
		},
	})
	w.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "running"}, Spec: corev1.NodeSpec{ProviderID: "sim:///2"}})
	w.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}})
	sync(t, w, c)
	reports := map[string]*agentv1alpha1.NodeReport{}
	for _, report := range w.Agent.NodeReports(w.Cluster) {
		reports[report.GetProviderId()] = report
	}
	require.Len(t, reports, 2)
	assert.True(t, reports["sim:///1"].GetUnregistered())
	assert.Equal(t, map[string]string{"cpu": "4", "memory": "15Gi"}, reports["sim:///1"].GetCapacity())
	assert.Equal(t, map[string]string{"cpu": "3900m"}, reports["sim:///1"].GetAllocatable())
	assert.False(t, reports["sim:///2"].GetUnregistered())
}
