package conformance

import (
	"strings"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var listingCases = []testCase{
	{"listing.by-holder", autoscaler(), "claims by holder, oldest first, with a token for a named holder only", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("mine-1", id)
		s.mustCreateFor(otherHolder, "theirs", id)
		s.mustCreate("mine-2", id)

		require.ElementsMatch(s, []string{"mine-1", "mine-2"}, s.names(s.list(holder, false)))
		require.Equal(s, []string{"theirs"}, s.names(s.list(otherHolder, false)))
		require.ElementsMatch(s, []string{"mine-1", "theirs", "mine-2"}, s.names(s.list("", false)))
		require.Empty(s, s.names(s.list("nobody", false)))
		require.NotEmpty(s, s.list(holder, false).GetToken())
		require.Empty(s, s.list("", false).GetToken())

		all := s.list("", false).GetClaims()
		for i := 1; i < len(all); i++ {
			require.False(s, all[i].GetCreatedAt().AsTime().Before(all[i-1].GetCreatedAt().AsTime()), "out of order: %v", all)
		}
	}},

	{"listing.ended", claimer(1), "ended claims only when asked for", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("ended", id)
		s.mustRelease("ended")
		s.untilEnded("ended")
		s.mustCreate("live", id)
		require.Equal(s, []string{"live"}, s.names(s.list(holder, false)))
		require.ElementsMatch(s, []string{"ended", "live"}, s.names(s.list(holder, true)))
	}},

	{"listing.watch", autoscaler(), "watch sends a snapshot with ended claims, SYNCED, and every change of each claim", func(s *suite) {
		id := s.group(deployment("workers"))
		s.mustCreate("ended", id)
		s.mustRelease("ended")
		s.untilEnded("ended")
		s.mustCreate("first", id)
		s.mustCreateFor(otherHolder, "theirs", id)

		next := s.watchClaims(s.Client(), holder)
		snapshot := map[string]bool{}
		for {
			response := next()
			if response.GetSynced() != nil {
				break
			}
			require.NotNil(s, response.GetUpsert(), "before SYNCED: %v", response)
			snapshot[strings.TrimPrefix(response.GetUpsert().GetClaimId(), s.prefix)] = true
		}
		require.Equal(s, map[string]bool{"ended": true, "first": true}, snapshot)

		s.running("second", id)
		s.mustRelease("second")
		phase := agentv1alpha1.ClaimPhase_CLAIM_PHASE_UNSPECIFIED
		seen := false
		for phase != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
			claim := next().GetUpsert()
			require.NotEqual(s, s.id("theirs"), claim.GetClaimId())
			if claim.GetClaimId() != s.id("second") {
				continue
			}
			require.GreaterOrEqual(s, claim.GetPhase(), phase, "phases go one way")
			phase = claim.GetPhase()
			seen = seen || claim.GetMachine().GetNodeName() != ""
			switch phase {
			case agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND:
				requireHistory(s, claim)
			case agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
				require.Empty(s, claim.GetHistory(), "of an ended claim it is in GetClaim and ListClaims alone")
			default:
			}
		}
		require.True(s, seen, "the claim was sent again when its machine got its Node")
	}},
}

func (s *suite) mustCreateFor(holder, id string, candidates ...string) {
	s.Helper()
	_, err := s.create(s.as(holder), &agentv1alpha1.CreateClaimRequest{ClaimId: id, Holder: holder, Candidates: candidates})
	require.NoError(s, err)
}

func (s *suite) list(holder string, includeEnded bool) *agentv1alpha1.ListClaimsResponse {
	s.Helper()
	response, err := s.Client().Claims.ListClaims(s.bounded(), &agentv1alpha1.ListClaimsRequest{
		Cluster: s.Cluster(), Holder: holder, IncludeEnded: includeEnded,
	})
	require.NoError(s, err)
	return response
}

// names returns the case's names of the claims in the response.
func (s *suite) names(response *agentv1alpha1.ListClaimsResponse) []string {
	return lo.FilterMap(response.GetClaims(), func(c *agentv1alpha1.Claim, _ int) (string, bool) {
		return strings.CutPrefix(c.GetClaimId(), s.prefix)
	})
}

// watchClaims returns a function that returns the next event of the case's claims, skipping
// heartbeats.
func (s *suite) watchClaims(c *client.Client, holder string) func() *agentv1alpha1.WatchClaimsResponse {
	s.Helper()
	var stream grpc.ServerStreamingClient[agentv1alpha1.WatchClaimsResponse]
	stream, err := c.Claims.WatchClaims(s.bounded(), &agentv1alpha1.WatchClaimsRequest{Cluster: s.Cluster(), Holder: holder})
	require.NoError(s, err)
	return func() *agentv1alpha1.WatchClaimsResponse {
		s.Helper()
		for {
			response, err := stream.Recv()
			require.NoError(s, err)
			of := response.GetUpsert().GetClaimId() + response.GetRemovedId()
			if response.GetHeartbeat() == nil && (of == "" || strings.HasPrefix(of, s.prefix)) {
				return response
			}
		}
	}
}
