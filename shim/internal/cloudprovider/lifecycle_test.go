package cloudprovider_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/state/nodepoolhealth"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
)

// halfMade returns an environment with an unclaimed Machine, and a NodeClaim of the given age that
// is to adopt it and is not launched.
func halfMade(
	t *testing.T, age time.Duration, annotations func(machine string) map[string]string,
) (*environment, *karpv1.NodeClaim, *agentv1alpha1.Machine) {
	t.Helper()
	w, left, machine := leftBehind(t)
	require.NoError(t, w.Kube.Delete(w.Context(), left))
	nodeClaim := w.NodeClaim("begun", func(nc *karpv1.NodeClaim) {
		nc.CreationTimestamp = metav1.NewTime(w.clock.Now().Add(-age))
		nc.Annotations = annotations(machine.GetName())
		nc.StatusConditions() // as old as the NodeClaim
	})
	w.Create(nodeClaim)
	return w, nodeClaim, machine
}

func byPeer(machine string) map[string]string {
	return map[string]string{v1alpha1.PeerMachineAnnotation: "default/" + machine}
}

func byUs(machine string) map[string]string {
	return map[string]string{v1alpha1.AdoptMachineAnnotation: machine}
}

// core returns core's own controller of NodeClaims. It ends those that are not launched or
// registered in time.
func (w *environment) core(provider *cloudprovider.CloudProvider) *lifecycle.Controller {
	return lifecycle.NewController(w.clock, w.Kube, provider, w.Recorder, state.NewCluster(w.clock, w.Kube, provider), nodepoolhealth.NewState(), nil)
}

// Core counts from the NodeClaim's creation, including the time while no provider ran.
func TestAHalfMadeNodeClaimOutlivesCoresTimeoutsWhenItIsAdopted(t *testing.T) {
	for name, annotations := range map[string]func(string) map[string]string{"another provider's": byPeer, "ours": byUs} {
		t.Run(name, func(t *testing.T) {
			w, nodeClaim, machine := halfMade(t, time.Hour, annotations)
			core := w.core(w.CloudProvider)
			for range 3 {
				_, err := core.Reconcile(w.Context(), nodeClaim)
				require.NoError(t, err)
				require.True(t, w.Exists(nodeClaim), "core gave it up")
			}
			assert.True(t, nodeClaim.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue())
			assert.Equal(t, machine.GetName(), w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetAdoptMachine())
			w.clock.Step(16 * time.Minute)
			_, err := core.Reconcile(w.Context(), nodeClaim)
			require.NoError(t, err)
			assert.False(t, w.Exists(nodeClaim), "from then on it has as long as any other")
		})
	}
}

// Otherwise the NodeClaim would end without a call of Delete, and its Machine would keep running.
func TestAHalfMadeNodeClaimWaitsWhileItIsNotKnownWhatCanBeAdopted(t *testing.T) {
	w, nodeClaim, machine := halfMade(t, 6*time.Minute, byPeer)
	config := w.CloudProvider.Config
	config.Catalogue = catalogue.New(w.clock, w.NodeGroups, w.Kube, time.Minute) // not running: the agent has not been reached yet
	core := w.core(cloudprovider.New(config))
	written := nodeClaim.ResourceVersion
	for range 2 {
		_, err := core.Reconcile(w.Context(), nodeClaim)
		require.ErrorIs(t, err, catalogue.ErrNotSynced)
		require.True(t, w.Exists(nodeClaim), "core gave it up")
	}
	assert.NotEqual(t, written, nodeClaim.ResourceVersion)
	written = nodeClaim.ResourceVersion
	_, err := core.Reconcile(w.Context(), nodeClaim)
	require.Error(t, err)
	w.Exists(nodeClaim)
	assert.Equal(t, written, nodeClaim.ResourceVersion, "each write has core look again at once")
	for range 20 {
		w.clock.Step(time.Minute) // core's longest backoff
		_, err := core.Reconcile(w.Context(), nodeClaim)
		require.Error(t, err)
		require.True(t, w.Exists(nodeClaim), "core gave it up")
	}

	_, err = w.core(w.CloudProvider).Reconcile(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.True(t, w.Exists(nodeClaim))
	assert.Equal(t, machine.GetName(), w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetAdoptMachine())
}

// While one NodeClaim has no provider ID, core plans and disrupts nothing.
func TestAHalfMadeNodeClaimThatCannotBeLaunchedIsGivenUpInTheEnd(t *testing.T) {
	w, nodeClaim, _ := halfMade(t, time.Hour, byPeer)
	nodeClaim.Spec.NodeClassRef.Name = "gone"
	w.Update(nodeClaim)
	core := w.core(w.CloudProvider)
	_, err := core.Reconcile(w.Context(), nodeClaim)
	require.Error(t, err)
	require.True(t, w.Exists(nodeClaim), "the time before this process does not count")
	w.clock.Step(lifecycle.LaunchTimeout + time.Second)
	_, err = core.Reconcile(w.Context(), nodeClaim)
	require.Error(t, err)
	assert.False(t, w.Exists(nodeClaim))
}
