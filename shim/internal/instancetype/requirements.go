package instancetype

import (
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/karpenter/pkg/scheduling"
)

// RequirementsKey returns a text that differs whenever the requirements do. Their String method
// leaves out values if there are more than five.
func RequirementsKey(requirements scheduling.Requirements) string {
	parts := make([]string, 0, len(requirements))
	for _, requirement := range requirements {
		parts = append(parts, fmt.Sprintf("%s %q", requirement, slices.Sorted(slices.Values(requirement.Values()))))
	}
	slices.Sort(parts)
	return strings.Join(parts, "\n")
}
