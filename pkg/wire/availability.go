package wire

import agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"

// AvailabilityFor returns whether a node group takes the holder's claims now. The result is part of
// the group, or nil if the group has none. The message of an agent that does not report it for the
// group's own holder says too little, so the group counts as available: a claim shows whether it
// is.
func AvailabilityFor(group *agentv1alpha1.NodeGroup, holder string) *agentv1alpha1.Availability {
	switch {
	case holder == "" || group.GetHolder() != holder:
		return group.GetAvailability()
	case group.GetHolderAvailability() != nil:
		return group.GetHolderAvailability()
	case group.GetAvailability().GetReason() == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED:
		return &agentv1alpha1.Availability{Available: true}
	}
	return group.GetAvailability()
}
