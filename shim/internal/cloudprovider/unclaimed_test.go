package cloudprovider_test

import (
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

type world struct {
	*shimtest.World
	clock *clocktesting.FakeClock
}

// leftBehind returns a world with a NodeClaim that another provider left, and the Machine that it runs on.
func leftBehind(t *testing.T) (*world, *karpv1.NodeClaim, *agentv1alpha1.Machine) {
	t.Helper()
	w := &world{clock: clocktesting.NewFakeClock(time.Now())}
	w.World = shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Replicas: 1}}, shimtest.WithClock(w.clock),
		shimtest.WithAgent(fakeagent.WithInfrastructure(fakeagent.Infrastructure{Terminate: fakeagent.Manual})))
	response, err := w.Client.Machines.ListMachines(w.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: w.Cluster})
	require.NoError(t, err)
	require.Len(t, response.GetMachines(), 1)
	machine := response.GetMachines()[0]
	require.NotEmpty(t, machine.GetProviderId())
	nodeClaim := w.NodeClaim("left", shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = machine.GetProviderId()
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	w.Create(nodeClaim)
	return w, nodeClaim, machine
}

// The claim must have the Machine before it is released, which a real hub takes a moment for.
func TestDeleteOfANodeClaimThatNeverHadAClaimTakesItsMachineWithIt(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	w.Eventually(func() bool {
		require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
		return w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
	}, "it is being released")
	claim := w.Agent.Claim(w.Cluster, string(nodeClaim.UID))
	assert.Equal(t, machine.GetName(), claim.GetAdoptMachine())
	assert.NotNil(t, w.Agent.Machine(w.Cluster, machine.GetName()).GetDeletedAt())
	assert.Empty(t, w.Recorder.Reasons())
	w.Agent.Terminate(w.Cluster, machine.GetName())
	w.Eventually(func() bool {
		return corecloudprovider.IsNodeClaimNotFoundError(w.CloudProvider.Delete(w.Context(), nodeClaim))
	}, "it is gone")
}

// showing is a mirror that shows one claim.
type showing struct {
	cloudprovider.Claims
	claim *agentv1alpha1.Claim
}

func (s showing) Get(string) (*agentv1alpha1.Claim, bool) { return s.claim, true }

// Released before it has the Machine, the claim would leave that with the user.
func TestDeleteWaitsUntilTheClaimHasTheMachineThatItAdopts(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	config := w.CloudProvider.Config
	claim := &agentv1alpha1.Claim{
		Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, AdoptMachine: machine.GetName(), NodeGroupId: machine.GetNodeGroupId(),
	}
	config.Claims = showing{w.Claims, claim}
	provider := cloudprovider.New(config)
	require.NoError(t, provider.Delete(w.Context(), nodeClaim))
	assert.Zero(t, w.Agent.Calls("ReleaseClaim"))

	claim.Phase = agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	_, err := w.CloudProvider.Adopt(w.Context(), nodeClaim, machine)
	require.NoError(t, err)
	require.NoError(t, provider.Delete(w.Context(), nodeClaim))
	assert.Equal(t, 1, w.Agent.Calls("ReleaseClaim"))
}

func TestDeleteWaitsWhileTheMachineCannotBeAdopted(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	w.Agent.Block(machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "the MachineDeployment is paused", time.Time{})
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	assert.Nil(t, w.Agent.Claim(w.Cluster, string(nodeClaim.UID)), "or it could not be adopted any more")
	require.Equal(t, []string{"MachineWithoutClaim"}, w.Recorder.Reasons())
	for _, what := range []string{
		machine.GetName(), machine.GetProviderId(), "the MachineDeployment is paused", "kubectl delete machine -n default " + machine.GetName(),
	} {
		assert.Contains(t, w.Recorder.Messages()[0], what)
	}

	w.Agent.LoseMachine(w.Cluster, machine.GetName())
	w.clock.Step(time.Minute)
	notFound(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
}

func TestWhatAnotherShimBuriedWaitsAsWell(t *testing.T) {
	w, nodeClaim, _ := leftBehind(t)
	_, err := w.Client.Claims.ReleaseClaim(w.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: w.Cluster, ClaimId: string(nodeClaim.UID)})
	require.NoError(t, err)
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
}

