package instancetype_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

func TestMain(m *testing.M) {
	instancetype.Reservations()
	m.Run()
}

type change func(*agentv1alpha1.NodeGroup)

func nodeGroup(name string, changes ...change) *agentv1alpha1.NodeGroup {
	g := &agentv1alpha1.NodeGroup{
		Id:              "fleet/" + name,
		Name:            name,
		InstanceType:    "m.large",
		Capacity:        map[string]string{"cpu": "4", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "50"},
		Architecture:    "amd64",
		OperatingSystem: "linux",
		Zone:            "z1",
		CapacityType:    agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND,
		Price:           &agentv1alpha1.Price{PerHour: 1},
		Availability:    &agentv1alpha1.Availability{Available: true},
	}
	for _, c := range changes {
		c(g)
	}
	return g
}

func spot(g *agentv1alpha1.NodeGroup) { g.CapacityType = agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT }

func reserved(g *agentv1alpha1.NodeGroup) {
	g.CapacityType = agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED
}
func full(g *agentv1alpha1.NodeGroup) { g.Availability = &agentv1alpha1.Availability{} }
func zone(z string) change            { return func(g *agentv1alpha1.NodeGroup) { g.Zone = z } }
func price(p float64) change          { return func(g *agentv1alpha1.NodeGroup) { g.Price.PerHour = p } }

func label(key, value string) change {
	return func(g *agentv1alpha1.NodeGroup) {
		g.NodeLabels = lo.Assign(g.GetNodeLabels(), map[string]string{key: value})
	}
}

func capacity(name, quantity string) change {
	return func(g *agentv1alpha1.NodeGroup) { g.Capacity[name] = quantity }
}

func group(tb testing.TB, name string, changes ...change) *instancetype.Group {
	tb.Helper()
	g, err := instancetype.NewGroup(nodeGroup(name, changes...))
	require.NoError(tb, err)
	return g
}

var asSaid = instancetype.Conditions{
	Available:     func(g *instancetype.Group) bool { return g.Available },
	ObservedZones: func(*instancetype.Group) []string { return nil },
}

func build(groups ...*instancetype.Group) []*cloudprovider.InstanceType {
	return instancetype.Build(groups, asSaid, nil, instancetype.Built{})
}

func requirements(pairs ...string) scheduling.Requirements {
	r := scheduling.NewRequirements()
	for i := 0; i < len(pairs); i += 2 {
		r.Add(scheduling.NewRequirement(pairs[i], corev1.NodeSelectorOpIn, pairs[i+1]))
	}
	return r
}

func TestOneGroupIsOneInstanceTypeWithOneOffering(t *testing.T) {
	types := build(group(t, "a", label("team", "red"), func(g *agentv1alpha1.NodeGroup) { g.Region = "eu" }))
	require.Len(t, types, 1)
	it := types[0]
	assert.Equal(t, "m.large", it.Name)
	require.Len(t, it.Offerings, 1)
	assert.Equal(t, "z1", it.Offerings[0].Zone())
	assert.Equal(t, karpv1.CapacityTypeOnDemand, it.Offerings[0].CapacityType())
	assert.InDelta(t, 1.0, it.Offerings[0].Price, 0)
	assert.True(t, it.Offerings[0].Available)
	for key, want := range map[string]string{
		corev1.LabelInstanceTypeStable: "m.large", corev1.LabelTopologyZone: "z1", karpv1.CapacityTypeLabelKey: "on-demand",
		corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux", corev1.LabelTopologyRegion: "eu", "team": "red",
	} {
		assert.Equal(t, []string{want}, it.Requirements.Get(key).Values(), key)
	}
}

