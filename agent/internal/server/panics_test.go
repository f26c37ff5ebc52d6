package server_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The process serves all Clusters. What one caller can make panic must cost that caller alone.

func TestAPanicCostsTheCallsOfOneClusterAlone(t *testing.T) {
	f := start(t, func(_ *fixture, config *server.Config) {
		config.Onboarded = func(_ context.Context, name types.NamespacedName) (string, bool, error) {
			if name.Name == "broken" {
				panic("a bug")
			}
			return "", true, nil
		}
	})
	healthy, err := f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = healthy.Recv()
	require.NoError(t, err)

	broken := f.as("spiffe://karpenter-capi/cluster/fleet/broken")
	ref := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "broken"}
	_, err = broken.NodeGroups.ListNodeGroups(f.ctx(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: ref})
	require.Equal(t, codes.Internal, grpcstatus.Code(err), "a call: %v", err)
	require.NotContains(t, err.Error(), "a bug")
	stream, err := broken.NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: ref})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.Equal(t, codes.Internal, grpcstatus.Code(err), "a stream: %v", err)
	require.NotContains(t, err.Error(), "a bug")

	f.nodeGroups.Set(spoke, "fleet/a", &agentv1alpha1.NodeGroup{Id: "fleet/a"})
	event, err := healthy.Recv()
	require.NoError(t, err, "a stream of another Cluster")
	require.Equal(t, "fleet/a", event.GetUpsert().GetId())
	require.NoError(t, f.list(f.cluster()))
}

// Certificates are looked at before there is a call, in goroutines of the transport.
func TestAPanicInAHandshakeCostsOneConnection(t *testing.T) {
	var broken atomic.Bool
	f := start(t, func(_ *fixture, config *server.Config) {
		authorizer, err := authz.New("karpenter-capi", func() *authz.Policy {
			if broken.Load() {
				panic("a bug")
			}
			return nil
		}, clock.RealClock{})
		require.NoError(t, err)
		config.Authorizer = authorizer
	})
	before := f.cluster()
	require.NoError(t, f.list(before))
	broken.Store(true)
	require.Equal(t, codes.Unavailable, grpcstatus.Code(f.list(f.cluster())))
	require.Contains(t, f.log.String(), "a connection is closed because of a bug in the agent")
	broken.Store(false)
	require.NoError(t, f.list(before), "other connections stay")
	require.NoError(t, f.list(f.cluster()))
}

// The rights of a stream's caller are looked at again in a goroutine of their own.
func TestAPanicWhileAStreamIsOpenCostsThatStreamAlone(t *testing.T) {
	var broken atomic.Bool
	f := start(t, func(_ *fixture, config *server.Config) {
		config.RightsInterval = 5 * time.Millisecond
		config.Onboarded = func(_ context.Context, name types.NamespacedName) (string, bool, error) {
			if name.Name == "broken" && broken.Load() {
				panic("a bug")
			}
			return "", true, nil
		}
	})
	watch := func(cluster string) func() error {
		stream, err := f.as("spiffe://karpenter-capi/cluster/fleet/"+cluster).NodeGroups.WatchNodeGroups(f.ctx(),
			&agentv1alpha1.WatchNodeGroupsRequest{Cluster: &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: cluster}})
		require.NoError(t, err)
		receive := func() error {
			_, err := stream.Recv()
			return err
		}
		require.NoError(t, receive(), "the snapshot's end")
		return receive
	}
	of, healthy := watch("broken"), watch("spoke")
	broken.Store(true)
	err := of()
	require.Equal(t, codes.Internal, grpcstatus.Code(err), "%v", err)
	require.NotContains(t, err.Error(), "a bug")
	require.Contains(t, f.log.String(), "a stream ends because of a bug in the agent")

	// Whose load the metrics show depends on the Cluster as well.
	families, err := f.registry.Gather()
	require.NoError(t, err)
	require.NotEmpty(t, families)
	require.Contains(t, f.log.String(), "metrics are missing because of a bug in the agent")

	f.nodeGroups.Set(spoke, "fleet/a", &agentv1alpha1.NodeGroup{Id: "fleet/a"})
	require.NoError(t, healthy(), "a stream of another Cluster")
	broken.Store(false)
	watch("broken")
}

// Whether a call is traced is decided before any interceptor runs.
func TestAPanicInTheTracingOfACallCostsItsTraceAlone(t *testing.T) {
	recorder, panics := tracetest.NewSpanRecorder(), atomic.Bool{}
	f := start(t, recording(recorder), func(_ *fixture, config *server.Config) {
		authorizer, err := authz.New("karpenter-capi", func() *authz.Policy {
			if panics.CompareAndSwap(true, false) { // once: the call itself looks at the policy next
				panic("a bug")
			}
			return nil
		}, clock.RealClock{})
		require.NoError(t, err)
		config.Authorizer = authorizer
	})
	of := f.cluster()
	call := func(trace int) {
		_, err := of.Status.GetStatus(asSampled(f.ctx(), trace), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
	}
	call(1)
	require.Eventually(t, func() bool { return len(recorder.Ended()) == 1 }, patience, time.Millisecond)
	panics.Store(true)
	call(2)
	require.False(t, panics.Load(), "it has panicked")
	require.Contains(t, f.log.String(), "a call is not traced because of a bug in the agent")
	call(3)
	require.Eventually(t, func() bool { return len(recorder.Ended()) == 2 }, patience, time.Millisecond)
	require.Equal(t, fmt.Sprintf("%032x", 3), recorder.Ended()[1].SpanContext().TraceID().String())
}
