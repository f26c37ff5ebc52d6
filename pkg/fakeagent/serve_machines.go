package fakeagent

import (
	"context"

	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type machineService struct {
	agentv1alpha1.UnimplementedMachineServiceServer

	agent *Agent
}

func (s machineService) ListMachines(
	ctx context.Context, request *agentv1alpha1.ListMachinesRequest,
) (*agentv1alpha1.ListMachinesResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	if err := a.whole(cluster); err != nil {
		return nil, err
	}
	return &agentv1alpha1.ListMachinesResponse{
		Machines: a.machineView.list(cluster, func(m *agentv1alpha1.Machine) bool {
			return request.GetNodeGroupId() == "" || m.GetNodeGroupId() == request.GetNodeGroupId()
		}),
	}, nil
}

func (s machineService) GetMachine(
	ctx context.Context, request *agentv1alpha1.GetMachineRequest,
) (*agentv1alpha1.GetMachineResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, cluster); err != nil {
		return nil, err
	}
	machine, ok := a.machineView.get(cluster, request.GetName())
	if !ok {
		if err := a.whole(cluster); err != nil {
			return nil, err
		}
		return nil, agenterrors.MachineNotFound(request.GetName())
	}
	return &agentv1alpha1.GetMachineResponse{Machine: machine}, nil
}

func (s machineService) WatchMachines(
	request *agentv1alpha1.WatchMachinesRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchMachinesResponse],
) error {
	return serve(stream.Context(), s.agent, request.GetCluster(), s.agent.readable, s.agent.machineView, everything[*agentv1alpha1.Machine],
		encoding[*agentv1alpha1.Machine]{
			upsert: func(machine *agentv1alpha1.Machine) error {
				return stream.Send(&agentv1alpha1.WatchMachinesResponse{
					Event: &agentv1alpha1.WatchMachinesResponse_Upsert{Upsert: machine},
				})
			},
			removed: func(key string) error {
				return stream.Send(&agentv1alpha1.WatchMachinesResponse{
					Event: &agentv1alpha1.WatchMachinesResponse_RemovedName{RemovedName: key},
				})
			},
			synced: func(marker *agentv1alpha1.Synced) error {
				return stream.Send(&agentv1alpha1.WatchMachinesResponse{
					Event: &agentv1alpha1.WatchMachinesResponse_Synced{Synced: marker},
				})
			},
			heartbeat: func(marker *agentv1alpha1.Heartbeat) error {
				return stream.Send(&agentv1alpha1.WatchMachinesResponse{
					Event: &agentv1alpha1.WatchMachinesResponse_Heartbeat{Heartbeat: marker},
				})
			},
			resync: func(marker *agentv1alpha1.Resync) error {
				return stream.Send(&agentv1alpha1.WatchMachinesResponse{
					Event: &agentv1alpha1.WatchMachinesResponse_Resync{Resync: marker},
				})
			},
		})
}