func TestGroupsWithoutCPUOrMemoryAreNotAvailable(t *testing.T) {
	lacking := func(name string) change { return func(g *agentv1alpha1.NodeGroup) { delete(g.GetCapacity(), name) } }
	for name, c := range map[string]struct {
		change change
		says   string
	}{
		"no CPU":                {lacking("cpu"), "kubernetes.io/cpu"},
		"no memory":             {lacking("memory"), "kubernetes.io/memory"},
		"no CPU in a word":      {capacity("cpu", "0"), "kubernetes.io/cpu"},
		"all memory is kept":    {learned("memory", "20Gi"), "all of the 16Gi of memory is reserved"},
		"less than a threshold": {capacity("memory", "50Mi"), "all of the 50Mi of memory is reserved"},
	} {
		t.Run(name, func(t *testing.T) {
			g := group(t, "a", c.change)
			assert.False(t, g.Available)
			assert.Contains(t, g.NoCapacity, c.says)
			require.ErrorContains(t, g.Accepts(scheduling.NewRequirements(), nil, nil), c.says)
			for _, offering := range build(g)[0].Offerings {
				assert.False(t, offering.Available)
			}
		})
	}
	all := seen(t, group(t, "a"), &v1alpha1.Kubelet{KubeReserved: map[string]v1alpha1.ReservedQuantity{"cpu": "4"}})
	assert.False(t, all.Available, "as the NodeClass sees it")
	assert.Contains(t, all.NoCapacity, "spec.kubelet")
	assert.Empty(t, group(t, "a").NoCapacity)
}

func TestAGroupWithoutCapacityTakesNothingFromTheOthersOfItsType(t *testing.T) {
	shared := func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "m.large" }
	blank := group(t, "a", shared, func(g *agentv1alpha1.NodeGroup) { delete(g.GetCapacity(), "cpu") })
	whole := group(t, "b", shared)
	it := build(blank, whole)[0]
	assert.Equal(t, build(whole)[0].Allocatable(), it.Allocatable())
	assert.Empty(t, instancetype.Mismatches([]*instancetype.Group{blank, whole}, instancetype.ZoneUse{}))
}

func TestWellKnownLabelsThatMachinesLackAreSaidToBeMissing(t *testing.T) {
	it := build(group(t, "a"))[0]
	for key := range karpv1.WellKnownLabels {
		if key == karpv1.NodePoolLabelKey {
			assert.False(t, it.Requirements.Has(key), "core owns the label")
			continue
		}
		assert.True(t, it.Requirements.Has(key), "core reads a missing %s as any value", key)
	}
	assert.Equal(t, corev1.NodeSelectorOpDoesNotExist, it.Requirements.Get(corev1.LabelTopologyRegion).Operator())
	assert.Equal(t, corev1.NodeSelectorOpDoesNotExist, it.Requirements.Get(corev1.LabelWindowsBuild).Operator())
}

func TestPodsDefaultToTheKubelets(t *testing.T) {
	it := build(group(t, "a", func(g *agentv1alpha1.NodeGroup) { delete(g.GetCapacity(), "pods") }))[0]
	assert.Equal(t, "110", it.Capacity.Pods().String())
}

func TestTinyMachinesNeverHaveNegativeResources(t *testing.T) {
	for _, memory := range []string{"1", "50Mi", "100Mi", "101Mi"} {
		it := build(group(t, "a", capacity("memory", memory)))[0]
		for name, quantity := range it.Allocatable() {
			assert.GreaterOrEqual(t, quantity.Sign(), 0, "%s of a machine with %s", name, memory)
		}
	}
}

func TestGroupsOfOneTypeBecomeOfferingsByZoneAndCapacityType(t *testing.T) {
	types := build(
		group(t, "a", price(3)),
		group(t, "b", price(2)), // same zone and capacity type as a, cheaper
		group(t, "c", zone("z2"), spot, price(0.5)),
		group(t, "d", zone("z2"), full),
	)
	require.Len(t, types, 1)
	it := types[0]
	require.Len(t, it.Offerings, 3)
	assert.ElementsMatch(t, []string{"z1", "z2"}, it.Requirements.Get(corev1.LabelTopologyZone).Values())
	assert.ElementsMatch(t, []string{"spot", "on-demand"}, it.Requirements.Get(karpv1.CapacityTypeLabelKey).Values())
	merged, ok := it.OfferingPrice("z1", "on-demand")
	assert.True(t, ok)
	assert.InDelta(t, 2.0, merged, 0, "the cheaper of the two")
	unavailable, _ := lo.Find(it.Offerings, func(o *cloudprovider.Offering) bool { return o.Zone() == "z2" && o.CapacityType() == "on-demand" })
	require.NotNil(t, unavailable, "groups without room are offered, as unavailable")
	assert.False(t, unavailable.Available)
}

