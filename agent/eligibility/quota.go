package eligibility

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// MachineCount is the name under which a ResourceQuota counts Machines.
const MachineCount corev1.ResourceName = "count/machines.cluster.x-k8s.io"

// Quota says why no Machine can be added in the namespace that the quotas are of, or nil when one can. It goes by what the
// quotas' controller has noted; the API server has the last word.
func Quota(quotas []corev1.ResourceQuota, nodeGroup string) *Refusal {
	var exhausted []string
	for i := range quotas {
		hard, limited := quotas[i].Status.Hard[MachineCount]
		used, counted := quotas[i].Status.Used[MachineCount]
		if limited && counted && used.Cmp(hard) >= 0 {
			exhausted = append(exhausted, fmt.Sprintf("ResourceQuota %s allows %s %s and %s are used",
				quotas[i].Name, hard.String(), MachineCount, used.String()))
		}
	}
	if len(exhausted) == 0 {
		return nil
	}
	slices.Sort(exhausted)
	return &Refusal{NodeGroup: nodeGroup, Reason: QuotaExceeded, Message: strings.Join(exhausted, "; ") + "; raise spec.hard, or remove Machines"}
}
