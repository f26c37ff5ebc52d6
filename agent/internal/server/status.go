package server

import (
	"context"

	"github.com/samber/lo"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type status struct {
	agentv1alpha1.UnimplementedStatusServiceServer
	*Server
}

// APIVersion is the only API package served.
var APIVersion = string(agentv1alpha1.File_capi_agent_v1alpha1_status_proto.Package())

// reads matches callers that may read a Cluster's node groups.
var reads = authz.Methods[agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName]

func (s *status) GetStatus(ctx context.Context, _ *agentv1alpha1.GetStatusRequest) (*agentv1alpha1.GetStatusResponse, error) {
	c := callerOf(ctx)
	if grpcstatus.Code(s.onboarded(ctx, c)) == codes.Unauthenticated {
		// Its onboarding has ended, and all its rights with it. Before the view of the hub is
		// complete, this cannot be told.
		c.Grants = nil
	}
	clusters, all := c.Clusters()
	version, commit, served, features := s.config.Version, s.config.Commit, []string{APIVersion}, s.features()
	if len(c.Grants) == 0 {
		// They reveal known vulnerabilities, so only callers with a grant see them.
		version, commit, served, features = "", "", nil, nil
	}
	return &agentv1alpha1.GetStatusResponse{
		ApiVersion:          APIVersion,
		Version:             version,
		Commit:              commit,
		CachesSynced:        s.Synced(),
		CatalogueGeneration: s.config.NodeGroups.GenerationOf(func(cluster types.NamespacedName) bool { return c.MayCallFor(reads, cluster) }),
		AgentId:             s.id,
		Identity:            c.Identity,
		Roles:               c.Roles(),
		Clusters: lo.Map(clusters, func(name types.NamespacedName, _ int) *agentv1alpha1.ClusterRef {
			return protoconv.Cluster(name)
		}),
		AllClusters:       all,
		Time:              timestamppb.New(s.config.Clock.Now()),
		ServedApiVersions: served,
		Features:          features,
	}, nil
}

// features returns what the agent can do, as configured.
func (s *Server) features() []string {
	return features.Served(features.Configured{
		features.Certificates:      s.config.Issuing != nil,
		features.ClusterAutoscaler: s.config.Autoscaler != nil,
		features.NodePools:         s.config.NodePools != nil,
	})
}
