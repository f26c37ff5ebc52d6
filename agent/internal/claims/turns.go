package claims

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"
)

// perCluster is how many runs for calls one Cluster has at once, and how many writes on claims and
// Machines all its runs do at once. Their requests to the hub are charged to no caller, so without
// a bound the requests for one Cluster's calls would queue up before those of all other Clusters.
// Further ones wait.
const perCluster = 16

// turns bounds what is done for each Cluster at once. The zero value is ready for use. It is safe
// for concurrent use.
type turns struct {
	mu sync.Mutex
	of map[types.NamespacedName]*turnsOf
}

type turnsOf struct {
	free  *semaphore.Weighted
	users int // that have a turn or wait
}

// take waits for a turn of the Cluster, and returns a function that ends it.
func (t *turns) take(cluster types.NamespacedName) (end func()) {
	t.mu.Lock()
	if t.of == nil {
		t.of = map[types.NamespacedName]*turnsOf{}
	}
	own := t.of[cluster]
	if own == nil {
		own = &turnsOf{free: semaphore.NewWeighted(perCluster)}
		t.of[cluster] = own
	}
	own.users++
	t.mu.Unlock()
	_ = own.free.Acquire(context.Background(), 1) // each turn ends
	return func() {
		own.free.Release(1)
		t.mu.Lock()
		defer t.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(t.of, cluster)
		}
	}
}
