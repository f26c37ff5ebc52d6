package fakeagent_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Another cluster is a Cluster's spoke from the first set on that has one of its claims.
func TestOneClusterSendsSetsAndMakesClaims(t *testing.T) {
	agent, cluster := start(t), fakeagent.DefaultCluster()
	client := agent.ClientFor(cluster) // only a Cluster's own shim counts
	sync := func(spoke string, live ...string) error {
		listed, err := client.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: cluster, Holder: "karpenter"})
		require.NoError(t, err)
		_, err = client.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: cluster, Holder: "karpenter", Token: listed.GetToken(), SpokeId: spoke, LiveClaimIds: live,
		})
		return err
	}
	create := func(id, spoke string) error {
		_, err := client.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: cluster, ClaimId: id, Holder: "karpenter", SpokeId: spoke, Candidates: []string{workers},
		})
		return err
	}
	require.NoError(t, sync(""))
	require.NoError(t, sync("first"))
	require.NoError(t, sync(""))
	for _, err := range []error{sync("second"), create("a-claim", "second")} {
		require.True(t, agenterrors.IsSpokeMismatch(err), "%v", err)
	}
	require.NoError(t, create("a-claim", "first"))
	require.NoError(t, create("a-claim", "second"), "the claim exists already")
	require.NoError(t, create("another-claim", ""))
	require.True(t, agenterrors.IsSpokeMismatch(sync("second")))

	require.NoError(t, sync("second", "a-claim"))
	require.NoError(t, create("third-claim", "second"))
	require.True(t, agenterrors.IsSpokeMismatch(create("fourth-claim", "first")))
}

func TestAnOwnerThatIsBackIsMissedNoMore(t *testing.T) {
	agent, cluster := start(t), fakeagent.DefaultCluster()
	client := agent.ClientFor(cluster)
	sync := func(live ...string) {
		t.Helper()
		listed, err := client.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: cluster, Holder: "karpenter"})
		require.NoError(t, err)
		_, err = client.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: cluster, Holder: "karpenter", Token: listed.GetToken(), SpokeId: "first", LiveClaimIds: live,
			Nodes: []*agentv1alpha1.NodeReport{{ProviderId: agent.Claim(cluster, "lost").GetMachine().GetProviderId()}},
		})
		require.NoError(t, err)
	}
	for _, id := range []string{"kept", "lost"} {
		_, err := client.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: cluster, ClaimId: id, Holder: "karpenter", Candidates: []string{workers},
		})
		require.NoError(t, err)
	}
	agent.Provision(cluster, "lost", "sim://lost")
	reason := func() string { return agent.Claim(cluster, "lost").GetReason() }
	sync("kept", "lost")
	sync("kept")
	require.Equal(t, claimreasons.OwnerMissing, reason())
	sync("kept", "lost")
	require.Equal(t, claimreasons.Bound, reason())
}
