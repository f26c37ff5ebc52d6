package instancetype_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

func learned(name, quantity string) change {
	return func(g *agentv1alpha1.NodeGroup) {
		g.Overhead = lo.Assign(g.GetOverhead(), map[string]string{name: quantity})
	}
}

// seen returns a group as a NodeClass with the kubelet description sees it.
func seen(tb testing.TB, g *instancetype.Group, kubelet *v1alpha1.Kubelet) *instancetype.Group {
	tb.Helper()
	view, err := instancetype.NewView(&v1alpha1.ClusterAPINodeClassSpec{Kubelet: kubelet})
	require.NoError(tb, err)
	return view.Of(g)
}

func TestWhatPodsCanHave(t *testing.T) {
	reserving := func(name, quantity string) map[string]v1alpha1.ReservedQuantity {
		return map[string]v1alpha1.ReservedQuantity{name: v1alpha1.ReservedQuantity(quantity)}
	}
	evicting := func(signal, threshold string) map[string]v1alpha1.EvictionThreshold {
		return map[string]v1alpha1.EvictionThreshold{signal: v1alpha1.EvictionThreshold(threshold)}
	}
	// The machine has 4 CPUs, 16Gi, 100Gi of disk and 50 pods.
	for name, test := range map[string]struct {
		changes []change
		kubelet *v1alpha1.Kubelet
		want    map[string]string
	}{
		"the kubelet's defaults": {
			want: map[string]string{"cpu": "4", "memory": "16284Mi", "ephemeral-storage": "96636764000", "pods": "50"},
		},
		"the kubelet's defaults on Windows": {
			changes: []change{func(g *agentv1alpha1.NodeGroup) { g.OperatingSystem = "windows" }},
			want:    map[string]string{"memory": "15884Mi"},
		},
		"what Nodes showed, over the defaults": {
			changes: []change{learned("memory", "1Gi"), learned("cpu", "80m")},
			want:    map[string]string{"cpu": "3920m", "memory": "15Gi", "ephemeral-storage": "96636764000"},
		},
		"what Nodes showed includes huge pages": {
			changes: []change{capacity("hugepages-2Mi", "4Gi"), capacity("hugepages-1Gi", "2Gi"), learned("memory", "7Gi")},
			want:    map[string]string{"memory": "9Gi", "hugepages-2Mi": "4Gi", "hugepages-1Gi": "2Gi"},
		},
		"less pods than described": {
			changes: []change{learned("pods", "20")},
			want:    map[string]string{"pods": "30"},
		},
		"a device that failed on one Node": {
			changes: []change{capacity("nvidia.com/gpu", "4"), learned("nvidia.com/gpu", "1")},
			want:    map[string]string{"nvidia.com/gpu": "4"},
		},
		"the NodeClass, where it keeps back more than Nodes showed": {
			changes: []change{learned("memory", "512Mi"), learned("cpu", "80m")},
			kubelet: &v1alpha1.Kubelet{KubeReserved: reserving("memory", "924Mi")},
			want:    map[string]string{"cpu": "3920m", "memory": "15Gi"},
		},
		"what Nodes showed, where it is more than the NodeClass keeps back": {
			changes: []change{learned("memory", "2Gi"), learned("cpu", "80m")},
			kubelet: &v1alpha1.Kubelet{KubeReserved: reserving("memory", "924Mi"), SystemReserved: reserving("cpu", "100m")},
			want:    map[string]string{"cpu": "3900m", "memory": "14Gi"},
		},
		"all three parts": {
			kubelet: &v1alpha1.Kubelet{
				KubeReserved: reserving("cpu", "100m"), SystemReserved: reserving("cpu", "150m"), EvictionHard: evicting("memory.available", "1Gi"),
			},
			want: map[string]string{"cpu": "3750m", "memory": "15Gi", "ephemeral-storage": "100Gi"},
		},
		"a threshold that a given map lacks is none, unless Nodes showed otherwise": {
			changes: []change{learned("memory", "500Mi")},
			kubelet: &v1alpha1.Kubelet{EvictionHard: evicting("nodefs.available", "50%")},
			want:    map[string]string{"memory": "15884Mi", "ephemeral-storage": "50Gi"},
		},
		"percentages of memory": {
			kubelet: &v1alpha1.Kubelet{EvictionHard: evicting("memory.available", "25%")},
			want:    map[string]string{"memory": "12Gi"},
		},
		"thresholds that are none": {
			kubelet: &v1alpha1.Kubelet{EvictionHard: evicting("memory.available", "100%")},
			want:    map[string]string{"memory": "16Gi"},
		},
		"more than there is": {
			changes: []change{capacity("memory", "1Gi"), learned("cpu", "90")},
			kubelet: &v1alpha1.Kubelet{KubeReserved: reserving("memory", "3Gi"), SystemReserved: reserving("memory", "3Gi")},
			want:    map[string]string{"memory": "0", "cpu": "0"},
		},
		"huge pages": {
			changes: []change{capacity("hugepages-1Gi", "2Gi")},
			want:    map[string]string{"memory": "14236Mi", "hugepages-1Gi": "2Gi"},
		},
		"more huge pages than memory": {
			changes: []change{capacity("hugepages-1Gi", "20Gi")},
			want:    map[string]string{"memory": "0"},
		},
		"other resources": {
			changes: []change{capacity("nvidia.com/gpu", "2"), capacity("example.com/license", "1")},
			want:    map[string]string{"nvidia.com/gpu": "2", "example.com/license": "1"},
		},
		"maxPods": {
			changes: []change{learned("pods", "0")},
			kubelet: &v1alpha1.Kubelet{MaxPods: new(int32(250))},
			want:    map[string]string{"pods": "250"},
		},
		"maxPods above what Nodes showed": {
			changes: []change{learned("pods", "20")},
			kubelet: &v1alpha1.Kubelet{MaxPods: new(int32(250))},
			want:    map[string]string{"pods": "30"},
		},
		"maxPods below what Nodes showed": {
			changes: []change{learned("pods", "20")},
			kubelet: &v1alpha1.Kubelet{MaxPods: new(int32(25))},
			want:    map[string]string{"pods": "25"},
		},
		"podsPerCore below the group's": {
			kubelet: &v1alpha1.Kubelet{PodsPerCore: new(int32(10))},
			want:    map[string]string{"pods": "40"},
		},
		"podsPerCore above maxPods": {
			kubelet: &v1alpha1.Kubelet{PodsPerCore: new(int32(10)), MaxPods: new(int32(30))},
			want:    map[string]string{"pods": "30"},
		},
		"podsPerCore of part of a CPU": {
			changes: []change{capacity("cpu", "500m")},
			kubelet: &v1alpha1.Kubelet{PodsPerCore: new(int32(10))},
			want:    map[string]string{"pods": "10"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := seen(t, group(t, "a", test.changes...), test.kubelet)
			planned := build(g)[0].Allocatable()
			for resourceName, want := range test.want {
				quantity := planned[corev1.ResourceName(resourceName)]
				assert.Zero(t, quantity.Cmp(resource.MustParse(want)), "%s is %s, not %s", resourceName, quantity.String(), want)
				promised := g.Allocatable[corev1.ResourceName(resourceName)]
				assert.Zero(t, promised.Cmp(quantity), "Create promises %s of %s, planned was %s", promised.String(), resourceName, quantity.String())
			}
		})
	}
}

