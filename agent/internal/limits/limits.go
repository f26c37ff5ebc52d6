// Package limits bounds what a single caller, and all callers together, may request of the agent at
// once. Queued work waits for other work of the same caller. Rejected work has not been started.
//
// The rates are those of golang.org/x/time/rate. The rest is written by hand because the ratelimit
// interceptor of go-grpc-middleware only rejects calls, without a RetryInfo: it bounds neither open
// calls, streams and connections nor the size of requests, and lets nothing wait.
package limits

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/samber/lo"
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
	"k8s.io/utils/clock"
)

// Options are the limits. Each must be positive.
type Options struct {
	// CallsPerSecond and CallBurst limit how many calls a caller may begin, on average and at once.
	// A request counts as one more call for each [BytesPerCall] of its size. Each further message
	// of a stream counts like the request of another call.
	CallsPerSecond float64
	CallBurst      int
	// CallsAtOnce and WatchesAtOnce are how many unary calls and watch streams a caller may have
	// open.
	CallsAtOnce, WatchesAtOnce int
	// AllConnections, AllCallsAtOnce and AllWatchesAtOnce are how many connections, unary calls and
	// watch streams all callers together may have open. A caller may open one more while it has
	// fewer than are left, or one of a few that every caller may have. Each must be at least twice
	// what a single caller may have, which is [ConnectionsOfCaller], CallsAtOnce and WatchesAtOnce:
	// alone, a caller gets half of all.
	AllConnections, AllCallsAtOnce, AllWatchesAtOnce int
	// HubCallsAtOnce is how many of a caller's calls may query the hub's API server at once.
	// Further calls wait.
	HubCallsAtOnce int
	// HubRequestsPerSecond and HubRequestBurst limit the requests that a caller's calls send to the
	// hub's API server, on average and at once. Further requests wait.
	HubRequestsPerSecond float64
	HubRequestBurst      int
	// RequestTimeout is how long a request may take to arrive.
	RequestTimeout time.Duration
	// CallTimeout is the deadline of a unary call that has none. MaxCallTimeout is the longest
	// deadline that a unary call may have.
	CallTimeout, MaxCallTimeout time.Duration
	// SendTimeout is how long a caller may leave a response, or an event of a stream, unread.
	SendTimeout time.Duration
}

// Defaults returns the default limits. docs/limits.md explains them.
func Defaults() Options {
	return Options{
		CallsPerSecond: 100, CallBurst: 10000, CallsAtOnce: 2000, WatchesAtOnce: 100,
		AllConnections: 4000, AllCallsAtOnce: 4000, AllWatchesAtOnce: 6000,
		HubCallsAtOnce: 16, HubRequestsPerSecond: 50, HubRequestBurst: 100,
		RequestTimeout: 10 * time.Second, CallTimeout: 30 * time.Second, MaxCallTimeout: 2 * time.Minute, SendTimeout: 30 * time.Second,
	}
}

