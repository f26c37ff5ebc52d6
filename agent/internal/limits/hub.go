package limits

import (
	"context"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
)

type callKey struct{}

// NewContext returns a context that carries the call.
func NewContext(ctx context.Context, c *Call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// FromContext returns the call that the context carries, or nil.
func FromContext(ctx context.Context) *Call {
	c, _ := ctx.Value(callKey{}).(*Call)
	return c
}

// Hub limits the rate of requests to the hub's API server, for each kind of object. The calls of
// all callers together make at most half of them, in turns, so that the other half is left to the
// agent's own work: the requests whose context carries no call. A request with a large body counts
// as more than one, because etcd keeps each revision of an object for minutes. Hub stands in for
// the limiter of client-go, which serves all requests in the order of their arrival. It is safe for
// concurrent use.
type Hub struct {
	perSecond rate.Limit
	burst     int
	kindOf    func(path string) string

	mu    sync.Mutex
	kinds map[string]*kind
}

// kind limits the requests for one kind of object.
type kind struct {
	all     *rate.Limiter
	callers turns
}

// NewHub returns a hub that takes so many requests for each kind of object, on average and at once.
// kindOf returns the kind that the path of a request is about.
func NewHub(perSecond float64, burst int, kindOf func(path string) string) *Hub {
	return &Hub{perSecond: rate.Limit(perSecond), burst: burst, kindOf: kindOf, kinds: map[string]*kind{}}
}

// Transport returns a transport to the hub's API server that keeps to the limits, and to that of
// each caller. Clients that use it need no limiter of their own.
func (h *Hub) Transport(next http.RoundTripper) http.RoundTripper { return transport{h, next} }

type transport struct {
	hub  *Hub
	next http.RoundTripper
}

func (t transport) RoundTrip(request *http.Request) (*http.Response, error) {
	ctx, cost := request.Context(), costOf(request)
	of := t.hub.kind(request.URL.Path)
	if call := FromContext(ctx); call != nil {
		if err := call.request(ctx, of, cost); err != nil {
			return nil, err
		}
	}
	if err := of.all.WaitN(ctx, min(cost, of.all.Burst())); err != nil {
		return nil, err
	}
	return t.next.RoundTrip(request)
}

const (
	// bytesPerRequest is how many bytes of a write count as one request. A usual claim is smaller.
	bytesPerRequest = 4 << 10
	// costliest is the most requests that one counts as. The largest claim has 16 KiB. Only ledgers
	// are larger. A single write of a ledger serves all waiting claims.
	costliest = 4
)

// costOf returns how many requests a request counts as. One of unknown length counts as one.
func costOf(request *http.Request) int {
	return int(max(1, min(costliest, (request.ContentLength+bytesPerRequest-1)/bytesPerRequest)))
}

func (h *Hub) kind(path string) *kind {
	name := h.kindOf(path)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.kinds[name] == nil {
		h.kinds[name] = &kind{
			all:     rate.NewLimiter(h.perSecond, h.burst),
			callers: turns{rate: rate.NewLimiter(h.perSecond/2, max(1, h.burst/2))},
		}
	}
	return h.kinds[name]
}

// request waits until the call may send a request to the hub's API server. It may be called
// concurrently for one call. The error is that of the context.
func (c *Call) request(ctx context.Context, of *kind, cost int) error {
	for _, t := range []*turns{&c.caller.hub, &of.callers} {
		if err := t.wait(ctx, c.caller, cost, c.awaited); err != nil {
			return err
		}
	}
	c.hubRequests.Add(1)
	return nil
}

// turns limit a rate, that of one caller or of all callers together. Callers take turns: a caller's
// next request comes after those of other callers that wait.
type turns struct {
	rate *rate.Limiter

	mu      sync.Mutex
	waiting fairqueue.Turns[*caller, *turn]
	// timed means that a timer will hand out the next turn.
	timed bool
}

// turn is a request's place in the queue.
type turn struct {
	// missing is how many more times its caller's turn has to come.
	missing int
	come    chan struct{}
}

// wait waits for one turn for each request that a request counts as, before its caller's other
// requests if first is set. The error is that of the context.
func (t *turns) wait(ctx context.Context, of *caller, cost int, first bool) error {
	mine := &turn{missing: cost, come: make(chan struct{})}
	t.mu.Lock()
	if first {
		t.waiting.PushFirst(of, mine)
	} else {
		t.waiting.Push(of, mine)
	}
	t.handOut()
	t.mu.Unlock()
	select {
	case <-mine.come:
		return nil
	case <-ctx.Done():
		t.mu.Lock()
		defer t.mu.Unlock()
		t.waiting.Remove(of, mine)
		return ctx.Err()
	}
}

// handOut hands out the turns that the rate permits now, and sets a timer for the next one. t.mu
// must be held.
func (t *turns) handOut() {
	for t.waiting.Len() > 0 && t.rate.Allow() {
		if next := t.waiting.Next(); next.missing > 1 {
			next.missing--
			t.waiting.Pass()
		} else {
			close(t.waiting.Pop().come)
		}
	}
	if t.waiting.Len() == 0 || t.timed {
		return
	}
	t.timed = true
	missing := (1 - t.rate.Tokens()) / float64(t.rate.Limit())
	time.AfterFunc(time.Duration(missing*float64(time.Second)), func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.timed = false
		t.handOut()
	})
}

// HubRequests returns how many requests the call has sent to the hub's API server. It may be called
// concurrently.
func (c *Call) HubRequests() int64 { return c.hubRequests.Load() }
