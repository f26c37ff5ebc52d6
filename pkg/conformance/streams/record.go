// Package streams verifies what watchers receive: the events of the agent's watch streams, and the
// lists that the same agent returns meanwhile. It checks what the API promises:
//
//   - Ordered: an object never returns to an earlier state, and a key that is never reused does not
//     come back.
//   - Complete: a stream shows what a later list shows, or sends the difference soon. The marker SYNCED
//     comes once for each snapshot. Node groups listed at the generation of the marker are those of
//     the snapshot.
//   - Without gaps: what vanished while no stream was open, or before a RESYNC, is missing in the next
//     snapshot, or is removed soon after it.
//   - Isolated: there is no object of another Cluster or holder.
//
// A [Record] receives the events and verifies them. A [Watcher] feeds a record with what an agent
// sends, and opens a new stream whenever one ends. Several agents need several records: one agent's
// view may be behind another's.
package streams

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"
)

// Kind is the kind of an [Event].
type Kind int

// These are the kinds of events.
const (
	Upsert Kind = iota + 1
	Removed
	Synced
	Heartbeat
	Resync
)

// Event is a message of a stream.
type Event[T proto.Message] struct {
	Kind Kind
	// Object is the object of an Upsert.
	Object T
	// Key is the key of a Removed.
	Key string
	// Generation is the generation of a Synced.
	Generation int64
}

// Rules are the rules for one kind of object. This package has those of node groups, claims and
// machines.
type Rules[T proto.Message] struct {
	// Name is the name of the stream, for messages.
	Name string
	// Key returns the key of an object. It must not be empty.
	Key func(T) string
	// Foreign returns why the watcher should not receive an object, or "" if it should.
	Foreign func(T) string
	// Backward returns why an object cannot follow its earlier state, or "" if it can.
	Backward func(before, after T) string
	// Told returns a listed object as streams show it. Nil means unchanged.
	Told func(T) T
	// Again returns why an object cannot have a key that was removed before, or "" if it can. Nil
	// means that any object can.
	Again func(T) string
	// Generations means that lists carry the generation at which they were taken, like the marker.
	Generations bool
}

// Options configure a [Record].
type Options struct {
	// Patience is how long an open stream may take to send what a list has already shown. REQUIRED,
	// positive: it must be longer than an agent's view of the hub may be behind.
	Patience time.Duration
	// ListEvery is how often [Watcher.Follow] compares a list with an open stream. Zero means two
	// seconds.
	ListEvery time.Duration
	// Clock provides the time. Nil means the system clock.
	Clock clock.PassiveClock
}

// Figures count what was recorded.
type Figures struct {
	// Streams that were opened, Snapshots that were completed, Resyncs, and Events of objects.
	Streams, Snapshots, Resyncs, Events int
	// Lists is how many lists were compared with a stream.
	Lists int
}

// Add adds other figures.
func (f *Figures) Add(o Figures) {
	f.Streams += o.Streams
	f.Snapshots += o.Snapshots
	f.Resyncs += o.Resyncs
	f.Events += o.Events
	f.Lists += o.Lists
}

func (f *Figures) String() string {
	return fmt.Sprintf("%d streams, %d snapshots, %d resyncs, %d events, %d lists", f.Streams, f.Snapshots, f.Resyncs, f.Events, f.Lists)
}

// Record is what one watcher has received from one agent. It is safe for concurrent use.
type Record[T proto.Message] struct {
	rules   Rules[T]
	options Options
	who     string

	mu      sync.Mutex
	figures Figures
	wrong   []string
	last    map[string]T        // last state received, on whichever stream
	gone    map[string]struct{} // removed keys; only with Again
	excused map[string]struct{}

	// The following fields belong to the current stream.
	open       int
	shown      map[string]T
	synced     bool
	generation int64 // of the last marker
	asSynced   map[string]T
	owed       map[string]debt
}

// debt is a difference between a list and the stream, which the stream has not sent yet.
type debt struct {
	since time.Time
	what  string
}

// New returns an empty record. who is the name of the watcher, for messages.
func New[T proto.Message](who string, rules Rules[T], o Options) *Record[T] {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.ListEvery == 0 {
		o.ListEvery = 2 * time.Second
	}
	return &Record[T]{
		rules: rules, options: o, who: who,
		last: map[string]T{}, gone: map[string]struct{}{}, excused: map[string]struct{}{},
	}
}

// Open records that a stream begins. The previous stream is over.
func (r *Record[T]) Open() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.figures.Streams++
	r.open++
	r.generation = 0
	r.startOver()
}

func (r *Record[T]) startOver() {
	r.shown, r.synced, r.asSynced, r.owed = map[string]T{}, false, nil, map[string]debt{}
}

// Ended records that the stream is over. What it has not sent yet is no violation.
func (r *Record[T]) Ended() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open++
	r.startOver()
}

// Excuse exempts an object from the rules about its history, because its state was lost.
func (r *Record[T]) Excuse(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.excused[key] = struct{}{}
}

// Event records an event of the open stream.
func (r *Record[T]) Event(e Event[T]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e.Kind {
	case Upsert:
		r.upsert(e.Object)
	case Removed:
		r.removed(e.Key)
	case Synced:
		r.marker(e.Generation)
	case Resync:
		r.figures.Resyncs++
		r.startOver()
	case Heartbeat:
	}
	r.claimDebts()
}

