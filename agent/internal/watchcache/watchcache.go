// Package watchcache keeps the objects of each Cluster in memory and notifies subscribers of every
// change.
//
// A subscriber receives a snapshot, a marker, and then the changes, without a gap. Unread changes
// are kept by key, so that several changes of one object become one event. The number of keys is
// limited, and so is the memory used for a subscriber, however slowly it reads. If more keys than
// that have changed, the subscriber receives a resync marker and a new snapshot on the same
// subscription.
//
// It is written by hand because neither of client-go's fan-outs merges unread changes by key: the
// listeners of a shared informer queue them without a bound, and watch.Broadcaster blocks or drops.
package watchcache

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
	// ErrClosed means that the cache is shutting down.
	ErrClosed = errors.New("the cache is shutting down")
)

// Kind is the kind of an [Event].
type Kind int

const (
	// Upsert carries the current state of an object that is part of the snapshot, new, or changed.
	Upsert Kind = iota + 1
	// Removed carries the key of an object that the subscriber has received, and that is gone or no
	// longer wanted.
	Removed
	// Synced marks the end of the snapshot.
	Synced
	// Heartbeat means that there was no event for the heartbeat interval.
	Heartbeat
	// Resync means that changes were dropped and a new snapshot follows.
	Resync
)

// Event is an event for a subscriber.
type Event[T any] struct {
	Kind Kind
	// Key is the key of the object, for Upsert and Removed.
	Key string
	// Object is the object, for Upsert. It is shared and must not be modified.
	Object T
	// Generation is the generation of the snapshot, for Synced.
	Generation int64
	// Time is the time of the event, for Heartbeat.
	Time time.Time
}

// Options configure a [Cache].
type Options[T any] struct {
	// Equal reports whether two objects are the same to every subscriber. REQUIRED.
	Equal func(a, b T) bool
	// Buffer is how many changed keys are kept for a subscriber that does not read. REQUIRED, at
	// least 1.
	Buffer int
	// Heartbeat is how long a subscriber waits for an event before it receives a heartbeat.
	// REQUIRED, positive.
	Heartbeat time.Duration
	// Clock provides the time. Nil means the system clock.
	Clock clock.Clock
}

// Cache stores objects by Cluster and key. It is safe for concurrent use.
type Cache[T any] struct {
	options Options[T]

	mu          sync.RWMutex
	scopes      map[types.NamespacedName]map[string]T
	subscribers map[types.NamespacedName]map[*Subscription[T]]struct{}
	// generations counts the changes of each Cluster's objects. An entry stays when no objects are
	// left.
	generations map[types.NamespacedName]int64
	observers   []func(cluster types.NamespacedName)
	ready       chan struct{}
	closed      bool
	resyncs     int64
}

// New returns an empty cache that is not ready.
func New[T any](options Options[T]) *Cache[T] {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	options.Buffer = max(options.Buffer, 1)
	return &Cache[T]{
		options:     options,
		scopes:      map[types.NamespacedName]map[string]T{},
		generations: map[types.NamespacedName]int64{},
		subscribers: map[types.NamespacedName]map[*Subscription[T]]struct{}{},
		ready:       make(chan struct{}),
	}
}

