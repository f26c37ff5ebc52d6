package cloudprovider_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/controllers/node/health"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func oneGroup() []*agentv1alpha1.NodeGroup { return []*agentv1alpha1.NodeGroup{{Name: "a"}} }

func slowTermination() shimtest.Option {
	return shimtest.WithAgent(fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual,
	}))
}

func notFound(t *testing.T, err error) {
	t.Helper()
	assert.True(t, corecloudprovider.IsNodeClaimNotFoundError(err), "%v", err)
}

func uncertain(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	assert.False(t, corecloudprovider.IsNodeClaimNotFoundError(err), "%v", err)
}

func TestDeleteEndsOnceTheInstanceIsGone(t *testing.T) {
	w := shimtest.New(t, oneGroup(), slowTermination())
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	w.Agent.Join(w.Cluster, machine.GetName(), "")
	for range 3 { // core asks every five seconds
		require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	}
	assert.EqualValues(t, 1, w.Agent.NodeGroup("default/a").GetReplicas())
	w.Agent.Terminate(w.Cluster, machine.GetName())
	w.Eventually(func() bool {
		return corecloudprovider.IsNodeClaimNotFoundError(w.CloudProvider.Delete(w.Context(), nodeClaim))
	}, "it is gone")
	assert.EqualValues(t, 0, w.Agent.NodeGroup("default/a").GetReplicas())
	w.Eventually(func() bool { // once the mirror, which may be behind the agent's answer, shows it too
		return corecloudprovider.IsNodeClaimNotFoundError(w.CloudProvider.Delete(w.Context(), nodeClaim))
	}, "it is still gone")
}

func TestARepeatedDeleteAsksOnlyForWhatTheMirrorDoesNotShow(t *testing.T) {
	w := shimtest.New(t, oneGroup(), slowTermination())
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	w.Agent.Join(w.Cluster, machine.GetName(), "")
	calls := func() int { return w.Agent.Calls("ReleaseClaim") }
	released := func(drained bool) {
		t.Helper()
		require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
		w.Eventually(func() bool {
			claim, _ := w.Claims.Get(string(nodeClaim.UID))
			return claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING && claim.GetDrained() == drained
		}, "the mirror shows it")
		asked := calls()
		for range 10 {
			require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
		}
		require.Equal(t, asked, calls(), "the mirror says so already")
	}
	released(false)
	asked := calls()
	nodeClaim.StatusConditions().SetTrue(karpv1.ConditionTypeDrained)
	nodeClaim.StatusConditions().SetTrue(karpv1.ConditionTypeVolumesDetached)
	released(true)
	assert.Equal(t, asked+1, calls(), "that it is drained is news")

	w.Disconnect()
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	w.Reconnect()
	w.Agent.Terminate(w.Cluster, machine.GetName())
	w.Eventually(func() bool {
		return corecloudprovider.IsNodeClaimNotFoundError(w.CloudProvider.Delete(w.Context(), nodeClaim))
	}, "it is gone")
}

func TestAMachineThatDoesNotGoSaysWhyOnItsNodeClaim(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, oneGroup(), slowTermination(), shimtest.WithClock(clk))
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	w.Agent.Join(w.Cluster, machine.GetName(), "")
	deleted := func() {
		t.Helper()
		require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	}
	deleted()
	w.Agent.HoldDeletion(w.Cluster, machine.GetName(), "WaitingForInfrastructureDeletion", "SimMachine deletion failed: volume vol-7 is in use")
	w.Eventually(func() bool {
		claim, _ := w.Claims.Get(string(nodeClaim.UID))
		return claim.GetMachine().GetDeletingReason() != ""
	}, "the mirror shows it")
	clk.Step(time.Minute)
	deleted()
	assert.Empty(t, w.Recorder.Reasons(), "that takes a while")
	clk.Step(5 * time.Minute)
	deleted()
	require.Equal(t, []string{"MachineDeletionStuck"}, w.Recorder.Reasons())
	for _, part := range []string{machine.GetName(), "WaitingForInfrastructureDeletion", "vol-7 is in use"} {
		assert.Contains(t, w.Recorder.Messages()[0], part)
	}
}