func TestThePriceOfAMergedOfferingDoesNotFollowAvailability(t *testing.T) {
	for name, changes := range map[string][2][]change{
		"both are available":    {{price(1)}, {price(5)}},
		"the cheaper is full":   {{price(1), full}, {price(5)}},
		"the dearer is full":    {{price(1)}, {price(5), full}},
		"both are full":         {{price(1), full}, {price(5), full}},
		"they differ otherwise": {{price(5), label(corev1.LabelTopologyRegion, "eu"), full}, {price(1)}},
	} {
		it := build(group(t, "a", changes[0]...), group(t, "b", changes[1]...))[0]
		cost, ok := it.OfferingPrice("z1", "on-demand")
		assert.True(t, ok, name)
		assert.InDelta(t, 1.0, cost, 0, name)
	}
}

func TestAGroupThatNothingIsEverLaunchedFromSetsNoPrice(t *testing.T) {
	dear := group(t, "dear", price(5))
	unpriced, err := instancetype.NewGroup(nodeGroup("unpriced", func(g *agentv1alpha1.NodeGroup) { g.Price = nil }))
	require.Error(t, err)
	blank := group(t, "blank", price(0.1), func(g *agentv1alpha1.NodeGroup) { delete(g.GetCapacity(), "cpu") })
	cost, ok := build(dear, unpriced, blank)[0].OfferingPrice("z1", "on-demand")
	assert.True(t, ok)
	assert.InDelta(t, 5.0, cost, 0)
}

func TestDifferentPricesOfWhatKarpenterCannotTellApartAreTold(t *testing.T) {
	estimated := func(g *agentv1alpha1.NodeGroup) {
		g.Sources = map[string]*agentv1alpha1.ValueSource{"price": {Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE}}
	}
	assert.Equal(t, []string{
		`fleet/b costs 3 and fleet/a 1, and both are instance type "m.large" of one zone and capacity type, to which Karpenter ` +
			`assigns the price 1; give the groups different instance types, or one price`,
	}, instancetype.Mismatches([]*instancetype.Group{group(t, "a", full), group(t, "b", price(3))}, instancetype.ZoneUse{}))
	for name, groups := range map[string][]*instancetype.Group{
		"one price":             {group(t, "a"), group(t, "b")},
		"two zones":             {group(t, "a"), group(t, "b", price(3), zone("z2"))},
		"two capacity types":    {group(t, "a"), group(t, "b", price(3), spot)},
		"estimates, nearly one": {group(t, "a", estimated), group(t, "b", price(1.05), estimated)},
	} {
		assert.Empty(t, instancetype.Mismatches(groups, instancetype.ZoneUse{}), name)
	}
	estimates := []*instancetype.Group{group(t, "a", estimated), group(t, "b", price(3), estimated)}
	assert.Len(t, instancetype.Mismatches(estimates, instancetype.ZoneUse{}), 1)
}

// A process that has just started may know the price of only one of two node groups.
func TestOfWhatNodeClaimsRememberAPriceThatIsKnownCounts(t *testing.T) {
	unknown := instancetype.Remembered{InstanceType: "old", Zone: "z9", CapacityType: "on-demand"}
	dear, free := unknown, unknown
	dear.Price, dear.Known, free.Known = 4, true, true
	assert.Equal(t, []instancetype.Remembered{dear}, instancetype.Remember([]instancetype.Remembered{unknown, dear}))
	assert.Equal(t, []instancetype.Remembered{free}, instancetype.Remember([]instancetype.Remembered{unknown, dear, free}))
}

func TestWhatNodeClaimsRememberStaysAndIsNotAvailable(t *testing.T) {
	remembered := instancetype.Remember([]instancetype.Remembered{
		{InstanceType: "old", Zone: "z9", CapacityType: "on-demand", Price: 4},
		{InstanceType: "old", Zone: "z9", CapacityType: "on-demand", Price: 3},
		{InstanceType: "m.large", Zone: "z1", CapacityType: "on-demand", Price: 9},
		{InstanceType: "m.large", Zone: "z9", CapacityType: "spot", Price: 2},
	})
	require.Len(t, remembered, 3)
	types := instancetype.Build([]*instancetype.Group{group(t, "a")}, instancetype.Conditions{
		Available: asSaid.Available, ObservedZones: asSaid.ObservedZones, Remembered: remembered,
	}, nil, instancetype.Built{})
	require.Len(t, types, 2)
	current, old := types[0], types[1]
	assert.Equal(t, "old", old.Name)
	assert.Empty(t, old.Offerings.Available())
	assert.Empty(t, old.Requirements.Get(corev1.LabelTopologyZone).Values(), "pods that spread over zones must not wait for it")
	assert.Empty(t, old.Allocatable())
	require.Len(t, current.Offerings, 2, "what a group still offers is there once")
	assert.Len(t, current.Offerings.Available(), 1)
	assert.Equal(t, []string{"z1"}, current.Requirements.Get(corev1.LabelTopologyZone).Values())
	for zone, want := range map[*cloudprovider.InstanceType][3]any{old: {"z9", "on-demand", 3.0}, current: {"z9", "spot", 2.0}} {
		cost, ok := zone.OfferingPrice(want[0].(string), want[1].(string)) //nolint:forcetypeassert // they are strings, as above
		assert.True(t, ok)
		assert.InDelta(t, want[2], cost, 0)
	}
}

