package conformance

import (
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
)

var serverCases = []testCase{
	{"server.status", reader(1, CallerCluster), "status tells the caller who it is and what it may do", func(s *suite) {
		s.group(deployment("workers"))
		response, err := s.Client().Status.GetStatus(s.bounded(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(s, err)
		require.Equal(s, "capi.agent.v1alpha1", response.GetApiVersion())
		require.NotEmpty(s, response.GetVersion())
		require.True(s, response.GetCachesSynced())
		require.Positive(s, response.GetCatalogueGeneration())
		require.NotEmpty(s, response.GetAgentId())
		require.NotNil(s, response.GetTime())
		require.Contains(s, response.GetIdentity(),
			"/cluster/"+s.Cluster().GetNamespace()+"/"+s.Cluster().GetName())
		require.Contains(s, response.GetRoles(), "cluster")
		require.False(s, response.GetAllClusters())
		require.Len(s, response.GetClusters(), 1)
		require.True(s, proto.Equal(s.Cluster(), response.GetClusters()[0]))

		again, err := s.Client().Status.GetStatus(s.bounded(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(s, err)
		require.Equal(s, response.GetAgentId(), again.GetAgentId())
	}},

	{"server.status-stranger", reader(0, CallerStranger), "status reports the caller's own identity to a stranger, too", func(s *suite) {
		response, err := s.Stranger().Status.GetStatus(s.bounded(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(s, err)
		for _, cluster := range response.GetClusters() {
			require.False(s, proto.Equal(s.Cluster(), cluster))
		}
	}},

	{"server.health", reader(0), "health is served", func(s *suite) {
		response, err := grpc_health_v1.NewHealthClient(s.Client().Conn()).Check(s.bounded(), &grpc_health_v1.HealthCheckRequest{})
		require.NoError(s, err)
		require.Equal(s, grpc_health_v1.HealthCheckResponse_SERVING, response.GetStatus())
	}},

	{"server.reflection", reader(0), "reflection lists the services", func(s *suite) {
		stream, err := grpc_reflection_v1.NewServerReflectionClient(s.Client().Conn()).ServerReflectionInfo(s.bounded())
		require.NoError(s, err)
		require.NoError(s, stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
			MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
		}))
		response, err := stream.Recv()
		require.NoError(s, err)
		var names []string
		for _, service := range response.GetListServicesResponse().GetService() {
			names = append(names, service.GetName())
		}
		require.Subset(s, names, []string{
			agentv1alpha1.NodeGroupService_ServiceDesc.ServiceName,
			agentv1alpha1.ClaimService_ServiceDesc.ServiceName,
			agentv1alpha1.MachineService_ServiceDesc.ServiceName,
			agentv1alpha1.ClusterService_ServiceDesc.ServiceName,
			agentv1alpha1.StatusService_ServiceDesc.ServiceName,
			grpc_health_v1.Health_ServiceDesc.ServiceName,
		})
		require.NoError(s, stream.CloseSend())
	}},

	{"server.request-id", reader(0), "a caller's request id is accepted", func(s *suite) {
		ctx := metadata.AppendToOutgoingContext(s.bounded(), client.RequestIDKey, uuid.NewString())
		_, err := s.Client().Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
		require.NoError(s, err)
	}},
}
