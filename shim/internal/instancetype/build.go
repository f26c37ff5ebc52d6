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

// Reservations tells core which label names a reservation. Call it before core's controllers are made.
func Reservations() {
	cloudprovider.ReservationIDLabel = v1alpha1.ReservationLabel
	cloudprovider.ReservedCapacityLabels.Insert(v1alpha1.ReservationLabel)
	karpv1.WellKnownLabels.Insert(v1alpha1.ReservationLabel)
}

// Conditions are what changes about a group without the agent saying so.
type Conditions struct {
	// Available says whether a claim on the group may succeed now.
	Available func(*Group) bool
	// OfferFull has a full reservation offered as available with nothing left, so that core knows that there is room again when one of
	// its machines is deleted. With core's feature gate ReservedCapacity off, core would plan machines there.
	OfferFull bool
	// ObservedZones are the zones that machines of a group turned out to be in although the group names none. Their
	// offerings are never available, but must exist: core looks prices up in them, and takes a Node without an offering for
	// drifted.
	ObservedZones func(*Group) []string
	// Remembered is what NodeClaims remember, from [Remember]. It stays in the instance types as offerings that are not available:
	// core takes a Node without an offering for drifted, whatever drift policy says otherwise, and never consolidates it.
	Remembered []Remembered
	// Distinguished are keys of labels that are not well known and that the NodePool names: groups of one instance type with
	// different values of them have offerings of their own. Core accepts such a key in an offering only for a NodePool that names it.
	Distinguished []string
	// Refused are requirements that no group served a short while ago. Offerings that meet one of them are not available.
	Refused []scheduling.Requirements
}

// offersFull reports whether the group is offered although nothing of it is left.
func (c Conditions) offersFull(g *Group) bool { return c.OfferFull && g.full() }

// refuses reports whether a NodeClaim that was refused would have taken the offering.
func (c Conditions) refuses(instanceType string, offering *cloudprovider.Offering) bool {
	return slices.ContainsFunc(c.Refused, func(refused scheduling.Requirements) bool {
		return refused.Get(corev1.LabelInstanceTypeStable).Has(instanceType) && offering.Requirements.Intersects(refused) == nil
	})
}

// Built remembers what instance types were made from, so that the next [Build] returns the same objects for the same input:
// core's memoized results stay, and callers see by the pointer that nothing changed.
type Built map[string]*cloudprovider.InstanceType

// Build returns one InstanceType for each name, ordered by name. It looks for reusable ones in previous and adds to next what
// it returned. Neither the slice nor the objects may be changed.
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

// withCapacity leaves out the groups that nothing is launched from because nobody knows what they have: they must not take the
// others of their instance type down. Where that are all groups, it returns all.
func withCapacity(groups []*Group) []*Group {
	described := lo.Filter(groups, func(g *Group, _ int) bool { return g.NoCapacity == "" })
	return lo.Ternary(len(described) > 0, described, groups)
}

// smallest returns, of each resource, what every group has. Promising more than the machine that comes would make core launch
// another for the pods that did not fit, and so on.
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

// commonOverhead returns the overhead with which pods can have, of each resource, what they can have on every group's machines.
// The machine with the least to give need not be the one that has the least.
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

// leastVolumes returns, of each CSI driver, the least limit of all groups. A group that knows none is left out of it: nothing
// is known, and another's limit is the better guess.
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

// typeRequirements is the union of what the groups have. A well-known label that no group has is said to be missing; another
// label that some group lacks is not spoken of, as core would put it on such a group's Nodes by itself.
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

// offerings returns one offering for each zone, capacity type, reservation, and value of a well-known label in which the
// groups differ; then those of zones that machines turned out to be in, and those that NodeClaims remember.
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
				// Core takes the least that any offering of a reservation has left.
				ReservationCapacity: g.Left,
			}
			all = append(all, made[key])
		}
	}
	for _, r := range remembered {
		price, offered := prices[priceKey{r.Zone, r.CapacityType}]
		if offered && len(distinguishing) == len(alwaysDistinguishing) {
			continue // it says the same as one of the others
		}
		all = append(all, r.offering(lo.Ternary(offered, price, r.Price)))
	}
	return all
}

// priceKey is what core looks prices of Nodes up by.
type priceKey struct{ zone, capacityType string }

// pricesOf returns, by zone and capacity type, the lowest price of the groups that a machine may be had from at some time. It goes
// neither by what is available now nor by other labels: a Node must not seem dearer because the group that it came from is full,
// or core would replace it by a cheaper one, and that one again as soon as there is room.
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

// alwaysDistinguishing are the labels, besides the zone, that every offering says something about.
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
			// Another label that the group lacks is core's to write.
			requirements.Add(scheduling.NewRequirement(key, corev1.NodeSelectorOpDoesNotExist))
		}
	}
	return requirements
}
