package client

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// errSilent ends a stream that received nothing, not even heartbeats, for [missedHeartbeats]
// intervals.
var errSilent = errors.New("the agent's stream went silent: no heartbeat within three intervals")

// errEnded ends a stream that the agent closed without an error.
var errEnded = errors.New("the agent ended the stream")

const missedHeartbeats = 3

// Mirror maintains a complete local copy of what the agent streams. It is safe for concurrent use.
//
// The copy is either empty, before the first snapshot is complete, or complete. A new snapshot,
// after a reconnect or a resync, replaces the whole view once it is complete; until then the old
// view is served. While the agent is away, the last known view is kept.
//
// Objects returned by a mirror are shared and must not be modified.
type Mirror[T proto.Message] struct {
	name              string
	key               func(T) string
	providerID        func(T) string // nil for objects without one
	open              func(context.Context) (receive func() (event[T], error), err error)
	clock             clock.Clock
	logger            logr.Logger
	heartbeatInterval time.Duration
	backoff           wait.Backoff
	synced            chan struct{}
	closed            <-chan struct{} // the client's

	mu            sync.RWMutex
	view          map[string]T
	indexed       map[string]map[string]T // view, by provider ID and key
	sorted        []T                     // view, sorted by key; nil if it must be sorted again
	generation    uint64
	state         State
	subscriptions map[*Subscription]struct{}
	stateWatchers map[chan struct{}]struct{}
}

// State describes how current a mirror's view is.
type State struct {
	// Synced is true once a complete view has been received. It never becomes false again.
	Synced bool
	// Connected is true while the view follows the agent: the current stream is open and has
	// completed a snapshot.
	Connected bool
	// LastError is what ended the last stream, or prevented it from opening. It is kept while
	// connected, for diagnosis, and is nil if nothing has failed so far.
	LastError error
	// Since is when Connected last changed. It is zero before [Mirror.Run].
	Since time.Time
	// LastEvent is when the last event was received, including heartbeats. It is zero if there was
	// none.
	LastEvent time.Time
}

// kind is the kind of an event of a stream.
type kind int

const (
	// unknown is an event of a newer agent. It only proves that the stream is alive.
	unknown kind = iota
	upsert
	removed
	synced
	heartbeat
	resync
)

type event[T proto.Message] struct {
	kind   kind
	object T      // upsert
	key    string // removed
	reason string // resync
}

func newMirror[T proto.Message](
	c *Client, name string, key func(T) string, open func(context.Context) (func() (event[T], error), error),
) *Mirror[T] {
	return &Mirror[T]{
		name:              name,
		key:               key,
		open:              open,
		clock:             c.options.Clock,
		logger:            c.options.Logger.WithValues("mirror", name),
		heartbeatInterval: c.options.HeartbeatInterval,
		backoff:           wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 5 * time.Second},
		synced:            make(chan struct{}),
		closed:            c.closed,
		view:              map[string]T{},
		indexed:           map[string]map[string]T{},
		subscriptions:     map[*Subscription]struct{}{},
		stateWatchers:     map[chan struct{}]struct{}{},
	}
}

// Run keeps the view current until ctx is done or the client is closed, and then returns nil. Whatever
// ends a stream, it reconnects with backoff. It must only be called once.
func (m *Mirror[T]) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-m.closed:
			cancel()
		case <-ctx.Done():
		}
	}()
	m.mu.Lock()
	m.state.Since = m.clock.Now()
	m.mu.Unlock()
	backoff := m.backoff
	for {
		reachedSynced, err := m.follow(ctx)
		m.disconnected(err)
		if ctx.Err() != nil {
			return nil // The stream's error is that it was told to end.
		}
		if reachedSynced {
			backoff = m.backoff
		}
		delay := backoff.Step()
		if asked, ok := agenterrors.RetryDelay(err); ok {
			delay = max(delay, asked)
		}
		m.logger.V(1).Info("stream ended, connecting again", "error", err.Error(), "delay", delay.String())
		timer := m.clock.NewTimer(delay)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		}
	}
}