func TestANodeClassThatSaysNothingSeesTheGroupItself(t *testing.T) {
	g := group(t, "a")
	assert.Same(t, g, seen(t, g, nil))
	assert.NotSame(t, build(g)[0], build(seen(t, g, &v1alpha1.Kubelet{MaxPods: new(int32(10))}))[0])
	assert.Equal(t, "50", g.Capacity.Pods().String(), "other NodeClasses see it as before")
}

func TestWhatCannotBeUsedOfADescriptionIsLeftOut(t *testing.T) {
	view, err := instancetype.NewView(&v1alpha1.ClusterAPINodeClassSpec{Kubelet: &v1alpha1.Kubelet{
		MaxPods:        new(int32(-1)),
		PodsPerCore:    new(int32(0)),
		KubeReserved:   map[string]v1alpha1.ReservedQuantity{"memory": "much", "cpu": "1", "pid": "100"},
		SystemReserved: map[string]v1alpha1.ReservedQuantity{"cpu": "-1"},
		EvictionHard:   map[string]v1alpha1.EvictionThreshold{"memory.available": "101%", "imagefs.available": "15%", "nodefs.available": "50%"},
	}})
	for _, field := range []string{
		"spec.kubelet.maxPods", "spec.kubelet.podsPerCore", "spec.kubelet.kubeReserved[memory]", `spec.kubelet.kubeReserved: "pid"`,
		"spec.kubelet.systemReserved[cpu]", "spec.kubelet.evictionHard[memory.available]", `spec.kubelet.evictionHard: "imagefs.available"`,
	} {
		require.ErrorContains(t, err, field)
	}
	g := view.Of(group(t, "a"))
	assert.Equal(t, "3", g.Allocatable.Cpu().String())
	assert.Equal(t, "50Gi", g.Allocatable.StorageEphemeral().String())
	assert.Equal(t, "50", g.Allocatable.Pods().String())
}

