// Package limits bounds what one caller, and all of them together, may ask of the agent at once. What is queued waits for others of
// the same caller; what is refused has not begun.
package limits

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
	"k8s.io/utils/clock"
)

// Options are the limits. Each must be positive.
type Options struct {
	// CallsPerSecond and CallBurst are how many calls a caller may begin, on average and at once. A request counts once more for
	// each [BytesPerCall] that it has.
	CallsPerSecond float64
	CallBurst      int
	// CallsAtOnce and WatchesAtOnce are how many unary calls, and watch streams, a caller may have open.
	CallsAtOnce, WatchesAtOnce int
	// HubCallsAtOnce is how many of a caller's calls may ask the hub's API server at once. Others wait.
	HubCallsAtOnce int
	// HubRequestsPerSecond and HubRequestBurst are how many requests of a caller's calls the hub's API server gets, on average and at
	// once. Others wait.
	HubRequestsPerSecond float64
	HubRequestBurst      int
	// RequestTimeout is how long a request may take to arrive.
	RequestTimeout time.Duration
	// CallTimeout is the deadline of a unary call that has none, MaxCallTimeout the longest that one may have.
	CallTimeout, MaxCallTimeout time.Duration
	// SendTimeout is how long a caller may leave an answer, or an event of a stream, unread.
	SendTimeout time.Duration
}

// Defaults returns the default limits. docs/limits.md has the reasons.
func Defaults() Options {
	return Options{
		CallsPerSecond: 100, CallBurst: 10000, CallsAtOnce: 2000, WatchesAtOnce: 1000,
		HubCallsAtOnce: 16, HubRequestsPerSecond: 50, HubRequestBurst: 100,
		RequestTimeout: 10 * time.Second, CallTimeout: 30 * time.Second, MaxCallTimeout: 2 * time.Minute, SendTimeout: 30 * time.Second,
	}
}

const (
	// BytesPerCall is how many bytes of a request count as one call.
	BytesPerCall = 16 << 10
	// readsOfCaller and readsInAll are how many requests are read at once; each may have 4 MiB. Others wait.
	readsOfCaller, readsInAll = 8, 32
	// largeOfCaller is how many large requests of a caller are read and handled at once, largeInAll how many of all are decoded at once;
	// all of it together may take 200 MiB for one. Others wait.
	largeOfCaller, largeInAll = 1, 3
	// checksOfCaller is how many requests of a caller are checked at once. One with a thousand long names takes 25 ms of a processor, and no
	// caller may have them all. Others wait.
	checksOfCaller = 1
	// bytesOfCaller and bytesInAll bound the requests that are being handled.
	bytesOfCaller, bytesInAll = 16 << 20, 64 << 20
	// UnreadOfCaller and unreadInAll are how many bytes of answers may wait to be read before callers are refused: the caller whose they
	// are any call, all callers lists. What was let in before may exceed them, by two lists of each caller.
	UnreadOfCaller, unreadInAll = 32 << 20, 128 << 20
	// listsOfCaller and listsInAll are how many lists are made at once; the claims of a large Cluster take 50 MiB. Others wait.
	listsOfCaller, listsInAll = 2, 8
	// ConnectionsOfCaller is how many connections a caller may have. Each can hold a thousand streams with 8 KiB of metadata.
	ConnectionsOfCaller = 16
	// unknownConnections is how many connections may be without an identity. A handshake takes 100 KiB and seconds at most.
	unknownConnections = 512
	// refusalsPerSecond and refusalBurst are how many calls of a caller may be refused, on average and at once, before its connections are
	// read slowly: a refusal costs the agent a tenth of a millisecond, and its caller nothing. refusalDebt is for how many seconds at most that
	// goes on after the last; a caller that is so far behind loses its connections, with all that it has sent on them.
	refusalsPerSecond, refusalBurst, refusalDebt = 100, 1000, 2
	// longestPause is how long a connection is not read at most. Clients wait ten seconds for an answer to their keepalive.
	longestPause = time.Second
	// framesPerCall is how many HTTP/2 frames of a caller, on average and at once, are read for each call that it may make, before its connections
	// are read slowly. A call has three or four, a request of 4 MiB 256; one that comes byte by byte would have four million, each of which takes
	// a hundred bytes of memory until the request is whole.
	framesPerCall = 10
	// tracesPerSecond and traceBurst are how many of a caller's calls are traced, on average and at once; the spans of so many fit into what the
	// exporter holds at once. Others are not traced.
	tracesPerSecond, traceBurst = 10, 100
	// enough is how many callers are remembered before those that did nothing lately are forgotten.
	enough = 1000
)