func TestDeleteKeysOnTheUIDWhateverTheProviderID(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	for _, providerID := range []string{"", "sim:///other", "capi-claim://default/workload/somebody-else"} {
		nodeClaim := w.Launched(
			"claim-"+lo.RandomString(5, lo.LowerCaseLettersCharset),
			func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = providerID },
		)
		_ = w.CloudProvider.Delete(w.Context(), nodeClaim)
		assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetPhase())
	}
}

func TestADeleteThatTheAgentPutsOffIsSaidOnTheNodeClaim(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, "sim:///1")
	w.Agent.Fail("ReleaseClaim", 1, agenterrors.TooManyClaims("2 claims were released within 10m", 9*time.Minute))
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	require.Equal(t, []string{"ReleaseLimited"}, w.Recorder.Reasons())
	assert.Contains(t, w.Recorder.Messages()[0], "2 claims were released within 10m")
	w.Eventually(func() bool {
		return corecloudprovider.IsNodeClaimNotFoundError(w.CloudProvider.Delete(w.Context(), nodeClaim))
	}, "it is released then")
}

func TestDeleteOfAnUnknownClaimIsNotFound(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	notFound(t, w.CloudProvider.Delete(w.Context(), w.NodeClaim("never")))
}

func TestNothingIsConcludedWhileTheAgentIsAway(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	w.Disconnect()
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	uncertain(t, w.CloudProvider.Delete(w.Context(), w.NodeClaim("never")))
	_, err := w.CloudProvider.Get(w.Context(), w.Placeholder(nodeClaim.UID))
	uncertain(t, err)
	_, err = w.CloudProvider.Get(w.Context(), "sim:///never-seen")
	uncertain(t, err)
	list, err := w.CloudProvider.List(w.Context())
	uncertain(t, err)
	assert.Empty(t, list)
}

// Core asks about a Node that is not Ready before it evicts its pods: an error would keep them on a
// dead Node for as long as the hub is away. Their instance stays until Delete reaches the agent.
func TestANodeOnAKnownMachineIsDrainedWhileTheAgentIsAway(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	w.Agent.Join(w.Cluster, machine.GetName(), "")
	w.Eventually(func() bool { return len(w.Claims.WithProviderID("sim:///1")) == 1 }, "the mirror has it")
	w.Disconnect()
	live, err := w.CloudProvider.Get(w.Context(), "sim:///1")
	require.NoError(t, err)
	assert.Equal(t, "sim:///1", live.Status.ProviderID)
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
}

func TestDrainedIsWhatCoreDid(t *testing.T) {
	for name, c := range map[string]struct {
		conditions func(*karpv1.NodeClaim)
		want       bool
	}{
		"never registered":       {func(*karpv1.NodeClaim) {}, false},
		"draining":               {func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetUnknown(karpv1.ConditionTypeDrained) }, false},
		"drained, volumes there": {func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetTrue(karpv1.ConditionTypeDrained) }, false},
		"drained and detached": {func(nc *karpv1.NodeClaim) {
			nc.StatusConditions().SetTrue(karpv1.ConditionTypeDrained)
			nc.StatusConditions().SetTrue(karpv1.ConditionTypeVolumesDetached)
		}, true},
		"grace period over": {func(nc *karpv1.NodeClaim) {
			nc.StatusConditions().SetTrue(karpv1.ConditionTypeDrained)
			nc.StatusConditions().SetFalse(karpv1.ConditionTypeVolumesDetached, "TerminationGracePeriodElapsed", "")
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, oneGroup())
			nodeClaim := w.Launched("claim", c.conditions)
			_ = w.CloudProvider.Delete(w.Context(), nodeClaim)
			sent, _ := w.Agent.Requests("ReleaseClaim")[0].(*agentv1alpha1.ReleaseClaimRequest)
			assert.Equal(t, c.want, sent.GetDrained())
			assert.Contains(t, sent.GetReason(), "claim")
		})
	}
}

