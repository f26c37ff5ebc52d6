package instancetype

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/karpenter/pkg/scheduling"
)

// RequirementsKey returns a text that is the same for equal requirements alone. Their String, which is for
// people, leaves values out if there are more than five.
func RequirementsKey(requirements scheduling.Requirements) string {
	parts := make([]string, 0, len(requirements))
	for _, requirement := range requirements {
		parts = append(parts, fmt.Sprintf("%s %q", requirement, sets.List(sets.New(requirement.Values()...))))
	}
	slices.Sort(parts)
	return strings.Join(parts, "\n")
}