// Core expects an available full reservation to have room again later, and drains one of its Nodes
// first in order to replace it.
func TestAFullReservationIsAvailableWithNothingLeft(t *testing.T) {
	maxSize := int32(5)
	full := func(reason agentv1alpha1.UnavailableReason) change {
		return func(g *agentv1alpha1.NodeGroup) {
			g.MaxSize, g.Replicas = &maxSize, 5
			g.Availability = &agentv1alpha1.Availability{Reason: reason}
		}
	}
	atMaxSize := full(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE)
	offered := instancetype.Conditions{Available: asSaid.Available, ObservedZones: asSaid.ObservedZones, OfferFull: true}
	for name, c := range map[string]struct {
		conditions instancetype.Conditions
		changes    []change
		want       bool
	}{
		"full":                                  {offered, []change{reserved, atMaxSize}, true},
		"full, feature gate off":                {asSaid, []change{reserved, atMaxSize}, false},
		"full, but by the hour":                 {offered, []change{atMaxSize}, false},
		"full and without CPU":                  {offered, []change{reserved, atMaxSize, capacity("cpu", "0")}, false},
		"paused":                                {offered, []change{reserved, full(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED)}, false},
		"at max size, replicas not updated yet": {offered, []change{reserved, atMaxSize, func(g *agentv1alpha1.NodeGroup) { g.Replicas = 4 }}, true},
	} {
		offerings := instancetype.Build([]*instancetype.Group{group(t, "r", c.changes...)}, c.conditions, nil, instancetype.Built{})[0].Offerings
		require.Len(t, offerings, 1, name)
		assert.Equal(t, c.want, offerings[0].Available, name)
		assert.False(t, offerings[0].Launchable(), name)
	}
	view, err := instancetype.NewView(&v1alpha1.ClusterAPINodeClassSpec{Price: v1alpha1.PricePolicy{WhenUnknown: v1alpha1.UnknownPriceUnavailable}})
	require.NoError(t, err)
	estimated := view.Of(group(t, "r", reserved, atMaxSize, func(g *agentv1alpha1.NodeGroup) {
		g.Sources = map[string]*agentv1alpha1.ValueSource{"price": {Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE}}
	}))
	refused := instancetype.Build([]*instancetype.Group{estimated}, offered, nil, instancetype.Built{})[0]
	assert.Empty(t, refused.Offerings.Available(), "the NodeClass accepts no estimated price")

	built := instancetype.Built{}
	changed := func(reason agentv1alpha1.UnavailableReason) *cloudprovider.InstanceType {
		return instancetype.Build([]*instancetype.Group{group(t, "r", reserved, full(reason))}, offered, built, built)[0]
	}
	assert.NotSame(t, changed(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE),
		changed(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED), "core must see that it is not to be had again")
}

func TestAReservationWithMachinesInAZoneThatItDoesNotNameIsNotFull(t *testing.T) {
	maxSize := int32(5)
	g := group(t, "r", reserved, zone(""), func(g *agentv1alpha1.NodeGroup) { g.MaxSize, g.Replicas = &maxSize, 2 })
	it := instancetype.Build([]*instancetype.Group{g}, instancetype.Conditions{
		Available:     asSaid.Available,
		ObservedZones: func(*instancetype.Group) []string { return []string{"z7"} },
		Remembered:    []instancetype.Remembered{{InstanceType: "m.large", Zone: "z8", CapacityType: "reserved"}},
	}, nil, instancetype.Built{})[0]
	require.Len(t, it.Offerings, 3)
	for _, offering := range it.Offerings {
		if offering.ReservationID() == "r" {
			assert.Equal(t, 3, offering.ReservationCapacity, "core takes the least of them")
		}
	}
}

