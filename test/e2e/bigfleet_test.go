package e2e_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/bridge"
	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// TestBigFleetGetsItsMachines makes the calls that a shard of BigFleet makes, to the bridge, which
// calls the agent with the role autoscaler. The node group has two Machines of the user, and the
// bridge is started again while the machines are being made.
func TestBigFleetGetsItsMachines(t *testing.T) {
	figure := shows(t, "BigFleet: a bridge makes, configures, drains and deletes 3 machines, and is started again meanwhile; the user's stay")
	if testing.Short() {
		t.Skip("not in the short run: it takes minutes")
	}
	const (
		group, holder = "bigfleet", "cluster-autoscaler-bigfleet"
		floor, nodes  = 2, 3
	)
	leaveAsFound(t)
	copiesOf(t, w.Hub, manifests.ScaledHub, "scaled", group, annotated(agentv1.HolderAnnotation, holder))
	copiesOf(t, w.Spoke, manifests.ScaledWorkload, "scaled", group, nil)
	poll(t, 2*time.Minute, nodesRun(group, floor))
	users := uidsOf(machinesOf(t, group))

	certificate, key, err := w.Sandbox.AgentCertificate("bigfleet", sandbox.AutoscalerIdentity)
	require.NoError(t, err)
	options := bridge.Options{
		Agent:   agentAs(t, certificate, key),
		Cluster: &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName},
		Holder:  holder, StateFile: filepath.Join(t.TempDir(), "bigfleet.db"), ClusterID: "spoke", Slots: nodes, SpotInterruption: 0.05,
	}
	shard, stop := runBridge(t, options)
	var ids []string
	are := func(state protocol.State) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) {
			listed, err := shard.List(ctx, &protocol.ListRequest{States: []protocol.State{state}})
			ids = lo.Map(listed.GetMachines(), func(m *protocol.Machine, _ int) string { return m.GetId() })
			if err == nil && len(ids) == nodes {
				return "", nil
			}
			return fmt.Sprintf("%d machines to be %s: %d are (%v)", nodes, state, len(ids), err), nil
		}
	}
	sequence := int64(0)
	next := func() int64 { sequence++; return sequence }
	call := func(what string, one func(ctx context.Context, id string) (*protocol.Accepted, error)) {
		t.Helper()
		for _, id := range ids {
			_, err := one(within(t, soon), id)
			require.NoError(t, err, "%s %s", what, id)
		}
	}

	poll(t, soon, are(protocol.State_STATE_SPECULATIVE))
	began := time.Now()
	call("create", func(ctx context.Context, id string) (*protocol.Accepted, error) {
		return shard.Create(ctx, &protocol.CreateRequest{Id: id, Shard: "shard-0", Epoch: 1, Sequence: next()})
	})
	stop()
	shard, _ = runBridge(t, options)
	poll(t, 4*time.Minute, are(protocol.State_STATE_IDLE))
	call("configure", func(ctx context.Context, id string) (*protocol.Accepted, error) {
		return shard.Configure(ctx, &protocol.ConfigureRequest{Id: id, Cluster: "spoke", Shard: "shard-0", Epoch: 1, Sequence: next()})
	})
	poll(t, 4*time.Minute, are(protocol.State_STATE_CONFIGURED))
	figure("up in %.0f s", time.Since(began).Seconds())
	scale(t, group, floor+nodes)
	poll(t, 4*time.Minute, podsRun(group, floor+nodes))

	own := lo.Map(claimsOf(t, group), func(c agentv1.MachineClaim, _ int) types.UID {
		require.Equal(t, holder, c.Spec.Holder)
		require.NotNil(t, c.Status.Machine)
		return c.Status.Machine.UID
	})
	require.Len(t, own, nodes)
	require.Empty(t, lo.Intersect(own, users))
	hosts := lo.Map(ids, func(id string, _ int) string {
		m, err := shard.Get(within(t, soon), &protocol.GetRequest{Id: id})
		require.NoError(t, err)
		return m.GetHost().GetName()
	})
	providerIDs := lo.FilterMap(machinesOf(t, group), func(m clusterv1.Machine, _ int) (string, bool) {
		return m.Spec.ProviderID, lo.Contains(own, m.UID)
	})
	require.ElementsMatch(t, providerIDs, hosts)
	_, err = shard.Drain(within(t, soon), &protocol.DrainRequest{Id: ids[0], Shard: "shard-0", Epoch: 1, Sequence: 1})
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "a token of before")

	began = time.Now()
	call("drain", func(ctx context.Context, id string) (*protocol.Accepted, error) {
		return shard.Drain(ctx, &protocol.DrainRequest{Id: id, GraceSeconds: 30, Shard: "shard-0", Epoch: 1, Sequence: next()})
	})
	poll(t, 4*time.Minute, are(protocol.State_STATE_IDLE))
	// A claim ends when its machine is gone. Cluster API removes the Machine object a second or two
	// later.
	poll(t, soon, func(context.Context) (string, error) {
		extra, missing := lo.Difference(uidsOf(machinesOf(t, group)), users)
		require.Empty(t, missing, "the user's Machines stay")
		return lo.Ternary(len(extra) == 0, "", fmt.Sprintf("BigFleet's Machines %v to go", extra)), nil
	})
	call("delete", func(ctx context.Context, id string) (*protocol.Accepted, error) {
		return shard.Delete(ctx, &protocol.DeleteRequest{Id: id, Shard: "shard-0", Epoch: 1, Sequence: next()})
	})
	poll(t, soon, are(protocol.State_STATE_SPECULATIVE))
	figure("down in %.0f s", time.Since(began).Seconds())
	require.Empty(t, claimsOf(t, group))
	scale(t, group, 0)
	poll(t, 2*time.Minute, nodesRun(group, floor))
	require.ElementsMatch(t, users, uidsOf(machinesOf(t, group)))
}

// runBridge serves the bridge to BigFleet until stop, which may be called twice, or the end of the
// test.
func runBridge(t *testing.T, options bridge.Options) (shard protocol.ProviderClient, stop func()) {
	t.Helper()
	b, err := bridge.New(options)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	server := grpc.NewServer()
	protocol.Register(server, b)
	ctx, cancel := context.WithCancel(context.Background())
	served, ran := lo.Async(func() error { return server.Serve(listener) }), lo.Async(func() error { return b.Run(ctx) })
	stop = sync.OnceFunc(func() {
		server.Stop()
		cancel()
		require.NoError(t, <-served)
		require.NoError(t, <-ran)
		require.NoError(t, b.Close())
		_ = conn.Close() // nothing is left to lose
	})
	t.Cleanup(stop)
	return protocol.NewClient(conn), stop
}
