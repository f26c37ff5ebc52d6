package instancetype

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// Remembered is what NodeClaims say of where their machines came from, whether or not a node group still says the same.
type Remembered struct {
	InstanceType string
	Zone         string
	CapacityType string
	// Price is the last known one that the node group was offered for, 0 if none is known.
	Price float64
}

// Remember returns what NodeClaims remember, each once and ordered, with the lowest price of those that are the same.
func Remember(all []Remembered) []Remembered {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Remembered) int {
		return cmp.Or(
			strings.Compare(a.InstanceType, b.InstanceType), strings.Compare(a.Zone, b.Zone),
			strings.Compare(a.CapacityType, b.CapacityType), cmp.Compare(a.Price, b.Price),
		)
	})
	return slices.CompactFunc(all, func(a, b Remembered) bool {
		return a.InstanceType == b.InstanceType && a.Zone == b.Zone && a.CapacityType == b.CapacityType
	})
}

func (r Remembered) key() string {
	return "|" + r.Zone + "," + r.CapacityType + "," + strconv.FormatFloat(r.Price, 'g', -1, 64)
}

// offering is never available. It says no more than what core compares a NodeClaim's labels with: whatever else its Node has been
// told is the group's to change.
//
// It names no reservation either: core takes the least that any offering of a reservation has left.
func (r Remembered) offering(price float64) *cloudprovider.Offering {
	requirements := scheduling.NewRequirements(
		scheduling.NewRequirement(corev1.LabelTopologyZone, corev1.NodeSelectorOpIn, r.Zone),
		scheduling.NewRequirement(karpv1.CapacityTypeLabelKey, corev1.NodeSelectorOpIn, r.CapacityType),
	)
	if r.CapacityType != karpv1.CapacityTypeReserved {
		requirements.Add(scheduling.NewRequirement(v1alpha1.ReservationLabel, corev1.NodeSelectorOpDoesNotExist))
	}
	return &cloudprovider.Offering{Requirements: requirements, Price: price}
}

// gone is an instance type that only NodeClaims remember. Nothing fits on it, and as a type it names no zone, so that pods that
// spread over zones do not wait for one that nothing can be had in.
func gone(name string, remembered []Remembered) *cloudprovider.InstanceType {
	requirements := requirementsOf(map[string]string{corev1.LabelInstanceTypeStable: name})
	return &cloudprovider.InstanceType{
		Name:         name,
		Requirements: requirements,
		Offerings:    lo.Map(remembered, func(r Remembered, _ int) *cloudprovider.Offering { return r.offering(r.Price) }),
		Capacity:     corev1.ResourceList{},
		Overhead:     &cloudprovider.InstanceTypeOverhead{},
	}
}
