package server_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// tenant returns the name of a Cluster, and a certificate's URI for its shim.
func tenant(n int) (ref *agentv1alpha1.ClusterRef, uri string) {
	name := fmt.Sprintf("tenant-%d", n)
	return &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: name}, "spiffe://karpenter-capi/cluster/fleet/" + name
}

// sum returns the sum of a metric's series with the label.
func sum(t *testing.T, registry *prometheus.Registry, metric, label, value string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	total := 0.0
	for _, family := range families {
		if family.GetName() != metric {
			continue
		}
		for _, series := range family.GetMetric() {
			for _, of := range series.GetLabel() {
				if of.GetName() == label && of.GetValue() == value {
					total += series.GetCounter().GetValue() + series.GetGauge().GetValue()
				}
			}
		}
	}
	return total
}

// awaitSum waits until a metric has the value.
func (f *fixture) awaitSum(expected float64, metric, label, value string) {
	f.Helper()
	require.EventuallyWithT(f, func(c *assert.CollectT) {
		assert.Equal(c, expected, sum(f.T, f.registry, metric, label, value)) //nolint:testifylint // whole numbers
	}, patience, time.Millisecond)
}

// A caller determines when its request arrives. Until then it has no turn that others wait for.
func TestAListWhoseRequestDoesNotArriveKeepsNoOtherWaiting(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.RequestTimeout = time.Hour }))
	const tenants = 8
	for n := range tenants {
		_, uri := tenant(n)
		conn := f.raw(uri)
		for range 2 {
			_, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
				agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName)
			require.NoError(t, err)
		}
	}
	f.awaitSum(2*tenants, "grpc_server_started_total", "grpc_method", "ListNodeGroups")
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")))
}

// However many identities do that, their requests are all that waits.
func TestRequestsThatDoNotArriveKeepNoOtherCallerWaiting(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.RequestTimeout = time.Hour }))
	const tenants, each = 5, 8
	for n := range tenants {
		_, uri := tenant(n)
		conn := f.raw(uri)
		for range each {
			_, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
				agentv1alpha1.StatusService_GetStatus_FullMethodName)
			require.NoError(t, err)
		}
	}
	f.awaitSum(tenants*each, "grpc_server_started_total", "grpc_method", "GetStatus")
	other := f.cluster()
	require.NoError(t, f.list(other))
	stream, err := other.Claims.WatchClaims(f.ctx(), &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
}

// So it is with calls that wait for the caller's own calls.
func TestAListThatWaitsForItsCallersOtherCallsKeepsNoOtherWaiting(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.HubCallsAtOnce = 1 }), func(f *fixture, _ *server.Config) {
		f.engine.block = make(chan struct{})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience) // more than the list below may take
	defer cancel()
	const tenants = 8
	ended := make(chan error, 3*tenants)
	for n := range tenants {
		ref, uri := tenant(n)
		c := f.as(uri)
		go func() {
			_, err := c.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
				Cluster: ref, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small"},
			})
			ended <- err
		}()
		require.Eventually(t, func() bool { return f.engine.creating.Load() == int64(n+1) }, patience, time.Millisecond)
		for range 2 {
			go func() {
				_, err := c.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: ref, Holder: "karpenter"})
				ended <- err
			}()
		}
	}
	f.awaitSum(2*tenants, "grpc_server_started_total", "grpc_method", "ListClaims")
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")))
	close(f.engine.block)
	for range 3 * tenants {
		require.NoError(t, <-ended)
	}
}

// Whatever a caller asks for, few of its calls query the hub at once.
func TestCallsThatQueryTheHubForMachinesWaitForTheirCallersOtherOnes(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.HubCallsAtOnce = 1 }), func(f *fixture, _ *server.Config) {
		f.engine.block = make(chan struct{})
	})
	ref, uri := tenant(0)
	c := f.as(uri)
	created := make(chan error, 1)
	go func() {
		_, err := c.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: ref, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small"},
		})
		created <- err
	}()
	require.Eventually(t, func() bool { return f.engine.creating.Load() == 1 }, patience, time.Millisecond)
	get := func(ctx context.Context) error {
		_, err := c.Machines.GetMachine(ctx, &agentv1alpha1.GetMachineRequest{Cluster: ref, Name: "none"})
		return err
	}
	list := func(ctx context.Context) error {
		_, err := c.Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{Cluster: ref})
		return err
	}
	for _, call := range []func(context.Context) error{get, list} {
		brief, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.Equal(t, codes.DeadlineExceeded, grpcstatus.Code(call(brief)))
	}
	close(f.engine.block)
	require.NoError(t, <-created)
	require.Equal(t, codes.NotFound, grpcstatus.Code(get(t.Context())))
	require.NoError(t, list(t.Context()))
}

