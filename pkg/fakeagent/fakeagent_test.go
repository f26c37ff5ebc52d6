package fakeagent_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	patience = 10 * time.Second
	workers  = "default/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, options ...fakeagent.Option) *fakeagent.Agent {
	t.Helper()
	agent := fakeagent.New(options...)
	t.Cleanup(agent.Close)
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers", Zone: "zone-a"})
	return agent
}

func fakeClock() *clocktesting.FakeClock {
	return clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
}

func create(t *testing.T, agent *fakeagent.Agent, id string, candidates ...string) error {
	t.Helper()
	if len(candidates) == 0 {
		candidates = []string{workers}
	}
	_, err := agent.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: fakeagent.DefaultCluster(), ClaimId: id, Holder: "karpenter", Candidates: candidates,
	})
	return err
}

// Names are as long as the agent accepts them, not as the pattern of the API's proto files alone
// would.
func TestACandidatesNameThatIsTooLongIsAnInvalidArgument(t *testing.T) {
	agent := start(t)
	namespace := fakeagent.DefaultCluster().GetNamespace()
	err := create(t, agent, "a-claim", workers, namespace+"/"+strings.Repeat("m", 254))
	require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
	require.Equal(t, "candidates[1]", agenterrors.FieldViolations(err)[0].Field)
	require.True(t, agenterrors.IsNotFound(create(t, agent, "a-claim", namespace+"/"+strings.Repeat("m", 253))))
}

func release(t *testing.T, agent *fakeagent.Agent, id string) *agentv1alpha1.Claim {
	t.Helper()
	response, err := agent.Client().Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{
		Cluster: fakeagent.DefaultCluster(), ClaimId: id,
	})
	require.NoError(t, err)
	return response.GetClaim()
}

func claimOf(agent *fakeagent.Agent, id string) *agentv1alpha1.Claim {
	return agent.Claim(fakeagent.DefaultCluster(), id)
}

func eventually(t *testing.T, check func() bool) {
	t.Helper()
	require.Eventually(t, check, patience, time.Millisecond)
}

func TestFailedCallsHaveNoEffect(t *testing.T) {
	agent := start(t)
	agent.Fail("CreateClaim", 2, agenterrors.HubUnreachable("scripted"))
	require.True(t, agenterrors.IsUnavailable(create(t, agent, "a-claim")))
	require.True(t, agenterrors.IsUnavailable(create(t, agent, "a-claim")))
	require.Nil(t, claimOf(agent, "a-claim"))
	require.NoError(t, create(t, agent, "a-claim"))
	require.NotNil(t, claimOf(agent, "a-claim"))
	require.Equal(t, 3, agent.Calls("CreateClaim"))

	agent.Fail("CreateClaim", fakeagent.Always, status.Error(codes.Internal, "scripted"))
	require.Error(t, create(t, agent, "b-claim"))
	agent.Fail("CreateClaim", 0, nil)
	require.NoError(t, create(t, agent, "b-claim"))
}

func TestLostRepliesHaveTheirEffect(t *testing.T) {
	agent := start(t)
	agent.FailAfter("CreateClaim", 1, status.Error(codes.Unavailable, "connection reset"))
	require.True(t, agenterrors.IsUnavailable(create(t, agent, "a-claim")))
	require.NotNil(t, claimOf(agent, "a-claim"))
	require.NoError(t, create(t, agent, "a-claim"))
	require.EqualValues(t, 1, agent.NodeGroup(workers).GetReplicas())
}

func TestFailuresMeetStreamsToo(t *testing.T) {
	agent := start(t)
	agent.Fail("WatchClaims", 1, agenterrors.NotSynced("scripted"))
	stream, err := agent.Client().Claims.WatchClaims(t.Context(), &agentv1alpha1.WatchClaimsRequest{Cluster: fakeagent.DefaultCluster()})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.Equal(t, agenterrors.ReasonNotSynced, agenterrors.ReasonOf(err))
}

