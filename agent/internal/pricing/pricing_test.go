package pricing_test

import (
	"math"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

func machine(cpu, memory, capacityType string) capacity.Description {
	return capacity.Description{CapacityType: capacityType, Resources: corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory),
	}}
}

func priced(text string) *clusterv1.MachineDeployment {
	return &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{pricing.Annotation: text}}}
}

func TestAnnotationIsThePrice(t *testing.T) {
	g := NewWithT(t)
	price, problem := pricing.Of(priced(" 0.096 "), machine("4", "16Gi", wire.CapacityTypeOnDemand))
	g.Expect(problem).To(BeNil())
	g.Expect(price.PerHour).To(Equal(0.096))
	g.Expect(price.Source.Kind).To(Equal(capacity.FromAnnotation))
}

func TestUnusableAnnotationIsAProblemAndThePriceIsEstimated(t *testing.T) {
	for _, text := range []string{"", "free", "-1", "NaN", "Inf", "1e999"} {
		g := NewWithT(t)
		price, problem := pricing.Of(priced(text), machine("4", "16Gi", wire.CapacityTypeOnDemand))
		g.Expect(problem).NotTo(BeNil(), text)
		g.Expect(price.PerHour).To(BeNumerically(">", 0))
		g.Expect(price.Source.Kind).To(Equal(capacity.FromEstimate))
	}
}

func TestEstimateGrowsWithResourcesAndSpotIsCheaper(t *testing.T) {
	g := NewWithT(t)
	estimate := func(d capacity.Description) float64 { return pricing.Estimate(d.Resources, d.CapacityType) }
	small := estimate(machine("2", "8Gi", wire.CapacityTypeOnDemand))
	g.Expect(estimate(machine("4", "8Gi", wire.CapacityTypeOnDemand))).To(BeNumerically(">", small))
	g.Expect(estimate(machine("2", "16Gi", wire.CapacityTypeOnDemand))).To(BeNumerically(">", small))
	g.Expect(estimate(machine("2", "8Gi", wire.CapacityTypeSpot))).To(BeNumerically("<", small))
	gpu := machine("2", "8Gi", wire.CapacityTypeOnDemand)
	gpu.Resources["nvidia.com/gpu"] = resource.MustParse("1")
	g.Expect(estimate(gpu)).To(BeNumerically(">", small))
}

func FuzzOf(f *testing.F) {
	f.Add("0.1")
	f.Add("1e400")
	f.Add("0x1p-2")
	f.Fuzz(func(t *testing.T, text string) {
		price, _ := pricing.Of(priced(text), machine("4", "16Gi", wire.CapacityTypeSpot))
		if price.PerHour < 0 || math.IsNaN(price.PerHour) || math.IsInf(price.PerHour, 0) {
			t.Errorf("%q became %v", text, price.PerHour)
		}
	})
}
