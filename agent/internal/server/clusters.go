package server

import (
	"context"
	"slices"

	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fleet"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type clusterService struct {
	agentv1alpha1.UnimplementedClusterServiceServer
	*Server
}

// readableBy returns a function that reports whether a caller may read a Cluster.
func readableBy(c caller, rule authz.Rule) func(*agentv1alpha1.Cluster) bool {
	return func(cluster *agentv1alpha1.Cluster) bool { return c.MayCallFor(rule, clusterName(cluster.GetRef())) }
}

func (s *clusterService) ListClusters(
	ctx context.Context, _ *agentv1alpha1.ListClustersRequest,
) (*agentv1alpha1.ListClustersResponse, error) {
	if err := s.inContact(); err != nil {
		return nil, err
	}
	all, _, err := s.config.Clusters.List(fleet.All)
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	readable := readableBy(callerOf(ctx), authz.Methods[agentv1alpha1.ClusterService_ListClusters_FullMethodName])
	return &agentv1alpha1.ListClustersResponse{
		Clusters: slices.DeleteFunc(all, func(cluster *agentv1alpha1.Cluster) bool { return !readable(cluster) }),
	}, nil
}

func (s *clusterService) WatchClusters(
	_ *agentv1alpha1.WatchClustersRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchClustersResponse],
) error {
	type response = agentv1alpha1.WatchClustersResponse
	if err := s.inContact(); err != nil {
		return err
	}
	ctx, stop := s.whileInContact(stream.Context())
	defer stop()
	c, rule := callerOf(ctx), authz.Methods[agentv1alpha1.ClusterService_WatchClusters_FullMethodName]
	ctx, end := s.whileEntitled(ctx, func(ctx context.Context) error { return s.entitledToMany(ctx, rule, c) })
	defer end()
	return forward(ctx, s.config.Clusters, fleet.All, readableBy(c, rule), sender[*agentv1alpha1.Cluster]{
		upsert: func(cluster *agentv1alpha1.Cluster) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Upsert{Upsert: cluster}})
		},
		removed: func(key string) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Removed{Removed: protoconv.Cluster(fleet.Name(key))}})
		},
		synced: func(*agentv1alpha1.Synced) error {
			// Its generation counts the changes of all Clusters.
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Synced{Synced: &agentv1alpha1.Synced{}}})
		},
		heartbeat: func(heartbeat *agentv1alpha1.Heartbeat) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Heartbeat{Heartbeat: heartbeat}})
		},
		resync: func(marker *agentv1alpha1.Resync) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Resync{Resync: marker}})
		},
	})
}
