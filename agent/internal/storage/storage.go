// Package storage limits how many bytes of the hub's etcd the claims of one Cluster take up, ended
// ones included. The numbers of claims have limits of their own, in package claims.
package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
)

const (
	// bookkeeping is about how much the API server stores of a claim beyond what the agent reads:
	// the managed fields, which hub.Lean strips.
	bookkeeping = 1500
	// retryAfter is when a caller should try again. Ended claims that have been kept for
	// --tombstone-retention may be deleted by then.
	retryAfter = time.Minute
)

// Budget knows how many bytes the claims of each Cluster take up, and the limit. It measures each
// claim on its way into the cache, because the cache does not keep all of it. Its methods may be
// called concurrently.
type Budget struct {
	limit int64 // 0 means none
	// These are set by Follow.
	clusters client.Reader
	recorder events.EventRecorder

	mu sync.Mutex
	// measured are the sizes of objects that are on their way into the cache.
	measured map[types.UID]measurement
	// stored are the claims in the cache.
	stored   map[types.UID]entry
	accounts map[types.NamespacedName]*account
}

// measurement is the size of one version of a claim.
type measurement struct {
	version string
	bytes   int64
}

type entry struct {
	of *account
	measurement
}

// account is what the budget knows about a Cluster that has claims.
type account struct {
	cluster       types.NamespacedName
	claims        int
	bytes         int64
	timesExceeded uint64
}

// New returns a budget of so many bytes for each Cluster; 0 means no limit. [Budget.Measure] and
// [Budget.Follow] must be used before the cache starts.
func New(limit int64) *Budget {
	return &Budget{limit: limit, measured: map[types.UID]measurement{}, stored: map[types.UID]entry{}, accounts: map[types.NamespacedName]*account{}}
}

// Measure returns a transform that measures claims before the given one changes them.
func (b *Budget) Measure(then toolscache.TransformFunc) toolscache.TransformFunc {
	return func(object any) (any, error) {
		if claim, ok := object.(*v1alpha1.MachineClaim); ok {
			b.measure(claim)
		}
		return then(object)
	}
}

// measure measures each version once: an informer transforms the objects of a streamed list twice, the
// second time after the given transform has changed them, and lists versions again that it has.
func (b *Budget) measure(claim *v1alpha1.MachineClaim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	last, known := b.measured[claim.UID]
	if !known {
		last, known = b.stored[claim.UID].measurement, b.stored[claim.UID].of != nil
	}
	if !known || last.version != claim.ResourceVersion {
		b.measured[claim.UID] = measurement{claim.ResourceVersion, Size(claim)}
	}
}

// Size returns about how many bytes etcd stores for a claim as read from the API server.
func Size(claim *v1alpha1.MachineClaim) int64 {
	encoded, err := json.Marshal(claim)
	if err != nil {
		return bookkeeping // a claim can always be encoded
	}
	return int64(len(encoded)) + bookkeeping
}

// Follow makes the budget follow the claims in a cache. A Cluster whose limit is reached is read
// there, and gets an event; a nil recorder records none.
func (b *Budget) Follow(ctx context.Context, in cache.Cache, recorder events.EventRecorder) error {
	b.clusters, b.recorder = in, recorder
	informer, err := in.GetInformer(ctx, &v1alpha1.MachineClaim{})
	if err != nil {
		return fmt.Errorf("following the claims: %w", err)
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    b.see,
		UpdateFunc: b.change,
		DeleteFunc: b.forget,
	})
	if err != nil {
		return fmt.Errorf("following the claims: %w", err)
	}
	return nil
}

// see takes the last measurement of a claim that the cache has now.
func (b *Budget) see(object any) {
	claim, ok := object.(*v1alpha1.MachineClaim)
	if !ok {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	last, measured := b.measured[claim.UID]
	if !measured {
		return // an earlier event has taken it
	}
	delete(b.measured, claim.UID)
	b.drop(claim.UID)
	cluster := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Spec.ClusterName}
	of := b.accounts[cluster]
	if of == nil {
		of = &account{cluster: cluster}
		b.accounts[cluster] = of
	}
	of.claims++
	of.bytes += last.bytes
	b.stored[claim.UID] = entry{of, last}
}

// change is [Budget.see] of a claim in the place of another version, or, after a list, of another claim
// of the same name.
func (b *Budget) change(before, after any) {
	old, isClaim := before.(*v1alpha1.MachineClaim)
	if now, ok := after.(*v1alpha1.MachineClaim); ok && isClaim && old.UID != now.UID {
		b.forget(old)
	}
	b.see(after)
}

