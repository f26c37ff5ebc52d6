// Package batchread answers several waiting calls with one request to the API server.
//
// It is for consistent reads, which no cache can answer. A request begins after every call that it
// answers has begun, as if each call had made its own. This saves the fixed cost of a request: a
// list with a selector, for example, examines every object of the namespace. Package limits
// determines how many calls are admitted, and so how many can share one request.
//
// Packages for this purpose, such as dataloaders, delay each read in order to gather others. Here a
// read that finds a free place is never delayed.
package batchread

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

const (
	// places is how many requests of a group run at a time. With a single one, all reads of a group
	// would wait for one that hangs.
	places = 2
	// mostKeys is how many keys one request names. Sixty-four label values, of at most 63
	// characters each, make a URL of less than 5 KiB, which proxies accept.
	mostKeys = 64
)

// Read returns the values of keys in one request, which has to have room for 64 of them. A key that
// is missing from the result has the zero value. There is at least one key, and no key twice.
type Read[K comparable, V any] func(ctx context.Context, keys []K) (map[K]V, error)

// Reads are reads of values by key, in groups that do not share requests. The zero value is ready
// to use. It is safe for concurrent use, and must not be copied.
type Reads[G, K comparable, V any] struct {
	mu     sync.Mutex
	groups map[G]*group[K, V]
}

// group counts the requests that run, and queues the calls. It exists while a request of it runs.
type group[K comparable, V any] struct {
	running int
	waiting []*call[K, V]
}

type call[K comparable, V any] struct {
	ctx   context.Context //nolint:containedctx // a call's, which waits for a request that others may have begun
	key   K
	read  Read[K, V]
	value V
	err   error
	done  chan struct{} // closed once value or err is set
}

// Do returns the value of a key, from a request that begins after Do was called. All calls of one
// group must have equivalent reads. The value is the caller's own: a request has each key for one
// call only.
//
// A request of a single call has that call's context. One that several calls share has none of
// their values except the logger of the oldest, and the latest of their deadlines; it is canceled
// when all of them have ended. Its error is the error of all of them. A call that ends while it
// waits returns the cause.
func (r *Reads[G, K, V]) Do(ctx context.Context, in G, key K, read Read[K, V]) (V, error) {
	r.mu.Lock()
	if r.groups == nil {
		r.groups = map[G]*group[K, V]{}
	}
	g := r.groups[in]
	if g == nil {
		g = &group[K, V]{}
		r.groups[in] = g
	}
	if g.running < places {
		g.running++
		r.mu.Unlock()
		defer func() { // even if it panics
			if batch := r.next(in, g); batch != nil {
				go r.serve(in, g, batch)
			}
		}()
		values, err := read(ctx, []K{key})
		return values[key], err
	}
	c := &call[K, V]{ctx: ctx, key: key, read: read, done: make(chan struct{})}
	g.waiting = append(g.waiting, c)
	r.mu.Unlock()

	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
		var none V
		return none, context.Cause(ctx)
	}
}

// serve uses a place for the calls that wait, until there are none.
func (r *Reads[G, K, V]) serve(in G, g *group[K, V], batch []*call[K, V]) {
	for batch != nil {
		answer(batch)
		batch = r.next(in, g)
	}
}

// next returns the calls that a place answers next. If there are none, it frees the place.
func (r *Reads[G, K, V]) next(in G, g *group[K, V]) []*call[K, V] {
	r.mu.Lock()
	defer r.mu.Unlock()
	batch := g.take()
	if batch == nil {
		if g.running--; g.running == 0 {
			delete(r.groups, in)
		}
	}
	return batch
}

// take removes the calls that the next request answers: the oldest ones, each key once. It drops
// those that have ended. Nil means that none is left.
func (g *group[K, V]) take() []*call[K, V] {
	var batch []*call[K, V]
	keys := make(map[K]bool, mostKeys)
	g.waiting = slices.DeleteFunc(g.waiting, func(c *call[K, V]) bool {
		switch {
		case c.ctx.Err() != nil:
			return true
		case len(batch) == mostKeys || keys[c.key]:
			return false
		}
		keys[c.key] = true
		batch = append(batch, c)
		return true
	})
	return batch
}

// answer makes one request for the calls.
func answer[K comparable, V any](batch []*call[K, V]) {
	ctx, cancel := contextOf(batch)
	defer cancel()
	keys := make([]K, len(batch))
	for i, c := range batch {
		keys[i] = c.key
	}
	var values map[K]V
	err := panics.Confined(log.FromContext(ctx), panics.Calls, "a read panicked", func() (err error) {
		values, err = batch[0].read(ctx, keys)
		return err
	})
	for _, c := range batch {
		c.value, c.err = values[c.key], err
		close(c.done)
	}
}

// contextOf returns the context of a request for the calls. Work for several callers is charged to
// none of them, so it has none of their values, from which limits tell who called.
func contextOf[K comparable, V any](batch []*call[K, V]) (context.Context, context.CancelFunc) {
	oldest := batch[0].ctx
	if len(batch) == 1 {
		return context.WithCancel(oldest)
	}
	ctx, cancel := context.WithCancel(log.IntoContext(context.Background(), log.FromContext(oldest)))
	var left atomic.Int64
	latest, bounded := time.Time{}, true
	stops := make([]func() bool, len(batch))
	for i, c := range batch {
		stops[i] = context.AfterFunc(c.ctx, func() {
			if left.Add(1) == int64(len(batch)) {
				cancel()
			}
		})
		deadline, has := c.ctx.Deadline()
		bounded = bounded && has
		if deadline.After(latest) {
			latest = deadline
		}
	}
	release := cancel
	if bounded {
		ctx, release = context.WithDeadline(ctx, latest)
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		release()
		cancel()
	}
}
