package claims

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// maxTraced is how many calls wait at most to be linked with a run's span; a span has no more links by default.
const maxTraced = 128

// toTrace notes the recorded span of what asks for the next step, if ctx has one. mu is held.
func (g *group) toTrace(ctx context.Context) {
	if span := trace.SpanFromContext(ctx); span.SpanContext().IsSampled() && len(g.traced) < maxTraced {
		g.traced = append(g.traced, span)
	}
}

// traceStep returns the context of a run's next step. A run has a span from the first step on that serves a recorded call. The span is a child of
// that call's, so that the trace of a call that comes alone holds all that is done for it; in a crowd, the others' spans and the run's link to each
// other.
func (g *group) traceStep(ctx context.Context) context.Context {
	g.mu.Lock()
	calls := g.traced
	g.traced = nil
	g.mu.Unlock()
	if len(calls) == 0 {
		return ctx
	}
	run := trace.SpanFromContext(ctx)
	if !run.IsRecording() {
		ctx = g.span(ctx, "Run", calls[0])
		run, calls = trace.SpanFromContext(ctx), calls[1:]
	}
	for _, call := range calls {
		run.AddLink(trace.Link{SpanContext: call.SpanContext()})
		call.AddLink(trace.Link{SpanContext: run.SpanContext()}) // has no effect once the call has been answered
	}
	return ctx
}

// span returns a context with a new span of work on the group, below another span if that is recorded.
func (g *group) span(ctx context.Context, name string, parent trace.Span) context.Context {
	if !parent.SpanContext().IsSampled() {
		return ctx
	}
	ctx, _ = parent.TracerProvider().Tracer("claims").Start( //nolint:spancheck // who has the context ends it
		trace.ContextWithSpan(ctx, parent), "claims."+name, trace.WithAttributes(attribute.String("capi_agent.node_group", g.key.String())))
	return ctx
}
