package server_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fleet"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// hasCluster sets a Cluster of the namespace fleet in the view.
func (f *fixture) hasCluster(name string, claims int32) {
	key := types.NamespacedName{Namespace: "fleet", Name: name}
	f.clusters.Set(fleet.All, fleet.Key(key), &agentv1alpha1.Cluster{Ref: protoconv.Cluster(key), Claims: claims})
}

// listed returns the names of the Clusters that a caller sees.
func (f *fixture) listed(c *client.Client) []string {
	f.Helper()
	response, err := c.Clusters.ListClusters(f.ctx(), &agentv1alpha1.ListClustersRequest{})
	require.NoError(f, err)
	return lo.Map(response.GetClusters(), func(c *agentv1alpha1.Cluster, _ int) string { return c.GetRef().GetName() })
}

func TestACallerSeesTheClustersThatItMayRead(t *testing.T) {
	policy, err := authz.ParsePolicy([]byte(`
identities:
- {id: spiffe://karpenter-capi/reader, roles: [reader], clusters: ["*/*"]}
- {id: spiffe://karpenter-capi/some, roles: [reader], clusters: [fleet/b*]}
- {id: spiffe://karpenter-capi/both, roles: [reader, autoscaler], clusters: [fleet/c, fleet/spoke]}
- {id: spiffe://karpenter-capi/admin, roles: [admin], allClusters: true}
`), "karpenter-capi")
	require.NoError(t, err)
	f := start(t, withRights(t, func() *authz.Policy { return policy }, clocktesting.NewFakePassiveClock(time.Now())))
	for _, name := range []string{"spoke", "b", "b2", "c"} {
		f.hasCluster(name, 0)
	}
	for identity, want := range map[string][]string{
		"reader": {"b", "b2", "c", "spoke"}, "admin": {"b", "b2", "c", "spoke"}, "some": {"b", "b2"}, "both": {"c", "spoke"},
		"cluster/fleet/spoke": {"spoke"}, "cluster/fleet/absent": {},
	} {
		require.Equal(t, want, f.listed(f.as("spiffe://karpenter-capi/"+identity)), identity)
	}
	_, err = f.as("spiffe://karpenter-capi/nobody").Clusters.ListClusters(f.ctx(), &agentv1alpha1.ListClustersRequest{})
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
}

// told returns the next event of a watch of Clusters as text.
func (f *fixture) told(stream grpc.ServerStreamingClient[agentv1alpha1.WatchClustersResponse]) string {
	f.Helper()
	response, err := stream.Recv()
	require.NoError(f, err)
	switch event := response.GetEvent().(type) {
	case *agentv1alpha1.WatchClustersResponse_Upsert:
		return fmt.Sprintf("%s has %d", event.Upsert.GetRef().GetName(), event.Upsert.GetClaims())
	case *agentv1alpha1.WatchClustersResponse_Removed:
		return event.Removed.GetNamespace() + "/" + event.Removed.GetName() + " is gone"
	default:
		require.Zero(f, response.GetSynced().GetGeneration(), "it would count changes of others")
		return fmt.Sprintf("%T", event)
	}
}

func TestAWatchOfClustersIsASnapshotAndThenChangesOfThoseAlone(t *testing.T) {
	f := start(t)
	f.hasCluster("other", 1)
	f.hasCluster("spoke", 2)
	own, err := f.cluster().Clusters.WatchClusters(f.ctx(), &agentv1alpha1.WatchClustersRequest{})
	require.NoError(t, err)
	all, err := f.as("spiffe://karpenter-capi/reader").Clusters.WatchClusters(f.ctx(), &agentv1alpha1.WatchClustersRequest{})
	require.NoError(t, err)
	const synced = "*agentv1alpha1.WatchClustersResponse_Synced"
	require.Equal(t, []string{"spoke has 2", synced}, []string{f.told(own), f.told(own)})
	require.Equal(t, []string{"other has 1", "spoke has 2", synced}, []string{f.told(all), f.told(all), f.told(all)})
	f.hasCluster("other", 3)
	require.Equal(t, "other has 3", f.told(all))
	f.clusters.Remove(fleet.All, "fleet/other")
	require.Equal(t, "fleet/other is gone", f.told(all))
	f.hasCluster("spoke", 4)
	require.Equal(t, "spoke has 4", f.told(all))
	require.Equal(t, "spoke has 4", f.told(own), "nothing of the other Cluster came before")
}

