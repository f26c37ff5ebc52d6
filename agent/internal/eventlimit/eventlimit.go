// Package eventlimit bounds how many events the agent records about one Cluster.
//
// A caller can cause events, and the API server keeps each for an hour: without a bound, one shim
// could fill the hub's etcd. The recorder of client-go counts equal events as one, but not those
// about an object that has changed.
package eventlimit

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

const (
	// burst is how many events with one reason are recorded about a Cluster at once. A Cluster with
	// thousands of Nodes has as many events when it is made.
	burst = 5000
	// interval is the average time between further ones.
	interval = time.Second
	// full is how long a bucket takes to be full again. Then it need not be remembered.
	full = burst * interval
)

// Recorder is a recorder that drops events beyond the bound. It is safe for concurrent use.
type Recorder struct {
	events.EventRecorder

	clock   clock.Clock
	dropped prometheus.Counter

	mu      sync.Mutex
	buckets *cache.Expiring
}

// New returns a recorder that passes events to another one. A nil registerer registers no metrics.
func New(to events.EventRecorder, c clock.Clock, registerer prometheus.Registerer) (*Recorder, error) {
	r := &Recorder{EventRecorder: to, clock: c, buckets: cache.NewExpiringWithClock(c), dropped: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "capi_agent_events_dropped_total",
		Help: "Events that were not recorded in the hub, because there were too many with the same reason about one Cluster.",
	})}
	if registerer == nil {
		return r, nil
	}
	return r, registerer.Register(r.dropped)
}

// Eventf implements [events.EventRecorder].
func (r *Recorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	if !r.allow(bucketOf(regarding, reason)) {
		r.dropped.Inc()
		return
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, note, args...)
}

func (r *Recorder) allow(key bucket) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	found, _ := r.buckets.Get(key)
	kept, is := found.(*limiter)
	if !is {
		kept = &limiter{Limiter: rate.NewLimiter(rate.Every(interval), burst)}
	}
	now := r.clock.Now()
	if now.Sub(kept.stored) > full { // every Set takes memory until it expires
		kept.stored = now
		r.buckets.Set(key, kept, 2*full)
	}
	return kept.AllowN(now, 1)
}

type limiter struct {
	*rate.Limiter

	stored time.Time
}

type bucket struct{ namespace, cluster, reason string }

// bucketOf returns what an event counts for. Objects that belong to no Cluster have a bucket per
// namespace.
func bucketOf(regarding runtime.Object, reason string) bucket {
	object, err := meta.Accessor(regarding)
	if err != nil {
		return bucket{reason: reason}
	}
	cluster := object.GetLabels()[clusterv1.ClusterNameLabel]
	switch object := regarding.(type) {
	case *clusterv1.Cluster:
		cluster = object.Name
	case *clusterv1.MachineDeployment:
		cluster = object.Spec.ClusterName
	case *v1alpha1.MachineClaim:
		cluster = object.Spec.ClusterName
	case *v1alpha1.Spoke:
		cluster = object.Name
	}
	return bucket{object.GetNamespace(), cluster, reason}
}
