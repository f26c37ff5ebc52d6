package fakeagent

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Publish publishes an object to the Cluster, in place of an earlier one of the same kind and name.
func (a *Agent) Publish(cluster *agentv1alpha1.ClusterRef, object *agentv1alpha1.PublishedObject) {
	a.edit(func() {
		a.ensureCluster(keyOf(cluster))
		if a.nodePoolSets[keyOf(cluster)] == nil {
			a.nodePoolSets[keyOf(cluster)] = map[string]bool{}
		}
		a.nodePoolSets[keyOf(cluster)][object.GetSet()] = true
		a.publishedFeed.put(keyOf(cluster), client.PublishedKey(object), proto.CloneOf(object))
	})
}

// Unpublish ends the publication of the object. Its NodePoolSet stays.
func (a *Agent) Unpublish(cluster *agentv1alpha1.ClusterRef, kind, name string) {
	a.edit(func() { a.publishedFeed.remove(keyOf(cluster), kind+"/"+name) })
}

// DeleteNodePoolSet ends the publication of all objects of the NodePoolSet to the Cluster.
func (a *Agent) DeleteNodePoolSet(cluster *agentv1alpha1.ClusterRef, set string) {
	a.edit(func() {
		of := keyOf(cluster)
		for _, object := range a.publishedFeed.list(of, everything[*agentv1alpha1.PublishedObject]) {
			if object.GetSet() == set {
				a.publishedFeed.remove(of, client.PublishedKey(object))
			}
		}
		delete(a.nodePoolSets[of], set)
	})
}

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
		Objects: a.publishedFeed.list(cluster, everything[*agentv1alpha1.PublishedObject]),
		Sets:    slices.Sorted(maps.Keys(a.nodePoolSets[cluster])),
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
	return serve(stream.Context(), s.agent, request.GetCluster(), s.agent.readable, s.agent.publishedFeed,
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