func TestDelayedCallsWaitForTheClock(t *testing.T) {
	clock := fakeClock()
	agent := start(t, fakeagent.WithClock(clock))
	agent.Delay("CreateClaim", time.Minute)
	done := make(chan error, 1)
	go func() { done <- create(t, agent, "a-claim") }()
	eventually(t, clock.HasWaiters)
	require.Nil(t, claimOf(agent, "a-claim"))
	clock.Step(time.Minute)
	require.NoError(t, <-done)
	require.NotNil(t, claimOf(agent, "a-claim"))
}

func TestADelayedCallThatIsGivenUpHasNoEffect(t *testing.T) {
	clock := fakeClock()
	agent := start(t, fakeagent.WithClock(clock))
	agent.Delay("CreateClaim", time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := agent.Client().Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: fakeagent.DefaultCluster(), ClaimId: "a-claim", Holder: "karpenter", Candidates: []string{workers},
		})
		done <- err
	}()
	eventually(t, clock.HasWaiters)
	cancel()
	require.Equal(t, codes.Canceled, status.Code(<-done))
	eventually(t, func() bool { return !clock.HasWaiters() })
	require.Nil(t, claimOf(agent, "a-claim"))
}

func TestRequestsAreRemembered(t *testing.T) {
	agent := start(t)
	require.NoError(t, create(t, agent, "a-claim"))
	require.NoError(t, create(t, agent, "b-claim"))
	requests := agent.Requests("CreateClaim")
	require.Len(t, requests, 2)
	last, ok := requests[1].(*agentv1alpha1.CreateClaimRequest)
	require.True(t, ok)
	require.Equal(t, "b-claim", last.GetClaimId())
	require.Empty(t, agent.Requests("ReleaseClaim"))
	require.Zero(t, agent.Calls("ReleaseClaim"))
}

func TestMachinesGetOnByThemselvesWithTheClock(t *testing.T) {
	clock := fakeClock()
	agent := start(t, fakeagent.WithClock(clock), fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Appear: time.Second, Provision: time.Minute, Join: 30 * time.Second, Terminate: 10 * time.Second,
	}))
	require.NoError(t, create(t, agent, "a-claim"))
	phase := func() agentv1alpha1.ClaimPhase { return claimOf(agent, "a-claim").GetPhase() }
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, phase())
	require.EqualValues(t, 1, agent.NodeGroup(workers).GetReplicas())

	clock.Step(time.Second)
	eventually(t, func() bool { return phase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND })
	require.Empty(t, claimOf(agent, "a-claim").GetMachine().GetProviderId())
	clock.Step(time.Minute)
	eventually(t, func() bool { return claimOf(agent, "a-claim").GetMachine().GetProviderId() != "" })
	require.Empty(t, claimOf(agent, "a-claim").GetMachine().GetNodeName())
	clock.Step(30 * time.Second)
	eventually(t, func() bool { return claimOf(agent, "a-claim").GetMachine().GetNodeName() != "" })

	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, release(t, agent, "a-claim").GetPhase())
	require.EqualValues(t, 1, agent.NodeGroup(workers).GetReplicas())
	clock.Step(10 * time.Second)
	eventually(t, func() bool { return phase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED })
	require.Zero(t, agent.NodeGroup(workers).GetReplicas())
}

func TestMachinesGetOnWhenTheTestSaysSo(t *testing.T) {
	cluster := fakeagent.DefaultCluster()
	agent := start(t, fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Appear: fakeagent.Manual, Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual,
	}))
	require.NoError(t, create(t, agent, "a-claim"))
	require.Nil(t, claimOf(agent, "a-claim").GetMachine())

	machine := agent.Provision(cluster, "a-claim", "aws:///zone-a/i-1")
	require.Equal(t, "aws:///zone-a/i-1", machine.GetProviderId())
	require.Equal(t, "zone-a", machine.GetZone())
	machine = agent.Join(cluster, machine.GetName(), "node-1")
	require.Equal(t, "node-1", machine.GetNodeName())
	require.Equal(t, "node-1", claimOf(agent, "a-claim").GetMachine().GetNodeName())

	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, release(t, agent, "a-claim").GetPhase())
	require.NotNil(t, agent.Machine(cluster, machine.GetName()).GetDeletedAt())
	agent.Terminate(cluster, machine.GetName())
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, claimOf(agent, "a-claim").GetPhase())
	require.Nil(t, agent.Machine(cluster, machine.GetName()))
	require.Equal(t, "node-1", claimOf(agent, "a-claim").GetMachine().GetNodeName(), "as last seen")

	agent.Forget(cluster, "a-claim")
	require.Nil(t, claimOf(agent, "a-claim"))
}

