package server_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func limited(change func(*limits.Options)) func(*fixture, *server.Config) {
	return func(_ *fixture, c *server.Config) {
		c.Limits = limits.Defaults()
		change(&c.Limits)
	}
}

func TestACallerThatAsksForTooMuchIsToldWhenToComeBack(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 0.001, 2 }))
	conn := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke")
	var err error
	for range 3 {
		err = f.send(conn, agentv1alpha1.StatusService_GetStatus_FullMethodName, nil)
	}
	require.Equal(t, codes.ResourceExhausted, grpcstatus.Code(err), "%v", err)
	require.True(t, agenterrors.IsThrottled(err))
	delay, ok := agenterrors.RetryDelay(err)
	require.True(t, ok)
	require.Greater(t, delay, 500*time.Second)
	require.False(t, agenterrors.IsNoRoom(err))
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")), "others are not concerned")
}

// Connections are read no faster than their calls are decided.
func TestEveryCallIsDecidedBeforeItsRequestIsRead(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.CallsPerSecond, o.CallBurst, o.RequestTimeout = 0.001, 3, time.Hour }))
	conn, nobody := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke"), f.raw("spiffe://karpenter-capi/nobody")
	require.NoError(t, f.send(conn, agentv1alpha1.StatusService_GetStatus_FullMethodName, nil))
	require.Equal(t, codes.PermissionDenied, grpcstatus.Code(f.send(nobody, agentv1alpha1.ClaimService_ListClaims_FullMethodName, nil)))
	for _, method := range []string{
		agentv1alpha1.ClaimService_CreateClaim_FullMethodName, agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName,
	} { // admitted, but without a request
		_, err := conn.NewStream(f.ctx(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		return grpcstatus.Code(f.send(conn, agentv1alpha1.StatusService_GetStatus_FullMethodName, nil)) == codes.ResourceExhausted
	}, patience, time.Millisecond)
	require.Eventually(t, func() bool { return f.server.Undecided() == 0 }, patience, time.Millisecond)
}

func TestACallWithoutADeadlineGetsOne(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.CallTimeout = 50 * time.Millisecond }), func(f *fixture, _ *server.Config) {
		f.engine.block = make(chan struct{}) // Create waits for it, or for its deadline
	})
	request := encodedCreate(t)
	err := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke").Invoke(
		context.Background(), agentv1alpha1.ClaimService_CreateClaim_FullMethodName, request, &struct{}{}, grpc.ForceCodecV2(asItIs{}))
	require.Contains(t, []codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Unavailable}, grpcstatus.Code(err), "%v", err)
}

func TestARequestThatNeverArrivesIsCutOff(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.RequestTimeout = time.Second }))
	for _, method := range []string{
		agentv1alpha1.ClaimService_SyncClaims_FullMethodName, agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName,
	} {
		stream, err := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke").NewStream(
			context.Background(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		require.NoError(t, err)
		require.Error(t, stream.RecvMsg(&struct{}{}))
	}
	require.NoError(t, f.list(f.cluster()))
}

func TestAWatcherThatNeverReadsIsCutOff(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.SendTimeout = time.Second }))
	large := make([]byte, 16<<10)
	for i := range large {
		large[i] = 'a'
	}
	for i := range 100 {
		id := "fleet/" + string(rune('a'+i%26)) + time.Duration(i).String()
		f.nodeGroups.Set(spoke, id, &agentv1alpha1.NodeGroup{Id: id, Name: string(large)})
	}
	stream, err := f.cluster().NodeGroups.WatchNodeGroups(context.Background(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return sum(t, f.registry, "grpc_server_handled_total", "grpc_method", "WatchNodeGroups") == 1
	},
		patience, time.Millisecond, "there is no reader")
	require.Zero(t, f.nodeGroups.Stats().Subscribers)
	_ = stream
}

// A stream's further messages count like calls: one stream could otherwise send any number of them.
func TestEachFurtherMessageOfAStreamIsCounted(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 0.001, 3 }))
	stream, err := grpc_reflection_v1.NewServerReflectionClient(f.raw(spokeURI)).ServerReflectionInfo(f.ctx())
	require.NoError(t, err)
	ask := func() error {
		// The stream may have ended already. Recv then returns the reason.
		if err := stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
			MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
		}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		_, err := stream.Recv()
		return err
	}
	for range 3 {
		require.NoError(t, ask())
	}
	err = ask()
	require.Equal(t, codes.ResourceExhausted, grpcstatus.Code(err), "%v", err)
	require.Equal(t, agenterrors.ReasonThrottled, agenterrors.ReasonOf(err))
}
