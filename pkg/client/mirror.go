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
	// moves returns a channel that is closed when streams that are opened from now on should move
	// to another connection. It may be nil.
	moves func() <-chan struct{}

	mu            sync.RWMutex
	view          map[string]T
	indexed       map[string]map[string]T // view, by provider ID and key
	sorted        []T                     // view, sorted by key; nil if it must be sorted again
	generation    uint64
	state         State
	subscriptions map[*Subscription]struct{}
	stateWatchers map[chan struct{}]struct{}
	shown         *following // the stream that the view is of

	begun int // the number of streams so far, which only Run changes
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
		moves:             c.moves,
		view:              map[string]T{},
		indexed:           map[string]map[string]T{},
		subscriptions:     map[*Subscription]struct{}{},
		stateWatchers:     map[chan struct{}]struct{}{},
	}
}

// Run keeps the view current until ctx is done or the client is closed, and then returns nil.
// Whatever ends a stream, it reconnects with backoff. It must only be called once.
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
		if !m.sleep(ctx, delay, nil) {
			return nil
		}
	}
}

// sleep waits for the delay, and reports whether it has passed before ctx or the other channel
// ended.
func (m *Mirror[T]) sleep(ctx context.Context, delay time.Duration, ended <-chan struct{}) bool {
	timer := m.clock.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-ended:
	case <-ctx.Done():
	}
	return false
}

// follow applies streams until none is left. It returns why the last one ended, and whether it
// completed a snapshot. When a stream should move to another connection, the next one is opened
// before it is left, and takes over once its snapshot is complete, so that the view has no gap.
func (m *Mirror[T]) follow(ctx context.Context) (reachedSynced bool, err error) {
	current := m.begin(ctx)
	defer func() { current.leave() }() // the one that is left
	for {
		select {
		case <-current.ended:
			return current.isSynced(), current.err
		case <-current.moves:
		}
		// Those of many clients may have to move at once. And a connection that is lost looks like
		// one that is to be left, until its streams end.
		if !m.sleep(ctx, wait.Jitter(m.backoff.Duration, m.backoff.Jitter), current.ended) {
			<-current.ended
			return current.isSynced(), current.err
		}
		next := m.begin(ctx)
		select {
		case <-next.synced:
		case <-current.ended:
			m.disconnectedUntil(next, current.err)
		case <-next.ended:
			if next.isSynced() {
				break // it has taken over already
			}
			m.logger.V(1).Info("the stream on another connection ended before it was complete; trying again", "error", next.err.Error())
			next.leave()
			delay := m.backoff.Cap
			if asked, ok := agenterrors.RetryDelay(next.err); ok {
				delay = max(delay, asked)
			}
			m.sleep(ctx, delay, current.ended)
			continue
		}
		current.leave()
		current = next
	}
}

// following is an open stream.
type following struct {
	// moves is closed when the stream should be left for another one. It may be nil.
	moves <-chan struct{}
	// synced is closed once the view is that of the stream, and ended when the stream has ended,
	// with err as the reason.
	synced, ended chan struct{}
	err           error
	cancel        context.CancelCauseFunc
	// number orders the streams of a mirror: a later one takes over from an earlier one.
	number int
	// last is when something was received last.
	last time.Time
}

// isSynced reports whether the stream has completed a snapshot.
func (f *following) isSynced() bool {
	select {
	case <-f.synced:
		return true
	default:
		return false
	}
}

// leave ends the stream, and waits for that.
func (f *following) leave() {
	f.cancel(nil)
	<-f.ended
}

// begin opens a stream, and applies it until it ends.
func (m *Mirror[T]) begin(ctx context.Context) *following {
	ctx, cancel := context.WithCancelCause(ctx)
	m.begun++
	f := &following{synced: make(chan struct{}), ended: make(chan struct{}), cancel: cancel, number: m.begun, last: m.clock.Now()}
	if m.moves != nil {
		f.moves = m.moves()
	}
	go func() {
		defer close(f.ended)
		var watchdog sync.WaitGroup
		watchdog.Go(func() { m.watchSilence(ctx, f) })
		defer func() {
			cancel(nil)
			watchdog.Wait()
		}()
		f.err = because(ctx, m.apply(ctx, f))
	}()
	return f
}

// apply applies a stream until it ends, and returns why.
func (m *Mirror[T]) apply(ctx context.Context, f *following) error {
	receive, err := m.open(ctx)
	if err != nil {
		return err
	}
	snapshot := map[string]T{} // nil once it is complete
	for {
		e, err := receive()
		if err != nil {
			return err
		}
		switch e.kind {
		case upsert:
			if snapshot != nil {
				snapshot[m.key(e.object)] = e.object
				m.heard(f)
			} else {
				m.put(f, m.key(e.object), e.object)
			}
		case removed:
			if snapshot != nil {
				delete(snapshot, e.key)
				m.heard(f)
			} else {
				m.remove(f, e.key)
			}
		case synced:
			if snapshot != nil {
				m.replace(f, snapshot)
				snapshot = nil
			} else {
				m.heard(f)
			}
		case resync:
			m.logger.V(1).Info("the agent dropped changes and starts over", "reason", e.reason)
			snapshot = map[string]T{}
			m.heard(f)
		case heartbeat, unknown:
			m.heard(f)
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
func (m *Mirror[T]) watchSilence(ctx context.Context, f *following) {
	limit := missedHeartbeats * m.heartbeatInterval
	for {
		m.mu.RLock()
		last := f.last
		m.mu.RUnlock()
		silent := m.clock.Since(last)
		if silent >= limit {
			f.cancel(errSilent)
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

func (m *Mirror[T]) heard(f *following) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.note(f)
}

// note records that something was received, and reports whether the view is that of the stream.
// m.mu must be held.
func (m *Mirror[T]) note(f *following) (shown bool) {
	f.last = m.clock.Now()
	m.state.LastEvent = f.last
	return m.shown == f
}

func (m *Mirror[T]) put(f *following, key string, object T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.note(f) {
		return // another stream has taken over
	}
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

func (m *Mirror[T]) remove(f *following, key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.note(f) {
		return
	}
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

// replace makes a complete snapshot the view, unless another stream has taken over meanwhile.
func (m *Mirror[T]) replace(f *following, snapshot map[string]T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.note(f)
	if m.shown != nil && m.shown.number > f.number {
		return
	}
	if !f.isSynced() {
		m.shown = f
		close(f.synced)
	}
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
	m.view, m.indexed = snapshot, indexed
	if !m.state.Connected {
		m.state.Connected, m.state.Since = true, f.last
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

func (m *Mirror[T]) disconnected(err error) { m.disconnectedUntil(nil, err) }

// disconnectedUntil records that the view is not current any more, unless it is the next stream's
// already.
func (m *Mirror[T]) disconnectedUntil(next *following, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if next != nil && m.shown == next {
		return
	}
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