func TestWhatABlockedGroupAnswers(t *testing.T) {
	agent := start(t)
	for reason, noRoom := range map[agentv1alpha1.UnavailableReason]bool{
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE:      true,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN:     true,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED:   true,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED: true,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED:           false,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID:          false,
	} {
		agent.Block(workers, reason, "by the test", time.Time{})
		err := create(t, agent, "a-claim")
		require.Equal(t, noRoom, agenterrors.IsNoRoom(err), "%s: %v", reason, err)
		require.Equal(t, reason, agenterrors.Rejections(err)[0].Unavailable)
	}
}

func TestAFailedMachineCoolsItsGroupDown(t *testing.T) {
	clock := fakeClock()
	agent := start(t, fakeagent.WithClock(clock), fakeagent.WithCoolDown(time.Minute))
	require.NoError(t, create(t, agent, "a-claim"))
	machine := claimOf(agent, "a-claim").GetMachine().GetName()
	agent.FailMachine(fakeagent.DefaultCluster(), machine, "InsufficientCapacity", "no more of these in zone-a")
	require.Equal(t, "InsufficientCapacity", claimOf(agent, "a-claim").GetMachine().GetInfrastructureReason())

	agent.GiveUp(fakeagent.DefaultCluster(), "a-claim", "no more of these in zone-a")
	require.NotNil(t, claimOf(agent, "a-claim").GetFailedAt())
	require.Equal(t, agentv1alpha1.FailureClass_FAILURE_CLASS_GIVEN_UP, claimOf(agent, "a-claim").GetFailureClass())
	err := create(t, agent, "b-claim")
	require.True(t, agenterrors.IsNoRoom(err), "%v", err)
	rejection := agenterrors.Rejections(err)[0]
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, rejection.Unavailable)
	require.Equal(t, clock.Now().Add(time.Minute), rejection.RetryAt)
	delay, ok := agenterrors.RetryDelay(err)
	require.True(t, ok)
	require.Equal(t, time.Minute, delay)

	clock.Step(time.Minute)
	eventually(t, func() bool { return agent.NodeGroup(workers).GetAvailability().GetAvailable() })
	require.NoError(t, create(t, agent, "c-claim"))
}

func TestALateMachineGoesToTheNextClaim(t *testing.T) {
	agent := start(t, fakeagent.WithClock(fakeClock()), fakeagent.WithCoolDown(time.Minute), fakeagent.WithSpareGracePeriod(time.Minute))
	require.NoError(t, create(t, agent, "a-claim"))
	machine := claimOf(agent, "a-claim").GetMachine()
	agent.FailMachine(fakeagent.DefaultCluster(), machine.GetName(), "InstanceProvisionFailed", "request limit exceeded")
	agent.TimeOut(fakeagent.DefaultCluster(), "a-claim", "no provider ID in 15m")
	require.Equal(t, "HandedOver", claimOf(agent, "a-claim").GetReason())
	require.Nil(t, claimOf(agent, "a-claim").GetFailedAt())
	require.NoError(t, create(t, agent, "b-claim"))
	require.Equal(t, machine.GetUid(), claimOf(agent, "b-claim").GetMachine().GetUid())
}

