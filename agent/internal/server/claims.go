package server

import (
	"context"
	"errors"
	"fmt"

	"github.com/samber/lo"
	"google.golang.org/grpc"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type claimService struct {
	agentv1alpha1.UnimplementedClaimServiceServer
	*Server
}

func keyOf(cluster *agentv1alpha1.ClusterRef, id string) claims.Key {
	return claims.Key{Namespace: cluster.GetNamespace(), Cluster: cluster.GetName(), ID: id}
}

// usable rejects calls while the view is incomplete or the hub is unreachable, and calls for
// Clusters that this agent does not serve.
func (s *Server) usable(cluster *agentv1alpha1.ClusterRef) error {
	if !s.Synced() {
		return agenterrors.NotSynced("the agent's view of the hub is not complete yet")
	}
	if err := s.inContact(); err != nil {
		return err
	}
	if !s.config.Scope.Contains(clusterName(cluster)) {
		// Not NOT_FOUND: another agent may serve the Cluster.
		return agenterrors.PermissionDenied("this identity may not call this method for this Cluster")
	}
	return nil
}

func (s *claimService) shown(ctx context.Context, claim *v1alpha1.MachineClaim) (*agentv1alpha1.Claim, error) {
	message, err := s.config.Show(ctx, claim)
	return message, answerOther(ctx, err)
}

func (s *claimService) CreateClaim(
	ctx context.Context, request *agentv1alpha1.CreateClaimRequest,
) (*agentv1alpha1.CreateClaimResponse, error) {
	candidates, err := candidatesOf(request)
	if err != nil {
		return nil, err
	}
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	key := keyOf(request.GetCluster(), request.GetClaimId())
	claim, err := s.config.Engine.Create(ctx, claims.Request{
		MaxNodeProvisionTime: request.GetMaxNodeProvisionTime().AsDuration(),

		Namespace:    key.Namespace,
		Cluster:      key.Cluster,
		ID:           key.ID,
		Holder:       request.GetHolder(),
		DisplayName:  request.GetDisplayName(),
		Candidates:   candidates,
		Adopt:        request.GetAdoptMachine(),
		Spoke:        request.GetSpokeId(),
		ValidateOnly: request.GetValidateOnly(),

		AdoptAboveMinSize: request.GetAdoptAboveMinSize(),
		HolderRepairs:     request.GetHolderRepairs(),
		Holders:           holdersFor(ctx, agentv1alpha1.ClaimService_CreateClaim_FullMethodName, request.GetCluster()),
		RequestID:         callerOf(ctx).requestID,
		TraceID:           tracing.ID(ctx),
	})
	if errors.Is(err, claims.ErrWriteRefused) {
		// A caller that took it for an error that passes would wait for this claim, and try no
		// other way.
		log.FromContext(ctx).Error(err, "a call failed: the hub refuses to create the claim")
		return nil, agenterrors.WriteRefused(
			"the hub refuses to create the claim; a Warning event " + protocol.ReasonWriteRefused + " on the Cluster, and the agent's log, have the reason")
	}
	if err != nil {
		return nil, s.answer(ctx, err, key)
	}
	message, err := s.shown(ctx, claim)
	if err != nil {
		return nil, err
	}
	return &agentv1alpha1.CreateClaimResponse{Claim: message}, nil
}

// candidatesOf returns the names of the MachineDeployments, which must all be in the Cluster's
// namespace.
func candidatesOf(request *agentv1alpha1.CreateClaimRequest) ([]string, error) {
	names := make([]string, 0, len(request.GetCandidates()))
	var violations []agenterrors.FieldViolation
	for i, id := range request.GetCandidates() {
		deployment, err := nodegroup.ParseID(id)
		description := ""
		switch {
		case err != nil:
			description = err.Error()
		case deployment.Namespace != request.GetCluster().GetNamespace():
			description = fmt.Sprintf("%q is not in the Cluster's namespace %q", id, request.GetCluster().GetNamespace())
		}
		if description != "" {
			violations = append(violations, agenterrors.FieldViolation{Field: fmt.Sprintf("candidates[%d]", i), Description: description})
		}
		names = append(names, deployment.Name)
	}
	if len(violations) > 0 {
		return nil, agenterrors.InvalidArgument(violations...)
	}
	return names, nil
}

func (s *claimService) ReleaseClaim(
	ctx context.Context, request *agentv1alpha1.ReleaseClaimRequest,
) (*agentv1alpha1.ReleaseClaimResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	key := keyOf(request.GetCluster(), request.GetClaimId())
	claim, err := s.config.Engine.Release(ctx, key, claims.ReleaseOptions{
		Drained: request.GetDrained(), Failed: request.GetFailed(), Reason: request.GetReason(),
		Holders: holdersFor(ctx, agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName, request.GetCluster()),
	})
	if err != nil {
		return nil, s.answer(ctx, err, key)
	}
	message, err := s.shown(ctx, claim)
	if err != nil {
		return nil, err
	}
	return &agentv1alpha1.ReleaseClaimResponse{Claim: message}, nil
}

func (s *claimService) ReturnMachine(
	ctx context.Context, request *agentv1alpha1.ReturnMachineRequest,
) (*agentv1alpha1.ReturnMachineResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	key := keyOf(request.GetCluster(), request.GetClaimId())
	holders := holdersFor(ctx, agentv1alpha1.ClaimService_ReturnMachine_FullMethodName, request.GetCluster())
	claim, err := s.config.Engine.Return(ctx, key, holders, request.GetReason())
	if err != nil {
		return nil, s.answer(ctx, err, key)
	}
	message, err := s.shown(ctx, claim)
	if err != nil {
		return nil, err
	}
	return &agentv1alpha1.ReturnMachineResponse{Claim: message}, nil
}

func (s *claimService) GetClaim(ctx context.Context, request *agentv1alpha1.GetClaimRequest) (*agentv1alpha1.GetClaimResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	key := keyOf(request.GetCluster(), request.GetClaimId())
	claim, err := s.config.Engine.Get(ctx, key)
	if err != nil {
		return nil, s.answer(ctx, err, key)
	}
	message, err := s.shown(ctx, claim)
	if err != nil {
		return nil, err
	}
	return &agentv1alpha1.GetClaimResponse{Claim: message}, nil
}

func (s *claimService) ListClaims(
	ctx context.Context, request *agentv1alpha1.ListClaimsRequest,
) (*agentv1alpha1.ListClaimsResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	key := keyOf(request.GetCluster(), "")
	list, token, err := s.config.Engine.List(ctx, claims.ListOptions{
		Namespace: key.Namespace, Cluster: key.Cluster, Holder: request.GetHolder(), IncludeEnded: request.GetIncludeEnded(),
	})
	if err != nil {
		return nil, s.answer(ctx, err, key)
	}
	response := &agentv1alpha1.ListClaimsResponse{Token: token, Claims: make([]*agentv1alpha1.Claim, 0, len(list))}
	for i := range list {
		if err := ended(ctx); err != nil {
			return nil, err
		}
		message, err := s.shown(ctx, &list[i])
		if err != nil {
			return nil, err
		}
		response.Claims = append(response.Claims, message)
	}
	return response, nil
}

func (s *claimService) WatchClaims(
	request *agentv1alpha1.WatchClaimsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchClaimsResponse],
) error {
	if err := s.usable(request.GetCluster()); err != nil {
		return err
	}
	var wanted func(*agentv1alpha1.Claim) bool
	if holder := request.GetHolder(); holder != "" {
		wanted = func(claim *agentv1alpha1.Claim) bool { return claim.GetHolder() == holder }
	}
	type response = agentv1alpha1.WatchClaimsResponse
	return watch(stream.Context(), s.Server, s.config.Claims, clusterName(request.GetCluster()), wanted, sender[*agentv1alpha1.Claim]{
		upsert: func(claim *agentv1alpha1.Claim) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClaimsResponse_Upsert{Upsert: claim}})
		},
		removed: func(id string) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClaimsResponse_RemovedId{RemovedId: id}})
		},
		synced: func(marker *agentv1alpha1.Synced) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClaimsResponse_Synced{Synced: marker}})
		},
		heartbeat: func(heartbeat *agentv1alpha1.Heartbeat) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClaimsResponse_Heartbeat{Heartbeat: heartbeat}})
		},
		resync: func(marker *agentv1alpha1.Resync) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClaimsResponse_Resync{Resync: marker}})
		},
	})
}

