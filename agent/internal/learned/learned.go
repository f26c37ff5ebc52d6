// Package learned keeps what real Nodes of each node group look like, as reported by the holders
// of claims: the real capacity of a machine, and what its kubelet reserves.
//
// For each node group it keeps the minimum capacity and the maximum overhead over the Nodes of the
// current template in the latest report that has any, so that anything planned fits every Node.
// Until there is such a Node, those of earlier templates count that differ only in what does not
// change the machine's size, such as the version of Kubernetes. Otherwise a group that depends on
// what is learned could never get the first Node of a new version. The values of a Node are dropped
// with the first report without it. Reports that would be too large omit the oldest Nodes, whose
// values are then dropped as well. Nothing is persisted: after a restart, the next report supplies
// the same values again.
package learned

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
)

// maxResources limits the resources remembered per group, whatever its Nodes report.
const maxResources = 32

// Node is the report about a real Node.
type Node struct {
	ProviderID            string
	Capacity, Allocatable corev1.ResourceList
	Labels                map[string]string
	// Unregistered means that nothing runs on the Node yet. It may not report all of its resources
	// yet.
	Unregistered bool
	// Unusable is the number of the Node's quantities that could not be parsed. They are missing
	// here.
	Unusable int
}

// Config configures [Nodes].
type Config struct {
	// Client reads from caches with the indexes of package hub. REQUIRED.
	Client client.Reader
	// Registerer registers the metrics. Nil registers none.
	Registerer prometheus.Registerer
	// Clock measures how long a Node has been unregistered. Nil means the system clock.
	Clock clock.PassiveClock
}

// Nodes remembers what Nodes reported. It is safe for concurrent use.
type Nodes struct {
	Config

	changes  chan event.TypedGenericEvent[types.NamespacedName]
	unusable prometheus.Counter

	mu     sync.Mutex
	groups map[types.NamespacedName]shown
	// unsent are the groups that have changed and are not in changes yet.
	unsent sets.Set[types.NamespacedName]
	// These describe unregistered Nodes. By Cluster: waiting is since when each has been reported
	// as unregistered, reportedAt is the time of the last report, strandedOf are the groups with
	// stranded Machines. By group: stranded are these Machines.
	waiting    map[types.NamespacedName]waiting
	reportedAt map[types.NamespacedName]time.Time
	stranded   map[types.NamespacedName]strandedMachines
	strandedOf map[types.NamespacedName]map[types.NamespacedName]bool
}

// shown summarizes the Nodes of one group and one revision of its template. It is immutable, and
// replaced as a whole.
type shown struct {
	revisions
	// earlier means that the Nodes are of earlier revisions.
	earlier bool
	capacity.Learned
}

// revisions are what distinguishes templates: all of the machine, and its size alone. Both are
// empty if there is no template.
type revisions struct{ machine, infrastructure string }

func revisionsOf(template *clusterv1.MachineSpec) revisions {
	return revisions{nodegroup.MachineRevision(template), nodegroup.InfrastructureRevision(template)}
}

// New returns empty Nodes.
func New(c Config) (*Nodes, error) {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	n := &Nodes{
		Config:     c,
		changes:    make(chan event.TypedGenericEvent[types.NamespacedName], 1024),
		groups:     map[types.NamespacedName]shown{},
		unsent:     sets.Set[types.NamespacedName]{},
		waiting:    map[types.NamespacedName]waiting{},
		reportedAt: map[types.NamespacedName]time.Time{},
		stranded:   map[types.NamespacedName]strandedMachines{},
		strandedOf: map[types.NamespacedName]map[types.NamespacedName]bool{},
		unusable: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "capi_agent_node_report_unusable_values_total",
			Help: "Quantities in reports about Nodes that were ignored because they could not be parsed.",
		}),
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(n.unusable); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return n, nil
}

// Changes returns a channel of the groups whose observations have changed. It must have one reader.
func (n *Nodes) Changes() <-chan event.TypedGenericEvent[types.NamespacedName] { return n.changes }