// RefusedError says why a call is refused.
type RefusedError struct {
	// Reason is one word.
	Reason string
	// Message is the same in a sentence.
	Message string
	// RetryAfter is when it is worth asking again.
	RetryAfter time.Duration
}

func (r *RefusedError) Error() string { return r.Message }

// Reasons of [RefusedError].
const (
	ReasonRate        = "rate"
	ReasonCalls       = "calls"
	ReasonWatches     = "watches"
	ReasonInFlight    = "bytes"
	ReasonUnread      = "unread"
	ReasonConnections = "connections"
	ReasonHandshakes  = "handshakes"
)

// Limiter knows what callers have open. It is safe for concurrent use.
type Limiter struct {
	Options
	clock               clock.PassiveClock
	refused             *prometheus.CounterVec
	reads, large, lists *semaphore.Weighted
	unknown             *handshakes

	mu            sync.Mutex
	callers       map[string]*caller
	bytes, unread int64
}

type caller struct {
	rate, hubRate              *rate.Limiter
	refusals, frames, traces   *rate.Limiter
	calls, watches             int
	connections                int
	bytes, unread              int64
	reads, large, lists, atHub *semaphore.Weighted
	checks                     *semaphore.Weighted
}

// New returns a limiter. A nil registerer registers no metrics.
func New(o Options, c clock.PassiveClock, registerer prometheus.Registerer) (*Limiter, error) {
	l := &Limiter{
		Options: o, clock: c, callers: map[string]*caller{},
		reads: semaphore.NewWeighted(readsInAll), large: semaphore.NewWeighted(largeInAll),
		lists: semaphore.NewWeighted(listsInAll), unknown: newHandshakes(),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capi_agent_calls_refused_total",
			Help: "Calls and connections refused because their caller had too much open or called too often, by reason and method.",
		}, []string{"reason", "method"}),
	}
	if registerer != nil {
		if err := registerer.Register(l.refused); err != nil {
			return nil, fmt.Errorf("registering the limits' metrics: %w", err)
		}
	}
	return l, nil
}

// Call is a call that has been let in. It must be ended. Its methods are for one goroutine.
type Call struct {
	limiter *Limiter
	caller  *caller
	method  string
	watch   bool
	atHub   bool
	held    int64
	free    []func()
}

// Begin lets a call in. The error is a [*RefusedError].
func (l *Limiter) Begin(identity, method string, watch bool) (*Call, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.caller(identity)
	switch {
	case c.unread >= UnreadOfCaller:
		return nil, l.refuseUnread(c, method)
	case !watch && c.calls >= l.CallsAtOnce:
		return nil, l.refuse(c, method, ReasonCalls, time.Second, "this identity has %d calls open, as many as it may", c.calls)
	case watch && c.watches >= l.WatchesAtOnce:
		return nil, l.refuse(c, method, ReasonWatches, 5*time.Second, "this identity has %d streams open, as many as it may", c.watches)
	}
	if err := l.spend(c, method, 1); err != nil {
		return nil, err
	}
	if watch {
		c.watches++
	} else {
		c.calls++
	}
	return &Call{limiter: l, caller: c, method: method, watch: watch}, nil
}

// caller returns what is known of an identity. l.mu is held.
func (l *Limiter) caller(identity string) *caller {
	c := l.callers[identity]
	if c == nil {
		l.forget(l.clock.Now())
		c = &caller{
			rate:     rate.NewLimiter(rate.Limit(l.CallsPerSecond), l.CallBurst),
			hubRate:  rate.NewLimiter(rate.Limit(l.HubRequestsPerSecond), l.HubRequestBurst),
			refusals: rate.NewLimiter(refusalsPerSecond, refusalBurst),
			frames:   rate.NewLimiter(rate.Limit(l.framesPerSecond()), l.frameBurst()),
			traces:   rate.NewLimiter(tracesPerSecond, traceBurst),
			reads:    semaphore.NewWeighted(readsOfCaller), large: semaphore.NewWeighted(largeOfCaller),
			lists: semaphore.NewWeighted(listsOfCaller), atHub: semaphore.NewWeighted(int64(l.HubCallsAtOnce)),
			checks: semaphore.NewWeighted(checksOfCaller),
		}
		l.callers[identity] = c
	}
	return c
}