func TestAMirrorFollowsClusters(t *testing.T) {
	f := start(t)
	f.hasCluster("spoke", 1)
	mirror := f.as("spiffe://karpenter-capi/reader").MirrorClusters()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- mirror.Run(ctx) }()
	has := func(what, key string, want bool) {
		require.Eventually(t, func() bool { _, found := mirror.Get(key); return found == want }, patience, time.Millisecond, what)
	}
	has("the snapshot", "fleet/spoke", true)
	f.hasCluster("other", 1)
	has("another Cluster", "fleet/other", true)
	f.clusters.Remove(fleet.All, "fleet/other")
	has("it is gone", "fleet/other", false)
	cancel()
	require.NoError(t, <-ended)
}

// A stream is of what the caller could read when it began. The next one shows the rest.
func TestAWatchOfClustersEndsWhenItsCallerMayReadOthers(t *testing.T) {
	policies := &atomic.Pointer[authz.Policy]{}
	set := func(text string) {
		policies.Store(policyOf(t, text))
	}
	set(readerPolicy)
	f := start(t, withRights(t, policies.Load, clocktesting.NewFakePassiveClock(time.Now())))
	f.hasCluster("other", 1)
	reader := f.as("spiffe://karpenter-capi/reader")
	stream, err := reader.Clusters.WatchClusters(f.ctx(), &agentv1alpha1.WatchClustersRequest{})
	require.NoError(t, err)
	require.Equal(t, "*agentv1alpha1.WatchClustersResponse_Synced", f.told(stream))
	set("identities:\n- {id: spiffe://karpenter-capi/reader, roles: [reader], clusters: [fleet/spoke, fleet/other]}\n")
	_, err = stream.Recv()
	require.Equal(t, agenterrors.ReasonRightsChanged, agenterrors.ReasonOf(err), "%v", err)
	require.Equal(t, []string{"other"}, f.listed(reader))
}

func TestStatusListsVersionsAndFeatures(t *testing.T) {
	f := start(t)
	for identity, knows := range map[string]bool{"cluster/fleet/spoke": true, "nobody": false} {
		response, err := f.as("spiffe://karpenter-capi/"+identity).Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
		if !knows {
			require.Empty(t, response.GetServedApiVersions())
			require.Empty(t, response.GetFeatures())
			continue
		}
		require.Equal(t, []string{"capi.agent.v1alpha1"}, response.GetServedApiVersions())
		require.Contains(t, response.GetFeatures(), "clusters")
		require.NotContains(t, response.GetFeatures(), "certificates", "it has no issuer")
		require.NotContains(t, response.GetFeatures(), "cluster-autoscaler", "it serves none")
	}
}

// The versions of an agent reveal its known vulnerabilities, and a generation what goes on in a
// Cluster.
func TestStatusTellsAnEndedOnboardingNothing(t *testing.T) {
	f := start(t, func(_ *fixture, c *server.Config) {
		c.Onboarded = func(context.Context, types.NamespacedName) (string, bool, error) { return "second", true, nil }
	})
	f.nodeGroups.Set(spoke, "fleet/workers", &agentv1alpha1.NodeGroup{Id: "fleet/workers"})
	for onboarding, current := range map[string]bool{"first": false, "second": true} {
		response, err := f.as("spiffe://karpenter-capi/cluster/fleet/spoke/"+onboarding).Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
		require.Equal(t, "spiffe://karpenter-capi/cluster/fleet/spoke", response.GetIdentity())
		require.NotNil(t, response.GetTime())
		for field, set := range map[string]bool{
			"version": response.GetVersion() != "", "commit": response.GetCommit() != "", "features": len(response.GetFeatures()) > 0,
			"served API versions": len(response.GetServedApiVersions()) > 0, "generation": response.GetCatalogueGeneration() > 0,
			"roles": len(response.GetRoles()) > 0, "Clusters": len(response.GetClusters()) > 0,
		} {
			require.Equal(t, current, set, "%s of the %s onboarding", field, onboarding)
		}
	}
}
