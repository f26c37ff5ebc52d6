// Package feed keeps the objects of each Cluster in memory and tells subscribers about every change.
//
// A subscriber gets a snapshot, a marker, and then the changes, without a gap in between. What a subscriber has not read yet
// is remembered by key, so that several changes of one object become one event, and a bounded number of keys costs a bounded
// amount of memory however slowly it reads. When more keys than that have changed, the subscriber gets a resync marker and a
// new snapshot on the same subscription.
package feed

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

var (
	// ErrNotReady means that the view is not complete yet.
	ErrNotReady = errors.New("the view is not complete yet")
	// ErrClosed means that the feed is shutting down.
	ErrClosed = errors.New("the feed is shutting down")
)

// Kind says what an [Event] is.
type Kind int

const (
	// Upsert carries an object as it is now: part of the snapshot, new, or changed.
	Upsert Kind = iota + 1
	// Removed carries the key of an object that the subscriber was shown, and that is gone or no longer wanted.
	Removed
	// Synced says that the snapshot is complete.
	Synced
	// Heartbeat says that nothing was there to read for the heartbeat interval.
	Heartbeat
	// Resync says that changes were dropped and a new snapshot follows.
	Resync
)

// Event is what a subscriber reads.
type Event[T any] struct {
	Kind Kind
	// Key of the object, for Upsert and Removed.
	Key string
	// Object, for Upsert. Shared: it must not be changed.
	Object T
	// Generation of the feed, for Synced.
	Generation int64
	// Time of the event, for Heartbeat.
	Time time.Time
}

// Options of a [Feed].
type Options[T any] struct {
	// Equal reports whether two objects are the same to every subscriber. REQUIRED.
	Equal func(a, b T) bool
	// Buffer is how many changed keys are kept for a subscriber that does not read. REQUIRED, at least 1.
	Buffer int
	// Heartbeat is how long a subscriber waits for something to read before it gets a heartbeat. REQUIRED, positive.
	Heartbeat time.Duration
	// Clock is the time. Nil means the real one.
	Clock clock.Clock
}

// Feed keeps objects by Cluster and key. It is safe for concurrent use.
type Feed[T any] struct {
	options Options[T]

	mu          sync.RWMutex
	scopes      map[types.NamespacedName]map[string]T
	subscribers map[types.NamespacedName]map[*Subscription[T]]struct{}
	generations map[types.NamespacedName]int64 // changes of each Cluster's objects; kept when there are none left
	ready       chan struct{}
	closed      bool
	resyncs     int64
}

// New returns an empty feed that is not ready.
func New[T any](options Options[T]) *Feed[T] {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	options.Buffer = max(options.Buffer, 1)
	return &Feed[T]{
		options:     options,
		scopes:      map[types.NamespacedName]map[string]T{},
		generations: map[types.NamespacedName]int64{},
		subscribers: map[types.NamespacedName]map[*Subscription[T]]struct{}{},
		ready:       make(chan struct{}),
	}
}

// Set stores an object, and reports whether that changed anything for subscribers. The object must not be changed any more.
func (f *Feed[T]) Set(cluster types.NamespacedName, key string, object T) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	objects := f.scopes[cluster]
	if objects == nil {
		objects = map[string]T{}
		f.scopes[cluster] = objects
	}
	if old, exists := objects[key]; exists && f.options.Equal(old, object) {
		return false
	}
	objects[key] = object
	f.changed(cluster, key)
	return true
}

// Remove forgets an object, and reports whether it was there.
func (f *Feed[T]) Remove(cluster types.NamespacedName, key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	objects := f.scopes[cluster]
	if _, exists := objects[key]; !exists {
		return false
	}
	delete(objects, key)
	if len(objects) == 0 {
		delete(f.scopes, cluster)
	}
	f.changed(cluster, key)
	return true
}

func (f *Feed[T]) changed(cluster types.NamespacedName, key string) {
	f.generations[cluster]++
	for subscriber := range f.subscribers[cluster] {
		subscriber.note(key)
	}
}

// SetReady says that the view is complete: reads and subscriptions are answered from now on.
func (f *Feed[T]) SetReady() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.isReady() {
		close(f.ready)
	}
}

func (f *Feed[T]) isReady() bool {
	select {
	case <-f.ready:
		return true
	default:
		return false
	}
}

// Close ends every subscription with [ErrClosed], and every later one at once.
func (f *Feed[T]) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for _, subscribers := range f.subscribers {
		for subscriber := range subscribers {
			subscriber.wake()
		}
	}
}