func (s *claimService) SyncClaims(
	ctx context.Context, request *agentv1alpha1.SyncClaimsRequest,
) (*agentv1alpha1.SyncClaimsResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	reports := authz.ReportsNodes(request.GetHolder())
	if !reports && len(request.GetNodes()) > 0 {
		return nil, agenterrors.PermissionDenied(fmt.Sprintf(
			"nodes: only the Cluster's own shim reports Nodes, not the holder %q; leave them out", request.GetHolder()))
	}
	key := keyOf(request.GetCluster(), "")
	nodes := nodeReports(ctx, request.GetNodes())
	sync := claims.SyncRequest{
		Namespace: key.Namespace,
		Cluster:   key.Cluster,
		Holder:    request.GetHolder(),
		Token:     request.GetToken(),
		LiveIDs:   request.GetLiveClaimIds(),
		Spoke:     request.GetSpokeId(),

		HolderRepairs: request.HolderRepairs, // nil is not false
	}
	if reports {
		sync.NodesComplete = request.GetNodesComplete()
		sync.Nodes = lo.Map(nodes, func(n learned.Node, _ int) claims.NodeReport {
			return claims.NodeReport{ProviderID: n.ProviderID, Capacity: n.Capacity, Allocatable: n.Allocatable, Unregistered: n.Unregistered}
		})
	}
	result, err := s.config.Engine.Sync(ctx, sync)
	if err != nil {
		return nil, s.answer(ctx, err, key)
	}
	if reports {
		s.config.Observe(ctx, clusterName(request.GetCluster()), nodes)
		s.note(ctx, request, result.Matched)
	}
	return &agentv1alpha1.SyncClaimsResponse{
		CollectedClaimIds: result.Collected, UnknownClaimIds: result.Unknown, KeptClaimIds: result.Kept,
	}, nil
}

// nodeReports drops quantities that cannot be parsed. An error in one Node's report must not
// prevent the collection of dead claims.
func nodeReports(ctx context.Context, nodes []*agentv1alpha1.NodeReport) []learned.Node {
	reports := make([]learned.Node, 0, len(nodes))
	for _, node := range nodes {
		capacity, err := wire.ResourceList(node.GetCapacity())
		if err != nil {
			log.FromContext(ctx).V(1).Info("a Node's capacity is not usable", "providerID", node.GetProviderId(), "cause", err.Error())
		}
		allocatable, err := wire.ResourceList(node.GetAllocatable())
		if err != nil {
			log.FromContext(ctx).V(1).Info("a Node's allocatable is not usable", "providerID", node.GetProviderId(), "cause", err.Error())
		}
		reports = append(reports, learned.Node{
			ProviderID: node.GetProviderId(), Capacity: capacity, Allocatable: allocatable, Labels: node.GetLabels(),
			Unregistered: node.GetUnregistered(),
			Unusable:     len(node.GetCapacity()) - len(capacity) + len(node.GetAllocatable()) - len(allocatable),
		})
	}
	return reports
}
