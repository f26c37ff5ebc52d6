package conformance

import (
	"slices"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// servesNodePools skips the rest of a case if the agent does not list the feature. It must not
// serve the methods then.
func servesNodePools(s *suite) {
	s.Helper()
	if publishes(s) {
		return
	}
	_, err := s.Client().NodePools.ListPublishedObjects(s.bounded(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: s.Cluster()})
	require.Equal(s, codes.Unimplemented, status.Code(err), "%v", err)
	s.Skip("the agent publishes no NodePools")
}

var nodePoolCases = []testCase{
	{"nodepools.snapshot", reader(0), "watch begins with what a list shows, ordered by kind and name, and SYNCED", func(s *suite) {
		servesNodePools(s)
		list := func() []string {
			response, err := s.Client().NodePools.ListPublishedObjects(s.bounded(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			keys := lo.Map(response.GetObjects(), func(o *agentv1alpha1.PublishedObject, _ int) string { return client.PublishedKey(o) })
			require.True(s, slices.IsSorted(keys), "%v", keys)
			require.True(s, slices.IsSorted(response.GetSets()), "%v", response.GetSets())
			for _, object := range response.GetObjects() {
				require.Contains(s, response.GetSets(), object.GetSet())
			}
			return keys
		}
		sameAsListed(s, list, func() []string {
			stream, err := s.Client().NodePools.WatchPublishedObjects(s.bounded(), &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			return snapshot(s, stream, func(r *agentv1alpha1.WatchPublishedObjectsResponse) string { return client.PublishedKey(r.GetUpsert()) })
		})
	}},

	{"nodepools.strangers", reader(0, CallerStranger), "other identities neither see nor report anything", func(s *suite) {
		servesNodePools(s)
		_, err := s.Stranger().NodePools.ListPublishedObjects(s.bounded(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: s.Cluster()})
		require.Equal(s, codes.PermissionDenied, status.Code(err), "%v", err)
		_, err = s.Stranger().NodePools.ReportNodePools(s.bounded(), &agentv1alpha1.ReportNodePoolsRequest{Cluster: s.Cluster()})
		require.Equal(s, codes.PermissionDenied, status.Code(err), "%v", err)
		stream, err := s.Stranger().NodePools.WatchPublishedObjects(s.bounded(), &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		_, err = stream.Recv()
		require.Equal(s, codes.PermissionDenied, status.Code(err), "%v", err)
	}},

	{"nodepools.report", fault(), "a report is accepted, again and again if nothing changes, and has each object once", func(s *suite) {
		servesNodePools(s)
		request := &agentv1alpha1.ReportNodePoolsRequest{
			Cluster: s.Cluster(), NodePools: []*agentv1alpha1.NodePoolStatus{{Name: "default", Ready: true, Nodes: 2, PricePerHour: "0.5"}},
		}
		for range 3 {
			_, err := s.Client().NodePools.ReportNodePools(s.bounded(), request)
			require.NoError(s, err)
		}
		request.NodePools = append(request.NodePools, request.GetNodePools()[0])
		_, err := s.Client().NodePools.ReportNodePools(s.bounded(), request)
		requireViolation(s, err, "node_pools[1].name")
		_, err = s.Admin().NodePools.ReportNodePools(s.bounded(), &agentv1alpha1.ReportNodePoolsRequest{Cluster: s.Cluster()})
		require.Equal(s, codes.PermissionDenied, status.Code(err), "only the spoke knows its NodePools: %v", err)
	}},
}
