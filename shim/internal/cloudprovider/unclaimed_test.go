package cloudprovider_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

type environment struct {
	*shimtest.Env
	clock *clocktesting.FakeClock
}

// leftBehind returns an environment with a NodeClaim that another provider left behind, and its
// Machine.
func leftBehind(t *testing.T) (*environment, *karpv1.NodeClaim, *agentv1alpha1.Machine) {
	t.Helper()
	w := &environment{clock: clocktesting.NewFakeClock(time.Now())}
	w.Env = shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Replicas: 1}}, shimtest.WithClock(w.clock),
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

// The claim must have the Machine before it is released, which takes a moment in a real hub.
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

// showing is a mirror that has one claim.
type showing struct {
	cloudprovider.Claims
	claim *agentv1alpha1.Claim
}

func (s showing) Get(string) (*agentv1alpha1.Claim, bool) { return s.claim, true }

// A claim that is released before it has the Machine would leave the Machine to the user.
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

func TestDeleteSaysWhatTheClaimThatAdoptsWaitsFor(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	config := w.CloudProvider.Config
	config.Claims = showing{w.Claims, &agentv1alpha1.Claim{
		Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, AdoptMachine: machine.GetName(), NodeGroupId: machine.GetNodeGroupId(),
		CreatedAt: timestamppb.New(w.clock.Now()), Message: "the MachineDeployment is paused",
	}}
	provider := cloudprovider.New(config)
	w.clock.Step(time.Minute)
	require.NoError(t, provider.Delete(w.Context(), nodeClaim))
	assert.Empty(t, w.Recorder.Reasons(), "that takes a moment")
	w.clock.Step(5 * time.Minute)
	require.NoError(t, provider.Delete(w.Context(), nodeClaim))
	require.Equal(t, []string{"AdoptionPending"}, w.Recorder.Reasons())
	for _, part := range []string{machine.GetName(), "the MachineDeployment is paused"} {
		assert.Contains(t, w.Recorder.Messages()[0], part)
	}
}

func TestAMachineWithoutAClaimThatDoesNotGoSaysWhyOnItsNodeClaim(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	w.Agent.HoldDeletion(w.Cluster, machine.GetName(), "WaitingForInfrastructureDeletion", "volume vol-7 is in use")
	w.clock.Step(time.Minute)
	require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	assert.Empty(t, w.Recorder.Reasons(), "that takes a while")
	w.clock.Step(5 * time.Minute)
	require.NoError(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	require.Equal(t, []string{"MachineDeletionStuck"}, w.Recorder.Reasons())
	for _, part := range []string{machine.GetName(), "WaitingForInfrastructureDeletion", "vol-7 is in use"} {
		assert.Contains(t, w.Recorder.Messages()[0], part)
	}
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

// This is how karpenter-provider-cluster-api leaves a NodeClaim: a Machine is chosen, but has no
// provider ID yet.
func TestCreateTakesOverTheMachineThatAnotherProviderChose(t *testing.T) {
	w, left, machine := leftBehind(t)
	require.NoError(t, w.Kube.Delete(w.Context(), left))
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

// Hundreds of Machines are adopted at once, and the calls queue.
func TestAnAdoptionMayTakeLongerThanAnotherCall(t *testing.T) {
	w, left, machine := leftBehind(t)
	require.NoError(t, w.Kube.Delete(w.Context(), left))
	w.CloudProvider.Timeout = 3 * time.Second
	w.Agent.Delay("CreateClaim", 5*time.Second)
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("another"))
	assertCreateError(t, err, cloudprovider.ReasonAgentUnreachable)
	begun := w.NodeClaim("begun", func(nc *karpv1.NodeClaim) {
		nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: "default/" + machine.GetName()}
	})
	_, err = w.CloudProvider.Create(w.Context(), begun)
	require.NoError(t, err)
	assert.Equal(t, machine.GetName(), w.Agent.Claim(w.Cluster, string(begun.UID)).GetAdoptMachine())
}

func TestDeleteGivesAnAdoptionItsTime(t *testing.T) {
	w, left, machine := leftBehind(t)
	w.CloudProvider.Timeout = 3 * time.Second
	w.Agent.Delay("CreateClaim", 5*time.Second)
	require.NoError(t, w.CloudProvider.Delete(w.Context(), left))
	assert.Equal(t, machine.GetName(), w.Agent.Claim(w.Cluster, string(left.UID)).GetAdoptMachine())
}

// Another provider may have chosen a Machine twice.
func TestCreateLeavesTheMachineOfAnotherNodeClaimToIt(t *testing.T) {
	w, left, machine := leftBehind(t)
	begun := w.NodeClaim("begun", func(nc *karpv1.NodeClaim) {
		nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: "default/" + machine.GetName()}
	})
	_, err := w.CloudProvider.Create(w.Context(), begun)
	require.NoError(t, err)
	claim := w.Agent.Claim(w.Cluster, string(begun.UID))
	assert.Empty(t, claim.GetAdoptMachine())
	assert.NotEqual(t, machine.GetName(), claim.GetMachine().GetName())
	assert.Empty(t, w.Agent.Machine(w.Cluster, machine.GetName()).GetClaimId(), "%s adopts it", left.Name)

	ours := w.NodeClaim("ours", func(nc *karpv1.NodeClaim) {
		nc.Annotations = map[string]string{v1alpha1.AdoptMachineAnnotation: machine.GetName()}
	})
	_, err = w.CloudProvider.Create(w.Context(), ours)
	assert.True(t, corecloudprovider.IsInsufficientCapacityError(err), "%v", err)
	assert.Nil(t, w.Agent.Claim(w.Cluster, string(ours.UID)))
}

