package instancetype

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// Reservations registers the reservation label with core. Call it before core's controllers are
// constructed.
func Reservations() {
	cloudprovider.ReservationIDLabel = v1alpha1.ReservationLabel
	cloudprovider.ReservedCapacityLabels.Insert(v1alpha1.ReservationLabel)
	karpv1.WellKnownLabels.Insert(v1alpha1.ReservationLabel)
}

// Conditions holds what can change about a group without a change of the agent's description.
type Conditions struct {
	// Available reports whether a claim on the group may succeed now.
	Available func(*Group) bool
	// OfferFull offers a full reservation as available with nothing left, so that core knows that
	// there is room again once one of its machines is deleted. With core's feature gate
	// ReservedCapacity off, core would plan machines there.
	OfferFull bool
	// ObservedZones returns the zones in which machines of a group without a zone were found. Their
	// offerings are never available, but must exist: core looks up prices in them, and treats a
	// Node without an offering as drifted.
	ObservedZones func(*Group) []string
	// Remembered holds what NodeClaims remember, from [Remember]. It becomes offerings that are not
	// available. Core treats a Node without an offering as drifted, whatever the drift policy, and
	// never consolidates it.
	Remembered []Remembered
	// Distinguished holds the keys of labels that the NodePool names and that are not well known.
	// Groups of one instance type that differ in such a label get separate offerings. Core accepts
	// such a key in an offering only for a NodePool that names it.
	Distinguished []string
	// Refused holds requirements that no group could serve recently. Offerings that match any of
	// them are not available.
	Refused []scheduling.Requirements
}

// offersFull reports whether the group is offered although it is full.
func (c Conditions) offersFull(g *Group) bool { return c.OfferFull && g.full() }

// refuses reports whether a recently refused NodeClaim would have accepted the offering.
func (c Conditions) refuses(instanceType string, offering *cloudprovider.Offering) bool {
	return slices.ContainsFunc(c.Refused, func(refused scheduling.Requirements) bool {
		return refused.Get(corev1.LabelInstanceTypeStable).Has(instanceType) && offering.Requirements.Intersects(refused) == nil
	})
}

// Built caches instance types by their input, so that [Build] returns the same objects for the same
// input. This keeps core's memoized results, and lets callers detect an unchanged type by its
// pointer.
type Built map[string]*cloudprovider.InstanceType

// Build returns one InstanceType per name, ordered by name. It reuses objects from previous and
// adds everything that it returns to next. Callers must not modify the slice or the objects.
func Build(groups []*Group, conditions Conditions, previous, next Built) []*cloudprovider.InstanceType {
	byName := lo.GroupBy(groups, func(g *Group) string { return g.InstanceType })
	remembered := lo.GroupBy(conditions.Remembered, func(r Remembered) string { return r.InstanceType })
	for name := range remembered {
		byName[name] = append([]*Group(nil), byName[name]...)
	}
	types := make([]*cloudprovider.InstanceType, 0, len(byName))
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		members := byName[name]
		slices.SortFunc(members, func(a, b *Group) int { return strings.Compare(a.ID, b.ID) })
		key := keyOf(name, members, remembered[name], conditions)
		instanceType, ok := next[key]
		if !ok {
			if instanceType, ok = previous[key]; !ok {
				instanceType = build(name, members, remembered[name], conditions)
			}
			next[key] = instanceType
		}
		types = append(types, instanceType)
	}
	return types
}

func keyOf(name string, groups []*Group, remembered []Remembered, conditions Conditions) string {
	var key strings.Builder
	key.Grow(len(name) + 16*len(groups))
	key.WriteString(name)
	var digits [16]byte
	for _, g := range groups {
		key.WriteByte('|')
		key.Write(strconv.AppendUint(digits[:0], g.fingerprint, 36))
		switch {
		case conditions.Available(g):
			key.WriteByte('+')
		case conditions.offersFull(g):
			key.WriteByte('0')
		default:
			key.WriteByte('-')
		}
		for _, zone := range conditions.ObservedZones(g) {
			key.WriteByte(',')
			key.WriteString(zone)
		}
	}
	for _, r := range remembered {
		key.WriteString(r.key())
	}
	return key.String()
}

func build(name string, groups []*Group, remembered []Remembered, conditions Conditions) *cloudprovider.InstanceType {
	if len(groups) == 0 {
		return gone(name, remembered)
	}
	described := withCapacity(groups)
	capacity := smallest(described)
	return &cloudprovider.InstanceType{
		Name:                   name,
		Requirements:           typeRequirements(groups),
		Offerings:              offerings(groups, remembered, conditions),
		Capacity:               capacity,
		Overhead:               commonOverhead(described, capacity),
		VolumeAttachmentLimits: leastVolumes(described),
		DynamicResources:       cloudprovider.DynamicResources{ResourceSliceTemplates: sliceTemplates(leastDevices(described))},
	}
}

