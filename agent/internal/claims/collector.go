package claims

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// collectTimeout bounds the reading of the caches for one scrape.
const collectTimeout = 5 * time.Second

// collector reports the contents of the ledgers and the claims from the caches at each scrape. It
// holds no state that could lag or be left behind when a node group is deleted.
type collector struct {
	reader client.Reader
	clock  clock.PassiveClock
	bounds Bounds
}

// Collector returns the metrics of all ledger quantities and of the claims by phase. It reads
// through Client.
func (e *Engine) Collector() prometheus.Collector {
	return collector{reader: e.Client, clock: e.Clock, bounds: e.Bounds}
}

// Labels of the metrics.
const (
	namespaceLabel  = "namespace"
	deploymentLabel = "machine_deployment"
	clusterLabel    = "cluster"
)

var (
	ledgerDescription = prometheus.NewDesc("capi_agent_ledger_machines",
		"Machines of a node group by owner, according to its ledger: floor (owned by the user), spare (without an owner when the "+
			"ledger was last written), pending (admitted claims without an assigned Machine), assigned (to a claim, not bound yet), "+
			"releasing (being removed, replica held), replica_removed (being removed, replica removed).",
		[]string{namespaceLabel, deploymentLabel, "part"}, nil)
	replicasDescription = prometheus.NewDesc("capi_agent_node_group_replicas",
		"spec.replicas of the MachineDeployment of a node group that has a ledger.", []string{namespaceLabel, deploymentLabel}, nil)
	sequenceDescription = prometheus.NewDesc("capi_agent_ledger_sequence",
		"Number of times the ledger of a node group was written.", []string{namespaceLabel, deploymentLabel}, nil)
	unreadableDescription = prometheus.NewDesc("capi_agent_ledger_unreadable",
		"1 for a node group whose ledger this agent cannot read, because a newer agent wrote it or it was edited by hand.",
		[]string{namespaceLabel, deploymentLabel}, nil)
	frozenDescription = prometheus.NewDesc("capi_agent_node_group_frozen",
		"1 for a node group that is frozen because another writer set its replicas below the number of claims, or keeps overwriting them.",
		[]string{namespaceLabel, deploymentLabel}, nil)
	claimsDescription = prometheus.NewDesc("capi_agent_claims",
		"Claims by node group and phase. Ended claims are counted as long as their tombstones are kept.",
		[]string{namespaceLabel, deploymentLabel, "phase"}, nil)
	clusterClaimsDescription = prometheus.NewDesc("capi_agent_cluster_claims",
		"Claims of a Cluster by state (live: not ended; ended: tombstones). Each state has its own limit.",
		[]string{namespaceLabel, clusterLabel, "state"}, nil)
)

// Recent operations and their limits, so that an alert need not repeat the agent's options.
var (
	releasesDescription = prometheus.NewDesc("capi_agent_cluster_recent_releases",
		"Claims of a Cluster with a Machine that were released within the last --release-window.", []string{namespaceLabel, clusterLabel}, nil)
	creationsDescription = prometheus.NewDesc("capi_agent_node_group_recent_creations",
		"Claims of a node group that were created within the last minute.", []string{namespaceLabel, clusterLabel, deploymentLabel}, nil)
	limitDescription = prometheus.NewDesc("capi_agent_limit",
		"Configured limits (live, ended: claims of a Cluster; creations: claims of a node group within a minute; releases: claims of a "+
			"Cluster within --release-window).", []string{"limit"}, nil)
	ownLimitDescription = prometheus.NewDesc("capi_agent_cluster_limit",
		"Limits that a Cluster's annotations set instead of capi_agent_limit. 0 means no limit.",
		[]string{namespaceLabel, clusterLabel, "limit"}, nil)
)

// keptDescription is by Cluster, because such claims do not concern their node group.
var keptDescription = prometheus.NewDesc("capi_agent_claims_owner_missing",
	"Claims of a Cluster that are kept although they are missing from their holder's live set. They require manual action.",
	[]string{namespaceLabel, "cluster"}, nil)

func (c collector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		ledgerDescription, replicasDescription, sequenceDescription, unreadableDescription, frozenDescription, claimsDescription,
		keptDescription,
		clusterClaimsDescription, releasesDescription, creationsDescription, limitDescription, ownLimitDescription,
	} {
		descriptions <- d
	}
}

// collectLedger reports what a MachineDeployment's ledger has, if it has one of its own.
func collectLedger(md *clusterv1.MachineDeployment, gauge func(d *prometheus.Desc, value int64, labels ...string)) {
	l, err := protocol.LedgerOf(md)
	if err != nil {
		// One that can be read was copied from another MachineDeployment.
		if _, err := protocol.ParseLedger(md.Annotations[v1alpha1.LedgerAnnotation]); err != nil {
			gauge(unreadableDescription, 1, md.Namespace, md.Name)
		}
		return
	}
	if l == nil {
		return
	}
	if md.Spec.Replicas != nil {
		gauge(replicasDescription, int64(*md.Spec.Replicas), md.Namespace, md.Name)
	}
	gauge(sequenceDescription, l.Seq, md.Namespace, md.Name)
	if l.Lowered {
		gauge(frozenDescription, 1, md.Namespace, md.Name)
	}
	for part, n := range parts(l) {
		gauge(ledgerDescription, n, md.Namespace, md.Name, part)
	}
}

