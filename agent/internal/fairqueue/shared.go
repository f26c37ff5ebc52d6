package fairqueue

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// perFreeWorker is how many workers an owner may have for each one that it leaves free.
const perFreeWorker = 2

// NewShared returns a constructor of queues like [New]'s for a controller with so many workers. In
// addition, no owner occupies all of them, however long its requests take: it gets a further one
// only while it has fewer than twice as many as that would leave free. Alone, it gets two thirds of
// them, and several owners get fewer each. The last free worker is for an owner that has none. In
// the queue's metrics, a request that waits for its owner's other ones counts as one that is being
// processed.
func NewShared(of Owner, workers int) Constructor {
	return func(controller string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
		return &shared{
			TypedRateLimitingInterface: New(of)(controller, limiter), of: of, workers: workers,
			owners: map[reconcile.Request]types.NamespacedName{}, busy: map[types.NamespacedName]int{},
			parked: map[types.NamespacedName][]reconcile.Request{},
		}
	}
}

// shared is a queue whose requests are parked while their owners have enough workers. A parked
// request has been taken from the queue, and is not done. So it is not handed out, also if it is
// added again.
type shared struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]

	of      Owner
	workers int

	mu sync.Mutex
	// owners has the owners of the requests that workers have, and busy how many each of them has.
	owners map[reconcile.Request]types.NamespacedName
	busy   map[types.NamespacedName]int
	parked map[types.NamespacedName][]reconcile.Request
}

// Get implements [workqueue.TypedInterface].
func (q *shared) Get() (request reconcile.Request, shutdown bool) {
	for {
		request, shutdown = q.TypedRateLimitingInterface.Get()
		if shutdown || q.handsOut(request) {
			return request, shutdown
		}
	}
}

// handsOut reports whether the request's owner may have another worker. If not, the request is
// parked.
func (q *shared) handsOut(request reconcile.Request) bool {
	owner := ownerOf(q.of, request)
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.mayHaveMore(owner) {
		q.parked[owner] = append(q.parked[owner], request)
		return false
	}
	q.owners[request] = owner
	q.busy[owner]++
	return true
}

// mayHaveMore reports whether an owner may have another worker. That is so if it has none. A parked
// request therefore never stays so: others of its owner are being processed, and their end is a
// cause to look again.
func (q *shared) mayHaveMore(owner types.NamespacedName) bool {
	left := q.workers - len(q.owners) - 1
	return q.busy[owner] == 0 || q.busy[owner] < perFreeWorker*left
}

// Done implements [workqueue.TypedInterface].
func (q *shared) Done(request reconcile.Request) {
	again := q.free(request)
	q.TypedRateLimitingInterface.Done(request)
	for _, r := range again {
		q.Add(r)
		q.TypedRateLimitingInterface.Done(r) // queued from here on, in its owner's turn
	}
}

// free records that a request is done. It returns parked requests that may be handed out now: one
// of each owner that may have another worker, as each end of a request frees one worker.
func (q *shared) free(request reconcile.Request) (again []reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	owner := q.owners[request]
	delete(q.owners, request)
	if q.busy[owner]--; q.busy[owner] == 0 {
		delete(q.busy, owner)
	}
	ends := q.ShuttingDown() // then nothing is queued any more, and what waits for all requests must not wait for parked ones
	for owner, parked := range q.parked {
		n := 0
		switch {
		case ends:
			n = len(parked)
		case q.mayHaveMore(owner):
			n = 1
		}
		again = append(again, parked[:n]...)
		if q.parked[owner] = parked[n:]; n == len(parked) {
			delete(q.parked, owner)
		}
	}
	return again
}
