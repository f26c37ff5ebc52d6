package protocol

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// repairDiffers reports whether the Machine's annotation for MachineHealthChecks does not agree
// with its claim.
func (s *Snapshot) repairDiffers(m *clusterv1.Machine) bool {
	if ClaimOf(m) == "" {
		return differs(m, false) // its claim handed it over or returned it, or another actor removed the label
	}
	c := s.boundTo(m)
	return c != nil && !c.Returns() && differs(m, c.Spec.HolderRepairs)
}

// SetRepair sets or removes the annotation that keeps MachineHealthChecks from remediating the
// Machine, because the holder of its claim does that. An annotation of another writer stays.
func SetRepair(m *clusterv1.Machine, holderRepairs bool) {
	switch {
	case !differs(m, holderRepairs):
	case holderRepairs:
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.MachineSkipRemediationAnnotation, v1alpha1.Group)
	default:
		delete(m.Annotations, clusterv1.MachineSkipRemediationAnnotation)
	}
}

// differs reports whether the annotation has to be set or removed.
func differs(m *clusterv1.Machine, holderRepairs bool) bool {
	value, skips := m.Annotations[clusterv1.MachineSkipRemediationAnnotation]
	return holderRepairs && !skips || !holderRepairs && value == v1alpha1.Group
}
