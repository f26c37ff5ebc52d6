package fakeagent_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestMachinesFailAsPlanned(t *testing.T) {
	for name, c := range map[string]struct {
		stage   fakeagent.Stage
		outcome fakeagent.Outcome
		phase   agentv1alpha1.ClaimPhase
		reason  string
	}{
		"stuck before its provider ID": {fakeagent.StageProviderID, "", agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, "Bound"},
		"stuck before its Node":        {fakeagent.StageNode, fakeagent.OutcomeStuck, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, "Bound"},
		"given up":                     {fakeagent.StageProviderID, fakeagent.OutcomeFailed, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, "Failed"},
		"given up without an object":   {fakeagent.StageObject, fakeagent.OutcomeFailed, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, "Failed"},
		"late":                         {fakeagent.StageNode, fakeagent.OutcomeLate, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, "HandedOver"},
		"lost":                         {fakeagent.StageNode, fakeagent.OutcomeLost, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, "MachineLost"},
	} {
		t.Run(name, func(t *testing.T) {
			clock := fakeClock()
			agent := start(t, fakeagent.WithClock(clock), fakeagent.WithInfrastructure(fakeagent.Infrastructure{}))
			agent.FailMachines(workers, fakeagent.MachineFailure{
				Machine: 2, Stage: c.stage, After: time.Minute, Reason: "NoCapacity", Message: "there is none", Outcome: c.outcome,
			})
			require.NoError(t, create(t, agent, "fine"))
			require.NoError(t, create(t, agent, "fails"))
			require.NotEmpty(t, claimOf(agent, "fine").GetMachine().GetNodeName())
			require.Empty(t, claimOf(agent, "fails").GetMachine().GetNodeName())
			require.Empty(t, claimOf(agent, "fails").GetMachine().GetInfrastructureReason())
			clock.Step(time.Minute)
			eventually(t, func() bool {
				claim := claimOf(agent, "fails")
				reported := c.stage == fakeagent.StageObject || claim.GetMachine().GetInfrastructureReason() == "NoCapacity"
				return claim.GetPhase() == c.phase && claim.GetReason() == c.reason && reported
			})
			require.NotEmpty(t, claimOf(agent, "fine").GetMachine().GetNodeName())
		})
	}
}

func TestEveryThirdMachineFails(t *testing.T) {
	agent := start(t, fakeagent.WithInfrastructure(fakeagent.Infrastructure{}))
	agent.FailMachines(workers, fakeagent.MachineFailure{Every: 3, Stage: fakeagent.StageNode})
	var joined []string
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		require.NoError(t, create(t, agent, id))
		if claimOf(agent, id).GetMachine().GetNodeName() != "" {
			joined = append(joined, id)
		}
	}
	require.Equal(t, []string{"a", "b", "d", "e"}, joined)
}

func TestFailuresAreChecked(t *testing.T) {
	fine := fakeagent.MachineFailure{Machine: 1, Stage: fakeagent.StageNode}
	require.NoError(t, fine.Validate())
	for want, change := range map[string]func(*fakeagent.MachineFailure){
		"machine: -1 is negative":       func(f *fakeagent.MachineFailure) { f.Machine = -1 },
		"every: -1 is negative":         func(f *fakeagent.MachineFailure) { f.Every = -1 },
		"machine: set either":           func(f *fakeagent.MachineFailure) { f.Every = 2 },
		"after: -1s is negative":        func(f *fakeagent.MachineFailure) { f.After = -time.Second },
		`stage: "boot" is not one of`:   func(f *fakeagent.MachineFailure) { f.Stage = "boot" },
		`outcome: "lazy" is not one of`: func(f *fakeagent.MachineFailure) { f.Outcome = "lazy" },
		"outcome: a machine without":    func(f *fakeagent.MachineFailure) { f.Stage, f.Outcome = fakeagent.StageObject, fakeagent.OutcomeLost },
	} {
		failure := fine
		change(&failure)
		require.ErrorContains(t, failure.Validate(), want)
	}
}

func TestOneGroupsMachinesHaveTheirOwnPace(t *testing.T) {
	agent := start(t, fakeagent.WithInfrastructure(fakeagent.Infrastructure{}))
	slow := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "slow"})
	agent.SetGroupInfrastructure(slow, &fakeagent.Infrastructure{Provision: fakeagent.Manual})
	require.NoError(t, create(t, agent, "fast"))
	require.NoError(t, create(t, agent, "slow", slow))
	require.NotEmpty(t, claimOf(agent, "fast").GetMachine().GetNodeName())
	require.Empty(t, claimOf(agent, "slow").GetMachine().GetProviderId())
	agent.SetGroupInfrastructure(slow, nil)
	require.NoError(t, create(t, agent, "now-fast", slow))
	require.NotEmpty(t, claimOf(agent, "now-fast").GetMachine().GetNodeName())
}

func TestSilenceLeavesCallsAndStreamsWithoutAnAnswer(t *testing.T) {
	agent := start(t)
	agent.Silence(true)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := agent.Client().Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
	answered := make(chan error, 1)
	go func() { answered <- create(t, agent, "a-claim") }()
	eventually(t, func() bool { return agent.Calls("CreateClaim") == 1 })
	require.Nil(t, claimOf(agent, "a-claim"))
	agent.Silence(false)
	require.NoError(t, <-answered)
	require.NotNil(t, claimOf(agent, "a-claim"))
}

func TestExpiredTokensAreStale(t *testing.T) {
	agent, cluster := start(t), fakeagent.DefaultCluster()
	sync := func(expire bool) error {
		listed, err := agent.Client().Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: cluster, Holder: "karpenter"})
		require.NoError(t, err)
		if expire {
			agent.ExpireTokens(cluster)
		}
		_, err = agent.Client().Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: cluster, Holder: "karpenter", Token: listed.GetToken(), SpokeId: "a-spoke",
		})
		return err
	}
	require.NoError(t, sync(false))
	require.True(t, agenterrors.IsStaleToken(sync(true)))
	require.NoError(t, sync(false))
}