const (
	// BytesPerCall is how many bytes of a request count as one call.
	BytesPerCall = 16 << 10
	// readsOfCaller is how many requests of a caller are read at once. Further requests wait. Their
	// caller determines how long they take to arrive, so no other caller waits for them.
	readsOfCaller = 8
	// largeOfCaller is how many large requests of a caller are read and handled at once. largeInAll
	// is how many large requests other than SyncClaims are decoded at once, in total. Little of
	// them is kept. Further requests wait.
	largeOfCaller, largeInAll = 1, 3
	// decodedInAll is how many bytes of SyncClaims requests are decoded and handled at once, in
	// total. Decoded, a request takes up to twenty times as many, until its call ends. Further
	// requests wait. Those of up to smallDecoded bytes do not count, so that a spoke with a hundred
	// Nodes does not wait for the large ones of others: syncsInAll bounds them. largeSyncsInAll
	// leaves them some of its turns.
	decodedInAll, smallDecoded = 8 << 20, 64 << 10
	// checksOfCaller is how many requests of a caller are validated at once: of those of up to
	// smallRequest bytes, and of larger ones. A request with a thousand long names needs
	// milliseconds of a CPU. Further requests wait. See also [checksInAll].
	checksOfCaller = 1
	// bytesOfCaller and bytesInAll bound the total size of the requests that are being handled, of
	// one caller and in total; see [mayGrow]. Requests of up to smallRequest bytes do not count for
	// the total, so that the large requests of some callers, which may wait for the hub, keep no
	// other caller from creating and releasing claims. CallsAtOnce bounds their number.
	bytesOfCaller, bytesInAll = 16 << 20, 64 << 20
	smallRequest              = 4 << 10
	// UnreadOfCaller and unreadInAll are how many bytes of responses may be waiting to be read, of
	// one caller and in total; see [mayGrow]. Beyond them, all calls of a caller are rejected.
	// Calls that were admitted earlier may exceed the limits, by two lists for each caller.
	UnreadOfCaller, unreadInAll = 32 << 20, 128 << 20
	// assuredConnections, assuredCalls, assuredWatches, assuredBytes and assuredUnread are what
	// every caller may have, whatever others have. A shim has one connection, and another one while
	// its certificate is replaced, and three streams. The largest request has 4 MiB.
	assuredConnections, assuredCalls, assuredWatches, assuredBytes, assuredUnread = 4, 8, 8, 4 << 20, 1 << 20
	// listsOfCaller and listsInAll are how many list responses are built at once. The claims of a
	// large Cluster need 50 MiB. Further lists wait.
	listsOfCaller, listsInAll = 2, 8
	// objectsPerSecond and objectBurst are how many objects a caller may list, on average and at
	// once. Further lists wait. Nothing else limits lists that are not read: what waits on a
	// connection goes with it. The shim of the largest Cluster lists 20,000 claims once a minute,
	// and them and as many Machines every two minutes; while it looks for Machines to adopt, the
	// latter every five seconds. An object of a watch's snapshot is taken from a cache, and costs a
	// fraction of one. Fewer than fewObjects cost nothing.
	objectsPerSecond, objectBurst, objectsOfWatch, fewObjects = 4000, 60000, 32, 100
	// largeList is how many objects a large list has. largeListsOfCaller is how many of them are
	// built at once for a caller. See also [largeListsInAll].
	largeList, largeListsOfCaller = 2000, 1
	// syncsInAll is how many SyncClaims requests are decoded and handled at once, in total, and
	// largeSyncsInAll how many of them may have more than smallDecoded bytes. Each reads the claims
	// of its holder, as a list does. A caller has one at a time: largeOfCaller. Further ones wait.
	syncsInAll, largeSyncsInAll = 16, 12
	// ConnectionsOfCaller is how many connections a caller may have. Each can carry a thousand
	// streams with 8 KiB of metadata each.
	ConnectionsOfCaller = 16
	// unknownConnections is how many connections may be waiting for their identity. A handshake
	// needs 100 KiB, and takes seconds at most.
	unknownConnections = 512
	// refusalsPerSecond and refusalBurst are how many calls of a caller may be rejected, on average
	// and at once, before its connections are read more slowly. A rejection costs the agent a tenth
	// of a millisecond, and its caller nothing. refusalDebt is the maximum duration in seconds of
	// slow reading after the last rejection. A caller that reaches it loses its connections,
	// including everything sent on them.
	refusalsPerSecond, refusalBurst, refusalDebt = 100, 1000, 2
	// longestSlowness is how long a caller's connections are read slowly without a break. Then they
	// are closed, until the caller has kept its limits for a moment. Otherwise megabytes in the
	// buffers of a sender that has ended would keep its identity slow for hours.
	longestSlowness = 10 * time.Second
	// longestPause is how long a connection is left unread at most. Clients wait ten seconds for
	// the response to a keepalive.
	longestPause = time.Second
	// framesPerCall is how many HTTP/2 frames a caller may send for each call that it may make, on
	// average and at once, before its connections are read more slowly. A call has three or four
	// frames, and a request of 4 MiB has 256. The same request sent byte by byte would have four
	// million, and each frame can use 350 bytes of memory until the request is complete. frameDebt
	// is the maximum duration in seconds of slow reading after the last frame.
	framesPerCall, frameDebt = 10, 10
	// tracesPerSecond and traceBurst are how many of a caller's calls are traced, on average and at
	// once. The exporter's queue can hold the spans of that many calls. Further calls are not
	// traced.
	tracesPerSecond, traceBurst = 10, 100
	// certificateInterval and certificateBurst are how often certificates are issued to a caller,
	// on average, and how many at once. A shim renews its certificate a few times a day, or every
	// few minutes with the shortest lifetime. Each certificate is a signature, and an event in the
	// hub.
	certificateInterval, certificateBurst = 30 * time.Second, 100
	// lightPerCall is how many calls of light methods count as one call. Such a call is answered
	// from memory in less than a tenth of a millisecond. framesOfLight is how many frames each may
	// send that do not count, and lightFrames how many of them a caller may have left over.
	lightPerCall, framesOfLight, lightFrames = 20, 5, 10000
	// enough is the number of remembered callers from which idle ones are forgotten. Until their
	// number has doubled, it is not tried again: each try looks at all of them.
	enough = 1000
)

