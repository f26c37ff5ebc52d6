package conformance_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestFakeAgentConforms(t *testing.T) { conformance.Run(t, newFakeEnv) }

// aheadClock is the system clock, moved ahead.
type aheadClock struct {
	clock.RealClock

	ahead atomic.Int64
}

func (c *aheadClock) Now() time.Time {
	return c.RealClock.Now().Add(time.Duration(c.ahead.Load()))
}

type fakeEnv struct {
	agent            *fakeagent.Agent
	clock            *aheadClock
	client, stranger *client.Client
	autoscaler       *client.Client
}

func (e *fakeEnv) Cluster() *agentv1alpha1.ClusterRef { return fakeagent.DefaultCluster() }

func (e *fakeEnv) Client() *client.Client { return e.client }

func (e *fakeEnv) Autoscaler() *client.Client { return e.autoscaler }

func (e *fakeEnv) Admin() *client.Client { return e.agent.Client() }

func (e *fakeEnv) Stranger() *client.Client { return e.stranger }

func (e *fakeEnv) Patience() time.Duration { return 10 * time.Second }

func (e *fakeEnv) CreateNodeGroup(_ testing.TB, d conformance.MachineDeployment) string {
	return e.agent.AddMachineDeployment(translated(d))
}

func (e *fakeEnv) UpdateNodeGroup(_ testing.TB, d conformance.MachineDeployment) {
	e.agent.UpdateMachineDeployment(translated(d))
}

func translated(d conformance.MachineDeployment) fakeagent.MachineDeployment {
	return fakeagent.MachineDeployment{
		Name: d.Name, Labels: d.Labels, Annotations: d.Annotations, Replicas: d.Replicas,
		FailureDomain: d.FailureDomain, Version: d.Version,
	}
}

func (e *fakeEnv) DeleteNodeGroup(_ testing.TB, name string) {
	e.agent.RemoveNodeGroup("default/" + name)
}

func (e *fakeEnv) HoldMachines(_ testing.TB, name string, hold bool) {
	infrastructure := fakeagent.Infrastructure{Provision: fakeagent.Manual, Join: fakeagent.Manual}
	if hold {
		infrastructure.Appear = fakeagent.Manual
	}
	e.agent.SetInfrastructure(infrastructure)
	if !hold {
		e.agent.Appear("default/" + name)
	}
}

func (e *fakeEnv) ProvisionMachine(_ testing.TB, claimID string) {
	e.agent.Provision(e.Cluster(), claimID, "")
}

func (e *fakeEnv) JoinNode(_ testing.TB, machineName string) {
	e.agent.Join(e.Cluster(), machineName, "node-of-"+machineName)
}

func (e *fakeEnv) LoseMachine(_ testing.TB, machineName string) {
	e.agent.LoseMachine(e.Cluster(), machineName)
}

func (e *fakeEnv) StaleToken(tb testing.TB, holder string) string {
	tb.Helper()
	response, err := e.client.Claims.ListClaims(tb.Context(),
		&agentv1alpha1.ListClaimsRequest{Cluster: e.Cluster(), Holder: holder})
	require.NoError(tb, err)
	e.clock.ahead.Add(int64(2 * time.Hour))
	return response.GetToken()
}

func (e *fakeEnv) ApplyNodePoolSet(_ testing.TB, set conformance.NodePoolSet) {
	e.agent.ApplyNodePoolSet(fakeagent.NodePoolSet{
		Name: set.Name, DeletionPolicy: fakeagent.DeletionPolicy(set.DeletionPolicy),
		NodePools: set.NodePools, NodeClasses: set.NodeClasses,
	})
}

func (e *fakeEnv) DeleteNodePoolSet(_ testing.TB, name string) {
	e.agent.DeleteNodePoolSet(e.Cluster(), name)
}

var (
	_ conformance.Env        = &fakeEnv{}
	_ conformance.Ageing     = &fakeEnv{}
	_ conformance.Publishing = &fakeEnv{}
)