func TestWhatOnlyNodesShowedIsNoMismatch(t *testing.T) {
	from := func(kind agentv1alpha1.SourceKind) change {
		return func(g *agentv1alpha1.NodeGroup) {
			g.Sources = map[string]*agentv1alpha1.ValueSource{"capacity.nvidia.com/gpu": {Kind: kind}}
		}
	}
	gpu, without := capacity("nvidia.com/gpu", "1"), group(t, "b")
	learnedGPU := group(t, "a", gpu, from(agentv1alpha1.SourceKind_SOURCE_KIND_LEARNED))
	assert.Empty(t, instancetype.Mismatches([]*instancetype.Group{learnedGPU, without}, instancetype.ZoneUse{}))
	described := group(t, "a", gpu, from(agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION))
	assert.Len(t, instancetype.Mismatches([]*instancetype.Group{described, without}, instancetype.ZoneUse{}), 1)
}

func TestAMergedTypeHasWhatEveryGroupHas(t *testing.T) {
	groups := []*instancetype.Group{
		group(t, "a", capacity("memory", "15Gi"), capacity("nvidia.com/gpu", "1")),
		group(t, "b", zone("z2"), capacity("cpu", "3900m")),
	}
	it := build(groups...)[0]
	assert.Equal(t, "3900m", it.Capacity.Cpu().String())
	assert.Equal(t, "15Gi", it.Capacity.Memory().String())
	assert.NotContains(t, it.Capacity, corev1.ResourceName("nvidia.com/gpu"))
	mismatches := instancetype.Mismatches(groups, instancetype.ZoneUse{})
	require.Len(t, mismatches, 1, "what firmware keeps for itself is no other shape")
	assert.Contains(t, mismatches[0], "nvidia.com/gpu")
	assert.Contains(t, mismatches[0], "fleet/a")
}

func TestShapesThatDifferUnderOneNameAreTold(t *testing.T) {
	mismatches := instancetype.Mismatches([]*instancetype.Group{
		group(t, "a", capacity("cpu", "8"), capacity("pods", "110")), group(t, "b"),
		group(t, "c", func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "other" }, capacity("cpu", "64")),
	}, instancetype.ZoneUse{})
	assert.Equal(t, []string{
		`fleet/a: other node groups of instance type "m.large" lack cpu beyond 4 of 8, which is ignored; give the groups different instance types`,
	}, mismatches)
}

// Its machines would count as one additional zone, wherever they are.
func TestAGroupWithoutAZoneBesideOthersIsTold(t *testing.T) {
	none := zone(instancetype.ZoneNone)
	groups := []*instancetype.Group{group(t, "e", none), group(t, "d", none), group(t, "c", none), group(t, "b", none), group(t, "a", zone("z2"))}
	mismatches := instancetype.Mismatches(groups, instancetype.ZoneUse{})
	require.Len(t, mismatches, 1)
	assert.Contains(t, mismatches[0], "fleet/b, fleet/c, fleet/d and 1 more: no zone")
	assert.Contains(t, mismatches[0], "spec.template.spec.failureDomain")
	assert.Empty(t, instancetype.Mismatches(groups[:4], instancetype.ZoneUse{}), "no group has one")
	assert.Empty(t, instancetype.Mismatches(groups[4:], instancetype.ZoneUse{}))
}

func TestPricesInSeveralCurrenciesAreTold(t *testing.T) {
	in := func(currency string) change { return func(g *agentv1alpha1.NodeGroup) { g.Price.Currency = currency } }
	same := []*instancetype.Group{group(t, "a", in("EUR")), group(t, "b", in("EUR")), group(t, "c")}
	assert.Empty(t, instancetype.Mismatches(same, instancetype.ZoneUse{}))
	assert.Equal(t, []string{"prices are in EUR, USD and are compared as if they were in the same currency; use one currency"},
		instancetype.Mismatches([]*instancetype.Group{group(t, "a", in("USD")), group(t, "b", in("EUR"))}, instancetype.ZoneUse{}))
}

