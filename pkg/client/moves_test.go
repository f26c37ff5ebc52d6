package client_test

import (
	"context"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// aging is an agent that ends each connection after a while.
type aging struct {
	agentv1alpha1.UnimplementedNodeGroupServiceServer

	opened atomic.Int64
}

func (a *aging) WatchNodeGroups(
	_ *agentv1alpha1.WatchNodeGroupsRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchNodeGroupsResponse],
) error {
	a.opened.Add(1)
	err := stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{Event: &agentv1alpha1.WatchNodeGroupsResponse_Synced{Synced: &agentv1alpha1.Synced{}}})
	beats := time.NewTicker(10 * time.Millisecond)
	defer beats.Stop()
	for err == nil {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case now := <-beats.C:
			err = stream.Send(&agentv1alpha1.WatchNodeGroupsResponse{Event: &agentv1alpha1.WatchNodeGroupsResponse_Heartbeat{
				Heartbeat: &agentv1alpha1.Heartbeat{Time: timestamppb.New(now)},
			}})
		}
	}
	return err
}

// Every view would have a gap every two hours otherwise, and NodeClaims be asked for meanwhile.
func TestAViewMovesOffAConnectionThatTheAgentEnds(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	require.NoError(t, err)
	agent := &aging{}
	ends := keepalive.ServerParameters{MaxConnectionAge: 100 * time.Millisecond, MaxConnectionAgeGrace: time.Minute}
	server := grpc.NewServer(grpc.KeepaliveParams(ends))
	agentv1alpha1.RegisterNodeGroupServiceServer(server, agent)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	c, err := client.New(client.Options{Address: "unix:" + socket})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	mirror := c.MirrorNodeGroups(&agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- mirror.Run(ctx) }()
	require.NoError(t, mirror.WaitForSync(t.Context()))
	since := mirror.State().Since
	require.Eventually(t, func() bool { return agent.opened.Load() >= 4 }, 30*time.Second, time.Millisecond, "the view moves again and again")
	state := mirror.State()
	assert.True(t, state.Connected)
	assert.Equal(t, since, state.Since, "it was never disconnected")
	require.NoError(t, state.LastError)
	cancel()
	require.NoError(t, <-ended)
}