// withCapacity drops the groups whose capacity is unknown, which nothing is launched from: they
// must not reduce the capacity of the others of their instance type. If no group has a known
// capacity, it returns all groups.
func withCapacity(groups []*Group) []*Group {
	described := lo.Filter(groups, func(g *Group, _ int) bool { return g.NoCapacity == "" })
	return lo.Ternary(len(described) > 0, described, groups)
}

// smallest returns the minimum of each resource over all groups; a resource that any group lacks is
// omitted. If core planned with more than the machine has, it would launch another machine for the
// pods that did not fit, and so on.
func smallest(groups []*Group) corev1.ResourceList {
	least := maps.Clone(groups[0].Capacity)
	for _, g := range groups[1:] {
		maps.DeleteFunc(least, func(name corev1.ResourceName, _ resource.Quantity) bool {
			_, ok := g.Capacity[name]
			return !ok
		})
		for name, quantity := range least {
			if other := g.Capacity[name]; other.Cmp(quantity) < 0 {
				least[name] = other
			}
		}
	}
	return least
}

// commonOverhead returns the overhead that leaves pods, of each resource, the minimum of what is
// allocatable over all groups. The group with the smallest allocatable need not be the one with the
// smallest capacity.
func commonOverhead(groups []*Group, capacity corev1.ResourceList) *cloudprovider.InstanceTypeOverhead {
	if len(groups) == 1 {
		return groups[0].Overhead
	}
	common := &cloudprovider.InstanceTypeOverhead{
		KubeReserved: corev1.ResourceList{}, SystemReserved: corev1.ResourceList{}, EvictionThreshold: corev1.ResourceList{},
	}
	for name, total := range capacity {
		least := slices.MinFunc(groups, func(a, b *Group) int {
			quantity := a.Allocatable[name]
			return quantity.Cmp(b.Allocatable[name])
		})
		left := total.DeepCopy()
		left.Sub(least.Allocatable[name])
		if name == corev1.ResourceMemory {
			left.Sub(hugePages(capacity))
		}
		give(common.KubeReserved, name, least.Overhead.KubeReserved[name], &left)
		give(common.SystemReserved, name, least.Overhead.SystemReserved[name], &left)
		give(common.EvictionThreshold, name, left, &left)
	}
	return common
}

// leastVolumes returns the minimum limit of each CSI driver over the groups. It ignores a group
// without a limit for the driver: that limit is unknown, and another group's is the better guess.
func leastVolumes(groups []*Group) map[string]int {
	var least map[string]int
	for _, g := range groups {
		for driver, limit := range g.Volumes {
			if known, ok := least[driver]; ok && known <= limit {
				continue
			}
			if least == nil {
				least = map[string]int{}
			}
			least[driver] = limit
		}
	}
	return least
}

// typeRequirements returns the union of the groups' labels. A well-known label that no group has
// gets DoesNotExist. Any other label that some group lacks is omitted, since core would add it to
// the Nodes of that group itself.
func typeRequirements(groups []*Group) scheduling.Requirements {
	requirements := scheduling.NewRequirements()
	keys := map[string]bool{}
	for _, g := range groups {
		for key := range g.Requirements {
			keys[key] = true
		}
	}
	for key := range keys {
		values, lacking := valuesOf(groups, key)
		switch {
		case len(values) == 0:
			requirements.Add(scheduling.NewRequirement(key, corev1.NodeSelectorOpDoesNotExist))
		case !lacking || karpv1.WellKnownLabels.Has(key):
			requirements.Add(scheduling.NewRequirement(key, corev1.NodeSelectorOpIn, values...))
		}
	}
	return requirements
}

func valuesOf(groups []*Group, key string) (values []string, lacking bool) {
	for _, g := range groups {
		value, ok := g.Labels[key]
		if !ok {
			lacking = true
			continue
		}
		values = append(values, value)
	}
	return lo.Uniq(values), lacking
}

