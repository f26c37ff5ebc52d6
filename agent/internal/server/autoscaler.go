package server

import (
	"context"
	"errors"
	"time"

	"github.com/samber/lo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/autoscaler"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// autoscalerService serves the protocol of the cluster-autoscaler's cloud provider externalgrpc.
// Its requests name no Cluster; they are for the only one that the caller has the role autoscaler
// for.
type autoscalerService struct {
	externalgrpc.UnimplementedCloudProviderServer
	*Server
}

// cluster returns the Cluster of a call. The call is rejected while the agent's view is incomplete
// or the hub is unreachable.
func (s *autoscalerService) cluster(ctx context.Context) (types.NamespacedName, error) {
	cluster, err := onlyCluster(ctx)
	if err != nil {
		return cluster, err
	}
	return cluster, s.usable(protoconv.Cluster(cluster))
}

func onlyCluster(ctx context.Context) (types.NamespacedName, error) {
	method, _ := grpc.Method(ctx)
	cluster, err := callerOf(ctx).OnlyCluster(authz.Methods[method])
	if err != nil {
		return cluster, agenterrors.PermissionDenied(err.Error())
	}
	return cluster, nil
}

// failed converts an error of package autoscaler.
func (s *autoscalerService) failed(ctx context.Context, cluster types.NamespacedName, err error) error {
	var (
		unknown  *autoscaler.UnknownGroupError
		invalid  *autoscaler.InvalidError
		noRoom   *autoscaler.NoRoomError
		foreign  *autoscaler.ForeignNodeError
		existing *autoscaler.ExistingNodesError
		node     *autoscaler.UnknownNodeError
		pod      *autoscaler.UnpricedPodError
	)
	switch {
	case errors.As(err, &unknown), errors.As(err, &node), errors.As(err, &pod):
		return grpcstatus.Error(codes.NotFound, err.Error())
	case errors.As(err, &invalid):
		return agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: invalid.Field, Description: invalid.Message})
	case errors.As(err, &noRoom):
		return grpcstatus.Error(codes.ResourceExhausted, err.Error())
	case errors.As(err, &foreign), errors.As(err, &existing):
		return grpcstatus.Error(codes.FailedPrecondition, err.Error())
	}
	return s.answer(ctx, err, claims.Key{Namespace: cluster.Namespace, Cluster: cluster.Name})
}

// Refresh begins each loop of the cluster-autoscaler, which ends the loop if it fails. It is the
// only call whose failure the cluster-autoscaler handles well, so it fails whenever a later one
// would.
func (s *autoscalerService) Refresh(ctx context.Context, _ *externalgrpc.RefreshRequest) (*externalgrpc.RefreshResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.config.Autoscaler.Check(ctx, cluster); err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.RefreshResponse{}, nil
}

// NodeGroups also answers while the hub is unreachable: the cluster-autoscaler takes an error for
// the answer that there are no groups.
func (s *autoscalerService) NodeGroups(ctx context.Context, _ *externalgrpc.NodeGroupsRequest) (*externalgrpc.NodeGroupsResponse, error) {
	cluster, err := onlyCluster(ctx)
	if err != nil {
		return nil, err
	}
	if !s.Synced() || !s.config.Scope.Contains(cluster) {
		return nil, s.usable(protoconv.Cluster(cluster))
	}
	sizes, err := s.config.Autoscaler.Groups(cluster)
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupsResponse{
		NodeGroups: lo.Map(sizes, func(size autoscaler.Size, _ int) *externalgrpc.NodeGroup { return groupMessage(size) }),
	}, nil
}

func groupMessage(size autoscaler.Size) *externalgrpc.NodeGroup {
	return &externalgrpc.NodeGroup{Id: size.ID, MaxSize: size.Max, Debug: size.Debug}
}

func nodeOf(node *externalgrpc.ExternalGrpcNode) autoscaler.Node {
	return autoscaler.Node{ProviderID: node.GetProviderID(), Name: node.GetName()}
}

func (s *autoscalerService) NodeGroupForNode(
	ctx context.Context, request *externalgrpc.NodeGroupForNodeRequest,
) (*externalgrpc.NodeGroupForNodeResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	size, found, err := s.config.Autoscaler.GroupOf(cluster, nodeOf(request.GetNode()))
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	if !found {
		return &externalgrpc.NodeGroupForNodeResponse{NodeGroup: &externalgrpc.NodeGroup{}}, nil
	}
	return &externalgrpc.NodeGroupForNodeResponse{NodeGroup: groupMessage(size)}, nil
}