// The NodeClaim must not be lost to its timeouts, nor the Machine with the NodeClaim, and no other
// NodeClaim may wait for it.
func TestCreateOfANodeClaimWhoseChosenMachineCannotBeAdoptedLeavesItOnTheMachine(t *testing.T) {
	w, left, machine := leftBehind(t)
	require.NoError(t, w.Kube.Delete(w.Context(), left))
	w.Agent.Block(machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "the MachineDeployment is paused", time.Time{})
	created, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("begun", func(nc *karpv1.NodeClaim) {
		nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: "default/" + machine.GetName()}
	}))
	require.NoError(t, err)
	assert.Equal(t, machine.GetProviderId(), created.Status.ProviderID)
	assert.Empty(t, created.Annotations, "it is not adopted")
	assert.Equal(t, []string{"MachineWithoutClaim"}, w.Recorder.Reasons())
	assert.EqualValues(t, 1, w.Agent.NodeGroup(machine.GetNodeGroupId()).GetReplicas())
}

func TestDeleteOfADuplicateLeavesTheMachineToItsNodeClaim(t *testing.T) {
	w, _, machine := leftBehind(t)
	duplicate := w.NodeClaim("duplicate", func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = machine.GetProviderId()
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	w.Create(duplicate)
	notFound(t, w.CloudProvider.Delete(w.Context(), duplicate))
	assert.Empty(t, w.Agent.Claim(w.Cluster, string(duplicate.UID)).GetNodeGroupId(), "it never had a machine")
	assert.Empty(t, w.Agent.Machine(w.Cluster, machine.GetName()).GetClaimId())
	assert.Nil(t, w.Agent.Machine(w.Cluster, machine.GetName()).GetDeletedAt())
}

// Its id can be used again once the agent has dropped the tombstone. Until then the user gets an
// event.
func TestAnAdoptionThatTheLedgerRefusedIsNotTakenForARelease(t *testing.T) {
	for _, reason := range []string{"Refused", "NoRoom"} {
		t.Run(reason, func(t *testing.T) {
			w, nodeClaim, machine := leftBehind(t)
			refused := &agentv1alpha1.Claim{
				Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, Reason: reason, AdoptMachine: machine.GetName(), NodeGroupId: machine.GetNodeGroupId(),
			}
			finder := unclaimed.New(w.clock, w.Kube, w.Client, showing{w.Claims, refused}, w.Cluster, shimtest.Timeout)
			found, err := finder.Of(w.Context(), nodeClaim)
			require.NoError(t, err)
			assert.Equal(t, machine.GetName(), found.GetName())

			refused.Machine = machine
			found, err = finder.Of(w.Context(), nodeClaim)
			require.NoError(t, err)
			assert.Nil(t, found, "it had the Machine")
		})
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
	w, nodeClaim, _ := leftBehind(t)
	nodeClaim.Status.ProviderID = w.Placeholder(nodeClaim.UID)
	notFound(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	assert.Empty(t, w.Recorder.Reasons())
}

// The agent only reports Machines of opted-in MachineDeployments of one namespace. Others may be
// running as well.
func TestNothingIsConcludedAboutAMachineThatTheAgentDoesNotShow(t *testing.T) {
	w, _, _ := leftBehind(t)
	elsewhere := w.NodeClaim("elsewhere", shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = "aws:///us-west-2a/i-0123"
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	w.Create(elsewhere)
	ids := func() []string {
		listed, err := w.CloudProvider.List(w.Context())
		require.NoError(t, err)
		return lo.Map(listed, func(nc *karpv1.NodeClaim, _ int) string { return nc.Status.ProviderID })
	}
	assert.NotContains(t, ids(), elsewhere.Status.ProviderID, "without a Node, core ends it: it is no capacity")
	w.Node(elsewhere)
	assert.Contains(t, ids(), elsewhere.Status.ProviderID)
	_, err := w.CloudProvider.Get(w.Context(), elsewhere.Status.ProviderID)
	uncertain(t, err)
	uncertain(t, w.CloudProvider.Delete(w.Context(), elsewhere))
	assert.Nil(t, w.Agent.Claim(w.Cluster, string(elsewhere.UID)), "or it could not be adopted any more")
	require.Equal(t, []string{"MachineUnknown"}, w.Recorder.Reasons())
	for _, what := range []string{
		elsewhere.Status.ProviderID, "node.cluster.x-k8s.io/karpenter-member", "another namespace",
		"kubectl annotate nodeclaim elsewhere karpenter.cluster.x-k8s.io/return-machine=true",
	} {
		assert.Contains(t, w.Recorder.Messages()[0], what)
	}

	elsewhere.Annotations = map[string]string{v1alpha1.ReturnMachineAnnotation: "true"}
	w.Update(elsewhere)
	_, err = w.CloudProvider.Get(w.Context(), elsewhere.Status.ProviderID)
	notFound(t, err)
	notFound(t, w.CloudProvider.Delete(w.Context(), elsewhere))
}

// Such as after a restore of the hub, or a migration whose MachineDeployments have not been
// labelled yet. Core collects no NodeClaim while List fails.
func TestListMakesNoCallForEachUnknownMachine(t *testing.T) {
	const unknown, groups, machinesOfEach, delay = 300, 3, 10, 50 * time.Millisecond
	w, _, _ := leftBehind(t)
	add := func(name, providerID string) *karpv1.NodeClaim {
		nodeClaim := w.NodeClaim(name, shimtest.Registered, func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = providerID })
		w.Create(nodeClaim)
		return nodeClaim
	}
	var running []string
	for n := range unknown {
		nodeClaim := add(fmt.Sprint("unknown-", n), fmt.Sprint("aws:///us-west-2a/i-", n))
		if n%10 == 0 {
			w.Node(nodeClaim)
			running = append(running, nodeClaim.Status.ProviderID)
		}
	}
	// These Machines were shown, and their node groups still are.
	for n := range groups {
		w.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: fmt.Sprint("b-", n), Replicas: machinesOfEach})
	}
	shown, err := w.Unclaimed.Machines(w.Context())
	require.NoError(t, err)
	shown = lo.Reject(shown, func(m *agentv1alpha1.Machine, _ int) bool { return m.GetNodeGroupId() == "default/a" })
	require.Len(t, shown, groups*machinesOfEach)
	for _, machine := range shown {
		w.Node(add("of-"+machine.GetName(), machine.GetProviderId()))
		w.Agent.LoseMachine(w.Cluster, machine.GetName())
	}
	w.clock.Step(time.Minute)

	methods := []string{"ListClaims", "GetClaim", "ListMachines", "GetNodeGroup"}
	for _, method := range methods {
		w.Agent.Delay(method, delay)
	}
	calls := func() int { return lo.SumBy(methods, w.Agent.Calls) }
	before := calls()
	listed, err := w.CloudProvider.List(w.Context())
	require.NoError(t, err)
	ids := lo.Map(listed, func(nc *karpv1.NodeClaim, _ int) string { return nc.Status.ProviderID })
	assert.ElementsMatch(t, running, lo.Filter(ids, func(id string, _ int) bool { return strings.HasPrefix(id, "aws:") }))
	for _, machine := range shown {
		assert.NotContains(t, ids, machine.GetProviderId(), "it is gone")
	}
	assert.Equal(t, 2+groups, calls()-before, "the claims, the Machines, and each node group once")
}

// Otherwise core would not collect its NodeClaim.
func TestListLacksANodeWhoseClaimHasEnded(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClaim := w.Launched("claim")
	nodeClaim.Status.ProviderID = w.Provision(nodeClaim, "sim:///1").GetProviderId()
	require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClaim))
	w.Node(nodeClaim)
	notFound(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	w.Eventually(func() bool {
		claim, _ := w.Claims.Get(string(nodeClaim.UID))
		return claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	}, "the mirror shows the end")
	listed, err := w.CloudProvider.List(w.Context())
	require.NoError(t, err)
	assert.Empty(t, listed)
}

