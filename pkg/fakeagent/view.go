package fakeagent

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// view holds the objects of one kind as callers see them, and passes changes on to streams. Objects
// are never modified in place. Everything except a watcher's queue is guarded by the agent's lock.
type view[T proto.Message] struct {
	objects  map[clusterKey]map[string]T
	watchers map[*watcher[T]]struct{}
	// generation counts the changes.
	generation int64
}

func newView[T proto.Message]() *view[T] {
	return &view[T]{objects: map[clusterKey]map[string]T{}, watchers: map[*watcher[T]]struct{}{}}
}

// put stores the object and reports whether it changed.
func (f *view[T]) put(cluster clusterKey, key string, object T) bool {
	objects, ok := f.objects[cluster]
	if !ok {
		objects = map[string]T{}
		f.objects[cluster] = objects
	}
	if old, ok := objects[key]; ok && proto.Equal(old, object) {
		return false
	}
	objects[key] = object
	f.generation++
	f.send(cluster, change[T]{key: key, object: object})
	return true
}

// remove deletes the object and reports whether it existed.
func (f *view[T]) remove(cluster clusterKey, key string) bool {
	object, ok := f.objects[cluster][key]
	if !ok {
		return false
	}
	delete(f.objects[cluster], key)
	f.generation++
	f.send(cluster, change[T]{key: key, object: object, removed: true})
	return true
}

func (f *view[T]) get(cluster clusterKey, key string) (T, bool) {
	object, ok := f.objects[cluster][key]
	return object, ok
}

// list returns the Cluster's objects that keep accepts, sorted by key.
func (f *view[T]) list(cluster clusterKey, keep func(T) bool) []T {
	objects := f.objects[cluster]
	kept := make([]T, 0, len(objects))
	for _, key := range slices.SortedFunc(maps.Keys(objects), cmp.Compare) {
		if keep(objects[key]) {
			kept = append(kept, objects[key])
		}
	}
	return kept
}

func (f *view[T]) send(cluster clusterKey, c change[T]) {
	for w := range f.watchers {
		if w.cluster == cluster && w.keep(c.object) {
			w.add(c)
		}
	}
}

func everything[T proto.Message](T) bool { return true }

type change[T proto.Message] struct {
	key     string
	object  T // current, or last state if removed
	removed bool
}

// watcher queues changes for one stream.
type watcher[T proto.Message] struct {
	cluster clusterKey
	keep    func(T) bool
	limit   int
	signal  chan struct{}

	mu       sync.Mutex
	queue    []change[T]
	overflow string // why changes were dropped; empty if none were
}

func (w *watcher[T]) add(c change[T]) {
	w.mu.Lock()
	if w.overflow == "" {
		if len(w.queue) >= w.limit {
			w.queue, w.overflow = nil, "the stream was read too slowly"
		} else {
			w.queue = append(w.queue, c)
		}
	}
	w.mu.Unlock()
	w.wake()
}

func (w *watcher[T]) startOver(reason string) {
	w.mu.Lock()
	w.queue, w.overflow = nil, reason
	w.mu.Unlock()
	w.wake()
}

func (w *watcher[T]) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

func (w *watcher[T]) take() (changes []change[T], overflow string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	changes, overflow = w.queue, w.overflow
	w.queue, w.overflow = nil, ""
	return changes, overflow
}

// encoding sends the events of a stream as its responses.
type encoding[T proto.Message] struct {
	upsert    func(T) error
	removed   func(key string) error
	synced    func(*agentv1alpha1.Synced) error
	heartbeat func(*agentv1alpha1.Heartbeat) error
	resync    func(*agentv1alpha1.Resync) error
}

// serve sends a snapshot and every later change, until the caller goes away or streams are dropped.
// allowed is called with a.mu held.
func serve[T proto.Message](
	ctx context.Context, a *Agent, ref *agentv1alpha1.ClusterRef, allowed func(context.Context, clusterKey) error,
	f *view[T], keep func(T) bool, send encoding[T],
) error {
	cluster := keyOf(ref)
	w := &watcher[T]{cluster: cluster, keep: keep, limit: a.settings.watchBuffer, signal: make(chan struct{}, 1)}

	a.mu.Lock()
	if err := allowed(ctx, cluster); err != nil {
		a.mu.Unlock()
		return err
	}
	f.watchers[w] = struct{}{}
	snapshot, generation, dropped := f.list(cluster, keep), f.generation, a.dropped
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(f.watchers, w)
	}()

	sendSnapshot := func() error {
		for _, object := range snapshot {
			if err := a.thawed(ctx, dropped); err != nil {
				return err
			}
			if err := send.upsert(object); err != nil {
				return err
			}
		}
		if err := a.thawed(ctx, dropped); err != nil {
			return err
		}
		return send.synced(&agentv1alpha1.Synced{Generation: generation})
	}
	if err := sendSnapshot(); err != nil {
		return err
	}
	for {
		quiet := a.settings.clock.NewTimer(a.settings.heartbeat)
		var now time.Time
		select {
		case <-ctx.Done():
			quiet.Stop()
			return ctx.Err()
		case <-dropped:
			quiet.Stop()
			return agenterrors.ShuttingDown()
		case now = <-quiet.C():
		case <-w.signal:
			quiet.Stop()
		}
		if err := a.thawed(ctx, dropped); err != nil {
			return err
		}
		if !now.IsZero() {
			if err := send.heartbeat(&agentv1alpha1.Heartbeat{Time: timestamppb.New(now)}); err != nil {
				return err
			}
			continue
		}
		a.mu.Lock()
		changes, overflow := w.take()
		if overflow != "" {
			snapshot, generation = f.list(cluster, keep), f.generation
		}
		a.mu.Unlock()
		if overflow != "" {
			if err := send.resync(&agentv1alpha1.Resync{Reason: overflow}); err != nil {
				return err
			}
			if err := sendSnapshot(); err != nil {
				return err
			}
			continue
		}
		for _, c := range changes {
			if err := a.thawed(ctx, dropped); err != nil {
				return err
			}
			var err error
			if c.removed {
				err = send.removed(c.key)
			} else {
				err = send.upsert(c.object)
			}
			if err != nil {
				return err
			}
		}
	}
}

// thawed waits while streams are frozen.
func (a *Agent) thawed(ctx context.Context, dropped <-chan struct{}) error {
	a.mu.Lock()
	frozen := a.frozen
	a.mu.Unlock()
	if frozen == nil {
		return nil
	}
	select {
	case <-frozen:
		return nil
	case <-dropped:
		return agenterrors.ShuttingDown()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// DropStreams ends every open stream with UNAVAILABLE, like an agent that shuts down. New streams
// can be opened at once.
func (a *Agent) DropStreams() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.dropped)
	a.dropped = make(chan struct{})
}

// FreezeStreams makes open and new streams silent, without heartbeats, like a dead network, until
// it is called with false. The changes made meanwhile are then sent.
func (a *Agent) FreezeStreams(freeze bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case freeze && a.frozen == nil:
		a.frozen = make(chan struct{})
	case !freeze && a.frozen != nil:
		close(a.frozen)
		a.frozen = nil
	}
}

// Resync makes every open stream start over, as for a reader that was too slow.
func (a *Agent) Resync() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.groupView.startOver()
	a.claimView.startOver()
	a.machineView.startOver()
	a.clusterView.startOver()
	a.publishedView.startOver()
}

// startOver makes every stream of the view start over.
func (f *view[T]) startOver() {
	for w := range f.watchers {
		w.startOver("asked for by the test")
	}
}
