package watchcache_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
)

var (
	spoke = types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	other = types.NamespacedName{Namespace: "fleet", Name: "other"}
)

func newCache(buffer int) *watchcache.Cache[int] {
	return watchcache.New(watchcache.Options[int]{
		Equal: func(a, b int) bool { return a == b }, Buffer: buffer, Heartbeat: time.Hour,
	})
}

func next(t require.TestingT, s *watchcache.Subscription[int]) watchcache.Event[int] {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	event, err := s.Next(ctx)
	require.NoError(t, err)
	return event
}

func receive[T any](t *testing.T, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(20 * time.Second):
		require.Fail(t, "nothing was sent")
	}
	return value
}

func TestNothingIsAnsweredBeforeTheViewIsComplete(t *testing.T) {
	f := newCache(10)
	f.Set(spoke, "a", 1)
	_, _, err := f.List(spoke)
	require.ErrorIs(t, err, watchcache.ErrNotReady)
	_, _, err = f.Get(spoke, "a")
	require.ErrorIs(t, err, watchcache.ErrNotReady)
	_, err = f.Subscribe(spoke, nil)
	require.ErrorIs(t, err, watchcache.ErrNotReady)
}

func TestSubscriberGetsSnapshotThenMarkerThenChanges(t *testing.T) {
	f := newCache(10)
	f.Set(spoke, "b", 2)
	f.Set(spoke, "a", 1)
	f.Set(other, "c", 3)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	require.NoError(t, err)
	defer s.Close()
	f.Set(spoke, "a", 4) // between snapshot and reading
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "a", Object: 1}, next(t, s))
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "b", Object: 2}, next(t, s))
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Synced, Generation: 2}, next(t, s))
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "a", Object: 4}, next(t, s))
	f.Remove(spoke, "b")
	f.Set(other, "c", 5)
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Removed, Key: "b"}, next(t, s))
}

func TestEqualObjectIsNoChange(t *testing.T) {
	f := newCache(10)
	require.True(t, f.Set(spoke, "a", 1))
	generation := f.Generation()
	require.False(t, f.Set(spoke, "a", 1))
	require.False(t, f.Remove(spoke, "b"))
	require.Equal(t, generation, f.Generation())
}

// A Cluster's generation does not reveal how often other Clusters change.
func TestGenerationsAreOfOneCluster(t *testing.T) {
	f := newCache(10)
	f.SetReady()
	f.Set(spoke, "a", 1)
	of := func(cluster types.NamespacedName) int64 {
		_, generation, err := f.List(cluster)
		require.NoError(t, err)
		require.Equal(t, generation, f.GenerationOf(func(c types.NamespacedName) bool { return c == cluster }))
		return generation
	}
	require.EqualValues(t, 1, of(spoke))
	f.Set(other, "a", 1)
	f.Set(other, "a", 2)
	require.EqualValues(t, 1, of(spoke))
	require.EqualValues(t, 2, of(other))
	f.Remove(other, "a")
	require.EqualValues(t, 3, of(other), "it does not start again when nothing is left")
	require.EqualValues(t, 4, f.Generation())
}

func TestSeveralChangesOfOneObjectBecomeOneEvent(t *testing.T) {
	f := newCache(1)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, watchcache.Synced, next(t, s).Kind)
	for i := range 100 {
		f.Set(spoke, "a", i)
	}
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "a", Object: 99}, next(t, s))
	f.Set(spoke, "a", 100)
	f.Remove(spoke, "a")
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Removed, Key: "a"}, next(t, s))
}

func TestSlowSubscriberIsResyncedOnTheSameSubscription(t *testing.T) {
	f := newCache(2)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, watchcache.Synced, next(t, s).Kind)
	for i := range 5 {
		f.Set(spoke, strconv.Itoa(i), i)
	}
	require.Equal(t, watchcache.Resync, next(t, s).Kind)
	for i := range 5 {
		require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: strconv.Itoa(i), Object: i}, next(t, s))
	}
	require.Equal(t, watchcache.Synced, next(t, s).Kind)
	require.EqualValues(t, 1, f.Stats().Resyncs)
}

func TestQuietSubscriberGetsHeartbeats(t *testing.T) {
	fake := clocktesting.NewFakeClock(time.Unix(1000, 0))
	f := watchcache.New(watchcache.Options[int]{Equal: func(a, b int) bool { return a == b }, Buffer: 1, Heartbeat: time.Minute, Clock: fake})
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, watchcache.Synced, next(t, s).Kind)
	events := make(chan watchcache.Event[int])
	go func() {
		event, err := s.Next(t.Context())
		assert.NoError(t, err)
		events <- event
	}()
	require.Eventually(t, fake.HasWaiters, 20*time.Second, 10*time.Millisecond)
	fake.Step(time.Minute)
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Heartbeat, Time: time.Unix(1060, 0)}, receive(t, events))
}

