package claimsource_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/claimsource"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func TestNodeClaimsAreWokenByTheirClaims(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	before := w.Launched("before") // known when the source starts
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	t.Cleanup(queue.ShutDown)
	require.NoError(t, claimsource.NodeClaims(w.Claims).Start(ctx, queue))
	next := func() string {
		request, shutdown := queue.Get()
		require.False(t, shutdown)
		queue.Done(request)
		return request.Name
	}
	assert.Equal(t, "before", next())
	w.Launched("after")
	until := func(name string) { // the other claim may change once more, when it is bound
		for found := next(); found != name; found = next() {
			t.Logf("%s woke too", found)
		}
	}
	until("after")
	w.Provision(before, "sim:///1")
	until("before")
}

// A hub that was restored from a backup does not have the claims that were made since.
func TestANodeClaimIsWokenWhenTheHubNoLongerHasItsClaim(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	nodeClaim := w.Launched("lost")
	id := string(nodeClaim.UID)
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(queue.ShutDown)
	require.NoError(t, claimsource.NodeClaims(w.Claims).Start(t.Context(), queue))
	woken := func() bool {
		if queue.Len() == 0 {
			return false
		}
		request, _ := queue.Get()
		queue.Done(request)
		return request.Name == "lost"
	}
	w.Eventually(woken, "it is woken for the claim that is there")
	_, err := w.Client.Claims.ReleaseClaim(w.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: w.Cluster, ClaimId: id})
	require.NoError(t, err)
	w.Eventually(func() bool {
		claim, _ := w.Claims.Get(id)
		return woken() && claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	}, "it is woken by the end of its claim")
	require.False(t, woken(), "nothing else has happened")
	w.Agent.Forget(w.Cluster, id)
	w.Eventually(woken, "it is woken although the claim's name is gone with it")
	_, known := w.Claims.Get(id)
	require.False(t, known)
}

func TestNodeClaimsAreWokenWhenTheirMachinesBecomeOutdated(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Provision(w.Launched("before"), "sim:///1")
	w.Agent.OutdateMachines("default/a", "a new template") // before the source starts
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(queue.ShutDown)
	require.NoError(t, claimsource.Outdated(w.Claims).Start(t.Context(), queue))
	woken := func(want ...string) {
		t.Helper()
		var names []string
		for range want {
			request, shutdown := queue.Get()
			require.False(t, shutdown)
			queue.Done(request)
			names = append(names, request.Name)
		}
		require.ElementsMatch(t, want, names)
	}
	woken("before")
	w.Provision(w.Launched("after"), "sim:///2") // up to date: changes of its claim wake nothing
	w.Agent.OutdateMachines("default/a", "a newer template")
	woken("after")
	w.Agent.OutdateMachines("default/a", "")
	woken("after", "before")
	require.Zero(t, queue.Len())
}

type synced chan struct{}

func (s synced) Synced() <-chan struct{} { return s }

func TestAllNodeClaimsAreWokenOnceTheMirrorIsSynced(t *testing.T) {
	w := shimtest.New(t, nil)
	failures := 1
	kube := interceptor.NewClient(w.Kube, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if failures--; failures >= 0 {
				return errors.New("a failure that passes")
			}
			return c.List(ctx, list, options...)
		},
	})
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	t.Cleanup(queue.ShutDown)
	mirror := make(synced)
	require.NoError(t, claimsource.AllNodeClaims(mirror, kube).Start(ctx, queue))
	w.Create(w.NodeClaim("a"))
	w.Create(w.NodeClaim("b"))
	require.Zero(t, queue.Len(), "nothing is known yet")
	close(mirror)
	w.Eventually(func() bool { return queue.Len() == 2 }, "both are woken")
}
