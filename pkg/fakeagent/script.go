package fakeagent

import (
	"context"
	"path"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"
)

// Always is the number of calls that means all calls, until the script is changed.
const Always = -1

// maxRequests limits how many requests and metadata are kept of each method.
const maxRequests = 4096

// script is what happens to calls, by method name.
type script struct {
	clock clock.Clock

	mu      sync.Mutex
	methods map[string]*methodScript
	silent  chan struct{} // nil unless calls are not answered
}

type methodScript struct {
	before, after failure
	delay         time.Duration
	calls         int
	requests      []proto.Message
	metadata      []metadata.MD
}

type failure struct {
	left int // calls that still fail, or Always
	err  error
}

// take returns the error of the next call, if any.
func (f *failure) take() error {
	if f.left == 0 {
		return nil
	}
	if f.left > 0 {
		f.left--
	}
	return f.err
}

// Fail makes the next calls of the method fail with the error, without any effect. The method is
// named without its service, for example `CreateClaim`. calls may be [Always]; 0 ends it.
func (a *Agent) Fail(method string, calls int, err error) {
	a.script.change(method, func(m *methodScript) { m.before = failure{left: calls, err: err} })
}

// FailAfter lets the next calls of the unary method take effect, and then makes them fail with the
// error, as if the response were lost.
func (a *Agent) FailAfter(method string, calls int, err error) {
	a.script.change(method, func(m *methodScript) { m.after = failure{left: calls, err: err} })
}

// Delay makes every call of the method wait before it has any effect. A call that is cancelled
// while it waits has none.
func (a *Agent) Delay(method string, delay time.Duration) {
	a.script.change(method, func(m *methodScript) { m.delay = delay })
}

// Calls returns how often the method was called, including failed calls.
func (a *Agent) Calls(method string) int {
	var calls int
	a.script.change(method, func(m *methodScript) { calls = m.calls })
	return calls
}

// Requests returns the last 4096 requests of the unary method, oldest first. They must not be
// modified.
func (a *Agent) Requests(method string) []proto.Message {
	var requests []proto.Message
	a.script.change(method, func(m *methodScript) { requests = append(requests, m.requests...) })
	return requests
}

// Metadata returns the metadata of the last 4096 calls of the method, oldest first.
func (a *Agent) Metadata(method string) []metadata.MD {
	var all []metadata.MD
	a.script.change(method, func(m *methodScript) { all = append(all, m.metadata...) })
	return all
}

func (s *script) change(method string, f func(*methodScript)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.methods[method]
	if !ok {
		m = &methodScript{}
		s.methods[method] = m
	}
	f(m)
}

// begin counts the call and applies its script. The returned function returns the error that
// replaces the response, if any.
func (s *script) begin(ctx context.Context, fullMethod string, request any) (leave func() error, err error) {
	method := path.Base(fullMethod)
	var delay time.Duration
	s.change(method, func(m *methodScript) {
		m.calls++
		if message, ok := request.(proto.Message); ok {
			m.requests = appendBounded(m.requests, message)
		}
		incoming, _ := metadata.FromIncomingContext(ctx)
		m.metadata = appendBounded(m.metadata, incoming)
		delay = m.delay
		err = m.before.take()
	})
	if waitErr := s.heard(ctx); waitErr != nil {
		return nil, waitErr
	}
	if delay > 0 {
		timer := s.clock.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-timer.C():
		}
	}
	if err != nil {
		return nil, err
	}
	return func() error {
		var lost error
		s.change(method, func(m *methodScript) { lost = m.after.take() })
		return lost
	}, nil
}

// Silence leaves calls without an answer and makes streams silent, until it is called with false.
// It simulates a network that drops packets. Calls that have not been canceled by then continue.
func (a *Agent) Silence(silent bool) {
	a.FreezeStreams(silent)
	a.script.silence(silent)
}

func (s *script) silence(silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case silent && s.silent == nil:
		s.silent = make(chan struct{})
	case !silent && s.silent != nil:
		close(s.silent)
		s.silent = nil
	}
}

// heard waits until calls are answered again.
func (s *script) heard(ctx context.Context) error {
	s.mu.Lock()
	silent := s.silent
	s.mu.Unlock()
	if silent == nil {
		return nil
	}
	select {
	case <-silent:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// appendBounded appends an element, and drops the oldest beyond maxRequests.
func appendBounded[T any](to []T, one T) []T {
	if len(to) == maxRequests {
		to = to[1:]
	}
	return append(to, one)
}

func (s *script) unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		leave, err := s.begin(ctx, info.FullMethod, request)
		if err != nil {
			return nil, err
		}
		response, err := handler(ctx, request)
		if err != nil {
			return nil, err
		}
		if lost := leave(); lost != nil {
			return nil, lost
		}
		return response, nil
	}
}

func (s *script) stream() grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if _, err := s.begin(stream.Context(), info.FullMethod, nil); err != nil {
			return err
		}
		return handler(server, stream)
	}
}
