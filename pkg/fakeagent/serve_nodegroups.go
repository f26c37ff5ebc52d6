package fakeagent

import (
	"context"

	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type nodeGroupService struct {
	agentv1alpha1.UnimplementedNodeGroupServiceServer

	agent *Agent
}

func (s nodeGroupService) ListNodeGroups(
	ctx context.Context, request *agentv1alpha1.ListNodeGroupsRequest,
) (*agentv1alpha1.ListNodeGroupsResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.existing(ctx, cluster); err != nil {
		return nil, err
	}
	return &agentv1alpha1.ListNodeGroupsResponse{
		NodeGroups: a.groupView.list(cluster, everything[*agentv1alpha1.NodeGroup]),
		Generation: a.groupView.generation,
	}, nil
}

func (s nodeGroupService) GetNodeGroup(
	ctx context.Context, request *agentv1alpha1.GetNodeGroupRequest,
) (*agentv1alpha1.GetNodeGroupResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.existing(ctx, cluster); err != nil {
		return nil, err
	}
	group, ok := a.groupView.get(cluster, request.GetId())
	if !ok {
		return nil, agenterrors.NodeGroupNotFound(request.GetId())
	}
	return &agentv1alpha1.GetNodeGroupResponse{NodeGroup: group}, nil
}

func (s nodeGroupService) WatchNodeGroups(
	request *agentv1alpha1.WatchNodeGroupsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchNodeGroupsResponse],
) error {
	return serve(stream.Context(), s.agent, request.GetCluster(), s.agent.existing, s.agent.groupView, everything[*agentv1alpha1.NodeGroup],
		encoding[*agentv1alpha1.NodeGroup]{
			upsert: func(group *agentv1alpha1.NodeGroup) error {
				return stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{
					Event: &agentv1alpha1.WatchNodeGroupsResponse_Upsert{Upsert: group},
				})
			},
			removed: func(key string) error {
				return stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{
					Event: &agentv1alpha1.WatchNodeGroupsResponse_RemovedId{RemovedId: key},
				})
			},
			synced: func(marker *agentv1alpha1.Synced) error {
				return stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{
					Event: &agentv1alpha1.WatchNodeGroupsResponse_Synced{Synced: marker},
				})
			},
			heartbeat: func(marker *agentv1alpha1.Heartbeat) error {
				return stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{
					Event: &agentv1alpha1.WatchNodeGroupsResponse_Heartbeat{Heartbeat: marker},
				})
			},
			resync: func(marker *agentv1alpha1.Resync) error {
				return stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{
					Event: &agentv1alpha1.WatchNodeGroupsResponse_Resync{Resync: marker},
				})
			},
		})
}