// Trace reports whether a call of the identity, about to be recorded, may be.
func (l *Limiter) Trace(identity string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.caller(identity).traces.AllowN(l.clock.Now(), 1)
}

// Accept lets in a connection from a source whose identity is not known yet. When there are too many, the oldest is dropped, by its function,
// of the source that has the most. The function that is returned is called when the identity is known, or when there is no more connection.
func (l *Limiter) Accept(source string, drop func()) (known func()) {
	known, dropped := l.unknown.begin(source, drop)
	if dropped {
		l.refused.WithLabelValues(ReasonHandshakes, "").Inc()
	}
	return known
}

// Connect lets in a connection of an identity. The function that is returned is called when it has ended. The error is a [*RefusedError].
func (l *Limiter) Connect(identity string) (ended func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.caller(identity)
	if c.connections >= ConnectionsOfCaller {
		return nil, l.refuse(c, "", ReasonConnections, time.Second, "this identity has %d connections, as many as it may", c.connections)
	}
	c.connections++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		c.connections--
	}, nil
}

// spend takes tokens. l.mu is held.
func (l *Limiter) spend(c *caller, method string, tokens int) error {
	now := l.clock.Now()
	if c.rate.AllowN(now, min(tokens, l.CallBurst)) {
		return nil
	}
	missing := float64(min(tokens, l.CallBurst)) - c.rate.TokensAt(now)
	wait := time.Duration(math.Ceil(missing/l.CallsPerSecond*1000)) * time.Millisecond
	return l.refuse(c, method, ReasonRate, wait, "this identity calls more often than %v times a second", l.CallsPerSecond)
}

func (l *Limiter) refuseUnread(c *caller, method string) error {
	return l.refuse(c, method, ReasonUnread, time.Second, "too many bytes of answers have not been read yet")
}

// refuse is called with l.mu held.
func (l *Limiter) refuse(c *caller, method, reason string, after time.Duration, format string, args ...any) error {
	l.refused.WithLabelValues(reason, method).Inc()
	l.blame(c)
	return &RefusedError{Reason: reason, RetryAfter: after, Message: fmt.Sprintf(format, args...)}
}

// Denied notes that a call of an identity was refused that it has no right to make.
func (l *Limiter) Denied(identity string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blame(l.caller(identity))
}

// blame notes a refusal. l.mu is held.
func (l *Limiter) blame(c *caller) {
	now := l.clock.Now()
	if c.refusals.TokensAt(now) > -refusalsPerSecond*refusalDebt {
		c.refusals.ReserveN(now, 1)
	}
}

func (l *Limiter) framesPerSecond() float64 { return framesPerCall * l.CallsPerSecond }

func (l *Limiter) frameBurst() int { return framesPerCall * l.CallBurst }

// Frames notes that so many HTTP/2 frames of an identity have been read.
func (l *Limiter) Frames(identity string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.caller(identity).frames.ReserveN(l.clock.Now(), min(n, l.frameBurst()))
}

// Pause returns for how long the connections of an identity are better not read, as it goes on calling although it is refused, or sends too many
// frames, and whether they are better closed.
func (l *Limiter) Pause(identity string) (pause time.Duration, over bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.callers[identity]
	if c == nil {
		return 0, false
	}
	now := l.clock.Now()
	missing, frames := -c.refusals.TokensAt(now), -c.frames.TokensAt(now)
	seconds := max(0, missing/refusalsPerSecond, frames/l.framesPerSecond())
	return time.Duration(min(longestPause.Seconds(), seconds) * float64(time.Second)), missing >= refusalsPerSecond*refusalDebt
}

// forget forgets callers that have nothing open and could burst, if there are many. l.mu is held.
func (l *Limiter) forget(now time.Time) {
	if len(l.callers) < enough {
		return
	}
	for identity, c := range l.callers {
		if c.calls+c.watches+c.connections == 0 && c.unread == 0 &&
			c.rate.TokensAt(now) >= float64(l.CallBurst) && c.hubRate.TokensAt(now) >= float64(l.HubRequestBurst) &&
			c.refusals.TokensAt(now) >= refusalBurst && c.frames.TokensAt(now) >= float64(l.frameBurst()) && c.traces.TokensAt(now) >= traceBurst {
			delete(l.callers, identity)
		}
	}
}

