package conformance

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var nodeGroupCases = []testCase{
	{"nodegroups.none", fault(), "a Cluster without node groups has an empty list", func(s *suite) {
		response, err := s.Client().NodeGroups.ListNodeGroups(s.bounded(),
			&agentv1alpha1.ListNodeGroupsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		require.Empty(s, response.GetNodeGroups())
	}},

	{"nodegroups.described", fault(), "shows what the user wrote", func(s *suite) {
		id := s.group(deployment("big-spot",
			labelled(map[string]string{"team": "web"}),
			minSize(1), maxSize(7), replicas(2), inZone("zone-a"),
			annotated(nodeLabelsAnnotation, "node.kubernetes.io/instance-type=big,karpenter.sh/capacity-type=spot,pool=blue"),
			annotated(nodeTaintsAnnotation, "dedicated=web:NoSchedule"),
		))
		require.Equal(s, s.Cluster().GetNamespace()+"/big-spot", id)

		group := s.nodeGroup(id)
		require.Equal(s, id, group.GetId())
		require.True(s, proto.Equal(s.Cluster(), group.GetCluster()))
		require.Equal(s, "big-spot", group.GetName())
		require.Equal(s, "web", group.GetLabels()["team"])
		require.Equal(s, "big", group.GetInstanceType())
		require.Equal(s, agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT, group.GetCapacityType())
		require.Equal(s, "blue", group.GetNodeLabels()["pool"])
		require.Equal(s, "zone-a", group.GetZone())
		require.Len(s, group.GetTaints(), 1)
		require.Equal(s, "dedicated", group.GetTaints()[0].GetKey())
		require.Equal(s, "web", group.GetTaints()[0].GetValue())
		require.Equal(s, "NoSchedule", group.GetTaints()[0].GetEffect())
		s.requireQuantity(group, "cpu", "4")
		s.requireQuantity(group, "memory", "16Gi")
		s.requireQuantity(group, "pods", "110")
		require.EqualValues(s, 1, group.GetMinSize())
		require.NotNil(s, group.MaxSize)
		require.EqualValues(s, 7, group.GetMaxSize())
		require.EqualValues(s, 2, group.GetReplicas())
		require.True(s, group.GetAvailability().GetAvailable(), "%v", group.GetAvailability())
		require.Empty(s, group.GetProblems())
		require.NotNil(s, group.GetCreatedAt())
		require.Equal(s, agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, group.GetSources()["capacity.cpu"].GetKind())
	}},

	{"nodegroups.defaults", fault(), "is on-demand, unlimited and available by default", func(s *suite) {
		group := s.nodeGroup(s.group(deployment("plain")))
		require.Equal(s, agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND, group.GetCapacityType())
		require.Equal(s, "plain", group.GetInstanceType())
		require.Nil(s, group.MaxSize)
		require.Zero(s, group.GetMinSize())
		require.Zero(s, group.GetReplicas())
		require.NotEmpty(s, group.GetArchitecture())
		require.NotEmpty(s, group.GetOperatingSystem())
		require.True(s, group.GetAvailability().GetAvailable())
		require.Positive(s, group.GetPrice().GetPerHour())
		require.Equal(s, agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE, group.GetSources()["price"].GetKind())
	}},

	{"nodegroups.price", fault(), "has the price that the user wrote, and an estimate beside one that cannot be used", func(s *suite) {
		group := s.nodeGroup(s.group(deployment("priced", annotated(priceAnnotation, " 0.25 "))))
		require.InDelta(s, 0.25, group.GetPrice().GetPerHour(), 0)
		require.Equal(s, agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, group.GetSources()["price"].GetKind())

		for _, bad := range []string{"cheap", "-1", "NaN", "Inf"} {
			s.UpdateNodeGroup(s.TB, deployment("priced", annotated(priceAnnotation, bad)))
			group = s.untilGroup(group.GetId(), "has a problem with "+bad, func(g *agentv1alpha1.NodeGroup) bool {
				return len(g.GetProblems()) == 1 && g.GetProblems()[0].GetValue() == bad
			})
			require.Equal(s, "metadata.annotations["+priceAnnotation+"]", group.GetProblems()[0].GetField())
			require.Positive(s, group.GetPrice().GetPerHour())
			require.Equal(s, agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE, group.GetSources()["price"].GetKind())
		}
	}},

	{"nodegroups.price-annotations", fault(), "reads the price from either annotation, and says which counts", func(s *suite) {
		group := s.nodeGroup(s.group(deployment("priced", annotated(otherPriceAnnotation, "0.5"))))
		require.InDelta(s, 0.5, group.GetPrice().GetPerHour(), 0)
		require.Equal(s, otherPriceAnnotation, group.GetSources()["price"].GetDetail())
		require.Empty(s, group.GetProblems())

		s.UpdateNodeGroup(s.TB, deployment("priced", annotated(otherPriceAnnotation, "0.5"), annotated(priceAnnotation, "0.25")))
		group = s.untilGroup(group.GetId(), "has the other price", func(g *agentv1alpha1.NodeGroup) bool {
			return g.GetPrice().GetPerHour() == 0.25 && len(g.GetProblems()) == 1
		})
		require.Equal(s, priceAnnotation, group.GetSources()["price"].GetDetail())
		require.Equal(s, "metadata.annotations["+otherPriceAnnotation+"]", group.GetProblems()[0].GetField())
	}},

	{"nodegroups.list", fault(), "lists every group, ordered by id, as Get shows it", func(s *suite) {
		ids := []string{s.group(deployment("c")), s.group(deployment("a")), s.group(deployment("b"))}
		slices.Sort(ids)
		response, err := s.Client().NodeGroups.ListNodeGroups(s.bounded(),
			&agentv1alpha1.ListNodeGroupsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		require.Len(s, response.GetNodeGroups(), len(ids))
		for i, id := range ids {
			require.Equal(s, id, response.GetNodeGroups()[i].GetId())
			require.Equal(s, s.nodeGroup(id).GetCapacity(), response.GetNodeGroups()[i].GetCapacity())
		}
	}},

	{"nodegroups.not-found", reader(0), "a group that does not exist is NOT_FOUND", func(s *suite) {
		_, err := s.Client().NodeGroups.GetNodeGroup(s.bounded(), &agentv1alpha1.GetNodeGroupRequest{
			Cluster: s.Cluster(), Id: s.Cluster().GetNamespace() + "/missing",
		})
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
		require.Equal(s, agenterrors.ReasonNodeGroupNotFound, agenterrors.ReasonOf(err))
	}},

	{"nodegroups.changed", fault(), "a changed MachineDeployment changes its group and raises the generation", func(s *suite) {
		id := s.group(deployment("workers", maxSize(1)))
		before, err := s.Client().NodeGroups.ListNodeGroups(s.bounded(),
			&agentv1alpha1.ListNodeGroupsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		s.UpdateNodeGroup(s.TB, deployment("workers", maxSize(5), annotated(cpuAnnotation, "8")))
		group := s.untilGroup(id, "has max size 5", func(g *agentv1alpha1.NodeGroup) bool { return g.GetMaxSize() == 5 })
		s.requireQuantity(group, "cpu", "8")
		after, err := s.Client().NodeGroups.ListNodeGroups(s.bounded(),
			&agentv1alpha1.ListNodeGroupsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		require.Greater(s, after.GetGeneration(), before.GetGeneration())
	}},

	{"nodegroups.watch", fault(), "watch sends a snapshot, SYNCED, and then what appears, changes and goes", func(s *suite) {
		first, second := s.group(deployment("first")), s.group(deployment("second"))
		stream, err := s.Client().NodeGroups.WatchNodeGroups(s.bounded(),
			&agentv1alpha1.WatchNodeGroupsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		next := func() *agentv1alpha1.WatchNodeGroupsResponse {
			for {
				response, err := stream.Recv()
				require.NoError(s, err)
				if response.GetHeartbeat() == nil {
					return response
				}
			}
		}
		snapshot := map[string]bool{}
		for {
			response := next()
			if response.GetSynced() != nil {
				break
			}
			require.NotNil(s, response.GetUpsert(), "before SYNCED: %v", response)
			snapshot[response.GetUpsert().GetId()] = true
		}
		require.Equal(s, map[string]bool{first: true, second: true}, snapshot)

		third := s.group(deployment("third"))
		skipUntil(func() bool { return next().GetUpsert().GetId() == third })
		s.UpdateNodeGroup(s.TB, deployment("first", maxSize(3)))
		skipUntil(func() bool {
			group := next().GetUpsert()
			return group.GetId() == first && group.GetMaxSize() == 3
		})
		s.DeleteNodeGroup(s.TB, "second")
		skipUntil(func() bool { return next().GetRemovedId() == second })
		_, err = s.Client().NodeGroups.GetNodeGroup(s.bounded(),
			&agentv1alpha1.GetNodeGroupRequest{Cluster: s.Cluster(), Id: second})
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
	}},

	{"nodegroups.heartbeat", reader(0), "a quiet watch sends heartbeats", func(s *suite) {
		stream, err := s.Client().NodeGroups.WatchNodeGroups(s.bounded(),
			&agentv1alpha1.WatchNodeGroupsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		for {
			response, err := stream.Recv()
			require.NoError(s, err)
			if heartbeat := response.GetHeartbeat(); heartbeat != nil {
				require.NotNil(s, heartbeat.GetTime())
				return
			}
		}
	}},

	{"nodegroups.mirror", claimer(1), "a mirror follows", func(s *suite) {
		id := s.group(deployment("workers"))
		mirror := s.Client().MirrorNodeGroups(s.Cluster())
		done := make(chan error, 1)
		ctx := s.bounded()
		go func() { done <- mirror.Run(ctx) }()
		require.NoError(s, mirror.WaitForSync(ctx))
		_, ok := mirror.Get(id)
		require.True(s, ok)
		s.mustCreate("claim", id)
		s.eventually("the mirror shows the replica", func() error {
			if group, _ := mirror.Get(id); group.GetReplicas()-s.replicasBefore[id] != 1 {
				return fmt.Errorf("it shows %v", group)
			}
			return nil
		})
	}},

	{"nodegroups.problems", fault(), "a value that cannot be used is a problem of its own group alone", func(s *suite) {
		bad := s.group(deployment("bad",
			annotated(cpuAnnotation, "lots"), annotated(memoryAnnotation, "-5Gi"), annotated(minSizeAnnotation, "-3")))
		good := s.group(deployment("good"))

		group := s.untilGroup(bad, "has its problems", func(g *agentv1alpha1.NodeGroup) bool { return len(g.GetProblems()) >= 3 })
		for key, value := range map[string]string{cpuAnnotation: "lots", memoryAnnotation: "-5Gi", minSizeAnnotation: "-3"} {
			i := slices.IndexFunc(group.GetProblems(), func(p *agentv1alpha1.Problem) bool {
				return strings.Contains(p.GetField(), key)
			})
			require.GreaterOrEqual(s, i, 0, "no problem names %s: %v", key, group.GetProblems())
			require.Equal(s, value, group.GetProblems()[i].GetValue())
			require.NotEmpty(s, group.GetProblems()[i].GetMessage())
		}
		require.GreaterOrEqual(s, group.GetMinSize(), int32(0))
		for name, quantity := range group.GetCapacity() {
			q, err := resource.ParseQuantity(quantity)
			require.NoError(s, err, name)
			require.GreaterOrEqual(s, q.Sign(), 0, name)
		}

		require.Empty(s, s.nodeGroup(good).GetProblems())
		s.mustCreate("on-good", good)
	}},

	{"nodegroups.bad-max-size", fault(), "an unreadable max size blocks growth", func(s *suite) {
		id := s.group(deployment("bad", annotated(maxSizeAnnotation, "-1")))
		group := s.untilGroup(id, "is not available", func(g *agentv1alpha1.NodeGroup) bool { return !g.GetAvailability().GetAvailable() })
		require.Equal(s, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID, group.GetAvailability().GetReason())
		_, err := s.create(s.Client(), &agentv1alpha1.CreateClaimRequest{ClaimId: "claim", Candidates: []string{id}})
		require.True(s, agenterrors.IsRefused(err), "%v", err)
		rejections := agenterrors.Rejections(err)
		require.Len(s, rejections, 1)
		require.Equal(s, agenterrors.ReasonNotOpen, rejections[0].Reason)
		require.Equal(s, id, rejections[0].NodeGroup)
		require.Zero(s, s.nodeGroup(id).GetReplicas())
	}},
}

func (s *suite) requireQuantity(group *agentv1alpha1.NodeGroup, name, expected string) {
	s.Helper()
	actual, err := resource.ParseQuantity(group.GetCapacity()[name])
	require.NoError(s, err, "capacity %v", group.GetCapacity())
	require.Zero(s, actual.Cmp(resource.MustParse(expected)), "%s is %s, not %s", name, group.GetCapacity()[name], expected)
}
