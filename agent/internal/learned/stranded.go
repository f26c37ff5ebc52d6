package learned

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	// strandedAfter is how long the Node of an unclaimed Machine must have been reported as
	// unregistered to be a problem. Until then it may be booting, or be a spare that is about to be
	// bound or removed.
	strandedAfter = 10 * time.Minute
	// ReportLife is how long a report about unregistered Nodes is valid. Holders repeat their
	// report every minute, each time to one of the agents. An agent that received no recent report
	// must not use an old one.
	ReportLife = 5 * time.Minute
	// strandedShown is how many of these Machines a problem lists.
	strandedShown = 3
)

// waiting maps the provider IDs of a Cluster's Nodes to the time since when they have been reported
// as unregistered. Only those of the Cluster's Machines are kept, whatever is reported. A restart
// of the agent, or a report without the Node, resets it.
type waiting map[string]time.Time

// strandedMachines are the sorted names of a group's stranded Machines, and the time of the report.
type strandedMachines struct {
	names []string
	at    time.Time
}

// Stranded returns a problem if unclaimed Machines of the group have joined with Karpenter's taint
// for unregistered Nodes, and have kept it for longer than the agent needs to mark them as the
// floor's and the shim needs to remove the taint. It returns nil if there are none.
func (n *Nodes) Stranded(group types.NamespacedName) *capacity.Problem {
	n.mu.Lock()
	known := n.stranded[group]
	n.mu.Unlock()
	if len(known.names) == 0 || n.Clock.Since(known.at) > ReportLife {
		return nil
	}
	names := known.names
	shown := names[:min(len(names), strandedShown)]
	value := strings.Join(shown, ", ")
	if len(names) > len(shown) {
		// The count is omitted: each new count would be another problem, and another event.
		value += ", …"
	}
	return &capacity.Problem{
		Field: "spec.template.spec.bootstrap", Value: value,
		Message: "the Nodes of these Machines have had the taint karpenter.sh/unregistered for ten minutes, so no pods run on them. The " +
			"Machines have no claim. In that case the agent marks them as part of the floor, and then the shim removes the taint. One of the two " +
			"has not happened: the node group or its Cluster is paused, or the agent and the shim have different versions. See their logs, or " +
			"remove the taint yourself (kubectl taint node <name> karpenter.sh/unregistered-)",
	}
}

// reportStranded processes which Nodes of a Cluster are unregistered, and publishes the groups that
// change.
func (n *Nodes) reportStranded(ctx context.Context, r *report, nodes []Node) {
	now := n.Clock.Now()
	n.mu.Lock()
	before := n.waiting[r.cluster]
	if now.Sub(n.reportedAt[r.cluster]) > ReportLife {
		// Meanwhile the Nodes may have been registered and others may have joined.
		before = nil
	}
	n.reportedAt[r.cluster] = now
	n.mu.Unlock()
	next := waiting{}
	found := map[types.NamespacedName][]string{}
	for i := range nodes {
		id := nodes[i].ProviderID
		if id == "" || !nodes[i].Unregistered {
			continue
		}
		if m, err := r.machine(ctx, id); err != nil {
			log.FromContext(ctx).Error(err, "a report of unregistered Nodes is ignored", "cluster", r.cluster.String())
			return
		} else if m == nil {
			continue
		}
		since, known := before[id]
		if !known {
			since = now
		}
		next[id] = since
		if now.Sub(since) < strandedAfter {
			continue
		}
		key, name, err := r.unclaimed(ctx, id)
		if err != nil {
			log.FromContext(ctx).Error(err, "an unregistered Node is ignored", "providerID", id)
		} else if name != "" {
			found[key] = append(found[key], name)
		}
	}
	for _, key := range n.replaceStranded(r.cluster, next, found) {
		n.notify(ctx, key)
	}
}

// replaceStranded stores the result of a report, and returns the groups that have changed.
func (n *Nodes) replaceStranded(cluster types.NamespacedName, next waiting, found map[types.NamespacedName][]string) []types.NamespacedName {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waiting[cluster] = next
	changed := map[types.NamespacedName]bool{}
	for key := range n.strandedOf[cluster] {
		if len(found[key]) == 0 {
			delete(n.stranded, key)
			changed[key] = true
		}
	}
	groups := map[types.NamespacedName]bool{}
	for key, names := range found {
		slices.Sort(names)
		groups[key] = true
		if !slices.Equal(n.stranded[key].names, names) {
			changed[key] = true
		}
		n.stranded[key] = strandedMachines{names: names, at: n.Clock.Now()}
	}
	n.strandedOf[cluster] = groups
	return slices.Collect(maps.Keys(changed))
}

// unclaimed returns the Machine with the provider ID and its node group, if the Machine is
// unclaimed. Otherwise the names are empty.
func (r *report) unclaimed(ctx context.Context, providerID string) (group types.NamespacedName, machine string, err error) {
	m, err := r.machine(ctx, providerID)
	if err != nil || m == nil || !m.DeletionTimestamp.IsZero() || protocol.ClaimOf(m) != "" {
		return types.NamespacedName{}, "", err
	}
	name := m.Labels[clusterv1.MachineDeploymentNameLabel]
	known, err := r.group(ctx, name)
	if err != nil || known.revisions == (revisions{}) {
		return types.NamespacedName{}, "", err
	}
	return types.NamespacedName{Namespace: r.cluster.Namespace, Name: name}, m.Name, nil
}

// machine returns the Cluster's only Machine with the provider ID, or nil. It must not be modified.
func (r *report) machine(ctx context.Context, providerID string) (*clusterv1.Machine, error) {
	if r.machines != nil {
		return r.machines[providerID], nil
	}
	var list clusterv1.MachineList
	err := r.n.Client.List(ctx, &list, client.InNamespace(r.cluster.Namespace),
		client.MatchingFields{hub.ByCluster: r.cluster.Name}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("looking up the Cluster's Machines: %w", err)
	}
	r.machines = make(map[string]*clusterv1.Machine, len(list.Items))
	for i := range list.Items {
		m := &list.Items[i]
		if _, another := r.machines[m.Spec.ProviderID]; another {
			m = nil
		}
		r.machines[list.Items[i].Spec.ProviderID] = m
	}
	return r.machines[providerID], nil
}