// RefusedError reports why a call was rejected.
type RefusedError struct {
	// Reason is one of the Reason constants.
	Reason string
	// Message is the reason as a sentence. It is for the caller.
	Message string
	// Sums has the numbers behind a reason that concerns all callers. It is for the log: a caller
	// must not learn what others do. It is empty for other reasons.
	Sums string
	// RetryAfter is how long to wait before a retry is worthwhile.
	RetryAfter time.Duration
}

// Error returns the message and the sums. It is for the log.
func (r *RefusedError) Error() string {
	if r.Sums == "" {
		return r.Message
	}
	return r.Message + " (all have " + r.Sums + ")"
}

// These are the reasons of a [RefusedError].
const (
	ReasonRate        = "rate"
	ReasonCalls       = "calls"
	ReasonWatches     = "watches"
	ReasonInFlight    = "bytes"
	ReasonUnread      = "unread"
	ReasonConnections = "connections"
	// ReasonObjects is the one for objects in lists.
	ReasonObjects = "objects"
	// ReasonCertificates is the one for certificates that were issued to the caller.
	ReasonCertificates = "certificates"
	// ReasonAllCalls and the following ones are for what all callers have together.
	ReasonAllCalls       = "all-calls"
	ReasonAllWatches     = "all-watches"
	ReasonAllInFlight    = "all-bytes"
	ReasonAllUnread      = "all-unread"
	ReasonAllConnections = "all-connections"
	ReasonHandshakes     = "handshakes"
)

// Limiter tracks what callers have open. It is safe for concurrent use.
type Limiter struct {
	Options
	clock           clock.PassiveClock
	refused, slowed *prometheus.CounterVec
	large           *semaphore.Weighted
	// decoded counts bytes.
	lists, largeLists, syncs, largeSyncs, decoded, checks shared
	unknown                                               *handshakes

	mu            sync.Mutex
	callers       map[string]*caller
	forgetFrom    int // the number of callers from which idle ones are forgotten
	bytes, unread int64
	// These are the sums of all callers.
	calls, watches, connections int
	light                       map[string]bool
}

// shared are turns that all callers share. They are handed out in the order of arrival, and few
// calls of a caller wait for one at a time.
type shared struct {
	turns   *semaphore.Weighted
	waiting prometheus.Gauge
}

// acquire waits for n turns. The error is that of the context.
func (s shared) acquire(ctx context.Context, n int64) error {
	if s.turns.TryAcquire(n) {
		return nil
	}
	s.waiting.Inc()
	defer s.waiting.Dec()
	return s.turns.Acquire(ctx, n)
}

// largeListsInAll returns how many large lists are built at once, in total. Each occupies a CPU,
// and one of the API server's. The rest of the CPUs is left to other work, if there are several.
func largeListsInAll() int64 { return max(1, int64(runtime.GOMAXPROCS(0)/2)) }

// checksInAll returns how many requests of more than smallRequest bytes are validated at once, in
// total. The rest of the CPUs is left to other work, if there are several.
func checksInAll() int64 { return max(1, int64(runtime.GOMAXPROCS(0)/2)) }

type caller struct {
	rate                                 *rate.Limiter
	hub                                  turns // of its requests to the hub, among themselves
	refusals, frames, traces             *rate.Limiter
	certificates, objects                *rate.Limiter
	slowSince                            time.Time // zero unless its connections are read slowly
	lightCalls, unpaidFrames             int
	calls, watches                       int
	connections                          int
	bytes, unread                        int64
	bytesOfAll                           int64 // those of bytes that count for all callers
	reads, large, lists, hubLists, atHub *semaphore.Weighted
	checks, largeChecks, largeLists      *semaphore.Weighted
}

