package claims

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

var (
	createSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "capi_agent_claim_create_seconds",
		Help:    "Time until a claim of a Cluster was durable, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.005, 2, 12),
	}, []string{namespaceLabel, clusterLabel})
	createsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claim_creates_total",
		Help: "Attempts to create a claim of a Cluster, by result (durable; refused: the request cannot be met; cancelled: by the caller; " +
			"failed: an error or a timeout of the agent or the hub).",
	}, []string{namespaceLabel, clusterLabel, "result"})
	boundSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "capi_agent_claim_bound_seconds",
		Help:    "Time from the creation of a Cluster's claim until it was bound to its Machine, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.25, 2, 14),
	}, []string{namespaceLabel, clusterLabel})
	joinedSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "capi_agent_claim_node_joined_seconds",
		Help: "Time from the creation of a Cluster's claim until its shim reported the Machine's Node as registered, accurate to a minute, " +
			"in seconds.",
		// From a quarter of a minute to four hours and a quarter.
		Buckets: prometheus.ExponentialBuckets(15, 2, 11),
	}, []string{namespaceLabel, clusterLabel})
	endedTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claims_ended_total",
		Help: "Claims that ended, by Cluster, node group and reason; those with the reason Failed also by class (Capacity, Quota, Configuration, " +
			"GivenUp, TimedOut, Reported: by the holder; Unknown: recorded by an agent without classes). The class of the others is empty.",
	}, []string{namespaceLabel, clusterLabel, deploymentLabel, "reason", "class"})
	refusedTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claims_refused_total",
		Help: "Claims and releases that were refused because a limit was reached (live: claims that have not ended; ended: tombstones; " +
			"quota: the hub's ResourceQuota; creations: --max-creations-per-minute; releases: --max-releases-per-window; all-ended, all-bytes: what " +
			"all Clusters may have together).",
	}, []string{namespaceLabel, clusterLabel, "limit"})
	writesTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_ledger_writes_total",
		Help: "Writes of ledgers, by kind (replicas: with a change of replicas; ledger: without) and " + results,
	}, []string{"kind", "result"})
	loweringsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_replicas_lowered_total",
		Help: "Number of times a node group was frozen because another writer set its replicas below the number of claims, " +
			"or overwrote them twice.",
	}, []string{namespaceLabel, deploymentLabel})
	panicsTotal = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "capi_agent_claim_panics_total",
		Help: "Steps of node groups that panicked because of a bug. The log contains the node group, and the stack trace once a minute for each place.",
	})
	actionsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_claim_actions_total",
		Help: "Writes of the claim protocol on claims, Machines and MachineSets, by kind and " + results,
	}, []string{"kind", "result"})
)

func init() { //nolint:gochecknoinits // the metrics registry is a global of controller-runtime's
	metrics.Registry.MustRegister(createSeconds, createsTotal, boundSeconds, joinedSeconds, endedTotal, refusedTotal, writesTotal, loweringsTotal,
		actionsTotal, panicsTotal)
}

func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ErrConflict), testFailed(err), lostRace(err), apierrors.IsAlreadyExists(err):
		return "lost_race"
	case errors.Is(err, ErrWriteRefused), refusedForGood(err):
		return "refused"
	}
	return "failed"
}

// results is what the metrics' texts say about their label.
const results = "result (ok; lost_race: another writer came first, and it is repeated; refused: by the API server, a webhook or a policy; failed)."

// startSeries creates the series of a Cluster before anything is counted. A counter or a histogram
// that appears with its first increment has no increase that a rule could see.
func startSeries(cluster types.NamespacedName) {
	clusterSeries.note(cluster)
	for _, seconds := range []*prometheus.HistogramVec{createSeconds, boundSeconds, joinedSeconds} {
		seconds.WithLabelValues(cluster.Namespace, cluster.Name)
	}
	for _, result := range createResults {
		createsTotal.WithLabelValues(cluster.Namespace, cluster.Name, result)
	}
	for _, limit := range []Bound{BoundLive, BoundEnded, BoundQuota, BoundCreations, BoundReleases, BoundAllEnded, BoundAllBytes} {
		refusedTotal.WithLabelValues(cluster.Namespace, cluster.Name, string(limit))
	}
}

// startGroupSeries does so for a node group. Its claims may end in another agent than the one that
// created them.
func startGroupSeries(cluster types.NamespacedName, nodeGroup string) {
	for _, reason := range []string{
		protocol.ReasonReleased, protocol.ReasonCancelled, protocol.ReasonHandedOver, protocol.ReasonReturned, protocol.ReasonLate,
		protocol.ReasonMachineLost,
	} {
		endedCounter(cluster, nodeGroup, reason, "")
	}
	for _, class := range failures.Final() {
		endedCounter(cluster, nodeGroup, protocol.ReasonFailed, string(class))
	}
}