func (s *autoscalerService) NodeGroupTargetSize(
	ctx context.Context, request *externalgrpc.NodeGroupTargetSizeRequest,
) (*externalgrpc.NodeGroupTargetSizeResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	target, err := s.config.Autoscaler.TargetSize(cluster, request.GetId())
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupTargetSizeResponse{TargetSize: target}, nil
}

func (s *autoscalerService) NodeGroupIncreaseSize(
	ctx context.Context, request *externalgrpc.NodeGroupIncreaseSizeRequest,
) (*externalgrpc.NodeGroupIncreaseSizeResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	origin := autoscaler.Origin{RequestID: callerOf(ctx).requestID, TraceID: tracing.ID(ctx)}
	if err := s.config.Autoscaler.Increase(ctx, cluster, request.GetId(), request.GetDelta(), origin); err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupIncreaseSizeResponse{}, nil
}

func (s *autoscalerService) NodeGroupDeleteNodes(
	ctx context.Context, request *externalgrpc.NodeGroupDeleteNodesRequest,
) (*externalgrpc.NodeGroupDeleteNodesResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	nodes := lo.Map(request.GetNodes(), func(node *externalgrpc.ExternalGrpcNode, _ int) autoscaler.Node { return nodeOf(node) })
	if err := s.config.Autoscaler.Delete(ctx, cluster, request.GetId(), nodes); err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupDeleteNodesResponse{}, nil
}

func (s *autoscalerService) NodeGroupDecreaseTargetSize(
	ctx context.Context, request *externalgrpc.NodeGroupDecreaseTargetSizeRequest,
) (*externalgrpc.NodeGroupDecreaseTargetSizeResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.config.Autoscaler.Decrease(ctx, cluster, request.GetId(), request.GetDelta()); err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupDecreaseTargetSizeResponse{}, nil
}

// These are the cluster-autoscaler's classes of errors of instances.
const (
	outOfResourcesClass = 1
	otherClass          = 99
)

var instanceStates = map[autoscaler.State]externalgrpc.InstanceStatus_InstanceState{
	autoscaler.Running:  externalgrpc.InstanceStatus_instanceRunning,
	autoscaler.Creating: externalgrpc.InstanceStatus_instanceCreating,
	autoscaler.Deleting: externalgrpc.InstanceStatus_instanceDeleting,
}

func (s *autoscalerService) NodeGroupNodes(
	ctx context.Context, request *externalgrpc.NodeGroupNodesRequest,
) (*externalgrpc.NodeGroupNodesResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	instances, err := s.config.Autoscaler.Instances(cluster, request.GetId())
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupNodesResponse{Instances: lo.Map(instances, func(instance autoscaler.Instance, _ int) *externalgrpc.Instance {
		status := &externalgrpc.InstanceStatus{InstanceState: instanceStates[instance.State]}
		if failure := instance.Failure; failure != nil {
			status.ErrorInfo = &externalgrpc.InstanceErrorInfo{
				ErrorCode: failure.Code, ErrorMessage: failure.Message, InstanceErrorClass: otherClass,
			}
			if failure.OutOfResources {
				status.ErrorInfo.InstanceErrorClass = outOfResourcesClass
			}
		}
		return &externalgrpc.Instance{Id: instance.ID, Status: status}
	})}, nil
}

func (s *autoscalerService) NodeGroupTemplateNodeInfo(
	ctx context.Context, request *externalgrpc.NodeGroupTemplateNodeInfoRequest,
) (*externalgrpc.NodeGroupTemplateNodeInfoResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	node, err := s.config.Autoscaler.Template(cluster, request.GetId())
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	encoded, err := node.Marshal()
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.NodeGroupTemplateNodeInfoResponse{NodeBytes: encoded}, nil
}

