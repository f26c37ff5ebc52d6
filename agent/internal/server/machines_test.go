package server_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Another agent may serve the Cluster, and has its Machines.
func TestMachinesOfAClusterThatTheAgentDoesNotServeAreNotAnswered(t *testing.T) {
	f := start(t, func(_ *fixture, config *server.Config) { config.Scope = hub.NewScope([]string{"elsewhere"}, nil) })
	reader := f.as("spiffe://karpenter-capi/reader")
	_, err := reader.Machines.ListMachines(f.ctx(), &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef})
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	_, err = reader.Machines.GetMachine(f.ctx(), &agentv1alpha1.GetMachineRequest{Cluster: spokeRef, Name: "m"})
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	stream, err := reader.Machines.WatchMachines(f.ctx(), &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
}
