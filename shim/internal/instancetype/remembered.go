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

// Remembered is a NodeClaim's record of where its machine came from, whether or not a node group
// still matches it.
type Remembered struct {
	InstanceType string
	Zone         string
	CapacityType string
	// Price is the last known offered price of the node group. If none is known, Known is false and
	// Price 0, with which core never replaces the Node to save money.
	Price float64
	Known bool
}

// Remember removes duplicates and sorts. Of duplicates it keeps the lowest known price.
func Remember(all []Remembered) []Remembered {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Remembered) int {
		return cmp.Or(
			strings.Compare(a.InstanceType, b.InstanceType), strings.Compare(a.Zone, b.Zone),
			strings.Compare(a.CapacityType, b.CapacityType), knownFirst(a, b), cmp.Compare(a.Price, b.Price),
		)
	})
	return slices.CompactFunc(all, func(a, b Remembered) bool {
		return a.InstanceType == b.InstanceType && a.Zone == b.Zone && a.CapacityType == b.CapacityType
	})
}

func knownFirst(a, b Remembered) int {
	switch {
	case a.Known == b.Known:
		return 0
	case a.Known:
		return -1
	default:
		return 1
	}
}

func (r Remembered) key() string {
	return "|" + r.Zone + "," + r.CapacityType + "," + strconv.FormatFloat(r.Price, 'g', -1, 64)
}

// offering returns an offering that is never available. It only contains what core compares a
// NodeClaim's labels with; the Node's other labels may change with the group.
//
// It names no reservation either: core uses the minimum over all offerings of a reservation.
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

// gone returns an instance type that only NodeClaims remember. Nothing fits on it. The type itself
// names no zone, so that pods with a zone spread constraint do not wait for a zone in which nothing
// is available.
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
