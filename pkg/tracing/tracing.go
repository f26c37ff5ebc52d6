// Package tracing sets OpenTelemetry up for a process, as the standard OTEL_* variables say.
//
// It is a module of its own, so that programs which use package client of module pkg do not get OpenTelemetry among their dependencies.
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
	// flushTimeout bounds the export of what is left when the process ends.
	flushTimeout = 5 * time.Second
	// troubleInterval is the shortest time between two log lines about spans that cannot be exported.
	troubleInterval = time.Minute
)

// Config describes the process in its traces.
type Config struct {
	// Service is its name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES set another. REQUIRED.
	Service string
	// Version is its version. OPTIONAL.
	Version string
	// Instance tells it from other replicas. OPTIONAL.
	Instance string
	// Log gets a line when spans cannot be exported, at most one a minute. The zero Logger logs nothing.
	Log logr.Logger
}

// Tracing exports spans. Nil exports none; all methods may be called on it.
type Tracing struct {
	provider *sdktrace.TracerProvider
	log      logr.Logger
}

// FromEnvironment sets tracing up if OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT is set, and returns nil if neither is, or if
// OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER=none turns it off. The exporter, the batches and the sampler follow the other OTEL_* variables. An error
// means that the variables ask for what is not supported; a collector that cannot be reached is no error.
//
// It replaces OpenTelemetry's error handler and logger, of which a process has one each, and leaves its global tracer provider alone.
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

// enabled reports whether the variables ask for spans to be exported. An error says what they ask for that there is not.
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
	// The exporter takes host:port for a URL without a host, and exports nothing.
	parsed, err := url.Parse(endpoint)
	if err != nil || cmp.Or(parsed.Host, parsed.Path) == "" {
		return false, fmt.Errorf("%s: %q is no URL like http://collector:4317 or, with TLS, https://collector:4317", of, endpoint)
	}
	return true, nil
}

// set returns the first of the variables that is set and not empty, and its value.
func set(names ...string) (name, value string) {
	for _, name := range names {
		if value := os.Getenv(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// resource describes the process; the variables come last, and win.
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

// Provider makes tracers; nil when t is.
func (t *Tracing) Provider() trace.TracerProvider {
	if t == nil {
		return nil
	}
	return t.provider
}

// Shutdown exports the spans that have ended, within five seconds. No span is exported after that.
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

// ID returns the id of the trace that the context's span is recorded in, "" if there is none.
func ID(ctx context.Context) string {
	if !recorded(ctx) {
		return ""
	}
	return trace.SpanContextFromContext(ctx).TraceID().String()
}

func recorded(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsSampled() }
