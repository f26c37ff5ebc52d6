package claimsource_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
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
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}})
	inGroup := func(name, group, providerID string) *karpv1.NodeClaim {
		t.Helper()
		nodeClaim := w.NodeClaim(name)
		nodeClaim.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
			{Key: corev1.LabelInstanceTypeStable, Operator: corev1.NodeSelectorOpIn, Values: []string{group}},
		}
		created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
		require.NoError(t, err)
		require.Equal(t, "default/"+group, created.Annotations[v1alpha1.NodeGroupAnnotation])
		w.Provision(nodeClaim, providerID)
		w.Eventually(func() bool {
			claim, _ := w.Claims.Get(string(nodeClaim.UID))
			return claim.GetMachine().GetProviderId() == providerID
		}, "the mirror has the machine of %s", name)
		return nodeClaim
	}
	before := inGroup("before", "a", "sim:///1")
	w.Agent.OutdateMachines("default/a", "a new template") // before the source starts
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	second := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(queue.ShutDown)
	t.Cleanup(second.ShutDown)
	source := claimsource.Outdated(w.Claims, 0)
	require.NoError(t, source.Start(t.Context(), queue))
	require.NoError(t, source.Start(t.Context(), second), "sources share nothing")
	next := func(q workqueue.TypedRateLimitingInterface[reconcile.Request]) string {
		t.Helper()
		request, shutdown := q.Get()
		require.False(t, shutdown)
		q.Done(request)
		return request.Name
	}
	require.Equal(t, "before", next(queue))
	require.Equal(t, "before", next(second))

	after := inGroup("after", "b", "sim:///2")                       // up to date, whatever else changes
	w.Agent.OutdateMachines("default/a", "a newer template")         // it was outdated already
	w.Agent.OutdateMachines("default/b", "a new template")           // the only one that concerns
	require.Equal(t, "after", next(queue), "nothing woke the other") // changes come in their order
	w.Agent.OutdateMachines("default/b", "")
	require.Equal(t, "after", next(queue), "it is up to date again")

	claim, _ := w.Claims.Get(string(before.UID))
	w.Agent.HoldDeletion(w.Cluster, claim.GetMachine().GetName(), "WaitingForPreDrainHook", "another actor deletes it")
	require.Equal(t, "before", next(queue), "it goes anyway")
	w.Agent.OutdateMachines("default/b", "a new template")
	require.Equal(t, "after", next(queue))
	claim, _ = w.Claims.Get(string(after.UID))
	w.Agent.LoseMachine(w.Cluster, claim.GetMachine().GetName())
	require.Equal(t, "after", next(queue), "its claim has no machine any more")
	require.Zero(t, queue.Len())
}

func TestANodeClaimIsWokenAgainAfterTheLag(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Provision(w.Launched("one"), "sim:///1")
	w.Agent.OutdateMachines("default/a", "a new template")
	queue := priorityqueue.New[reconcile.Request]("lag") // as controllers have it
	t.Cleanup(queue.ShutDown)
	require.NoError(t, claimsource.Outdated(w.Claims, 10*time.Millisecond).Start(t.Context(), queue))
	for range 2 {
		request, shutdown := queue.Get()
		require.False(t, shutdown)
		require.Equal(t, "one", request.Name)
		queue.Done(request)
	}
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
