package server

import (
	"context"

	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type nodeGroups struct {
	agentv1alpha1.UnimplementedNodeGroupServiceServer
	*Server
}

// exists rejects Clusters that the agent does not have. Only callers that may see all Clusters
// learn that the Cluster does not exist.
func (s *nodeGroups) exists(ctx context.Context, method string, ref *agentv1alpha1.ClusterRef) error {
	if !s.Synced() {
		return agenterrors.NotSynced("the agent's view of the hub is not complete yet")
	}
	if err := s.inContact(); err != nil {
		return err
	}
	name := clusterName(ref)
	exists := false
	if s.config.Scope.Contains(name) {
		var err error
		if _, exists, err = s.config.Onboarded(ctx, name); err != nil {
			return answerOther(ctx, err)
		}
	}
	switch {
	case exists:
		return nil
	case callerOf(ctx).MaySeeAll(authz.Methods[method]):
		return agenterrors.ClusterNotFound(ref)
	default:
		return agenterrors.PermissionDenied("this identity may not call this method for this Cluster")
	}
}

func (s *nodeGroups) ListNodeGroups(
	ctx context.Context, request *agentv1alpha1.ListNodeGroupsRequest,
) (*agentv1alpha1.ListNodeGroupsResponse, error) {
	if err := s.exists(ctx, agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName, request.GetCluster()); err != nil {
		return nil, err
	}
	groups, generation, err := s.config.NodeGroups.List(clusterName(request.GetCluster()))
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	return &agentv1alpha1.ListNodeGroupsResponse{NodeGroups: groups, Generation: generation}, nil
}

func (s *nodeGroups) GetNodeGroup(
	ctx context.Context, request *agentv1alpha1.GetNodeGroupRequest,
) (*agentv1alpha1.GetNodeGroupResponse, error) {
	if err := s.exists(ctx, agentv1alpha1.NodeGroupService_GetNodeGroup_FullMethodName, request.GetCluster()); err != nil {
		return nil, err
	}
	group, found, err := s.config.NodeGroups.Get(clusterName(request.GetCluster()), request.GetId())
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	if !found {
		return nil, agenterrors.NodeGroupNotFound(request.GetId())
	}
	return &agentv1alpha1.GetNodeGroupResponse{NodeGroup: group}, nil
}

func (s *nodeGroups) WatchNodeGroups(
	request *agentv1alpha1.WatchNodeGroupsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchNodeGroupsResponse],
) error {
	ctx := stream.Context()
	if err := s.exists(ctx, agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName, request.GetCluster()); err != nil {
		return err
	}
	type response = agentv1alpha1.WatchNodeGroupsResponse
	return watch(ctx, s.Server, s.config.NodeGroups, clusterName(request.GetCluster()), nil, sender[*agentv1alpha1.NodeGroup]{
		upsert: func(group *agentv1alpha1.NodeGroup) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchNodeGroupsResponse_Upsert{Upsert: group}})
		},
		removed: func(id string) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchNodeGroupsResponse_RemovedId{RemovedId: id}})
		},
		synced: func(marker *agentv1alpha1.Synced) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchNodeGroupsResponse_Synced{Synced: marker}})
		},
		heartbeat: func(heartbeat *agentv1alpha1.Heartbeat) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchNodeGroupsResponse_Heartbeat{Heartbeat: heartbeat}})
		},
		resync: func(marker *agentv1alpha1.Resync) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchNodeGroupsResponse_Resync{Resync: marker}})
		},
	})
}