func TestASpareWaitsForTheNextClaim(t *testing.T) {
	clock := fakeClock()
	agent := start(t, fakeagent.WithClock(clock), fakeagent.WithSpareGracePeriod(time.Minute))
	require.NoError(t, create(t, agent, "first"))
	machine := claimOf(agent, "first").GetMachine().GetUid()
	release(t, agent, "first")
	require.EqualValues(t, 1, agent.NodeGroup(workers).GetReplicas())
	clock.Step(30 * time.Second)
	require.NoError(t, create(t, agent, "second"))
	require.Equal(t, machine, claimOf(agent, "second").GetMachine().GetUid())
	require.EqualValues(t, 1, agent.NodeGroup(workers).GetReplicas())

	release(t, agent, "second")
	clock.Step(time.Minute)
	eventually(t, func() bool { return agent.NodeGroup(workers).GetReplicas() == 0 })
}

func TestBlockedGroupsSayWhy(t *testing.T) {
	agent := start(t)
	agent.Block(workers, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "paused by the test", time.Time{})
	err := create(t, agent, "a-claim")
	require.True(t, agenterrors.IsRefused(err), "%v", err)
	require.Equal(t, "paused by the test", agenterrors.Rejections(err)[0].Message)
	agent.UpdateNodeGroup(workers, func(group *agentv1alpha1.NodeGroup) { group.Zone = "zone-b" })
	require.False(t, agent.NodeGroup(workers).GetAvailability().GetAvailable(), "an update does not unblock")
	agent.Unblock(workers)
	require.NoError(t, create(t, agent, "a-claim"))
}

// What blocks a group has nothing to do with its description.
func TestAnUpdatedMachineDeploymentStaysBlocked(t *testing.T) {
	agent := start(t)
	deployment := fakeagent.MachineDeployment{Name: "described", Annotations: map[string]string{
		"cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size": "5",
	}}
	id := agent.AddMachineDeployment(deployment)
	reason := func() agentv1alpha1.UnavailableReason { return agent.NodeGroup(id).GetAvailability().GetReason() }
	agent.Block(id, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, "the quota is used up", time.Time{})
	deployment.Annotations["capacity.cluster-autoscaler.kubernetes.io/labels"] = "kubernetes.io/arch=arm64"
	agent.UpdateMachineDeployment(deployment)
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, reason())
	require.Equal(t, "arm64", agent.NodeGroup(id).GetArchitecture())
	agent.Unblock(id)

	deployment.Annotations["cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"] = "many"
	agent.UpdateMachineDeployment(deployment)
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID, reason())
	deployment.Annotations["cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"] = "6"
	agent.UpdateMachineDeployment(deployment)
	require.True(t, agent.NodeGroup(id).GetAvailability().GetAvailable(), "the mistake is corrected")
}

func TestAGroupOfOneHolderIsReserved(t *testing.T) {
	agent := start(t)
	id := agent.AddMachineDeployment(fakeagent.MachineDeployment{
		Name: "reserved", Annotations: map[string]string{"agent.karpenter.cluster.x-k8s.io/holder": "other"},
	})
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED, agent.NodeGroup(id).GetAvailability().GetReason())
	claim := func(holder string) error {
		_, err := agent.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: fakeagent.DefaultCluster(), ClaimId: "of-" + holder, Holder: holder, Candidates: []string{id},
		})
		return err
	}
	require.True(t, agenterrors.IsRefused(claim("karpenter")))
	require.NoError(t, claim("other"))
}

func TestUsersScaleTheirOwnMachines(t *testing.T) {
	agent := start(t)
	require.NoError(t, create(t, agent, "a-claim"))
	agent.UpdateNodeGroup(workers, func(group *agentv1alpha1.NodeGroup) { group.Replicas += 2 })
	require.EqualValues(t, 3, agent.NodeGroup(workers).GetReplicas())
	agent.UpdateNodeGroup(workers, func(group *agentv1alpha1.NodeGroup) { group.Replicas = 0 })
	require.EqualValues(t, 1, agent.NodeGroup(workers).GetReplicas(), "a claimed machine is not the user's to take")
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, claimOf(agent, "a-claim").GetPhase())
}

