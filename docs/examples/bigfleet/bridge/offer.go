package bridge

import (
	"slices"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// offer makes and removes slots, so that there are as many as machines could be had, and describes each as its node group is now. Only
// node groups that are reserved for the holder are offered.
func (b *Bridge) offer() error {
	listed, _ := b.groups.List()
	b.mu.Lock()
	defer b.mu.Unlock()
	groups, left := map[string]*agentv1alpha1.NodeGroup{}, map[string]int{}
	for _, g := range listed {
		if g.GetHolder() == b.options.Holder {
			groups[g.GetId()], left[g.GetId()] = g, b.most(g)
		}
	}
	for _, slot := range b.slots {
		if slot.GetMachine().GetState() != protocol.State_STATE_FAILED { // another slot replaces a failed one
			left[slot.GetNodeGroup()]--
		}
	}
	var slots []*protocol.Slot
	var gone []string
	for id, slot := range b.slots {
		group := groups[slot.GetNodeGroup()]
		switch {
		case b.calling[id]:
		case slot.GetMachine().GetState() == protocol.State_STATE_SPECULATIVE && left[slot.GetNodeGroup()] < 0:
			gone = append(gone, id)
			left[slot.GetNodeGroup()]++
		case group != nil:
			next := proto.CloneOf(slot)
			b.describe(next.GetMachine(), group)
			if !proto.Equal(slot, next) {
				slots = append(slots, next)
			}
		}
	}
	for id, g := range groups {
		for range left[id] { // an ID is never used again: BigFleet remembers what became of it
			m := &protocol.Machine{Id: id + "/" + uuid.NewString(), State: protocol.State_STATE_SPECULATIVE}
			b.describe(m, g)
			slots = append(slots, &protocol.Slot{Machine: m, NodeGroup: id})
		}
	}
	return b.save(slots, gone)
}

// most returns how many machines of the group BigFleet may have. The floor is the user's.
func (b *Bridge) most(g *agentv1alpha1.NodeGroup) int {
	if g.MaxSize == nil {
		return b.options.Slots
	}
	return max(0, min(b.options.Slots, int(g.GetMaxSize()-g.GetFloorReplicas())))
}

var capacityTypes = map[agentv1alpha1.CapacityType]protocol.CapacityType{
	agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND: protocol.CapacityType_CAPACITY_TYPE_ON_DEMAND,
	agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT:      protocol.CapacityType_CAPACITY_TYPE_SPOT,
	agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED:  protocol.CapacityType_CAPACITY_TYPE_RESERVED,
}

// topology has fields of its own.
var topology = []string{corev1.LabelInstanceTypeStable, corev1.LabelTopologyZone, wire.CapacityTypeLabel}

func (b *Bridge) describe(m *protocol.Machine, g *agentv1alpha1.NodeGroup) {
	m.InstanceType, m.Zone, m.CapacityType = g.GetInstanceType(), g.GetZone(), capacityTypes[g.GetCapacityType()]
	m.HourlyPrice, m.Interruption = g.GetPrice().GetPerHour(), 0
	if m.GetCapacityType() == protocol.CapacityType_CAPACITY_TYPE_SPOT {
		m.Interruption = b.options.SpotInterruption
	}
	m.Labels = map[string]string{corev1.LabelArchStable: g.GetArchitecture(), corev1.LabelOSStable: g.GetOperatingSystem()}
	for key, value := range g.GetNodeLabels() {
		if !slices.Contains(topology, key) {
			m.Labels[key] = value
		}
	}
	m.Capacity = &protocol.Quantities{Amounts: g.GetCapacity()}
	// Quantities that cannot be used are left out; the agent reports them as problems of the group.
	allocatable, _ := wire.ResourceList(g.GetCapacity())
	overhead, _ := wire.ResourceList(g.GetOverhead())
	for name, amount := range overhead {
		if rest, ok := allocatable[name]; ok {
			rest.Sub(amount)
			allocatable[name] = rest
		}
	}
	m.Allocatable = &protocol.Quantities{Amounts: wire.Quantities(allocatable)}
}
