package conformance

import (
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var claimCases = []testCase{
	{"claims.new", claimer(1), "a new claim is durable and says what it is", func(s *suite) {
		id := s.group(deployment("workers"))
		claim, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId: "a-claim", Candidates: []string{id}, DisplayName: "default-x7k2p", MaxNodeProvisionTime: durationpb.New(time.Hour),
		})
		require.NoError(s, err)
		for _, c := range []*agentv1alpha1.Claim{claim, s.mustGet("a-claim")} {
			require.True(s, proto.Equal(s.Cluster(), c.GetCluster()))
			require.Equal(s, s.id("a-claim"), c.GetClaimId())
			require.Equal(s, holder, c.GetHolder())
			require.Equal(s, "default-x7k2p", c.GetDisplayName())
			require.Equal(s, time.Hour, c.GetMaxNodeProvisionTime().AsDuration())
			require.Equal(s, id, c.GetNodeGroupId())
			require.NotNil(s, c.GetCreatedAt())
			require.Nil(s, c.GetReleasedAt())
			require.Nil(s, c.GetEndedAt())
			require.Contains(s, []agentv1alpha1.ClaimPhase{
				agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
			}, c.GetPhase())
		}
		s.untilReplicas(id, 1)
	}},

	{"claims.idempotent", claimer(1), "repeating the call with the same id returns the same claim", func(s *suite) {
		id := s.group(deployment("workers"))
		first := s.mustCreate("a-claim", id)
		for range 3 {
			again := s.mustCreate("a-claim", id)
			require.True(s, proto.Equal(first.GetCreatedAt(), again.GetCreatedAt()))
			require.Equal(s, first.GetNodeGroupId(), again.GetNodeGroupId())
		}
		s.untilBound("a-claim")
		s.mustCreate("a-claim", id)
		require.EqualValues(s, 1, s.replicas(id))
	}},

	{"claims.first-answer-stands", claimer(2), "other candidates follow the first answer", func(s *suite) {
		first, second := s.group(deployment("first")), s.group(deployment("second"))
		s.mustCreate("a-claim", first)
		require.Equal(s, first, s.mustCreate("a-claim", second).GetNodeGroupId())
		require.Equal(s, first, s.mustCreate("a-claim", second, first).GetNodeGroupId())
		require.Equal(s, first, s.mustCreate("a-claim", s.Cluster().GetNamespace()+"/missing").GetNodeGroupId())
		s.untilReplicas(first, 1)
		require.Zero(s, s.replicas(second))
	}},

	{"claims.idempotent-at-once", claimer(2), "one id from many callers at once is one claim", func(s *suite) {
		first, second := s.group(deployment("first")), s.group(deployment("second"))
		const callers = 8
		groups := make([]string, callers)
		s.concurrently(callers, func(i int) error {
			candidates := []string{first, second}
			if i%2 == 1 {
				candidates = []string{second, first}
			}
			claim, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "a-claim", Candidates: candidates})
			groups[i] = claim.GetNodeGroupId()
			return err
		})
		for _, group := range groups {
			require.Equal(s, groups[0], group)
		}
		s.untilBound("a-claim")
		require.EqualValues(s, 1, s.replicas(first)+s.replicas(second))
	}},

	{"claims.candidates-in-order", fault(), "the first candidate with room wins", func(s *suite) {
		full, next, last := s.group(deployment("full", maxSize(1))), s.group(deployment("next", maxSize(1))), s.group(deployment("last"))
		require.Equal(s, full, s.mustCreate("one", full, next, last).GetNodeGroupId())
		s.untilUnavailable(full, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE)
		require.Equal(s, next, s.mustCreate("two", full, next, last).GetNodeGroupId())
		s.untilUnavailable(next, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE)
		require.Equal(s, last, s.mustCreate("three", full, s.Cluster().GetNamespace()+"/missing", next, last).GetNodeGroupId())
	}},

	{"claims.no-room", fault(), "no room anywhere is RESOURCE_EXHAUSTED, with a reason for each candidate", func(s *suite) {
		first, second := s.group(deployment("first", maxSize(1))), s.group(deployment("second", maxSize(0)))
		s.mustCreate("one", first)
		s.untilBound("one")
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "two", Candidates: []string{first, second}})
		require.True(s, agenterrors.IsNoRoom(err), "%v", err)
		rejections := agenterrors.Rejections(err)
		require.Len(s, rejections, 2)
		for i, id := range []string{first, second} {
			require.Equal(s, id, rejections[i].NodeGroup)
			require.Equal(s, agenterrors.ReasonNoRoom, rejections[i].Reason)
			require.Equal(s, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, rejections[i].Unavailable)
			require.NotEmpty(s, rejections[i].Message)
		}
		require.EqualValues(s, 1, s.nodeGroup(first).GetReplicas())
		require.Zero(s, s.nodeGroup(second).GetReplicas())
	}},

	{"claims.room-made", fault(), "room that a user makes is used", func(s *suite) {
		id := s.group(deployment("workers", maxSize(1)))
		s.mustCreate("one", id)
		s.untilUnavailable(id, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE)
		s.UpdateNodeGroup(s.TB, deployment("workers", maxSize(2)))
		s.untilGroup(id, "is available", func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() })
		s.mustCreate("two", id)
		s.untilReplicas(id, 2)
	}},

	{"claims.no-candidate-exists", claimer(0), "candidates of which none exists are NOT_FOUND", func(s *suite) {
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId:    "a-claim",
			Candidates: []string{s.Cluster().GetNamespace() + "/missing", s.Cluster().GetNamespace() + "/absent"},
		})
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
	}},

	{"claims.other-namespace", claimer(1), "a candidate in another namespace is INVALID_ARGUMENT", func(s *suite) {
		id := s.group(deployment("workers"))
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId: "a-claim", Candidates: []string{id, "elsewhere/workers"},
		})
		requireViolation(s, err, "candidates[1]")
		_, err = s.get("a-claim")
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
	}},

	{"claims.validate-only", claimer(1), "validate_only writes nothing", func(s *suite) {
		id := s.group(deployment("workers"))
		claim, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId: "a-claim", Candidates: []string{id}, ValidateOnly: true,
		})
		require.NoError(s, err)
		require.Equal(s, id, claim.GetNodeGroupId())
		_, err = s.get("a-claim")
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
		require.Zero(s, s.replicas(id))
	}},

	{"claims.stages", fault(), "pending, bound, provider ID, Node", func(s *suite) {
		id := s.group(deployment("workers", inZone("zone-a")))
		s.HoldMachines(s.TB, "workers", true)
		pending := s.mustCreate("a-claim", id)
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, pending.GetPhase())
		require.Nil(s, pending.GetMachine())
		require.NotEmpty(s, s.mustGet("a-claim").GetReason())

		s.HoldMachines(s.TB, "workers", false)
		bound := s.untilBound("a-claim")
		machine := bound.GetMachine()
		require.NotEmpty(s, machine.GetName())
		require.NotEmpty(s, machine.GetUid())
		require.Equal(s, id, machine.GetNodeGroupId())
		require.Equal(s, "a-claim", machine.GetClaimId())
		require.Empty(s, machine.GetProviderId())
		require.Empty(s, machine.GetNodeName())

		s.ProvisionMachine(s.TB, "a-claim")
		provisioned := s.until("a-claim", "has a provider ID", func(c *agentv1alpha1.Claim) bool {
			return c.GetMachine().GetProviderId() != ""
		})
		require.Equal(s, machine.GetUid(), provisioned.GetMachine().GetUid())
		require.Empty(s, provisioned.GetMachine().GetNodeName())

		s.JoinNode(s.TB, machine.GetName())
		joined := s.until("a-claim", "has a Node", func(c *agentv1alpha1.Claim) bool { return c.GetMachine().GetNodeName() != "" })
		require.Equal(s, provisioned.GetMachine().GetProviderId(), joined.GetMachine().GetProviderId())
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, joined.GetPhase())
		requireHistory(s, joined)
	}},

	{"claims.one-machine-each", fault(), "one machine, one claim, however many at once", func(s *suite) {
		const claims = 6
		id := s.group(deployment("workers", replicas(1)))
		owned := map[string]bool{}
		for _, machine := range s.machines(id) {
			owned[machine.GetUid()] = true
		}
		require.Len(s, owned, 1)
		s.concurrently(claims, func(i int) error {
			_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
				ClaimId: fmt.Sprintf("claim-%d", i), Candidates: []string{id},
			})
			return err
		})
		machines, providerIDs := map[string]string{}, map[string]string{}
		for i := range claims {
			name := fmt.Sprintf("claim-%d", i)
			s.ProvisionMachine(s.TB, name)
			claim := s.until(name, "has a provider ID", func(c *agentv1alpha1.Claim) bool {
				return c.GetMachine().GetProviderId() != ""
			})
			uid := claim.GetMachine().GetUid()
			require.False(s, owned[uid], "%s got the user's own machine", name)
			require.Empty(s, machines[uid], "%s and %s share a machine", machines[uid], name)
			require.Empty(s, providerIDs[claim.GetMachine().GetProviderId()])
			machines[uid], providerIDs[claim.GetMachine().GetProviderId()] = name, name
		}
		s.untilReplicas(id, claims+1)
	}},

	{"claims.max-size-at-once", fault(), "the max size holds, however many claim at once", func(s *suite) {
		const limit, claims = 3, 8
		id := s.group(deployment("workers", maxSize(limit)))
		var mu sync.Mutex
		accepted := 0
		s.concurrently(claims, func(i int) error {
			_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
				ClaimId: fmt.Sprintf("claim-%d", i), Candidates: []string{id},
			})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				accepted++
			case !agenterrors.IsNoRoom(err):
				return err
			}
			return nil
		})
		require.Equal(s, limit, accepted)
		s.untilReplicas(id, limit)
		require.Len(s, s.machinesOnceThereAre(id, limit), limit)
	}},

	{"claims.other-spoke", fault(), "refuses a new claim of another cluster than the shim's", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		users := s.machinesOnceThereAre(id, 1)[0]
		_, err := s.sync(s.list(holder, false).GetToken())
		require.NoError(s, err)
		refused := func(request *agentv1alpha1.CreateClaimRequest) {
			request.ClaimId, request.SpokeId, request.Candidates = "theirs", "another-spoke", []string{id}
			_, err := s.create(s.Client(), request)
			require.True(s, agenterrors.IsSpokeMismatch(err), "%v", err)
			_, err = s.get("theirs")
			require.True(s, agenterrors.IsNotFound(err), "%v", err)
		}
		requests := func() []*agentv1alpha1.CreateClaimRequest {
			return []*agentv1alpha1.CreateClaimRequest{{}, {ValidateOnly: true}, {AdoptMachine: users.GetName()}}
		}
		for _, request := range requests() {
			refused(request) // there are no claims
		}
		made := s.mustCreate("ours", id)
		for _, request := range requests() {
			refused(request)
		}
		again, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "ours", SpokeId: "another-spoke", Candidates: []string{id}})
		require.NoError(s, err, "the claim exists already")
		require.True(s, proto.Equal(made.GetCreatedAt(), again.GetCreatedAt()))
		_, err = s.sync(s.list(holder, false).GetToken(), "ours")
		require.NoError(s, err)
	}},

	{"claims.machine-lost", fault(), "a machine that another actor deletes ends its claim", func(s *suite) {
		id := s.group(deployment("workers"))
		lost, kept := s.running("lost", id), s.running("kept", id)
		s.LoseMachine(s.TB, lost.GetMachine().GetName())
		ended := s.untilEnded("lost")
		require.Equal(s, "MachineLost", ended.GetReason())
		require.Equal(s, lost.GetMachine().GetUid(), ended.GetMachine().GetUid())
		require.Equal(s, kept.GetMachine().GetUid(), s.mustGet("kept").GetMachine().GetUid())
		s.untilReplicas(id, 1)
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, s.mustGet("kept").GetPhase())
	}},
}

