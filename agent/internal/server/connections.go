package server

import (
	"context"
	"crypto/x509"
	"errors"
	"maps"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

// gRPC takes a response from a handler at once, whatever its size, and keeps it until the client
// opens the HTTP/2 flow control windows or the connection ends. No interceptor sees when that
// happens. Responses are therefore encoded within their call, into buffers that report when the
// transport frees them. If the transport keeps a response for too long, its connection is closed:
// nothing else makes the transport drop it.

// accepting wraps each accepted connection in a [connection]. When too many connections have no
// identity yet, the limiter closes some of those.
type accepting struct {
	net.Listener

	server *Server
}

// Accept implements [net.Listener].
func (a accepting) Accept() (net.Conn, error) {
	accepted, err := a.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := newConnection(accepted, a.server.limits.SendTimeout)
	// The close error does not matter: nothing depends on what the connection still held.
	c.known = c.until(a.server.limits.Accept(sourceOf(accepted), func() { _ = c.Close() }))
	return c, nil
}

// ipv6Network is the prefix length of the smallest IPv6 network that is assigned. One host may use
// any of its addresses.
const ipv6Network = 64

// sourceOf returns the remote host of a connection, without the port, or its network for IPv6.
func sourceOf(conn net.Conn) string {
	address := conn.RemoteAddr().String()
	from, err := netip.ParseAddrPort(address)
	if err != nil {
		return address
	}
	host := from.Addr().Unmap()
	if network, err := host.Prefix(ipv6Network); err == nil && host.Is6() {
		return network.String()
	}
	return host.String()
}

// seldom limits how often something is logged about each identity, however often it connects.
type seldom struct{ logged *cache.Expiring }

// seldomInterval is the minimum time between two log lines about one identity.
const seldomInterval = time.Minute

func newSeldom(c clock.Clock) seldom { return seldom{cache.NewExpiringWithClock(c)} }

// log calls write, unless it did so for the identity within the last [seldomInterval].
func (s seldom) log(identity string, write func()) {
	if _, logged := s.logged.Get(identity); logged {
		return
	}
	s.logged.Set(identity, true, seldomInterval)
	write()
}

// connection is an accepted connection, below TLS.
type connection struct {
	net.Conn

	// writeTimeout bounds one write. Keepalive does not detect a client that sends but never reads.
	writeTimeout time.Duration
	// known is called once the connection has an identity.
	known func()
	open  context.Context //nolint:containedctx // what waits for the connection's end hangs on it
	end   context.CancelFunc
	// limitedAs is the key under which its caller is limited, as of its last call: it may have been
	// denied since the handshake.
	limitedAs atomic.Pointer[string]
	// undecided are its calls that are neither admitted nor refused.
	undecided undecided
	// read is set once something was read by a [paced] connection.
	read atomic.Bool
	// shutOutSince is when its caller was found to be shut out, and nil while it is not.
	shutOutSince atomic.Pointer[time.Time]

	mu sync.Mutex
	// calls end the unary calls in progress.
	calls map[*context.CancelCauseFunc]struct{}
}

func newConnection(accepted net.Conn, writeTimeout time.Duration) *connection {
	c := &connection{Conn: accepted, writeTimeout: writeTimeout}
	c.open, c.end = context.WithCancel(context.Background())
	return c
}

// call returns a context for a unary call that [connection.endCalls] cancels. done must be called
// at the end of the call.
func (c *connection) call(ctx context.Context) (limited context.Context, done func()) {
	limited, cancel := context.WithCancelCause(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls == nil {
		c.calls = map[*context.CancelCauseFunc]struct{}{}
	}
	c.calls[&cancel] = struct{}{}
	return limited, func() {
		c.mu.Lock()
		delete(c.calls, &cancel)
		c.mu.Unlock()
		cancel(nil)
	}
}

// endCalls cancels the contexts of the unary calls in progress.
func (c *connection) endCalls(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for cancel := range c.calls {
		(*cancel)(cause)
	}
}

// shutOut records that the connection's caller is shut out now, and returns since when it has been.
func (c *connection) shutOut(now time.Time) (since time.Time) {
	c.shutOutSince.CompareAndSwap(nil, &now)
	if found := c.shutOutSince.Load(); found != nil {
		return *found
	}
	return now
}

// readmit records that the connection's caller is not shut out.
func (c *connection) readmit() { c.shutOutSince.Store(nil) }

func (c *connection) Write(data []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.writeTimeout)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(data)
	if err != nil {
		// gRPC closes it once it reads the error, and a connection that is read slowly is read
		// late. Until then its calls would go on, and it would count for its identity.
		_ = c.Close()
	}
	return n, err
}

// linger waits for a second, or until the connection ends. A client that is refused and connects
// again at once would otherwise make the agent do handshakes all the time.
func (c *connection) linger() {
	timer := time.NewTimer(lingers)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.open.Done():
	}
}

