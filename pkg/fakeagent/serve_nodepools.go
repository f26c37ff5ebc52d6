package fakeagent

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// ReportedNodePools returns the Cluster's last report about its NodePools, or nil.
func (a *Agent) ReportedNodePools(cluster *agentv1alpha1.ClusterRef) *agentv1alpha1.ReportNodePoolsRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return proto.CloneOf(a.nodePools[keyOf(cluster)])
}

type nodePoolService struct {
	agentv1alpha1.UnimplementedNodePoolServiceServer

	agent *Agent
}

func (s nodePoolService) ListPublishedObjects(
	ctx context.Context, request *agentv1alpha1.ListPublishedObjectsRequest,
) (*agentv1alpha1.ListPublishedObjectsResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	if err := a.whole(cluster); err != nil {
		return nil, err
	}
	return &agentv1alpha1.ListPublishedObjectsResponse{
		Objects: a.publishedView.list(cluster, everything[*agentv1alpha1.PublishedObject]),
		Sets:    a.setsOf(cluster),
	}, nil
}

// ReportNodePools accepts changes at any rate.
func (s nodePoolService) ReportNodePools(
	ctx context.Context, request *agentv1alpha1.ReportNodePoolsRequest,
) (*agentv1alpha1.ReportNodePoolsResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	if field := repeatedIn(request); field != "" {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: field, Description: "each object is reported once"})
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	if err := a.whole(cluster); err != nil {
		return nil, err
	}
	a.nodePools[cluster] = proto.CloneOf(request)
	return &agentv1alpha1.ReportNodePoolsResponse{}, nil
}

// repeatedIn returns the field with an object that was reported before, or nothing.
func repeatedIn(request *agentv1alpha1.ReportNodePoolsRequest) string {
	pools, objects := map[string]bool{}, map[string]bool{}
	for i, pool := range request.GetNodePools() {
		if pools[pool.GetName()] {
			return fmt.Sprintf("node_pools[%d].name", i)
		}
		pools[pool.GetName()] = true
	}
	for i, object := range request.GetObjects() {
		key := object.GetKind() + "/" + object.GetName()
		if objects[key] {
			return fmt.Sprintf("objects[%d].name", i)
		}
		objects[key] = true
	}
	return ""
}

func (s nodePoolService) WatchPublishedObjects(
	request *agentv1alpha1.WatchPublishedObjectsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchPublishedObjectsResponse],
) error {
	type response = agentv1alpha1.WatchPublishedObjectsResponse
	return serve(stream.Context(), s.agent, request.GetCluster(), s.agent.readable, s.agent.publishedView,
		everything[*agentv1alpha1.PublishedObject], encoding[*agentv1alpha1.PublishedObject]{
			upsert: func(object *agentv1alpha1.PublishedObject) error {
				return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Upsert{Upsert: object}})
			},
			removed: func(key string) error {
				return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_RemovedKey{RemovedKey: key}})
			},
			synced: func(marker *agentv1alpha1.Synced) error {
				return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Synced{Synced: marker}})
			},
			heartbeat: func(marker *agentv1alpha1.Heartbeat) error {
				return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Heartbeat{Heartbeat: marker}})
			},
			resync: func(marker *agentv1alpha1.Resync) error {
				return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Resync{Resync: marker}})
			},
		})
}