// New returns a limiter. A nil registerer registers no metrics.
func New(o Options, c clock.PassiveClock, registerer prometheus.Registerer) (*Limiter, error) {
	waiting := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "capi_agent_calls_waiting",
		Help: "Calls that wait for a slot shared by all callers, by what they wait for (list: to build a list; large-list: to build one of more " +
			"than 2,000 objects; sync: to handle a SyncClaims; large: to decode and handle a large SyncClaims; check: to validate a request of " +
			"more than 4 KiB).",
	}, []string{"turn"})
	l := &Limiter{
		Options: o, clock: c, callers: map[string]*caller{}, forgetFrom: enough,
		large:      semaphore.NewWeighted(largeInAll),
		lists:      shared{semaphore.NewWeighted(listsInAll), waiting.WithLabelValues("list")},
		largeLists: shared{semaphore.NewWeighted(largeListsInAll()), waiting.WithLabelValues("large-list")},
		syncs:      shared{semaphore.NewWeighted(syncsInAll), waiting.WithLabelValues("sync")},
		decoded:    shared{semaphore.NewWeighted(decodedInAll), waiting.WithLabelValues("large")},
		largeSyncs: shared{semaphore.NewWeighted(largeSyncsInAll), waiting.WithLabelValues("large")},
		checks:     shared{semaphore.NewWeighted(checksInAll()), waiting.WithLabelValues("check")},
		unknown:    newHandshakes(),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capi_agent_calls_refused_total",
			Help: "Calls and connections that were refused because the caller exceeded a limit, by reason and method.",
		}, []string{"reason", "method"}),
		slowed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capi_agent_slow_reads_total",
			Help: "Reads from a caller's connection that were delayed, by reason (refusals: the caller keeps calling although its calls are rejected; " +
				"frames: the caller sends too many HTTP/2 frames).",
		}, []string{"reason"}),
	}
	if registerer != nil {
		for _, collector := range []prometheus.Collector{l.refused, l.slowed, waiting} {
			if err := registerer.Register(collector); err != nil {
				return nil, fmt.Errorf("registering the limits' metrics: %w", err)
			}
		}
	}
	return l, nil
}

// Call is an admitted call. It must be ended with [Call.End]. Its methods must be called from one
// goroutine, except where they state otherwise.
type Call struct {
	limiter *Limiter
	caller  *caller
	method  string
	watch   bool
	atHub   bool
	// awaited means that the call has a turn that all callers share, so that others may wait for
	// its end.
	awaited     bool
	held        int64
	heldOfAll   int64 // what counts for all callers
	free        []func()
	hubRequests atomic.Int64
}

// Light makes calls of these methods cost a fraction of others: callers have no choice but to make
// many of them, and each is answered from memory. It must be called before any other method.
func (l *Limiter) Light(methods ...string) {
	l.light = lo.SliceToMap(methods, func(method string) (string, bool) { return method, true })
}

// Begin admits a call. The error is a [*RefusedError].
func (l *Limiter) Begin(identity, method string, watch bool) (*Call, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.caller(identity)
	switch {
	case !watch && c.calls >= l.CallsAtOnce:
		return nil, l.refuse(c, method, ReasonCalls, time.Second, "this identity has reached its limit of %d open calls", c.calls)
	case watch && c.watches >= l.WatchesAtOnce:
		return nil, l.refuse(c, method, ReasonWatches, 5*time.Second, "this identity has reached its limit of %d open streams", c.watches)
	}
	tokens := 1
	if l.light[method] {
		if c.lightCalls = (c.lightCalls + 1) % lightPerCall; c.lightCalls != 0 {
			tokens = 0
		}
		c.unpaidFrames = min(c.unpaidFrames+framesOfLight, lightFrames)
	}
	if err := l.spend(c, method, tokens); err != nil {
		return nil, err
	}
	// Last, because a caller is not blamed for what others have: its rate bounds how often it may
	// try.
	if err := l.checkUnread(c, method); err != nil {
		return nil, err
	}
	switch {
	case !watch && !mayGrow(c.calls, 1, assuredCalls, l.AllCallsAtOnce-l.calls):
		return nil, refuseForAll(l, method, ReasonAllCalls, time.Second, "open calls", c.calls, l.calls, l.AllCallsAtOnce)
	case watch && !mayGrow(c.watches, 1, assuredWatches, l.AllWatchesAtOnce-l.watches):
		return nil, refuseForAll(l, method, ReasonAllWatches, 5*time.Second, "open streams", c.watches, l.watches, l.AllWatchesAtOnce)
	}
	if watch {
		c.watches++
		l.watches++
	} else {
		c.calls++
		l.calls++
	}
	return &Call{limiter: l, caller: c, method: method, watch: watch}, nil
}