// NodeGroupGetOptions answers without options for groups that replace none. The cluster-autoscaler
// then uses its own, which include one that the protocol cannot carry and that it takes for zero in
// any other answer.
func (s *autoscalerService) NodeGroupGetOptions(
	ctx context.Context, request *externalgrpc.NodeGroupAutoscalingOptionsRequest,
) (*externalgrpc.NodeGroupAutoscalingOptionsResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	defaults := request.GetDefaults()
	o, replaced, err := s.config.Autoscaler.Options(cluster, request.GetId(), autoscaler.Options{
		UtilizationThreshold:    defaults.GetScaleDownUtilizationThreshold(),
		GPUUtilizationThreshold: defaults.GetScaleDownGpuUtilizationThreshold(),
		UnneededTime:            defaults.GetScaleDownUnneededDuration().AsDuration(),
		UnreadyTime:             defaults.GetScaleDownUnreadyDuration().AsDuration(),
		MaxNodeProvisionTime:    defaults.GetMaxNodeProvisionDuration().AsDuration(),
		ZeroOrMaxNodeScaling:    defaults.GetZeroOrMaxNodeScaling(),
		IgnoreDaemonSets:        defaults.GetIgnoreDaemonSetsUtilization(),
	})
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	if !replaced {
		return &externalgrpc.NodeGroupAutoscalingOptionsResponse{}, nil
	}
	return &externalgrpc.NodeGroupAutoscalingOptionsResponse{NodeGroupAutoscalingOptions: &externalgrpc.NodeGroupAutoscalingOptions{
		ScaleDownUtilizationThreshold:    o.UtilizationThreshold,
		ScaleDownGpuUtilizationThreshold: o.GPUUtilizationThreshold,
		ScaleDownUnneededDuration:        durationpb.New(o.UnneededTime),
		ScaleDownUnreadyDuration:         durationpb.New(o.UnreadyTime),
		MaxNodeProvisionDuration:         durationpb.New(o.MaxNodeProvisionTime),
		ZeroOrMaxNodeScaling:             o.ZeroOrMaxNodeScaling,
		IgnoreDaemonSetsUtilization:      o.IgnoreDaemonSets,
	}}, nil
}

func during(start, end *timestamppb.Timestamp) time.Duration { return end.AsTime().Sub(start.AsTime()) }

func (s *autoscalerService) PricingNodePrice(
	ctx context.Context, request *externalgrpc.PricingNodePriceRequest,
) (*externalgrpc.PricingNodePriceResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	price, err := s.config.Autoscaler.NodePrice(
		cluster, nodeOf(request.GetNode()), during(request.GetStartTimestamp(), request.GetEndTimestamp()))
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.PricingNodePriceResponse{Price: price}, nil
}

func (s *autoscalerService) PricingPodPrice(
	ctx context.Context, request *externalgrpc.PricingPodPriceRequest,
) (*externalgrpc.PricingPodPriceResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	pod, err := autoscaler.ParsePod(request.GetPodBytes())
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	price, err := s.config.Autoscaler.PodPrice(cluster, pod, during(request.GetStartTimestamp(), request.GetEndTimestamp()))
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	return &externalgrpc.PricingPodPriceResponse{Price: price}, nil
}

func (s *autoscalerService) GPULabel(ctx context.Context, _ *externalgrpc.GPULabelRequest) (*externalgrpc.GPULabelResponse, error) {
	if _, err := onlyCluster(ctx); err != nil {
		return nil, err
	}
	return &externalgrpc.GPULabelResponse{Label: autoscaler.GPULabel}, nil
}

func (s *autoscalerService) GetAvailableGPUTypes(
	ctx context.Context, _ *externalgrpc.GetAvailableGPUTypesRequest,
) (*externalgrpc.GetAvailableGPUTypesResponse, error) {
	cluster, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	kinds, err := s.config.Autoscaler.GPUTypes(cluster)
	if err != nil {
		return nil, s.failed(ctx, cluster, err)
	}
	response := &externalgrpc.GetAvailableGPUTypesResponse{GpuTypes: map[string]*anypb.Any{}}
	for _, kind := range kinds {
		response.GpuTypes[kind] = &anypb.Any{}
	}
	return response, nil
}

// Cleanup does nothing: the claims outlive the cluster-autoscaler's process.
func (s *autoscalerService) Cleanup(ctx context.Context, _ *externalgrpc.CleanupRequest) (*externalgrpc.CleanupResponse, error) {
	if _, err := onlyCluster(ctx); err != nil {
		return nil, err
	}
	return &externalgrpc.CleanupResponse{}, nil
}
