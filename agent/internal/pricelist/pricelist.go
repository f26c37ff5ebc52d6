// Package pricelist follows the price list in a ConfigMap of the hub.
package pricelist

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

// Key is the key of the ConfigMap that holds the list.
const Key = "prices.yaml"

// maxNote is how much of what is wrong an event says; the API server takes 1024 bytes.
const maxNote = 900

// Config is what a [Follower] needs.
type Config struct {
	// ConfigMap holds the list. REQUIRED.
	ConfigMap types.NamespacedName
	// Recorder takes an event when the list cannot be used. REQUIRED.
	Recorder events.EventRecorder
	// Registerer takes the metrics. Nil registers none.
	Registerer prometheus.Registerer
}

// Follower has the newest list that can be used. It is safe for concurrent use.
type Follower struct {
	Config

	client  client.Reader
	changes chan event.TypedGenericEvent[types.NamespacedName]
	usable  prometheus.Gauge
	entries prometheus.Gauge

	mu      sync.Mutex
	read    bool
	version string // of the ConfigMap that was read last, good or bad
	list    *pricing.List
}

// New returns a follower that reads once it was set up with a manager.
func New(c Config) (*Follower, error) {
	f := &Follower{
		Config:  c,
		changes: make(chan event.TypedGenericEvent[types.NamespacedName], 1),
		usable: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "capi_agent_price_list_usable", Help: "1 while the price list that is there now can be used; 0 when the last good one is used, or none.",
		}),
		entries: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "capi_agent_price_list_entries", Help: "Prices in the list that is used.",
		}),
	}
	if c.Registerer != nil {
		for _, collector := range []prometheus.Collector{f.usable, f.entries} {
			if err := c.Registerer.Register(collector); err != nil {
				return nil, fmt.Errorf("registering metrics: %w", err)
			}
		}
	}
	return f, nil
}

// Restrict makes caches see the price list's ConfigMap, and no other.
func Restrict(options *cache.Options, configMap types.NamespacedName) {
	options.ByObject[&corev1.ConfigMap{}] = cache.ByObject{Namespaces: map[string]cache.Config{
		configMap.Namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", configMap.Name)},
	}}
}

// SetupWithManager makes the manager follow the list. Its caches must be restricted with [Restrict].
func (f *Follower) SetupWithManager(mgr manager.Manager) error {
	f.client = mgr.GetClient()
	err := builder.ControllerManagedBy(mgr).Named("price-list").
		WithOptions(controller.Options{NeedLeaderElection: new(false), SkipNameValidation: new(true)}).
		For(&corev1.ConfigMap{}).
		Complete(f)
	if err != nil {
		return fmt.Errorf("setting up the price list: %w", err)
	}
	return nil
}

// Changes tells that there is another list. It has one reader.
func (f *Follower) Changes() <-chan event.TypedGenericEvent[types.NamespacedName] { return f.changes }

// List returns the list that is used now, nil when there is none. The first call reads it, so that nobody ever sees prices from
// before the list. A nil follower has none.
func (f *Follower) List(ctx context.Context) (*pricing.List, error) {
	if f == nil {
		return nil, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.read {
		if _, err := f.load(ctx); err != nil {
			return nil, err
		}
	}
	return f.list, nil
}

// Reconcile reads the list anew.
func (f *Follower) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	changed, err := f.load(ctx)
	if changed {
		select {
		case f.changes <- event.TypedGenericEvent[types.NamespacedName]{Object: f.ConfigMap}:
		default: // One is waiting, and whoever takes it reads the newest list.
		}
	}
	return reconcile.Result{}, err
}

// load reads the ConfigMap and reports whether another list is used now. A list that cannot be used leaves the last good one.
func (f *Follower) load(ctx context.Context) (bool, error) {
	configMap := &corev1.ConfigMap{}
	err := f.client.Get(ctx, f.ConfigMap, configMap)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("reading the price list: %w", err)
	}
	logger := log.FromContext(ctx).WithValues("configMap", f.ConfigMap)
	if apierrors.IsNotFound(err) {
		changed := f.list != nil
		if !f.read || f.version != "" {
			logger.Info("there is no price list: prices are estimated")
		}
		f.read, f.version = true, ""
		f.use(nil)
		f.usable.Set(0)
		return changed, nil
	}
	version := string(configMap.UID) + "/" + configMap.ResourceVersion
	if f.read && f.version == version {
		return false, nil
	}
	f.read, f.version = true, version
	list, err := f.parse(configMap)
	if err != nil {
		f.usable.Set(0)
		f.Recorder.Eventf(configMap, nil, corev1.EventTypeWarning, "InvalidPriceList", "LoadPriceList",
			"%s", cut("the list is not used, and the last good one stays: "+strings.ReplaceAll(err.Error(), "\n", "; ")))
		logger.Info("the price list cannot be used, and the last good one stays", "cause", err.Error())
		return false, nil
	}
	f.use(list)
	f.usable.Set(1)
	logger.Info("another price list is used", "prices", list.Len())
	return true, nil
}

func (f *Follower) use(list *pricing.List) {
	f.list = list
	f.entries.Set(float64(list.Len()))
}

func (f *Follower) parse(configMap *corev1.ConfigMap) (*pricing.List, error) {
	content, present := configMap.Data[Key]
	if !present {
		return nil, fmt.Errorf("data[%s]: is missing", Key)
	}
	list, err := pricing.ParseList("ConfigMap "+f.ConfigMap.String(), []byte(content))
	if err != nil {
		return nil, fmt.Errorf("data[%s]: %w", Key, err)
	}
	return list, nil
}

// cut shortens a text, between characters.
func cut(text string) string {
	if len(text) <= maxNote {
		return text
	}
	return strings.ToValidUTF8(text[:maxNote], "") + "…"
}
