package catalogue

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// Snapshot is what can be scheduled on at one moment. It is immutable.
type Snapshot struct {
	groups     []*instancetype.Group
	byID       map[string]*instancetype.Group
	sources    map[string]*agentv1alpha1.NodeGroup
	unusable   []*agentv1alpha1.NodeGroup
	invalid    map[string]error
	classes    map[string]*Class
	conditions instancetype.Conditions
	// remembered is what NodeClaims remember, by NodeClass.
	remembered map[string][]instancetype.Remembered
	// untainted holds the ids of groups whose last Node joined without the taint that keeps pods
	// away until it is registered.
	untainted sets.Set[string]
	// refused holds the requirements that no group could serve recently, by NodePool.
	refused map[string][]scheduling.Requirements
	// zonal holds the names of the NodePools that name zones, by NodeClass.
	zonal map[string][]string
	// gone holds the node groups that NodeClaims remember and the agent does not know, with the
	// time since when.
	gone map[string]time.Time
}

func newSnapshot(
	groups []*instancetype.Group, unusable []*agentv1alpha1.NodeGroup, invalid map[string]error, conditions instancetype.Conditions,
) *Snapshot {
	sources := make(map[string]*agentv1alpha1.NodeGroup, len(groups)+len(unusable))
	for _, g := range groups {
		sources[g.ID] = g.Source
	}
	for _, source := range unusable {
		sources[source.GetId()] = source
	}
	return &Snapshot{
		unusable:   unusable,
		groups:     groups,
		byID:       lo.KeyBy(groups, func(g *instancetype.Group) string { return g.ID }),
		invalid:    invalid,
		sources:    sources,
		classes:    map[string]*Class{},
		conditions: conditions,
		remembered: map[string][]instancetype.Remembered{},
	}
}

// Group returns the usable node group with the id, without the view of any NodeClass.
func (s *Snapshot) Group(id string) (*instancetype.Group, bool) {
	group, ok := s.byID[id]
	return group, ok
}

// Source returns the agent's description of the node group with the id, usable or not, and false if
// the agent does not know it.
func (s *Snapshot) Source(id string) (*agentv1alpha1.NodeGroup, bool) {
	source, ok := s.sources[id]
	return source, ok
}

// GoneSince returns the time since when the agent has not known the node group, as far as this
// process observed. It returns false if the agent knows the group or no NodeClaim remembers it. A
// group goes away when its MachineDeployment is deleted or loses the opt-in label.
func (s *Snapshot) GoneSince(id string) (time.Time, bool) {
	since, ok := s.gone[id]
	return since, ok
}

// Len returns the number of usable node groups of the Cluster.
func (s *Snapshot) Len() int { return len(s.groups) }

// Class returns the entry of the ClusterAPINodeClass with the name, and false if there is no such
// NodeClass.
func (s *Snapshot) Class(name string) (*Class, bool) {
	class, ok := s.classes[name]
	return class, ok
}

// Available reports whether a claim on the group could succeed when the snapshot was made.
func (s *Snapshot) Available(group *instancetype.Group) bool { return s.conditions.Available(group) }

// Class is what one ClusterAPINodeClass selects. It is immutable to callers.
type Class struct {
	// Name is the NodeClass's name.
	Name string
	// Generation is the generation of the NodeClass whose selector was used.
	Generation int64
	// Groups are the usable node groups that the selector matches, as the NodeClass sees them,
	// ordered by id.
	Groups []*instancetype.Group
	// Selected are all node groups that the selector matches, unusable ones included, in the form
	// of the NodeClass's status.
	Selected []v1alpha1.SelectedNodeGroup
	// Drift is the NodeClass's policy on the reasons for which Nodes are replaced.
	Drift v1alpha1.DriftPolicy
	// MaxNodeProvisionTime is how long NodeClaims wait for their machines. Nil leaves it to the
	// agent.
	MaxNodeProvisionTime *metav1.Duration
	// Problems are ordered sentences about the selected groups: what the agent could not use, what
	// the shim could not use, including in the NodeClass's own spec, and what prevents groups from
	// being used together.
	Problems []string
	// SelectorError is the reason why the selector is invalid. It then selects nothing.
	SelectorError error

	view       *instancetype.View
	selector   labels.Selector
	conditions instancetype.Conditions
	// taints are the taints of any group. A NodePool that does not declare a group's taints cannot
	// use the group.
	taints []corev1.Taint
	// tooMany are the ids of the groups with a taint that is not in taints, because there are too
	// many. No NodePool can use them.
	tooMany  []string
	variants atomic.Pointer[map[variant][]*cloudprovider.InstanceType]
	mu       sync.Mutex // held to add a variant
	// custom returns the keys of labels that are not well known and in which the groups differ.
	custom func() sets.Set[string]
	// refused holds the requirements that no group could serve, by NodePool.
	refused map[string][]scheduling.Requirements
}

