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

// Order returns the groups best first: available before unavailable, then reserved before spot
// before on-demand, which is the order in which core prices launches, then by price, then by id.
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
			cmp.Compare(capacityTypeRank[a.CapacityType], capacityTypeRank[b.CapacityType]),
			cmp.Compare(a.Offered, b.Offered),
			cmp.Compare(a.ID, b.ID),
		)
	})
}
