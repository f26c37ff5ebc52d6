// Package storage limits how many bytes of the hub's etcd claims take up, ended ones included:
// those of one Cluster, and those of all Clusters together. It also limits how many ended claims
// all Clusters have together. The numbers of one Cluster's claims have limits of their own, in
// package claims.
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
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
)

const (
	// bookkeeping is about how much the API server stores of a claim beyond what the agent reads:
	// the managed fields, which hub.Lean strips.
	bookkeeping = 1500
	// retryAfter is when a caller should try again. Ended claims that have been kept for
	// --tombstone-retention may be deleted by then.
	retryAfter = time.Minute
	// assuredEnded and assuredBytes are what every Cluster may have, whatever others have. The
	// bytes suffice for so many claims of 8 KiB, and a usual one takes up 3.2 KB.
	assuredEnded, assuredBytes = 500, 4 << 20
)

// Limits are the limits of a [Budget]. 0 means no limit.
type Limits struct {
	// Bytes is how many bytes the claims of one Cluster may take up.
	Bytes int64
	// AllBytes is how many bytes the claims of all Clusters together may take up, and AllEnded how
	// many ended claims they may have. The Clusters with the most are the first to get no more.
	AllBytes int64
	AllEnded int
}

// Budget knows how many bytes the claims of each Cluster take up, how many of them have ended, and
// the limits. It measures each claim on its way into the cache, because the cache does not keep all
// of it. Its methods may be called concurrently.
type Budget struct {
	limit    int64 // of one Cluster; 0 means none
	allBytes limits.Sum[int64]
	allEnded limits.Sum[int]
	// These are set by Follow.
	clusters client.Reader
	recorder events.EventRecorder

	mu sync.Mutex
	// measured are the sizes of objects that are on their way into the cache.
	measured map[types.UID]measurement
	// stored are the claims in the cache.
	stored   map[types.UID]entry
	accounts map[types.NamespacedName]*account
	all      usage
}

// measurement is what one version of a claim takes up.
type measurement struct {
	version string
	usage
}

// usage is what claims take up.
type usage struct {
	claims, ended int
	bytes         int64
}

func (u *usage) add(more usage) {
	u.claims += more.claims
	u.ended += more.ended
	u.bytes += more.bytes
}

func (u *usage) subtract(less usage) { u.add(usage{-less.claims, -less.ended, -less.bytes}) }

type entry struct {
	of *account
	measurement
}

// account is what the budget knows about a Cluster that has claims.
type account struct {
	usage

	cluster       types.NamespacedName
	timesExceeded uint64
}

// New returns a budget with these limits. [Budget.Measure] and [Budget.Follow] must be used before
// the cache starts.
func New(l Limits) *Budget {
	return &Budget{
		limit:    l.Bytes,
		allBytes: limits.Sum[int64]{Limit: l.AllBytes, Assured: assuredBytes},
		allEnded: limits.Sum[int]{Limit: l.AllEnded, Assured: assuredEnded},
		measured: map[types.UID]measurement{}, stored: map[types.UID]entry{}, accounts: map[types.NamespacedName]*account{},
	}
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

// measure measures each version once: an informer transforms the objects of a streamed list twice,
// the second time after the given transform has changed them, and lists versions again that it has.
func (b *Budget) measure(claim *v1alpha1.MachineClaim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	last, known := b.measured[claim.UID]
	if !known {
		last, known = b.stored[claim.UID].measurement, b.stored[claim.UID].of != nil
	}
	if !known || last.version != claim.ResourceVersion {
		takes := usage{claims: 1, bytes: Size(claim)}
		if claim.CurrentPhase() == v1alpha1.PhaseEnded {
			takes.ended = 1
		}
		b.measured[claim.UID] = measurement{claim.ResourceVersion, takes}
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
	of.add(last.usage)
	b.all.add(last.usage)
	b.stored[claim.UID] = entry{of, last}
}

// change is [Budget.see] of a claim in the place of another version, or, after a list, of another
// claim of the same name.
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
	known.of.subtract(known.usage)
	b.all.subtract(known.usage)
	return known.of
}

// Used returns how many bytes the claims of a Cluster take up.
func (b *Budget) Used(cluster types.NamespacedName) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of(cluster).bytes
}

// of returns what the claims of a Cluster take up. b.mu must be held.
func (b *Budget) of(cluster types.NamespacedName) usage {
	if of := b.accounts[cluster]; of != nil {
		return of.usage
	}
	return usage{}
}

// Crowded reports whether ended claims of a Cluster have to go early, because it has nearly as many
// as the limit of all Clusters leaves to it.
func (b *Budget) Crowded(cluster types.NamespacedName) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.allEnded.Near(b.of(cluster).ended, b.all.ended)
}