// taintSet is a subset of a class's taints, one bit each.
type taintSet uint64

// variant identifies a set of a class's instance types: those for NodePools that declare the same
// taints, name the same custom labels, and had the same refusals.
type variant struct {
	taints taintSet
	labels string
	// nodePool is empty unless its NodeClaims were refused recently.
	nodePool string
}

// maxTaints is the size of a [taintSet].
const maxTaints = 64

// add adds the Class of a NodeClass to the snapshot. see returns a group in the class's view, from
// a cache if possible.
func (s *Snapshot) add(
	nodeClass *v1alpha1.ClusterAPINodeClass, view *instancetype.View, viewError error,
	see func(*instancetype.Group) *instancetype.Group, before *Snapshot, previous, next instancetype.Built,
) {
	class := &Class{
		Name: nodeClass.Name, Generation: nodeClass.Generation, Drift: nodeClass.Spec.Drift,
		MaxNodeProvisionTime: nodeClass.Spec.MaxNodeProvisionTime, view: view, conditions: s.conditions,
	}
	class.conditions.Remembered = s.remembered[nodeClass.Name]
	selector, err := selectorOf(nodeClass)
	if err != nil {
		class.SelectorError = err
		selector = labels.Nothing()
	}
	class.selector = selector
	for _, g := range s.groups {
		if selector.Matches(labels.Set(g.Source.GetLabels())) {
			class.Groups = append(class.Groups, see(g))
		}
	}
	class.taints, class.tooMany = taintsOf(class.Groups)
	class.custom = sync.OnceValue(func() sets.Set[string] { return differing(class.Groups) })
	class.refused = s.refused
	unusable := lo.Filter(s.unusable, func(source *agentv1alpha1.NodeGroup, _ int) bool {
		return selector.Matches(labels.Set(source.GetLabels()))
	})
	class.Problems = s.problems(class, unusable, viewError)
	class.Selected = s.selected(class.Groups, unusable)
	variants := map[variant][]*cloudprovider.InstanceType{}
	for _, declared := range declaredBefore(before, nodeClass.Name) {
		set := class.declaredBy(declared)
		variants[variant{taints: set}] = class.build(set, class.conditions, nil, previous, next)
	}
	class.variants.Store(&variants)
	s.classes[class.Name] = class
}

// selectorOf returns the selector of a NodeClass. An absent or empty one selects everything.
func selectorOf(nodeClass *v1alpha1.ClusterAPINodeClass) (labels.Selector, error) {
	if nodeClass.Spec.ScalableResourceSelector == nil {
		return labels.Everything(), nil
	}
	selector, err := metav1.LabelSelectorAsSelector(nodeClass.Spec.ScalableResourceSelector)
	if err != nil {
		return nil, fmt.Errorf("spec.scalableResourceSelector: %w", err)
	}
	return selector, nil
}

// taintsOf returns the distinct taints of the groups, and the ids of the groups with one that
// exceeds the maximum number.
func taintsOf(groups []*instancetype.Group) (taints []corev1.Taint, tooMany []string) {
	for _, g := range groups {
		for _, taint := range g.Taints {
			if !slices.Contains(taints, taint) && len(taints) < maxTaints {
				taints = append(taints, taint)
			}
		}
		if !lo.Every(taints, g.Taints) {
			tooMany = append(tooMany, g.ID)
		}
	}
	return taints, tooMany
}