func TestSubscriberGetsOnlyWhatItWants(t *testing.T) {
	f := newCache(10)
	f.Set(spoke, "a", 1)
	f.Set(spoke, "b", 2)
	f.SetReady()
	even := func(i int) bool { return i%2 == 0 }
	s, err := f.Subscribe(spoke, even)
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "b", Object: 2}, next(t, s))
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Synced, Generation: 2}, next(t, s))
	f.Remove(spoke, "a") // never shown
	f.Set(spoke, "c", 3)
	f.Set(spoke, "b", 5) // no longer wanted
	f.Set(spoke, "d", 4)
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Removed, Key: "b"}, next(t, s))
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "d", Object: 4}, next(t, s))
	f.Remove(spoke, "b") // shown once, but already removed for the subscriber
	f.Set(spoke, "c", 6)
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Upsert, Key: "c", Object: 6}, next(t, s))
}

func TestUnwantedChangesDoNotDelayTheHeartbeat(t *testing.T) {
	fake := clocktesting.NewFakeClock(time.Unix(1000, 0))
	f := watchcache.New(watchcache.Options[int]{Equal: func(a, b int) bool { return a == b }, Buffer: 1, Heartbeat: time.Minute, Clock: fake})
	f.SetReady()
	looked := make(chan int)
	s, err := f.Subscribe(spoke, func(i int) bool { looked <- i; return false })
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, watchcache.Synced, next(t, s).Kind)
	events := make(chan watchcache.Event[int], 1)
	go func() {
		event, err := s.Next(t.Context())
		assert.NoError(t, err)
		events <- event
	}()
	require.Eventually(t, fake.HasWaiters, 20*time.Second, 10*time.Millisecond)
	for i := range 5 {
		fake.Step(10 * time.Second)
		f.Set(spoke, "foreign", i)
		require.Equal(t, i, receive(t, looked))
	}
	require.Empty(t, events)
	fake.Step(10 * time.Second)
	require.Equal(t, watchcache.Event[int]{Kind: watchcache.Heartbeat, Time: time.Unix(1060, 0)}, receive(t, events))
}

func TestCloseEndsSubscriptions(t *testing.T) {
	f := newCache(1)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	require.NoError(t, err)
	require.Equal(t, watchcache.Synced, next(t, s).Kind)
	ended := make(chan error)
	go func() {
		_, err := s.Next(context.Background())
		ended <- err
	}()
	f.Close()
	require.ErrorIs(t, receive(t, ended), watchcache.ErrClosed)
	_, err = f.Subscribe(spoke, nil)
	require.ErrorIs(t, err, watchcache.ErrClosed)
	s.Close()
	s.Close()
	require.Zero(t, f.Stats().Subscribers)
}

// Readers that follow the protocol end up with the writers' view, whatever their speed and buffer.
func TestEveryReaderEndsWithTheWritersView(t *testing.T) {
	f := newCache(4)
	f.SetReady()
	var readers sync.WaitGroup
	views := make([]map[string]int, 8)
	for i := range views {
		s, err := f.Subscribe(spoke, nil)
		require.NoError(t, err)
		readers.Go(func() {
			defer s.Close()
			view, building := map[string]int{}, map[string]int{}
			target := building
			for target["end"] != 1 || building != nil {
				switch event := next(t, s); event.Kind {
				case watchcache.Upsert:
					target[event.Key] = event.Object
				case watchcache.Removed:
					delete(target, event.Key)
				case watchcache.Resync:
					building = map[string]int{}
					target = building
				case watchcache.Synced:
					view, building = building, nil
					target = view
				case watchcache.Heartbeat:
				}
			}
			views[i] = view
		})
	}
	want := map[string]int{}
	for i := range 5000 {
		key := strconv.Itoa(rand.IntN(20))
		if rand.IntN(3) == 0 {
			f.Remove(spoke, key)
			delete(want, key)
		} else {
			f.Set(spoke, key, i)
			want[key] = i
		}
	}
	want["end"] = 1
	f.Set(spoke, "end", 1)
	readers.Wait()
	for _, view := range views {
		require.Equal(t, want, view)
	}
}

// docs/limits.md derives from this how much the watches of one identity occupy.
func TestWhatAWatchOccupiesIsKnown(t *testing.T) {
	const keys, watches, kibibyte = 10000, 20, 1 << 10
	f := newCache(1)
	for i := range keys {
		f.Set(spoke, "fleet/workers-"+strconv.Itoa(i), i)
	}
	f.SetReady()
	live := func() int {
		var memory runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&memory)
		return int(memory.HeapAlloc)
	}
	begun := live()
	subscriptions := make([]*watchcache.Subscription[int], watches)
	for i := range subscriptions {
		s, err := f.Subscribe(spoke, nil)
		require.NoError(t, err)
		defer s.Close()
		subscriptions[i] = s
	}
	most := 0
	for read := range keys + 1 {
		for _, s := range subscriptions {
			kind := next(t, s).Kind
			require.True(t, kind == watchcache.Upsert || kind == watchcache.Synced && read == keys)
		}
		if read%(keys/10) == keys/10-1 || read == keys {
			most = max(most, (live()-begun)/watches)
		}
	}
	t.Logf("a watch of %d objects occupies at most %d KiB", keys, most/kibibyte)
	require.Less(t, most, keys*60, "50 bytes for each object, and what the runtime adds")
}