func TestGetTakesPlaceholderAndRealProviderID(t *testing.T) {
	w := shimtest.New(t, oneGroup(), slowTermination())
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, "sim:///1")
	for _, id := range []string{w.Placeholder(nodeClaim.UID), "sim:///1"} {
		got, err := w.CloudProvider.Get(w.Context(), id)
		require.NoError(t, err)
		assert.Equal(t, id, got.Status.ProviderID)
		assert.Equal(t, nodeClaim.UID, got.UID)
		assert.Equal(t, "claim", got.Name)
	}
	_, err := w.CloudProvider.Get(w.Context(), "capi-claim://default/other/"+string(nodeClaim.UID))
	notFound(t, err)
	_, err = w.CloudProvider.Get(w.Context(), "sim:///unheard-of")
	notFound(t, err)
	_, err = w.CloudProvider.Get(w.Context(), w.Placeholder("never"))
	notFound(t, err)
	_, err = w.CloudProvider.Get(w.Context(), "")
	uncertain(t, err)
}

func TestGetOfAnEndedClaimIsNotFound(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	w.Agent.Join(w.Cluster, machine.GetName(), "")
	_ = w.CloudProvider.Delete(w.Context(), nodeClaim)
	w.Eventually(func() bool {
		claim, _ := w.Claims.Get(string(nodeClaim.UID))
		return claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	}, "the mirror shows it")
	for _, id := range []string{w.Placeholder(nodeClaim.UID), "sim:///1"} {
		_, err := w.CloudProvider.Get(w.Context(), id)
		notFound(t, err)
	}
}

func TestGetFindsTheLiveClaimOnAProviderIDThatWasGivenOutAgain(t *testing.T) {
	for name, mirrored := range map[string]agentv1alpha1.ClaimPhase{
		"the mirror knows only the ended claim":      agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED,
		"the mirror has not heard of the end either": agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, oneGroup())
			before := w.Launched("before")
			w.Provision(before, "sim:///1")
			notFound(t, w.CloudProvider.Delete(w.Context(), before))
			after := w.Launched("after")
			w.Provision(after, "sim:///1")
			w.CloudProvider.Claims = behind{disconnected{w.Claims}, &agentv1alpha1.Claim{
				ClaimId: string(before.UID), Phase: mirrored, Machine: &agentv1alpha1.Machine{ProviderId: "sim:///1"},
			}}

			got, err := w.CloudProvider.Get(w.Context(), "sim:///1")
			require.NoError(t, err, "its Node must be drained")
			assert.Equal(t, after.UID, got.UID)

			w.Agent.Forget(w.Cluster, string(before.UID))
			got, err = w.CloudProvider.Get(w.Context(), "sim:///1")
			require.NoError(t, err)
			assert.Equal(t, after.UID, got.UID)

			w.Agent.Fail("ListClaims", 1, agenterrors.NotSynced("later"))
			_, err = w.CloudProvider.Get(w.Context(), "sim:///1")
			uncertain(t, err)
		})
	}
}

// Losing a zone may affect hundreds of Nodes at once.
func TestGetsOfManyLostNodesShareTheLists(t *testing.T) {
	const lost = 200
	w := shimtest.New(t, oneGroup())
	var gets errgroup.Group
	for n := range lost {
		gets.Go(func() error {
			_, err := w.CloudProvider.Get(w.Context(), fmt.Sprintf("sim:///lost-%d", n))
			if !corecloudprovider.IsNodeClaimNotFoundError(err) {
				return fmt.Errorf("want not found, got %w", err)
			}
			return nil
		})
	}
	require.NoError(t, gets.Wait())
	assert.Less(t, w.Agent.Calls("ListClaims"), lost/4)

	before := w.Agent.Calls("ListClaims")
	for range 2 {
		_, err := w.CloudProvider.Get(w.Context(), "sim:///lost")
		notFound(t, err)
	}
	assert.Equal(t, before+2, w.Agent.Calls("ListClaims"), "a list from before says nothing of now")
}

// behind is a mirror that lists one claim, whatever the agent has by now.
type behind struct {
	cloudprovider.Claims
	claim *agentv1alpha1.Claim
}

func (b behind) WithProviderID(string) []*agentv1alpha1.Claim { return []*agentv1alpha1.Claim{b.claim} }

func (b behind) Get(string) (*agentv1alpha1.Claim, bool) { return b.claim, b.claim != nil }

// disconnected is a mirror whose stream has ended.
type disconnected struct{ cloudprovider.Claims }

func (disconnected) State() agentclient.State { return agentclient.State{Synced: true} }

