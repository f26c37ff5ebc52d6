package observed

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

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

const (
	// strandedAfter is how long the Node of a Machine that no claim has must have been reported as unregistered to be a problem:
	// it may be booting, or be a spare that is about to be given to a claim or removed.
	strandedAfter = 10 * time.Minute
	// reportLife is how long a report counts. Holders repeat it each minute, to one of the agents: another one's is from before.
	reportLife = 5 * time.Minute
	// strandedShown is how many of these Machines a problem names.
	strandedShown = 3
)

// waiting is since when the Nodes of one Cluster have been reported as unregistered, by provider ID. A restart of the agent, or a
// report that left a Node out, begins anew.
type waiting map[string]time.Time

// strandedMachines are the names of such Machines of one group, in order, and when they were reported.
type strandedMachines struct {
	names []string
	at    time.Time
}

// Stranded says that Machines of the group that no claim has joined with Karpenter's taint for Nodes that are not registered, and
// kept it for longer than the agent takes to mark them as the floor's, and the shim to take it off; nil when there are none.
func (n *Nodes) Stranded(group types.NamespacedName) *capacity.Problem {
	n.mu.Lock()
	known := n.stranded[group]
	n.mu.Unlock()
	if len(known.names) == 0 || n.Clock.Since(known.at) > reportLife {
		return nil
	}
	names := known.names
	shown := names[:min(len(names), strandedShown)]
	value := strings.Join(shown, ", ")
	if len(names) > len(shown) {
		value += ", …" // no number: each would be another problem, and another event
	}
	return &capacity.Problem{
		Field: "spec.template.spec.bootstrap", Value: value,
		Message: "the Nodes of these Machines keep the taint karpenter.sh/unregistered, so that no pod runs on them. Their Machines have no " +
			"claim, so that the shim is to take the taint off once the agent has marked them as the floor's, and for ten minutes one of the two " +
			"has not: the node group or its Cluster is paused, or one of them is older than the other. See their logs, or take it off these " +
			"Nodes yourself (kubectl taint node <name> karpenter.sh/unregistered-)",
	}
}

// reportStranded takes which Nodes of a Cluster are unregistered, and tells of the groups for which that makes a difference.
func (n *Nodes) reportStranded(ctx context.Context, r *report, nodes []Node) {
	now := n.Clock.Now()
	n.mu.Lock()
	before := n.waiting[r.cluster]
	if now.Sub(n.reportedAt[r.cluster]) > reportLife {
		before = nil // the Nodes may have been registered meanwhile, and others have come
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
			log.FromContext(ctx).Error(err, "an unregistered Node is not looked at", "providerID", id)
		} else if name != "" {
			found[key] = append(found[key], name)
		}
	}
	for _, key := range n.replaceStranded(r.cluster, next, found) {
		n.tell(ctx, key)
	}
}

// replaceStranded keeps what a report showed, and returns the groups of which something else is known now.
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

// unclaimed returns the Machine with the provider ID, and its node group, if no claim has it; "" when there is none.
func (r *report) unclaimed(ctx context.Context, providerID string) (group types.NamespacedName, machine string, err error) {
	m, err := r.machine(ctx, providerID)
	if err != nil || m == nil || !m.DeletionTimestamp.IsZero() || m.Labels[v1alpha1.ClaimLabel] != "" {
		return types.NamespacedName{}, "", err
	}
	name := m.Labels[clusterv1.MachineDeploymentNameLabel]
	known, err := r.group(ctx, name)
	if err != nil || known.revision == "" {
		return types.NamespacedName{}, "", err
	}
	return types.NamespacedName{Namespace: r.cluster.Namespace, Name: name}, m.Name, nil
}

// machine returns the Cluster's only Machine with the provider ID, or nil. It must not be changed.
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
