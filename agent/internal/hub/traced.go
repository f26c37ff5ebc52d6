package hub

import (
	"net/http"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/trace"

	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
)

// Traced returns a transport that records a span for each request made within a sampled span, such
// as that of a call, and propagates the trace to the API server. Requests without one, such as
// watches, are not traced.
func Traced(next http.RoundTripper) http.RoundTripper {
	return otelhttp.NewTransport(next,
		otelhttp.WithPropagators(tracing.Propagator),
		otelhttp.WithFilter(func(r *http.Request) bool { return trace.SpanContextFromContext(r.Context()).IsSampled() }),
		otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string {
			resource, _ := resourceOf(r.URL.Path)
			return r.Method + " " + resource
		}))
}