// mayGrow reports whether a caller that has own of something may have more of it, if every caller
// is assured of some, and others are left for all. It may take one while it has fewer than are
// left, or than it is assured of, and several if it may take them one by one. Alone, a caller gets
// half of all. The more callers take as much as they can, the fewer each of them gets, and the one
// with the most is the first to get no more. A caller that comes later thus finds some left, and
// the assured ones in any case. They may come on top of the sum.
func mayGrow[N int | int64](own, more, assured, left N) bool {
	before := more - 1 // what it has taken when it takes the last one
	return own+before < assured || own+before < left-before
}

// caller returns the state of an identity, which it creates if needed. l.mu must be held.
func (l *Limiter) caller(identity string) *caller {
	c := l.callers[identity]
	if c == nil {
		l.forget(l.clock.Now())
		c = &caller{
			rate:     rate.NewLimiter(rate.Limit(l.CallsPerSecond), l.CallBurst),
			hub:      turns{rate: rate.NewLimiter(rate.Limit(l.HubRequestsPerSecond), l.HubRequestBurst)},
			refusals: rate.NewLimiter(refusalsPerSecond, refusalBurst),
			frames:   rate.NewLimiter(rate.Limit(l.framesPerSecond()), l.frameBurst()),
			traces:   rate.NewLimiter(tracesPerSecond, traceBurst),

			certificates: rate.NewLimiter(rate.Every(certificateInterval), certificateBurst),
			objects:      rate.NewLimiter(objectsPerSecond, objectBurst),

			reads: semaphore.NewWeighted(readsOfCaller), large: semaphore.NewWeighted(largeOfCaller),
			lists: semaphore.NewWeighted(listsOfCaller), hubLists: semaphore.NewWeighted(listsOfCaller),
			largeLists: semaphore.NewWeighted(largeListsOfCaller),
			atHub:      semaphore.NewWeighted(int64(l.HubCallsAtOnce)),
			checks:     semaphore.NewWeighted(checksOfCaller), largeChecks: semaphore.NewWeighted(checksOfCaller),
		}
		l.callers[identity] = c
	}
	return c
}

// Trace reports whether a call of the identity may be recorded, and counts it.
func (l *Limiter) Trace(identity string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.caller(identity).traces.AllowN(l.clock.Now(), 1)
}

// Issue admits the issue of a certificate to an identity that calls the method. The error is a
// [*RefusedError].
func (l *Limiter) Issue(identity, method string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, now := l.caller(identity), l.clock.Now()
	if c.certificates.AllowN(now, 1) {
		return nil
	}
	wait := time.Duration((1 - c.certificates.TokensAt(now)) * float64(certificateInterval)).Round(time.Millisecond)
	return l.refuse(c, method, ReasonCertificates, wait, "this identity has been issued %d certificates at once, and gets another one every %s",
		certificateBurst, certificateInterval)
}

// Accept admits a connection from a source whose identity is not known yet. If there are too many,
// it drops the oldest connection of the source with the most connections, by calling that
// connection's drop function. The returned function must be called when the identity is known or
// the connection has ended.
func (l *Limiter) Accept(source string, drop func()) (known func()) {
	known, dropped := l.unknown.begin(source, drop)
	if dropped {
		l.refused.WithLabelValues(ReasonHandshakes, "").Inc()
	}
	return known
}

// Connect admits a connection of an identity. The returned function must be called when the
// connection has ended. The error is a [*RefusedError].
func (l *Limiter) Connect(identity string) (ended func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.caller(identity)
	if c.connections >= ConnectionsOfCaller {
		return nil, l.refuse(c, "", ReasonConnections, time.Second, "this identity has reached its limit of %d connections", c.connections)
	}
	if !mayGrow(c.connections, 1, assuredConnections, l.AllConnections-l.connections) {
		return nil, refuseForAll(l, "", ReasonAllConnections, time.Second, "connections", c.connections, l.connections, l.AllConnections)
	}
	c.connections++
	l.connections++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		c.connections--
		l.connections--
	}, nil
}

// spend takes tokens from the caller's rate. l.mu must be held.
func (l *Limiter) spend(c *caller, method string, tokens int) error {
	now := l.clock.Now()
	if c.rate.AllowN(now, min(tokens, l.CallBurst)) {
		return nil
	}
	missing := float64(min(tokens, l.CallBurst)) - c.rate.TokensAt(now)
	wait := time.Duration(math.Ceil(missing/l.CallsPerSecond*1000)) * time.Millisecond
	return l.refuse(c, method, ReasonRate, wait, "this identity calls more often than %v times a second", l.CallsPerSecond)
}

