package feed_test

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/feed"
)

var (
	spoke = types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	other = types.NamespacedName{Namespace: "fleet", Name: "other"}
)

func newFeed(buffer int) *feed.Feed[int] {
	return feed.New(feed.Options[int]{
		Equal: func(a, b int) bool { return a == b }, Buffer: buffer, Heartbeat: time.Hour,
	})
}

func next(g Gomega, s *feed.Subscription[int]) feed.Event[int] {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	event, err := s.Next(ctx)
	g.Expect(err).NotTo(HaveOccurred())
	return event
}

func TestNothingIsAnsweredBeforeTheViewIsComplete(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(10)
	f.Set(spoke, "a", 1)
	_, _, err := f.List(spoke)
	g.Expect(err).To(MatchError(feed.ErrNotReady))
	_, _, err = f.Get(spoke, "a")
	g.Expect(err).To(MatchError(feed.ErrNotReady))
	_, err = f.Subscribe(spoke, nil)
	g.Expect(err).To(MatchError(feed.ErrNotReady))
}

func TestSubscriberGetsSnapshotThenMarkerThenChanges(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(10)
	f.Set(spoke, "b", 2)
	f.Set(spoke, "a", 1)
	f.Set(other, "c", 3)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	g.Expect(err).NotTo(HaveOccurred())
	defer s.Close()
	f.Set(spoke, "a", 4) // between snapshot and reading
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "a", Object: 1}))
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "b", Object: 2}))
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Synced, Generation: 2}))
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "a", Object: 4}))
	f.Remove(spoke, "b")
	f.Set(other, "c", 5)
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Removed, Key: "b"}))
}

func TestEqualObjectIsNoChange(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(10)
	g.Expect(f.Set(spoke, "a", 1)).To(BeTrue())
	generation := f.Generation()
	g.Expect(f.Set(spoke, "a", 1)).To(BeFalse())
	g.Expect(f.Remove(spoke, "b")).To(BeFalse())
	g.Expect(f.Generation()).To(Equal(generation))
}

// A Cluster's generation does not reveal how often other Clusters change.
func TestGenerationsAreOfOneCluster(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(10)
	f.SetReady()
	f.Set(spoke, "a", 1)
	of := func(cluster types.NamespacedName) int64 {
		_, generation, err := f.List(cluster)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(f.GenerationOf(func(c types.NamespacedName) bool { return c == cluster })).To(Equal(generation))
		return generation
	}
	g.Expect(of(spoke)).To(BeEquivalentTo(1))
	f.Set(other, "a", 1)
	f.Set(other, "a", 2)
	g.Expect(of(spoke)).To(BeEquivalentTo(1))
	g.Expect(of(other)).To(BeEquivalentTo(2))
	f.Remove(other, "a")
	g.Expect(of(other)).To(BeEquivalentTo(3), "it does not start again when nothing is left")
	g.Expect(f.Generation()).To(BeEquivalentTo(4))
}

func TestSeveralChangesOfOneObjectBecomeOneEvent(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(1)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	g.Expect(err).NotTo(HaveOccurred())
	defer s.Close()
	g.Expect(next(g, s).Kind).To(Equal(feed.Synced))
	for i := range 100 {
		f.Set(spoke, "a", i)
	}
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "a", Object: 99}))
	f.Set(spoke, "a", 100)
	f.Remove(spoke, "a")
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Removed, Key: "a"}))
}

func TestSlowSubscriberIsResyncedOnTheSameSubscription(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(2)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	g.Expect(err).NotTo(HaveOccurred())
	defer s.Close()
	g.Expect(next(g, s).Kind).To(Equal(feed.Synced))
	for i := range 5 {
		f.Set(spoke, strconv.Itoa(i), i)
	}
	g.Expect(next(g, s).Kind).To(Equal(feed.Resync))
	for i := range 5 {
		g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: strconv.Itoa(i), Object: i}))
	}
	g.Expect(next(g, s).Kind).To(Equal(feed.Synced))
	g.Expect(f.Stats().Resyncs).To(BeEquivalentTo(1))
}