// Core asks about each draining Node that is not Ready once a second, and drops the Node at once
// when its machine is not found.
func TestGetAsksTheAgentUnlessTheMirrorIsCertain(t *testing.T) {
	const live = true
	type phase = agentv1alpha1.ClaimPhase
	for name, c := range map[string]struct {
		// mirrored is the phase that the mirror shows. Unspecified stands for no claim.
		mirrored phase
		// released has the agent end the claim first.
		released, disconnected bool
		want, asks             bool
	}{
		"pending":                          {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, want: live},
		"bound":                            {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, want: live},
		"releasing":                        {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, want: live},
		"ended, and it has":                {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, released: true, asks: true},
		"ended, which is not so":           {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, want: live, asks: true},
		"not known, but the agent has it":  {want: live, asks: true},
		"not known, and it has ended":      {released: true, asks: true},
		"bound, but nothing is heard":      {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, disconnected: true, want: live, asks: true},
		"bound until nothing was heard":    {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, disconnected: true, released: true, asks: true},
		"releasing, but nothing is heard":  {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, disconnected: true, want: live, asks: true},
		"releasing until nothing is heard": {mirrored: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, disconnected: true, released: true, asks: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, oneGroup())
			nodeClaim := w.Launched("claim")
			w.Provision(nodeClaim, "sim:///1")
			if c.released {
				notFound(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
			}
			mirror := behind{Claims: w.Claims}
			if c.disconnected {
				mirror.Claims = disconnected{w.Claims}
			}
			if c.mirrored != agentv1alpha1.ClaimPhase_CLAIM_PHASE_UNSPECIFIED {
				mirror.claim = &agentv1alpha1.Claim{
					ClaimId: string(nodeClaim.UID), DisplayName: nodeClaim.Name, Phase: c.mirrored, Machine: &agentv1alpha1.Machine{ProviderId: "sim:///1"},
				}
			}
			w.CloudProvider.Claims = mirror
			calls := func() int { return w.Agent.Calls("GetClaim") + w.Agent.Calls("ListClaims") }
			for _, id := range []string{w.Placeholder(nodeClaim.UID), "sim:///1"} {
				before := calls()
				const times = 10
				for range times {
					got, err := w.CloudProvider.Get(w.Context(), id)
					if !c.want {
						notFound(t, err)
						continue
					}
					require.NoError(t, err)
					assert.Equal(t, nodeClaim.UID, got.UID)
					assert.Equal(t, id, got.Status.ProviderID)
				}
				if c.asks {
					assert.GreaterOrEqual(t, calls()-before, times, "%s is concluded from the mirror", id)
				} else {
					assert.Equal(t, before, calls(), "%s is asked for in vain", id)
				}
			}
		})
	}
}

func TestNothingIsConcludedFromAMissingCluster(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, "sim:///1")
	w.CloudProvider.Claims = disconnected{w.Claims} // else it does not ask
	for _, id := range []string{w.Placeholder(nodeClaim.UID), "sim:///1"} {
		w.Agent.Fail("GetClaim", 1, agenterrors.ClusterNotFound(w.Cluster))
		_, err := w.CloudProvider.Get(w.Context(), id)
		uncertain(t, err)
		assert.ErrorContains(t, err, "cluster", "the failure was the one meant")
	}
}

func TestListHasEachMachineUnderBothIDs(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	pending, provisioned, ended := w.Launched("pending"), w.Launched("provisioned"), w.Launched("ended")
	w.Provision(provisioned, "sim:///1")
	_ = w.CloudProvider.Delete(w.Context(), ended)
	list, err := w.CloudProvider.List(w.Context())
	require.NoError(t, err)
	assert.ElementsMatch(t, []string{w.Placeholder(pending.UID), w.Placeholder(provisioned.UID), "sim:///1"},
		lo.Map(list, func(nc *karpv1.NodeClaim, _ int) string { return nc.Status.ProviderID }))
	for _, nc := range list {
		assert.Nil(t, nc.DeletionTimestamp)
		assert.False(t, nc.CreationTimestamp.IsZero())
		assert.Equal(t, "default/a", nc.Annotations[v1alpha1.NodeGroupAnnotation])
	}
}

func TestListShowsWhatIsBeingReleased(t *testing.T) {
	w := shimtest.New(t, oneGroup(), slowTermination())
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	w.Agent.Join(w.Cluster, machine.GetName(), "")
	require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	list, err := w.CloudProvider.List(w.Context())
	require.NoError(t, err)
	require.Len(t, list, 2)
	for _, nc := range list {
		assert.NotNil(t, nc.DeletionTimestamp)
	}
}