func TestEstimatesCanBeRuledOut(t *testing.T) {
	view, err := instancetype.NewView(&v1alpha1.ClusterAPINodeClassSpec{Price: v1alpha1.PricePolicy{WhenUnknown: v1alpha1.UnknownPriceUnavailable}})
	require.NoError(t, err)
	from := func(kind agentv1alpha1.SourceKind) change {
		return func(g *agentv1alpha1.NodeGroup) {
			g.Sources = map[string]*agentv1alpha1.ValueSource{"price": {Kind: kind}}
		}
	}
	estimated := group(t, "a", from(agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE))
	ruledOut := view.Of(estimated)
	assert.False(t, ruledOut.Available)
	require.ErrorContains(t, ruledOut.Accepts(requirements(), nil, nil), "spec.price.whenUnknown")
	assert.True(t, estimated.Available, "for other NodeClasses it is as before")
	assert.Empty(t, build(ruledOut)[0].Offerings.Available())
	for _, kind := range []agentv1alpha1.SourceKind{
		agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST, agentv1alpha1.SourceKind_SOURCE_KIND_UNSPECIFIED,
	} {
		known := group(t, "a", from(kind))
		assert.Same(t, known, view.Of(known))
	}
}

// The catalogue builds the instance types of all NodeClasses with one cache.
func TestARefusedPriceIsNotTakenOverByANodeClassThatAcceptsIt(t *testing.T) {
	view, err := instancetype.NewView(&v1alpha1.ClusterAPINodeClassSpec{Price: v1alpha1.PricePolicy{WhenUnknown: v1alpha1.UnknownPriceUnavailable}})
	require.NoError(t, err)
	from := func(kind agentv1alpha1.SourceKind) change {
		return func(g *agentv1alpha1.NodeGroup) {
			g.Sources = map[string]*agentv1alpha1.ValueSource{"price": {Kind: kind}}
		}
	}
	listed := group(t, "b", price(0.2), from(agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST))
	for name, changes := range map[string][]change{"there is room": nil, "there is no room": {full}} {
		estimated := group(t, "a", append(changes, price(0.1), from(agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE))...)
		built := instancetype.Built{}
		cost := func(first *instancetype.Group) float64 {
			price, ok := instancetype.Build([]*instancetype.Group{first, listed}, asSaid, nil, built)[0].OfferingPrice("z1", "on-demand")
			require.True(t, ok)
			return price
		}
		assert.InDelta(t, 0.2, cost(view.Of(estimated)), 0, name)
		assert.InDelta(t, 0.1, cost(estimated), 0, name)
	}
}