// Set stores an object, and reports whether subscribers see a change. The object must not be
// modified afterwards.
func (f *Cache[T]) Set(cluster types.NamespacedName, key string, object T) bool {
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

// Remove deletes an object, and reports whether it existed.
func (f *Cache[T]) Remove(cluster types.NamespacedName, key string) bool {
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

func (f *Cache[T]) changed(cluster types.NamespacedName, key string) {
	f.generations[cluster]++
	for subscriber := range f.subscribers[cluster] {
		subscriber.note(key)
	}
	for _, observe := range f.observers {
		observe(cluster)
	}
}

// Observe makes the cache call a function after each change of an object, with the Cluster of the
// object. The function must be fast, must be safe for concurrent use, and must not call the cache.
func (f *Cache[T]) Observe(observe func(cluster types.NamespacedName)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.observers = append(f.observers, observe)
}

// SetReady marks the view as complete. From then on, reads and subscriptions succeed.
func (f *Cache[T]) SetReady() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.isReady() {
		close(f.ready)
	}
}

func (f *Cache[T]) isReady() bool {
	select {
	case <-f.ready:
		return true
	default:
		return false
	}
}

// Close ends every subscription with [ErrClosed]. New subscriptions fail with the same error.
func (f *Cache[T]) Close() {
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
func (f *Cache[T]) Ready() <-chan struct{} { return f.ready }

// Generation returns the number of changes of all objects.
func (f *Cache[T]) Generation() int64 {
	return f.GenerationOf(func(types.NamespacedName) bool { return true })
}

// GenerationOf returns the number of changes of the objects of the Clusters that the function
// selects. The function must not call the cache.
func (f *Cache[T]) GenerationOf(among func(cluster types.NamespacedName) bool) int64 {
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

// GenerationIn returns the number of changes of a Cluster's objects.
func (f *Cache[T]) GenerationIn(cluster types.NamespacedName) int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.generations[cluster]
}

// Stats are counts for metrics.
type Stats struct {
	Objects, Subscribers int
	// Resyncs is how often a subscriber was too slow since the start.
	Resyncs int64
}

// Stats returns the current counts.
func (f *Cache[T]) Stats() Stats {
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

// Get returns an object. The error is [ErrNotReady] or [ErrClosed].
func (f *Cache[T]) Get(cluster types.NamespacedName, key string) (object T, found bool, err error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if err := f.usable(); err != nil {
		return object, false, err
	}
	object, found = f.scopes[cluster][key]
	return object, found, nil
}

// Peek returns the object that was last set, whether or not the view is complete.
func (f *Cache[T]) Peek(cluster types.NamespacedName, key string) (object T, found bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	object, found = f.scopes[cluster][key]
	return object, found
}

// List returns the objects of a Cluster, sorted by key, and the number of their changes so far. The
// error is [ErrNotReady] or [ErrClosed].
func (f *Cache[T]) List(cluster types.NamespacedName) ([]T, int64, error) {
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

func (f *Cache[T]) entries(cluster types.NamespacedName) ([]entry[T], int64, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if err := f.usable(); err != nil {
		return nil, 0, err
	}
	return f.copied(cluster), f.generations[cluster], nil
}

func (f *Cache[T]) usable() error {
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

// copied returns a Cluster's objects in no particular order. Sorting would hold the lock, which all
// Clusters share, for longer.
func (f *Cache[T]) copied(cluster types.NamespacedName) []entry[T] {
	entries := make([]entry[T], 0, len(f.scopes[cluster]))
	for key, object := range f.scopes[cluster] {
		entries = append(entries, entry[T]{key, object})
	}
	return entries
}

func order[T any](entries []entry[T]) {
	slices.SortFunc(entries, func(a, b entry[T]) int { return cmp.Compare(a.key, b.key) })
}

// Subscribe starts a subscription to those objects of a Cluster that wanted selects; nil selects
// all. The function must be fast, and must neither modify the object nor call the cache. The caller
// must close the subscription. The error is [ErrNotReady] or [ErrClosed].
func (f *Cache[T]) Subscribe(cluster types.NamespacedName, wanted func(T) bool) (*Subscription[T], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.usable(); err != nil {
		return nil, err
	}
	s := &Subscription[T]{
		cache: f, cluster: cluster, wanted: wanted, woken: make(chan struct{}, 1),
		pending: map[string]struct{}{}, shown: map[string]struct{}{},
	}
	s.begin()
	if f.subscribers[cluster] == nil {
		f.subscribers[cluster] = map[*Subscription[T]]struct{}{}
	}
	f.subscribers[cluster][s] = struct{}{}
	return s, nil
}

// Subscription is the position of one reader in a cache. Next is not safe for concurrent use.
type Subscription[T any] struct {
	cache   *Cache[T]
	cluster types.NamespacedName
	wanted  func(T) bool
	woken   chan struct{}

	// The following fields are guarded by cache.mu.
	unordered  []entry[T] // the snapshot before it is sorted
	snapshot   []entry[T] // the unread rest of the snapshot
	whole      int        // the number of entries that the snapshot occupies
	syncing    bool       // the Synced event is still to be sent
	syncedAt   int64
	order      []string // changed keys, oldest first
	pending    map[string]struct{}
	shown      map[string]struct{} // keys that the reader has received
	overflowed bool
}

// begin starts a snapshot. cache.mu must be held.
func (s *Subscription[T]) begin() {
	s.unordered, s.snapshot, s.syncing, s.syncedAt = s.cache.copied(s.cluster), nil, true, s.cache.generations[s.cluster]
	s.order, s.overflowed = nil, false
	clear(s.pending)
	clear(s.shown)
}

// note records a change. cache.mu must be held.
func (s *Subscription[T]) note(key string) {
	defer s.wake()
	if s.overflowed {
		return
	}
	if _, known := s.pending[key]; known {
		return
	}
	if len(s.order) >= s.cache.options.Buffer {
		s.overflowed = true
		s.cache.resyncs++
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

// Next waits for the next event. A heartbeat is sent when a call has waited for the heartbeat
// interval. Changes of unwanted objects neither end the wait nor delay the heartbeat. The error is
// [ErrClosed] or that of the context.
func (s *Subscription[T]) Next(ctx context.Context) (Event[T], error) {
	var timer clock.Timer
	for {
		event, ok, err := s.take()
		if ok || err != nil {
			return event, err
		}
		if timer == nil {
			timer = s.cache.options.Clock.NewTimer(s.cache.options.Heartbeat)
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

// arrange sorts a new snapshot, without holding the lock that all Clusters share.
func (s *Subscription[T]) arrange() {
	s.cache.mu.Lock()
	entries := s.unordered
	s.unordered = nil
	s.cache.mu.Unlock()
	if entries == nil {
		return
	}
	order(entries)
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	// After an overflow, a new snapshot will follow.
	if !s.overflowed {
		s.snapshot, s.whole = entries, len(entries)
	}
}

// take returns the next event that is already available, if any.
func (s *Subscription[T]) take() (Event[T], bool, error) {
	s.arrange()
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	for {
		var key string
		var object T
		exists := true
		switch {
		case s.cache.closed:
			return Event[T]{}, false, ErrClosed
		case s.overflowed:
			s.begin()
			return Event[T]{Kind: Resync}, true, nil
		case len(s.snapshot) > 0:
			key, object = s.snapshot[0].key, s.snapshot[0].object
			if s.snapshot = s.snapshot[1:]; 2*len(s.snapshot) < s.whole {
				// What has been read is freed, while shown grows.
				s.snapshot, s.whole = slices.Clone(s.snapshot), len(s.snapshot)
			}
		case s.syncing:
			s.syncing, s.snapshot = false, nil
			return Event[T]{Kind: Synced, Generation: s.syncedAt}, true, nil
		case len(s.order) > 0:
			key = s.order[0]
			s.order = s.order[1:]
			delete(s.pending, key)
			object, exists = s.cache.scopes[s.cluster][key]
		default:
			return Event[T]{}, false, nil
		}
		if event, ok := s.show(key, object, exists); ok {
			return event, true, nil
		}
	}
}

// show returns the event for the current state of an object, if the reader needs one. cache.mu must
// be held.
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
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	delete(s.cache.subscribers[s.cluster], s)
	if len(s.cache.subscribers[s.cluster]) == 0 {
		delete(s.cache.subscribers, s.cluster)
	}
}

// Count returns how many objects a Cluster has.
func (f *Cache[T]) Count(cluster types.NamespacedName) int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return len(f.scopes[cluster])
}

// Each calls a function for each object of a Cluster, in no particular order. The function must be
// fast, and must neither modify the object nor call the cache.
func (f *Cache[T]) Each(cluster types.NamespacedName, do func(T)) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, object := range f.scopes[cluster] {
		do(object)
	}
}

// Clusters returns the Clusters that have objects, in no particular order.
func (f *Cache[T]) Clusters() []types.NamespacedName {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return slices.Collect(maps.Keys(f.scopes))
}