// Once the Node is not Ready, core removes a NodeClaim that is listed like this: see its garbage
// collection.
func TestListShowsAMachineWhoseInfrastructureIsGoneAsOnItsWayOut(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, "sim:///1")
	goes := func() bool {
		t.Helper()
		listed, err := w.CloudProvider.List(w.Context())
		require.NoError(t, err)
		require.Len(t, listed, 2)
		return !listed[1].DeletionTimestamp.IsZero()
	}
	assert.False(t, goes())
	for reason, gone := range map[string]bool{"NotReady": false, "ObjectDoesNotExist": false, "ObjectDeleted": true} {
		w.Agent.FailMachine(w.Cluster, machine.GetName(), reason, "the SimMachine is not there")
		assert.Equal(t, gone, goes(), "%s: an object that was never seen may be about to be restored", reason)
	}
}

func TestListLeavesOtherHoldersAlone(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	_, err := w.Agent.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: w.Cluster, ClaimId: "mine", Holder: "somebody", Candidates: []string{"default/a"},
	})
	require.NoError(t, err)
	list, err := w.CloudProvider.List(w.Context())
	require.NoError(t, err)
	assert.Empty(t, list)
}

func TestIsDriftedWhenTheNodeClassNoLongerSelectsTheGroup(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "a", Labels: map[string]string{"team": "red"}}, {Name: "b", Labels: map[string]string{"team": "blue"}},
	})
	nodeClaim := w.NodeClaim("claim", requiring("node.kubernetes.io/instance-type", "a"))
	created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	nodeClaim.Annotations = created.Annotations
	reason, err := w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Empty(t, reason)

	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	for selector, want := range map[string]corecloudprovider.DriftReason{
		"red": "", "blue": cloudprovider.DriftNodeGroupNotSelected,
		"typo": "", // selects nothing, which cannot be intended
	} {
		w.Get(nodeClass)
		nodeClass.Spec.ScalableResourceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": selector}}
		require.NoError(t, w.Kube.Update(w.Context(), nodeClass))
		w.Catalogue.Refresh()
		w.Eventually(func() bool {
			reason, err := w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
			return err == nil && reason == want
		}, "selector %s", selector)
	}
}

func TestIsDriftedWhenTheTemplateChangedAndClusterAPIKeepsTheMachine(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "rolling", RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ROLLING_UPDATE},
		{Name: "ondelete", RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE},
	})
	for group, want := range map[string]corecloudprovider.DriftReason{"rolling": "", "ondelete": cloudprovider.DriftMachineNotUpToDate} {
		nodeClaim := w.NodeClaim("claim-" + group)
		nodeClaim.Annotations = map[string]string{v1alpha1.NodeGroupAnnotation: "default/" + group}
		provider := *w.CloudProvider
		provider.Claims = stale{w.Claims, &agentv1alpha1.Claim{
			ClaimId: string(nodeClaim.UID), NodeGroupId: "default/" + group, Machine: &agentv1alpha1.Machine{Name: "m", UpToDate: false},
		}}
		reason, err := provider.IsDrifted(w.Context(), nodeClaim)
		require.NoError(t, err)
		assert.Equal(t, want, reason, group)
		assert.Regexp(t, `^[A-Za-z]*$`, reason)
	}
}

