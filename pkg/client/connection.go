package client

import (
	"context"
	"crypto/x509"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// connection carries a client's calls. gRPC keeps a connection for as long as it works, with the
// certificate that it was made with. When the certificate is replaced, connection therefore dials a
// second line, and sends new calls there once the agent has accepted the new certificate: in the
// handshake, and in a call, because its policy may refuse an identity that TLS accepts, or the
// identity may be for other calls. Calls that have already begun finish on the old line. Mirrors
// open their streams again on the new one: see moves.
//
// A new certificate that the agent rejects thus breaks nothing that works. If the line is lost
// meanwhile, it reconnects with the accepted certificate until that has expired. From then on,
// calls fail with the error that the new certificate causes.
type connection struct {
	dial func() (*line, error)
	// check makes a call on a new line, and returns its error.
	check func(context.Context, *grpc.ClientConn) error
	clock clock.PassiveClock
	// ending ends checks.
	ending context.Context //nolint:containedctx // it is the connection's, not a call's
	end    context.CancelFunc

	mu      sync.Mutex
	closed  bool
	current *line
	// next has a certificate that current does not have, and is not used before it is ready. It may
	// be nil.
	next *line
	// former are the old lines with calls that have not ended.
	former map[*line]struct{}
	// moving is closed when streams should be opened again, because calls are sent elsewhere now.
	moving  chan struct{}
	closing sync.WaitGroup
}

// line is one gRPC connection.
type line struct {
	*grpc.ClientConn

	// certificate returns the certificate that the line was made with, nil if there is none.
	certificate func() *x509.Certificate
	// outdated reports whether the line was made with a certificate that has been replaced.
	outdated func() bool
	// accepted records that the agent has accepted the certificate.
	accepted func()
	// calls is the number of calls that have not ended. It is guarded by the connection's mutex.
	calls int
	// checked is the state of the check of a new line, refusedAt when it was last refused, and
	// refusal why, nil unless it was. failing is since when no connection can be made although the
	// current line has one, zero otherwise. They are guarded by the connection's mutex.
	checked            checked
	refusedAt, failing time.Time
	refusal            error
}

// checked is how far the check of a line is.
type checked int

const (
	notChecked checked = iota
	checking
	refused
	passed
)

// checkAgain is when a line is checked again on which the agent has refused the certificate: a
// person may correct its policy.
const checkAgain = 30 * time.Second

// failsAfter is how long a new line may fail to connect before that counts as a refusal. A single
// attempt may fail for another reason.
const failsAfter = 30 * time.Second

// checkWithin limits one check.
const checkWithin = 10 * time.Second

// ready reports whether calls can use the line. If so, it records that the agent has accepted the
// certificate: in TLS 1.3, a client's handshake succeeds before the server has verified its
// certificate.
func (l *line) ready() bool {
	if l.GetState() != connectivity.Ready {
		return false
	}
	l.accepted()
	return true
}

func newConnection(
	dial func() (*line, error), check func(context.Context, *grpc.ClientConn) error, clk clock.PassiveClock,
) (*connection, error) {
	first, err := dial()
	if err != nil {
		return nil, err
	}
	ending, end := context.WithCancel(context.Background())
	return &connection{
		dial: dial, check: check, clock: clk, ending: ending, end: end, current: first, former: map[*line]struct{}{},
		moving: make(chan struct{}),
	}, nil
}

// tried reports whether the agent accepts the calls of a new line that is connected. Until that is
// known, and when it was long ago that it did not, it has the line checked. c.mu must be held.
func (c *connection) tried(l *line) bool {
	l.failing = time.Time{}
	again := l.checked == refused && c.clock.Since(l.refusedAt) >= checkAgain
	if l.checked == notChecked || again {
		c.start(l)
	}
	return l.checked == passed
}

// fail is called while a new line cannot be connected. If the current line is connected meanwhile,
// the agent can be reached, so the new certificate is the likely cause. Once that has lasted for
// failsAfter, fail has the new line checked: the call fails at once, with the error of the last
// attempt to connect. c.mu must be held.
func (c *connection) fail(l *line) {
	switch {
	case c.current.GetState() != connectivity.Ready:
		l.failing = time.Time{}
	case l.failing.IsZero():
		l.failing = c.clock.Now()
	case l.refusal == nil && l.checked == notChecked && c.failed(l):
		c.start(l)
	}
}

// failed reports whether a new line has been failing for so long that this counts as a refusal.
// c.mu must be held.
func (c *connection) failed(l *line) bool {
	return !l.failing.IsZero() && c.clock.Since(l.failing) >= failsAfter
}

// start has a new line checked. c.mu must be held.
func (c *connection) start(l *line) {
	l.checked = checking
	c.closing.Go(func() {
		ctx, cancel := context.WithTimeout(c.ending, checkWithin)
		defer cancel()
		err := c.check(ctx, l.ClientConn)
		c.mu.Lock()
		defer c.mu.Unlock()
		switch {
		case agenterrors.IsUnauthenticated(err), agenterrors.IsPermissionDenied(err):
			l.checked, l.refusedAt, l.refusal = refused, c.clock.Now(), err
		case ctx.Err() != nil:
			l.checked = notChecked // nothing is known yet
		case agenterrors.IsUnavailable(err):
			l.checked = notChecked // so that it is checked as soon as it is connected
			if c.failed(l) {
				l.refusal = err
			}
		default: // another error is no answer to who the caller is
			l.checked = passed
		}
	})
}

// refusal returns why the agent refuses a new certificate, or why no connection can be made with
// it. It is nil if neither is known.
func (c *connection) refusal() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next == nil {
		return nil
	}
	return c.next.refusal
}