func (s *Snapshot) problems(class *Class, unusable []*agentv1alpha1.NodeGroup, viewError error) []string {
	var problems []string
	if viewError != nil {
		problems = append(problems, viewError.Error())
	}
	describe := func(source *agentv1alpha1.NodeGroup) {
		for _, p := range source.GetProblems() {
			problems = append(problems, fmt.Sprintf("%s: %s=%q: %s", source.GetId(), p.GetField(), p.GetValue(), p.GetMessage()))
		}
		if err := s.invalid[source.GetId()]; err != nil {
			problems = append(problems, err.Error())
		}
	}
	for _, g := range class.Groups {
		describe(g.Source)
		if s.untainted.Has(g.ID) {
			problems = append(problems, fmt.Sprintf("%s: its Nodes join without the taint %s:%s, so that pods may run on them before Karpenter has "+
				"set their labels and taints: have its bootstrap template register Nodes with it, unless the group also has machines of your own",
				g.ID, karpv1.UnregisteredTaintKey, corev1.TaintEffectNoExecute))
		}
	}
	for _, source := range unusable {
		describe(source)
	}
	if len(class.tooMany) > 0 {
		problems = append(problems, fmt.Sprintf("%s: Karpenter launches nothing from them, because the node groups of the class have more than %d "+
			"different taints: use fewer, or select groups with several ClusterAPINodeClasses", instancetype.Enumerate(class.tooMany), maxTaints))
	}
	problems = append(problems, class.withoutEffect()...)
	problems = append(problems, instancetype.Mismatches(class.Groups, instancetype.ZoneUse{
		NodePools: s.zonal[class.Name],
		Observed:  lo.Uniq(lo.FlatMap(class.Groups, func(g *instancetype.Group, _ int) []string { return s.conditions.ObservedZones(g) })),
	})...)
	slices.Sort(problems)
	return problems
}

// withoutEffect names the groups whose Machines Cluster API replaces itself, if the NodeClass
// decides about them: it has no effect there. The default is not reported, as it decides nothing.
func (c *Class) withoutEffect() []string {
	rolling := lo.FilterMap(c.Groups, func(g *instancetype.Group, _ int) (string, bool) {
		return g.ID, g.Source.GetRolloutStrategy() == agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ROLLING_UPDATE
	})
	if c.Drift.MachineNotUpToDate == "" || len(rolling) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s: Cluster API replaces the Machines itself (strategy RollingUpdate), whatever spec.drift.machineNotUpToDate is: "+
		"set spec.rollout.strategy.type of the MachineDeployment to OnDelete, or remove the field from the ClusterAPINodeClass",
		instancetype.Enumerate(rolling))}
}

// declaredBefore returns the distinct sets of taints that NodePools of the class declared against
// the previous snapshot. The next snapshot is built with them, so that callers find their instance
// types ready.
func declaredBefore(before *Snapshot, name string) [][]corev1.Taint {
	declared := [][]corev1.Taint{nil}
	if before == nil {
		return declared
	}
	class, ok := before.classes[name]
	if !ok {
		return declared
	}
	seen := sets.New[taintSet](0)
	for v := range *class.variants.Load() { // of one set, there is a variant for each NodePool that names a label
		if seen.Has(v.taints) {
			continue
		}
		seen.Insert(v.taints)
		declared = append(declared, lo.Filter(class.taints, func(_ corev1.Taint, i int) bool { return v.taints&(1<<i) != 0 }))
	}
	return declared
}

// InstanceTypes returns the instance types for a NodePool by its taints alone. See [Class.For].
func (c *Class) InstanceTypes(taints, startupTaints []corev1.Taint) []*cloudprovider.InstanceType {
	return c.types(variant{taints: c.declaredBy(taints) | c.declaredBy(startupTaints)}, nil)
}

// For returns the instance types for a NodePool. Callers must not modify the slice or the objects.
// A repeated call allocates nothing if the NodePool names no label in which the groups differ.
//
// Groups whose value of such a label does not match the NodePool are left out, and the remaining
// groups get separate offerings for each value. Core has no notion of such labels: it would plan
// Nodes in a zone where only groups with another value exist, and would plan them again as soon as
// no group accepts the NodeClaim.
func (c *Class) For(nodePool *karpv1.NodePool) []*cloudprovider.InstanceType {
	spec := &nodePool.Spec.Template.Spec
	v, named := variant{taints: c.declaredBy(spec.Taints) | c.declaredBy(spec.StartupTaints)}, c.named(nodePool)
	if len(named) > 0 {
		v.labels = instancetype.RequirementsKey(named)
	}
	if len(c.refused[nodePool.Name]) > 0 {
		v.nodePool = nodePool.Name
	}
	return c.types(v, named)
}