// Of returns the observation of a group's Nodes that were created from its template, or from an
// earlier one with the same infrastructure template. It is shared and must not be modified.
func (n *Nodes) Of(group types.NamespacedName, template *clusterv1.MachineSpec) capacity.Learned {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch known := n.groups[group]; {
	case known.infrastructure != nodegroup.InfrastructureRevision(template):
		return capacity.Learned{}
	case known.machine != nodegroup.MachineRevision(template):
		return withoutPlace(known.Learned)
	default:
		return known.Learned
	}
}

// withoutPlace returns an observation of Nodes of an earlier template without their zone and
// region, which may be elsewhere now.
func withoutPlace(o capacity.Learned) capacity.Learned {
	o.Labels = lo.OmitByKeys(o.Labels, []string{corev1.LabelTopologyZone, corev1.LabelTopologyRegion})
	return o
}

// Forget drops the observations of a group.
func (n *Nodes) Forget(group types.NamespacedName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.groups, group)
	delete(n.stranded, group)
}

// ForgetCluster drops what is kept of a Cluster, apart from the observations of its groups.
func (n *Nodes) ForgetCluster(cluster types.NamespacedName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for group := range n.strandedOf[cluster] {
		delete(n.stranded, group)
	}
	delete(n.waiting, cluster)
	delete(n.reportedAt, cluster)
	delete(n.strandedOf, cluster)
}

// Report processes a report about a Cluster's Nodes. Nodes that are unregistered or report no
// capacity are not learned from. Neither are Nodes whose Machine is not known, belongs to another
// Cluster, or was created from another infrastructure template than that of its group.
func (n *Nodes) Report(ctx context.Context, cluster types.NamespacedName, nodes []Node) {
	for _, group := range n.takeUnsent() {
		n.notify(ctx, group)
	}
	report := report{n: n, cluster: cluster, templates: map[types.NamespacedName]revisions{}, groups: map[types.NamespacedName]*member{}}
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
		if n.update(key, group) {
			n.notify(ctx, key)
		}
	}
	n.reportStranded(ctx, &report, nodes)
}

// notify publishes that the observations of a group have changed. If the call has ended and the
// channel is full, the next report does so.
func (n *Nodes) notify(ctx context.Context, group types.NamespacedName) {
	change := event.TypedGenericEvent[types.NamespacedName]{Object: group}
	select { // with both cases below ready, one would be chosen at random
	case n.changes <- change:
		return
	default:
	}
	select {
	case n.changes <- change:
	case <-ctx.Done():
		n.mu.Lock()
		defer n.mu.Unlock()
		n.unsent.Insert(group)
	}
}

// takeUnsent returns the groups whose changes could not be published.
func (n *Nodes) takeUnsent() []types.NamespacedName {
	n.mu.Lock()
	defer n.mu.Unlock()
	groups := n.unsent.UnsortedList()
	n.unsent.Clear()
	return groups
}

// member is a node group with the reported Nodes of its current template, and of earlier ones with
// the same infrastructure template.
type member struct {
	revisions      // empty if there is no such node group in the Cluster
	nodes, earlier []*Node
}

// report assigns the Nodes of one report to their groups. It reads each object once.
type report struct {
	n         *Nodes
	cluster   types.NamespacedName
	templates map[types.NamespacedName]revisions // by MachineSet
	groups    map[types.NamespacedName]*member
	// machines are the Cluster's Machines by provider ID; nil for an ID that several Machines have.
	// The map is nil until it is needed.
	machines map[string]*clusterv1.Machine
}

func (r *report) add(ctx context.Context, node *Node) error {
	machine, err := r.machine(ctx, node.ProviderID)
	if err != nil || machine == nil {
		return err
	}
	group, err := r.group(ctx, machine.Labels[clusterv1.MachineDeploymentNameLabel])
	if err != nil || group.revisions == (revisions{}) {
		return err
	}
	owner := metav1.GetControllerOf(machine)
	if owner == nil || owner.Kind != "MachineSet" {
		return nil
	}
	of, err := r.template(ctx, owner.Name)
	switch {
	case err != nil:
		return err
	case of == group.revisions:
		group.nodes = append(group.nodes, node)
	case of.infrastructure == group.infrastructure:
		group.earlier = append(group.earlier, node)
	}
	return nil
}