// lingers is how long a refused connection is kept before it is closed.
const lingers = time.Second

func (c *connection) Close() error {
	c.end()
	return c.Conn.Close()
}

// until returns a function that calls then, at most once. The end of the connection calls it as
// well.
func (c *connection) until(then func()) func() {
	then = sync.OnceFunc(then)
	stop := context.AfterFunc(c.open, then)
	return func() {
		stop()
		then()
	}
}

// connectionInfo is the result of a handshake, with the connection that it was made on.
type connectionInfo struct {
	credentials.AuthInfo

	connection *connection
	// verified is nil for connections without client certificates.
	verified *verified
}

// identifying rejects a connection at the end of its handshake if its identity, or all identities
// together, already have the maximum number of connections.
type identifying struct {
	credentials.TransportCredentials

	server *Server
	// authorities is that of the [Listener].
	authorities func() (*x509.CertPool, error)
}

// ServerHandshake implements [credentials.TransportCredentials]. It runs outside of calls, so a
// panic would end the process. It only ends the connection.
func (i identifying) ServerHandshake(raw net.Conn) (secured net.Conn, info credentials.AuthInfo, err error) {
	defer i.server.endOnPanic(raw, &err)
	return i.handshake(raw)
}

// endOnPanic is to be deferred by what runs for one connection, outside of calls. It turns a panic
// into an error.
func (s *Server) endOnPanic(of net.Conn, err *error) {
	cause := recover()
	if cause == nil {
		return
	}
	_ = panics.Note(s.config.Log, panics.Connections, "a connection is closed because of a bug in the agent", cause,
		"address", of.RemoteAddr().String())
	_ = of.Close()
	*err = errPanicked
}

func (i identifying) handshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	// If they change before the handshake uses them, the certificate is verified once more.
	authorities := i.present()
	secured, info, err := i.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	accepted, ok := raw.(*connection)
	if !ok {
		// Not one of our connections: outgoing sends no response on it.
		return secured, info, nil
	}
	identity := i.server.callerOn(info).limitedAs
	ended, err := i.server.limits.Connect(identity)
	if err != nil {
		i.server.refusals.log(identity, func() {
			i.server.config.Log.Info("a connection is refused; further ones of this identity are logged once a minute at most",
				"identity", identity, "address", raw.RemoteAddr().String(), "cause", err.Error())
		})
		accepted.linger()
		_ = secured.Close()
		return nil, nil, err
	}
	accepted.until(ended)
	accepted.known()
	accepted.limitedAs.Store(&identity)
	of := connectionInfo{AuthInfo: info, connection: accepted}
	if by, remote := info.(credentials.TLSInfo); remote {
		of.verified = &verified{authorities: i.present, handshake: by.State, pool: authorities, chains: by.State.VerifiedChains}
		i.server.remote.add(of)
		i.server.closeWhenExpired(accepted, by)
	}
	seldom := &rate.Sometimes{Interval: time.Minute}
	pause := func() (time.Duration, bool) {
		identity := *accepted.limitedAs.Load()
		pause, over := i.server.limits.Pause(identity)
		switch {
		case over:
			i.server.closures.log(identity, func() {
				i.server.config.Log.Info("a connection is closed: its caller keeps calling although its calls are refused, or sends too many frames; "+
					"further ones of this identity are logged once a minute at most", "identity", identity)
			})
		case pause > 0:
			seldom.Do(func() {
				i.server.config.Log.Info("a connection is read slowly: its caller keeps calling although its calls are refused, or sends too many frames",
					"identity", identity)
			})
		}
		return pause, over
	}
	spent := func(frames int) { i.server.limits.Frames(*accepted.limitedAs.Load(), frames) }
	return paced{
		Conn: secured, below: accepted, pause: pause, spent: spent, counted: newFrames(), server: i.server,
	}, of, nil
}

