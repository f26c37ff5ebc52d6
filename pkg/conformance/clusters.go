package conformance

import (
	"errors"
	"fmt"
	"slices"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var clusterCases = []testCase{
	{"clusters.list", reader(0), "a list shows the Cluster, ordered by namespace and name, and its counts agree with each other", func(s *suite) {
		listed := s.listClusters(s.Client())
		keys := lo.Map(listed, func(c *agentv1alpha1.Cluster, _ int) string { return client.ClusterKey(c.GetRef()) })
		require.True(s, slices.IsSorted(keys), "%v", keys)
		require.Contains(s, keys, client.ClusterKey(s.Cluster()))
		for _, cluster := range listed {
			require.NotEmpty(s, cluster.GetUid())
			require.NotNil(s, cluster.GetCreatedAt())
			require.LessOrEqual(s, cluster.GetPendingClaims(), cluster.GetClaims())
		}
	}},

	{"clusters.snapshot", reader(0), "watch begins with what a list shows, and SYNCED", func(s *suite) {
		list := func() []string {
			return lo.Map(s.listClusters(s.Client()), func(c *agentv1alpha1.Cluster, _ int) string { return client.ClusterKey(c.GetRef()) })
		}
		sameAsListed(s, list, func() []string {
			stream, err := s.Client().Clusters.WatchClusters(s.bounded(), &agentv1alpha1.WatchClustersRequest{})
			require.NoError(s, err)
			return snapshot(s, stream, func(r *agentv1alpha1.WatchClustersResponse) string {
				if r.GetUpsert() == nil {
					return ""
				}
				return client.ClusterKey(r.GetUpsert().GetRef())
			})
		})
	}},

	{"clusters.own", reader(0, CallerCluster), "a Cluster's own identity sees its Cluster alone", func(s *suite) {
		listed := s.listClusters(s.Client())
		require.Len(s, listed, 1)
		require.True(s, proto.Equal(s.Cluster(), listed[0].GetRef()))
	}},

	{"clusters.stranger", reader(0, CallerStranger), "an identity of another Cluster sees nothing of this one", func(s *suite) {
		for _, cluster := range s.listClusters(s.Stranger()) {
			require.False(s, proto.Equal(s.Cluster(), cluster.GetRef()))
		}
	}},

	{"clusters.counts", fault(), "the counts of a Cluster follow its node groups, machines and claims", func(s *suite) {
		id := s.group(deployment("workers"))
		s.HoldMachines(s.TB, "workers", true)
		s.mustCreate("a-claim", id)
		s.untilCluster("a claim waits", func(c *agentv1alpha1.Cluster) bool {
			return c.GetNodeGroups() == 1 && c.GetMachines() == 0 && c.GetClaims() == 1 && c.GetPendingClaims() == 1
		})
		s.HoldMachines(s.TB, "workers", false)
		s.untilBound("a-claim")
		s.untilCluster("the claim has a machine", func(c *agentv1alpha1.Cluster) bool {
			return c.GetNodeGroups() == 1 && c.GetMachines() == 1 && c.GetClaims() == 1 && c.GetPendingClaims() == 0
		})
	}},

	{"clusters.shim", fault(), "a shim that synchronizes is connected", func(s *suite) {
		s.untilCluster("there is no shim yet", func(c *agentv1alpha1.Cluster) bool { return c.GetShim() == nil })
		_, err := s.sync(s.list(holder, false).GetToken())
		require.NoError(s, err)
		s.untilCluster("its shim is connected", func(c *agentv1alpha1.Cluster) bool {
			return c.GetShim().GetConnected() && c.GetShim().GetLastSync() != nil && c.GetShim().GetVersion() != ""
		})
	}},
}

func (s *suite) listClusters(c *client.Client) []*agentv1alpha1.Cluster {
	s.Helper()
	response, err := c.Clusters.ListClusters(s.bounded(), &agentv1alpha1.ListClustersRequest{})
	require.NoError(s, err)
	return response.GetClusters()
}

// untilCluster waits until the suite's Cluster is shown as wanted.
func (s *suite) untilCluster(what string, wanted func(*agentv1alpha1.Cluster) bool) {
	s.Helper()
	s.eventually(what, func() error {
		for _, cluster := range s.listClusters(s.Client()) {
			if proto.Equal(s.Cluster(), cluster.GetRef()) && wanted(cluster) {
				return nil
			} else if proto.Equal(s.Cluster(), cluster.GetRef()) {
				return fmt.Errorf("it is shown as %v", cluster)
			}
		}
		return errors.New("the Cluster is not listed")
	})
}