func TestGroupsThatDifferInAWellKnownLabelGetOfferingsOfTheirOwn(t *testing.T) {
	karpv1.WellKnownLabels.Insert("example.com/rack")
	t.Cleanup(func() { karpv1.WellKnownLabels.Delete("example.com/rack") })
	it := build(group(t, "a", label("example.com/rack", "r1")), group(t, "b", zone("z2"), label("example.com/rack", "r2")), group(t, "c", zone("z2")))[0]
	require.Len(t, it.Offerings, 3)
	assert.ElementsMatch(t, []string{"r1", "r2"}, it.Requirements.Get("example.com/rack").Values())
	wanted := requirements("example.com/rack", "r1", corev1.LabelTopologyZone, "z2")
	require.NoError(t, it.Requirements.Intersects(wanted), "the type has both")
	assert.Empty(t, it.Offerings.Compatible(wanted), "but no group does")
	assert.Len(t, it.Offerings.Compatible(requirements("example.com/rack", "r2", corev1.LabelTopologyZone, "z2")), 1)
}

func TestACustomLabelThatSomeGroupLacksIsNotSpokenOf(t *testing.T) {
	it := build(group(t, "a", label("team", "red")), group(t, "b"))[0]
	assert.False(t, it.Requirements.Has("team"), "core labels Nodes of group b as the NodePool says")
	it = build(group(t, "a", label("team", "red")), group(t, "b", label("team", "blue")))[0]
	assert.ElementsMatch(t, []string{"red", "blue"}, it.Requirements.Get("team").Values())
	for _, offering := range it.Offerings {
		assert.False(t, offering.Requirements.Has("team"), "core refuses offerings with requirements that are not well known")
	}
}

func TestReservedGroupsAreReservations(t *testing.T) {
	maxSize := int32(5)
	it := build(
		group(t, "r", reserved, func(g *agentv1alpha1.NodeGroup) { g.MaxSize, g.Replicas = &maxSize, 2 }),
		group(t, "a"),
	)[0]
	require.Len(t, it.Offerings, 2)
	for _, offering := range it.Offerings {
		if offering.CapacityType() == karpv1.CapacityTypeReserved {
			assert.Equal(t, "r", offering.ReservationID())
			assert.Equal(t, 3, offering.ReservationCapacity)
			assert.InDelta(t, 1e-6, offering.Price, 1e-9, "core uses it before what is paid for by the hour, and does not leave it for that")
			assert.True(t, offering.Launchable())
		} else {
			assert.Equal(t, corev1.NodeSelectorOpDoesNotExist, offering.Requirements.Get(v1alpha1.ReservationLabel).Operator())
			assert.InDelta(t, 1.0, offering.Price, 0)
		}
	}
	gone := group(t, "r", reserved, func(g *agentv1alpha1.NodeGroup) { g.MaxSize, g.Replicas = &maxSize, 9 })
	assert.Zero(t, gone.Left, "never negative: core would panic")
}

func TestGroupsWithoutAZoneHaveOneThatNamesNone(t *testing.T) {
	g := group(t, "a", zone(""))
	assert.Contains(t, g.Labels, corev1.LabelTopologyZone, "a Node without the label is never consolidated")
	it := instancetype.Build([]*instancetype.Group{g}, instancetype.Conditions{
		Available:     asSaid.Available,
		ObservedZones: func(*instancetype.Group) []string { return []string{"z7"} },
	}, nil, instancetype.Built{})[0]
	assert.Equal(t, []string{""}, it.Requirements.Get(corev1.LabelTopologyZone).Values(), "nothing can be asked for in an observed zone")
	require.Len(t, it.Offerings.Available(), 1)
	assert.Empty(t, it.Offerings.Available()[0].Zone())
	observed, ok := it.OfferingPrice("z7", "on-demand")
	assert.True(t, ok, "core looks up what the Nodes there cost")
	assert.InDelta(t, 1.0, observed, 0)
}

func TestUnusableDescriptionsAreRefusedOrLeftOut(t *testing.T) {
	for name, c := range map[string]change{
		"instance type":       func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "not a label!" },
		"empty instance type": func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "" },
		"zone":                zone("über"),
		"architecture":        func(g *agentv1alpha1.NodeGroup) { g.Architecture = "a/b" },
	} {
		g, err := instancetype.NewGroup(nodeGroup("a", c))
		assert.Nil(t, g, name)
		require.ErrorContains(t, err, "fleet/a", name)
	}
	g, err := instancetype.NewGroup(
		nodeGroup("a", label("bad key", "x"), label("team", "no good"), label("good", "yes"), capacity("memory", "lots"), capacity("cpu", "-1"),
			func(g *agentv1alpha1.NodeGroup) { g.Taints = []*agentv1alpha1.Taint{{Key: "a", Effect: "Whenever"}} }),
	)
	require.NotNil(t, g)
	for _, part := range []string{"bad key", "team", "memory", "cpu", "Whenever"} {
		require.ErrorContains(t, err, part)
	}
	assert.Equal(t, "yes", g.Labels["good"])
	assert.NotContains(t, g.Labels, "team")
}

