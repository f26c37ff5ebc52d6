// Package observed keeps what real Nodes of each node group showed, as the holders of claims report it: what a machine really
// has, and what its kubelet keeps back.
//
// Of all Nodes of a group's present template in the last report that has any, the least capacity and the most overhead are kept, so
// that what is planned with them fits on any. A Node that was worse than the others is forgotten with the first report without it.
// So are the oldest Nodes of a report that would be too large, which leaves them out. Nothing is stored: after a restart the next
// report teaches the same again.
package observed

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
)

// maxResources bounds what is remembered of one group, whatever its Nodes claim to have.
const maxResources = 32

// Node is what one real Node looks like.
type Node struct {
	ProviderID            string
	Capacity, Allocatable corev1.ResourceList
	Labels                map[string]string
	// Unregistered says that nothing runs on the Node yet, so that it may not show all that it has.
	Unregistered bool
	// Unusable is how many of the Node's quantities could not be read, and are left out here.
	Unusable int
}

// Config is what [Nodes] need.
type Config struct {
	// Client reads from caches with the indexes of package hub. REQUIRED.
	Client client.Reader
	// Registerer takes the metrics. Nil registers none.
	Registerer prometheus.Registerer
	// Clock tells for how long a Node has been unregistered. Nil means the real one.
	Clock clock.PassiveClock
}

// Nodes remembers what Nodes showed. It is safe for concurrent use.
type Nodes struct {
	Config

	changes  chan event.TypedGenericEvent[types.NamespacedName]
	unusable prometheus.Counter

	mu     sync.Mutex
	groups map[types.NamespacedName]shown
	// Of Nodes that are unregistered: since when, and when they were last reported, by Cluster; the Machines of those that are stranded,
	// by group; which groups of a Cluster have such Machines.
	waiting    map[types.NamespacedName]waiting
	reportedAt map[types.NamespacedName]time.Time
	stranded   map[types.NamespacedName]strandedMachines
	strandedOf map[types.NamespacedName]map[types.NamespacedName]bool
}

// shown is what the Nodes of one group showed, of one revision of its template. It is not changed, but replaced.
type shown struct {
	revision string
	capacity.Observation
}

// New returns nodes of which nothing is known.
func New(c Config) (*Nodes, error) {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	n := &Nodes{
		Config:     c,
		changes:    make(chan event.TypedGenericEvent[types.NamespacedName], 1024),
		groups:     map[types.NamespacedName]shown{},
		waiting:    map[types.NamespacedName]waiting{},
		reportedAt: map[types.NamespacedName]time.Time{},
		stranded:   map[types.NamespacedName]strandedMachines{},
		strandedOf: map[types.NamespacedName]map[types.NamespacedName]bool{},
		unusable: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "capi_agent_node_report_unusable_values_total",
			Help: "Quantities in reports about Nodes that could not be read and were ignored.",
		}),
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(n.unusable); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return n, nil
}

// Changes tells of each group that something new is known about. It has one reader.
func (n *Nodes) Changes() <-chan event.TypedGenericEvent[types.NamespacedName] { return n.changes }

// Of returns what the Nodes of a group showed that were made from the template of that revision; see [nodegroup.MachineRevision].
// It is shared and must not be changed.
func (n *Nodes) Of(group types.NamespacedName, revision string) capacity.Observation {
	n.mu.Lock()
	defer n.mu.Unlock()
	if known := n.groups[group]; known.revision == revision {
		return known.Observation
	}
	return capacity.Observation{}
}

// Forget drops what is known about a group.
func (n *Nodes) Forget(group types.NamespacedName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.groups, group)
	delete(n.stranded, group)
}

// Report takes what the Nodes of a Cluster look like now. Nodes that do not say what they have, and those whose Machine is not
// known, not of this Cluster or not of its group's present template, teach nothing.
func (n *Nodes) Report(ctx context.Context, cluster types.NamespacedName, nodes []Node) {
	report := report{n: n, cluster: cluster, templates: map[types.NamespacedName]string{}, groups: map[types.NamespacedName]*member{}}
	for i := range nodes {
		n.unusable.Add(float64(nodes[i].Unusable))
		if nodes[i].ProviderID == "" || nodes[i].Unregistered || len(nodes[i].Capacity) == 0 {
			continue
		}
		if err := report.add(ctx, &nodes[i]); err != nil {
			log.FromContext(ctx).Error(err, "nothing is learned from a Node", "providerID", nodes[i].ProviderID)
		}
	}
	for key, group := range report.groups {
		if len(group.nodes) > 0 && n.learn(key, group) {
			n.tell(ctx, key)
		}
	}
	n.reportStranded(ctx, &report, nodes)
}

// tell says that something new is known about a group, unless the call has ended.
func (n *Nodes) tell(ctx context.Context, group types.NamespacedName) {
	select {
	case n.changes <- event.TypedGenericEvent[types.NamespacedName]{Object: group}:
	case <-ctx.Done():
	}
}

// member is a node group and the reported Nodes of its present template.
type member struct {
	revision string // empty for what is no node group of the Cluster
	nodes    []*Node
}

// report puts the Nodes of one report to their groups. It reads each object once.
type report struct {
	n         *Nodes
	cluster   types.NamespacedName
	templates map[types.NamespacedName]string // revision by MachineSet
	groups    map[types.NamespacedName]*member
	machines  map[string]*clusterv1.Machine // the Cluster's by provider ID; nil for one that several have. Nil before it is asked for.
}