// named returns the NodePool's requirements on custom labels in which the groups differ, or nil.
func (c *Class) named(nodePool *karpv1.NodePool) scheduling.Requirements {
	var named scheduling.Requirements
	add := func(requirement *scheduling.Requirement) {
		if named == nil {
			named = scheduling.NewRequirements()
		}
		named.Add(requirement)
	}
	for i := range nodePool.Spec.Template.Spec.Requirements {
		r := &nodePool.Spec.Template.Spec.Requirements[i]
		if !karpv1.WellKnownLabels.Has(r.Key) && c.custom().Has(r.Key) {
			add(scheduling.NewRequirement(r.Key, r.Operator, r.Values...))
		}
	}
	for key, value := range nodePool.Spec.Template.Labels {
		if !karpv1.WellKnownLabels.Has(key) && c.custom().Has(key) {
			add(scheduling.NewRequirement(key, corev1.NodeSelectorOpIn, value))
		}
	}
	return named
}

// differing returns the keys of labels that are not well known and in which the groups differ.
func differing(groups []*instancetype.Group) sets.Set[string] {
	values, times, differ := map[string]string{}, map[string]int{}, sets.New[string]()
	for _, g := range groups {
		for key, value := range g.Labels {
			if karpv1.WellKnownLabels.Has(key) {
				continue
			}
			if first, ok := values[key]; ok && first != value {
				differ.Insert(key)
			}
			values[key] = value
			times[key]++
		}
	}
	for key, n := range times {
		if n < len(groups) {
			differ.Insert(key)
		}
	}
	return differ
}

func (c *Class) types(v variant, named scheduling.Requirements) []*cloudprovider.InstanceType {
	if types, ok := (*c.variants.Load())[v]; ok {
		return types
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known := *c.variants.Load()
	if types, ok := known[v]; ok {
		return types
	}
	more := maps.Clone(known)
	conditions := c.conditions
	conditions.Refused = c.refused[v.nodePool]
	more[v] = c.build(v.taints, conditions, named, instancetype.Built{}, instancetype.Built{})
	c.variants.Store(&more)
	return more[v]
}

func (c *Class) declaredBy(taints []corev1.Taint) taintSet {
	var set taintSet
	for i := range c.taints {
		for j := range taints {
			if taints[j].Key == c.taints[i].Key && taints[j].Value == c.taints[i].Value && taints[j].Effect == c.taints[i].Effect {
				set |= 1 << i
			}
		}
	}
	return set
}

func (c *Class) build(
	declared taintSet, conditions instancetype.Conditions, named scheduling.Requirements, previous, next instancetype.Built,
) []*cloudprovider.InstanceType {
	conditions.Distinguished = slices.Sorted(maps.Keys(named))
	usable := lo.Filter(c.Groups, func(g *instancetype.Group, _ int) bool {
		return g.Requirements.Intersects(named) == nil && lo.EveryBy(g.Taints, func(taint corev1.Taint) bool {
			i := slices.Index(c.taints, taint)
			return i >= 0 && declared&(1<<i) != 0
		})
	})
	return instancetype.Build(usable, conditions, previous, next)
}

// See returns a group in the NodeClass's view, whether or not the selector matches it.
func (c *Class) See(group *instancetype.Group) *instancetype.Group { return c.view.Of(group) }

// Available returns the number of the class's groups that were available when the snapshot was
// built.
func (c *Class) Available() int { return lo.CountBy(c.Groups, c.conditions.Available) }

// Selects reports whether the selector matches the node group, usable or not.
func (c *Class) Selects(source *agentv1alpha1.NodeGroup) bool {
	return c.selector.Matches(labels.Set(source.GetLabels()))
}

// Zones returns the number of distinct failure domains of the class's groups.
func (c *Class) Zones() int {
	return len(lo.Uniq(lo.FilterMap(c.Groups, func(g *instancetype.Group, _ int) (string, bool) {
		return g.Zone, g.Zone != instancetype.ZoneNone
	})))
}

// InstanceTypeNames returns the number of distinct instance types of the class's groups, for any
// NodePool.
func (c *Class) InstanceTypeNames() int {
	return len(lo.UniqBy(c.Groups, func(g *instancetype.Group) string { return g.InstanceType }))
}

// equal reports whether core and the NodeClasses' status see the same in both snapshots.
func (s *Snapshot) equal(other *Snapshot) bool {
	return maps.EqualFunc(s.classes, other.classes, func(a, b *Class) bool {
		return a.Generation == b.Generation &&
			slices.Equal(a.Problems, b.Problems) &&
			fmt.Sprint(a.SelectorError) == fmt.Sprint(b.SelectorError) &&
			slices.Equal(a.Selected, b.Selected) &&
			slices.EqualFunc(a.Groups, b.Groups, func(x, y *instancetype.Group) bool { return x.ID == y.ID }) &&
			slices.Equal((*a.variants.Load())[variant{}], (*b.variants.Load())[variant{}])
	})
}
