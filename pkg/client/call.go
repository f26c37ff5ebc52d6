package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// RequestIDKey is the metadata key of a call's request ID. A caller that already has an ID sets it
// in the outgoing context; every other call gets a random UUID.
const RequestIDKey = "x-request-id"

// RequestID returns the request ID of the call that failed with err, under which the agent logged
// it. It returns "" if err does not come from a call of a [Client].
func RequestID(err error) string {
	if failed, ok := errors.AsType[*callError](err); ok {
		return failed.requestID
	}
	return ""
}

// call identifies a call in the agent's log and in traces.
type call struct {
	method    string
	requestID string
	traceID   string // "" if it is not traced
}

// fields returns the fields shared by the call's log lines, followed by more.
func (c call) fields(more ...any) []any {
	fields := []any{"method", c.method, "requestID", c.requestID}
	if c.traceID != "" {
		fields = append(fields, "traceID", c.traceID)
	}
	return append(fields, more...)
}

// callError is the error of a call. It has the gRPC status of the error that it wraps.
type callError struct {
	call

	err error
}

func (e *callError) Error() string {
	trace := ""
	if e.traceID != "" {
		trace = ", trace " + e.traceID
	}
	return fmt.Sprintf("%s: %v (request %s%s)", e.method, e.err, e.requestID, trace)
}

func (e *callError) Unwrap() error { return e.err }

func (e *callError) GRPCStatus() *status.Status { return status.Convert(e.err) }

// caller adds to a connection what each call needs.
type caller struct {
	conn    grpc.ClientConnInterface
	timeout time.Duration
	logger  logr.Logger
	traceID func(context.Context) string
	clock   clock.Clock
}

func (c *caller) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	ctx, call := c.begin(ctx, method)
	if _, bounded := ctx.Deadline(); !bounded && c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	start := time.Now()
	err := c.conn.Invoke(ctx, method, args, reply, opts...)
	for range throttledAttempts {
		if !agenterrors.IsThrottled(err) || !c.await(ctx, err) {
			break
		}
		err = c.conn.Invoke(ctx, method, args, reply, opts...)
	}
	if err != nil {
		c.logger.V(1).Info("agent call failed", call.fields(
			"duration", time.Since(start).String(), "code", status.Code(err).String(), "error", err.Error())...)
		return &callError{call: call, err: err}
	}
	if log := c.logger.V(4); log.Enabled() {
		log.Info("agent call", call.fields("duration", time.Since(start).String())...)
	}
	return nil
}

const (
	// throttledAttempts is how often a call is repeated after the agent rejected it because the
	// caller had requested too much at once.
	throttledAttempts = 5
	// throttledJitter is the largest part of the delay by which it is extended. It keeps callers
	// that were rejected together from returning together.
	throttledJitter = 0.2
)

// await waits as long as the agent requested, and reports whether the call is to be repeated. It
// does not wait where the call might reach its deadline meanwhile: the caller had better know at
// once that it was throttled, and for how long. A rejected call has had no effect, so every call
// may be repeated.
func (c *caller) await(ctx context.Context, err error) bool {
	delay, ok := agenterrors.RetryDelay(err)
	longest := float64(delay) * (1 + throttledJitter)
	if deadline, bounded := ctx.Deadline(); !ok || bounded && float64(time.Until(deadline)) <= longest {
		return false
	}
	timer := c.clock.NewTimer(wait.Jitter(delay, throttledJitter))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return true
	}
}

func (c *caller) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	ctx, call := c.begin(ctx, method)
	if log := c.logger.V(4); log.Enabled() {
		log.Info("agent stream", call.fields()...)
	}
	stream, err := c.conn.NewStream(ctx, desc, method, opts...)
	if err != nil {
		return nil, &callError{call: call, err: err}
	}
	return &identifiedStream{ClientStream: stream, call: call}, nil
}

// identifiedStream adds the request ID to the error that ends a stream.
type identifiedStream struct {
	grpc.ClientStream

	call call
}

func (s *identifiedStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return &callError{call: s.call, err: err}
}

// begin returns a context whose metadata has the call's request ID.
func (c *caller) begin(ctx context.Context, method string) (context.Context, call) {
	ctx, requestID := withRequestID(ctx)
	return ctx, call{method: path.Base(method), requestID: requestID, traceID: c.traceID(ctx)}
}

func withRequestID(ctx context.Context) (context.Context, string) {
	if outgoing, ok := metadata.FromOutgoingContext(ctx); ok {
		if ids := outgoing.Get(RequestIDKey); len(ids) > 0 && ids[0] != "" {
			return ctx, ids[0]
		}
	}
	id := uuid.NewString()
	return metadata.AppendToOutgoingContext(ctx, RequestIDKey, id), id
}