// As karpenter-provider-cluster-api leaves a NodeClaim: a Machine is chosen, and has no provider ID yet.
func TestCreateTakesOverTheMachineThatAnotherProviderChose(t *testing.T) {
	w, _, machine := leftBehind(t)
	begun := func(name, reference string) *karpv1.NodeClaim {
		return w.NodeClaim(name, func(nc *karpv1.NodeClaim) { nc.Annotations = map[string]string{"cluster.x-k8s.io/machine": reference} })
	}
	nodeClaim := begun("begun", machine.GetCluster().GetNamespace()+"/"+machine.GetName())
	created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, w.Placeholder(nodeClaim.UID), created.Status.ProviderID)
	assert.Equal(t, machine.GetName(), w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetAdoptMachine())
	assert.EqualValues(t, 1, w.Agent.NodeGroup(machine.GetNodeGroupId()).GetReplicas(), "no other machine")
	_, err = w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err, "and once more, as after a lost answer")
	assert.EqualValues(t, 1, w.Agent.NodeGroup(machine.GetNodeGroupId()).GetReplicas())

	for name, reference := range map[string]string{
		"taken": machine.GetCluster().GetNamespace() + "/" + machine.GetName(), "gone": "default/gone",
		"elsewhere": "other/" + machine.GetName(), "odd": "odd",
	} {
		w.clock.Step(time.Minute)
		nodeClaim := begun(name, reference)
		_, err := w.CloudProvider.Create(w.Context(), nodeClaim)
		require.NoError(t, err, name)
		assert.Empty(t, w.Agent.Claim(w.Cluster, string(nodeClaim.UID)).GetAdoptMachine(), "%s: a new machine", name)
	}
}

func TestNothingIsPlannedBeforeNodeClaimsAreAdopted(t *testing.T) {
	w, _, _ := leftBehind(t)
	nodePool := &karpv1.NodePool{}
	nodePool.Spec.Template.Spec.NodeClassRef = shimtest.NodeClassRef()
	w.Unsettled.Store(true)
	_, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
	require.ErrorContains(t, err, "being adopted")
	w.Unsettled.Store(false)
	types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
	require.NoError(t, err)
	assert.NotEmpty(t, types)
}

func TestANodeClaimThatNeverGotAMachineEndsAtOnce(t *testing.T) {
	for name, providerID := range map[string]func(*world, *karpv1.NodeClaim) string{
		"a placeholder": func(w *world, nc *karpv1.NodeClaim) string { return w.Placeholder(nc.UID) },
		"no machine of this Cluster": func(*world, *karpv1.NodeClaim) string {
			return "aws:///us-west-2a/i-0123"
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, nodeClaim, _ := leftBehind(t)
			nodeClaim.Status.ProviderID = providerID(w, nodeClaim)
			notFound(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
			assert.Empty(t, w.Recorder.Reasons())
		})
	}
}

func TestNothingIsConcludedAboutUnclaimedMachinesWhileTheAgentIsAway(t *testing.T) {
	w, nodeClaim, _ := leftBehind(t)
	w.Disconnect()
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	_, err := w.CloudProvider.List(w.Context())
	uncertain(t, err)
	_, err = w.CloudProvider.Get(w.Context(), nodeClaim.Status.ProviderID)
	uncertain(t, err)
}

// Core drops the Node of what Get does not find without a drain, and collects the NodeClaims of Nodes that List lacks.
func TestGetAndListShowMachinesWithoutAClaim(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	got, err := w.CloudProvider.Get(w.Context(), nodeClaim.Status.ProviderID)
	require.NoError(t, err)
	assert.Equal(t, machine.GetProviderId(), got.Status.ProviderID)
	ids := func() []string {
		listed, err := w.CloudProvider.List(w.Context())
		require.NoError(t, err)
		return lo.Map(listed, func(nc *karpv1.NodeClaim, _ int) string { return nc.Status.ProviderID })
	}
	assert.Equal(t, []string{machine.GetProviderId()}, ids())

	w.Agent.LoseMachine(w.Cluster, machine.GetName())
	w.clock.Step(time.Minute)
	assert.NotContains(t, ids(), machine.GetProviderId())
	_, err = w.CloudProvider.Get(w.Context(), nodeClaim.Status.ProviderID)
	notFound(t, err)
}

// Core asks for each NodeClaim every few seconds.
func TestManyQuestionsAboutUnclaimedMachinesAreOneCall(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	w.Agent.Block(machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "paused", time.Time{})
	before := w.Agent.Calls("ListMachines")
	for range 20 {
		uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	}
	assert.Equal(t, 1, w.Agent.Calls("ListMachines")-before)
}
