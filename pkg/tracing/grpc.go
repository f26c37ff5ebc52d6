package tracing

import (
	"context"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"
)

// Propagator carries which trace and span a call belongs to, and whether they are sampled: W3C's traceparent. It takes no more from a caller, whose
// tracestate and baggage would be stored with the callee's spans and go on to what the callee calls.
var Propagator propagation.TextMapPropagator = traceparent{}

type traceparent struct{ propagation.TraceContext }

// Extract is [propagation.TextMapPropagator]'s.
func (t traceparent) Extract(ctx context.Context, carrier propagation.TextMapCarrier) context.Context {
	ctx = t.TraceContext.Extract(ctx, carrier)
	from := trace.SpanContextFromContext(ctx)
	if !from.IsRemote() {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, from.WithTraceState(trace.TraceState{}))
}

// ClientHandler returns a handler that makes a span of each call within a recorded span, and passes the trace on. Other calls, such as polls and
// watches, are not traced.
func ClientHandler(provider trace.TracerProvider) stats.Handler {
	return within{otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(provider), otelgrpc.WithPropagators(Propagator))}
}

// ServerHandler returns a handler that makes a span of each call of a method that traces reports, if the provider's sampler records it and admit
// agrees. admit gets the call's context. The span continues the trace of the caller. Both functions must be safe for concurrent use.
func ServerHandler(provider trace.TracerProvider, traces func(method string) bool, admit func(ctx context.Context) bool) stats.Handler {
	return server{
		within: within{otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(provider), otelgrpc.WithPropagators(Propagator))},
		traces: traces, admit: admit,
	}
}

// within handles only what happens in a recorded span.
type within struct{ stats.Handler }

// TagRPC is [stats.Handler]'s.
func (w within) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !recorded(ctx) {
		return ctx
	}
	return w.Handler.TagRPC(ctx, info)
}

// HandleRPC is [stats.Handler]'s.
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

// TagRPC is [stats.Handler]'s.
func (s server) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !s.traces(info.FullMethodName) {
		return ctx
	}
	// What the sampler says is known only once there is a span. One that is not ended is not exported.
	spanned := s.Handler.TagRPC(ctx, info)
	if !recorded(spanned) || !s.admit(ctx) {
		return ctx
	}
	return spanned
}