func TestLabelsThatAreNotTheGroupsToSayAreLeftOut(t *testing.T) {
	g := group(t, "a", label(corev1.LabelHostname, "me"), label(karpv1.NodePoolLabelKey, "p"), label("karpenter.sh/registered", "true"),
		label(corev1.LabelFailureDomainBetaZone, "z9"), label(corev1.LabelInstanceTypeStable, "other"), label(v1alpha1.ReservationLabel, "mine"))
	assert.NotContains(t, g.Labels, corev1.LabelHostname)
	assert.NotContains(t, g.Labels, karpv1.NodePoolLabelKey)
	assert.NotContains(t, g.Labels, "karpenter.sh/registered")
	assert.NotContains(t, g.Labels, v1alpha1.ReservationLabel)
	assert.NotContains(t, g.Labels, corev1.LabelFailureDomainBetaZone)
	require.NoError(t, g.Accepts(requirements(corev1.LabelTopologyZone, "z1"), nil, nil))
	assert.Equal(t, "m.large", g.Labels[corev1.LabelInstanceTypeStable])
}

func TestWithoutAPriceNothingIsLaunched(t *testing.T) {
	for name, c := range map[string]change{
		"none": func(g *agentv1alpha1.NodeGroup) { g.Price = nil },
		"NaN":  price(math.NaN()), "infinite": price(math.Inf(1)), "negative": price(-1),
	} {
		g, err := instancetype.NewGroup(nodeGroup("a", c))
		require.ErrorContains(t, err, "price", name)
		require.NotNil(t, g, name)
		assert.False(t, g.Available, name)
		require.ErrorContains(t, g.Accepts(requirements(), nil, nil), "price", name)
		it := build(g)[0]
		require.Len(t, it.Offerings, 1, "Nodes that exist still have an offering")
		assert.False(t, it.Offerings[0].Available, name)
		assert.GreaterOrEqual(t, it.Offerings[0].Price, 0.0, name)
	}
	free := group(t, "a", price(0))
	assert.True(t, free.Available, "what the user says is free is free")
}

func TestAccepts(t *testing.T) {
	g := group(t, "a", label("team", "red"), func(g *agentv1alpha1.NodeGroup) {
		g.Taints = []*agentv1alpha1.Taint{
			{Key: "dedicated", Value: "red", Effect: "NoSchedule"},
			{Key: "karpenter.sh/unregistered", Effect: "NoExecute"},
			{Key: "node.cloudprovider.kubernetes.io/uninitialized", Value: "true", Effect: "NoSchedule"},
			{Key: "soft", Effect: "PreferNoSchedule"},
		}
	})
	dedicated := []corev1.Taint{{Key: "dedicated", Value: "red", Effect: corev1.TaintEffectNoSchedule}}
	requests := corev1.ResourceList{"cpu": resource.MustParse("4"), "pods": resource.MustParse("1")}
	assert.NoError(t, g.Accepts(requirements("team", "red"), requests, dedicated))
	assert.NoError(t, g.Accepts(requirements("elsewhere", "x"), requests, dedicated), "a label that the group does not have is core's to write")
	require.Error(t, g.Accepts(requirements("team", "blue"), requests, dedicated))
	require.Error(
		t,
		g.Accepts(requirements(corev1.LabelTopologyRegion, "eu"), requests, dedicated),
		"a well-known label that the group lacks is lacking",
	)
	require.Error(t, g.Accepts(requirements(), corev1.ResourceList{"cpu": resource.MustParse("4001m")}, dedicated))
	require.ErrorContains(t, g.Accepts(requirements(), requests, nil), "dedicated")
	assert.Error(t, g.Accepts(requirements(), requests, []corev1.Taint{{Key: "dedicated", Value: "blue", Effect: corev1.TaintEffectNoSchedule}}))
}