func TestVolumeLimitsAreTheLeastThatIsKnown(t *testing.T) {
	limits := func(limits map[string]int32) change {
		return func(g *agentv1alpha1.NodeGroup) { g.AttachableVolumes = limits }
	}
	it := build(
		group(t, "a", limits(map[string]int32{"disk.example.com": 25, "nfs.example.com": 3})),
		group(t, "b", limits(map[string]int32{"disk.example.com": 15})),
		group(t, "c"),
	)[0]
	assert.Equal(t, map[string]int{"disk.example.com": 15, "nfs.example.com": 3}, it.VolumeAttachmentLimits)
	g, err := instancetype.NewGroup(nodeGroup("a", limits(map[string]int32{"disk.example.com": -1, "nfs.example.com": 0})))
	require.ErrorContains(t, err, "disk.example.com")
	assert.Equal(t, map[string]int{"nfs.example.com": 0}, g.Volumes)
}

func TestDevicesAreThoseThatEveryGroupHas(t *testing.T) {
	devices := func(counts ...*agentv1alpha1.DeviceCount) change {
		return func(g *agentv1alpha1.NodeGroup) { g.Devices = counts }
	}
	gpus := func(n int32) *agentv1alpha1.DeviceCount {
		return &agentv1alpha1.DeviceCount{Driver: "gpu.example.com", Kind: "gpu", Count: n}
	}
	groups := []*instancetype.Group{
		group(t, "a", devices(gpus(4), &agentv1alpha1.DeviceCount{Driver: "nic.example.com", Count: 1})), group(t, "b", devices(gpus(2))),
	}
	templates := build(groups...)[0].DynamicResources.ResourceSliceTemplates
	require.Len(t, templates, 1)
	assert.Equal(t, "gpu.example.com", templates[0].Driver.Value())
	require.Len(t, templates[0].Devices, 2)
	assert.NotEqual(t, templates[0].Devices[0].Name, templates[0].Devices[1].Name)
	assert.Equal(t, "gpu", *templates[0].Devices[0].Attributes["type"].StringValue)
	mismatches := strings.Join(instancetype.Mismatches(groups, instancetype.ZoneUse{}), "\n")
	assert.Contains(t, mismatches, "devices of driver gpu.example.com beyond 2")
	assert.Contains(t, mismatches, "devices of driver nic.example.com beyond 0")

	g, err := instancetype.NewGroup(nodeGroup("a", devices(gpus(1<<30), &agentv1alpha1.DeviceCount{Driver: "no name!", Count: 1})))
	require.ErrorContains(t, err, "no name!")
	assert.Len(t, build(g)[0].DynamicResources.ResourceSliceTemplates[0].Devices, 128, "what a ResourceSlice holds")
}

// asKubelet is the kubelet's own calculation (pkg/kubelet/nodestatus.MachineInfo and
// cm.GetNodeAllocatableReservation). It shares no code with the code under test.
func asKubelet(machine map[string]int64, maxPods, podsPerCore int64, kube, system map[string]int64, eviction map[string]string) map[string]int64 {
	node := lo.Assign(machine)
	node["pods"] = maxPods
	if podsPerCore > 0 {
		node["pods"] = min(machine["cpu"]/1000*podsPerCore, maxPods)
	}
	evicts := map[string]int64{}
	for signal, name := range map[string]string{"memory.available": "memory", "nodefs.available": "ephemeral-storage"} {
		threshold, ok := eviction[signal]
		switch {
		case !ok || threshold == "0%" || threshold == "100%":
		case strings.HasSuffix(threshold, "%"):
			percentage, _ := strconv.ParseFloat(strings.TrimRight(threshold, "%"), 32)
			evicts[name] = int64(float64(machine[name]) * float64(float32(percentage)/100))
		default:
			quantity := resource.MustParse(threshold)
			evicts[name] = quantity.Value()
		}
	}
	for name := range machine {
		node[name] = max(node[name]-kube[name]-system[name]-evicts[name], 0)
	}
	for name, quantity := range machine {
		if strings.HasPrefix(name, "hugepages-") {
			node["memory"] = max(node["memory"]-quantity, 0)
		}
	}
	return node
}

