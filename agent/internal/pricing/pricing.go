// Package pricing determines the price of a machine. It comes from the node group's annotations,
// else from a price list, else from an estimate. The estimate grows with the machine's resources,
// so that the cheaper of two machines is also the smaller one.
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

// Annotation on a MachineDeployment holds the price of one of its machines per hour, as a number.
// [CapacityAnnotation], which belongs to the capacity annotations, does the same. If both are
// usable, Annotation takes precedence.
const (
	Annotation         = "cluster.x-k8s.io/machine-current-price"
	CapacityAnnotation = "capacity.cluster-autoscaler.kubernetes.io/price"
)

// Policy determines how prices are found. The zero value has no list, and its estimates are close
// to zero.
type Policy struct {
	// List may be nil.
	List *List
	// Currency is the currency of annotations, and of a list that has none. It may be empty.
	Currency string
	// Coefficients determine the estimate.
	Coefficients Coefficients
}

// Coefficients determine the hourly estimate. Only the order of the resulting prices is meaningful.
// All are finite and not negative.
type Coefficients struct {
	// PerCPU and PerGiB are the prices of a core and of a GiB of memory.
	PerCPU, PerGiB float64
	// PerAccelerator is the price of one unit of any extended resource, or of one device.
	PerAccelerator float64
	// SpotShare is the price of a spot machine relative to an on-demand machine: above 0, at most
	// 1.
	SpotShare float64
}

// DefaultCoefficients follow the ratios between the large clouds' list prices.
var DefaultCoefficients = Coefficients{PerCPU: 0.03, PerGiB: 0.004, PerAccelerator: 0.75, SpotShare: 0.4}

// These are not configurable. They make two small machines cost more than one of twice the size,
// and more disk cost more.
const (
	perMachine    = 0.001
	perGiBStorage = 0.0001
)

// Price is the price of one machine.
type Price struct {
	// PerHour is finite and never negative.
	PerHour float64
	// Currency is an ISO 4217 code, or empty.
	Currency string
	// Source identifies where the price came from.
	Source capacity.Source
}

// Of returns the price of a machine, and the problems with the annotations.
func (p Policy) Of(md *clusterv1.MachineDeployment, machine capacity.Description) (Price, []capacity.Problem) {
	annotated, problems := p.annotated(md)
	if annotated != nil {
		return *annotated, problems
	}
	if price, found := p.List.price(selectorOf(md, machine)); found {
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

// annotated returns the price from the annotations, or nil if they contain none.
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
			problem.Message = "differs from the price of " + price.Source.Detail + ", which takes precedence; remove one of the two"
		default:
			continue
		}
		problems = append(problems, problem)
	}
	return price, problems
}

func isPrice(perHour float64) bool { return perHour >= 0 && !math.IsInf(perHour, 1) }

// priced returns the inputs of an estimate: the machine's resources and devices. Learned resources
// are omitted, because a price that rises with the first Node would send pods to another group.
// Learned CPU and memory are included, because nothing could be scheduled on the group before they
// were known.
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

// Estimate returns a price for the resources. It grows with every resource except pods, which are
// free. It is finite and not negative.
func (c Coefficients) Estimate(resources corev1.ResourceList, capacityType string) float64 {
	const gibibyte = 1 << 30
	amount := func(quantity resource.Quantity) float64 { return max(quantity.AsApproximateFloat64(), 0) }
	price := perMachine
	// The order is fixed, because the sum of floats depends on it.
	for _, name := range slices.Sorted(maps.Keys(resources)) {
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