// forget drops a claim that the cache has no more.
func (b *Budget) forget(object any) {
	if last, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
		object = last.Obj
	}
	claim, ok := object.(*v1alpha1.MachineClaim)
	if !ok {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.measured, claim.UID) // the event of its deletion was measured as well
	if of := b.drop(claim.UID); of != nil && of.claims == 0 {
		delete(b.accounts, of.cluster)
	}
}

// drop removes a claim from its Cluster's account, and returns the account.
func (b *Budget) drop(claim types.UID) *account {
	known, ok := b.stored[claim]
	if !ok {
		return nil
	}
	delete(b.stored, claim)
	known.of.claims--
	known.of.bytes -= known.bytes
	return known.of
}

// Used returns how many bytes the claims of a Cluster take up.
func (b *Budget) Used(cluster types.NamespacedName) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if of := b.accounts[cluster]; of != nil {
		return of.bytes
	}
	return 0
}

// Room returns a [*claims.TooManyError] if a call would make a further claim, or a tombstone, of a
// Cluster that has used up its limit. Calls for a claim that exists pass, as does any call if find
// fails. find is [claims.Engine.Get], and is called only if the limit is used up.
func (b *Budget) Room(ctx context.Context, key claims.Key, find func(context.Context, claims.Key) (*v1alpha1.MachineClaim, error)) error {
	cluster := types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}
	used := b.Used(cluster)
	if b.limit == 0 || used < b.limit {
		return nil
	}
	if _, err := find(ctx, key); !errors.Is(err, claims.ErrNotFound) {
		return nil
	}
	b.mu.Lock()
	if of := b.accounts[cluster]; of != nil {
		of.timesExceeded++
	}
	b.mu.Unlock()
	full := &claims.TooManyError{
		Bound: claims.Bound("bytes"), RetryAfter: retryAfter,
		Message: fmt.Sprintf("the claims of the Cluster take up %s of the hub's etcd, and its limit is %s (--max-claim-bytes-per-cluster); "+
			"ended claims are deleted after --tombstone-retention", quantity(used), quantity(b.limit)),
	}
	var object clusterv1.Cluster
	if err := b.clusters.Get(ctx, cluster, &object); err == nil && b.recorder != nil {
		b.recorder.Eventf(&object, nil, corev1.EventTypeWarning, "LimitReached", "Limit", "%s", full.Message)
	}
	return full
}

// quantity returns a number of bytes as text, in whole mebibytes if there are any.
func quantity(bytes int64) string {
	if bytes >= 1<<20 {
		bytes = bytes >> 20 << 20
	}
	return resource.NewQuantity(bytes, resource.BinarySI).String()
}

var (
	labels          = []string{"namespace", "cluster"}
	usedDescription = prometheus.NewDesc("capi_agent_cluster_claim_bytes",
		"Bytes that the claims of a Cluster take up in the hub's etcd, including ended ones. Approximate: the API server's own records are "+
			"counted at a flat rate.", labels, nil)
	limitDescription = prometheus.NewDesc("capi_agent_claim_bytes_limit",
		"Bytes that the claims of each Cluster may take up (--max-claim-bytes-per-cluster). Absent if there is no limit.", nil, nil)
	refusedDescription = prometheus.NewDesc("capi_agent_claim_bytes_refused_total",
		"Claims, and releases of unknown claims, that were refused because the claims of the Cluster take up too many bytes.", labels, nil)
)

// Collector returns the metrics of the Clusters that have claims.
func (b *Budget) Collector() prometheus.Collector { return collector{b} }

type collector struct{ *Budget }

// Describe implements [prometheus.Collector].
func (collector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{usedDescription, limitDescription, refusedDescription} {
		descriptions <- d
	}
}

// Collect implements [prometheus.Collector].
func (c collector) Collect(metrics chan<- prometheus.Metric) {
	if c.limit > 0 {
		metrics <- prometheus.MustNewConstMetric(limitDescription, prometheus.GaugeValue, float64(c.limit))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for cluster, of := range c.accounts {
		metrics <- prometheus.MustNewConstMetric(usedDescription, prometheus.GaugeValue, float64(of.bytes), cluster.Namespace, cluster.Name)
		metrics <- prometheus.MustNewConstMetric(refusedDescription, prometheus.CounterValue, float64(of.timesExceeded), cluster.Namespace, cluster.Name)
	}
}
