package catalogue

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// maxMessage and maxCurrency truncate texts of the agent.
const (
	maxMessage  = 256
	maxCurrency = 8
)

// selected describes groups for a NodeClass's status. If there are too many, unavailable groups
// take precedence: they are what users look for.
func (s *Snapshot) selected(groups []*instancetype.Group, unusable []*agentv1alpha1.NodeGroup) []v1alpha1.SelectedNodeGroup {
	more := len(groups) + len(unusable) - v1alpha1.MaxSelectedNodeGroups
	if more > 0 {
		unusable = lo.Slice(unusable, 0, v1alpha1.MaxSelectedNodeGroups)
		available, without := lo.FilterReject(groups, func(g *instancetype.Group, _ int) bool { return s.conditions.Available(g) })
		groups = lo.Slice(append(without, available...), 0, v1alpha1.MaxSelectedNodeGroups-len(unusable))
	}
	shown := make([]v1alpha1.SelectedNodeGroup, 0, len(groups)+len(unusable))
	for _, g := range groups {
		shown = append(shown, s.show(g))
	}
	for _, source := range unusable {
		shown = append(shown, v1alpha1.SelectedNodeGroup{
			Name:            source.GetId(),
			Reason:          v1alpha1.ReasonUnusable,
			Message:         lo.Substring(s.invalid[source.GetId()].Error(), 0, maxMessage),
			RolloutStrategy: strategyOf(source),
			RollingOut:      source.GetRollingOut(),
		})
	}
	slices.SortFunc(shown, func(a, b v1alpha1.SelectedNodeGroup) int { return cmp.Compare(a.Name, b.Name) })
	return shown
}

func (s *Snapshot) show(g *instancetype.Group) v1alpha1.SelectedNodeGroup {
	shown := v1alpha1.SelectedNodeGroup{
		Name:            g.ID,
		InstanceType:    g.InstanceType,
		Zone:            g.Zone,
		CapacityType:    g.CapacityType,
		PriceSource:     instancetype.PriceSource(g.Source),
		Available:       s.conditions.Available(g),
		RolloutStrategy: strategyOf(g.Source),
		RollingOut:      g.Source.GetRollingOut(),
	}
	if g.Source.GetPrice() != nil {
		shown.Price = strconv.FormatFloat(g.Price, 'g', 6, 64)
		shown.Currency = lo.Substring(g.Source.GetPrice().GetCurrency(), 0, maxCurrency)
	}
	if shown.Available {
		return shown
	}
	switch availability := wire.AvailabilityFor(g.Source, v1alpha1.Holder); {
	case !availability.GetAvailable():
		shown.Reason, shown.Message = reasonOf(availability.GetReason()), availability.GetMessage()
	case g.PriceRefused != "":
		shown.Reason, shown.Message = v1alpha1.ReasonPriceUnknown, g.PriceRefused
	case g.NoCapacity != "":
		shown.Reason, shown.Message = v1alpha1.ReasonNoCapacity, g.NoCapacity
	default:
		shown.Reason, shown.Message = v1alpha1.ReasonNoRoom, "the agent has just refused a claim; Karpenter tries again soon"
	}
	shown.Message = lo.Substring(shown.Message, 0, maxMessage)
	return shown
}

func strategyOf(source *agentv1alpha1.NodeGroup) string {
	switch source.GetRolloutStrategy() {
	case agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE:
		return v1alpha1.StrategyOnDelete
	case agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ROLLING_UPDATE:
		return v1alpha1.StrategyRollingUpdate
	default:
		return ""
	}
}

func reasonOf(reason agentv1alpha1.UnavailableReason) string {
	switch reason {
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE:
		return "AtMaxSize"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN:
		return "CoolingDown"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED:
		return "Paused"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_DELETING:
		return "Deleting"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_OWNED:
		return "ReplicasOwned"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_LOWERED:
		return "ReplicasLowered"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID:
		return "Invalid"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED:
		return "QuotaExceeded"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED:
		return "MachinesBlocked"
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED:
		return "Reserved"
	default:
		return v1alpha1.ReasonOther
	}
}
