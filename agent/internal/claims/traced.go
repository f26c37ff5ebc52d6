package claims

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// maxTraced is the maximum number of waiting calls that are linked to a run's span. It is the
// default limit of links in a span.
const maxTraced = 128

// toTrace stores the recorded span of a call that asks for the next step, if ctx has one. mu is
// held.
func (g *group) toTrace(ctx context.Context) {
	if span := trace.SpanFromContext(ctx); span.SpanContext().IsSampled() && len(g.traced) < maxTraced {
		g.traced = append(g.traced, span)
	}
}

// traceStep returns the context of a run's next step. A run has a span from the first step that
// serves a recorded call. The span is a child of that call's, so the trace of a single call
// contains everything that is done for it. In a crowd, the spans of the other calls and of the run
// link to each other.
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

// span returns a context with a new span for work on the group, as a child of parent if that is
// recorded.
func (g *group) span(ctx context.Context, name string, parent trace.Span) context.Context {
	if !parent.SpanContext().IsSampled() {
		return ctx
	}
	ctx, _ = parent.TracerProvider().Tracer("claims").Start( //nolint:spancheck // who has the context ends it
		trace.ContextWithSpan(ctx, parent), "claims."+name, trace.WithAttributes(attribute.String("capi_agent.node_group", g.key.String())))
	return ctx
}
