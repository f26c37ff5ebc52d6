package hub

import (
	"net/http"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/trace"

	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
)

// Traced is a transport that makes a span of each request within a recorded span, such as a call's, and passes the trace on to the API server.
// Watches, and what the agent does for no call, are not traced.
func Traced(next http.RoundTripper) http.RoundTripper {
	return otelhttp.NewTransport(next,
		otelhttp.WithPropagators(tracing.Propagator),
		otelhttp.WithFilter(func(r *http.Request) bool { return trace.SpanContextFromContext(r.Context()).IsSampled() }),
		otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string {
			resource, _ := resourceOf(r.URL.Path)
			return r.Method + " " + resource
		}))
}