func TestAMachineThatTheAgentShowedIsGoneUnlessItsNodeGroupIsToo(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	_, err := w.CloudProvider.Get(w.Context(), machine.GetProviderId())
	require.NoError(t, err)
	w.Agent.RemoveNodeGroup(machine.GetNodeGroupId()) // as when its MachineDeployment loses the label
	w.clock.Step(time.Minute)
	uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	w.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "a"})
	notFound(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
}

// A hub that is restored from a backup has neither the Machine nor the claim of a Node that is
// newer. The Node runs on.
func TestANodeWhoseClaimTheHubHasLostIsUnknown(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	node := w.Node(nodeClaim)
	_, err := w.Unclaimed.All(w.Context()) // the shim has seen the Machine
	require.NoError(t, err)
	nodeClaim.Status.NodeName = node.Name
	require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClaim))
	nodeClaim.Annotations = map[string]string{v1alpha1.NodeGroupAnnotation: machine.GetNodeGroupId()} // as Create sets it
	w.Update(nodeClaim)
	w.Agent.LoseMachine(w.Cluster, machine.GetName())
	w.clock.Step(time.Minute)
	_, err = w.CloudProvider.Get(w.Context(), machine.GetProviderId())
	uncertain(t, err)
	listed, err := w.CloudProvider.List(w.Context())
	require.NoError(t, err)
	assert.True(t, lo.ContainsBy(listed, func(nc *karpv1.NodeClaim) bool { return nc.Status.ProviderID == machine.GetProviderId() }))
	_, err = w.Unclaimed.Of(w.Context(), nodeClaim)
	require.ErrorIs(t, err, unclaimed.ErrUnknownMachine)

	deleted := nodeClaim.DeepCopy()
	deleted.DeletionTimestamp = new(metav1.Now())
	uncertain(t, w.CloudProvider.Delete(w.Context(), deleted))
	node.Status.Conditions[0].Status = corev1.ConditionUnknown // a person deleted the claim while the machine terminated
	require.NoError(t, w.Kube.Status().Update(w.Context(), node))
	notFound(t, w.CloudProvider.Delete(w.Context(), deleted))
}

