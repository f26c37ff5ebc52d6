package server_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// recording makes a server record its calls.
func recording(into sdktrace.SpanProcessor) func(*fixture, *server.Config) {
	return func(_ *fixture, c *server.Config) {
		c.TracerProvider = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(into))
	}
}

// asSampled returns the context of a caller that marks its trace as sampled.
func asSampled(ctx context.Context, trace int) context.Context { return inTrace(ctx, trace, 1) }

func inTrace(ctx context.Context, trace, flags int) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "traceparent", fmt.Sprintf("00-%032x-%016x-%02x", trace, trace, flags))
}

func TestACallerHasOnlySoManyOfItsCallsTraced(t *testing.T) {
	recorder, now := tracetest.NewSpanRecorder(), clocktesting.NewFakePassiveClock(time.Now())
	f := start(t, recording(recorder), func(_ *fixture, c *server.Config) { c.Clock = now })
	call := func(c *client.Client, from, n int) {
		t.Helper()
		for i := range n {
			_, err := c.Status.GetStatus(asSampled(f.ctx(), from+i), &agentv1alpha1.GetStatusRequest{})
			require.NoError(t, err)
		}
	}
	traced := func() int { return len(recorder.Ended()) } // a span ends after the response of its call
	first, other := f.cluster(), f.as("spiffe://karpenter-capi/reader")

	for i := range 150 {
		_, err := first.Status.GetStatus(inTrace(f.ctx(), i+1, 0), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err, "those that are not sampled do not count")
	}
	call(first, 1, 150)
	require.Eventually(t, func() bool { return traced() == 100 }, patience, time.Millisecond, "the others are served, and not traced")
	call(other, 1001, 10)
	require.Eventually(t, func() bool { return traced() == 110 }, patience, time.Millisecond, "another identity has its own")
	now.SetTime(now.Now().Add(time.Second))
	call(first, 2001, 20)
	require.Eventually(t, func() bool { return traced() == 120 }, patience, time.Millisecond, "ten more each second")
	f.stop() // calls in flight end
	require.Equal(t, 120, traced())
}

func TestOnlyUnaryCallsOfTheAPIAreTraced(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	f := start(t, recording(recorder))
	ctx := asSampled(f.ctx(), 1)
	watch, err := f.cluster().Claims.WatchClaims(ctx, &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)
	_, err = grpc_health_v1.NewHealthClient(f.cluster().Conn()).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	require.NoError(t, err)
	err = f.cluster().Conn().Invoke(ctx, "/made.up/Method", &agentv1alpha1.GetStatusRequest{}, &agentv1alpha1.GetStatusResponse{})
	require.Equal(t, codes.Unimplemented, grpcstatus.Code(err), "%v", err)
	require.Empty(t, recorder.Started())

	_, err = f.cluster().Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	require.NoError(t, err)
	require.Len(t, recorder.Started(), 1)
}

func TestTheLogNamesTheTraceOfACall(t *testing.T) {
	f := start(t, recording(tracetest.NewSpanRecorder()))
	require.NoError(t, f.create(f.cluster()), "the caller has no trace: the agent begins one")
	_, err := f.cluster().Claims.CreateClaim(asSampled(f.ctx(), 0xabc), &agentv1alpha1.CreateClaimRequest{
		Cluster: spokeRef, ClaimId: "traced", Holder: "karpenter", Candidates: []string{"fleet/small"},
	})
	require.NoError(t, err)
	line := fmt.Sprintf(`"traceID"="%032x"`, 0xabc)
	require.Eventually(t, func() bool {
		return lo.ContainsBy(strings.Split(f.log.String(), "\n"), func(text string) bool {
			return strings.Contains(text, line) && strings.Contains(text, `"requestID"=`) && strings.Contains(text, `"claim"="traced"`)
		})
	}, patience, time.Millisecond, "%s", f.log)
}
