package eligibility

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// MachineCount is the resource name with which a ResourceQuota counts Machines.
const MachineCount corev1.ResourceName = "count/machines.cluster.x-k8s.io"

// Quota returns why no Machine can be added in the quotas' namespace, or nil if one can. It
// evaluates the quotas' status. The API server makes the final decision.
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
