// Package agentstate shows how well the agent can be reached: as metrics, and in the log when that changes.
package agentstate

import (
	"context"
	"time"

	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
)

// interval is how often the mirrors are looked at.
const interval = time.Second

const streamLabel = "stream"

var (
	connected = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: "capi_agent", Name: "connected",
		Help: "Whether the stream follows the agent: 1, or 0 while the last known view is used.",
	}, []opmetrics.Label{{Name: streamLabel, Help: "What is streamed."}}, opmetrics.Alpha)
	lastHeard = opmetrics.NewPrometheusGauge(crmetrics.Registry, prometheus.GaugeOpts{
		Namespace: metrics.Namespace, Subsystem: "capi_agent", Name: "last_event_timestamp_seconds",
		Help: "When the stream last carried anything, heartbeats included.",
	}, []opmetrics.Label{{Name: streamLabel, Help: "What is streamed."}}, opmetrics.Alpha)
)

// Mirror is a mirror of something of the agent's.
type Mirror interface {
	State() agentclient.State
}

// Observer looks at mirrors.
type Observer struct {
	mirrors     map[string]Mirror
	reconnected chan event.GenericEvent
}

// New returns an observer of mirrors, by name.
func New(mirrors map[string]Mirror) *Observer {
	return &Observer{mirrors: mirrors, reconnected: make(chan event.GenericEvent, 1)}
}

// Reconnected tells that a mirror follows an agent again, which may be another one than before. It has one reader.
func (o *Observer) Reconnected() <-chan event.GenericEvent { return o.reconnected }

// NeedLeaderElection makes the manager run the observer in every process.
func (*Observer) NeedLeaderElection() bool { return false }

// Start looks until ctx is done.
func (o *Observer) Start(ctx context.Context) error {
	before := map[string]agentclient.State{}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		o.look(ctx, before)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (o *Observer) look(ctx context.Context, before map[string]agentclient.State) {
	for name, mirror := range o.mirrors {
		state := mirror.State()
		labels := map[string]string{streamLabel: name}
		connected.Set(map[bool]float64{true: 1}[state.Connected], labels)
		if !state.LastEvent.IsZero() {
			lastHeard.Set(float64(state.LastEvent.Unix()), labels)
		}
		last, known := before[name]
		was := last.Connected
		if state.Connected && !last.Since.IsZero() && last.Since != state.Since {
			select {
			case o.reconnected <- event.GenericEvent{}:
			default: // the reader has not come to the last one yet
			}
		}
		switch logger := log.FromContext(ctx).WithValues("stream", name); {
		case state.Connected && !was:
			logger.Info("following the agent")
		case !state.Connected && known && was:
			logger.Info("lost the agent, using what is known", "reason", message(state.LastError))
		case !state.Connected && !known && state.LastError != nil:
			logger.Info("cannot reach the agent yet, trying again and again", "reason", message(state.LastError))
		}
		if state.Connected || was || state.LastError != nil {
			before[name] = state
		}
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