func TestAllocatableIsWhatAKubeletReports(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	const mi = int64(1) << 20
	for range 2000 {
		machine := map[string]int64{
			"cpu": 1000 * (1 + random.Int64N(128)), "memory": random.Int64N(256<<10) * mi, "ephemeral-storage": random.Int64N(1 << 40), "pods": 110,
		}
		if random.IntN(3) == 0 {
			machine["hugepages-2Mi"] = random.Int64N(8<<10) * mi
		}
		if random.IntN(3) == 0 {
			machine["nvidia.com/gpu"] = 1 + random.Int64N(8)
		}
		spec, eviction := &v1alpha1.Kubelet{}, map[string]string{"memory.available": "100Mi", "nodefs.available": "10%"}
		kube, system := map[string]int64{}, map[string]int64{}
		for _, reserved := range []struct {
			amounts map[string]int64
			into    *map[string]v1alpha1.ReservedQuantity
		}{{kube, &spec.KubeReserved}, {system, &spec.SystemReserved}} {
			*reserved.into = map[string]v1alpha1.ReservedQuantity{}
			if random.IntN(2) == 0 {
				reserved.amounts["cpu"] = random.Int64N(2000)
				(*reserved.into)["cpu"] = v1alpha1.ReservedQuantity(fmt.Sprintf("%dm", reserved.amounts["cpu"]))
			}
			for _, name := range []string{"memory", "ephemeral-storage"} {
				if random.IntN(2) == 0 {
					reserved.amounts[name] = random.Int64N(4<<10) * mi
					(*reserved.into)[name] = v1alpha1.ReservedQuantity(fmt.Sprintf("%dMi", reserved.amounts[name]/mi))
				}
			}
		}
		if random.IntN(2) == 0 {
			eviction, spec.EvictionHard = map[string]string{}, map[string]v1alpha1.EvictionThreshold{}
			for _, signal := range []string{"memory.available", "nodefs.available"} {
				if random.IntN(3) > 0 {
					eviction[signal] = []string{"5%", "12.5%", "0%", "100%", "99.9%", "750Mi", "1Gi", "33%"}[random.IntN(8)]
					spec.EvictionHard[signal] = v1alpha1.EvictionThreshold(eviction[signal])
				}
			}
		}
		maxPods, podsPerCore := int64(110), int64(0)
		if random.IntN(2) == 0 {
			maxPods = 1 + random.Int64N(500)
			spec.MaxPods = new(int32(maxPods))
		}
		if random.IntN(2) == 0 {
			podsPerCore = 1 + random.Int64N(20)
			spec.PodsPerCore = new(int32(podsPerCore))
		}
		described := lo.MapEntries(machine, func(name string, quantity int64) (string, string) {
			if name == "cpu" {
				return name, fmt.Sprintf("%dm", quantity)
			}
			return name, strconv.FormatInt(quantity, 10)
		})
		planned := build(seen(t, group(t, "a", func(g *agentv1alpha1.NodeGroup) { g.Capacity = described }), spec))[0].Allocatable()
		for name, want := range asKubelet(machine, maxPods, podsPerCore, kube, system, eviction) {
			quantity := planned[corev1.ResourceName(name)]
			got := quantity.Value()
			if name == "cpu" {
				got = quantity.MilliValue()
			}
			require.Equal(t, want, got, "%s of %v with %+v", name, described, spec)
		}
	}
}

