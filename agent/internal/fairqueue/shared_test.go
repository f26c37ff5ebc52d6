package fairqueue_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
)

// crew is the workers of a queue. A worker has its request until the test ends it.
type crew struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]

	ends map[string]chan struct{} // by request

	mu      sync.Mutex
	started []string
	busy    map[string]int // by owner
}

// ownerIn returns the part of a request's name before the first dash.
func ownerIn(name string) string {
	owner, _, _ := strings.Cut(name, "-")
	return owner
}

// newCrew returns so many workers of a queue for as many. It must be called in a bubble.
func newCrew(workers int) *crew {
	of := func(r reconcile.Request) types.NamespacedName {
		return types.NamespacedName{Namespace: r.Namespace, Name: ownerIn(r.Name)}
	}
	c := &crew{
		TypedRateLimitingInterface: fairqueue.NewShared(of, workers)("test",
			workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Millisecond, time.Second)),
		ends: map[string]chan struct{}{}, busy: map[string]int{},
	}
	for range workers {
		go c.work()
	}
	return c
}

func (c *crew) work() {
	for {
		r, shutdown := c.Get()
		if shutdown {
			return
		}
		c.mu.Lock()
		c.started = append(c.started, r.Name)
		c.busy[ownerIn(r.Name)]++
		end := make(chan struct{})
		c.ends[r.Name] = end
		c.mu.Unlock()
		<-end
		c.mu.Lock()
		c.busy[ownerIn(r.Name)]--
		c.mu.Unlock()
		c.Done(r)
	}
}

// add adds n requests of an owner, and waits until the workers have what they may have.
func (c *crew) add(owner string, n int) {
	for i := range n {
		c.Add(request(fmt.Sprintf("%s-%d", owner, i)))
	}
	synctest.Wait()
}

// end ends a request, and waits until the workers have what they may have.
func (c *crew) end(name string) {
	c.mu.Lock()
	close(c.ends[name])
	delete(c.ends, name)
	c.mu.Unlock()
	synctest.Wait()
}

// requests returns the names of those that workers have.
func (c *crew) requests() []string { return slices.Sorted(maps.Keys(c.ends)) }

// drain ends requests until there are none, and returns all that were started.
func (c *crew) drain() []string {
	for len(c.ends) > 0 {
		c.end(c.requests()[0])
	}
	c.ShutDown()
	synctest.Wait()
	return c.started
}

// However many requests an owner has, and however long they take, another one's first request waits
// for none.
func TestAnOwnerLeavesWorkersToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(24)
		c.add("a", 100)
		assert.Equal(t, 16, c.busy["a"], "two thirds")
		c.add("b", 100)
		assert.Equal(t, 5, c.busy["b"], "less than twice as many as are left")
		c.add("c", 100)
		assert.Equal(t, 2, c.busy["c"])
		c.add("d", 100)
		assert.Equal(t, 1, c.busy["d"], "the last one is for an owner that has none")
		for range 60 {
			for _, owner := range []string{"a", "b", "c", "d"} {
				started := slices.IndexFunc(c.started, func(name string) bool { return ownerIn(name) == owner && c.ends[name] != nil })
				c.end(c.started[started])
			}
		}
		for _, owner := range []string{"a", "b", "c", "d"} {
			assert.InDelta(t, 5, c.busy[owner], 1, "%s: the shares become equal as requests end", owner)
		}
		assert.Len(t, c.drain(), 400)
	})
}

// The requests of one owner come in the order of their arrival, and each as soon as an earlier one
// ends.
func TestAnOwnersRequestsAreNotDelayedWhenEarlierOnesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(3)
		c.add("a", 5)
		require.Equal(t, []string{"a-0", "a-1"}, c.started)
		c.end("a-1")
		require.Equal(t, []string{"a-0", "a-1", "a-2"}, c.started)
		c.end("a-0")
		require.Equal(t, "a-3", c.started[len(c.started)-1])
		assert.Equal(t, []string{"a-0", "a-1", "a-2", "a-3", "a-4"}, c.drain())
	})
}

func TestAParkedRequestThatIsAddedAgainIsHandedOutOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(3)
		c.add("a", 4)
		c.add("a", 4)
		c.end("a-0")
		c.end("a-1")
		assert.ElementsMatch(t, []string{"a-0", "a-1", "a-2", "a-3", "a-0", "a-1"}, c.drain(), "only those that had been started come again")
	})
}

// A worker is free only for other owners than those whose requests wait.
func TestNoWorkerIsIdleThatMayHaveARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const workers, each = 24, 40
		random := rand.New(rand.NewPCG(1, 2))
		c := newCrew(workers)
		var owners []string
		for range 20 * each {
			if random.IntN(each) == 0 {
				owners = append(owners, fmt.Sprint("owner", len(owners)))
				c.add(owners[len(owners)-1], each)
			}
			if busy := c.requests(); len(busy) > 0 {
				c.end(busy[random.IntN(len(busy))])
			}
			free := workers - len(c.ends)
			for _, owner := range owners {
				started := lo.CountBy(c.started, func(name string) bool { return ownerIn(name) == owner })
				if started < each && free > 0 {
					require.Positive(t, c.busy[owner])
					require.GreaterOrEqual(t, c.busy[owner], 2*(free-1))
				}
			}
		}
		require.Greater(t, len(owners), 10)
		require.Len(t, c.drain(), len(owners)*each)
	})
}

// A controller that stops waits for what its workers have.
func TestAQueueWithParkedRequestsIsDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew(3)
		c.add("a", 6)
		drained := false
		go func() {
			c.ShutDownWithDrain()
			drained = true
		}()
		synctest.Wait()
		c.end("a-0")
		assert.False(t, drained)
		c.end("a-1")
		assert.True(t, drained)
		assert.Equal(t, []string{"a-0", "a-1"}, c.drain())
	})
}
