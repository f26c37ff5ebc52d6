package conformance

import (
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// adoptCases cover claims that adopt an existing Machine.
var adoptCases = []testCase{
	{"adopt.users-machine", fault(), "a user's machine becomes the claim's, and replicas stay", func(s *suite) {
		id := s.group(deployment("workers", replicas(2)))
		mine := s.machinesOnceThereAre(id, 2)[0]
		_, err := s.adopt("a-claim", id, mine.GetName())
		require.NoError(s, err)
		claim := s.untilBound("a-claim")
		require.Equal(s, mine.GetUid(), claim.GetMachine().GetUid())
		require.Equal(s, mine.GetName(), claim.GetAdoptMachine())
		require.EqualValues(s, 2, s.nodeGroup(id).GetReplicas())

		s.mustRelease("a-claim")
		s.untilReplicas(id, 1)
		left := s.machinesOnceThereAre(id, 1)
		require.NotEqual(s, mine.GetUid(), left[0].GetUid(), "the other machine is the user's still")
	}},

	{"adopt.idempotent", fault(), "repeating the call returns the same claim", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		for range 2 {
			_, err := s.adopt("a-claim", id, mine.GetName())
			require.NoError(s, err)
			require.Equal(s, mine.GetUid(), s.untilBound("a-claim").GetMachine().GetUid())
		}
		require.EqualValues(s, 1, s.nodeGroup(id).GetReplicas())
	}},

	{"adopt.not-free", fault(), "a machine that has a claim or does not exist is FAILED_PRECONDITION", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		_, err := s.adopt("first", id, mine.GetName())
		require.NoError(s, err)
		s.untilBound("first")
		for claim, machine := range map[string]string{"second": mine.GetName(), "third": "missing"} {
			_, err := s.adopt(claim, id, machine)
			require.Error(s, err)
			rejections := agenterrors.Rejections(err)
			require.Len(s, rejections, 1, "%v", err)
			require.Equal(s, agenterrors.ReasonNotOpen, rejections[0].Reason)
			require.Contains(s, rejections[0].Message, machine)
		}
		require.EqualValues(s, 1, s.nodeGroup(id).GetReplicas())
	}},

	{"adopt.min-size", fault(), "the user keeps the min size", func(s *suite) {
		id := s.group(deployment("workers", replicas(1), minSize(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		_, err := s.adopt("a-claim", id, mine.GetName())
		require.NoError(s, err)
		require.Equal(s, mine.GetUid(), s.untilBound("a-claim").GetMachine().GetUid())
		s.untilReplicas(id, 2)
	}},

	{"adopt.above-min-size", fault(), "only above the min size: the user's last machines stay the user's", func(s *suite) {
		id := s.group(deployment("workers", replicas(2), minSize(1)))
		machines := s.machinesOnceThereAre(id, 2)
		above := func(claim string, machine *agentv1alpha1.Machine) error {
			_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
				ClaimId: claim, Candidates: []string{id}, AdoptMachine: machine.GetName(), AdoptAboveMinSize: true,
			})
			return err
		}
		require.NoError(s, above("first", machines[0]))
		s.untilBound("first")
		err := above("second", machines[1])
		require.True(s, agenterrors.IsRefused(err), "%v", err)
		require.ErrorContains(s, err, "min size 1")
		require.EqualValues(s, 2, s.nodeGroup(id).GetReplicas())
	}},

	{"adopt.id-left", fault(), "the id of a claim that could not adopt can be used again", func(s *suite) {
		id := s.group(deployment("workers", replicas(2), minSize(2), maxSize(2)))
		mine := s.machinesOnceThereAre(id, 2)[0]
		for range 2 {
			_, err := s.adopt("a-claim", id, mine.GetName())
			require.True(s, agenterrors.IsNoRoom(err), "%v", err)
		}
		s.UpdateNodeGroup(s.TB, deployment("workers", replicas(2), minSize(2), maxSize(3)))
		s.untilGroup(id, "is available", func(g *agentv1alpha1.NodeGroup) bool { return g.GetAvailability().GetAvailable() })
		_, err := s.adopt("a-claim", id, mine.GetName())
		require.NoError(s, err)
		require.Equal(s, mine.GetUid(), s.untilBound("a-claim").GetMachine().GetUid())
	}},

	{"adopt.validate-only", fault(), "validate_only takes nothing", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		claim, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId: "a-claim", Candidates: []string{id}, AdoptMachine: mine.GetName(), ValidateOnly: true,
		})
		require.NoError(s, err)
		require.Equal(s, id, claim.GetNodeGroupId())
		require.Equal(s, mine.GetName(), claim.GetAdoptMachine())
		_, err = s.get("a-claim")
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
		require.Empty(s, s.machinesOnceThereAre(id, 1)[0].GetClaimId())
	}},

	{"adopt.returned", fault(), "a machine that is returned is the user's again, as it is", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		_, err := s.adopt("a-claim", id, mine.GetName())
		require.NoError(s, err)
		s.untilBound("a-claim")
		claim, err := s.returnMachine("a-claim")
		require.NoError(s, err)
		require.True(s, claim.GetReturned())
		require.GreaterOrEqual(s, claim.GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
		ended := s.untilEnded("a-claim")
		require.Equal(s, "Returned", ended.GetReason())
		require.True(s, ended.GetReturned())
		s.untilGroup(id, "the user has the machine", func(g *agentv1alpha1.NodeGroup) bool {
			return g.GetReplicas() == 1 && g.GetFloorReplicas() == 1
		})
		left := s.machinesOnceThereAre(id, 1)[0]
		require.Equal(s, mine.GetUid(), left.GetUid())
		require.Empty(s, left.GetClaimId())
		require.Nil(s, left.GetDeletedAt())

		for range 2 { // and repeatedly
			again, err := s.returnMachine("a-claim")
			require.NoError(s, err)
			require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, again.GetPhase())
		}
		s.mustRelease("a-claim")
		_, err = s.adopt("a-claim", id, mine.GetName())
		require.True(s, agenterrors.IsEnded(err), "%v", err)
		_, err = s.adopt("another", id, mine.GetName())
		require.NoError(s, err)
		require.Equal(s, mine.GetUid(), s.untilBound("another").GetMachine().GetUid(), "and it can be adopted again")
	}},

	{"adopt.claimed-returned", fault(), "a machine that was claimed anew can be returned, too, and no claim gets it", func(s *suite) {
		id := s.group(deployment("workers"))
		mine := s.running("a-claim", id).GetMachine()
		_, err := s.returnMachine("a-claim")
		require.NoError(s, err)
		s.untilEnded("a-claim")
		other := s.running("another", id).GetMachine()
		require.NotEqual(s, mine.GetUid(), other.GetUid())
		require.EqualValues(s, 2, s.nodeGroup(id).GetReplicas())
	}},

	{"adopt.not-returnable", fault(), "what has no machine cannot be returned", func(s *suite) {
		id := s.group(deployment("workers"))
		s.HoldMachines(s.TB, "workers", true)
		s.mustCreate("waits", id)
		_, err := s.returnMachine("waits")
		require.True(s, agenterrors.IsNotReturnable(err), "%v", err)
		require.True(s, agenterrors.IsRefused(err), "%v", err)
		s.HoldMachines(s.TB, "workers", false)
		_, err = s.returnMachine("never-made")
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
		require.Equal(s, agenterrors.ReasonClaimNotFound, agenterrors.ReasonOf(err))
	}},

	{"adopt.several-candidates", fault(), "with several candidates is INVALID_ARGUMENT", func(s *suite) {
		first, second := s.group(deployment("first", replicas(1))), s.group(deployment("second"))
		mine := s.machinesOnceThereAre(first, 1)[0]
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId: "a-claim", Candidates: []string{first, second}, AdoptMachine: mine.GetName(),
		})
		require.True(s, agenterrors.IsInvalidArgument(err), "%v", err)
		require.ErrorContains(s, err, "adopt_machine")
	}},

	{"adopt.min-size-alone", claimer(1), "the min size without a machine to adopt is INVALID_ARGUMENT", func(s *suite) {
		id := s.group(deployment("workers"))
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "a-claim", Candidates: []string{id}, AdoptAboveMinSize: true})
		require.True(s, agenterrors.IsInvalidArgument(err), "%v", err)
		require.ErrorContains(s, err, "adopt_above_min_size")
	}},
}

func (s *suite) returnMachine(id string) (*agentv1alpha1.Claim, error) {
	response, err := repeat(s, func() (*agentv1alpha1.ReturnMachineResponse, error) {
		return s.Client().Claims.ReturnMachine(s.bounded(), &agentv1alpha1.ReturnMachineRequest{Cluster: s.Cluster(), ClaimId: s.id(id)})
	})
	return response.GetClaim(), err
}

func (s *suite) adopt(id, group, machine string) (*agentv1alpha1.Claim, error) {
	return s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Candidates: []string{group}, AdoptMachine: machine})
}
