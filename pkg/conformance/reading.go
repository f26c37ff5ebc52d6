package conformance

import (
	"fmt"
	"slices"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// These cases change nothing, so they can run in any Cluster.

var nodeGroupReadingCases = []testCase{
	{"nodegroups.list-as-got", reader(1), "a list is ordered by id, and shows each group as Get does", func(s *suite) {
		id := s.group(deployment("workers"))
		s.eventually("a list shows what Get shows", func() error {
			response, err := s.Client().NodeGroups.ListNodeGroups(s.bounded(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			ids := lo.Map(response.GetNodeGroups(), func(g *agentv1alpha1.NodeGroup, _ int) string { return g.GetId() })
			require.True(s, slices.IsSorted(ids), "%v", ids)
			require.Contains(s, ids, id)
			for _, listed := range response.GetNodeGroups() {
				require.True(s, proto.Equal(s.Cluster(), listed.GetCluster()))
				if got := s.nodeGroup(listed.GetId()); !proto.Equal(listed, got) {
					return fmt.Errorf("listed as %v, got as %v", listed, got)
				}
			}
			return nil
		})
	}},

	{"nodegroups.snapshot", reader(1), "watch begins with what a list shows, and SYNCED", func(s *suite) {
		s.group(deployment("workers"))
		list := func() []string {
			response, err := s.Client().NodeGroups.ListNodeGroups(s.bounded(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			return lo.Map(response.GetNodeGroups(), func(g *agentv1alpha1.NodeGroup, _ int) string { return g.GetId() })
		}
		sameAsListed(s, list, func() []string {
			stream, err := s.Client().NodeGroups.WatchNodeGroups(s.bounded(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			return snapshot(s, stream, func(r *agentv1alpha1.WatchNodeGroupsResponse) string { return r.GetUpsert().GetId() })
		})
	}},
}

var claimReadingCases = []testCase{
	{"claims.snapshot", reader(0), "watch begins with every claim that a list shows, ended ones too, and SYNCED", func(s *suite) {
		list := func() []string {
			response := s.list("", true)
			return lo.Map(response.GetClaims(), func(c *agentv1alpha1.Claim, _ int) string { return c.GetClaimId() })
		}
		sameAsListed(s, list, func() []string {
			stream, err := s.Client().Claims.WatchClaims(s.bounded(), &agentv1alpha1.WatchClaimsRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			return snapshot(s, stream, func(r *agentv1alpha1.WatchClaimsResponse) string { return r.GetUpsert().GetClaimId() })
		})
	}},
}

var machineReadingCases = []testCase{
	{"machines.snapshot", reader(0), "watch begins with what a list shows, ordered by name, and SYNCED", func(s *suite) {
		list := func() []string {
			response, err := s.Client().Machines.ListMachines(s.bounded(), &agentv1alpha1.ListMachinesRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			names := lo.Map(response.GetMachines(), func(m *agentv1alpha1.Machine, _ int) string { return m.GetName() })
			require.True(s, slices.IsSorted(names), "%v", names)
			return names
		}
		sameAsListed(s, list, func() []string {
			stream, err := s.Client().Machines.WatchMachines(s.bounded(), &agentv1alpha1.WatchMachinesRequest{Cluster: s.Cluster()})
			require.NoError(s, err)
			return snapshot(s, stream, func(r *agentv1alpha1.WatchMachinesResponse) string { return r.GetUpsert().GetName() })
		})
	}},
}

var serverReadingCases = []testCase{
	{"server.identity", reader(0), "status names the caller, its roles and the agent", func(s *suite) {
		response, err := s.Client().Status.GetStatus(s.bounded(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(s, err)
		require.Equal(s, "capi.agent.v1alpha1", response.GetApiVersion())
		require.NotEmpty(s, response.GetIdentity())
		require.NotEmpty(s, response.GetRoles())
		require.NotEmpty(s, response.GetAgentId())
		require.NotNil(s, response.GetTime())
		require.True(s, response.GetCachesSynced())
	}},

	{"server.features", reader(0), "status lists the served API packages and the features, each once", func(s *suite) {
		response, err := s.Client().Status.GetStatus(s.bounded(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(s, err)
		require.Contains(s, response.GetServedApiVersions(), response.GetApiVersion())
		require.Len(s, lo.Uniq(response.GetServedApiVersions()), len(response.GetServedApiVersions()))
		require.Empty(s, features.Missing(response.GetFeatures(), features.Baseline()))
		require.Len(s, lo.Uniq(response.GetFeatures()), len(response.GetFeatures()))
	}},
}

// sameAsListed waits until a snapshot has the same content as the lists before and after it.
func sameAsListed(s *suite, list, snapshot func() []string) {
	s.Helper()
	s.eventually("a snapshot is what a list shows", func() error {
		before := list()
		shown := snapshot()
		after := list()
		slices.Sort(before)
		slices.Sort(shown)
		slices.Sort(after)
		switch {
		case !slices.Equal(before, after):
			return fmt.Errorf("there was a change meanwhile: %v before and %v after", before, after)
		case !slices.Equal(shown, after):
			return fmt.Errorf("the snapshot shows %v, and the list %v", shown, after)
		}
		return nil
	})
}

// snapshot reads a stream until SYNCED. It returns the keys received by then.
func snapshot[T any, R interface {
	*T
	GetSynced() *agentv1alpha1.Synced
	GetHeartbeat() *agentv1alpha1.Heartbeat
}](s *suite, stream grpc.ServerStreamingClient[T], key func(*T) string) []string {
	s.Helper()
	keys := []string{}
	for {
		response, err := stream.Recv()
		require.NoError(s, err)
		switch r := R(response); {
		case r.GetSynced() != nil:
			return keys
		case r.GetHeartbeat() != nil:
		default:
			require.NotEmpty(s, key(response), "before SYNCED: %v", response)
			keys = append(keys, key(response))
		}
	}
}
