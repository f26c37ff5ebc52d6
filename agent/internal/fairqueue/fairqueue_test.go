package fairqueue_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
)

func request(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "fleet", Name: name}}
}

// newQueue returns a queue in which the part of a name before the first dash is the owner.
func newQueue(t *testing.T) workqueue.TypedRateLimitingInterface[reconcile.Request] {
	t.Helper()
	queue := fairqueue.New(func(r reconcile.Request) types.NamespacedName {
		owner, _, _ := strings.Cut(r.Name, "-")
		return types.NamespacedName{Namespace: r.Namespace, Name: owner}
	})("test", workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Millisecond, time.Second))
	t.Cleanup(queue.ShutDown)
	return queue
}

// take returns the names of the next n requests. The queue must have at least n.
func take(t *testing.T, queue workqueue.TypedRateLimitingInterface[reconcile.Request], n int) []string {
	t.Helper()
	names := make([]string, 0, n)
	for range n {
		require.Positive(t, queue.Len())
		r, _ := queue.Get()
		names = append(names, r.Name)
	}
	return names
}

func TestOwnersTakeTurns(t *testing.T) {
	queue := newQueue(t)
	for _, name := range []string{"a-1", "a-2", "a-3", "a-4", "b-1", "b-2", "c-1"} {
		queue.Add(request(name))
	}
	require.Equal(t, 7, queue.Len())
	require.Equal(t, []string{"a-1", "b-1", "c-1", "a-2", "b-2", "a-3", "a-4"}, take(t, queue, 7))
	require.Zero(t, queue.Len())
}

// However much one owner has queued, another's first request waits for one request of each owner at
// most.
func TestAFloodDelaysAnotherOwnerByOneRequest(t *testing.T) {
	queue := newQueue(t)
	for n := range 200 {
		queue.Add(request(fmt.Sprintf("flood-%d", n)))
	}
	take(t, queue, 16) // all workers are busy with it
	queue.Add(request("quiet-1"))
	require.Contains(t, take(t, queue, 2), "quiet-1")
	queue.Add(request("quiet-2"))
	require.Contains(t, take(t, queue, 2), "quiet-2")
}

// What controllers rely on in a queue.
func TestARequestIsHandedOutOnceAtATime(t *testing.T) {
	queue := newQueue(t)
	queue.Add(request("a-1"))
	queue.Add(request("a-1"))
	require.Equal(t, []string{"a-1"}, take(t, queue, 1))
	require.Zero(t, queue.Len())
	queue.Add(request("a-1")) // while it is being processed
	require.Zero(t, queue.Len())
	queue.Done(request("a-1"))
	require.Equal(t, []string{"a-1"}, take(t, queue, 1))
	queue.Done(request("a-1"))
	require.Zero(t, queue.Len())

	queue.AddAfter(request("a-2"), time.Millisecond)
	queue.AddRateLimited(request("b-1"))
	both := []string{}
	for range 2 {
		r, _ := queue.Get() // waits for it
		both = append(both, r.Name)
	}
	require.ElementsMatch(t, []string{"a-2", "b-1"}, both)
	require.Equal(t, 1, queue.NumRequeues(request("b-1")))
}

// The owner is looked up within the queue, which has noted the request by then.
func TestARequestWhoseOwnerPanicsIsHandedOut(t *testing.T) {
	queue := fairqueue.New(func(r reconcile.Request) types.NamespacedName {
		if r.Name == "broken" {
			panic("a bug")
		}
		return types.NamespacedName{Namespace: r.Namespace, Name: "a"}
	})("test", workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Millisecond, time.Second))
	t.Cleanup(queue.ShutDown)
	for range 2 {
		for _, name := range []string{"1", "broken", "2"} {
			queue.Add(request(name))
		}
		require.Equal(t, []string{"1", "broken", "2"}, take(t, queue, 3))
		for _, name := range []string{"1", "broken", "2"} {
			queue.Done(request(name))
		}
	}
	queue.AddAfter(request("broken"), time.Millisecond)
	r, _ := queue.Get() // waits for it
	require.Equal(t, "broken", r.Name)
}

func TestAnItemCanComeBeforeItsOwnersOtherOnes(t *testing.T) {
	var turns fairqueue.Turns[string, int]
	for item := range 3 {
		turns.Push("a", item)
	}
	turns.PushFirst("b", 10)
	for item := range 3 {
		turns.PushFirst("a", 3+item)
	}
	turns.Remove("a", 4)
	turns.Remove("a", 1)
	turns.PushFirst("a", 6)
	var popped []int
	for turns.Len() > 0 {
		popped = append(popped, turns.Pop())
	}
	require.Equal(t, []int{3, 10, 5, 6, 0, 2}, popped)
	turns.Push("a", 7)
	turns.PushFirst("a", 8)
	require.Equal(t, []int{8, 7}, []int{turns.Pop(), turns.Pop()})
}

func TestAnItemThatWaitsNoMoreTakesNoTurn(t *testing.T) {
	var turns fairqueue.Turns[string, int]
	for item := range 3 {
		turns.Push("a", item)
	}
	turns.Push("b", 10)
	turns.Push("c", 20)
	turns.Remove("a", 1)
	turns.Remove("b", 10)
	turns.Remove("b", 10) // again
	turns.Remove("c", 21)
	require.Equal(t, 3, turns.Len())
	require.Equal(t, []int{0, 20, 2}, []int{turns.Pop(), turns.Pop(), turns.Pop()})
	require.Zero(t, turns.Len())
	turns.Push("b", 11)
	require.Equal(t, 11, turns.Pop())
}
