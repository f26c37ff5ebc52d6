package conformance

import (
	"fmt"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var releaseCases = []testCase{
	{"release.before-machine", fault(), "before there is a machine: the claim ends and the replica is removed", func(s *suite) {
		id := s.group(deployment("workers"))
		s.HoldMachines(s.TB, "workers", true)
		s.mustCreate("a-claim", id)
		s.untilReplicas(id, 1)
		s.mustRelease("a-claim")
		ended := s.untilEnded("a-claim")
		require.Nil(s, ended.GetMachine())
		require.NotEmpty(s, ended.GetReason())
		s.HoldMachines(s.TB, "workers", false)
		s.untilReplicas(id, 0)
		s.machinesOnceThereAre(id, 0)
	}},

	{"release.replica-reused", fault(), "before there is a machine: the next claim uses the replica", func(s *suite) {
		id := s.group(deployment("workers", maxSize(1)))
		s.HoldMachines(s.TB, "workers", true)
		s.mustCreate("first", id)
		s.mustRelease("first")
		s.untilEnded("first")
		second := s.createOnceThereIsRoom("second", id)
		require.EqualValues(s, 1, s.nodeGroup(id).GetReplicas())
		s.HoldMachines(s.TB, "workers", false)
		s.untilBound(second)
		require.EqualValues(s, 1, s.nodeGroup(id).GetReplicas())
	}},

	{"release.handed-over", fault(), "before the machine has a Node: it goes to a claim that waits", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("first", id)
		machine := s.untilBound("first").GetMachine()
		s.HoldMachines(s.TB, "workers", true)
		s.mustCreate("second", id)
		// A drained machine would have a Node.
		_, err := s.release("first", false)
		require.NoError(s, err)
		s.untilEnded("first")
		second := s.untilBound("second")
		require.Equal(s, machine.GetUid(), second.GetMachine().GetUid())
		require.Equal(s, "second", second.GetMachine().GetClaimId())
		s.HoldMachines(s.TB, "workers", false)
		s.untilReplicas(id, 1)
		require.Equal(s, machine.GetUid(), s.mustGet("second").GetMachine().GetUid())
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, s.mustGet("second").GetPhase())
	}},

	{"release.before-node", claimer(1), "before the machine has a Node, without a waiting claim: the machine is deleted", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("a-claim", id)
		machine := s.untilBound("a-claim").GetMachine()
		s.mustRelease("a-claim")
		require.Equal(s, machine.GetUid(), s.untilEnded("a-claim").GetMachine().GetUid())
		s.untilReplicas(id, 0)
		s.machinesOnceThereAre(id, 0)
	}},

	{"release.that-machine", fault(), "with a Node: that machine goes and no other", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		owned := s.machines(id)
		require.Len(s, owned, 1)
		first, second, third := s.running("first", id), s.running("second", id), s.running("third", id)
		s.untilReplicas(id, 4)

		released := s.mustRelease("second")
		require.Contains(s, []agentv1alpha1.ClaimPhase{
			agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED,
		}, released.GetPhase())
		require.NotNil(s, released.GetReleasedAt())
		ended := s.untilEnded("second")
		require.Equal(s, "Released", ended.GetReason())
		require.NotNil(s, ended.GetEndedAt())
		require.Equal(s, second.GetMachine().GetUid(), ended.GetMachine().GetUid())
		require.Equal(s, second.GetMachine().GetProviderId(), ended.GetMachine().GetProviderId())
		requireHistory(s, ended)

		s.untilReplicas(id, 3)
		uids := map[string]bool{}
		for _, machine := range s.machinesOnceThereAre(id, 3) {
			uids[machine.GetUid()] = true
		}
		require.Equal(s, map[string]bool{
			owned[0].GetUid(): true, first.GetMachine().GetUid(): true, third.GetMachine().GetUid(): true,
		}, uids)
		for _, name := range []string{"first", "third"} {
			require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, s.mustGet(name).GetPhase())
		}
	}},

	{"release.not-drained", claimer(1), "a release without draining by the caller succeeds", func(s *suite) {
		id := s.group(deployment("workers"))
		s.running("a-claim", id)
		_, err := s.release("a-claim", false)
		require.NoError(s, err)
		ended := s.untilEnded("a-claim")
		require.Equal(s, "Released", ended.GetReason())
		require.False(s, ended.GetDrained())
		require.Nil(s, ended.GetFailedAt())
		s.untilReplicas(id, 0)
	}},

	{"release.failed", fault(), "failed: the machine is not handed over, and its node group is left alone", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("a-claim", id)
		machine := s.untilBound("a-claim").GetMachine()
		response, err := s.Client().Claims.ReleaseClaim(s.bounded(), &agentv1alpha1.ReleaseClaimRequest{
			Cluster: s.Cluster(), ClaimId: "a-claim", Failed: true, Reason: "it did not come in time",
		})
		require.NoError(s, err)
		require.NotNil(s, response.GetClaim())
		ended := s.untilEnded("a-claim")
		require.Equal(s, "Failed", ended.GetReason())
		require.NotNil(s, ended.GetFailedAt())
		require.Contains(s, ended.GetMessage(), "it did not come in time")
		require.Equal(s, machine.GetUid(), ended.GetMachine().GetUid())
		s.untilReplicas(id, 0)
		s.machinesOnceThereAre(id, 0)
		s.untilUnavailable(id, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN)
		_, err = s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "next", Candidates: []string{id}})
		require.True(s, agenterrors.IsNoRoom(err), "%v", err)
	}},

	{"release.failure-class", fault(), "a claim that its holder released as failed is shown as such, and no other one", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("fine", id)
		s.untilBound("fine")
		s.mustRelease("fine")
		require.Equal(s, agentv1alpha1.FailureClass_FAILURE_CLASS_UNSPECIFIED, s.untilEnded("fine").GetFailureClass())
		s.mustCreate("bad", id)
		s.untilBound("bad")
		response, err := s.Client().Claims.ReleaseClaim(s.bounded(), &agentv1alpha1.ReleaseClaimRequest{
			Cluster: s.Cluster(), ClaimId: "bad", Failed: true,
		})
		require.NoError(s, err)
		require.Equal(s, agentv1alpha1.FailureClass_FAILURE_CLASS_REPORTED, response.GetClaim().GetFailureClass())
		require.Equal(s, agentv1alpha1.FailureClass_FAILURE_CLASS_REPORTED, s.untilEnded("bad").GetFailureClass())
	}},

	{"release.room", fault(), "room that a release makes can be claimed again", func(s *suite) {
		id := s.group(deployment("workers", maxSize(1)))
		s.running("first", id)
		s.mustRelease("first")
		s.untilEnded("first")
		s.createOnceThereIsRoom("second", id)
	}},

	{"release.idempotent", claimer(1), "again, or after the end, or of an unknown claim is OK", func(s *suite) {
		id := s.group(deployment("workers"))
		s.running("a-claim", id)
		s.mustRelease("a-claim")
		s.mustRelease("a-claim")
		s.untilEnded("a-claim")
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, s.mustRelease("a-claim").GetPhase())

		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, s.mustRelease("never-made").GetPhase())
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, s.mustRelease("never-made").GetPhase())
	}},

	{"release.overtakes", claimer(1), "a claim that was released before it was made is never made", func(s *suite) {
		id := s.group(deployment("workers"))
		released := s.mustRelease("overtaken")
		require.Equal(s, "NeverMade", released.GetReason())
		require.Empty(s, released.GetNodeGroupId())
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "overtaken", Candidates: []string{id}})
		require.True(s, agenterrors.IsEnded(err), "a call that comes late: %v", err)
		end, ok := agenterrors.EndedAs(err)
		require.True(s, ok)
		require.Equal(s, "NeverMade", end.Reason)
		requireHistory(s, s.mustGet("overtaken"))
		require.NotContains(s, s.names(s.list("", false)), "overtaken")
		require.Zero(s, s.replicas(id))
	}},

	{"release.id-never-again", claimer(1), "an id that ended is never used again", func(s *suite) {
		id := s.group(deployment("workers"))
		s.running("a-claim", id)
		s.mustRelease("a-claim")
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "a-claim", Candidates: []string{id}})
		require.True(s, agenterrors.IsEnded(err), "while it is being released: %v", err)
		s.untilEnded("a-claim")
		_, err = s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "a-claim", Candidates: []string{id}})
		require.True(s, agenterrors.IsEnded(err), "%v", err)
		end, ok := agenterrors.EndedAs(err)
		require.True(s, ok)
		require.Equal(s, s.id("a-claim"), end.ClaimID)
		require.False(s, end.Releasing)
		require.Equal(s, "Released", end.Reason)
		s.untilReplicas(id, 0)
	}},

	{"release.remembered", claimer(1), "an ended claim is remembered with its history", func(s *suite) {
		id := s.group(deployment("workers"))
		s.running("a-claim", id)
		s.mustRelease("a-claim")
		ended := s.untilEnded("a-claim")
		requireHistory(s, ended)
		require.GreaterOrEqual(s, len(ended.GetHistory()), 3)
		require.Equal(s, id, ended.GetNodeGroupId())
		require.NotNil(s, ended.GetCreatedAt())
		require.NotNil(s, ended.GetReleasedAt())
		require.NotNil(s, ended.GetEndedAt())
	}},

	{"claims.not-found", reader(0), "a claim that was never made is NOT_FOUND", func(s *suite) {
		_, err := s.get("never-made")
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
		require.Equal(s, agenterrors.ReasonClaimNotFound, agenterrors.ReasonOf(err))
	}},
}

// createOnceThereIsRoom creates a claim, retrying while there is no room, and returns its ID. Every
// try uses a new ID, because a rejection may have ended the previous one.
func (s *suite) createOnceThereIsRoom(name, candidate string) string {
	s.Helper()
	var id string
	tries := 0
	s.eventually(name+" is claimed", func() error {
		tries++
		id = fmt.Sprintf("%s-%d", name, tries)
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Candidates: []string{candidate}})
		if err != nil {
			require.True(s, agenterrors.IsNoRoom(err), "%v", err)
		}
		return err
	})
	return id
}