func (s *suite) mustGet(id string) *agentv1alpha1.Claim {
	s.Helper()
	claim, err := s.get(id)
	require.NoError(s, err)
	return claim
}

func (s *suite) untilUnavailable(id string, reason agentv1alpha1.UnavailableReason) {
	s.Helper()
	s.untilGroup(id, "is "+reason.String(), func(g *agentv1alpha1.NodeGroup) bool {
		return !g.GetAvailability().GetAvailable() && g.GetAvailability().GetReason() == reason
	})
}

func (s *suite) machinesOnceThereAre(id string, n int) []*agentv1alpha1.Machine {
	s.Helper()
	var machines []*agentv1alpha1.Machine
	s.eventually(fmt.Sprintf("node group %s has %d machines", id, n), func() error {
		if machines = s.machines(id); len(machines) != n {
			return fmt.Errorf("it has %d", len(machines))
		}
		return nil
	})
	return machines
}

// concurrently makes n concurrent calls of f, and fails with the first error.
func (s *suite) concurrently(n int, f func(i int) error) {
	s.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(s, err)
	}
}

// requireHistory asserts that a claim has a well-formed history.
func requireHistory(s *suite, claim *agentv1alpha1.Claim) {
	s.Helper()
	history := claim.GetHistory()
	require.NotEmpty(s, history)
	require.LessOrEqual(s, len(history), 32)
	for i, event := range history {
		require.NotEmpty(s, event.GetReason())
		require.NotNil(s, event.GetTime())
		if i > 0 {
			require.False(s, event.GetTime().AsTime().Before(history[i-1].GetTime().AsTime()), "history is out of order: %v", history)
		}
	}
}
