package conformance

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Run runs every case as a subtest. newEnv is called once for each, and must register its cleanup
// with the test.
func Run(t *testing.T, newEnv func(tb testing.TB) Env) {
	t.Helper()
	for _, area := range areas {
		t.Run(area.name, func(t *testing.T) {
			for _, c := range area.cases {
				t.Run(c.name, func(t *testing.T) { runCase(t, newEnv, c) })
			}
		})
	}
}

func runCase(tb testing.TB, newEnv func(tb testing.TB) Env, c testCase) {
	tb.Helper()
	env := newEnv(tb)
	ctx, cancel := context.WithCancel(tb.Context())
	tb.Cleanup(cancel)
	s := &suite{TB: tb, Env: env, ctx: ctx, replicasBefore: map[string]int32{}, machinesBefore: map[string]bool{}, created: map[string]bool{}}
	if standing, ok := env.(Standing); ok {
		s.prefix = standing.Prefix()
	}
	c.run(s)
}

// These are the holders of the suite's claims.
const (
	holder      = "karpenter"
	otherHolder = "cluster-autoscaler"
)

// suite is a running case. Cases choose claim IDs freely, and count replicas and machines from
// zero: what the Cluster had before is excluded.
type suite struct {
	testing.TB
	Env

	ctx context.Context //nolint:containedctx // The length of one case.
	// prefix is the prefix of the IDs of claims. It is empty in a Cluster of the case's own.
	prefix string
	// replicasBefore are the replicas of node groups before the case, by ID. machinesBefore are the
	// UIDs of machines before the case.
	replicasBefore map[string]int32
	machinesBefore map[string]bool
	// created are the IDs of claims that must be released when the case ends. Cases claim
	// concurrently.
	mu      sync.Mutex
	created map[string]bool
}

// run runs a part of the case. Its failure fails the case, but does not end it.
func (s *suite) run(name string, f func(tb testing.TB)) {
	s.Helper()
	if test, ok := s.TB.(*testing.T); ok {
		test.Run(name, func(t *testing.T) { f(t) })
		return
	}
	part := try(s.ctx, name, f)
	if part.failed {
		s.Errorf("%s: %s", name, strings.Join(part.messages, "\n"))
	}
}

// id returns the ID of a claim of the case.
func (s *suite) id(name string) string { return s.prefix + name }

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
	id := s.CreateNodeGroup(s.TB, deployment)
	if s.prefix != "" {
		s.replicasBefore[id] = s.atRest(id)
	}
	return id
}

// atRest waits until an existing node group has no machine that a claim could be assigned. It then
// records its machines, and returns its replicas.
func (s *suite) atRest(id string) int32 {
	s.Helper()
	var replicas int32
	s.eventually("node group "+id+" is at rest", func() error {
		group, machines := s.nodeGroup(id), s.machines(id)
		replicas = group.GetReplicas()
		owned := lo.CountValuesBy(machines, (*agentv1alpha1.Machine).GetOwner)
		// An agent need not decide which machines are the floor's before a shim asks for it.
		undecided := owned[agentv1alpha1.MachineOwner_MACHINE_OWNER_UNSPECIFIED]
		floors := int(group.GetFloorReplicas()) - owned[agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR]
		if undecided > max(floors, 0) {
			return fmt.Errorf("%d of its machines have no owner, and %d of them are the floor's", undecided, max(floors, 0))
		}
		if len(machines) != int(replicas) {
			return fmt.Errorf("it has %d replicas and %d machines", replicas, len(machines))
		}
		for _, machine := range machines {
			s.machinesBefore[machine.GetUid()] = true
		}
		return nil
	})
	return replicas
}

// create creates a claim, and repeats the call after lost races as the contract requires.
func (s *suite) create(c *client.Client, request *agentv1alpha1.CreateClaimRequest) (*agentv1alpha1.Claim, error) {
	request = proto.CloneOf(request)
	request.Cluster, request.ClaimId = s.Cluster(), s.id(request.GetClaimId())
	if request.GetSpokeId() == "" {
		request.SpokeId = spoke
	}
	if request.GetHolder() == "" {
		request.Holder = holder
	}
	if s.prefix != "" && !request.GetValidateOnly() {
		s.releaseAtTheEnd(c, request.GetClaimId())
	}
	return repeat(s, func() (*agentv1alpha1.Claim, error) {
		response, err := c.Claims.CreateClaim(s.bounded(), request)
		return response.GetClaim(), err
	})
}

// releaseAtTheEnd restores a Cluster that is not the case's own.
func (s *suite) releaseAtTheEnd(c *client.Client, id string) {
	s.mu.Lock()
	known := s.created[id]
	s.created[id] = true
	s.mu.Unlock()
	if known {
		return
	}
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), s.Patience())
		defer cancel()
		var last error
		err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (ended bool, _ error) {
			ended, last = s.releaseUntilEnded(ctx, c, id)
			return ended, nil
		})
		require.NoError(s, err, "claim %s has not ended: %v", id, last)
	})
}

// releaseUntilEnded releases a live claim. It reports whether the claim has ended, or was never
// created.
func (s *suite) releaseUntilEnded(ctx context.Context, c *client.Client, id string) (ended bool, err error) {
	response, err := c.Claims.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: s.Cluster(), ClaimId: id})
	switch phase := response.GetClaim().GetPhase(); {
	case agenterrors.IsNotFound(err):
		return true, nil
	case err != nil || phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		return false, err
	case phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		return true, nil
	}
	_, err = c.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
		Cluster: s.Cluster(), ClaimId: id, Drained: true, Reason: "the check is over",
	})
	return false, err
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
	require.Equal(s, s.id(id), claim.GetClaimId())
	return claim
}

func (s *suite) release(id string, drained bool) (*agentv1alpha1.Claim, error) {
	return repeat(s, func() (*agentv1alpha1.Claim, error) {
		response, err := s.Client().Claims.ReleaseClaim(s.bounded(), &agentv1alpha1.ReleaseClaimRequest{
			Cluster: s.Cluster(), ClaimId: s.id(id), Drained: drained, Reason: "the test is done with it",
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
	response, err := s.Client().Claims.GetClaim(s.bounded(), &agentv1alpha1.GetClaimRequest{Cluster: s.Cluster(), ClaimId: s.id(id)})
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
	return s.joinNode(id)
}

// joinNode makes the Node of a claim's machine join, and returns the claim.
func (s *suite) joinNode(id string) *agentv1alpha1.Claim {
	s.Helper()
	s.ProvisionMachine(s.TB, s.id(id))
	claim := s.until(id, "has a provider ID", func(c *agentv1alpha1.Claim) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND && c.GetMachine().GetProviderId() != ""
	})
	s.JoinNode(s.TB, claim.GetMachine().GetName())
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
		return g.GetReplicas()-s.replicasBefore[id] == replicas
	})
}

// replicas returns the node group's replicas without those from before the case.
func (s *suite) replicas(id string) int32 {
	s.Helper()
	return s.nodeGroup(id).GetReplicas() - s.replicasBefore[id]
}

// machines returns the node group's machines without those from before the case.
func (s *suite) machines(groupID string) []*agentv1alpha1.Machine {
	s.Helper()
	response, err := s.Client().Machines.ListMachines(s.bounded(),
		&agentv1alpha1.ListMachinesRequest{Cluster: s.Cluster(), NodeGroupId: groupID})
	require.NoError(s, err)
	return lo.Reject(response.GetMachines(), func(m *agentv1alpha1.Machine, _ int) bool { return s.machinesBefore[m.GetUid()] })
}
