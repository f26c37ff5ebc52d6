package conformance

import (
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// adoptCases are about claims that take an existing Machine over.
var adoptCases = []testCase{
	{"a user's machine becomes the claim's, and replicas stay", func(s *suite) {
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

	{"again is the same claim", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		for range 2 {
			_, err := s.adopt("a-claim", id, mine.GetName())
			require.NoError(s, err)
			require.Equal(s, mine.GetUid(), s.untilBound("a-claim").GetMachine().GetUid())
		}
		require.EqualValues(s, 1, s.nodeGroup(id).GetReplicas())
	}},

	{"a machine that has a claim, or that there is none, is FAILED_PRECONDITION", func(s *suite) {
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

	{"the user keeps the min size", func(s *suite) {
		id := s.group(deployment("workers", replicas(1), minSize(1)))
		mine := s.machinesOnceThereAre(id, 1)[0]
		_, err := s.adopt("a-claim", id, mine.GetName())
		require.NoError(s, err)
		require.Equal(s, mine.GetUid(), s.untilBound("a-claim").GetMachine().GetUid())
		s.untilReplicas(id, 2)
	}},

	{"validate_only takes nothing", func(s *suite) {
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

	{"with several candidates is INVALID_ARGUMENT", func(s *suite) {
		first, second := s.group(deployment("first", replicas(1))), s.group(deployment("second"))
		mine := s.machinesOnceThereAre(first, 1)[0]
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{
			ClaimId: "a-claim", Candidates: []string{first, second}, AdoptMachine: mine.GetName(),
		})
		require.True(s, agenterrors.IsInvalidArgument(err), "%v", err)
		require.ErrorContains(s, err, "adopt_machine")
	}},
}

func (s *suite) adopt(id, group, machine string) (*agentv1alpha1.Claim, error) {
	return s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Candidates: []string{group}, AdoptMachine: machine})
}