// group returns a node group of the Cluster. It has no revisions if there is no group with that
// name.
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
		group.revisions = revisionsOf(&md.Spec.Template.Spec)
	}
	r.groups[key] = group
	return group, nil
}

// template returns the revisions of a MachineSet's template. They are empty if there is no such
// MachineSet.
func (r *report) template(ctx context.Context, name string) (revisions, error) {
	key := types.NamespacedName{Namespace: r.cluster.Namespace, Name: name}
	if known, ok := r.templates[key]; ok {
		return known, nil
	}
	var ms clusterv1.MachineSet
	err := r.n.Client.Get(ctx, key, &ms)
	if client.IgnoreNotFound(err) != nil {
		return revisions{}, fmt.Errorf("reading the MachineSet: %w", err)
	}
	var of revisions
	if err == nil {
		of = revisionsOf(&ms.Spec.Template.Spec)
	}
	r.templates[key] = of
	return of, nil
}

// update replaces the observation of a group by that of its reported Nodes, and reports whether it
// changed.
func (n *Nodes) update(key types.NamespacedName, group *member) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	known := n.groups[key]
	next := shown{revisions: group.revisions, earlier: len(group.nodes) == 0}
	nodes := group.nodes
	if next.earlier {
		nodes = group.earlier
	}
	if len(nodes) == 0 || next.earlier && !known.earlier && known.revisions == next.revisions {
		return false
	}
	next.Learned = summarize(nodes)
	if next.earlier {
		next.Learned = withoutPlace(next.Learned)
	}
	if known.revisions == next.revisions && known.earlier == next.earlier && equality.Semantic.DeepEqual(known.Learned, next.Learned) {
		return false
	}
	n.groups[key] = next
	return true
}

// reserved are the resources that kubelets reserve a part of.
var reserved = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods}

// summarize returns what is learned from Nodes. There must be at least one.
func summarize(nodes []*Node) capacity.Learned {
	o := capacity.Learned{
		Capacity: corev1.ResourceList{}, Allocatable: corev1.ResourceList{}, Overhead: corev1.ResourceList{}, Labels: map[string]string{},
	}
	disputed := map[string]bool{}
	for _, node := range nodes {
		add(&o, node)
		for _, label := range capacity.LearnedLabels {
			value := node.Labels[label]
			if value == "" || len(validation.IsValidLabelValue(value)) > 0 {
				continue
			}
			disputed[label] = disputed[label] || o.Labels[label] != "" && o.Labels[label] != value
			o.Labels[label] = value
		}
	}
	maps.DeleteFunc(o.Labels, func(label, _ string) bool { return disputed[label] })
	// Every machine has the usual resources, even if a Node does not report them. Any other
	// resource is only attributed to the group if all of its Nodes have it.
	maps.DeleteFunc(o.Capacity, func(name corev1.ResourceName, _ resource.Quantity) bool {
		return !slices.Contains(reserved, name) && slices.ContainsFunc(nodes, func(node *Node) bool {
			quantity := node.Capacity[name]
			return quantity.Sign() <= 0
		})
	})
	return o
}

func add(o *capacity.Learned, node *Node) {
	set := func(list corev1.ResourceList, name corev1.ResourceName, quantity resource.Quantity, better func(order int) bool) {
		known, ok := list[name]
		if !ok && len(list) >= maxResources || ok && !better(quantity.Cmp(known)) {
			return
		}
		list[name] = quantity
	}
	less := func(order int) bool { return order < 0 }
	more := func(order int) bool { return order > 0 }
	// The order is fixed, so that a Node with too many resources always omits the same ones.
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

// isLearned reports whether a resource is a property of machines, rather than a quantity that
// Kubernetes defines itself.
func isLearned(name corev1.ResourceName) bool {
	_, ofMachines := capacity.ResourceUnit(name)
	return ofMachines || slices.Contains(reserved, name)
}
