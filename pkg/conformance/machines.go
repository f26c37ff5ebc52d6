package conformance

import (
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var machineCases = []testCase{
	{"machines.list", fault(), "lists machines, claimed or not, by group and ordered by name", func(s *suite) {
		first, second := s.group(deployment("first", replicas(2))), s.group(deployment("second"))
		claim := s.running("a-claim", second)

		owned := s.machinesOnceThereAre(first, 2)
		require.Less(s, owned[0].GetName(), owned[1].GetName())
		for _, machine := range owned {
			require.Equal(s, first, machine.GetNodeGroupId())
			require.Empty(s, machine.GetClaimId())
			require.NotEmpty(s, machine.GetProviderId())
			require.NotEmpty(s, machine.GetNodeName())
			require.NotEmpty(s, machine.GetUid())
			require.NotNil(s, machine.GetCreatedAt())
			require.True(s, proto.Equal(s.Cluster(), machine.GetCluster()))
		}
		claimed := s.machinesOnceThereAre(second, 1)[0]
		require.Equal(s, "a-claim", claimed.GetClaimId())
		require.Equal(s, claim.GetMachine().GetUid(), claimed.GetUid())
		require.Equal(s, claim.GetMachine().GetProviderId(), claimed.GetProviderId())
		s.machinesOnceThereAre("", 3)
		s.machinesOnceThereAre(s.Cluster().GetNamespace()+"/missing", 0)
	}},

	{"machines.get", claimer(1), "gets one machine, and NOT_FOUND for another", func(s *suite) {
		claim := s.running("a-claim", s.group(deployment("workers")))
		response, err := s.Client().Machines.GetMachine(s.bounded(),
			&agentv1alpha1.GetMachineRequest{Cluster: s.Cluster(), Name: claim.GetMachine().GetName()})
		require.NoError(s, err)
		require.Equal(s, claim.GetMachine().GetUid(), response.GetMachine().GetUid())
		_, err = s.Client().Machines.GetMachine(s.bounded(),
			&agentv1alpha1.GetMachineRequest{Cluster: s.Cluster(), Name: "missing"})
		require.True(s, agenterrors.IsNotFound(err), "%v", err)
		require.Equal(s, agenterrors.ReasonMachineNotFound, agenterrors.ReasonOf(err))
	}},

	{"machines.watch", fault(), "watch sends a snapshot, SYNCED, and every change of each machine", func(s *suite) {
		id := s.group(deployment("workers", replicas(1)))
		owned := s.machinesOnceThereAre(id, 1)[0]
		stream, err := s.Client().Machines.WatchMachines(s.bounded(),
			&agentv1alpha1.WatchMachinesRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		next := func() *agentv1alpha1.WatchMachinesResponse {
			for {
				response, err := stream.Recv()
				require.NoError(s, err)
				if response.GetHeartbeat() == nil {
					return response
				}
			}
		}
		snapshot := map[string]bool{}
		for {
			response := next()
			if response.GetSynced() != nil {
				break
			}
			snapshot[response.GetUpsert().GetUid()] = true
		}
		require.Equal(s, map[string]bool{owned.GetUid(): true}, snapshot)

		claim := s.running("a-claim", id)
		name := claim.GetMachine().GetName()
		for {
			machine := next().GetUpsert()
			if machine.GetName() == name && machine.GetNodeName() != "" && machine.GetClaimId() == "a-claim" {
				require.Equal(s, claim.GetMachine().GetProviderId(), machine.GetProviderId())
				break
			}
		}
		s.mustRelease("a-claim")
		skipUntil(func() bool { return next().GetRemovedName() == name })
	}},
}
