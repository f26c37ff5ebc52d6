package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
)

// gRPC takes an answer from a handler at once, whatever its size, and keeps it until the client opens HTTP/2's flow control windows for
// it, or until the connection ends. No interceptor sees when that is. So answers are encoded within their call, in buffers that tell when
// the transport frees them, and the connection of an answer that stays for too long is closed: nothing else takes it from the transport.

// accepting gives out connections as [connection]. When too many are without an identity, others that have none are closed.
type accepting struct {
	net.Listener

	server *Server
}

// Accept is [net.Listener]'s.
func (a accepting) Accept() (net.Conn, error) {
	accepted, err := a.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := newConnection(accepted, a.server.limits.SendTimeout)
	c.known = c.until(a.server.limits.Accept(sourceOf(accepted), func() { _ = c.Close() })) // nothing is lost that anything depends on
	return c, nil
}

// sourceOf names where a connection comes from: a host, whatever its port.
func sourceOf(conn net.Conn) string {
	address := conn.RemoteAddr().String()
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}

// connection is one that was accepted, below TLS.
type connection struct {
	net.Conn

	// writeTimeout is how long one write may take: a client that reads nothing at all is kept alive by what it sends.
	writeTimeout time.Duration
	// known is called once the connection has an identity.
	known func()
	open  context.Context //nolint:containedctx // what waits for the connection's end hangs on it
	end   context.CancelFunc
}

func newConnection(accepted net.Conn, writeTimeout time.Duration) *connection {
	c := &connection{Conn: accepted, writeTimeout: writeTimeout}
	c.open, c.end = context.WithCancel(context.Background())
	return c
}

func (c *connection) Write(data []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.writeTimeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(data)
}

func (c *connection) Close() error {
	c.end()
	return c.Conn.Close()
}

// until returns a function that calls another once: when it is called itself, or when the connection ends.
func (c *connection) until(then func()) func() {
	then = sync.OnceFunc(then)
	stop := context.AfterFunc(c.open, then)
	return func() {
		stop()
		then()
	}
}

// connectionInfo is a handshake's result that leads to the connection.
type connectionInfo struct {
	credentials.AuthInfo

	connection *connection
}

// identifying refuses a connection at the end of its handshake when its identity has as many as it may.
type identifying struct {
	credentials.TransportCredentials

	server *Server
}

// ServerHandshake is [credentials.TransportCredentials]'.
func (i identifying) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := i.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	accepted, ok := raw.(*connection)
	if !ok {
		return secured, info, nil // which no answer is sent on
	}
	identity := limitedAs(i.server.callerOn(info), info)
	ended, err := i.server.limits.Connect(identity)
	if err != nil {
		i.server.config.Log.Info("a connection is refused", "identity", identity, "address", raw.RemoteAddr().String(), "cause", err.Error())
		_ = secured.Close()
		return nil, nil, err
	}
	accepted.until(ended)
	accepted.known()
	if by, remote := info.(credentials.TLSInfo); remote {
		i.server.remote.add(accepted)
		i.server.closeWhenExpired(accepted, by)
	}
	pause := func() (time.Duration, bool) {
		pause, over := i.server.limits.Pause(identity)
		if over {
			i.server.config.Log.Info("a connection is closed: its caller goes on calling although its calls are refused", "identity", identity)
		}
		return pause, over
	}
	spent := func(frames int) { i.server.limits.Frames(identity, frames) }
	return paced{Conn: secured, below: accepted, pause: pause, spent: spent, counted: newFrames()}, connectionInfo{info, accepted}, nil
}

// slowRead is how much is read at once of a caller that is to call more slowly: some tens of calls.
const slowRead = 1 << 10

// paced is a connection, above TLS, that is read as slowly as its caller's refused calls, and its many frames, ask for. What is not read costs
// nothing, and the flow control of TCP holds its sender back.
type paced struct {
	net.Conn

	below *connection
	pause func() (pause time.Duration, over bool)
	// spent takes how many frames have come, which counted counts.
	spent   func(frames int)
	counted *frames
}

var errRefusedTooOften = errors.New("the caller goes on calling although its calls are refused")

// Read is [net.Conn]'s. Its error ends the connection.
func (p paced) Read(into []byte) (int, error) {
	pause, over := p.pause()
	if over {
		return 0, errRefusedTooOften
	}
	if pause > 0 {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-p.below.open.Done():
		}
		into = into[:min(len(into), slowRead)]
	}
	n, err := p.Conn.Read(into)
	if begun := p.counted.count(into[:n]); begun > 0 {
		p.spent(begun)
	}
	return n, err
}

// Clone is [credentials.TransportCredentials]'.
func (i identifying) Clone() credentials.TransportCredentials {
	return identifying{i.TransportCredentials.Clone(), i.server}
}

// openConnections are those that can be led elsewhere.
type openConnections struct {
	mu  sync.Mutex
	all map[*connection]struct{}
}

func (o *openConnections) add(c *connection) {
	o.mu.Lock()
	o.all[c] = struct{}{}
	o.mu.Unlock()
	c.until(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.all, c)
	})
}

// close closes all, and returns how many.
func (o *openConnections) close() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	for c := range o.all {
		_ = c.Close() // what was sent on it is lost either way
	}
	return len(o.all)
}

// whenFreed is a pool that buffers are not taken from, only given back to.
type whenFreed func()

func (whenFreed) Get(size int) *[]byte { return new(make([]byte, size)) }
func (f whenFreed) Put(*[]byte)        { f() }

const (
	// minAnswerBuffer is a capacity that package mem tells pools of; it keeps smaller buffers to itself.
	minAnswerBuffer = 2 << 10
	// answerOverhead is what is kept for an answer beside its buffer: a timer, and what waits for the connection's end.
	answerOverhead = 1 << 10
)

// outgoing returns an answer of the call in ctx, or an event, encoded. All that is kept for it counts as unread until the transport has sent or
// dropped it. When that takes longer than the caller may leave it unread, the connection is closed.
func (s *Server) outgoing(ctx context.Context, message any) (mem.BufferSlice, error) {
	p, _ := peer.FromContext(ctx)
	info, ok := p.AuthInfo.(connectionInfo)
	if !ok {
		return nil, grpcstatus.Error(codes.Internal, "the connection is not one that was accepted")
	}
	encoded, err := s.codec.Marshal(message)
	if err != nil {
		return nil, err
	}
	whole := encoded.MaterializeToBuffer(mem.DefaultBufferPool())
	encoded.Free()
	bytes, free := whole.ReadOnlyData(), whole.Free
	// The pool's buffers are up to thirty times as large as what is in them, which a caller may leave unread.
	if cap(bytes) > 2*len(bytes) || mem.IsBelowBufferPoolingThreshold(cap(bytes)) {
		bytes = append(make([]byte, 0, max(len(bytes), minAnswerBuffer)), bytes...)
		free()
		free = func() {}
	}
	gone := info.connection.until(limits.FromContext(ctx).Send(cap(bytes) + answerOverhead))
	logger := log.FromContext(ctx)
	timer := time.AfterFunc(s.limits.SendTimeout, func() {
		logger.Info("a connection is closed: an answer on it was not read", "bytes", len(bytes))
		_ = info.connection.Close()
	})
	return mem.BufferSlice{mem.NewBuffer(&bytes, whenFreed(func() {
		timer.Stop()
		gone()
		free()
	}))}, nil
}