// follow applies one stream until it ends. It returns why the stream ended, and whether a snapshot
// was completed.
func (m *Mirror[T]) follow(ctx context.Context) (reachedSynced bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var watchdog sync.WaitGroup
	watchdog.Go(func() { m.watchSilence(ctx, cancel) })
	defer func() {
		cancel(nil)
		watchdog.Wait()
	}()

	receive, err := m.open(ctx)
	if err != nil {
		return false, because(ctx, err)
	}
	snapshot := map[string]T{} // nil once it is complete
	for {
		e, err := receive()
		if err != nil {
			return reachedSynced, because(ctx, err)
		}
		switch e.kind {
		case upsert:
			if snapshot != nil {
				snapshot[m.key(e.object)] = e.object
				m.heard()
			} else {
				m.put(m.key(e.object), e.object)
			}
		case removed:
			if snapshot != nil {
				delete(snapshot, e.key)
				m.heard()
			} else {
				m.remove(e.key)
			}
		case synced:
			if snapshot != nil {
				m.replace(snapshot)
				snapshot, reachedSynced = nil, true
			} else {
				m.heard()
			}
		case resync:
			m.logger.V(1).Info("the agent dropped changes and starts over", "reason", e.reason)
			snapshot = map[string]T{}
			m.heard()
		case heartbeat, unknown:
			m.heard()
		}
	}
}

// because returns the reason for cutting the stream instead of the resulting cancellation.
func because(ctx context.Context, err error) error {
	if errors.Is(err, io.EOF) {
		return errEnded
	}
	if cause := context.Cause(ctx); cause != nil && errors.Is(cause, errSilent) {
		return cause
	}
	return err
}

// watchSilence cancels the stream when nothing has been received for too long.
func (m *Mirror[T]) watchSilence(ctx context.Context, cancel context.CancelCauseFunc) {
	limit := missedHeartbeats * m.heartbeatInterval
	opened := m.clock.Now()
	for {
		last := m.State().LastEvent
		if last.Before(opened) {
			last = opened
		}
		silent := m.clock.Since(last)
		if silent >= limit {
			cancel(errSilent)
			return
		}
		timer := m.clock.NewTimer(limit - silent)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

func (m *Mirror[T]) heard() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.LastEvent = m.clock.Now()
}

func (m *Mirror[T]) put(key string, object T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.LastEvent = m.clock.Now()
	old, ok := m.view[key]
	if ok && proto.Equal(old, object) {
		return
	}
	if ok {
		m.unindex(key, old)
	}
	m.view[key] = object
	addToIndex(m.indexed, m.idOf(object), key, object)
	m.changed(key)
}

func (m *Mirror[T]) remove(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.LastEvent = m.clock.Now()
	old, ok := m.view[key]
	if !ok {
		return
	}
	m.unindex(key, old)
	delete(m.view, key)
	m.changed(key)
}

func (m *Mirror[T]) idOf(object T) string {
	if m.providerID == nil {
		return ""
	}
	return m.providerID(object)
}

func addToIndex[T any](index map[string]map[string]T, id, key string, object T) {
	if id == "" {
		return
	}
	if index[id] == nil {
		index[id] = map[string]T{}
	}
	index[id][key] = object
}

// unindex must be called with m.mu held.
func (m *Mirror[T]) unindex(key string, object T) {
	id := m.idOf(object)
	delete(m.indexed[id], key)
	if len(m.indexed[id]) == 0 {
		delete(m.indexed, id)
	}
}

// replace makes a complete snapshot the view.
func (m *Mirror[T]) replace(snapshot map[string]T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var keys []string
	indexed := map[string]map[string]T{}
	for key, object := range snapshot {
		addToIndex(indexed, m.idOf(object), key, object)
		if old, ok := m.view[key]; !ok || !proto.Equal(old, object) {
			keys = append(keys, key)
		}
	}
	for key := range m.view {
		if _, ok := snapshot[key]; !ok {
			keys = append(keys, key)
		}
	}
	now := m.clock.Now()
	m.view, m.indexed = snapshot, indexed
	m.state.LastEvent = now
	if !m.state.Connected {
		m.state.Connected, m.state.Since = true, now
		m.stateChanged()
	}
	if !m.state.Synced {
		m.state.Synced = true
		close(m.synced)
	}
	if len(keys) > 0 {
		m.changed(keys...)
	}
}

// changed must be called with m.mu held.
func (m *Mirror[T]) changed(keys ...string) {
	m.sorted = nil
	m.generation++
	for s := range m.subscriptions {
		s.add(keys)
	}
}

func (m *Mirror[T]) disconnected(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.LastError = err
	if m.state.Connected {
		m.state.Connected, m.state.Since = false, m.clock.Now()
	}
	m.stateChanged()
}

// stateChanged must be called with m.mu held.
func (m *Mirror[T]) stateChanged() {
	for watcher := range m.stateWatchers {
		select {
		case watcher <- struct{}{}:
		default: // the watcher has not received the previous change yet
		}
	}
}

// Get returns the object with the key, and false if the view has none. The keys are node group IDs,
// claim IDs and Machine names.
func (m *Mirror[T]) Get(key string) (T, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	object, ok := m.view[key]
	return object, ok
}

// WithProviderID returns the objects of the view with the machine's provider ID, in no particular
// order. Claims are included if they have, or had, such a machine. There are none for the empty ID,
// and none in a mirror of node groups.
func (m *Mirror[T]) WithProviderID(id string) []T {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Collect(maps.Values(m.indexed[id]))
}

// List returns all objects of the view, sorted by key, and the view's generation. Neither the slice
// nor the objects may be modified.
func (m *Mirror[T]) List() ([]T, uint64) {
	m.mu.RLock()
	sorted, generation := m.sorted, m.generation
	m.mu.RUnlock()
	if sorted != nil {
		return sorted, generation
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sorted == nil {
		m.sorted = make([]T, 0, len(m.view))
		for _, key := range slices.SortedFunc(maps.Keys(m.view), cmp.Compare) {
			m.sorted = append(m.sorted, m.view[key])
		}
	}
	return m.sorted, m.generation
}

// Generation counts the changes of the view. Equal generations mean an equal view. An object that
// is sent again unchanged does not count.
func (m *Mirror[T]) Generation() uint64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.generation
}

// State returns the current state of the view.
func (m *Mirror[T]) State() State {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.state
}

// StateChanges returns a channel that receives a value after Synced, Connected or LastError of
// [Mirror.State] has changed. Several changes may be combined into one value. The channel is never
// closed; stop ends the notifications.
func (m *Mirror[T]) StateChanges() (changes <-chan struct{}, stop func()) {
	watcher := make(chan struct{}, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stateWatchers[watcher] = struct{}{}
	return watcher, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.stateWatchers, watcher)
	}
}

