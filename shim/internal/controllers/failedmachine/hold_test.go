package failedmachine_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/state/nodepoolhealth"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// core returns core's own controller of NodeClaims, as it begins in a process that becomes the
// leader now.
func (e *env) core() *lifecycle.Controller {
	cluster := state.NewCluster(e.clock, e.Kube, e.CloudProvider)
	return lifecycle.NewController(e.clock, e.controller.Client(e.Kube), e.CloudProvider, e.Recorder, cluster, nodepoolhealth.NewState(), nil)
}

// leaderless returns a launched NodeClaim after 20 minutes in which nothing ran.
func (e *env) leaderless() *karpv1.NodeClaim {
	e.t.Helper()
	nodeClaim := e.Launched("claim", unregistered)
	_, err := e.core().Reconcile(e.Context(), nodeClaim)
	require.NoError(e.t, err)
	e.Get(nodeClaim)
	e.clock.Step(20 * time.Minute)
	return nodeClaim
}

func TestCoreDoesNotGiveUpWhatWaitsForItsMachineAfterATimeWithoutALeader(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.leaderless()
	stale := nodeClaim.DeepCopy()
	core := e.core()
	_, err := core.Reconcile(e.Context(), stale.DeepCopy())
	require.True(t, apierrors.IsTooManyRequests(err), err)
	require.True(t, e.Exists(nodeClaim), "core runs before this controller")

	e.reconcile(nodeClaim)
	_, err = core.Reconcile(e.Context(), stale.DeepCopy())
	require.True(t, apierrors.IsTooManyRequests(err), err)
	require.True(t, e.Exists(nodeClaim), "core's cache lags behind")

	for range 10 {
		e.reconcile(nodeClaim)
		e.Get(nodeClaim)
		_, err = core.Reconcile(e.Context(), nodeClaim)
		require.NoError(t, err)
		require.True(t, e.Exists(nodeClaim))
		e.clock.Step(10 * time.Minute)
	}
}

// leaderlessPool returns a NodePool with two launched NodeClaims after 20 minutes in which nothing
// ran.
func (e *env) leaderlessPool() (nodePool *karpv1.NodePool, nodeClaims []*karpv1.NodeClaim) {
	e.t.Helper()
	nodePool = &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodePoolName, UID: "pool"}}
	e.Create(nodePool)
	owned := func(nc *karpv1.NodeClaim) {
		nc.OwnerReferences = []metav1.OwnerReference{{APIVersion: "karpenter.sh/v1", Kind: "NodePool", Name: nodePool.Name, UID: nodePool.UID}}
	}
	core := e.core()
	for _, name := range []string{"first", "second"} {
		nodeClaim := e.Launched(name, unregistered, owned)
		_, err := core.Reconcile(e.Context(), nodeClaim)
		require.NoError(e.t, err)
		e.Get(nodeClaim)
		nodeClaims = append(nodeClaims, nodeClaim)
	}
	e.clock.Step(20 * time.Minute)
	return nodePool, nodeClaims
}

// unhealthy reports whether the NodePool's NodeClaims have failed to register.
func (e *env) unhealthy(nodePool *karpv1.NodePool) bool {
	e.t.Helper()
	e.Get(nodePool)
	return nodePool.StatusConditions().Get(karpv1.ConditionTypeNodeRegistrationHealthy).IsFalse()
}

// pause lets the agent wait for nothing.
func (e *env) pause() {
	e.t.Helper()
	e.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "the MachineDeployment is paused", time.Time{})
	e.Eventually(func() bool {
		group, _ := e.NodeGroups.Get("default/a")
		return !group.GetAvailability().GetAvailable()
	}, "the mirror shows it")
}

// Without a leader, nothing was checked, so nothing has failed.
func TestANodePoolStaysHealthyAfterATimeWithoutALeader(t *testing.T) {
	e := setUp(t, manual())
	nodePool, nodeClaims := e.leaderlessPool()
	core := e.core()
	for range 3 {
		for _, nodeClaim := range nodeClaims {
			_, err := core.Reconcile(e.Context(), nodeClaim.DeepCopy())
			require.True(t, apierrors.IsTooManyRequests(err), err)
			require.True(t, e.Exists(nodeClaim))
		}
		require.False(t, e.unhealthy(nodePool))
	}
}

// One that is being deleted is not held, and holds nothing.
func TestANodePoolIsUnhealthyOnceItsNodeClaimsHaveFailed(t *testing.T) {
	e := setUp(t, manual())
	nodePool, nodeClaims := e.leaderlessPool()
	e.pause()
	for _, nodeClaim := range nodeClaims {
		e.reconcile(nodeClaim)
	}
	e.clock.Step(time.Minute)
	core := e.core()
	for _, nodeClaim := range nodeClaims {
		_, err := core.Reconcile(e.Context(), nodeClaim.DeepCopy())
		require.NoError(t, err)
		require.False(t, e.Exists(nodeClaim))
		e.reconcile(nodeClaim)
	}
	require.True(t, e.unhealthy(nodePool))
}

func TestCoreGivesUpWhatTheAgentDoesNotWaitForAMinuteLater(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.leaderless()
	e.pause()
	core := e.core()
	e.reconcile(nodeClaim)
	_, err := core.Reconcile(e.Context(), nodeClaim.DeepCopy())
	require.True(t, apierrors.IsTooManyRequests(err), err)
	e.clock.Step(time.Minute)
	_, err = core.Reconcile(e.Context(), nodeClaim.DeepCopy())
	require.NoError(t, err)
	assert.False(t, e.Exists(nodeClaim))
}

// Core launches it and counts from its creation, in one pass.
func TestCoreDoesNotGiveUpWhatItLaunchesLate(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.NodeClaim("claim", func(nc *karpv1.NodeClaim) {
		nc.CreationTimestamp = metav1.NewTime(e.clock.Now().Add(-20 * time.Minute))
		nc.StatusConditions() // as old as the NodeClaim
	})
	e.Create(nodeClaim)
	core := e.core()
	_, err := core.Reconcile(e.Context(), nodeClaim)
	require.True(t, apierrors.IsTooManyRequests(err), err)
	require.True(t, e.Exists(nodeClaim))
	require.True(t, nodeClaim.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue())
	e.Eventually(func() bool { _, known := e.Claims.Get(string(nodeClaim.UID)); return known }, "the mirror knows the claim")
	e.reconcile(nodeClaim)
	e.Get(nodeClaim)
	_, err = core.Reconcile(e.Context(), nodeClaim)
	require.NoError(t, err)
	assert.True(t, e.Exists(nodeClaim))
}
