package conformance

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Run runs every case. newEnv is called once for each, and must register its cleanup with the test.
func Run(t *testing.T, newEnv func(t *testing.T) Env) {
	t.Helper()
	for _, group := range []struct {
		name  string
		cases []testCase
	}{
		{"NodeGroups", nodeGroupCases},
		{"Claims", claimCases},
		{"Release", releaseCases},
		{"Adopt", adoptCases},
		{"Listing", listingCases},
		{"SyncClaims", syncCases},
		{"Holders", holderCases},
		{"Machines", machineCases},
		{"Requests", requestCases},
		{"Server", serverCases},
	} {
		t.Run(group.name, func(t *testing.T) {
			for _, c := range group.cases {
				t.Run(c.name, func(t *testing.T) {
					env := newEnv(t)
					ctx, cancel := context.WithCancel(t.Context())
					t.Cleanup(cancel)
					c.run(&suite{T: t, Env: env, ctx: ctx})
				})
			}
		})
	}
}

type testCase struct {
	name string
	run  func(*suite)
}

// These are the holders of the suite's claims.
const (
	holder      = "karpenter"
	otherHolder = "cluster-autoscaler"
)

// suite is a running case.
type suite struct {
	*testing.T
	Env

	ctx context.Context //nolint:containedctx // The length of one case.
}

// eventually waits until check returns nil, and fails with its last error otherwise.
func (s *suite) eventually(what string, check func() error) {
	s.Helper()
	var last error
	err := wait.PollUntilContextTimeout(s.ctx, 20*time.Millisecond, s.Patience(), true, func(context.Context) (bool, error) {
		last = check()
		return last == nil, nil
	})
	require.NoError(s, err, "%s: %v", what, last)
}

// skipUntil reads a stream until wanted is true for an event. The stream's context limits the wait.
func skipUntil(wanted func() bool) {
	for {
		if wanted() {
			return
		}
	}
}

// bounded returns a context for one call or stream.
func (s *suite) bounded() context.Context {
	ctx, cancel := context.WithTimeout(s.ctx, s.Patience())
	s.Cleanup(cancel)
	return ctx
}

func (s *suite) group(deployment MachineDeployment) string {
	s.Helper()
	return s.CreateNodeGroup(s.T, deployment)
}

// create creates a claim, and repeats the call after lost races as the contract requires.
func (s *suite) create(c *client.Client, request *agentv1alpha1.CreateClaimRequest) (*agentv1alpha1.Claim, error) {
	request.Cluster = s.Cluster()
	if request.GetHolder() == "" {
		request.Holder = holder
	}
	request.SpokeId = spoke
	return repeat(s, func() (*agentv1alpha1.Claim, error) {
		response, err := c.Claims.CreateClaim(s.bounded(), request)
		return response.GetClaim(), err
	})
}

// as returns the client of a role that may act as the holder.
func (s *suite) as(held string) *client.Client {
	if held == otherHolder {
		return s.Autoscaler()
	}
	return s.Client()
}

func (s *suite) mustCreate(id string, candidates ...string) *agentv1alpha1.Claim {
	s.Helper()
	claim, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Candidates: candidates})
	require.NoError(s, err)
	require.Equal(s, id, claim.GetClaimId())
	return claim
}

func (s *suite) release(id string, drained bool) (*agentv1alpha1.Claim, error) {
	return repeat(s, func() (*agentv1alpha1.Claim, error) {
		response, err := s.Client().Claims.ReleaseClaim(s.bounded(), &agentv1alpha1.ReleaseClaimRequest{
			Cluster: s.Cluster(), ClaimId: id, Drained: drained, Reason: "the test is done with it",
		})
		return response.GetClaim(), err
	})
}

func (s *suite) mustRelease(id string) *agentv1alpha1.Claim {
	s.Helper()
	claim, err := s.release(id, true)
	require.NoError(s, err)
	require.NotNil(s, claim)
	return claim
}

func (s *suite) get(id string) (*agentv1alpha1.Claim, error) {
	response, err := s.Client().Claims.GetClaim(s.bounded(), &agentv1alpha1.GetClaimRequest{Cluster: s.Cluster(), ClaimId: id})
	return response.GetClaim(), err
}

// until waits until wanted accepts the claim.
func (s *suite) until(id, what string, wanted func(*agentv1alpha1.Claim) bool) *agentv1alpha1.Claim {
	s.Helper()
	var claim *agentv1alpha1.Claim
	s.eventually(fmt.Sprintf("claim %s %s", id, what), func() error {
		var err error
		claim, err = s.get(id)
		if err != nil {
			return err
		}
		if !wanted(claim) {
			return fmt.Errorf("it is %v", claim)
		}
		return nil
	})
	return claim
}

func (s *suite) untilBound(id string) *agentv1alpha1.Claim {
	s.Helper()
	return s.until(id, "is bound", func(c *agentv1alpha1.Claim) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND && c.GetMachine() != nil
	})
}

func (s *suite) untilEnded(id string) *agentv1alpha1.Claim {
	s.Helper()
	return s.until(id, "has ended", func(c *agentv1alpha1.Claim) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	})
}

// running creates a claim and returns it once its machine has a Node.
func (s *suite) running(id string, candidates ...string) *agentv1alpha1.Claim {
	s.Helper()
	s.mustCreate(id, candidates...)
	s.ProvisionMachine(s.T, id)
	claim := s.until(id, "has a provider ID", func(c *agentv1alpha1.Claim) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND && c.GetMachine().GetProviderId() != ""
	})
	s.JoinNode(s.T, claim.GetMachine().GetName())
	return s.until(id, "has a Node", func(c *agentv1alpha1.Claim) bool { return c.GetMachine().GetNodeName() != "" })
}

func (s *suite) nodeGroup(id string) *agentv1alpha1.NodeGroup {
	s.Helper()
	response, err := s.Client().NodeGroups.GetNodeGroup(s.bounded(),
		&agentv1alpha1.GetNodeGroupRequest{Cluster: s.Cluster(), Id: id})
	require.NoError(s, err)
	return response.GetNodeGroup()
}

// untilGroup waits until wanted accepts the node group.
func (s *suite) untilGroup(id, what string, wanted func(*agentv1alpha1.NodeGroup) bool) *agentv1alpha1.NodeGroup {
	s.Helper()
	var group *agentv1alpha1.NodeGroup
	s.eventually(fmt.Sprintf("node group %s %s", id, what), func() error {
		group = s.nodeGroup(id)
		if !wanted(group) {
			return fmt.Errorf("it is %v", group)
		}
		return nil
	})
	return group
}

func (s *suite) untilReplicas(id string, replicas int32) {
	s.Helper()
	s.untilGroup(id, fmt.Sprintf("has %d replicas", replicas), func(g *agentv1alpha1.NodeGroup) bool {
		return g.GetReplicas() == replicas
	})
}

func (s *suite) machines(groupID string) []*agentv1alpha1.Machine {
	s.Helper()
	response, err := s.Client().Machines.ListMachines(s.bounded(),
		&agentv1alpha1.ListMachinesRequest{Cluster: s.Cluster(), NodeGroupId: groupID})
	require.NoError(s, err)
	return response.GetMachines()
}
