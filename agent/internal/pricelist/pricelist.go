// Package pricelist follows the price list in a ConfigMap of the hub.
package pricelist

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/configmap"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

// Key is the key of the ConfigMap that holds the list.
const Key = "prices.yaml"

// DefaultPatience is the default of Patience in [Config].
const DefaultPatience = 10 * time.Second

// Config configures a [Follower].
type Config struct {
	// ConfigMap contains the list. REQUIRED.
	ConfigMap types.NamespacedName
	// Patience is how long node groups wait for the list after the start of the agent. Zero means
	// [DefaultPatience].
	Patience time.Duration
	// WatchFailed is called when the ConfigMap could not be followed. Nil logs it.
	WatchFailed toolscache.WatchErrorHandlerWithContext
	// Recorder records an event if the list cannot be used. REQUIRED.
	Recorder events.EventRecorder
	// Registerer registers the metrics. Nil registers none.
	Registerer prometheus.Registerer
}

// Follower provides the latest usable list. It is safe for concurrent use.
type Follower struct {
	lists   *configmap.Follower[pricing.List]
	changes chan event.TypedGenericEvent[types.NamespacedName]
}

// New returns a follower. It reads the list once the manager has started.
func New(mgr manager.Manager, c Config) (*Follower, error) {
	f := &Follower{changes: make(chan event.TypedGenericEvent[types.NamespacedName], 1)}
	entries := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "capi_agent_price_list_entries", Help: "Number of prices in the price list in use.",
	})
	if c.Registerer != nil {
		if err := c.Registerer.Register(entries); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	var err error
	f.lists, err = configmap.New(mgr, configmap.Config[pricing.List]{
		Name: c.ConfigMap, Key: Key, What: "price list", Recorder: c.Recorder, Registerer: c.Registerer, WatchFailed: c.WatchFailed,
		Patience: cmp.Or(c.Patience, DefaultPatience),
		Parse: func(content []byte) (*pricing.List, error) {
			return pricing.ParseList("ConfigMap "+c.ConfigMap.String(), content)
		},
		Changed: func(list *pricing.List) {
			entries.Set(float64(list.Len()))
			select {
			case f.changes <- event.TypedGenericEvent[types.NamespacedName]{Object: c.ConfigMap}:
			// A change is already pending, and its reader will get the newest list.
			default:
			}
		},
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Changes returns a channel that receives a value when the list has changed. It must have one
// reader.
func (f *Follower) Changes() <-chan event.TypedGenericEvent[types.NamespacedName] { return f.changes }

// List returns the list in use, or nil if there is none and prices are estimated. The first calls
// wait for the list, so that no listed price is estimated, but not for long: node groups without
// listed prices are better than none. A nil follower has no list.
func (f *Follower) List(ctx context.Context) (*pricing.List, error) {
	if f == nil {
		return nil, nil
	}
	return f.lists.Read(ctx)
}
