// Package connectivity reports the state of the connection to the agent: as metrics, and in the log
// on changes.
package connectivity

import (
	"context"
	"fmt"
	"math"
	"sync"

	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
)

const (
	// subsystem is the part of the names of metrics about the connection to the agent.
	subsystem   = "capi_agent"
	streamLabel = "stream"
)

var connected = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
	Namespace: metrics.Namespace, Subsystem: subsystem, Name: "connected",
	Help: "1 if the stream is connected to the agent. 0 if the last known view is in use instead.",
}, []opmetrics.Label{{Name: streamLabel, Help: "Name of the stream."}}, opmetrics.Alpha)

// Mirror is a mirror of objects of the agent.
type Mirror interface {
	State() agentclient.State
	StateChanges() (changes <-chan struct{}, stop func())
}

// RegisterMirrors registers metrics of mirrors, by name. They are read on each scrape.
func RegisterMirrors(registerer prometheus.Registerer, mirrors map[string]Mirror) error {
	for name, mirror := range mirrors {
		err := registerer.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: metrics.Namespace, Subsystem: subsystem, Name: "last_event_timestamp_seconds", ConstLabels: prometheus.Labels{streamLabel: name},
			Help: "Time of the stream's last event, including heartbeats, in seconds since 1970. NaN if there has been none.",
		}, func() float64 {
			if at := mirror.State().LastEvent; !at.IsZero() {
				return float64(at.Unix())
			}
			return math.NaN()
		}))
		if err != nil {
			return fmt.Errorf("registering the metrics of mirror %s: %w", name, err)
		}
	}
	return nil
}

// Observer follows the connection state of mirrors.
type Observer struct {
	mirrors     map[string]Mirror
	reconnected chan event.GenericEvent
}

// New returns an observer of mirrors, by name.
func New(mirrors map[string]Mirror) *Observer {
	return &Observer{mirrors: mirrors, reconnected: make(chan event.GenericEvent, 1)}
}

// Reconnected returns a channel that receives an event when a mirror follows an agent again,
// possibly a different one. It supports one reader.
func (o *Observer) Reconnected() <-chan event.GenericEvent { return o.reconnected }

// NeedLeaderElection returns false, so that the manager runs the observer in every replica.
func (*Observer) NeedLeaderElection() bool { return false }

// Start reports changes until ctx is done.
func (o *Observer) Start(ctx context.Context) error {
	var watching sync.WaitGroup
	for name, mirror := range o.mirrors {
		watching.Go(func() { o.follow(ctx, name, mirror) })
	}
	watching.Wait()
	return nil
}

func (o *Observer) follow(ctx context.Context, name string, mirror Mirror) {
	changes, stop := mirror.StateChanges()
	defer stop()
	var before agentclient.State
	for {
		before = o.show(ctx, name, before, mirror.State())
		select {
		case <-ctx.Done():
			return
		case <-changes:
		}
	}
}

// show reports how a mirror's state differs from the last reported one, and returns the state that
// is now reported.
func (o *Observer) show(ctx context.Context, name string, before, now agentclient.State) agentclient.State {
	connected.Set(map[bool]float64{true: 1}[now.Connected], map[string]string{streamLabel: name})
	if now.Connected && !before.Since.IsZero() && before.Since != now.Since {
		select {
		case o.reconnected <- event.GenericEvent{}:
		default: // the reader has not received the last one yet
		}
	}
	shown := before.Connected || before.LastError != nil
	switch logger := log.FromContext(ctx).WithValues("stream", name); {
	case now.Connected && !before.Connected:
		logger.Info("following the agent")
	case !now.Connected && before.Connected:
		logger.Info("lost the connection to the agent, using the last known view", "reason", message(now.LastError))
	case !now.Connected && !shown && now.LastError != nil:
		logger.Info("cannot reach the agent yet, retrying", "reason", message(now.LastError))
	}
	if now.Connected || before.Connected || now.LastError != nil {
		return now
	}
	return before
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
