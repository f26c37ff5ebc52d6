package pricing_test

import (
	"math"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"pgregory.net/rapid"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

var estimates = pricing.Policy{Coefficients: pricing.DefaultCoefficients}

func machine(cpu, memory, capacityType string) capacity.Description {
	return capacity.Description{CapacityType: capacityType, Resources: corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory),
	}}
}

func priced(text string) *clusterv1.MachineDeployment {
	return &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{pricing.Annotation: text}}}
}

func TestUnusableAnnotationIsAProblemAndTheNextSourceIsAsked(t *testing.T) {
	for _, text := range []string{"", "free", "-1", "NaN", "Inf", "1e999", "0,096", "$0.1"} {
		price, problem := estimates.Of(priced(text), machine("4", "16Gi", wire.CapacityTypeOnDemand))
		require.NotNil(t, problem, text)
		require.Positive(t, price.PerHour)
		require.Equal(t, capacity.FromEstimate, price.Source.Kind)
	}
}

const prices = `
currency: EUR
prices:
- {instanceType: m5.large, perHour: 4}
- {instanceType: m5.large, capacityType: spot, perHour: 3}
- {instanceType: m5.large, zone: a, perHour: 2}
- {instanceType: m5.large, zone: a, capacityType: spot, perHour: 1}
- {instanceType: unused, perHour: 9}
`

func TestAnnotationOverTheMostSpecificEntryOverEstimate(t *testing.T) {
	for name, c := range map[string]struct {
		annotation               string
		instanceType, zone, kind string
		perHour                  float64
		currency                 string
		source                   capacity.SourceKind
		detail                   string
		problems                 bool
	}{
		"annotation": {
			annotation: " 0.096 ", instanceType: "m5.large", zone: "a", kind: "spot",
			perHour: 0.096, currency: "CHF", source: capacity.FromAnnotation, detail: pricing.Annotation,
		},
		"zone and capacity type": {
			instanceType: "m5.large", zone: "a", kind: "spot",
			perHour: 1, currency: "EUR", source: capacity.FromPriceList, detail: "the list instanceType=m5.large,zone=a,capacityType=spot",
		},
		"zone": {
			instanceType: "m5.large", zone: "a", kind: "reserved",
			perHour: 2, currency: "EUR", source: capacity.FromPriceList, detail: "the list instanceType=m5.large,zone=a",
		},
		"capacity type": {
			instanceType: "m5.large", zone: "b", kind: "spot",
			perHour: 3, currency: "EUR", source: capacity.FromPriceList, detail: "the list instanceType=m5.large,capacityType=spot",
		},
		"instance type, no zone": {
			instanceType: "m5.large", kind: "on-demand",
			perHour: 4, currency: "EUR", source: capacity.FromPriceList, detail: "the list instanceType=m5.large",
		},
		"unusable annotation": {
			annotation: "cheap", instanceType: "m5.large", zone: "b", kind: "on-demand",
			perHour: 4, currency: "EUR", source: capacity.FromPriceList, detail: "the list instanceType=m5.large", problems: true,
		},
		"estimate": {
			instanceType: "m5", zone: "a", kind: "on-demand",
			perHour: 0.185, source: capacity.FromEstimate, detail: "from the resources and the capacity type",
		},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := pricing.ParseList("the list", []byte(prices))
			require.NoError(t, err)
			md := &clusterv1.MachineDeployment{}
			if c.annotation != "" {
				md = priced(c.annotation)
			}
			m := machine("4", "16Gi", c.kind)
			m.InstanceType, m.Zone = c.instanceType, c.zone
			price, problems := pricing.Policy{List: list, Currency: "CHF", Coefficients: pricing.DefaultCoefficients}.Of(md, m)
			require.Len(t, problems, lo.Ternary(c.problems, 1, 0))
			require.InDelta(t, c.perHour, price.PerHour, 1e-9)
			require.Equal(t, c.currency, price.Currency)
			require.Equal(t, capacity.Source{Kind: c.source, Detail: c.detail}, price.Source)
		})
	}
}

