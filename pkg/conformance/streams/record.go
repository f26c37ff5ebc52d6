// Package streams judges what watchers are told: the events of the agent's watch streams, and the lists that the same agent answers beside
// them. It holds an agent to what the API promises:
//
//   - Ordered: an object never goes back to what it was before, and a key that is never used again does not come back.
//   - Complete: what a stream has shown is what a list shows that is asked for later, or the stream says the difference soon. The marker
//     SYNCED comes once for each snapshot, and node groups that are listed at its generation are those of the snapshot.
//   - Without a gap: what vanished while no stream was open, or before a RESYNC, is not in the next snapshot, or is removed soon after it.
//   - The watcher's own: no object of another Cluster or holder.
//
// A [Record] takes the events and judges them; a [Watcher] has one record what an agent sends, through whatever ends its streams. Several records
// watch several agents: what one agent shows may be behind what another one does.
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

// Kind says what an [Event] is.
type Kind int

// The kinds of events.
const (
	Upsert Kind = iota + 1
	Removed
	Synced
	Heartbeat
	Resync
)

// Event is one message of a stream.
type Event[T proto.Message] struct {
	Kind Kind
	// Object of an Upsert.
	Object T
	// Key of a Removed.
	Key string
	// Generation of a Synced.
	Generation int64
}

// Rules are what a kind of objects is held to. Node groups, claims and machines have theirs in this package.
type Rules[T proto.Message] struct {
	// Name of the stream, for people.
	Name string
	// Key of an object; not empty.
	Key func(T) string
	// Foreign says why an object is not the watcher's, "" when it is.
	Foreign func(T) string
	// Backward says why an object cannot be what it was before, "" when it can.
	Backward func(before, after T) string
	// Told returns what streams tell of a listed object. Nil means all of it.
	Told func(T) T
	// Again says why an object with a key that was removed before cannot be, "" when it can. Nil means that any can.
	Again func(T) string
	// Generations means that lists carry the generation that they were taken at, as the marker does.
	Generations bool
}

// Options of a [Record].
type Options struct {
	// Patience is how long a stream that is open may take to tell what a list has shown already. REQUIRED, positive: longer than an
	// agent's view of the hub may be behind.
	Patience time.Duration
	// ListEvery is how often [Watcher.Follow] compares a list with a stream that is open. Zero means two seconds.
	ListEvery time.Duration
	// Clock is the time. Nil means the real one.
	Clock clock.PassiveClock
}

// Figures count what was recorded.
type Figures struct {
	// Streams that were opened, Snapshots that were completed, Resyncs, and Events of objects.
	Streams, Snapshots, Resyncs, Events int
	// Lists that were compared with what the streams had shown.
	Lists int
}

// Add adds others to these.
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

// Record is what one watcher of one agent was told. It is safe for concurrent use.
type Record[T proto.Message] struct {
	rules   Rules[T]
	options Options
	who     string

	mu      sync.Mutex
	figures Figures
	wrong   []string
	last    map[string]T        // as it was told last, on whichever stream
	gone    map[string]struct{} // keys that were removed; only with Again
	excused map[string]struct{}

	// Of the present stream.
	open       int // counts streams; what belongs to an earlier one is not judged any more
	shown      map[string]T
	synced     bool
	generation int64 // of the last marker
	asSynced   map[string]T
	owed       map[string]debt
}

// debt is a difference between a list and the stream that the stream has not told yet.
type debt struct {
	since time.Time
	what  string
}

// New returns a record without events. who is the watcher, for people.
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

// Open records that a stream begins, and that the one before it is over.
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

// Ended records that the stream is over. What it has not told yet is not held against it.
func (r *Record[T]) Ended() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open++
	r.startOver()
}

// Excuse allows an object to be what it cannot be otherwise, as its state was lost.
func (r *Record[T]) Excuse(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.excused[key] = struct{}{}
}

// Event records an event of the stream that is open.
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

// marker ends a snapshot: what was known and is not in it has vanished.
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

// List records that a list of the same objects is asked for from the same agent. The function that it returns records the answer, and
// is called at most once; the generation is 0 where lists carry none.
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
			return // the stream is over, or tells all of it again
		}
		r.figures.Lists++
		listed := r.byKey(objects)
		if r.rules.Generations && generation == r.generation && r.asSynced != nil {
			for _, difference := range differences(r.asSynced, listed) {
				r.blame("at generation %d the snapshot differs from a list: %s", generation, difference.what)
			}
		}
		for _, difference := range differences(r.shown, listed) {
			// What the stream told while the list was under way may be newer than the list.
			was, then := before[difference.key]
			is, now := r.shown[difference.key]
			if then != now || now && !proto.Equal(was, is) {
				continue
			}
			if _, already := r.owed[difference.key]; !already {
				r.owed[difference.key] = debt{since: r.options.Clock.Now(), what: difference.what}
			}
		}
		// What a later list agrees with is settled.
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

// claimDebts blames the stream for what it has owed for too long.
func (r *Record[T]) claimDebts() {
	for key, owed := range r.owed {
		if r.options.Clock.Since(owed.since) > r.options.Patience {
			r.blame("the stream has not told in %s what a list showed: %s", r.options.Patience, owed.what)
			delete(r.owed, key)
		}
	}
}

// Differences returns how the present stream differs from a list that was asked for while nothing changed; nil when it does not.
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

// blame notes something wrong.
func (r *Record[T]) blame(format string, args ...any) {
	r.wrong = append(r.wrong, fmt.Sprintf("%s watches %s: %s", r.who, r.rules.Name, fmt.Sprintf(format, args...)))
}

// Check returns what was recorded, and what was wrong with it, oldest first.
func (r *Record[T]) Check() (Figures, []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claimDebts()
	return r.figures, slices.Clone(r.wrong)
}

type difference struct{ key, what string }

// differences are those of what a stream has shown from what a list shows, by key.
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

// Summary joins what is wrong, the first few of it.
func Summary(wrong []string) string {
	const most = 5
	text := strings.Join(wrong[:min(most, len(wrong))], "; ")
	if len(wrong) > most {
		text += fmt.Sprintf("; and %d more", len(wrong)-most)
	}
	return text
}