// present returns the authorities that clients' certificates must lead to now, and nil if there are
// none to lead to.
func (i identifying) present() *x509.CertPool {
	if i.authorities == nil {
		return nil
	}
	pool, err := i.authorities()
	if err != nil {
		return nil // Not expected: the last usable ones are kept.
	}
	return pool
}

// readAtOnce is how many bytes are read at once. They hold some tens of calls at most.
const readAtOnce = 1 << 10

// paced is a connection, above TLS, that is read more slowly when its caller's calls have been
// rejected or it sends many frames, and no faster than its calls are admitted or rejected. Unread
// data costs nothing, and TCP flow control holds the sender back.
type paced struct {
	net.Conn

	below *connection
	// pause returns how long not to read, and whether to close the connection instead.
	pause func() (pause time.Duration, over bool)
	// spent is called with the number of new frames, which counted counts.
	spent   func(frames int)
	counted *frames
	server  *Server
}

var errPanicked = errors.New("the connection is closed because of a bug in the agent")

var errOver = errors.New("the agent closes the connection; its log has the reason")

// Read implements [net.Conn]. An error ends the connection.
func (p paced) Read(into []byte) (n int, err error) {
	defer p.server.endOnPanic(p.Conn, &err)
	pause, over := p.pause()
	if over {
		if !p.below.read.Load() {
			p.below.linger()
		}
		return 0, errOver
	}
	p.below.read.Store(true)
	if pause > 0 {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-p.below.open.Done():
			return 0, net.ErrClosed
		}
	}
	p.below.undecided.wait(p.below.open)
	n, err = p.Conn.Read(into[:min(len(into), readAtOnce)])
	if begun, calls := p.counted.count(into[:n]); begun > 0 {
		p.below.undecided.add(calls)
		p.spent(begun)
	}
	return n, err
}

// Clone implements [credentials.TransportCredentials].
func (i identifying) Clone() credentials.TransportCredentials {
	return identifying{i.TransportCredentials.Clone(), i.server, i.authorities}
}

// openConnections is the set of connections with certificates, whose callers can be moved to
// another agent.
type openConnections struct {
	mu  sync.Mutex
	all map[*connection]connectionInfo
}

func (o *openConnections) add(of connectionInfo) {
	c := of.connection
	o.mu.Lock()
	o.all[c] = of
	o.mu.Unlock()
	c.until(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.all, c)
	})
}

// current returns the connections that are open now.
func (o *openConnections) current() map[*connection]connectionInfo {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.all)
}

// close closes all connections, and returns their number.
func (o *openConnections) close() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	for c := range o.all {
		_ = c.Close() // Any unsent data is lost in either case.
	}
	return len(o.all)
}

// whenFreed is a buffer pool that only receives buffers: Put calls the function, and Get allocates.
type whenFreed func()

func (whenFreed) Get(size int) *[]byte { return new(make([]byte, size)) }
func (f whenFreed) Put(*[]byte)        { f() }

const (
	// minAnswerBuffer is a capacity at which package mem returns buffers to their pool. It does not
	// report smaller buffers.
	minAnswerBuffer = 2 << 10
	// answerOverhead is the memory used for a response in addition to its buffer: a timer, and the
	// registration for the connection's end.
	answerOverhead = 1 << 10
)

// outgoing encodes a response of the call in ctx, or an event. All memory kept for it counts as
// unread until the transport has sent or dropped it. If that takes longer than the send timeout,
// the connection is closed.
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
	// The pool's buffers are up to thirty times as large as their content, and a caller may leave
	// them unread.
	if cap(bytes) > 2*len(bytes) || mem.IsBelowBufferPoolingThreshold(cap(bytes)) {
		bytes = append(make([]byte, 0, max(len(bytes), minAnswerBuffer)), bytes...)
		free()
		free = func() {}
	}
	logger, size := log.FromContext(ctx), len(bytes)
	timer := time.AfterFunc(s.limits.SendTimeout, func() {
		if info.connection.open.Err() == nil {
			logger.Info("a connection is closed: an answer on it was not read", "bytes", size)
			_ = info.connection.Close()
		}
	})
	sent := limits.FromContext(ctx).Send(cap(bytes) + answerOverhead)
	// gRPC does not free what is still unsent when a connection ends. No timer may outlive the
	// connection: all that it refers to would stay in memory, and is not counted any more.
	gone := info.connection.until(func() {
		timer.Stop()
		sent()
	})
	return mem.BufferSlice{mem.NewBuffer(&bytes, whenFreed(func() {
		gone()
		free()
	}))}, nil
}
