// Package tracingtest receives spans in tests, like an OTLP collector.
package tracingtest

import (
	"context"
	"encoding/hex"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// Span is a received span. IDs are hexadecimal. Parent is "" for a root span.
type Span struct {
	Name, Trace, ID, Parent string
	// Server and Client report whether the span is that of a server or of a client call.
	Server, Client bool
	// State is the tracestate.
	State string
	// Links are the IDs of linked spans.
	Links []string
	// Attributes are the attributes with text values. Resource are those of the process.
	Attributes, Resource map[string]string
}

// Collector is an OTLP collector on a loopback address. It is safe for concurrent use.
type Collector struct {
	collectorv1.UnimplementedTraceServiceServer

	// Endpoint is its URL, for OTEL_EXPORTER_OTLP_ENDPOINT.
	Endpoint string

	mu    sync.Mutex
	spans []Span
}

// Start starts a collector, which stops at the end of the test.
func Start(tb testing.TB) *Collector {
	tb.Helper()
	listener, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	c := &Collector{Endpoint: "http://" + listener.Addr().String()}
	served := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(served, c)
	ended := make(chan error, 1)
	go func() { ended <- served.Serve(listener) }()
	tb.Cleanup(func() {
		served.Stop()
		require.NoError(tb, <-ended)
	})
	return c
}

// Export implements the OTLP trace service.
func (c *Collector) Export(_ context.Context, r *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range r.GetResourceSpans() {
		for _, scope := range of.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, received(s, texts(of.GetResource().GetAttributes())))
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func received(s *tracev1.Span, resource map[string]string) Span {
	var links []string
	for _, link := range s.GetLinks() {
		links = append(links, hex.EncodeToString(link.GetSpanId()))
	}
	return Span{
		Name:  s.GetName(),
		Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
		Server: s.GetKind() == tracev1.Span_SPAN_KIND_SERVER, Client: s.GetKind() == tracev1.Span_SPAN_KIND_CLIENT, State: s.GetTraceState(),
		Links: links, Attributes: texts(s.GetAttributes()), Resource: resource,
	}
}

func texts(attributes []*commonv1.KeyValue) map[string]string {
	texts := map[string]string{}
	for _, a := range attributes {
		if text, ok := a.GetValue().GetValue().(*commonv1.AnyValue_StringValue); ok {
			texts[a.GetKey()] = text.StringValue
		}
	}
	return texts
}

// Spans returns the spans received so far, in that order.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans)
}

// Named returns the received spans with the given name.
func (c *Collector) Named(name string) []Span {
	return slices.DeleteFunc(c.Spans(), func(s Span) bool { return s.Name != name })
}

// SetEnvironment makes the process export to the collector until the end of the test. Batches wait
// no longer than 50 ms.
func (c *Collector) SetEnvironment(tb testing.TB) {
	tb.Helper()
	tb.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.Endpoint)
	tb.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
}