func TestARemovedGroupEndsItsClaims(t *testing.T) {
	agent := start(t, fakeagent.WithInfrastructure(fakeagent.Infrastructure{Appear: fakeagent.Manual, Provision: fakeagent.Manual}))
	require.NoError(t, create(t, agent, "bound"))
	agent.Appear(workers)
	require.NoError(t, create(t, agent, "pending"))
	agent.RemoveNodeGroup(workers)
	require.Nil(t, agent.NodeGroup(workers))
	for _, id := range []string{"bound", "pending"} {
		require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, claimOf(agent, id).GetPhase(), id)
		require.Equal(t, "NodeGroupGone", claimOf(agent, id).GetReason(), id)
	}
}

func TestAnAgentThatIsNotSyncedAnswersOnlyStatus(t *testing.T) {
	agent := start(t)
	agent.SetSynced(false)
	require.Equal(t, agenterrors.ReasonNotSynced, agenterrors.ReasonOf(create(t, agent, "a-claim")))
	response, err := agent.Client().Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
	require.NoError(t, err)
	require.False(t, response.GetCachesSynced())
	health := grpc_health_v1.NewHealthClient(agent.Client().Conn())
	check, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, grpc_health_v1.HealthCheckResponse_NOT_SERVING, check.GetStatus())
	agent.SetSynced(true)
	require.NoError(t, create(t, agent, "a-claim"))
}

func TestClustersAreKeptApart(t *testing.T) {
	agent := start(t)
	other := &agentv1alpha1.ClusterRef{Namespace: "default", Name: "other"}
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "other-workers", Cluster: other})
	err := create(t, agent, "a-claim", "default/other-workers")
	require.True(t, agenterrors.IsNotFound(err), "a group of another cluster in the namespace: %v", err)

	c := agent.ClientFor(other)
	response, err := c.NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: other})
	require.NoError(t, err)
	require.Len(t, response.GetNodeGroups(), 1)
	_, err = c.NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: fakeagent.DefaultCluster()})
	require.True(t, agenterrors.IsPermissionDenied(err))

	_, err = agent.Client().NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "default", Name: "missing"},
	})
	require.Equal(t, agenterrors.ReasonClusterNotFound, agenterrors.ReasonOf(err))
}

func TestOtherToolsCanDial(t *testing.T) {
	agent := start(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	agent.Serve(listener)
	for name, options := range map[string][]grpc.DialOption{
		"passthrough:///memory":  {grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return agent.Dial(ctx) })},
		listener.Addr().String(): nil,
	} {
		conn, err := grpc.NewClient(name, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		require.NoError(t, err)
		response, err := agentv1alpha1.NewStatusServiceClient(conn).GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
		require.True(t, response.GetAllClusters())
		require.NoError(t, conn.Close())
	}
}

// follow runs a mirror for the duration of the test.
func follow(t *testing.T, agent *fakeagent.Agent) *client.Mirror[*agentv1alpha1.NodeGroup] {
	t.Helper()
	mirror := agent.Client().MirrorNodeGroups(fakeagent.DefaultCluster())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- mirror.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	bounded, end := context.WithTimeout(ctx, patience)
	defer end()
	require.NoError(t, mirror.WaitForSync(bounded))
	return mirror
}

func TestDroppedStreamsAreOpenedAgain(t *testing.T) {
	agent := start(t)
	mirror := follow(t, agent)
	agent.DropStreams()
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "more"})
	eventually(t, func() bool { _, ok := mirror.Get("default/more"); return ok })
	require.Equal(t, agenterrors.ReasonShuttingDown, agenterrors.ReasonOf(mirror.State().LastError))
	eventually(t, func() bool { return agent.Calls("WatchNodeGroups") == 2 })
}

func TestFrozenStreamsAreNoticedAndLeft(t *testing.T) {
	agent := start(t, fakeagent.WithHeartbeatInterval(20*time.Millisecond))
	mirror := follow(t, agent)
	agent.FreezeStreams(true)
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "more"})
	eventually(t, func() bool { return !mirror.State().Connected })
	_, ok := mirror.Get(workers)
	require.True(t, ok, "the last known view stays")
	agent.FreezeStreams(false)
	eventually(t, func() bool { _, ok := mirror.Get("default/more"); return ok && mirror.State().Connected })
}