// replaced returns the certificate that calls use while there is a new one that the agent has not
// accepted yet. It is nil otherwise.
func (c *connection) replaced() *x509.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next == nil {
		return nil
	}
	return c.current.certificate()
}

// Invoke implements [grpc.ClientConnInterface].
func (c *connection) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	l := c.acquire()
	defer c.release(l)
	return l.Invoke(ctx, method, args, reply, opts...)
}

// NewStream implements [grpc.ClientConnInterface].
func (c *connection) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	l := c.acquire()
	open, end := context.WithCancel(ctx)
	release := sync.OnceFunc(func() {
		end()
		c.release(l)
	})
	stream, err := l.NewStream(ctx, desc, method, append([]grpc.CallOption{grpc.OnFinish(func(error) { release() })}, opts...)...)
	if err != nil {
		release()
		return nil, err
	}
	c.moveWhenLeft(open, l)
	return stream, nil
}

// moveWhenLeft has streams moved when the line's connection is no longer used for new calls,
// because the agent ends it: after some hours, or as it shuts down. It does so until the stream
// ends, and ctx with it.
func (c *connection) moveWhenLeft(ctx context.Context, l *line) {
	go func() {
		// gRPC sends calls on a new connection before the line's state is Ready, mostly while it is
		// Connecting. In any other state, the stream's connection has already been left, or the state
		// is about to be Ready; then streams are moved once for nothing.
		if !l.WaitForStateChange(ctx, connectivity.Connecting) || !l.WaitForStateChange(ctx, connectivity.Ready) {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if l == c.current {
			c.move()
		}
	}()
}

// moves returns a channel that is closed when streams that are opened from now on should be opened
// again.
func (c *connection) moves() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.moving
}

// move has all streams opened again. c.mu must be held.
func (c *connection) move() {
	close(c.moving)
	c.moving = make(chan struct{})
}

// acquire returns the line for a call. The call must release it.
func (c *connection) acquire() *line {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.replace()
	}
	c.current.calls++
	return c.current
}

// replace dials and switches lines as needed. c.mu must be held.
func (c *connection) replace() {
	c.current.ready()
	// The certificate that was refused has been replaced in turn.
	if c.next != nil && c.next.refusal != nil && c.next.outdated() {
		c.close(c.next)
		c.next = nil
	}
	if c.next == nil && c.current.outdated() {
		// The same options have worked before, so an error is not expected. It is tried again with
		// the next call.
		if next, err := c.dial(); err == nil {
			c.next = next
		}
	}
	switch {
	case c.next == nil:
	case c.next.GetState() == connectivity.Ready && c.tried(c.next) && c.next.ready():
		c.former[c.current] = struct{}{}
		c.retire(c.current)
		c.current, c.next = c.next, nil
		c.move()
	// The current line was lost, and has reconnected with the new certificate.
	case !c.current.outdated():
		c.close(c.next)
		c.next = nil
	// The line is new, was lost before its first call, or has been rejected until gRPC's idle
	// timeout.
	case c.next.GetState() == connectivity.Idle:
		c.next.Connect()
	case c.next.GetState() == connectivity.TransientFailure:
		c.fail(c.next)
	}
}

func (c *connection) release(l *line) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.calls--
	c.retire(l)
}

// retire closes a former line once no call is left on it. c.mu must be held.
func (c *connection) retire(l *line) {
	if _, former := c.former[l]; former && l.calls == 0 {
		delete(c.former, l)
		c.close(l)
	}
}

// close closes a line without waiting: it may be called at the end of a call that closing would
// wait for.
func (c *connection) close(l *line) {
	// An error means that the line is already closed.
	c.closing.Go(func() { _ = l.Close() })
}

// Close ends all calls. It may be called more than once.
func (c *connection) Close() error {
	c.mu.Lock()
	lines := []*line{c.current}
	if c.next != nil {
		lines = append(lines, c.next)
	}
	for l := range c.former {
		lines = append(lines, l)
	}
	c.end()
	again := c.closed
	c.closed, c.next = true, nil
	clear(c.former)
	c.mu.Unlock()
	var errs []error
	if !again {
		for _, l := range lines {
			errs = append(errs, l.Close())
		}
	}
	c.closing.Wait()
	return errors.Join(errs...)
}
