package tracing

import (
	"context"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"
)

// Propagator propagates the trace and span of a call, and whether they are sampled, as W3C
// traceparent. It ignores a caller's tracestate and baggage: they would be stored with the callee's
// spans, and forwarded to what the callee calls.
var Propagator propagation.TextMapPropagator = traceparent{}

type traceparent struct{ propagation.TraceContext }

// Extract implements [propagation.TextMapPropagator].
func (t traceparent) Extract(ctx context.Context, carrier propagation.TextMapCarrier) context.Context {
	ctx = t.TraceContext.Extract(ctx, carrier)
	from := trace.SpanContextFromContext(ctx)
	if !from.IsRemote() {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, from.WithTraceState(trace.TraceState{}))
}

// ClientHandler returns a handler that creates a span for each call made within a sampled span, and
// propagates the trace. Other calls, such as polls and watches, are not traced.
func ClientHandler(provider trace.TracerProvider) stats.Handler {
	return within{otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(provider), otelgrpc.WithPropagators(Propagator))}
}

// ServerHandler returns a handler that creates a span for a call if traces selects its method, the
// provider's sampler samples it, and admit accepts it. admit receives the call's context. The span
// continues the trace of the caller. Both functions must be safe for concurrent use.
func ServerHandler(provider trace.TracerProvider, traces func(method string) bool, admit func(ctx context.Context) bool) stats.Handler {
	return server{
		within: within{otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(provider), otelgrpc.WithPropagators(Propagator))},
		traces: traces, admit: admit,
	}
}

// within only handles calls within a sampled span.
type within struct{ stats.Handler }

// TagRPC implements [stats.Handler].
func (w within) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !recorded(ctx) {
		return ctx
	}
	return w.Handler.TagRPC(ctx, info)
}

// HandleRPC implements [stats.Handler].
func (w within) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if recorded(ctx) {
		w.Handler.HandleRPC(ctx, s)
	}
}

type server struct {
	within

	traces func(method string) bool
	admit  func(ctx context.Context) bool
}

// TagRPC implements [stats.Handler].
func (s server) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !s.traces(info.FullMethodName) {
		return ctx
	}
	// The sampler's decision is only known once there is a span. A span that is never ended is not
	// exported.
	spanned := s.Handler.TagRPC(ctx, info)
	if !recorded(spanned) || !s.admit(ctx) {
		return ctx
	}
	return spanned
}