// checkUnread returns an error if a caller has left too much unread for another call or event, and
// nil otherwise. l.mu must be held.
func (l *Limiter) checkUnread(c *caller, method string) error {
	switch {
	case c.unread >= UnreadOfCaller:
		return l.refuse(c, method, ReasonUnread, time.Second, "%d bytes of answers have not been read yet", c.unread)
	case !mayGrow(c.unread, 1, assuredUnread, unreadInAll-l.unread):
		return refuseForAll(l, method, ReasonAllUnread, time.Second, "bytes of answers that have not been read yet", c.unread, l.unread, unreadInAll)
	}
	return nil
}

// refuse counts a rejection that the caller itself causes, and returns its error. l.mu must be
// held.
func (l *Limiter) refuse(c *caller, method, reason string, after time.Duration, format string, args ...any) error {
	l.refused.WithLabelValues(reason, method).Inc()
	l.blame(c)
	return &RefusedError{Reason: reason, RetryAfter: after, Message: fmt.Sprintf(format, args...)}
}

// refuseForAll counts a rejection because of what all callers have together, which its caller may
// have little part in, and returns its error.
func refuseForAll[N int | int64](l *Limiter, method, reason string, after time.Duration, what string, own, sum, most N) error {
	l.refused.WithLabelValues(reason, method).Inc()
	return &RefusedError{
		Reason: reason, RetryAfter: after, Message: fmt.Sprintf("all identities together have too many %s; this identity has %d", what, own),
		Sums: fmt.Sprintf("%d of %d", sum, most),
	}
}

// Denied records that a call was rejected because the identity has no right to make it.
func (l *Limiter) Denied(identity string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blame(l.caller(identity))
}

// blame records a rejection. l.mu must be held.
func (l *Limiter) blame(c *caller) {
	now := l.clock.Now()
	if c.refusals.TokensAt(now) > -refusalsPerSecond*refusalDebt {
		c.refusals.ReserveN(now, 1)
	}
}

func (l *Limiter) framesPerSecond() float64 { return framesPerCall * l.CallsPerSecond }

func (l *Limiter) frameBurst() int { return framesPerCall * l.CallBurst }

// Frames records that n HTTP/2 frames of an identity have been read.
func (l *Limiter) Frames(identity string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, now := l.caller(identity), l.clock.Now()
	free := min(n, c.unpaidFrames)
	c.unpaidFrames -= free
	n = min(n-free, int(c.frames.TokensAt(now)+l.framesPerSecond()*frameDebt))
	for n > 0 { // a reservation of more than the burst would be none
		part := min(n, l.frameBurst())
		c.frames.ReserveN(now, part)
		n -= part
	}
}

// Pause returns how long the connections of an identity should not be read, because it keeps
// calling although it is rejected or sends too many frames. It also reports whether they should be
// closed.
func (l *Limiter) Pause(identity string) (pause time.Duration, over bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.callers[identity]
	if c == nil {
		return 0, false
	}
	now := l.clock.Now()
	missing, frames := -c.refusals.TokensAt(now), -c.frames.TokensAt(now)
	refusing, flooding := missing/refusalsPerSecond, frames/l.framesPerSecond()
	seconds := max(refusing, flooding)
	if seconds <= 0 {
		c.slowSince = time.Time{}
		return 0, false
	}
	if c.slowSince.IsZero() {
		c.slowSince = now
	}
	l.slowed.WithLabelValues(lo.Ternary(refusing > flooding, slowedByRefusals, slowedByFrames)).Inc()
	pause = time.Duration(min(longestPause.Seconds(), seconds) * float64(time.Second))
	return pause, refusing >= refusalDebt || now.Sub(c.slowSince) >= longestSlowness
}

// Why connections are read slowly.
const (
	slowedByRefusals = "refusals"
	slowedByFrames   = "frames"
)

// forget removes idle callers with full token buckets, if there are many callers. l.mu must be
// held.
func (l *Limiter) forget(now time.Time) {
	if len(l.callers) < l.forgetFrom {
		return
	}
	for identity, c := range l.callers {
		if c.calls+c.watches+c.connections == 0 && c.unread == 0 &&
			c.rate.TokensAt(now) >= float64(l.CallBurst) && c.hub.rate.TokensAt(now) >= float64(l.HubRequestBurst) &&
			c.refusals.TokensAt(now) >= refusalBurst && c.frames.TokensAt(now) >= float64(l.frameBurst()) && c.traces.TokensAt(now) >= traceBurst &&
			c.certificates.TokensAt(now) >= certificateBurst && c.objects.TokensAt(now) >= objectBurst {
			delete(l.callers, identity)
		}
	}
	l.forgetFrom = max(enough, 2*len(l.callers))
}

