package server

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// NodePools holds what is needed to publish NodePools and to receive their status.
type NodePools struct {
	// Cache is the view that is served. REQUIRED.
	Cache *watchcache.Cache[*agentv1alpha1.PublishedObject]
	// List returns what is published to a Cluster, and the names of the NodePoolSets of its
	// namespace, as the hub's API server has them now. REQUIRED.
	List func(ctx context.Context, cluster *clusterv1.Cluster) (objects []*agentv1alpha1.PublishedObject, sets []string, err error)
	// Report records what a shim reports. It fails with [*spokes.TooSoonError] if changes come too
	// fast. REQUIRED.
	Report func(ctx context.Context, cluster *clusterv1.Cluster, report spokes.Report) error
}

type nodePoolService struct {
	agentv1alpha1.UnimplementedNodePoolServiceServer
	*Server
}

// whole returns the Cluster, read live. It rejects calls for a Cluster that may be moving.
func (s *nodePoolService) whole(ctx context.Context, ref *agentv1alpha1.ClusterRef) (*clusterv1.Cluster, error) {
	if err := s.usable(ref); err != nil {
		return nil, err
	}
	cluster, err := s.config.Engine.UnpausedCluster(ctx, clusterName(ref))
	return cluster, s.answer(ctx, err, keyOf(ref, ""))
}

func (s *nodePoolService) ListPublishedObjects(
	ctx context.Context, request *agentv1alpha1.ListPublishedObjectsRequest,
) (*agentv1alpha1.ListPublishedObjectsResponse, error) {
	cluster, err := s.whole(ctx, request.GetCluster())
	if err != nil {
		return nil, err
	}
	objects, sets, err := s.config.NodePools.List(ctx, cluster)
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	return &agentv1alpha1.ListPublishedObjectsResponse{Objects: objects, Sets: sets}, nil
}

func (s *nodePoolService) ReportNodePools(
	ctx context.Context, request *agentv1alpha1.ReportNodePoolsRequest,
) (*agentv1alpha1.ReportNodePoolsResponse, error) {
	report, problem := protoconv.NodePoolReport(request)
	if problem != "" {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: problem, Description: "each object is reported once"})
	}
	cluster, err := s.whole(ctx, request.GetCluster())
	if err != nil {
		return nil, err
	}
	err = s.config.NodePools.Report(ctx, cluster, report)
	if early, ok := errors.AsType[*spokes.TooSoonError](err); ok {
		return nil, agenterrors.Throttled(early.Error(), early.RetryAfter)
	}
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	return &agentv1alpha1.ReportNodePoolsResponse{}, nil
}

func (s *nodePoolService) WatchPublishedObjects(
	request *agentv1alpha1.WatchPublishedObjectsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchPublishedObjectsResponse],
) error {
	type response = agentv1alpha1.WatchPublishedObjectsResponse
	if err := s.usable(request.GetCluster()); err != nil {
		return err
	}
	return watch(stream.Context(), s.Server, s.config.NodePools.Cache, clusterName(request.GetCluster()), nil, sender[*agentv1alpha1.PublishedObject]{
		upsert: func(object *agentv1alpha1.PublishedObject) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Upsert{Upsert: object}})
		},
		removed: func(key string) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_RemovedKey{RemovedKey: key}})
		},
		synced: func(marker *agentv1alpha1.Synced) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Synced{Synced: marker}})
		},
		heartbeat: func(heartbeat *agentv1alpha1.Heartbeat) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Heartbeat{Heartbeat: heartbeat}})
		},
		resync: func(marker *agentv1alpha1.Resync) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchPublishedObjectsResponse_Resync{Resync: marker}})
		},
	})
}
