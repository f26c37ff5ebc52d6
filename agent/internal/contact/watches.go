package contact

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
)

// Watches follows the caches' watches that fail. A single kind can fail while the API server
// answers for all others: its objects in the cache are then outdated, and the rest looks well. It
// is safe for concurrent use.
type Watches struct {
	needed []string
	log    logr.Logger
	errors *prometheus.CounterVec

	mu     sync.Mutex
	failed map[string]bool // needed kinds that have failed and not been answered since
	seldom map[string]*rate.Sometimes
}

// NewWatches returns a Watches without any failure. Nothing can be served without the needed kinds,
// which are named by the type of their objects, such as *v1beta2.Machine, or as in
// [Watches.FailedAs]. Failures of other kinds are only logged and counted.
func NewWatches(needed []string, log logr.Logger) *Watches {
	return &Watches{
		needed: needed, log: log, failed: map[string]bool{}, seldom: map[string]*rate.Sometimes{},
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capi_agent_watch_errors_total",
			Help: "Number of times that the hub's API server refused or failed to list or watch a kind for the agent's caches, by the type of " +
				"its objects, or policy or price list.",
		}, []string{"kind"}),
	}
}

// Collector returns the metric of failed watches.
func (w *Watches) Collector() prometheus.Collector { return w.errors }

// Failed is the caches' handler of failed watches. The caches call it when they could not list or
// watch a kind, before they try again.
func (w *Watches) Failed(_ context.Context, reflector *cache.Reflector, err error) {
	w.failedAt(reflector.TypeDescription(), err)
}

// FailedAs returns a handler like [Watches.Failed] for the watches of a cache with a single kind,
// which it names.
func (w *Watches) FailedAs(kind string) cache.WatchErrorHandlerWithContext {
	return func(_ context.Context, _ *cache.Reflector, err error) { w.failedAt(kind, err) }
}

func (w *Watches) failedAt(kind string, err error) {
	// These are how watches end.
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || err == io.EOF || err == io.ErrUnexpectedEOF { //nolint:errorlint // as client-go does
		return
	}
	w.errors.WithLabelValues(kind).Inc()
	w.mu.Lock()
	defer w.mu.Unlock()
	if slices.Contains(w.needed, kind) {
		w.failed[kind] = true
	}
	if w.seldom[kind] == nil {
		w.seldom[kind] = &rate.Sometimes{Interval: time.Minute}
	}
	w.seldom[kind].Do(func() {
		w.log.Error(err, "a kind of the hub's objects cannot be followed; it is tried again", "kind", kind)
	})
}

// Ask asks for each needed kind whose watch has failed, until the API server has answered for it.
// The function ask sends a small request for a kind to the API server itself, and must be safe for
// concurrent use. The error names the first of the kinds that are not answered.
func (w *Watches) Ask(ctx context.Context, ask func(ctx context.Context, kind string) error) error {
	w.mu.Lock()
	kinds := slices.Sorted(maps.Keys(w.failed))
	w.mu.Unlock()
	answers := make([]error, len(kinds))
	var asking errgroup.Group
	for i, kind := range kinds {
		asking.Go(func() error {
			answers[i] = ask(ctx, kind)
			return nil
		})
	}
	_ = asking.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	var first error
	for i, kind := range kinds {
		switch {
		case answers[i] == nil:
			delete(w.failed, kind)
		case first == nil:
			first = fmt.Errorf("%s: %w", kind, answers[i])
		}
	}
	return first
}
