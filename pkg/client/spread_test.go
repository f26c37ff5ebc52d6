package client_test

import (
	"cmp"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// replica is one of several agents behind one name.
type replica struct {
	agentv1alpha1.UnimplementedStatusServiceServer

	calls atomic.Int64
}

func (r *replica) GetStatus(context.Context, *agentv1alpha1.GetStatusRequest) (*agentv1alpha1.GetStatusResponse, error) {
	r.calls.Add(1)
	return &agentv1alpha1.GetStatusResponse{}, nil
}

// serve serves at an address; an empty one means any.
func (r *replica) serve(t *testing.T, at string, options ...grpc.ServerOption) (address string, server *grpc.Server) {
	t.Helper()
	listener, err := net.Listen("tcp", cmp.Or(at, "127.0.0.1:0"))
	require.NoError(t, err)
	server = grpc.NewServer(options...)
	agentv1alpha1.RegisterStatusServiceServer(server, r)
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-served })
	return listener.Addr().String(), server
}

func TestClientsSpreadOverTheAgentsOfOneName(t *testing.T) {
	replicas := [2]*replica{{}, {}}
	var servers [2]*grpc.Server
	names := manual.NewBuilderWithScheme("spread")
	var state resolver.State
	for i, r := range replicas {
		address, server := r.serve(t, "")
		servers[i] = server
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}})
	}
	names.InitialState(state)
	resolver.Register(names)

	const clients, calls = 32, 3
	var connected [clients]*client.Client
	for i := range connected {
		conn, err := grpc.NewClient("spread:///agents", grpc.WithTransportCredentials(insecure.NewCredentials()), client.WithRetry())
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, conn.Close()) })
		connected[i] = client.FromConn(conn, client.Options{})
	}
	status := func(c *client.Client) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := c.Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
	}
	for _, c := range connected {
		for range calls {
			status(c)
		}
	}
	for _, r := range replicas {
		assert.Positive(t, r.calls.Load(), "it has none of %d clients", clients)
		assert.Zero(t, r.calls.Load()%calls, "a client's calls go to one agent")
	}

	servers[0].Stop()
	for _, c := range connected {
		status(c)
	}
	assert.EqualValues(t, (calls+1)*clients, replicas[0].calls.Load()+replicas[1].calls.Load(), "the other agent has them all")
}

// In a roll, the replica that is replaced last gets no clients by the roll itself. The end of the
// connections' age brings them.
func TestClientsReturnToAReplicaOnceTheirConnectionsAreOld(t *testing.T) {
	const clients = 32
	aging := func(age time.Duration) grpc.ServerOption {
		return grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: age})
	}
	for name, scenario := range map[string]struct {
		age     time.Duration
		returns bool
	}{
		"a connection that ages": {age: 50 * time.Millisecond, returns: true},
		"one that does not":      {age: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			gone, stays := &replica{}, &replica{}
			address, server := gone.serve(t, "", aging(scenario.age))
			other, _ := stays.serve(t, "", aging(scenario.age))
			names := manual.NewBuilderWithScheme("returns")
			names.InitialState(resolver.State{Endpoints: []resolver.Endpoint{
				{Addresses: []resolver.Address{{Addr: address}}}, {Addresses: []resolver.Address{{Addr: other}}},
			}})
			var connected [clients]*client.Client
			for i := range connected {
				conn, err := grpc.NewClient("returns:///agents", grpc.WithResolvers(names), grpc.WithTransportCredentials(insecure.NewCredentials()),
					client.WithRetry())
				require.NoError(t, err)
				t.Cleanup(func() { assert.NoError(t, conn.Close()) })
				connected[i] = client.FromConn(conn, client.Options{})
			}
			all := func() {
				for _, c := range connected {
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					_, err := c.Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
					cancel()
					require.NoError(t, err, "no call fails when a replica goes, returns, or ends an old connection")
				}
			}
			server.Stop()
			all()
			require.Zero(t, gone.calls.Load())

			gone.serve(t, address, aging(scenario.age))
			if !scenario.returns {
				all()
				require.Zero(t, gone.calls.Load(), "they stay where they are")
				return
			}
			for until := time.Now().Add(30 * time.Second); gone.calls.Load() == 0; all() {
				require.True(t, time.Now().Before(until), "no client has returned")
			}
			before := stays.calls.Load()
			all()
			require.Greater(t, stays.calls.Load(), before, "the clients do not all move to the replica that returned")
		})
	}
}