// adopting adopts a NodeClaim's machine right before the machines are listed.
type adopting struct {
	agentv1alpha1.MachineServiceClient

	adopt func()
}

func (a adopting) ListMachines(
	ctx context.Context, request *agentv1alpha1.ListMachinesRequest, options ...grpc.CallOption,
) (*agentv1alpha1.ListMachinesResponse, error) {
	a.adopt()
	return a.MachineServiceClient.ListMachines(ctx, request, options...)
}

func TestOnlyMachinesOfNodeClaimsAreRemembered(t *testing.T) {
	w, nodeClaim, _ := leftBehind(t)
	var lost []string
	for range 5 { // the node group replaces it each time
		machines, err := w.Unclaimed.All(w.Context())
		require.NoError(t, err)
		require.Len(t, machines, 1)
		lost = append(lost, machines[0].GetProviderId())
		w.Agent.LoseMachine(w.Cluster, machines[0].GetName())
		w.clock.Step(time.Minute)
	}
	machines, err := w.Unclaimed.All(w.Context())
	require.NoError(t, err)
	require.NotContains(t, lost, machines[0].GetProviderId())

	of := func(providerID string) error {
		asked := nodeClaim.DeepCopy()
		asked.Status.ProviderID = providerID
		machine, err := w.Unclaimed.Of(w.Context(), asked)
		require.Nil(t, machine)
		return err
	}
	require.Equal(t, nodeClaim.Status.ProviderID, lost[0])
	require.NoError(t, of(lost[0]), "it is gone, and the NodeClaim can end")
	require.ErrorIs(t, of(lost[1]), unclaimed.ErrUnknownMachine, "no NodeClaim had it")
}