// Read waits until the call's request may be read, and returns a function to call once it has been
// read. It waits for the caller's other calls only. A caller has one large request at a time, until
// the call ends. The error is that of the context.
func (c *Call) Read(ctx context.Context, large bool) (done func(), err error) {
	if large {
		if err := c.keep(ctx, c.caller.large); err != nil {
			return nil, err
		}
	}
	if err := c.caller.reads.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return func() { c.caller.reads.Release(1) }, nil
}

// Decode waits until a large request other than SyncClaims, which has been read, may be decoded. It
// returns a function to call once it has been decoded. The error is that of the context.
func (c *Call) Decode(ctx context.Context) (done func(), err error) {
	// The semaphore that all callers share is held only for work on data that has already arrived,
	// so neither a caller nor the hub can block it.
	if err := c.limiter.large.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return func() { c.limiter.large.Release(1) }, nil
}

// Check waits until the call's request, which [Call.Hold] has counted, may be validated. It waits
// for the caller's other calls first, and for other callers only if the request is not small. Small
// requests do not wait for those that are not. It returns a function to call once the request has
// been validated. The call must hold no turn that other callers wait for. The error is that of the
// context.
func (c *Call) Check(ctx context.Context) (done func(), err error) {
	own := c.caller.checks
	if c.held > smallRequest {
		own = c.caller.largeChecks
	}
	if err := own.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	if c.held <= smallRequest {
		return func() { own.Release(1) }, nil
	}
	if err := c.limiter.checks.acquire(ctx, 1); err != nil {
		own.Release(1)
		return nil, err
	}
	return func() {
		c.limiter.checks.turns.Release(1)
		own.Release(1)
	}, nil
}

// keep acquires the semaphore until the call ends.
func (c *Call) keep(ctx context.Context, s *semaphore.Weighted) error {
	if err := s.Acquire(ctx, 1); err != nil {
		return err
	}
	c.free = append(c.free, func() { s.Release(1) })
	return nil
}

// keepShared acquires n of the turns that all callers share, until the call ends. Its requests to
// the hub then come before its caller's other ones, which only that caller waits for.
func (c *Call) keepShared(ctx context.Context, s shared, n int64) error {
	if err := s.acquire(ctx, n); err != nil {
		return err
	}
	c.awaited = true
	c.free = append(c.free, func() { s.turns.Release(n) })
	return nil
}

