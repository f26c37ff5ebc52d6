package instancetype

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// tolerance is the share by which machines of one instance type may differ: firmware and file
// systems use some of their capacity.
const tolerance = 0.1

// Mismatches returns one sentence for each difference that prevents groups from being fully used
// together. These are instance types whose groups have different resources, of which only the
// common part can be scheduled on, different or incomparable prices, and groups without a zone.
func Mismatches(groups []*Group, zones ZoneUse) []string {
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
	mismatches = append(mismatches, withoutZone(groups, zones)...)
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

// ZoneUse is what shows that zones matter to the groups of a NodeClass, other than the zones of
// the groups. The zero value shows nothing.
type ZoneUse struct {
	// NodePools are the names of the NodePools that require or assign a zone.
	NodePools []string
	// Observed are the zones in which machines of groups without a zone were found.
	Observed []string
}

// giveZone is the remedy for a group without a zone.
const giveZone = "set spec.template.spec.failureDomain of the MachineDeployment, or the label " + corev1.LabelTopologyZone + " on its template"

// withoutZone names the groups that have no zone, if zones matter. Core counts [ZoneNone] as a
// zone, but finds no group in it for a pod that must spread over zones. Where no group has a zone,
// this is not reported as long as no NodePool names zones and all machines are in one.
func withoutZone(groups []*Group, zones ZoneUse) []string {
	without := lo.FilterMap(groups, func(g *Group, _ int) (string, bool) { return g.ID, g.Zone == ZoneNone })
	switch {
	case len(without) == 0:
		return nil
	case len(without) < len(groups):
		return []string{fmt.Sprintf("%s: no zone, while other node groups of the class have one, so that they count as one zone more, in which "+
			"pods that must spread over zones, or choose one, get no Node: %s", Enumerate(without), giveZone)}
	case len(zones.NodePools) > 0:
		return []string{fmt.Sprintf("%s: no zone, like all node groups of the class, but NodePool %s names the label %s, so that Karpenter launches "+
			"nothing for a zone, and cannot avoid one: %s, or remove it from the NodePool",
			Enumerate(without), Enumerate(zones.NodePools), corev1.LabelTopologyZone, giveZone)}
	case len(zones.Observed) > 1:
		return []string{fmt.Sprintf("%s: no zone, like all node groups of the class, but their Nodes are in the zones %s, so that pods which must "+
			"spread over zones, or choose one, get no Node: %s", Enumerate(without), Enumerate(zones.Observed), giveZone)}
	}
	return nil
}

// UnplannedPods returns a problem of groups that all have no zone, if there are pods, of these
// names, that must spread over zones or choose one. It is "" if a group has a zone, or if there are
// no such pods.
func UnplannedPods(groups []*Group, pods []string) string {
	if len(pods) == 0 || !Zoneless(groups) {
		return ""
	}
	ids := lo.Map(groups, func(g *Group, _ int) string { return g.ID })
	return fmt.Sprintf("%s: no zone, like all node groups of the class, and Karpenter launches nothing from them for pods that must spread over "+
		"zones or choose one, such as %s: %s", Enumerate(ids), Enumerate(pods), giveZone)
}

// Zoneless reports whether there are groups, and none of them has a zone.
func Zoneless(groups []*Group) bool {
	return len(groups) > 0 && !slices.ContainsFunc(groups, func(g *Group) bool { return g.Zone != ZoneNone })
}

// NeedsZone reports whether the scheduler needs to know the zone of a pod's Node.
func NeedsZone(pod *corev1.Pod) bool {
	spreads := slices.ContainsFunc(pod.Spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool {
		return c.TopologyKey == corev1.LabelTopologyZone && c.WhenUnsatisfiable == corev1.DoNotSchedule
	})
	return spreads || scheduling.NewStrictPodRequirements(pod).Has(corev1.LabelTopologyZone)
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