// Read waits until the call's request may be read, and returns what to do once it has been. A caller has one large request at a time until
// its call ends. Errors: the context's.
func (c *Call) Read(ctx context.Context, large bool) (done func(), err error) {
	if large {
		if err := c.keep(ctx, c.caller.large); err != nil {
			return nil, err
		}
	}
	if err := c.caller.reads.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	if err := c.limiter.reads.Acquire(ctx, 1); err != nil {
		c.caller.reads.Release(1)
		return nil, err
	}
	return func() {
		c.limiter.reads.Release(1)
		c.caller.reads.Release(1)
	}, nil
}

// Decode waits until a large request, which has been read, may be decoded, and returns what to do once it has been. Errors: the context's.
func (c *Call) Decode(ctx context.Context) (done func(), err error) {
	// What all callers share is held for no longer than the work on what has arrived takes, whatever the caller, or the hub, does.
	if err := c.limiter.large.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return func() { c.limiter.large.Release(1) }, nil
}

// Check waits until the call's request may be checked, and returns what to do once it has been. Errors: the context's.
func (c *Call) Check(ctx context.Context) (done func(), err error) {
	if err := c.caller.checks.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return func() { c.caller.checks.Release(1) }, nil
}

// keep holds one of the semaphore until the call ends.
func (c *Call) keep(ctx context.Context, s *semaphore.Weighted) error {
	if err := s.Acquire(ctx, 1); err != nil {
		return err
	}
	c.free = append(c.free, func() { s.Release(1) })
	return nil
}

// Hold accounts for the request's bytes until the call ends. The error is a [*RefusedError].
func (c *Call) Hold(bytes int) error {
	l := c.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.caller.bytes+int64(bytes) > bytesOfCaller || l.bytes+int64(bytes) > bytesInAll {
		return l.refuse(c.caller, c.method, ReasonInFlight, time.Second, "requests of too many bytes are being handled")
	}
	if err := l.spend(c.caller, c.method, bytes/BytesPerCall); err != nil {
		return err
	}
	c.held += int64(bytes)
	c.caller.bytes += int64(bytes)
	l.bytes += int64(bytes)
	return nil
}

// AskHub waits until the call may ask the hub's API server, which it may until [Call.LeaveHub] or its end. Errors: the context's.
func (c *Call) AskHub(ctx context.Context) error {
	if c.atHub {
		return nil
	}
	if err := c.caller.atHub.Acquire(ctx, 1); err != nil {
		return err
	}
	c.atHub = true
	return nil
}

// LeaveHub lets another call of the caller ask the hub's API server, while this one only waits.
func (c *Call) LeaveHub() {
	if c.atHub {
		c.atHub = false
		c.caller.atHub.Release(1)
	}
}

// List waits until the call may make a list. The error is the context's, or a [*RefusedError].
func (c *Call) List(ctx context.Context) error {
	if err := c.keep(ctx, c.caller.lists); err != nil {
		return err
	}
	if err := c.keep(ctx, c.limiter.lists); err != nil {
		return err
	}
	// The lists before it may have filled what there is.
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	if c.caller.unread >= UnreadOfCaller || c.limiter.unread >= unreadInAll {
		return c.limiter.refuseUnread(c.caller, c.method)
	}
	return nil
}

// Send accounts for the bytes of an answer until the function that is returned is called, once, which may be after the call's end: when
// the answer has been sent or dropped. It refuses nothing, as the work has been done; what the caller does next is refused.
func (c *Call) Send(bytes int) (gone func()) {
	l := c.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	c.caller.unread += int64(bytes)
	l.unread += int64(bytes)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		c.caller.unread -= int64(bytes)
		l.unread -= int64(bytes)
	}
}

// Next lets a stream send its next event. The error is a [*RefusedError].
func (c *Call) Next() error {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	if c.caller.unread >= UnreadOfCaller {
		return c.limiter.refuseUnread(c.caller, c.method)
	}
	return nil
}

// End ends the call.
func (c *Call) End() {
	c.LeaveHub()
	for _, free := range c.free {
		free()
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.caller.bytes -= c.held
	c.limiter.bytes -= c.held
	if c.watch {
		c.caller.watches--
	} else {
		c.caller.calls--
	}
}
