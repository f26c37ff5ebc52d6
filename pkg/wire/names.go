package wire

import (
	"fmt"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// CapacityTypeLabel is Karpenter's well-known Node label for the capacity type.
const CapacityTypeLabel = "karpenter.sh/capacity-type"

// These are the values of [CapacityTypeLabel].
const (
	CapacityTypeOnDemand = "on-demand"
	CapacityTypeSpot     = "spot"
	CapacityTypeReserved = "reserved"
)

// CapacityType returns the value of [CapacityTypeLabel] for a capacity type. It returns on-demand
// if the type is unset, or unknown because the agent is newer, as nothing else may be assumed.
func CapacityType(t agentv1alpha1.CapacityType) string {
	switch t {
	case agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT:
		return CapacityTypeSpot
	case agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED:
		return CapacityTypeReserved
	default:
		return CapacityTypeOnDemand
	}
}

// ParseCapacityType returns the capacity type for a value of [CapacityTypeLabel].
func ParseCapacityType(value string) (agentv1alpha1.CapacityType, error) {
	switch value {
	case CapacityTypeOnDemand:
		return agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND, nil
	case CapacityTypeSpot:
		return agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT, nil
	case CapacityTypeReserved:
		return agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED, nil
	}
	return agentv1alpha1.CapacityType_CAPACITY_TYPE_UNSPECIFIED,
		fmt.Errorf("capacity type %q is not one of %s, %s, %s", value, CapacityTypeOnDemand, CapacityTypeSpot, CapacityTypeReserved)
}

// These are the names of claim phases, as used for users and in the MachineClaim resource.
const (
	PhasePending   = "Pending"
	PhaseBound     = "Bound"
	PhaseReleasing = "Releasing"
	PhaseEnded     = "Ended"
)

// ClaimPhase returns the name of a claim's phase. It returns "Unknown" if the phase is unset, or
// unknown because the agent is newer.
func ClaimPhase(phase agentv1alpha1.ClaimPhase) string {
	switch phase {
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING:
		return PhasePending
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND:
		return PhaseBound
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		return PhaseReleasing
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		return PhaseEnded
	default:
		return "Unknown"
	}
}

// ParseClaimPhase returns the phase with the given name.
func ParseClaimPhase(name string) (agentv1alpha1.ClaimPhase, error) {
	switch name {
	case PhasePending:
		return agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, nil
	case PhaseBound:
		return agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, nil
	case PhaseReleasing:
		return agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, nil
	case PhaseEnded:
		return agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, nil
	}
	return agentv1alpha1.ClaimPhase_CLAIM_PHASE_UNSPECIFIED, fmt.Errorf("%q is not a phase of a claim", name)
}