// Hold counts the size of a request until [Call.Free] or the end of the call. The error is a
// [*RefusedError].
func (c *Call) Hold(bytes int) error {
	l := c.limiter
	shared := int64(bytes)
	if bytes <= smallRequest {
		shared = 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.caller.bytes+int64(bytes) > bytesOfCaller {
		return l.refuse(c.caller, c.method, ReasonInFlight, time.Second, "this identity's requests of %d bytes are being handled", c.caller.bytes)
	}
	if err := l.spend(c.caller, c.method, bytes/BytesPerCall); err != nil {
		return err
	}
	if shared > 0 && !mayGrow(c.caller.bytesOfAll, shared, assuredBytes, bytesInAll-l.bytes) {
		return refuseForAll(l, c.method, ReasonAllInFlight, time.Second, "bytes of requests being handled", c.caller.bytesOfAll, l.bytes, bytesInAll)
	}
	c.held += int64(bytes)
	c.heldOfAll += shared
	c.caller.bytes += int64(bytes)
	c.caller.bytesOfAll += shared
	l.bytes += shared
	return nil
}

// Free ends what [Call.Hold] counts, before the call ends. It is for streams: once a request of
// theirs has been decoded, little of it is kept.
func (c *Call) Free() {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.unhold()
}

// unhold ends what Hold counts. The limiter's mu must be held.
func (c *Call) unhold() {
	c.caller.bytes -= c.held
	c.caller.bytesOfAll -= c.heldOfAll
	c.limiter.bytes -= c.heldOfAll
	c.held, c.heldOfAll = 0, 0
}

// AskHub waits until the call may query the hub's API server. It may do so until [Call.LeaveHub] or
// its end. The error is that of the context.
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

// LeaveHub lets another call of the caller query the hub's API server while this call only waits.
func (c *Call) LeaveHub() {
	if c.atHub {
		c.atHub = false
		c.caller.atHub.Release(1)
	}
}

// Sync waits until the call, whose SyncClaims request of that many bytes has arrived, may be
// decoded and handled. It waits for the caller's other calls first, so that a caller that keeps
// itself waiting keeps no other caller waiting, and last for a turn. Small requests wait for one as
// well, and large ones leave them a few. A request that is not handled within CallTimeout is cut,
// whatever its deadline: others wait for it. The error is that of the context.
func (c *Call) Sync(ctx context.Context, bytes int, cut func()) error {
	if err := c.AskHub(ctx); err != nil {
		return err
	}
	cutLate := func() {
		late := time.AfterFunc(c.limiter.CallTimeout, cut)
		c.free = append(c.free, func() { late.Stop() })
	}
	if bytes <= smallDecoded {
		if err := c.keepShared(ctx, c.limiter.syncs, 1); err != nil {
			return err
		}
		cutLate()
		return nil
	}
	if err := c.keepShared(ctx, c.limiter.decoded, min(int64(bytes), decodedInAll)); err != nil {
		return err
	}
	cutLate()
	if err := c.keepShared(ctx, c.limiter.largeSyncs, 1); err != nil {
		return err
	}
	return c.keepShared(ctx, c.limiter.syncs, 1)
}

// List waits until the call may build a list of about so many objects, and query the hub for it if
// asksHub is set. Its request must have arrived, and the call must not wait for the caller's other
// calls later, because other callers wait for it. Few of the caller's lists query the hub at once,
// so that they leave the hub to its other calls; its lists that do not query the hub do not wait
// for that. The error is that of the context or a [*RefusedError].
func (c *Call) List(ctx context.Context, objects int, asksHub bool) error {
	if asksHub {
		if err := c.keep(ctx, c.caller.hubLists); err != nil {
			return err
		}
	}
	if objects > largeList {
		if err := c.keep(ctx, c.caller.largeLists); err != nil {
			return err
		}
	}
	if err := c.pace(ctx, objects); err != nil {
		return err
	}
	if asksHub {
		if err := c.AskHub(ctx); err != nil {
			return err
		}
	}
	if err := c.keep(ctx, c.caller.lists); err != nil {
		return err
	}
	if objects > largeList {
		if err := c.keepShared(ctx, c.limiter.largeLists, 1); err != nil {
			return err
		}
	}
	if err := c.keepShared(ctx, c.limiter.lists, 1); err != nil {
		return err
	}
	// Earlier lists may have used up the limit meanwhile.
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.limiter.checkUnread(c.caller, c.method)
}

// pace waits until the caller may list so many more objects. Once it returns, they count, even if
// the call ends before its list is built. The error is that of the context, or a [*RefusedError] if
// they may be listed only after the call's deadline.
func (c *Call) pace(ctx context.Context, objects int) error {
	if objects < fewObjects {
		return nil
	}
	now := time.Now()
	place := c.caller.objects.ReserveN(now, min(objects, objectBurst))
	wait := place.DelayFrom(now)
	if deadline, bounded := ctx.Deadline(); bounded && now.Add(wait).After(deadline) {
		place.CancelAt(now)
		c.limiter.mu.Lock()
		defer c.limiter.mu.Unlock()
		return c.limiter.refuse(c.caller, c.method, ReasonObjects, wait.Round(time.Millisecond),
			"this identity lists more than %d objects a second", objectsPerSecond)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		place.Cancel()
		return ctx.Err()
	}
}

// Watch waits until the stream may send a snapshot of about so many objects. The error is that of
// the context or a [*RefusedError].
func (c *Call) Watch(ctx context.Context, objects int) error {
	return c.pace(ctx, objects/objectsOfWatch)
}

// Send counts the size of a response until the returned function is called. It must be called
// exactly once, when the response has been sent or dropped, which may be after the end of the call.
// Send rejects nothing, because the work has been done. The caller's next call is rejected instead.
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

// Again counts a further message that the caller sends on a stream: it costs as much as another
// call. The error is a [*RefusedError].
func (c *Call) Again() error {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.limiter.spend(c.caller, c.method, 1)
}

// Next admits a stream's next event. The error is a [*RefusedError].
func (c *Call) Next() error {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.limiter.checkUnread(c.caller, c.method)
}

// End ends the call, and releases what it holds.
func (c *Call) End() {
	c.LeaveHub()
	for _, free := range c.free {
		free()
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.unhold()
	if c.watch {
		c.caller.watches--
		c.limiter.watches--
	} else {
		c.caller.calls--
		c.limiter.calls--
	}
}
