// Package pricelist follows the price list in a ConfigMap of the hub.
package pricelist

import (
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/configmap"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

// Key is the key of the ConfigMap that holds the list.
const Key = "prices.yaml"

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
	lists   *configmap.Follower[pricing.List]
	changes chan event.TypedGenericEvent[types.NamespacedName]
}

// New returns a follower that reads once the manager has started.
func New(mgr manager.Manager, c Config) (*Follower, error) {
	f := &Follower{changes: make(chan event.TypedGenericEvent[types.NamespacedName], 1)}
	entries := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "capi_agent_price_list_entries", Help: "Prices in the list that is used.",
	})
	if c.Registerer != nil {
		if err := c.Registerer.Register(entries); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	var err error
	f.lists, err = configmap.New(mgr, configmap.Config[pricing.List]{
		Name: c.ConfigMap, Key: Key, What: "price list", Recorder: c.Recorder, Registerer: c.Registerer,
		Parse: func(content []byte) (*pricing.List, error) {
			return pricing.ParseList("ConfigMap "+c.ConfigMap.String(), content)
		},
		Changed: func(list *pricing.List) {
			entries.Set(float64(list.Len()))
			select {
			case f.changes <- event.TypedGenericEvent[types.NamespacedName]{Object: c.ConfigMap}:
			default: // a change is pending already, and its reader gets the newest list
			}
		},
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Changes tells that there is another list. It has one reader.
func (f *Follower) Changes() <-chan event.TypedGenericEvent[types.NamespacedName] { return f.changes }

// List returns the list in use, or nil if there is none; prices are estimated then. The first call waits for the list to be read, so that no
// price is estimated that the list has. A nil follower has no list.
func (f *Follower) List(ctx context.Context) (*pricing.List, error) {
	if f == nil {
		return nil, nil
	}
	return f.lists.Read(ctx)
}
