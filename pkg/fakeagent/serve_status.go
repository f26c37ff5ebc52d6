package fakeagent

import (
	"context"
	"slices"
	"strings"

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
		CachesSynced:        !a.unsynced,
		CatalogueGeneration: a.groupView.generation,
		AgentId:             a.id,
		Identity:            caller.name,
		Time:                timestamppb.New(a.now()),
	}
	if len(caller.grants) > 0 {
		response.Version = a.settings.version
		response.ServedApiVersions, response.Features = slices.Clone(a.settings.apiVersions), slices.Clone(a.settings.features)
	}
	for _, grant := range caller.grants {
		if !slices.Contains(response.GetRoles(), string(grant.Role)) {
			response.Roles = append(response.Roles, string(grant.Role))
		}
		response.AllClusters = response.GetAllClusters() || grant.AllClusters
		for _, cluster := range grant.Clusters {
			namespace, name, _ := strings.Cut(cluster, "/")
			if !slices.ContainsFunc(response.GetClusters(), func(c *agentv1alpha1.ClusterRef) bool {
				return c.GetNamespace() == namespace && c.GetName() == name
			}) {
				response.Clusters = append(response.Clusters, &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name})
			}
		}
	}
	if response.GetAllClusters() {
		response.Clusters = nil
	}
	return response, nil
}