func (r *report) add(ctx context.Context, node *Node) error {
	machine, err := r.machine(ctx, node.ProviderID)
	if err != nil || machine == nil {
		return err
	}
	group, err := r.group(ctx, machine.Labels[clusterv1.MachineDeploymentNameLabel])
	if err != nil || group.revision == "" {
		return err
	}
	owner := metav1.GetControllerOf(machine)
	if owner == nil || owner.Kind != "MachineSet" {
		return nil
	}
	revision, err := r.template(ctx, owner.Name)
	if err != nil || revision != group.revision {
		return err
	}
	group.nodes = append(group.nodes, node)
	return nil
}

// group returns a node group of the Cluster; one without a revision when there is none of that name.
func (r *report) group(ctx context.Context, name string) (*member, error) {
	key := types.NamespacedName{Namespace: r.cluster.Namespace, Name: name}
	if known := r.groups[key]; known != nil {
		return known, nil
	}
	var md clusterv1.MachineDeployment
	if err := r.n.Client.Get(ctx, key, &md); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	group := &member{}
	if nodegroup.IsMember(&md) && md.Spec.ClusterName == r.cluster.Name {
		group.revision = nodegroup.MachineRevision(&md.Spec.Template.Spec)
	}
	r.groups[key] = group
	return group, nil
}

// template returns the revision of a MachineSet's template, or "" when there is no such MachineSet.
func (r *report) template(ctx context.Context, name string) (string, error) {
	key := types.NamespacedName{Namespace: r.cluster.Namespace, Name: name}
	if known, ok := r.templates[key]; ok {
		return known, nil
	}
	var ms clusterv1.MachineSet
	err := r.n.Client.Get(ctx, key, &ms)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("reading the MachineSet: %w", err)
	}
	revision := ""
	if err == nil {
		revision = nodegroup.MachineRevision(&ms.Spec.Template.Spec)
	}
	r.templates[key] = revision
	return revision, nil
}

// learn replaces what is known of a group by what its Nodes show now, and reports whether any of it is new.
func (n *Nodes) learn(key types.NamespacedName, group *member) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	known := n.groups[key]
	next := shown{revision: group.revision, Observation: observe(group.nodes)}
	if known.revision == next.revision && equality.Semantic.DeepEqual(known.Observation, next.Observation) {
		return false
	}
	n.groups[key] = next
	return true
}

// reserved are the resources that kubelets keep some of.
var reserved = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods}

// observe returns what Nodes show, of which there is one at least.
func observe(nodes []*Node) capacity.Observation {
	o := capacity.Observation{
		Capacity: corev1.ResourceList{}, Allocatable: corev1.ResourceList{}, Overhead: corev1.ResourceList{}, Labels: map[string]string{},
	}
	disputed := map[string]bool{}
	for _, node := range nodes {
		add(&o, node)
		for _, label := range capacity.ObservedLabels {
			value := node.Labels[label]
			if value == "" || len(validation.IsValidLabelValue(value)) > 0 {
				continue
			}
			disputed[label] = disputed[label] || o.Labels[label] != "" && o.Labels[label] != value
			o.Labels[label] = value
		}
	}
	maps.DeleteFunc(o.Labels, func(label, _ string) bool { return disputed[label] })
	// Every machine has some of the usual resources, also where a Node does not say how much. Of another one the group has only
	// what all of its Nodes have.
	maps.DeleteFunc(o.Capacity, func(name corev1.ResourceName, _ resource.Quantity) bool {
		return !slices.Contains(reserved, name) && slices.ContainsFunc(nodes, func(node *Node) bool {
			quantity := node.Capacity[name]
			return quantity.Sign() <= 0
		})
	})
	return o
}

func add(o *capacity.Observation, node *Node) {
	set := func(list corev1.ResourceList, name corev1.ResourceName, quantity resource.Quantity, better func(order int) bool) {
		known, ok := list[name]
		if !ok && len(list) >= maxResources || ok && !better(quantity.Cmp(known)) {
			return
		}
		list[name] = quantity
	}
	less := func(order int) bool { return order < 0 }
	more := func(order int) bool { return order > 0 }
	// In order, so that a Node with too many leaves out the same ones each time.
	for _, name := range slices.Sorted(maps.Keys(node.Capacity)) {
		if quantity := node.Capacity[name]; isLearned(name) && quantity.Sign() > 0 {
			set(o.Capacity, name, quantity, less)
		}
	}
	for _, name := range reserved {
		has, gives := node.Capacity[name], node.Allocatable[name]
		if has.Sign() <= 0 || gives.Sign() <= 0 {
			continue
		}
		set(o.Allocatable, name, gives, less)
		kept := has.DeepCopy()
		kept.Sub(gives)
		if kept.Sign() >= 0 {
			set(o.Overhead, name, kept, more)
		}
	}
}

// isLearned reports whether a resource is one that machines have, rather than one that Kubernetes counts in its own way.
func isLearned(name corev1.ResourceName) bool {
	return slices.Contains(reserved, name) || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) ||
		strings.Contains(string(name), "/") && len(validation.IsQualifiedName(string(name))) == 0
}
