package server

import (
	"context"
	"slices"

	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type machines struct {
	agentv1alpha1.UnimplementedMachineServiceServer
	*Server
}

func (s *machines) GetMachine(
	ctx context.Context, request *agentv1alpha1.GetMachineRequest,
) (*agentv1alpha1.GetMachineResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	machine, found, err := s.config.Machines.Get(clusterName(request.GetCluster()), request.GetName())
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	if !found {
		if err := s.whole(ctx, request.GetCluster()); err != nil {
			return nil, err
		}
		return nil, agenterrors.MachineNotFound(request.GetName())
	}
	return &agentv1alpha1.GetMachineResponse{Machine: machine}, nil
}

func (s *machines) ListMachines(
	ctx context.Context, request *agentv1alpha1.ListMachinesRequest,
) (*agentv1alpha1.ListMachinesResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	all, _, err := s.config.Machines.List(clusterName(request.GetCluster()))
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	if err := s.whole(ctx, request.GetCluster()); err != nil {
		return nil, err
	}
	if group := request.GetNodeGroupId(); group != "" {
		all = slices.DeleteFunc(all, func(machine *agentv1alpha1.Machine) bool { return machine.GetNodeGroupId() != group })
	}
	return &agentv1alpha1.ListMachinesResponse{Machines: all}, nil
}

// whole rejects responses that would report a Machine as gone while its Cluster is being moved to
// another hub, or has been. It queries the hub.
func (s *machines) whole(ctx context.Context, cluster *agentv1alpha1.ClusterRef) error {
	if call := limits.FromContext(ctx); call != nil {
		if err := call.AskHub(ctx); err != nil {
			return throttled(ctx, err)
		}
	}
	_, err := s.config.Engine.UnpausedCluster(ctx, clusterName(cluster))
	return s.answer(ctx, err, keyOf(cluster, ""))
}

func (s *machines) WatchMachines(
	request *agentv1alpha1.WatchMachinesRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchMachinesResponse],
) error {
	if err := s.usable(request.GetCluster()); err != nil {
		return err
	}
	type response = agentv1alpha1.WatchMachinesResponse
	return watch(stream.Context(), s.Server, s.config.Machines, clusterName(request.GetCluster()), nil, sender[*agentv1alpha1.Machine]{
		upsert: func(machine *agentv1alpha1.Machine) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchMachinesResponse_Upsert{Upsert: machine}})
		},
		removed: func(name string) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchMachinesResponse_RemovedName{RemovedName: name}})
		},
		synced: func(marker *agentv1alpha1.Synced) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchMachinesResponse_Synced{Synced: marker}})
		},
		heartbeat: func(heartbeat *agentv1alpha1.Heartbeat) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchMachinesResponse_Heartbeat{Heartbeat: heartbeat}})
		},
		resync: func(marker *agentv1alpha1.Resync) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchMachinesResponse_Resync{Resync: marker}})
		},
	})
}