// One list may serve hubs with several regions, providers and Clusters.
func TestTheMostSpecificEntryWins(t *testing.T) {
	const content = `
prices:
- {instanceType: a, perHour: 1}
- {instanceType: a, capacityType: spot, perHour: 2}
- {instanceType: a, infrastructure: Metal3Machine, perHour: 3}
- {instanceType: a, region: r, perHour: 4}
- {instanceType: a, region: r, infrastructure: Metal3Machine, perHour: 5}
- {instanceType: a, zone: z, perHour: 6}
- {instanceType: a, cluster: "*/*", perHour: 7}
- {instanceType: a, cluster: team-b/*, perHour: 8}
- {instanceType: a, cluster: team-b/production, perHour: 9}
- {instanceType: a, cluster: team-b/production, zone: z, perHour: 10}
- {instanceType: b, cluster: team-*/p*, perHour: 11}
`
	list, err := pricing.ParseList("the list", []byte(content))
	require.NoError(t, err)
	require.Equal(t, 11, list.Len())
	withoutClusters, err := pricing.ParseList("the list", []byte(strings.ReplaceAll(content, `cluster: "*/*"`, "cluster: nobody/*")))
	require.NoError(t, err)
	for name, c := range map[string]struct {
		list                                                      *pricing.List
		instanceType, cluster, zone, region, infrastructure, kind string
		perHour                                                   float64
		detail                                                    string
	}{
		"none":          {withoutClusters, "a", "team-a/x", "", "", "AWSMachine", "on-demand", 1, "instanceType=a"},
		"capacity type": {withoutClusters, "a", "team-a/x", "", "", "AWSMachine", "spot", 2, "instanceType=a,capacityType=spot"},
		"provider over capacity type": {
			withoutClusters, "a", "team-a/x", "", "", "Metal3Machine", "spot", 3, "instanceType=a,infrastructure=Metal3Machine",
		},
		"region": {withoutClusters, "a", "team-a/x", "", "r", "AWSMachine", "spot", 4, "instanceType=a,region=r"},
		"region and provider": {
			withoutClusters, "a", "team-a/x", "", "r", "Metal3Machine", "spot", 5, "instanceType=a,region=r,infrastructure=Metal3Machine",
		},
		"zone over region":       {withoutClusters, "a", "team-a/x", "z", "r", "Metal3Machine", "spot", 6, "instanceType=a,zone=z"},
		"any Cluster over zone":  {list, "a", "team-a/x", "z", "r", "Metal3Machine", "spot", 7, "instanceType=a,cluster=*/*"},
		"pattern":                {list, "a", "team-b/x", "z", "r", "Metal3Machine", "spot", 8, "instanceType=a,cluster=team-b/*"},
		"Cluster over pattern":   {list, "a", "team-b/production", "", "", "AWSMachine", "spot", 9, "instanceType=a,cluster=team-b/production"},
		"Cluster and zone":       {list, "a", "team-b/production", "z", "", "AWSMachine", "spot", 10, "instanceType=a,cluster=team-b/production,zone=z"},
		"asterisks in each part": {list, "b", "team-c/prod", "", "", "AWSMachine", "spot", 11, "instanceType=b,cluster=team-*/p*"},
	} {
		t.Run(name, func(t *testing.T) {
			md := &clusterv1.MachineDeployment{}
			md.Namespace, md.Spec.ClusterName, _ = strings.Cut(c.cluster, "/")
			md.Spec.Template.Spec.InfrastructureRef.Kind = c.infrastructure + "Template"
			m := machine("4", "16Gi", c.kind)
			m.InstanceType, m.Zone, m.Region = c.instanceType, c.zone, c.region
			price, _ := pricing.Policy{List: c.list}.Of(md, m)
			require.InDelta(t, c.perHour, price.PerHour, 0)
			require.Equal(t, "the list "+c.detail, price.Source.Detail)
		})
	}
	elsewhere := machine("4", "16Gi", wire.CapacityTypeOnDemand)
	elsewhere.InstanceType = "b"
	price, _ := pricing.Policy{List: list}.Of(&clusterv1.MachineDeployment{}, elsewhere)
	require.Equal(t, capacity.FromEstimate, price.Source.Kind, "the Cluster is not in the list")
}