func TestASlowReaderStartsOver(t *testing.T) {
	agent := start(t, fakeagent.WithWatchBuffer(2))
	stream, err := agent.Client().NodeGroups.WatchNodeGroups(t.Context(),
		&agentv1alpha1.WatchNodeGroupsRequest{Cluster: fakeagent.DefaultCluster()})
	require.NoError(t, err)
	receive := func() *agentv1alpha1.WatchNodeGroupsResponse {
		response, err := stream.Recv()
		require.NoError(t, err)
		return response
	}
	require.Equal(t, workers, receive().GetUpsert().GetId())
	require.NotNil(t, receive().GetSynced())

	agent.FreezeStreams(true)
	for i := range 10 {
		agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: fmt.Sprintf("more-%d", i)})
	}
	agent.RemoveNodeGroup(workers)
	agent.FreezeStreams(false)
	require.NotEmpty(t, receive().GetResync().GetReason())
	var names []string
	for response := receive(); response.GetSynced() == nil; response = receive() {
		names = append(names, response.GetUpsert().GetName())
	}
	require.Len(t, names, 10)
	require.NotContains(t, names, "workers")
}

func TestResyncOnDemandChangesNothing(t *testing.T) {
	agent := start(t)
	mirror := follow(t, agent)
	generation := mirror.Generation()
	agent.Resync()
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "more"})
	eventually(t, func() bool { _, ok := mirror.Get("default/more"); return ok })
	require.Equal(t, generation+1, mirror.Generation())
	require.Equal(t, 1, agent.Calls("WatchNodeGroups"), "on the same stream")
}

func TestResyncIsOfEveryStream(t *testing.T) {
	agent := start(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	pools, err := agent.Client().NodePools.WatchPublishedObjects(ctx, &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: fakeagent.DefaultCluster()})
	require.NoError(t, err)
	clusters, err := agent.Client().Clusters.WatchClusters(ctx, &agentv1alpha1.WatchClustersRequest{})
	require.NoError(t, err)
	type event interface {
		GetSynced() *agentv1alpha1.Synced
		GetResync() *agentv1alpha1.Resync
	}
	until := func(wanted func(event) bool) {
		t.Helper()
		for _, next := range []func() (event, error){
			func() (event, error) { return pools.Recv() },
			func() (event, error) { return clusters.Recv() },
		} {
			for {
				e, err := next()
				require.NoError(t, err)
				if wanted(e) {
					break
				}
			}
		}
	}
	until(func(e event) bool { return e.GetSynced() != nil })
	agent.Resync()
	until(func(e event) bool { return e.GetResync() != nil })
}

func TestStaleTokensAreRefused(t *testing.T) {
	clock := fakeClock()
	agent := start(t, fakeagent.WithClock(clock), fakeagent.WithTokenLifetime(time.Minute))
	list, err := agent.Client().Claims.ListClaims(t.Context(),
		&agentv1alpha1.ListClaimsRequest{Cluster: fakeagent.DefaultCluster(), Holder: "karpenter"})
	require.NoError(t, err)
	sync := func(agent *fakeagent.Agent) error {
		_, err := agent.Client().Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: fakeagent.DefaultCluster(), Holder: "karpenter", Token: list.GetToken(),
			Nodes: []*agentv1alpha1.NodeReport{{ProviderId: "fake:///1"}},
		})
		return err
	}
	require.NoError(t, sync(agent))
	require.Len(t, agent.NodeReports(fakeagent.DefaultCluster()), 1)
	clock.Step(2 * time.Minute)
	require.True(t, agenterrors.IsStaleToken(sync(agent)))
	require.True(t, agenterrors.IsStaleToken(sync(start(t))), "another agent's token")
}

