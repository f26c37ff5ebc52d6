// Package pricing says what one machine costs: what people wrote about the node group, else a price list, else an estimate that
// grows with what the machine has, so that the cheaper of two machines is also the smaller one.
package pricing

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

// Annotation on a MachineDeployment holds what one of its machines costs each hour, a number. So does [CapacityAnnotation], which stands beside
// the other capacity annotations; where both can be used, the first counts.
const (
	Annotation         = "cluster.x-k8s.io/machine-current-price"
	CapacityAnnotation = "capacity.cluster-autoscaler.kubernetes.io/price"
)

// Policy says how prices are found. The zero value has no list and makes every estimate nearly nothing.
type Policy struct {
	// List may be nil.
	List *List
	// Currency is that of annotations, and of a list that names none; may be empty.
	Currency string
	// Coefficients make the estimate.
	Coefficients Coefficients
}

// Coefficients make the estimate, each hour. Only the order of the prices that result means anything. All are finite and not
// negative.
type Coefficients struct {
	// PerCPU and PerGiB are the prices of a core and of a GiB of memory.
	PerCPU, PerGiB float64
	// PerAccelerator is the price of one of any extended resource, or of one device.
	PerAccelerator float64
	// SpotShare is what a spot machine costs of an on-demand one; above 0, at most 1.
	SpotShare float64
}

// DefaultCoefficients follow the ratios between the large clouds' list prices.
var DefaultCoefficients = Coefficients{PerCPU: 0.03, PerGiB: 0.004, PerAccelerator: 0.75, SpotShare: 0.4}

// What is not worth a setting: so that two small machines cost more than one of twice the size, and that more disk costs more.
const (
	perMachine    = 0.001
	perGiBStorage = 0.0001
)

// Price is what one machine costs.
type Price struct {
	// PerHour is never negative, and finite.
	PerHour float64
	// Currency is an ISO 4217 code, or empty.
	Currency string
	// Source says where it came from.
	Source capacity.Source
}

// Of returns what a machine costs, and what is wrong with the annotations.
func (p Policy) Of(md *clusterv1.MachineDeployment, machine capacity.Description) (Price, []capacity.Problem) {
	annotated, problems := p.annotated(md)
	if annotated != nil {
		return *annotated, problems
	}
	if price, found := p.List.price(machine); found {
		if price.Currency == "" {
			price.Currency = p.Currency
		}
		return price, problems
	}
	return Price{
		PerHour: p.Coefficients.Estimate(priced(machine), machine.CapacityType),
		Source:  capacity.Source{Kind: capacity.FromEstimate, Detail: "from the resources and the capacity type"},
	}, problems
}

// annotated returns the price that annotations say, nil if none does.
func (p Policy) annotated(md *clusterv1.MachineDeployment) (price *Price, problems []capacity.Problem) {
	for _, key := range []string{Annotation, CapacityAnnotation} {
		text, present := md.Annotations[key]
		if !present {
			continue
		}
		perHour, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		problem := capacity.Problem{Field: capacity.AnnotationField(key), Value: text}
		switch {
		case err != nil || !isPrice(perHour):
			problem.Message = "is not a price; write a number, 0 or more, for example 0.096"
		case price == nil:
			price = &Price{PerHour: perHour, Currency: p.Currency, Source: capacity.Source{Kind: capacity.FromAnnotation, Detail: key}}
			continue
		case price.PerHour != perHour:
			problem.Message = "is another price than that of " + price.Source.Detail + ", which counts; remove one of the two"
		default:
			continue
		}
		problems = append(problems, problem)
	}
	return price, problems
}

func isPrice(perHour float64) bool { return perHour >= 0 && !math.IsInf(perHour, 1) }

// priced is what an estimate is made from: the machine's resources and its devices. What only its Nodes showed is left out, except
// CPU and memory, without which nothing was scheduled on the group before: a price that rises because a first Node came would send
// pods to another group.
func priced(machine capacity.Description) corev1.ResourceList {
	resources := make(corev1.ResourceList, len(machine.Resources)+len(machine.Devices))
	for name, quantity := range machine.Resources {
		learned := machine.Sources["capacity."+string(name)].Kind == capacity.FromNodes
		if !learned || name == corev1.ResourceCPU || name == corev1.ResourceMemory {
			resources[name] = quantity
		}
	}
	for _, devices := range machine.Devices {
		if _, both := machine.Resources[corev1.ResourceName(devices.Kind)]; !both {
			resources[corev1.ResourceName("devices/"+devices.Driver)] = *resource.NewQuantity(int64(devices.Count), resource.DecimalSI)
		}
	}
	return resources
}

func isExtended(name corev1.ResourceName) bool { return strings.Contains(string(name), "/") }

// Estimate returns a price for what a machine has. It grows with every resource but pods, which cost nothing; it is finite and
// not negative.
func (c Coefficients) Estimate(resources corev1.ResourceList, capacityType string) float64 {
	const gibibyte = 1 << 30
	amount := func(quantity resource.Quantity) float64 { return max(quantity.AsApproximateFloat64(), 0) }
	price := perMachine
	for _, name := range slices.Sorted(maps.Keys(resources)) { // floats add up to the same only in the same order
		quantity := resources[name]
		switch {
		case name == corev1.ResourceCPU:
			price += c.PerCPU * amount(quantity)
		case name == corev1.ResourceMemory:
			price += c.PerGiB * amount(quantity) / gibibyte
		case name == corev1.ResourceEphemeralStorage:
			price += perGiBStorage * amount(quantity) / gibibyte
		case isExtended(name):
			price += c.PerAccelerator * amount(quantity)
		}
	}
	if capacityType == wire.CapacityTypeSpot {
		price *= c.SpotShare
	}
	return min(price, math.MaxFloat64)
}
