package client

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// connection is what calls go over. gRPC keeps a connection for as long as it works, with the certificate that it was made with. So when the
// certificate is replaced, connection makes another one beside it, and calls go there once the agent has accepted it; calls and streams that have
// begun end where they are. A new certificate that the agent does not accept therefore breaks nothing that works: a line that is lost meanwhile is
// made again with the certificate that was accepted, until that has ended. From then on calls fail with the error of the new one's handshake.
type connection struct {
	dial func() (*line, error)

	mu      sync.Mutex
	closed  bool
	current *line
	// next has the certificate that current does not have, and is not used before it is ready. Nil when there is none.
	next *line
	// former are those with calls that have not ended.
	former  map[*line]struct{}
	closing sync.WaitGroup
}

// line is one connection of gRPC's.
type line struct {
	*grpc.ClientConn

	// outdated reports whether it was made with a certificate that has been replaced.
	outdated func() bool
	// accepted notes that the agent has accepted the certificate.
	accepted func()
	// calls is how many have not ended. Guarded by the connection's mutex.
	calls int
}

// ready reports whether calls can go over the line, and notes that its certificate has been accepted: in TLS 1.3 a client's handshake succeeds before
// the server has looked at the certificate.
func (l *line) ready() bool {
	if l.GetState() != connectivity.Ready {
		return false
	}
	l.accepted()
	return true
}

func newConnection(dial func() (*line, error)) (*connection, error) {
	first, err := dial()
	if err != nil {
		return nil, err
	}
	return &connection{dial: dial, current: first, former: map[*line]struct{}{}}, nil
}

// Invoke is [grpc.ClientConnInterface]'s.
func (c *connection) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	l := c.acquire()
	defer c.release(l)
	return l.Invoke(ctx, method, args, reply, opts...)
}

// NewStream is [grpc.ClientConnInterface]'s.
func (c *connection) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	l := c.acquire()
	release := sync.OnceFunc(func() { c.release(l) })
	stream, err := l.NewStream(ctx, desc, method, append([]grpc.CallOption{grpc.OnFinish(func(error) { release() })}, opts...)...)
	if err != nil {
		release()
		return nil, err
	}
	return stream, nil
}

// acquire returns what a call is to use until it is released.
func (c *connection) acquire() *line {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.replace()
	}
	c.current.calls++
	return c.current
}

// replace is called with the lock held.
func (c *connection) replace() {
	c.current.ready()
	if c.next == nil && c.current.outdated() {
		if next, err := c.dial(); err == nil { // as it was once with the same options
			c.next = next
		}
	}
	switch {
	case c.next == nil:
	case c.next.ready():
		c.former[c.current] = struct{}{}
		c.retire(c.current)
		c.current, c.next = c.next, nil
	case !c.current.outdated(): // it was broken, and has been made anew
		c.close(c.next)
		c.next = nil
	case c.next.GetState() == connectivity.Idle: // it is new, was lost before its first call, or was refused for gRPC's idle timeout
		c.next.Connect()
	}
}

func (c *connection) release(l *line) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.calls--
	c.retire(l)
}

// retire closes a former connection on which no call is left. It is called with the lock held.
func (c *connection) retire(l *line) {
	if _, former := c.former[l]; former && l.calls == 0 {
		delete(c.former, l)
		c.close(l)
	}
}

// close does not wait, as it is called by a call's end, which closing waits for.
func (c *connection) close(l *line) {
	c.closing.Go(func() { _ = l.Close() }) // an error says that it is closed
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