// observeCreate counts an attempt to create a claim of an existing Cluster, and its duration if the
// claim is durable.
func observeCreate(c clock.Clock, begun time.Time, cluster types.NamespacedName, claim *v1alpha1.MachineClaim, err error) {
	startSeries(cluster)
	createsTotal.WithLabelValues(cluster.Namespace, cluster.Name, createResult(err)).Inc()
	if err != nil {
		return
	}
	createSeconds.WithLabelValues(cluster.Namespace, cluster.Name).Observe(c.Since(begun).Seconds())
	startGroupSeries(cluster, claim.Spec.NodeGroup)
}

// These are the values of the label result of attempts to create a claim.
const (
	createDurable   = "durable"
	createRefused   = "refused"
	createCancelled = "cancelled"
	createFailed    = "failed"
)

var createResults = []string{createDurable, createRefused, createCancelled, createFailed}

// createResult returns the value of the label result.
func createResult(err error) string {
	switch {
	case err == nil:
		return createDurable
	case isRefusal(err):
		return createRefused
	case errors.Is(err, context.Canceled):
		return createCancelled
	default:
		return createFailed
	}
}

func observeBound(c clock.Clock, claim *v1alpha1.MachineClaim) {
	clusterSeries.note(clusterOf(claim))
	boundSeconds.WithLabelValues(claim.Namespace, claim.Spec.ClusterName).Observe(c.Since(claim.CreationTimestamp.Time).Seconds())
}

func observeJoined(c clock.Clock, claim *v1alpha1.MachineClaim) {
	clusterSeries.note(clusterOf(claim))
	joinedSeconds.WithLabelValues(claim.Namespace, claim.Spec.ClusterName).Observe(c.Since(claim.CreationTimestamp.Time).Seconds())
}

func countEnded(claim *v1alpha1.MachineClaim, reason string) {
	endedCounter(clusterOf(claim), claim.Spec.NodeGroup, reason, classLabel(claim, reason)).Inc()
}

// classLabel returns the value of the label class. Only the classes that this agent knows become
// values, so that their number is bounded.
func classLabel(claim *v1alpha1.MachineClaim, reason string) string {
	switch class := claim.Status.FailureClass; {
	case reason != protocol.ReasonFailed:
		return ""
	case slices.Contains(failures.Final(), failures.Class(class)):
		return class
	}
	return "Unknown"
}

func endedCounter(cluster types.NamespacedName, nodeGroup, reason, class string) prometheus.Counter {
	clusterSeries.note(cluster)
	groupSeries.note(types.NamespacedName{Namespace: cluster.Namespace, Name: nodeGroup})
	return endedTotal.WithLabelValues(cluster.Namespace, cluster.Name, nodeGroup, reason, class)
}

// CountRefused counts a refusal because a bound was reached.
func CountRefused(cluster types.NamespacedName, limit Bound) {
	clusterSeries.note(cluster)
	refusedTotal.WithLabelValues(cluster.Namespace, cluster.Name, string(limit)).Inc()
}

func countWrite(kind string, err error) { writesTotal.WithLabelValues(kind, result(err)).Inc() }
func countLowering(namespace, deployment string) {
	groupSeries.note(types.NamespacedName{Namespace: namespace, Name: deployment})
	loweringsTotal.WithLabelValues(namespace, deployment).Inc()
}

func countAction(kind protocol.ActionKind, err error) {
	actionsTotal.WithLabelValues(string(kind), result(err)).Inc()
}

// The series of Clusters and of node groups, which are dropped with them. Names are their owners'
// to choose, and an agent runs for months.
var (
	clusterSeries = series{label: clusterLabel, of: []vector{createSeconds, createsTotal, boundSeconds, joinedSeconds, endedTotal, refusedTotal}}
	groupSeries   = series{label: deploymentLabel, of: []vector{endedTotal, loweringsTotal}}
)

type vector interface {
	DeletePartialMatch(labels prometheus.Labels) int
}

// series are the series of metrics that have an owner's namespace and name as labels.
type series struct {
	label string
	of    []vector

	mu     sync.Mutex
	owners map[types.NamespacedName]struct{}
}

// note records that the owner has series.
func (s *series) note(owner types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners == nil {
		s.owners = map[types.NamespacedName]struct{}{}
	}
	s.owners[owner] = struct{}{}
}

// keep drops the series of all owners that do not exist.
func (s *series) keep(exist map[types.NamespacedName]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for owner := range s.owners {
		if exist[owner] {
			continue
		}
		for _, v := range s.of {
			v.DeletePartialMatch(prometheus.Labels{namespaceLabel: owner.Namespace, s.label: owner.Name})
		}
		delete(s.owners, owner)
	}
}