func (c collector) Collect(metrics chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	gauge := func(d *prometheus.Desc, value int64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	var deployments clusterv1.MachineDeploymentList
	if err := c.reader.List(ctx, &deployments, client.UnsafeDisableDeepCopy); err != nil {
		log.Log.WithName("claims").Error(err, "listing MachineDeployments for the metrics")
		return
	}
	groups, served := map[types.NamespacedName]bool{}, map[types.NamespacedName]bool{}
	for i := range deployments.Items {
		md := &deployments.Items[i]
		groups[client.ObjectKeyFromObject(md)] = true
		if _, member := md.Labels[v1alpha1.MemberLabel]; member {
			cluster := types.NamespacedName{Namespace: md.Namespace, Name: md.Spec.ClusterName}
			served[cluster] = true
			startGroupSeries(cluster, md.Name)
		}
		collectLedger(md, gauge)
	}
	groupSeries.keep(groups)
	var claims v1alpha1.MachineClaimList
	if err := c.reader.List(ctx, &claims, client.UnsafeDisableDeepCopy); err != nil {
		log.Log.WithName("claims").Error(err, "listing claims for the metrics")
		return
	}
	type group struct {
		namespace, name string
		phase           v1alpha1.Phase
	}
	counts := map[group]int64{}
	censuses := map[types.NamespacedName]*census{}
	kept := map[types.NamespacedName]int64{}
	now := c.clock.Now()
	for i := range claims.Items {
		claim := &claims.Items[i]
		counts[group{claim.Namespace, claim.Spec.NodeGroup, claim.CurrentPhase()}]++
		if claim.CurrentPhase() == v1alpha1.PhaseBound && claim.Status.Reason == protocol.ReasonOwnerMissing {
			kept[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Spec.ClusterName}]++
		}
		if censuses[clusterOf(claim)] == nil {
			censuses[clusterOf(claim)] = newCensus(now)
		}
		censuses[clusterOf(claim)].take(claim, c.bounds.ReleaseWindow)
	}
	for cluster, has := range censuses {
		gauge(clusterClaimsDescription, int64(has.live), cluster.Namespace, cluster.Name, string(BoundLive))
		gauge(clusterClaimsDescription, int64(has.ended), cluster.Namespace, cluster.Name, string(BoundEnded))
		gauge(releasesDescription, int64(has.released.n), cluster.Namespace, cluster.Name)
		for name, made := range has.made {
			gauge(creationsDescription, int64(made.n), cluster.Namespace, cluster.Name, name)
		}
	}
	for bound, limit := range map[Bound]int{
		BoundLive: c.bounds.Claims, BoundEnded: c.bounds.Ended, BoundCreations: c.bounds.Creations, BoundReleases: c.bounds.Releases,
	} {
		if limit > 0 {
			gauge(limitDescription, int64(limit), string(bound))
		}
	}
	var clusters clusterv1.ClusterList
	if err := c.reader.List(ctx, &clusters, client.UnsafeDisableDeepCopy); err != nil {
		log.Log.WithName("claims").Error(err, "listing Clusters for the metrics")
		return
	}
	exist := map[types.NamespacedName]bool{}
	for i := range clusters.Items {
		key := client.ObjectKeyFromObject(&clusters.Items[i])
		exist[key] = true
		if served[key] {
			startSeries(key)
		}
		own, _ := c.bounds.of(&clusters.Items[i])
		for bound, n := range map[Bound]int{BoundLive: own.Claims, BoundCreations: own.Creations, BoundReleases: own.Releases} {
			if _, set := clusters.Items[i].Annotations[annotations[bound]]; set {
				gauge(ownLimitDescription, int64(n), clusters.Items[i].Namespace, clusters.Items[i].Name, string(bound))
			}
		}
	}
	clusterSeries.keep(exist)
	for cluster, n := range kept {
		gauge(keptDescription, n, cluster.Namespace, cluster.Name)
	}
	for g, n := range counts {
		gauge(claimsDescription, n, g.namespace, g.name, string(g.phase))
	}
}

// parts counts the Machines of the ledger by owner. Bound claims are not in the ledger.
func parts(l *protocol.Ledger) map[string]int64 {
	parts := map[string]int64{
		"floor": int64(l.Floor), "spare": int64(l.Spare), "pending": 0, "assigned": 0, "releasing": 0, "replica_removed": 0,
	}
	for _, entry := range l.Pending {
		if entry.UID == "" {
			parts["pending"]++
		} else {
			parts["assigned"]++
		}
	}
	for _, r := range l.Releasing {
		if r.Decremented {
			parts["replica_removed"]++
		} else {
			parts["releasing"]++
		}
	}
	return parts
}
