package claims

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

// tracer makes spans for calls, and records them.
type tracer struct {
	*tracetest.SpanRecorder
	trace.Tracer
}

func newTracer(sampler sdktrace.Sampler) tracer {
	recorder := tracetest.NewSpanRecorder()
	return tracer{recorder, sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder), sdktrace.WithSampler(sampler)).Tracer("test")}
}

// ended returns the only ended span with that name.
func (r tracer) ended(t *testing.T, name string) sdktrace.ReadOnlySpan {
	t.Helper()
	var found []sdktrace.ReadOnlySpan
	for _, s := range r.Ended() {
		if s.Name() == name {
			found = append(found, s)
		}
	}
	require.Len(t, found, 1, name)
	return found[0]
}

func linked(s sdktrace.ReadOnlySpan) []trace.SpanID {
	var ids []trace.SpanID
	for _, link := range s.Links() {
		ids = append(ids, link.SpanContext.SpanID())
	}
	return ids
}

func TestARunIsInTheTraceOfTheFirstCallThatItServesAndLinkedWithTheOthers(t *testing.T) {
	calls := newTracer(sdktrace.AlwaysSample())
	e := engineWith(t, groupOf("group", 0, nil))
	var runs []func()
	e.spawn = func(run func()) { runs = append(runs, run) }
	g := e.group(namespace, "group")

	var spans []trace.Span
	for _, name := range []string{"first", "second", "third"} {
		ctx, span := calls.Start(t.Context(), name)
		spans = append(spans, span)
		g.kick(ctx)
	}
	require.Len(t, runs, 1, "they gather")
	runs[0]()
	for _, span := range spans {
		span.End()
	}

	run := calls.ended(t, "claims.Run")
	assert.Equal(t, spans[0].SpanContext().TraceID(), run.SpanContext().TraceID())
	assert.Equal(t, spans[0].SpanContext().SpanID(), run.Parent().SpanID())
	assert.Equal(t, []trace.SpanID{spans[1].SpanContext().SpanID(), spans[2].SpanContext().SpanID()}, linked(run))
	assert.Empty(t, linked(calls.ended(t, "first")))
	for _, name := range []string{"second", "third"} {
		assert.Equal(t, []trace.SpanID{run.SpanContext().SpanID()}, linked(calls.ended(t, name)))
	}

	g.kick(t.Context())
	require.Len(t, runs, 2)
	runs[1]()
	assert.Len(t, calls.Ended(), 4, "a run that serves no traced call has no span")
}

func TestNoMoreCallsWaitToBeLinkedThanASpanHasLinks(t *testing.T) {
	calls := newTracer(sdktrace.AlwaysSample())
	e := engineWith(t, groupOf("group", 0, nil))
	var runs []func()
	e.spawn = func(run func()) { runs = append(runs, run) }
	for range 2 * maxTraced {
		ctx, span := calls.Start(t.Context(), "call")
		e.group(namespace, "group").kick(ctx)
		span.End()
	}
	require.Len(t, runs, 1)
	runs[0]()
	assert.Len(t, linked(calls.ended(t, "claims.Run")), maxTraced-1)
}

func TestACallThatIsNotRecordedHasNoSpanOfTheEngine(t *testing.T) {
	calls := newTracer(sdktrace.NeverSample())
	e := engineWith(t, groupOf("group", 0, nil))
	e.spawn = func(run func()) { run() }
	for _, ctx := range []context.Context{t.Context(), unrecorded(t.Context(), calls)} {
		e.group(namespace, "group").kick(ctx)
	}
	assert.Empty(t, calls.Started())
}

func unrecorded(ctx context.Context, calls tracer) context.Context {
	ctx, span := calls.Start(ctx, "call")
	span.End()
	return ctx
}
