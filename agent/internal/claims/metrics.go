package claims

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

var (
	createSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "capi_agent_claim_create_seconds",
		Help:    "Time that a claim took to become durable, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.005, 2, 12),
	})
	boundSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "capi_agent_claim_bound_seconds",
		Help:    "Time from a claim's creation to its Machine, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.25, 2, 14),
	})
	endedTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claims_ended_total",
		Help: "Claims that ended, by reason.",
	}, []string{"reason"})
	refusedTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claims_refused_total",
		Help: "Claims and releases that were refused because a limit is reached (live: claims that have not ended; ended: ended claims that are " +
			"remembered; quota: the hub's ResourceQuota; creations: --max-creations-per-minute; releases: --max-releases-per-window).",
	}, []string{namespaceLabel, clusterLabel, "limit"})
	writesTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_ledger_writes_total",
		Help: "Writes of ledgers, by kind (replicas: with a change of replicas; ledger: without) and result.",
	}, []string{"kind", "result"})
	loweringsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_replicas_lowered_total",
		Help: "How often another writer set the replicas of a node group below what is claimed, or twice back to a number of its own, " +
			"which froze the group.",
	}, []string{namespaceLabel, deploymentLabel})
	panicsTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "capi_agent_claim_panics_total",
		Help: "Steps of node groups that panicked: bugs. The log names the node group and has the stack.",
	})
	actionsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claim_actions_total",
		Help: "Writes of the claim protocol on claims, Machines and MachineSets, by kind and result.",
	}, []string{"kind", "result"})
)

func init() { //nolint:gochecknoinits // the metrics registry is a global of controller-runtime's
	metrics.Registry.MustRegister(createSeconds, boundSeconds, endedTotal, refusedTotal, writesTotal, loweringsTotal, actionsTotal, panicsTotal)
}

func result(err error) string {
	if err != nil {
		return "refused"
	}
	return "ok"
}

func observeCreate(c clock.Clock, begun time.Time) { createSeconds.Observe(c.Since(begun).Seconds()) }

func observeBound(c clock.Clock, claim *v1alpha1.MachineClaim) {
	boundSeconds.Observe(c.Since(claim.CreationTimestamp.Time).Seconds())
}

func countEnded(reason string) { endedTotal.WithLabelValues(reason).Inc() }
func countRefused(cluster types.NamespacedName, limit Bound) {
	refusedTotal.WithLabelValues(cluster.Namespace, cluster.Name, string(limit)).Inc()
}
func countWrite(kind string, err error) { writesTotal.WithLabelValues(kind, result(err)).Inc() }
func countLowering(namespace, deployment string) {
	loweringsTotal.WithLabelValues(namespace, deployment).Inc()
}

func countAction(kind protocol.ActionKind, err error) {
	actionsTotal.WithLabelValues(string(kind), result(err)).Inc()
}