func TestEitherAnnotationIsAPrice(t *testing.T) {
	for name, c := range map[string]struct {
		current, capacity string
		perHour           float64
		detail, problem   string
	}{
		"the capacity annotation": {capacity: "0.2", perHour: 0.2, detail: pricing.CapacityAnnotation},
		"both, alike":             {current: "0.20", capacity: "0.2", perHour: 0.2, detail: pricing.Annotation},
		"both, not alike":         {current: "0.1", capacity: "0.2", perHour: 0.1, detail: pricing.Annotation, problem: pricing.CapacityAnnotation},
		"one cannot be used":      {current: "cheap", capacity: "0.2", perHour: 0.2, detail: pricing.CapacityAnnotation, problem: pricing.Annotation},
		"the other cannot be":     {current: "0.1", capacity: "cheap", perHour: 0.1, detail: pricing.Annotation, problem: pricing.CapacityAnnotation},
	} {
		t.Run(name, func(t *testing.T) {
			md := &clusterv1.MachineDeployment{}
			md.Annotations = lo.OmitByValues(map[string]string{pricing.Annotation: c.current, pricing.CapacityAnnotation: c.capacity}, []string{""})
			price, problems := pricing.Policy{}.Of(md, machine("4", "16Gi", wire.CapacityTypeOnDemand))
			require.InDelta(t, c.perHour, price.PerHour, 0)
			require.Equal(t, capacity.Source{Kind: capacity.FromAnnotation, Detail: c.detail}, price.Source)
			fields := lo.Map(problems, func(p capacity.Problem, _ int) string { return p.Field })
			if c.problem == "" {
				require.Empty(t, fields)
				return
			}
			require.Equal(t, []string{capacity.AnnotationField(c.problem)}, fields)
		})
	}
}

func TestListWithoutACurrencyHasTheAnnotations(t *testing.T) {
	list, err := pricing.ParseList("the list", []byte("prices: [{instanceType: a, perHour: 1}]"))
	require.NoError(t, err)
	m := machine("1", "1Gi", wire.CapacityTypeOnDemand)
	m.InstanceType = "a"
	price, _ := pricing.Policy{List: list, Currency: "CHF"}.Of(&clusterv1.MachineDeployment{}, m)
	require.Equal(t, "CHF", price.Currency)
}

