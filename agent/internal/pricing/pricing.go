// Package pricing says what one machine costs: what people wrote, else an estimate that grows with what the machine has, so
// that the cheaper of two machines is also the smaller one.
package pricing

import (
	"math"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

// Annotation on a MachineDeployment holds what one of its machines costs each hour, a number.
const Annotation = "cluster.x-k8s.io/machine-current-price"

// Coefficients of the estimate, each hour. They follow the ratios between the large clouds' list prices; only the order that
// results means anything.
const (
	PerMachine     = 0.001
	PerCPU         = 0.03
	PerGiB         = 0.004
	PerGiBStorage  = 0.0001
	PerAccelerator = 0.75
	// SpotShare is what a spot machine costs of an on-demand one.
	SpotShare = 0.4
)

// Price is what one machine costs.
type Price struct {
	// PerHour is never negative, and finite.
	PerHour float64
	// Source says where it came from.
	Source capacity.Source
}

// Of returns what a machine costs, and what is wrong with the annotation, if anything is.
func Of(md *clusterv1.MachineDeployment, machine capacity.Description) (Price, *capacity.Problem) {
	text, present := md.Annotations[Annotation]
	var problem *capacity.Problem
	if present {
		perHour, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err == nil && perHour >= 0 && !math.IsInf(perHour, 1) {
			return Price{PerHour: perHour, Source: capacity.Source{Kind: capacity.FromAnnotation, Detail: Annotation}}, nil
		}
		problem = &capacity.Problem{
			Field: capacity.AnnotationField(Annotation), Value: text, Message: "is not a price; write a number, 0 or more, for example 0.096",
		}
	}
	return Price{
		PerHour: Estimate(machine.Resources, machine.CapacityType),
		Source:  capacity.Source{Kind: capacity.FromEstimate, Detail: "from the resources and the capacity type"},
	}, problem
}

// Estimate returns a price for what a machine has. It grows with every resource but pods, which cost nothing.
func Estimate(resources corev1.ResourceList, capacityType string) float64 {
	const gibibyte = 1 << 30
	amount := func(quantity resource.Quantity) float64 { return max(quantity.AsApproximateFloat64(), 0) }
	price := PerMachine
	for name, quantity := range resources {
		switch {
		case name == corev1.ResourceCPU:
			price += PerCPU * amount(quantity)
		case name == corev1.ResourceMemory:
			price += PerGiB * amount(quantity) / gibibyte
		case name == corev1.ResourceEphemeralStorage:
			price += PerGiBStorage * amount(quantity) / gibibyte
		case strings.Contains(string(name), "/"):
			price += PerAccelerator * amount(quantity)
		}
	}
	if capacityType == wire.CapacityTypeSpot {
		price *= SpotShare
	}
	return min(price, math.MaxFloat64)
}
