package instancetype

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// tolerance is the share by which machines of one instance type may differ: firmware and file
// systems use some of their capacity.
const tolerance = 0.1

// Mismatches returns one sentence for each difference that prevents groups from being fully used
// together. These are instance types whose groups have different resources, of which only the
// common part can be scheduled on, different or incomparable prices, and groups without a zone.
func Mismatches(groups []*Group) []string {
	byName := lo.GroupBy(groups, func(g *Group) string { return g.InstanceType })
	var mismatches []string
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		members := withCapacity(byName[name])
		// The usual case, in which nothing needs to be compared.
		if !slices.ContainsFunc(members, func(g *Group) bool { return g.shape != members[0].shape }) {
			continue
		}
		common, devices := smallest(members), leastDevices(members)
		for _, g := range members {
			if ignored := beyond(g, common, devices); len(ignored) > 0 {
				mismatches = append(mismatches, fmt.Sprintf(
					"%s: other node groups of instance type %q lack %s, which is ignored; give the groups different instance types",
					g.ID, name, strings.Join(ignored, ", "),
				))
			}
		}
	}
	mismatches = append(mismatches, differentPrices(groups)...)
	mismatches = append(mismatches, withoutZone(groups)...)
	currencies := lo.Uniq(lo.FilterMap(groups, func(g *Group, _ int) (string, bool) {
		currency := g.Source.GetPrice().GetCurrency()
		return currency, currency != ""
	}))
	if len(currencies) > 1 {
		slices.Sort(currencies)
		mismatches = append(mismatches, fmt.Sprintf(
			"prices are in %s and are compared as if they were in the same currency; use one currency", strings.Join(currencies, ", "),
		))
	}
	return mismatches
}

// namedAtOnce is the maximum number of objects named in one sentence.
const namedAtOnce = 3

// Enumerate names the first few objects in order, and the number of the others.
func Enumerate(names []string) string {
	names = slices.Sorted(slices.Values(names))
	enumerated := strings.Join(lo.Slice(names, 0, namedAtOnce), ", ")
	if more := len(names) - namedAtOnce; more > 0 {
		enumerated += fmt.Sprintf(" and %d more", more)
	}
	return enumerated
}

// withoutZone names the groups that have no zone while others have one. Core then treats them as a
// zone of their own, wherever their machines are, and spreads pods accordingly.
func withoutZone(groups []*Group) []string {
	without := lo.FilterMap(groups, func(g *Group, _ int) (string, bool) { return g.ID, g.Zone == ZoneNone })
	if len(without) == 0 || len(without) == len(groups) {
		return nil
	}
	return []string{fmt.Sprintf("%s: no zone, while other node groups of the class have one, so that pods which spread over zones, or choose by "+
		"zone, count its machines as one zone more: set spec.template.spec.failureDomain of the MachineDeployment, or the label %s on its template",
		Enumerate(without), corev1.LabelTopologyZone)}
}

// differentPrices names groups that Karpenter cannot tell apart and that have different prices. It
// tolerates small differences between estimates, which appear as soon as Nodes have reported the
// machines' real capacity.
func differentPrices(groups []*Group) []string {
	type key struct{ instanceType, zone, capacityType string }
	var different []string
	for k, members := range lo.GroupBy(groups, func(g *Group) key { return key{g.InstanceType, g.Zone, g.CapacityType} }) {
		priced := lo.Filter(members, func(g *Group, _ int) bool { return g.PriceRefused == "" && g.NoCapacity == "" })
		if len(priced) < 2 {
			continue
		}
		byPrice := func(a, b *Group) int { return cmp.Or(cmp.Compare(a.Price, b.Price), strings.Compare(a.ID, b.ID)) }
		cheapest, dearest := slices.MinFunc(priced, byPrice), slices.MaxFunc(priced, byPrice)
		estimates := lo.EveryBy(priced, func(g *Group) bool { return PriceSource(g.Source) == PriceSourceEstimate })
		if dearest.Price > cheapest.Price*lo.Ternary(estimates, 1+tolerance, 1) {
			different = append(different, fmt.Sprintf(
				"%s costs %g and %s %g, and both are instance type %q of one zone and capacity type, to which Karpenter assigns the price %g; "+
					"give the groups different instance types, or one price",
				dearest.ID, dearest.Price, cheapest.ID, cheapest.Price, k.instanceType, cheapest.Offered,
			))
		}
	}
	slices.Sort(different)
	return different
}

// beyond describes, for users, what a group has in excess of the common resources and devices of
// its type. It ignores max pods, which is a kubelet setting, and learned values: a user cannot
// correct those, and the Nodes of the other groups may still show the same.
func beyond(g *Group, common corev1.ResourceList, devices map[DeviceKind]int) []string {
	var ignored []string
	for _, name := range slices.Sorted(maps.Keys(g.Capacity)) {
		has := g.Capacity[name]
		least, ok := common[name]
		switch {
		case g.Source.GetSources()["capacity."+string(name)].GetKind() == agentv1alpha1.SourceKind_SOURCE_KIND_LEARNED:
		case !ok && name != corev1.ResourceEphemeralStorage:
			ignored = append(ignored, string(name))
		case ok && name != corev1.ResourcePods && has.AsApproximateFloat64() > (1+tolerance)*least.AsApproximateFloat64():
			ignored = append(ignored, fmt.Sprintf("%s beyond %s of %s", name, least.String(), has.String()))
		}
	}
	for _, kind := range sortedKinds(g.Devices) {
		if g.Devices[kind] > devices[kind] {
			ignored = append(ignored, fmt.Sprintf("devices of driver %s beyond %d", kind.Driver, devices[kind]))
		}
	}
	return ignored
}