func (r *Record[T]) upsert(object T) {
	r.figures.Events++
	key := r.rules.Key(object)
	if key == "" {
		r.blame("an object without a key: %v", object)
		return
	}
	if why := r.rules.Foreign(object); why != "" {
		r.blame("%s is not this watcher's: %s", key, why)
	}
	_, excused := r.excused[key]
	if before, known := r.last[key]; known && !excused {
		if why := r.rules.Backward(before, object); why != "" {
			r.blame("%s goes back: %s", key, why)
		}
	}
	if _, was := r.gone[key]; was && !excused {
		if why := r.rules.Again(object); why != "" {
			r.blame("%s comes back after it was removed: %s", key, why)
		}
		delete(r.gone, key)
	}
	r.last[key], r.shown[key] = object, object
	delete(r.owed, key)
}

func (r *Record[T]) removed(key string) {
	r.figures.Events++
	if _, shown := r.shown[key]; !shown {
		r.blame("%s is removed, and the stream never showed it", key)
	}
	delete(r.shown, key)
	r.forget(key)
	delete(r.owed, key)
}

func (r *Record[T]) forget(key string) {
	delete(r.last, key)
	if r.rules.Again != nil {
		r.gone[key] = struct{}{}
	}
}

// marker ends a snapshot. Known objects that are missing in it have vanished.
func (r *Record[T]) marker(generation int64) {
	if r.synced {
		r.blame("SYNCED comes twice for one snapshot")
	}
	if generation < r.generation {
		r.blame("SYNCED goes back from generation %d to %d", r.generation, generation)
	}
	r.figures.Snapshots++
	r.synced, r.generation, r.asSynced = true, generation, maps.Clone(r.shown)
	for key := range r.last {
		if _, shown := r.shown[key]; !shown {
			r.forget(key)
		}
	}
}

// List records that a list of the same objects is requested from the same agent. The returned
// function records the response, and must be called at most once. The generation is 0 if lists
// carry none.
func (r *Record[T]) List() func(objects []T, generation int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	stream, before := r.open, maps.Clone(r.shown)
	if !r.synced {
		return func([]T, int64) {}
	}
	return func(objects []T, generation int64) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.open != stream || !r.synced {
			return // the stream is over, or starts over
		}
		r.figures.Lists++
		listed := r.byKey(objects)
		if r.rules.Generations && generation == r.generation && r.asSynced != nil {
			for _, difference := range differences(r.asSynced, listed) {
				r.blame("at generation %d the snapshot differs from a list: %s", generation, difference.what)
			}
		}
		for _, difference := range differences(r.shown, listed) {
			// What the stream sent while the list was in flight may be newer than the list.
			was, then := before[difference.key]
			is, now := r.shown[difference.key]
			if then != now || now && !proto.Equal(was, is) {
				continue
			}
			if _, already := r.owed[difference.key]; !already {
				r.owed[difference.key] = debt{since: r.options.Clock.Now(), what: difference.what}
			}
		}
		// A debt is settled once a later list agrees with the stream.
		for key := range r.owed {
			if same(r.shown, listed, key) {
				delete(r.owed, key)
			}
		}
	}
}

func (r *Record[T]) byKey(objects []T) map[string]T {
	listed := make(map[string]T, len(objects))
	for _, object := range objects {
		if r.rules.Told != nil {
			object = r.rules.Told(object)
		}
		listed[r.rules.Key(object)] = object
	}
	return listed
}

// claimDebts records a violation for every debt that is too old.
func (r *Record[T]) claimDebts() {
	for key, owed := range r.owed {
		if r.options.Clock.Since(owed.since) > r.options.Patience {
			r.blame("the stream has not told in %s what a list showed: %s", r.options.Patience, owed.what)
			delete(r.owed, key)
		}
	}
}

// Differences returns how the current stream differs from a list that was requested while nothing
// changed, or nil if it does not.
func (r *Record[T]) Differences(objects []T) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.synced {
		return []string{"no snapshot is complete"}
	}
	var texts []string
	for _, d := range differences(r.shown, r.byKey(objects)) {
		texts = append(texts, d.what)
	}
	return texts
}

// blame records a violation.
func (r *Record[T]) blame(format string, args ...any) {
	r.wrong = append(r.wrong, fmt.Sprintf("%s watches %s: %s", r.who, r.rules.Name, fmt.Sprintf(format, args...)))
}

// Check returns the figures, and the violations, oldest first.
func (r *Record[T]) Check() (Figures, []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claimDebts()
	return r.figures, slices.Clone(r.wrong)
}

type difference struct{ key, what string }

// differences returns how the objects shown by a stream differ from those of a list, by key.
func differences[T proto.Message](shown, listed map[string]T) []difference {
	var all []difference
	for _, key := range slices.Sorted(maps.Keys(listed)) {
		if _, is := shown[key]; !is {
			all = append(all, difference{key, key + " is missing"})
		} else if !same(shown, listed, key) {
			all = append(all, difference{key, fmt.Sprintf("%s is {%v} and should be {%v}", key, shown[key], listed[key])})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(shown)) {
		if _, is := listed[key]; !is {
			all = append(all, difference{key, key + " is gone"})
		}
	}
	return all
}

func same[T proto.Message](a, b map[string]T, key string) bool {
	x, inA := a[key]
	y, inB := b[key]
	return inA == inB && (!inA || proto.Equal(x, y))
}

// Summary joins the first few violations.
func Summary(wrong []string) string {
	const most = 5
	text := strings.Join(wrong[:min(most, len(wrong))], "; ")
	if len(wrong) > most {
		text += fmt.Sprintf("; and %d more", len(wrong)-most)
	}
	return text
}
