package spokes

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

var (
	labels               = []string{"namespace", "cluster"}
	connectedDescription = prometheus.NewDesc("capi_agent_spoke_connected",
		"1 if the Cluster's shim synchronizes its claims with an agent, 0 if no agent has received a synchronization for 15 "+
			"minutes. Absent until the shim has a certificate of an onboarding or has called.", labels, nil)
	lastSyncDescription = prometheus.NewDesc("capi_agent_spoke_last_sync_timestamp_seconds",
		"Time of the last synchronization of claims by the Cluster's shim, in seconds since 1970, accurate to five minutes.", labels, nil)
	certificateFromDescription = prometheus.NewDesc("capi_agent_spoke_certificate_not_before_seconds",
		"Start of the validity of the certificate of the latest call by the Cluster's shim, in seconds since 1970.", labels, nil)
	certificateDescription = prometheus.NewDesc("capi_agent_spoke_certificate_not_after_seconds",
		"Expiry of the certificate of the latest call by the Cluster's shim, in seconds since 1970.", labels, nil)
)

// seen is what the metrics show of a Spoke.
type seen struct {
	connected                                   *bool   // nil if the shim has never called
	lastSync, certificateFrom, certificateUntil float64 // zero if unknown
}

func seenOf(status v1alpha1.SpokeStatus) seen {
	var s seen
	if c := meta.FindStatusCondition(status.Conditions, v1alpha1.ConnectedCondition); c != nil {
		s.connected = new(c.Status == metav1.ConditionTrue)
	}
	if at := status.LastSyncTime; at != nil {
		s.lastSync = float64(at.Unix())
	}
	if c := status.Certificate; c != nil && c.NotBefore != nil { // an older agent does not write it
		s.certificateFrom = float64(c.NotBefore.Unix())
	}
	if c := status.Certificate; c != nil && c.NotAfter != nil {
		s.certificateUntil = float64(c.NotAfter.Unix())
	}
	return s
}

// Collector returns metrics of the Spokes, as of the last [Spokes.Look] and of what was noted
// since. All agents report the same Spokes, whichever of them the shims call.
func (s *Spokes) Collector() prometheus.Collector { return collector{s} }

type collector struct{ *Spokes }

// Describe implements [prometheus.Collector].
func (collector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{connectedDescription, lastSyncDescription, certificateFromDescription, certificateDescription} {
		descriptions <- d
	}
}

// Collect implements [prometheus.Collector].
func (c collector) Collect(metrics chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, known := range c.seen {
		s := seenOf(known.status)
		gauge := func(d *prometheus.Desc, value float64) {
			metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, name.Namespace, name.Name)
		}
		if s.connected != nil {
			gauge(connectedDescription, map[bool]float64{true: 1}[*s.connected])
		}
		if s.lastSync > 0 {
			gauge(lastSyncDescription, s.lastSync)
		}
		if s.certificateFrom > 0 {
			gauge(certificateFromDescription, s.certificateFrom)
		}
		if s.certificateUntil > 0 {
			gauge(certificateDescription, s.certificateUntil)
		}
	}
}