// A planned node of a type has, of each resource, the minimum that its launchable groups can
// provide. Create then promises at least as much.
func TestAMergedTypeGivesWhatEveryGroupCanGive(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	pick := func(values ...string) string { return values[random.IntN(len(values))] }
	for range 1000 {
		var groups []*instancetype.Group
		for i := range 1 + random.IntN(4) {
			changes := []change{
				capacity("memory", pick("1Gi", "15Gi", "16Gi", "50Mi")), capacity("cpu", pick("1", "4", "3900m")), capacity("pods", pick("10", "110")),
			}
			for _, optional := range []change{
				learned("memory", pick("0", "300Mi", "20Gi")), learned("cpu", pick("80m", "7")), capacity("hugepages-2Mi", pick("512Mi", "8Gi")),
				capacity("nvidia.com/gpu", pick("1", "2")), func(g *agentv1alpha1.NodeGroup) { delete(g.GetCapacity(), "ephemeral-storage") },
			} {
				if random.IntN(3) == 0 {
					changes = append(changes, optional)
				}
			}
			groups = append(groups, group(t, fmt.Sprint("g", i), changes...))
		}
		it := build(groups...)[0]
		if launched := lo.Filter(groups, func(g *instancetype.Group, _ int) bool { return g.NoCapacity == "" }); len(launched) > 0 {
			groups = launched
		}
		for name, quantity := range it.Allocatable() {
			least := lo.MinBy(groups, func(a, b *instancetype.Group) bool {
				x := a.Allocatable[name]
				return x.Cmp(b.Allocatable[name]) < 0
			}).Allocatable[name]
			require.Zero(t, quantity.Cmp(least), "%s: %s, and the least is %s", name, quantity.String(), least.String())
			capacity := it.Capacity[name]
			require.LessOrEqual(t, quantity.Cmp(capacity), 0, name)
		}
	}
}

func FuzzThreshold(f *testing.F) {
	for _, seed := range []string{"", "%", "5%", "100%", "-1%", "NaN%", "Inf%", "1e999%", "0x1p-2%", "5%%", "100Mi", "1e1000000000", "-5Gi", " 5% "} {
		f.Add(seed, int64(16<<30))
	}
	f.Fuzz(func(t *testing.T, text string, memory int64) {
		threshold, err := instancetype.ParseThreshold(text)
		if err != nil {
			return
		}
		view, err := instancetype.NewView(&v1alpha1.ClusterAPINodeClassSpec{Kubelet: &v1alpha1.Kubelet{
			EvictionHard: map[string]v1alpha1.EvictionThreshold{"memory.available": v1alpha1.EvictionThreshold(text)},
		}})
		require.NoError(t, err, "%v", threshold)
		g := view.Of(group(t, "a", capacity("memory", strconv.FormatInt(max(memory, 0), 10))))
		left := g.Allocatable.Memory()
		require.GreaterOrEqual(t, left.Sign(), 0)
		require.LessOrEqual(t, left.Cmp(*g.Capacity.Memory()), 0)
	})
}

func FuzzNodeGroup(f *testing.F) {
	f.Add("memory", "1e1000000000", "team", "no good", "z1", "gpu.example.com", int32(4))
	f.Add("nvidia.com/gpu", "-1", "karpenter.sh/nodepool", "x", "über", "", int32(-1))
	f.Add("hugepages-2Mi", "999Ei", "topology.kubernetes.io/zone", "", "", "no name!", int32(1<<30))
	f.Add("cpu", "4 ", "a/b/c", "\x00", "a=b", "x", int32(0))
	f.Fuzz(func(t *testing.T, name, quantity, key, value, zoneName, driver string, count int32) {
		described := func(g *agentv1alpha1.NodeGroup) {
			g.AttachableVolumes = map[string]int32{driver: count}
			g.Devices = []*agentv1alpha1.DeviceCount{{Driver: driver, Kind: value, Count: count}}
			g.Taints = []*agentv1alpha1.Taint{{Key: key, Value: value, Effect: zoneName}}
		}
		g, err := instancetype.NewGroup(nodeGroup(
			"a", zone(zoneName), capacity(name, quantity), learned(name, quantity), label(key, value), described,
		))
		if g == nil {
			require.Error(t, err)
			return
		}
		for _, it := range build(g, group(t, "b")) {
			for resourceName, left := range it.Allocatable() {
				require.GreaterOrEqual(t, left.Sign(), 0, resourceName)
			}
		}
	})
}
