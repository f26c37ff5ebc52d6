package instancetype

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
)

// Mismatches names, in sentences, instance types whose groups do not all have the same resources. Only what every group has
// can be scheduled on, so a GPU of one group of several is invisible.
func Mismatches(groups []*Group) []string {
	byName := lo.GroupBy(groups, func(g *Group) string { return g.InstanceType })
	var mismatches []string
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		members := byName[name]
		common := smallest(members)
		for _, g := range members {
			var extra []string
			for resource := range g.Capacity {
				if _, ok := common[resource]; !ok && resource != corev1.ResourceEphemeralStorage {
					extra = append(extra, string(resource))
				}
			}
			if len(extra) > 0 {
				slices.Sort(extra)
				mismatches = append(mismatches, fmt.Sprintf(
					"%s: other node groups of instance type %q lack %s, which is ignored; give the groups different instance types",
					g.ID, name, strings.Join(extra, ", "),
				))
			}
		}
	}
	return mismatches
}
