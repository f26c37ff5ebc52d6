package conformance

import (
	"fmt"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var syncCases = []testCase{
	{"sync.collects", fault(), "collects what is not in the live set, of this holder alone", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("alive", id)
		s.mustCreate("orphan", id)
		s.mustCreateFor(otherHolder, "theirs", id)
		s.eventually("the orphan is collected", func() error {
			response, err := s.sync(s.list(holder, false).GetToken(), "alive")
			require.NoError(s, err)
			require.NotContains(s, response.GetCollectedClaimIds(), "alive")
			require.NotContains(s, response.GetCollectedClaimIds(), "theirs")
			require.Empty(s, response.GetUnknownClaimIds())
			if !slices.Contains(response.GetCollectedClaimIds(), "orphan") {
				return fmt.Errorf("collected %v", response.GetCollectedClaimIds())
			}
			return nil
		})
		s.untilEnded("orphan")
		for _, name := range []string{"alive", "theirs"} {
			require.Less(s, s.mustGet(name).GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, name)
		}
		s.untilReplicas(id, 2)
	}},

	{"sync.younger", fault(), "never collects a claim that is younger than the token", func(s *suite) {
		id := s.group(deployment("workers"))
		token := s.list(holder, false).GetToken()
		s.mustCreate("young", id)
		response, err := s.sync(token)
		require.NoError(s, err)
		require.Empty(s, response.GetCollectedClaimIds())
		require.Less(s, s.mustGet("young").GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
	}},

	{"sync.unknown", fault(), "says which members of the set it does not know", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("alive", id)
		s.mustCreate("ended", id)
		s.mustRelease("ended")
		s.untilEnded("ended")
		response, err := s.sync(s.list(holder, false).GetToken(), "alive", "ended", "never-made")
		require.NoError(s, err)
		require.Empty(s, response.GetCollectedClaimIds())
		require.ElementsMatch(s, []string{"ended", "never-made"}, response.GetUnknownClaimIds())
	}},

	{"sync.nodes", fault(), "takes reports about Nodes", func(s *suite) {
		id := s.group(deployment("workers"))
		claim := s.running("alive", id)
		_, err := s.Client().Claims.SyncClaims(s.bounded(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: s.Cluster(), Holder: holder, Token: s.list(holder, false).GetToken(), LiveClaimIds: []string{"alive"},
			SpokeId: spoke, NodesComplete: true,
			Nodes: []*agentv1alpha1.NodeReport{
				{
					ProviderId:  claim.GetMachine().GetProviderId(),
					Capacity:    map[string]string{"cpu": "4", "memory": "16Gi"},
					Allocatable: map[string]string{"cpu": "3900m", "memory": "15Gi"},
				},
				{ProviderId: "strange://node", Capacity: map[string]string{"cpu": "lots", "": "-1"}, Unregistered: true},
			},
		})
		require.NoError(s, err)
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, s.mustGet("alive").GetPhase())
	}},

	{"sync.no-spoke", fault(), "collects nothing for a set that does not say where it was read", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("orphan", id)
		s.mustCreate("another", id)
		// While the claims are too young, a set that names its cluster would not collect them
		// either.
		s.eventually("the other orphan is collected", func() error {
			response, err := s.syncFrom("", s.list(holder, false).GetToken())
			require.NoError(s, err)
			require.Empty(s, response.GetCollectedClaimIds())
			require.Empty(s, response.GetKeptClaimIds())
			response, err = s.sync(s.list(holder, false).GetToken(), "orphan")
			require.NoError(s, err)
			if !slices.Contains(response.GetCollectedClaimIds(), "another") {
				return fmt.Errorf("collected %v", response.GetCollectedClaimIds())
			}
			return nil
		})
		require.Less(s, s.mustGet("orphan").GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
	}},

	{"sync.other-spoke", fault(), "refuses a set that was read in another cluster", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("alive", id)
		_, err := s.syncFrom("another-spoke", s.list(holder, false).GetToken(), "not-here")
		require.True(s, agenterrors.IsRefused(err), "%v", err)
		require.True(s, agenterrors.IsSpokeMismatch(err), "%v", err)
		require.Less(s, s.mustGet("alive").GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
	}},

	{"sync.first-spoke", fault(), "refuses another cluster's set where the first one's had no claims", func(s *suite) {
		_, err := s.sync(s.list(holder, false).GetToken())
		require.NoError(s, err)
		_, err = s.syncFrom("", s.list(holder, false).GetToken())
		require.NoError(s, err)
		// Once: an attempt that is accepted makes the other cluster the known one.
		_, err = s.syncFrom("another-spoke", s.list(holder, false).GetToken(), "not-here")
		require.True(s, agenterrors.IsSpokeMismatch(err), "%v", err)
		_, err = s.sync(s.list(holder, false).GetToken())
		require.NoError(s, err)
	}},

	{"sync.registered", fault(), "keeps a claim whose Node was registered, until it is released", func(s *suite) {
		id := s.group(deployment("workers"))
		claim := s.running("registered", id)
		_, err := s.Client().Claims.SyncClaims(s.bounded(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: s.Cluster(), Holder: holder, Token: s.list(holder, false).GetToken(), LiveClaimIds: []string{"registered"},
			SpokeId: spoke, Nodes: []*agentv1alpha1.NodeReport{{ProviderId: claim.GetMachine().GetProviderId()}}, NodesComplete: true,
		})
		require.NoError(s, err)
		s.eventually("the claim is known to be kept", func() error {
			response, err := s.sync(s.list(holder, false).GetToken())
			require.NoError(s, err)
			require.Empty(s, response.GetCollectedClaimIds())
			if !slices.Contains(response.GetKeptClaimIds(), "registered") {
				return fmt.Errorf("kept %v", response.GetKeptClaimIds())
			}
			return nil
		})
		kept := s.mustGet("registered")
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, kept.GetPhase())
		require.Equal(s, "OwnerMissing", kept.GetReason())
		s.mustRelease("registered")
		s.untilEnded("registered")
	}},

	{"sync.other-token", fault(), "refuses a token of another holder", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("alive", id)
		_, err := s.sync(s.list(otherHolder, false).GetToken())
		requireViolation(s, err, "token")
		require.Equal(s, agenterrors.ReasonInvalidToken, agenterrors.ReasonOf(err))
	}},

	{"sync.made-up-token", fault(), "refuses a token that ListClaims did not make", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("alive", id)
		for _, token := range []string{"made-up", "e30", "bnVsbA", "%%%"} {
			_, err := s.sync(token)
			require.True(s, agenterrors.IsInvalidArgument(err), "%s: %v", token, err)
			requireViolation(s, err, "token")
		}
		require.Less(s, s.mustGet("alive").GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
	}},

	{"sync.stale-token", fault(), "refuses a token that is too old", func(s *suite) {
		ageing, ok := s.Env.(Ageing)
		if !ok {
			s.Skip("this environment cannot age tokens")
		}
		id := s.group(deployment("workers"))
		s.mustCreate("alive", id)
		_, err := s.sync(ageing.StaleToken(s.TB, holder))
		require.True(s, agenterrors.IsRefused(err), "%v", err)
		require.True(s, agenterrors.IsStaleToken(err), "%v", err)
		require.Less(s, s.mustGet("alive").GetPhase(), agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
	}},
}

// spoke is the cluster that the suite's claims are made from.
const spoke = "a-spoke"

func (s *suite) sync(token string, live ...string) (*agentv1alpha1.SyncClaimsResponse, error) {
	return s.syncFrom(spoke, token, live...)
}

func (s *suite) syncFrom(spoke, token string, live ...string) (*agentv1alpha1.SyncClaimsResponse, error) {
	return repeat(s, func() (*agentv1alpha1.SyncClaimsResponse, error) {
		return s.Client().Claims.SyncClaims(s.bounded(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: s.Cluster(), Holder: holder, Token: token, LiveClaimIds: live, SpokeId: spoke,
		})
	})
}