// TestAccountsBalance performs random actions of callers, users and infrastructure. After each step
// it checks that no machine is shared, no limit is exceeded, and no replica is unaccounted for.
func TestAccountsBalance(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, seed))
			agent := start(t)
			agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "small", MaxSize: ptr.To[int32](4), Replicas: 1})
			cluster := fakeagent.DefaultCluster()
			owned := map[string]int32{workers: 0, "default/small": 1}
			groups := []string{workers, "default/small"}
			appears := true
			for step := range 150 {
				id := fmt.Sprintf("claim-%d", random.IntN(12)+step/20*4)
				claim := claimOf(agent, id)
				alive := claim.GetMachine() != nil && agent.Machine(cluster, claim.GetMachine().GetName()) != nil
				switch random.IntN(9) {
				case 0, 1, 2:
					random.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
					if err := create(t, agent, id, groups...); err != nil {
						require.True(t, agenterrors.IsEnded(err), "%v", err)
					}
				case 3, 4:
					release(t, agent, id)
				case 5:
					if claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND {
						agent.Provision(cluster, id, "")
						agent.Join(cluster, claim.GetMachine().GetName(), "")
					}
				case 6:
					if alive {
						agent.LoseMachine(cluster, claim.GetMachine().GetName())
					}
				case 7:
					appears = !appears
					agent.SetInfrastructure(fakeagent.Infrastructure{
						Appear: lo.Ternary(appears, 0, fakeagent.Manual), Provision: fakeagent.Manual, Join: fakeagent.Manual,
					})
					if appears {
						agent.Appear(workers)
						agent.Appear("default/small")
					}
				case 8:
					owned[workers]++
					agent.UpdateNodeGroup(workers, func(group *agentv1alpha1.NodeGroup) { group.Replicas++ })
				}
				requireBalance(t, agent, owned)
			}
		})
	}
}

func requireBalance(t *testing.T, agent *fakeagent.Agent, owned map[string]int32) {
	t.Helper()
	list, err := agent.Client().Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: fakeagent.DefaultCluster()})
	require.NoError(t, err)
	replicas, machines := maps.Clone(owned), map[string]string{}
	for _, claim := range list.GetClaims() {
		replicas[claim.GetNodeGroupId()]++
		machine := claim.GetMachine()
		if machine == nil {
			require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, claim.GetPhase())
			continue
		}
		require.Empty(t, machines[machine.GetUid()], "%s and %s share a machine", machines[machine.GetUid()], claim.GetClaimId())
		machines[machine.GetUid()] = claim.GetClaimId()
		require.Equal(t, claim.GetNodeGroupId(), machine.GetNodeGroupId())
		require.Equal(t, claim.GetClaimId(), agent.Machine(fakeagent.DefaultCluster(), machine.GetName()).GetClaimId())
	}
	for group := range owned {
		shown := agent.NodeGroup(group)
		require.Equal(t, replicas[group], shown.GetReplicas(), group)
		if shown.MaxSize != nil {
			require.LessOrEqual(t, shown.GetReplicas(), shown.GetMaxSize())
		}
	}
}

// A missing object of a paused Cluster may have been moved to another hub.
func TestNothingIsConcludedOfAPausedCluster(t *testing.T) {
	agent := start(t)
	require.NoError(t, create(t, agent, "a-claim"))
	agent.SetPaused(fakeagent.DefaultCluster(), true)
	c, ref := agent.Client(), fakeagent.DefaultCluster()
	paused := func(err error) {
		require.Equal(t, agenterrors.ReasonClusterPaused, agenterrors.ReasonOf(err), "%v", err)
	}
	_, err := c.Claims.GetClaim(t.Context(), &agentv1alpha1.GetClaimRequest{Cluster: ref, ClaimId: "a-claim"})
	require.NoError(t, err, "it is there")
	_, err = c.Claims.GetClaim(t.Context(), &agentv1alpha1.GetClaimRequest{Cluster: ref, ClaimId: "unknown"})
	paused(err)
	_, err = c.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: ref})
	paused(err)
	_, err = c.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: ref, ClaimId: "a-claim"})
	paused(err)
	_, err = c.Machines.ListMachines(t.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: ref})
	paused(err)
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, agent.NodeGroup(workers).GetAvailability().GetReason())
	require.True(t, agenterrors.IsRefused(create(t, agent, "another-claim")))
	agent.SetPaused(ref, false)
	require.True(t, agent.NodeGroup(workers).GetAvailability().GetAvailable())
	_, err = c.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: ref, ClaimId: "a-claim"})
	require.NoError(t, err)
}