func TestQuietSubscriberGetsHeartbeats(t *testing.T) {
	g := NewWithT(t)
	fake := clocktesting.NewFakeClock(time.Unix(1000, 0))
	f := feed.New(feed.Options[int]{Equal: func(a, b int) bool { return a == b }, Buffer: 1, Heartbeat: time.Minute, Clock: fake})
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	g.Expect(err).NotTo(HaveOccurred())
	defer s.Close()
	g.Expect(next(g, s).Kind).To(Equal(feed.Synced))
	events := make(chan feed.Event[int])
	go func() { events <- next(g, s) }()
	g.Eventually(fake.HasWaiters).Should(BeTrue())
	fake.Step(time.Minute)
	g.Eventually(events).Should(Receive(Equal(feed.Event[int]{Kind: feed.Heartbeat, Time: time.Unix(1060, 0)})))
}

func TestSubscriberGetsOnlyWhatItWants(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(10)
	f.Set(spoke, "a", 1)
	f.Set(spoke, "b", 2)
	f.SetReady()
	even := func(i int) bool { return i%2 == 0 }
	s, err := f.Subscribe(spoke, even)
	g.Expect(err).NotTo(HaveOccurred())
	defer s.Close()
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "b", Object: 2}))
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Synced, Generation: 2}))
	f.Remove(spoke, "a") // never shown
	f.Set(spoke, "c", 3)
	f.Set(spoke, "b", 5) // no longer wanted
	f.Set(spoke, "d", 4)
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Removed, Key: "b"}))
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "d", Object: 4}))
	f.Remove(spoke, "b") // shown once, but already removed for the subscriber
	f.Set(spoke, "c", 6)
	g.Expect(next(g, s)).To(Equal(feed.Event[int]{Kind: feed.Upsert, Key: "c", Object: 6}))
}

func TestUnwantedChangesDoNotDelayTheHeartbeat(t *testing.T) {
	g := NewWithT(t)
	fake := clocktesting.NewFakeClock(time.Unix(1000, 0))
	f := feed.New(feed.Options[int]{Equal: func(a, b int) bool { return a == b }, Buffer: 1, Heartbeat: time.Minute, Clock: fake})
	f.SetReady()
	looked := make(chan int)
	s, err := f.Subscribe(spoke, func(i int) bool { looked <- i; return false })
	g.Expect(err).NotTo(HaveOccurred())
	defer s.Close()
	g.Expect(next(g, s).Kind).To(Equal(feed.Synced))
	events := make(chan feed.Event[int], 1)
	go func() { events <- next(g, s) }()
	g.Eventually(fake.HasWaiters).Should(BeTrue())
	for i := range 5 {
		fake.Step(10 * time.Second)
		f.Set(spoke, "foreign", i)
		g.Eventually(looked).Should(Receive(Equal(i)))
	}
	g.Expect(events).NotTo(Receive())
	fake.Step(10 * time.Second)
	g.Eventually(events).Should(Receive(Equal(feed.Event[int]{Kind: feed.Heartbeat, Time: time.Unix(1060, 0)})))
}

func TestCloseEndsSubscriptions(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(1)
	f.SetReady()
	s, err := f.Subscribe(spoke, nil)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(next(g, s).Kind).To(Equal(feed.Synced))
	ended := make(chan error)
	go func() {
		_, err := s.Next(context.Background())
		ended <- err
	}()
	f.Close()
	g.Eventually(ended).Should(Receive(MatchError(feed.ErrClosed)))
	_, err = f.Subscribe(spoke, nil)
	g.Expect(err).To(MatchError(feed.ErrClosed))
	s.Close()
	s.Close()
	g.Expect(f.Stats().Subscribers).To(BeZero())
}

// Readers that follow the protocol end up with the writers' view, whatever their speed and buffer.
func TestEveryReaderEndsWithTheWritersView(t *testing.T) {
	g := NewWithT(t)
	f := newFeed(4)
	f.SetReady()
	var readers sync.WaitGroup
	views := make([]map[string]int, 8)
	for i := range views {
		s, err := f.Subscribe(spoke, nil)
		g.Expect(err).NotTo(HaveOccurred())
		readers.Go(func() {
			defer s.Close()
			view, building := map[string]int{}, map[string]int{}
			target := building
			for target["end"] != 1 || building != nil {
				switch event := next(g, s); event.Kind {
				case feed.Upsert:
					target[event.Key] = event.Object
				case feed.Removed:
					delete(target, event.Key)
				case feed.Resync:
					building = map[string]int{}
					target = building
				case feed.Synced:
					view, building = building, nil
					target = view
				case feed.Heartbeat:
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
		g.Expect(view).To(Equal(want))
	}
}