// Ready returns a channel that is closed once the view is complete.
func (f *Feed[T]) Ready() <-chan struct{} { return f.ready }

// Generation is raised by every change of any object.
func (f *Feed[T]) Generation() int64 {
	return f.GenerationOf(func(types.NamespacedName) bool { return true })
}

// GenerationOf is raised by every change of any object of the Clusters for which the function, which must not call the feed, returns true.
func (f *Feed[T]) GenerationOf(among func(cluster types.NamespacedName) bool) int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	sum := int64(0)
	for cluster, changes := range f.generations {
		if among(cluster) {
			sum += changes
		}
	}
	return sum
}

// Stats are counts for metrics.
type Stats struct {
	Objects, Subscribers int
	// Resyncs is how often a subscriber was too slow, since the start.
	Resyncs int64
}

// Stats returns the present counts.
func (f *Feed[T]) Stats() Stats {
	f.mu.RLock()
	defer f.mu.RUnlock()
	s := Stats{Resyncs: f.resyncs}
	for _, subscribers := range f.subscribers {
		s.Subscribers += len(subscribers)
	}
	for _, objects := range f.scopes {
		s.Objects += len(objects)
	}
	return s
}

// Get returns one object. Errors: [ErrNotReady], [ErrClosed].
func (f *Feed[T]) Get(cluster types.NamespacedName, key string) (object T, found bool, err error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if err := f.usable(); err != nil {
		return object, false, err
	}
	object, found = f.scopes[cluster][key]
	return object, found, nil
}

// Peek returns what was last set, whether or not the view is complete.
func (f *Feed[T]) Peek(cluster types.NamespacedName, key string) (object T, found bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	object, found = f.scopes[cluster][key]
	return object, found
}

// List returns the objects of a Cluster, ordered by key, and the number of their changes until then. Errors: [ErrNotReady],
// [ErrClosed].
func (f *Feed[T]) List(cluster types.NamespacedName) ([]T, int64, error) {
	entries, generation, err := f.entries(cluster)
	if err != nil {
		return nil, 0, err
	}
	order(entries)
	objects := make([]T, 0, len(entries))
	for _, e := range entries {
		objects = append(objects, e.object)
	}
	return objects, generation, nil
}

func (f *Feed[T]) entries(cluster types.NamespacedName) ([]entry[T], int64, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if err := f.usable(); err != nil {
		return nil, 0, err
	}
	return f.copied(cluster), f.generations[cluster], nil
}

func (f *Feed[T]) usable() error {
	switch {
	case f.closed:
		return ErrClosed
	case !f.isReady():
		return ErrNotReady
	}
	return nil
}

type entry[T any] struct {
	key    string
	object T
}

// copied returns a Cluster's objects in no particular order: the lock, which all Clusters share, is held no longer than that takes.
func (f *Feed[T]) copied(cluster types.NamespacedName) []entry[T] {
	entries := make([]entry[T], 0, len(f.scopes[cluster]))
	for key, object := range f.scopes[cluster] {
		entries = append(entries, entry[T]{key, object})
	}
	return entries
}

func order[T any](entries []entry[T]) {
	slices.SortFunc(entries, func(a, b entry[T]) int { return cmp.Compare(a.key, b.key) })
}

// Subscribe begins a subscription to one Cluster's objects, as far as they are wanted; nil wants all. wanted must be quick, and
// must neither change the object nor call the feed. The caller must Close the subscription. Errors: [ErrNotReady], [ErrClosed].
func (f *Feed[T]) Subscribe(cluster types.NamespacedName, wanted func(T) bool) (*Subscription[T], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.usable(); err != nil {
		return nil, err
	}
	s := &Subscription[T]{
		feed: f, cluster: cluster, wanted: wanted, woken: make(chan struct{}, 1),
		pending: map[string]struct{}{}, shown: map[string]struct{}{},
	}
	s.begin()
	if f.subscribers[cluster] == nil {
		f.subscribers[cluster] = map[*Subscription[T]]struct{}{}
	}
	f.subscribers[cluster][s] = struct{}{}
	return s, nil
}

