package fakeagent

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type statusService struct {
	agentv1alpha1.UnimplementedStatusServiceServer

	agent *Agent
}

func (s statusService) GetStatus(
	ctx context.Context, _ *agentv1alpha1.GetStatusRequest,
) (*agentv1alpha1.GetStatusResponse, error) {
	caller, err := callerOf(ctx)
	if err != nil {
		return nil, err
	}
	a := s.agent
	a.mu.Lock()
	defer a.mu.Unlock()
	response := &agentv1alpha1.GetStatusResponse{
		ApiVersion:          "capi.agent.v1alpha1",
		Version:             a.settings.version,
		CachesSynced:        !a.unsynced,
		CatalogueGeneration: a.generation,
		AgentId:             a.id,
		Identity:            caller.name,
		Time:                timestamppb.New(a.now()),
	}
	if caller.cluster == nil {
		response.Roles, response.AllClusters = []string{"admin"}, true
	} else {
		response.Roles = []string{"cluster"}
		response.Clusters = []*agentv1alpha1.ClusterRef{caller.cluster.ref()}
	}
	return response, nil
}