func TestWhatTheDriftPolicyIgnoresIsNoDrift(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "a", RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE}, {Name: "b", Labels: map[string]string{"team": "red"}},
	})
	nodeClaim := w.NodeClaim("claim")
	provider := *w.CloudProvider
	provider.Claims = stale{w.Claims, &agentv1alpha1.Claim{
		ClaimId: string(nodeClaim.UID), NodeGroupId: "default/a", Machine: &agentv1alpha1.Machine{Name: "m", UpToDate: false},
	}}
	onlyRed := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
	for _, step := range []struct {
		selector *metav1.LabelSelector
		policy   v1alpha1.DriftPolicy
		want     corecloudprovider.DriftReason
	}{
		{onlyRed, v1alpha1.DriftPolicy{}, cloudprovider.DriftNodeGroupNotSelected},
		{onlyRed, v1alpha1.DriftPolicy{NodeGroupNotSelected: v1alpha1.DriftIgnore}, cloudprovider.DriftMachineNotUpToDate},
		{onlyRed, v1alpha1.DriftPolicy{NodeGroupNotSelected: v1alpha1.DriftIgnore, MachineNotUpToDate: v1alpha1.DriftIgnore}, ""},
		{
			nil,
			v1alpha1.DriftPolicy{NodeGroupNotSelected: v1alpha1.DriftReplace, MachineNotUpToDate: v1alpha1.DriftReplace},
			cloudprovider.DriftMachineNotUpToDate,
		},
	} {
		nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
		w.Get(nodeClass)
		nodeClass.Spec.ScalableResourceSelector, nodeClass.Spec.Drift = step.selector, step.policy
		require.NoError(t, w.Kube.Update(w.Context(), nodeClass))
		w.Catalogue.Refresh()
		w.Eventually(func() bool {
			reason, err := provider.IsDrifted(w.Context(), nodeClaim)
			return err == nil && reason == step.want
		}, "%+v", step.policy)
	}
}

// stale is a mirror that returns one claim for every id.
type stale struct {
	cloudprovider.Claims
	claim *agentv1alpha1.Claim
}

func (s stale) Get(string) (*agentv1alpha1.Claim, bool) { return s.claim, true }

func TestDriftIsNotDecidedWithoutKnowing(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	w.Disconnect()
	reason, err := w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.NoError(t, err, "the last known good does")
	assert.Empty(t, reason)
	w.CloudProvider.Claims = w.Client.MirrorClaims(w.Cluster, v1alpha1.Holder) // never synced
	_, err = w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.Error(t, err)
	foreign := w.NodeClaim("foreign", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Kind = "EC2NodeClass" })
	reason, err = w.CloudProvider.IsDrifted(w.Context(), foreign)
	require.NoError(t, err)
	assert.Empty(t, reason)
}

func TestGetInstanceTypesOfNodePoolsThatAreNotOurs(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	foreign := &karpv1.NodePool{}
	for _, pool := range []*karpv1.NodePool{nil, foreign} {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), pool)
		require.NoError(t, err)
		assert.Empty(t, types)
	}
	foreign.Spec.Template.Spec.NodeClassRef = &karpv1.NodeClassReference{Group: "karpenter.k8s.aws", Kind: "EC2NodeClass", Name: "default"}
	types, err := w.CloudProvider.GetInstanceTypes(w.Context(), foreign)
	require.NoError(t, err)
	assert.Empty(t, types)
	foreign.Spec.Template.Spec.NodeClassRef = &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: "missing"}
	_, err = w.CloudProvider.GetInstanceTypes(w.Context(), foreign)
	require.ErrorContains(t, err, "missing")

	w.AddNodeClass("typo", &metav1.LabelSelector{MatchLabels: map[string]string{"team": "rde"}})
	foreign.Spec.Template.Spec.NodeClassRef.Name = "typo"
	_, err = w.CloudProvider.GetInstanceTypes(w.Context(), foreign)
	assert.ErrorContains(t, err, "selects no node group", "an empty answer would make core take nodes for drifted")
}

func TestRepairPoliciesAreWhatCoreAccepts(t *testing.T) {
	w := shimtest.New(t, nil)
	ctx := coreoptions.ToContext(context.Background(), &coreoptions.Options{FeatureGates: coreoptions.FeatureGates{NodeRepair: true}})
	matcher, err := health.NewRepairPolicyMatcher(ctx, w.CloudProvider)
	require.NoError(t, err)
	assert.NotNil(t, matcher)
	for _, policy := range w.CloudProvider.RepairPolicies() {
		assert.Equal(t, 20*time.Minute, policy.TolerationDuration, "as it is set")
	}
}

func TestTheRest(t *testing.T) {
	w := shimtest.New(t, nil)
	assert.Equal(t, "clusterapi", w.CloudProvider.Name())
	assert.True(t, corecloudprovider.IsNodeRebootNotImplementedError(w.CloudProvider.Reboot(w.Context(), w.NodeClaim("x"), "op")))
	first, second := w.CloudProvider.GetSupportedNodeClasses(), w.CloudProvider.GetSupportedNodeClasses()
	require.Len(t, first, 1)
	assert.NotSame(t, first[0], second[0], "core reads into it")
}
