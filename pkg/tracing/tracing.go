// Package tracing configures OpenTelemetry for a process from the standard OTEL_* variables.
//
// It is a separate module, so that programs that use package client of module pkg do not depend on
// OpenTelemetry.
package tracing

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
)

const (
	// flushTimeout limits the export of the remaining spans when the process ends.
	flushTimeout = 5 * time.Second
	// troubleInterval is the minimum interval between log lines about spans that cannot be
	// exported.
	troubleInterval = time.Minute
)

// Config describes the process in its traces.
type Config struct {
	// Service is the name of the service, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES set
	// another. REQUIRED.
	Service string
	// Version is the version of the service. OPTIONAL.
	Version string
	// Instance distinguishes the process from other replicas. OPTIONAL.
	Instance string
	// Log receives a line when spans cannot be exported, at most one a minute. The zero Logger
	// discards it.
	Log logr.Logger
}

// Tracing exports spans. A nil Tracing exports none; all its methods may be called.
type Tracing struct {
	provider *sdktrace.TracerProvider
	log      logr.Logger
}

// FromEnvironment configures tracing if OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
// OTEL_EXPORTER_OTLP_ENDPOINT is set. It returns nil if neither is, or if OTEL_SDK_DISABLED or
// OTEL_TRACES_EXPORTER=none disables tracing. The exporter, the batches and the sampler follow the
// other OTEL_* variables. An error means that the variables request something unsupported; an
// unreachable collector is not an error.
//
// It replaces OpenTelemetry's process-wide error handler and logger, but not the global tracer
// provider.
func FromEnvironment(ctx context.Context, c Config) (*Tracing, error) {
	if enabled, err := enabled(); !enabled || err != nil {
		return nil, err
	}
	if c.Log.GetSink() == nil {
		c.Log = logr.Discard()
	}
	seldom := rate.Sometimes{Interval: troubleInterval}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		seldom.Do(func() { c.Log.Info("spans are not exported", "cause", err.Error()) })
	}))
	otel.SetLogger(c.Log)
	described, err := c.resource(ctx)
	if err != nil {
		return nil, err
	}
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("making the exporter of spans: %w", err)
	}
	return &Tracing{
		provider: sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(described)),
		log:      c.Log,
	}, nil
}

// enabled reports whether the variables request the export of spans. An error names an unsupported
// request.
func enabled() (bool, error) {
	of, endpoint := set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	if endpoint == "" || strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false, nil
	}
	switch exporter := os.Getenv("OTEL_TRACES_EXPORTER"); exporter {
	case "", "otlp":
	case "none":
		return false, nil
	default:
		return false, fmt.Errorf("OTEL_TRACES_EXPORTER: there is otlp and none, not %q", exporter)
	}
	if name, protocol := set("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); protocol != "" && protocol != "grpc" {
		return false, fmt.Errorf("%s: spans are exported over grpc only, not %q", name, protocol)
	}
	// The exporter parses host:port as a URL without a host, and would export nothing.
	parsed, err := url.Parse(endpoint)
	if err != nil || cmp.Or(parsed.Host, parsed.Path) == "" {
		return false, fmt.Errorf("%s: %q is not a URL like http://collector:4317 or, with TLS, https://collector:4317", of, endpoint)
	}
	return true, nil
}

// set returns the first of the variables that is set and not empty, with its value.
func set(names ...string) (name, value string) {
	for _, name := range names {
		if value := os.Getenv(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// resource describes the process. The variables are applied last and take precedence.
func (c Config) resource(ctx context.Context) (*resource.Resource, error) {
	attributes := []resource.Option{
		resource.WithTelemetrySDK(),
		resource.WithAttributes(semconv.ServiceName(c.Service)),
	}
	if c.Version != "" {
		attributes = append(attributes, resource.WithAttributes(semconv.ServiceVersion(c.Version)))
	}
	if c.Instance != "" {
		attributes = append(attributes, resource.WithAttributes(semconv.ServiceInstanceID(c.Instance)))
	}
	described, err := resource.New(ctx, append(attributes, resource.WithFromEnv())...)
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return described, nil
}

// Provider returns the tracer provider, or nil if t is nil.
func (t *Tracing) Provider() trace.TracerProvider {
	if t == nil {
		return nil
	}
	return t.provider
}

// Shutdown exports the spans that have ended, within five seconds. Later spans are not exported.
func (t *Tracing) Shutdown() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.log.Info("the last spans were not exported", "cause", err.Error())
	}
}

// ID returns the ID of the trace in which the context's span is sampled, or "" if there is none.
func ID(ctx context.Context) string {
	if !recorded(ctx) {
		return ""
	}
	return trace.SpanContextFromContext(ctx).TraceID().String()
}

func recorded(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsSampled() }