// Synced returns a channel that is closed once the first complete view has been received.
func (m *Mirror[T]) Synced() <-chan struct{} { return m.synced }

// WaitForSync waits for the first complete view. If ctx ends before, it returns the error of ctx
// joined with the mirror's last error.
func (m *Mirror[T]) WaitForSync(ctx context.Context) error {
	select {
	case <-m.synced:
		return nil
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), m.State().LastError)
	}
}

// Subscribe returns a subscription to the keys of changed objects. Objects that are already in the
// view count as changed, so that nothing is missed between a List and a Subscribe.
func (m *Mirror[T]) Subscribe() *Subscription {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &Subscription{signal: make(chan struct{}, 1), keys: map[string]struct{}{}}
	s.stop = func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.subscriptions, s)
	}
	m.subscriptions[s] = struct{}{}
	if len(m.view) > 0 {
		s.add(slices.Collect(maps.Keys(m.view)))
	}
	return s
}

// Subscription collects the keys of objects that were added, changed or removed in a [Mirror]. Each
// key is kept once, however often its object changed. A subscription never blocks the mirror.
type Subscription struct {
	signal chan struct{}
	stop   func()

	mu   sync.Mutex
	keys map[string]struct{}
}

// Changed returns a channel that receives a value when there are keys to take. It is never closed.
func (s *Subscription) Changed() <-chan struct{} { return s.signal }

// Take returns the keys that have changed since the last Take, sorted. The objects are read from
// the mirror; a missing object has been removed.
func (s *Subscription) Take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := slices.Sorted(maps.Keys(s.keys))
	clear(s.keys)
	return keys
}

// Close ends the subscription. Keys that have been collected can still be taken.
func (s *Subscription) Close() { s.stop() }

func (s *Subscription) add(keys []string) {
	s.mu.Lock()
	for _, key := range keys {
		s.keys[key] = struct{}{}
	}
	s.mu.Unlock()
	select {
	case s.signal <- struct{}{}:
	default:
	}
}