func TestAMachineThatIsAdoptedMeanwhileIsNotMissed(t *testing.T) {
	for name, isThere := range map[string]func(*environment, *cloudprovider.CloudProvider, string) bool{
		"by List": func(w *environment, provider *cloudprovider.CloudProvider, id string) bool {
			listed, err := provider.List(w.Context())
			require.NoError(t, err)
			return lo.ContainsBy(listed, func(nc *karpv1.NodeClaim) bool { return nc.Status.ProviderID == id })
		},
		"by Get": func(w *environment, provider *cloudprovider.CloudProvider, id string) bool {
			_, err := provider.Get(w.Context(), id)
			return err == nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, nodeClaim, machine := leftBehind(t)
			client := *w.Client
			client.Machines = adopting{w.Client.Machines, func() {
				_, err := w.CloudProvider.Adopt(w.Context(), nodeClaim, machine)
				assert.NoError(t, err)
			}}
			config := w.CloudProvider.Config
			config.Claims = showing{w.Claims, nil}
			config.Unclaimed = unclaimed.New(w.clock, w.Kube, &client, w.Claims, w.Cluster, shimtest.Timeout)
			assert.True(t, isThere(w, cloudprovider.New(config), machine.GetProviderId()))
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

// Core drops a Node that Get does not find without draining it, and collects the NodeClaims of
// Nodes that List lacks.
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

// Core calls for each NodeClaim every few seconds.
func TestManyQuestionsAboutUnclaimedMachinesAreOneCall(t *testing.T) {
	w, nodeClaim, machine := leftBehind(t)
	w.Agent.Block(machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "paused", time.Time{})
	before := w.Agent.Calls("ListMachines")
	for range 20 {
		uncertain(t, w.CloudProvider.Delete(w.Context(), nodeClaim))
	}
	assert.Equal(t, 1, w.Agent.Calls("ListMachines")-before)
}
