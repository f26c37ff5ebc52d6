package instancetype

import (
	"cmp"
	"slices"

	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
)

var capacityTypeRank = map[string]int{
	karpv1.CapacityTypeReserved: 0,
	karpv1.CapacityTypeSpot:     1,
	karpv1.CapacityTypeOnDemand: 2,
}

// Order returns the groups best first: available before unavailable, then by the price at which
// they are offered, which is next to nothing for reserved machines, then reserved before spot
// before on-demand, then by id. Core plans all types that fit, and counts on the cheapest one to be
// launched: it does not replace a spot machine by a cheaper on-demand one.
func Order(groups []*Group, available func(*Group) bool) []*Group {
	room := func(g *Group) int {
		if available(g) {
			return 0
		}
		return 1
	}
	return slices.SortedStableFunc(slices.Values(groups), func(a, b *Group) int {
		return cmp.Or(
			cmp.Compare(room(a), room(b)),
			cmp.Compare(a.Offered, b.Offered),
			cmp.Compare(capacityTypeRank[a.CapacityType], capacityTypeRank[b.CapacityType]),
			cmp.Compare(a.ID, b.ID),
		)
	})
}