// offerings returns one offering for each combination of zone, capacity type, reservation, and
// distinguishing labels in which the groups differ. Offerings for observed zones and for what
// NodeClaims remember follow.
func offerings(groups []*Group, remembered []Remembered, conditions Conditions) cloudprovider.Offerings {
	distinguishing := distinguishingKeys(groups, conditions.Distinguished)
	prices := pricesOf(groups, conditions)
	made := map[string]*cloudprovider.Offering{}
	var all cloudprovider.Offerings
	for _, g := range groups {
		key := offeringKey(g, g.Zone, distinguishing)
		offering, ok := made[key]
		if !ok {
			offering = &cloudprovider.Offering{
				Requirements: offeringRequirements(g, g.Zone, distinguishing), Price: prices[priceKey{g.Zone, g.CapacityType}],
			}
			made[key] = offering
			all = append(all, offering)
		}
		healthy := conditions.Available(g) || conditions.offersFull(g)
		offering.Available = offering.Available || healthy && !conditions.refuses(g.InstanceType, offering)
		offering.ReservationCapacity += g.Left
	}
	for _, g := range groups {
		for _, zone := range observedZones(g, conditions) {
			key := offeringKey(g, zone, distinguishing)
			if _, ok := made[key]; ok {
				continue
			}
			made[key] = &cloudprovider.Offering{
				Requirements: offeringRequirements(g, zone, distinguishing), Price: prices[priceKey{zone, g.CapacityType}],
				// Core uses the minimum over all offerings of a reservation.
				ReservationCapacity: g.Left,
			}
			all = append(all, made[key])
		}
	}
	for _, r := range remembered {
		price, offered := prices[priceKey{r.Zone, r.CapacityType}]
		if offered && len(distinguishing) == len(alwaysDistinguishing) {
			continue // equivalent to one of the offerings above
		}
		all = append(all, r.offering(lo.Ternary(offered, price, r.Price)))
	}
	return all
}

// priceKey identifies a price as core looks up prices of Nodes.
type priceKey struct{ zone, capacityType string }

// pricesOf returns the lowest price by zone and capacity type over the groups that could provide a
// machine at some time. It ignores current availability and other labels. Otherwise a Node would
// look more expensive when its group is full, core would replace it with a cheaper one, and would
// replace that one again as soon as there is room.
func pricesOf(groups []*Group, conditions Conditions) map[priceKey]float64 {
	usable := lo.Filter(groups, func(g *Group, _ int) bool { return g.PriceRefused == "" && g.NoCapacity == "" })
	prices := map[priceKey]float64{}
	for _, some := range [][]*Group{usable, groups} {
		found := map[priceKey]float64{}
		for _, g := range some {
			for _, zone := range append(observedZones(g, conditions), g.Zone) {
				key := priceKey{zone, g.CapacityType}
				if price, ok := found[key]; !ok || g.Offered < price {
					found[key] = g.Offered
				}
			}
		}
		prices = lo.Assign(found, prices)
	}
	return prices
}

func observedZones(g *Group, conditions Conditions) []string {
	if g.Zone != ZoneNone {
		return nil
	}
	return slices.Clone(conditions.ObservedZones(g))
}

// alwaysDistinguishing are the labels, besides the zone, that every offering carries a requirement
// for.
var alwaysDistinguishing = []string{karpv1.CapacityTypeLabelKey, v1alpha1.ReservationLabel}

func distinguishingKeys(groups []*Group, distinguished []string) []string {
	var differing []string
	for _, key := range append(karpv1.WellKnownLabels.UnsortedList(), distinguished...) {
		if key == corev1.LabelTopologyZone || key == corev1.LabelInstanceTypeStable || slices.Contains(alwaysDistinguishing, key) {
			continue
		}
		if values, lacking := valuesOf(groups, key); len(values) > 1 || (lacking && len(values) > 0) {
			differing = append(differing, key)
		}
	}
	slices.Sort(differing)
	return slices.Concat(alwaysDistinguishing, differing)
}

func offeringKey(g *Group, zone string, keys []string) string {
	var key strings.Builder
	key.WriteString(zone)
	for _, k := range keys {
		key.WriteByte('|')
		if value, ok := g.Labels[k]; ok {
			key.WriteString("=" + value)
		}
	}
	return key.String()
}

func offeringRequirements(g *Group, zone string, keys []string) scheduling.Requirements {
	requirements := scheduling.NewRequirements(scheduling.NewRequirement(corev1.LabelTopologyZone, corev1.NodeSelectorOpIn, zone))
	for _, key := range keys {
		if value, ok := g.Labels[key]; ok {
			requirements.Add(scheduling.NewRequirement(key, corev1.NodeSelectorOpIn, value))
		} else if karpv1.WellKnownLabels.Has(key) {
			// Core itself adds any other label that the group lacks.
			requirements.Add(scheduling.NewRequirement(key, corev1.NodeSelectorOpDoesNotExist))
		}
	}
	return requirements
}