// However many spokes synchronize at once, a bounded number of their requests is decoded and
// handled. The others wait, in the order of their arrival, and calls of other methods do not wait
// for them.
func TestABoundedNumberOfSyncClaimsIsHandledAtOnce(t *testing.T) {
	f := start(t, func(f *fixture, _ *server.Config) { f.engine.block = make(chan struct{}) })
	const tenants, handled = 24, 16
	ended := make(chan error, 2*tenants)
	syncClaims := func(ctx context.Context, c *client.Client, ref *agentv1alpha1.ClusterRef) {
		_, err := c.Claims.SyncClaims(ctx, &agentv1alpha1.SyncClaimsRequest{Cluster: ref, Holder: "karpenter", Token: "token", SpokeId: "spoke"})
		ended <- err
	}
	for n := range tenants {
		ref, uri := tenant(n)
		c := f.as(uri)
		for range 2 { // the second waits only for the first
			go syncClaims(f.ctx(), c, ref)
		}
	}
	f.awaitSum(2*tenants, "grpc_server_started_total", "grpc_method", "SyncClaims")
	f.awaitSum(tenants-handled, "capi_agent_calls_waiting", "turn", "sync")
	require.Eventually(t, func() bool { return f.engine.syncing.Load() == handled }, patience, time.Millisecond)
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")))

	ref, uri := tenant(tenants)
	short, cancel := context.WithTimeout(f.ctx(), 50*time.Millisecond)
	defer cancel()
	syncClaims(short, f.as(uri), ref)
	require.Equal(t, codes.DeadlineExceeded, grpcstatus.Code(<-ended), "a call waits until its deadline at most")

	close(f.engine.block)
	for range 2 * tenants {
		require.NoError(t, <-ended)
	}
	f.awaitSum(0, "capi_agent_calls_waiting", "turn", "sync")
}

// worstReports returns Node reports that take the most memory for their size: map entries of one
// character.
func worstReports(size int) []*agentv1alpha1.NodeReport {
	entries := func(n int) map[string]string {
		all := map[string]string{}
		for i := range n {
			all[strconv.FormatInt(int64(i), 36)] = "1"
		}
		return all
	}
	report := &agentv1alpha1.NodeReport{ProviderId: "a", Capacity: entries(128), Allocatable: entries(128), Labels: entries(64)}
	return slices.Repeat([]*agentv1alpha1.NodeReport{report}, size/(proto.Size(report)+4))
}

// A decoded request takes many times its size, until its call ends. Callers with small requests do
// not wait for large ones.
func TestTheDecodedRequestsOfManyTenantsAreBounded(t *testing.T) {
	const (
		tenants, size = 6, 4*mebibyte - 1024
		handled       = 2                                         // of 8 MiB together
		most          = handled*worstDecoded + tenants*4*mebibyte // the agent has those that wait as they arrived
	)
	f := start(t, limited(func(o *limits.Options) { o.CallTimeout = time.Hour }), func(f *fixture, _ *server.Config) {
		f.engine.block = make(chan struct{})
	})
	type call struct {
		conn    *grpc.ClientConn
		request encoded
	}
	// Requests are encoded before their calls begin: the agent closes a connection whose request
	// takes long to arrive.
	marshal := func(request *agentv1alpha1.SyncClaimsRequest) []byte {
		encoded, err := proto.Marshal(request)
		require.NoError(t, err)
		return encoded
	}
	prepare := func(n int, nodes []byte) call {
		ref, uri := tenant(n)
		return call{f.raw(uri), slices.Concat(marshal(&agentv1alpha1.SyncClaimsRequest{Cluster: ref, Holder: "karpenter", Token: "token"}), nodes)}
	}
	reports := func(size int) []byte { return marshal(&agentv1alpha1.SyncClaimsRequest{Nodes: worstReports(size)}) }
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ended := make(chan error, tenants+1)
	begin := func(c call) {
		go func() {
			ended <- c.conn.Invoke(ctx, agentv1alpha1.ClaimService_SyncClaims_FullMethodName, c.request, &struct{}{}, grpc.ForceCodecV2(asItIs{}))
		}()
	}
	large, encodedReports := make([]call, tenants), reports(size)
	for n := range large {
		large[n] = prepare(n, encodedReports)
	}
	small := prepare(tenants, reports(60<<10))
	before := live()
	for _, c := range large {
		begin(c)
	}
	require.Eventually(t, func() bool {
		return f.engine.syncing.Load() == handled && sum(t, f.registry, "capi_agent_calls_waiting", "turn", "large") == tenants-handled
	}, 2*time.Minute, 10*time.Millisecond)
	require.Empty(t, ended)
	kept := live() - before
	t.Logf("%.0f MiB are kept for %d requests", float64(kept)/mebibyte, tenants)
	require.Less(t, kept, int64(most))

	begin(small)
	require.Eventually(t, func() bool { return f.engine.syncing.Load() == handled+1 }, patience, time.Millisecond)
	cancel()
	for range tenants + 1 {
		require.Equal(t, codes.Canceled, grpcstatus.Code(<-ended))
	}
	f.awaitSum(0, "capi_agent_calls_waiting", "turn", "large")
}

// worstDecoded is how many bytes the worst request takes until its call ends; see docs/limits.md.
const worstDecoded = 80 * mebibyte
