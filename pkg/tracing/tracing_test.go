package tracing_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"

	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing/tracingtest"
)

const patience = 20 * time.Second

func span(t *testing.T, traces *tracing.Tracing, name string) context.Context {
	t.Helper()
	ctx, span := traces.Provider().Tracer("test").Start(t.Context(), name)
	span.End()
	return ctx
}

func TestSpansArriveAtTheCollectorThatTheVariablesName(t *testing.T) {
	collector := tracingtest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.Endpoint)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.version=v2")

	traces, err := tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service", Version: "v1", Instance: "pod-1"})
	require.NoError(t, err)
	ctx := span(t, traces, "work")
	traces.Shutdown()
	spans := collector.Named("work")
	require.Len(t, spans, 1, "what has ended is exported at shutdown")
	assert.Equal(t, tracing.ID(ctx), spans[0].Trace)
	assert.Equal(t, "the-service", spans[0].Resource["service.name"])
	assert.Equal(t, "v2", spans[0].Resource["service.version"], "the variable wins")
	assert.Equal(t, "pod-1", spans[0].Resource["service.instance.id"])
	assert.Equal(t, "test", spans[0].Resource["deployment.environment"])

	t.Setenv("OTEL_SERVICE_NAME", "another-name")
	t.Setenv("OTEL_TRACES_SAMPLER", "always_off")
	traces, err = tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service"})
	require.NoError(t, err)
	ctx = span(t, traces, "unsampled")
	traces.Shutdown()
	assert.Empty(t, collector.Named("unsampled"))
	assert.Empty(t, tracing.ID(ctx), "there is no such trace")

	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	traces, err = tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service"})
	require.NoError(t, err)
	span(t, traces, "named")
	traces.Shutdown()
	require.Len(t, collector.Named("named"), 1)
	assert.Equal(t, "another-name", collector.Named("named")[0].Resource["service.name"])
}

func TestItIsOffUnlessTheVariablesNameAnEndpoint(t *testing.T) {
	for name, variables := range map[string]map[string]string{
		"no endpoint":     {"OTEL_TRACES_SAMPLER": "always_on"},
		"disabled":        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"},
		"no exporter":     {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"},
		"an empty string": {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
	} {
		t.Run(name, func(t *testing.T) {
			for variable, value := range variables {
				t.Setenv(variable, value)
			}
			traces, err := tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service"})
			require.NoError(t, err)
			require.Nil(t, traces)
			if traces.Provider() != nil { // the interface itself must be nil
				t.Error("there is a provider to set handlers up with")
			}
			traces.Shutdown()
		})
	}
}

func TestWhatIsNotSupportedIsAnError(t *testing.T) {
	for name, value := range map[string]string{
		"OTEL_TRACES_EXPORTER":               "zipkin",
		"OTEL_EXPORTER_OTLP_PROTOCOL":        "http/protobuf",
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4317",
		"OTEL_RESOURCE_ATTRIBUTES":           "no-value",
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
			t.Setenv(name, value)
			_, err := tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service"})
			require.ErrorContains(t, err, name)
		})
	}
}

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) add(_, line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, line)
}

func (l *lines) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.text...)
}

func TestACollectorThatIsAwayIsLoggedSeldomAndHoldsNothingUp(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+listener.Addr().String())
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
	t.Setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
	log := &lines{}
	traces, err := tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service", Log: funcr.New(log.add, funcr.Options{})})
	require.NoError(t, err)

	for range 10 {
		span(t, traces, "lost")
	}
	require.Eventually(t, func() bool { return len(log.all()) > 0 }, patience, time.Millisecond)
	traces.Shutdown() // by then all ten batches have failed or been given up
	for _, line := range log.all() {
		assert.Contains(t, line, "not exported")
	}
	assert.LessOrEqual(t, len(log.all()), 2, "one of the batches, one of the shutdown: %v", log.all())
}

func TestOnlyCallsWithinARecordedSpanAreTraced(t *testing.T) {
	collector := tracingtest.Start(t)
	collector.SetEnvironment(t)
	traces, err := tracing.FromEnvironment(t.Context(), tracing.Config{Service: "the-service"})
	require.NoError(t, err)
	t.Cleanup(traces.Shutdown)
	handler := tracing.ClientHandler(traces.Provider())

	poll := handler.TagRPC(t.Context(), &stats.RPCTagInfo{FullMethodName: "/service/Poll"})
	assert.Equal(t, t.Context(), poll)
	ctx := span(t, traces, "work")
	call := handler.TagRPC(ctx, &stats.RPCTagInfo{FullMethodName: "/service/Call"})
	assert.Equal(t, tracing.ID(ctx), tracing.ID(call))
	assert.NotEqual(t, trace.SpanContextFromContext(ctx).SpanID(), trace.SpanContextFromContext(call).SpanID())
}