// Subscription is one reader's place in a feed. Next is not safe for concurrent use.
type Subscription[T any] struct {
	feed    *Feed[T]
	cluster types.NamespacedName
	wanted  func(T) bool
	woken   chan struct{}

	// Guarded by feed.mu.
	unordered  []entry[T] // the snapshot before it is in order
	snapshot   []entry[T] // what is left of it
	syncing    bool       // the marker is still to come
	syncedAt   int64
	order      []string // keys that changed, oldest first
	pending    map[string]struct{}
	shown      map[string]struct{} // keys that the reader has
	overflowed bool
}

// begin starts a snapshot. feed.mu is held.
func (s *Subscription[T]) begin() {
	s.unordered, s.snapshot, s.syncing, s.syncedAt = s.feed.copied(s.cluster), nil, true, s.feed.generations[s.cluster]
	s.order, s.overflowed = nil, false
	clear(s.pending)
	clear(s.shown)
}

// note remembers a change. feed.mu is held.
func (s *Subscription[T]) note(key string) {
	defer s.wake()
	if s.overflowed {
		return
	}
	if _, known := s.pending[key]; known {
		return
	}
	if len(s.order) >= s.feed.options.Buffer {
		s.overflowed = true
		s.feed.resyncs++
		s.order, s.snapshot, s.unordered = nil, nil, nil
		clear(s.pending)
		return
	}
	s.pending[key] = struct{}{}
	s.order = append(s.order, key)
}

func (s *Subscription[T]) wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

// Next waits for the next event. Changes of objects that are not wanted neither end the wait nor put the heartbeat off, which
// comes when the call has waited for the heartbeat interval. Errors: [ErrClosed], or the context's.
func (s *Subscription[T]) Next(ctx context.Context) (Event[T], error) {
	var timer clock.Timer
	for {
		event, ok, err := s.take()
		if ok || err != nil {
			return event, err
		}
		if timer == nil {
			timer = s.feed.options.Clock.NewTimer(s.feed.options.Heartbeat)
			defer timer.Stop()
		}
		select {
		case <-ctx.Done():
			return Event[T]{}, ctx.Err()
		case <-s.woken:
		case now := <-timer.C():
			return Event[T]{Kind: Heartbeat, Time: now}, nil
		}
	}
}

// arrange brings a new snapshot into order, without the lock that all Clusters share.
func (s *Subscription[T]) arrange() {
	s.feed.mu.Lock()
	entries := s.unordered
	s.unordered = nil
	s.feed.mu.Unlock()
	if entries == nil {
		return
	}
	order(entries)
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	if !s.overflowed { // or there is a new one to come
		s.snapshot = entries
	}
}

// take returns the next event that is there already, if any.
func (s *Subscription[T]) take() (Event[T], bool, error) {
	s.arrange()
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	for {
		var key string
		var object T
		exists := true
		switch {
		case s.feed.closed:
			return Event[T]{}, false, ErrClosed
		case s.overflowed:
			s.begin()
			return Event[T]{Kind: Resync}, true, nil
		case len(s.snapshot) > 0:
			key, object = s.snapshot[0].key, s.snapshot[0].object
			s.snapshot = s.snapshot[1:]
		case s.syncing:
			s.syncing, s.snapshot = false, nil
			return Event[T]{Kind: Synced, Generation: s.syncedAt}, true, nil
		case len(s.order) > 0:
			key = s.order[0]
			s.order = s.order[1:]
			delete(s.pending, key)
			object, exists = s.feed.scopes[s.cluster][key]
		default:
			return Event[T]{}, false, nil
		}
		if event, ok := s.show(key, object, exists); ok {
			return event, true, nil
		}
	}
}

// show returns what the reader must be told of an object, if anything. feed.mu is held.
func (s *Subscription[T]) show(key string, object T, exists bool) (Event[T], bool) {
	if exists && (s.wanted == nil || s.wanted(object)) {
		s.shown[key] = struct{}{}
		return Event[T]{Kind: Upsert, Key: key, Object: object}, true
	}
	if _, shown := s.shown[key]; !shown {
		return Event[T]{}, false
	}
	delete(s.shown, key)
	return Event[T]{Kind: Removed, Key: key}, true
}

// Close ends the subscription. It may be called more than once.
func (s *Subscription[T]) Close() {
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	delete(s.feed.subscribers[s.cluster], s)
	if len(s.feed.subscribers[s.cluster]) == 0 {
		delete(s.feed.subscribers, s.cluster)
	}
}

// Clusters returns the Clusters that have objects, in no particular order.
func (f *Feed[T]) Clusters() []types.NamespacedName {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return slices.Collect(maps.Keys(f.scopes))
}