func TestOrderIsRoomThenPriceThenCapacityTypeThenID(t *testing.T) {
	groups := []*instancetype.Group{
		group(t, "equal-spot", spot, price(1)),
		group(t, "full-reserved", reserved, full), group(t, "z-cheap", price(1)), group(t, "a-cheap", price(1)),
		group(t, "dear-spot", spot, price(9)), group(t, "dear-reserved", reserved, price(99)),
	}
	ids := lo.Map(instancetype.Order(groups, asSaid.Available), func(g *instancetype.Group, _ int) string { return g.Source.GetName() })
	assert.Equal(t, []string{"dear-reserved", "equal-spot", "a-cheap", "z-cheap", "dear-spot", "full-reserved"}, ids)
}

func TestUnchangedInputGivesTheSameObjects(t *testing.T) {
	before := instancetype.Built{}
	first := instancetype.Build(
		[]*instancetype.Group{group(t, "a"), group(t, "b", func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "other" })},
		asSaid,
		nil,
		before,
	)
	// Sizes change all the time and do not matter to core.
	after := instancetype.Built{}
	second := instancetype.Build([]*instancetype.Group{
		group(
			t,
			"a",
			func(g *agentv1alpha1.NodeGroup) { g.Replicas = 7 },
		),
		group(t, "b", func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "other" }, price(2)),
	}, asSaid, before, after)
	assert.Same(t, first[0], second[0])
	assert.NotSame(t, first[1], second[1])
	third := instancetype.Build([]*instancetype.Group{group(t, "a", full)}, asSaid, after, instancetype.Built{})
	assert.NotSame(t, first[0], third[0])
}

func TestWhateverReachesCoreMakesANewObject(t *testing.T) {
	for name, c := range map[string]change{
		"capacity": capacity("memory", "15Gi"), "price": price(3), "label": label("team", "red"), "availability": full,
		"overhead": func(g *agentv1alpha1.NodeGroup) { g.Overhead = map[string]string{"memory": "1Gi"} },
		"volumes":  func(g *agentv1alpha1.NodeGroup) { g.AttachableVolumes = map[string]int32{"disk.example.com": 7} },
		"devices": func(g *agentv1alpha1.NodeGroup) {
			g.Devices = []*agentv1alpha1.DeviceCount{{Driver: "gpu.example.com", Count: 1}}
		},
	} {
		before := instancetype.Built{}
		first := instancetype.Build([]*instancetype.Group{group(t, "a")}, asSaid, nil, before)
		assert.NotSame(t, first[0], instancetype.Build([]*instancetype.Group{group(t, "a", c)}, asSaid, before, instancetype.Built{})[0], name)
	}
}

// Some group must accept whatever core may launch, or core would launch and fail forever.
func TestWhateverAnOfferingPromisesSomeGroupKeeps(t *testing.T) {
	karpv1.WellKnownLabels.Insert("example.com/rack")
	t.Cleanup(func() { karpv1.WellKnownLabels.Delete("example.com/rack") })
	random := rand.New(rand.NewPCG(1, 2))
	pick := func(values ...string) string { return values[random.IntN(len(values))] }
	for range 300 {
		var groups []*instancetype.Group
		for i := range 1 + random.IntN(6) {
			changes := []change{
				zone(pick("", "z1", "z2")), price(float64(random.IntN(5))), capacity("cpu", pick("2", "4", "8")),
				func(g *agentv1alpha1.NodeGroup) {
					g.InstanceType = pick("small", "large")
					g.CapacityType = agentv1alpha1.CapacityType(1 + random.IntN(3))
					g.Region = pick("", "eu")
				},
			}
			if random.IntN(2) == 0 {
				changes = append(changes, label("example.com/rack", pick("r1", "r2")))
			}
			if random.IntN(3) == 0 {
				changes = append(changes, full)
			}
			groups = append(groups, group(t, fmt.Sprint("g", i), changes...))
		}
		for _, it := range build(groups...) {
			seen := map[string]bool{}
			for _, offering := range it.Offerings {
				key := offering.Requirements.String()
				require.False(t, seen[key], "offerings are unique: %s", key)
				seen[key] = true
				require.True(t, lo.ContainsBy(groups, func(g *instancetype.Group) bool {
					reqs := scheduling.NewRequirements(offering.Requirements.Values()...)
					reqs.Add(scheduling.NewRequirement(corev1.LabelInstanceTypeStable, corev1.NodeSelectorOpIn, it.Name))
					return g.Accepts(reqs, it.Allocatable(), nil) == nil && (!offering.Available || g.Available)
				}), "no group of %s keeps %s", it.Name, key)
			}
		}
	}
}