// Room returns a [*claims.TooManyError] if a call would make a further claim, or a tombstone, of a
// Cluster that has used up a limit. Calls for a claim that exists pass, as does any call if find
// fails. find is [claims.Engine.Get], and is called only if a limit is used up.
func (b *Budget) Room(ctx context.Context, key claims.Key, find func(context.Context, claims.Key) (*v1alpha1.MachineClaim, error)) error {
	cluster := types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}
	full := b.full(cluster)
	if full == nil {
		return nil
	}
	if _, err := find(ctx, key); !errors.Is(err, claims.ErrNotFound) {
		return nil
	}
	b.count(cluster, full.Bound)
	var object clusterv1.Cluster
	if err := b.clusters.Get(ctx, cluster, &object); err == nil && b.recorder != nil {
		b.recorder.Eventf(&object, nil, corev1.EventTypeWarning, "LimitReached", "Limit", "%s", full.Message)
	}
	return full
}

// full returns which limit a Cluster has used up; nil if none. A message about what all Clusters
// have contains no numbers: a caller could compute from them what others have.
func (b *Budget) full(cluster types.NamespacedName) *claims.TooManyError {
	b.mu.Lock()
	defer b.mu.Unlock()
	has := b.of(cluster)
	switch {
	case b.limit > 0 && has.bytes >= b.limit:
		return &claims.TooManyError{
			Bound: boundBytes, RetryAfter: retryAfter,
			Message: fmt.Sprintf("the claims of the Cluster take up %s of the hub's etcd, and its limit is %s (--max-claim-bytes-per-cluster); "+
				"ended claims are deleted after --tombstone-retention", quantity(has.bytes), quantity(b.limit)),
		}
	case b.allEnded.Full(has.ended, b.all.ended):
		return &claims.TooManyError{
			Bound: claims.BoundAllEnded, RetryAfter: retryAfter,
			Message: "the Cluster has as many tombstones as the limit of all Clusters leaves to it (--max-all-ended-claims); " +
				"they are deleted an hour after their claims ended",
		}
	case b.allBytes.Full(has.bytes, b.all.bytes):
		return &claims.TooManyError{
			Bound: claims.BoundAllBytes, RetryAfter: retryAfter,
			Message: "the claims of the Cluster take up as much of the hub's etcd as the limit of all Clusters leaves to it " +
				"(--max-all-claim-bytes); ended claims are deleted after --tombstone-retention",
		}
	}
	return nil
}

// boundBytes is the bound of one Cluster's bytes.
const boundBytes claims.Bound = "bytes"

// count counts a refusal.
func (b *Budget) count(cluster types.NamespacedName, bound claims.Bound) {
	if bound != boundBytes {
		claims.CountRefused(cluster, bound)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if of := b.accounts[cluster]; of != nil {
		of.timesExceeded++
	}
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
	allEndedDescription = prometheus.NewDesc("capi_agent_all_ended_claims", "Ended claims of all Clusters together.", nil, nil)
	allEndedLimit       = prometheus.NewDesc("capi_agent_all_ended_claims_limit",
		"Ended claims that all Clusters together may have (--max-all-ended-claims). Absent if there is no limit.", nil, nil)
	allBytesDescription = prometheus.NewDesc("capi_agent_all_claim_bytes",
		"Bytes that the claims of all Clusters together take up in the hub's etcd, including ended ones. Approximate.", nil, nil)
	allBytesLimit = prometheus.NewDesc("capi_agent_all_claim_bytes_limit",
		"Bytes that the claims of all Clusters together may take up (--max-all-claim-bytes). Absent if there is no limit.", nil, nil)
)

// Collector returns the metrics of the Clusters that have claims.
func (b *Budget) Collector() prometheus.Collector { return collector{b} }

type collector struct{ *Budget }

// Describe implements [prometheus.Collector].
func (collector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		usedDescription, limitDescription, refusedDescription, allEndedDescription, allEndedLimit, allBytesDescription, allBytesLimit,
	} {
		descriptions <- d
	}
}

// Collect implements [prometheus.Collector].
func (c collector) Collect(metrics chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value)
	}
	for description, limit := range map[*prometheus.Desc]int64{
		limitDescription: c.limit, allBytesLimit: c.allBytes.Limit, allEndedLimit: int64(c.allEnded.Limit),
	} {
		if limit > 0 {
			gauge(description, float64(limit))
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	gauge(allEndedDescription, float64(c.all.ended))
	gauge(allBytesDescription, float64(c.all.bytes))
	for cluster, of := range c.accounts {
		metrics <- prometheus.MustNewConstMetric(usedDescription, prometheus.GaugeValue, float64(of.bytes), cluster.Namespace, cluster.Name)
		metrics <- prometheus.MustNewConstMetric(refusedDescription, prometheus.CounterValue, float64(of.timesExceeded), cluster.Namespace, cluster.Name)
	}
}