func TestListThatCannotBeUsedNamesTheField(t *testing.T) {
	for name, c := range map[string]struct{ content, want string }{
		"not YAML":               {"prices: [", "it is not YAML"},
		"a key twice":            {"currency: EUR\ncurrency: USD", "already set"},
		"another form":           {"[1, 2]", "it does not have the form of a price list"},
		"unknown field":          {"prices: [{instanceType: a, perHour: 1, planet: b}]", `unknown field "prices[0].planet"`},
		"misspelt case":          {"prices: [{instancetype: a, perHour: 1}]", `unknown field "prices[0].instancetype"`},
		"currency":               {"currency: Euro", `currency: "Euro" is not an ISO 4217 code`},
		"no instance type":       {"prices: [{perHour: 1}]", "prices[0].instanceType: is missing"},
		"no label value":         {"prices: [{instanceType: a, perHour: 1},{instanceType: a b, perHour: 1}]", "prices[1].instanceType:"},
		"zone":                   {"prices: [{instanceType: a, zone: a/b, perHour: 1}]", "prices[0].zone:"},
		"region":                 {"prices: [{instanceType: a, region: a/b, perHour: 1}]", "prices[0].region:"},
		"cluster":                {"prices: [{instanceType: a, cluster: production, perHour: 1}]", `prices[0].cluster: "production" is not a Cluster`},
		"pattern of clusters":    {"prices: [{instanceType: a, cluster: '[a]/b', perHour: 1}]", "prices[0].cluster:"},
		"infrastructure":         {"prices: [{instanceType: a, infrastructure: metal3, perHour: 1}]", `prices[0].infrastructure: "metal3" is not a kind`},
		"the same in a region":   {"prices: [{instanceType: a, region: r, perHour: 1},{instanceType: a, region: r, perHour: 1}]", "prices[1]: is for"},
		"capacity type":          {"prices: [{instanceType: a, capacityType: cheap, perHour: 1}]", "prices[0].capacityType:"},
		"no price":               {"prices: [{instanceType: a}]", "prices[0].perHour: is missing"},
		"negative":               {"prices: [{instanceType: a, perHour: -1}]", "prices[0].perHour: -1 is not a price"},
		"a price that is a word": {"prices: [{instanceType: a, perHour: free}]", "prices.perHour"},
		"infinite":               {"prices: [{instanceType: a, perHour: .inf}]", "json"},
		"the same machines":      {"prices: [{instanceType: a, perHour: 1},{instanceType: a, perHour: 2}]", "prices[1]: is for the same machines"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := pricing.ParseList("the list", []byte(c.content))
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestEstimateGrowsWithEveryResource(t *testing.T) {
	names := []corev1.ResourceName{
		corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods, "nvidia.com/gpu", "example.com/nic",
	}
	rapid.Check(t, func(t *rapid.T) {
		price := rapid.Float64Range(0, 1000)
		c := pricing.Coefficients{
			PerCPU: price.Draw(t, "perCPU"), PerGiB: price.Draw(t, "perGiB"), PerAccelerator: price.Draw(t, "perAccelerator"),
			SpotShare: rapid.Float64Range(0.01, 1).Draw(t, "spotShare"),
		}
		kind := rapid.SampledFrom([]string{wire.CapacityTypeOnDemand, wire.CapacityTypeSpot, wire.CapacityTypeReserved}).Draw(t, "capacity type")
		small, large := corev1.ResourceList{}, corev1.ResourceList{}
		for _, name := range rapid.SliceOfDistinct(rapid.SampledFrom(names), rapid.ID).Draw(t, "resources") {
			amount := rapid.Int64Range(0, 1<<40)
			less, more := amount.Draw(t, "amount"), amount.Draw(t, "amount")
			small[name] = *resource.NewQuantity(min(less, more), resource.DecimalSI)
			large[name] = *resource.NewQuantity(max(less, more), resource.DecimalSI)
		}
		// The last summands may be rounded away.
		if low, high := c.Estimate(small, kind), c.Estimate(large, kind); low > high*(1+1e-9) || low <= 0 || math.IsInf(high, 0) {
			t.Fatalf("%v costs %v, and %v costs %v", small, low, large, high)
		}
		if c.Estimate(large, wire.CapacityTypeSpot) > c.Estimate(large, wire.CapacityTypeOnDemand)*(1+1e-9) {
			t.Fatal("spot is dearer than on demand")
		}
	})
}

func TestEachResourceCostsSomething(t *testing.T) {
	estimate := func(d capacity.Description) float64 {
		price, _ := estimates.Of(&clusterv1.MachineDeployment{}, d)
		return price.PerHour
	}
	small := estimate(machine("2", "8Gi", wire.CapacityTypeOnDemand))
	require.Greater(t, estimate(machine("4", "8Gi", wire.CapacityTypeOnDemand)), small)
	require.Greater(t, estimate(machine("2", "16Gi", wire.CapacityTypeOnDemand)), small)
	require.Less(t, estimate(machine("2", "8Gi", wire.CapacityTypeSpot)), small)
	gpu := machine("2", "8Gi", wire.CapacityTypeOnDemand)
	gpu.Resources["nvidia.com/gpu"] = resource.MustParse("1")
	require.Greater(t, estimate(gpu), small)
	devices := machine("2", "8Gi", wire.CapacityTypeOnDemand)
	devices.Devices = []capacity.Devices{{Driver: "gpu.nvidia.com", Count: 1}}
	require.InDelta(t, estimate(gpu), estimate(devices), 1e-9)
	gpu.Devices = []capacity.Devices{{Driver: "gpu.nvidia.com", Count: 1, Kind: "nvidia.com/gpu"}}
	require.InDelta(t, estimate(devices), estimate(gpu), 1e-9, "not counted twice")
}

func TestWhatOnlyNodesShowedDoesNotChangeTheEstimate(t *testing.T) {
	described := machine("2", "8Gi", wire.CapacityTypeOnDemand)
	before, _ := estimates.Of(&clusterv1.MachineDeployment{}, described)
	described.Sources = map[string]capacity.Source{}
	for name, quantity := range map[corev1.ResourceName]string{
		"devices.kubevirt.io/kvm": "1k", "nvidia.com/gpu": "8", corev1.ResourceEphemeralStorage: "100Gi", "hugepages-2Mi": "1Gi",
	} {
		described.Resources[name] = resource.MustParse(quantity)
		described.Sources["capacity."+string(name)] = capacity.Source{Kind: capacity.FromNodes}
	}
	after, _ := estimates.Of(&clusterv1.MachineDeployment{}, described)
	require.InDelta(t, before.PerHour, after.PerHour, 1e-9)
	for _, name := range []string{"cpu", "memory"} {
		described.Sources["capacity."+name] = capacity.Source{Kind: capacity.FromNodes}
	}
	after, _ = estimates.Of(&clusterv1.MachineDeployment{}, described)
	require.InDelta(t, before.PerHour, after.PerHour, 1e-9, "CPU and memory, which have no other source, count")
}

func FuzzAnnotation(f *testing.F) {
	for _, text := range []string{"0.1", "1e400", "0x1p-2", "NaN", "-0", "", " 1 ", "0,5", "1_000", strings.Repeat("9", 400)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		price, problem := estimates.Of(priced(text), machine("4", "16Gi", wire.CapacityTypeSpot))
		if price.PerHour < 0 || math.IsNaN(price.PerHour) || math.IsInf(price.PerHour, 0) {
			t.Errorf("%q became %v", text, price.PerHour)
		}
		if (problem == nil) != (price.Source.Kind == capacity.FromAnnotation) {
			t.Errorf("%q: problem %v, and the price is from %s", text, problem, price.Source.Kind)
		}
	})
}

func FuzzParseList(f *testing.F) {
	for _, text := range []string{
		prices, "", "null", "prices:", "[]", "{}", "- a", "prices: [null]", "prices: [{}]", "prices: {a: 1}", "currency: 1",
		"prices: [{instanceType: 1, perHour: 1}]", "prices: [{instanceType: a, perHour: 1e400}]", "prices: [{instanceType: a, perHour: '1'}]",
		"a: &a [x]\nb: &b [*a,*a]\nprices: [*b]", "\x00", "prices:\n\t- x", "%YAML 9.9\n---\n{}", "--- {}\n--- {}", "? {}\n: {}",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, err := pricing.ParseList("the list", []byte(text))
		if (list == nil) == (err == nil) {
			t.Fatalf("%q: %v, %v", text, list, err)
		}
		m := machine("4", "16Gi", wire.CapacityTypeSpot)
		m.InstanceType, m.Zone = "m5.large", "a"
		price, _ := pricing.Policy{List: list}.Of(&clusterv1.MachineDeployment{}, m)
		if price.PerHour < 0 || math.IsNaN(price.PerHour) || math.IsInf(price.PerHour, 0) || price.Currency != "" && !pricing.IsCurrency(price.Currency) {
			t.Errorf("%q became %+v", text, price)
		}
	})
}
