// Package instancetype converts the agent's node groups into what Karpenter core schedules on.
//
// A node group becomes a [Group]. Groups that share an instance type become one InstanceType of
// core ([Build]), with an offering for each zone and capacity type. Groups of one instance type
// that differ in another label that core knows (its well-known labels, see [Group.Requirements])
// get an offering each, so that core never picks a combination that no group has.
//
// Everything in this package is pure, and the returned objects are immutable: core keeps them and
// memoizes results in them.
package instancetype

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"
	"sigs.k8s.io/karpenter/pkg/utils/resources"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// ZoneNone is the zone of a node group without one. Core needs a zone on every offering and on
// every Node that it may consolidate. The empty string is a valid label value, is never the name of
// a real zone that a volume could require, and means "no zone" to kube-scheduler and to the node
// lifecycle controller.
const ZoneNone = ""

// reservedShare is the fraction of their price at which reserved machines are offered. They are
// paid for whether they run or not, so core should use them before all others and not leave them
// for something cheaper. A factor keeps the order of their prices. Other providers of core also
// offer them at a price near zero.
const reservedShare = 1e-6

// unlimitedReservation is the number of machines that a reserved group without a max size is
// assumed to have left: more than core plans at once.
const unlimitedReservation = 1000

// Group is a node group as the scheduler sees it. Immutable.
type Group struct {
	// ID is the node group's id.
	ID string
	// Source is the agent's description of the node group.
	Source *agentv1alpha1.NodeGroup
	// InstanceType is the name of the instance type.
	InstanceType string
	// Zone is the failure domain, or [ZoneNone].
	Zone string
	// CapacityType is core's name of the capacity type.
	CapacityType string
	// Labels are the labels of the group's Nodes, including well-known ones.
	Labels map[string]string
	// Requirements are the Labels as requirements, plus DoesNotExist for each well-known label that
	// the Nodes lack: core reads a missing key as "any value".
	Requirements scheduling.Requirements
	// Taints are those that keep pods away permanently: NoSchedule or NoExecute taints that nothing
	// removes.
	Taints []corev1.Taint
	// Capacity is what a Node of the group reports as its capacity, without zero quantities.
	Capacity corev1.ResourceList
	// Overhead is what the kubelet reserves. Never nil.
	Overhead *cloudprovider.InstanceTypeOverhead
	// Allocatable is what is left for pods, without zero quantities.
	Allocatable corev1.ResourceList
	// Volumes is the number of attachable volumes by CSI driver. A missing driver has no known
	// limit.
	Volumes map[string]int
	// Devices are the devices that a machine offers through dynamic resource allocation.
	Devices map[DeviceKind]int
	// Price is the price of a machine per hour, in any currency. Never negative.
	Price float64
	// Offered is the price given to core, by which core orders offerings. It equals [Group.Price],
	// except that it is near zero in a reservation, and that a NodeOverlay may replace it.
	Offered float64
	// PriceRefused is the reason why the group's price is not accepted for launching. Empty if it
	// is accepted.
	PriceRefused string
	// NoCapacity is the reason why the group has no CPU or no memory for pods. Empty if it has
	// both.
	NoCapacity string
	// Available reports whether the agent would accept a claim now, the price is accepted, and
	// there is CPU and memory.
	Available bool
	// Left is the number of machines left in a reservation; 0 for other capacity types.
	Left int

	// learned is the part of their capacity that real Nodes reserved.
	learned     corev1.ResourceList
	fingerprint uint64
	// shape is equal for groups among which [beyond] finds no differences.
	shape uint64
}

// NewGroup converts a node group. It returns nil and an error if core cannot use the group at all,
// because a name or value is not a valid label. It drops labels and quantities that cannot be used,
// and returns the usable group together with an error that names them.
func NewGroup(source *agentv1alpha1.NodeGroup) (*Group, error) {
	var errs []error
	capacity, err := capacityOf(source)
	errs = append(errs, err)
	learned, err := learnedOf(source, capacity)
	errs = append(errs, err)
	overhead := (*Kubelet)(nil).overhead(capacity, learned, source.GetOperatingSystem())
	group := &Group{
		ID:           source.GetId(),
		Source:       source,
		InstanceType: source.GetInstanceType(),
		Zone:         source.GetZone(),
		CapacityType: wire.CapacityType(source.GetCapacityType()),
		Capacity:     capacity,
		Overhead:     overhead,
		Allocatable:  allocatableOf(capacity, overhead),
		learned:      learned,
		Available:    wire.AvailabilityFor(source, v1alpha1.Holder).GetAvailable(),
	}
	for _, must := range []struct{ field, value string }{
		{"instance_type", group.InstanceType},
		{"zone", group.Zone},
		{"region", source.GetRegion()},
		{"architecture", source.GetArchitecture()},
		{"operating_system", source.GetOperatingSystem()},
	} {
		if problems := validation.IsValidLabelValue(must.value); len(problems) > 0 {
			return nil, fmt.Errorf("node group %s: %s %q cannot be a label value: %s", group.ID, must.field, must.value, strings.Join(problems, "; "))
		}
	}
	if group.InstanceType == "" {
		return nil, fmt.Errorf("node group %s: instance_type is empty", group.ID)
	}
	if group.CapacityType == karpv1.CapacityTypeReserved {
		group.Left = reservationLeft(source)
	}
	group.Labels, err = labelsOf(source, group)
	errs = append(errs, err)
	group.Requirements = requirementsOf(group.Labels)
	taints, err := wire.Taints(source.GetTaints())
	errs = append(errs, err)
	group.Taints = lastingTaints(taints)
	group.Volumes, err = volumesOf(source)
	errs = append(errs, err)
	group.Devices, err = devicesOf(source)
	errs = append(errs, err)
	if group.Price, err = priceOf(source); err != nil {
		errs = append(errs, err)
		group.Available, group.PriceRefused = false, err.Error()
	}
	group.Offered = group.Price
	if group.CapacityType == karpv1.CapacityTypeReserved {
		group.Offered *= reservedShare
	}
	group.requireCapacity()
	group.fingerprint, group.shape = group.hash(), group.hashShape()
	if err := errors.Join(errs...); err != nil {
		return group, fmt.Errorf("node group %s: %w", group.ID, err)
	}
	return group, nil
}

func capacityOf(source *agentv1alpha1.NodeGroup) (corev1.ResourceList, error) {
	capacity, err := wire.ResourceList(source.GetCapacity())
	maps.DeleteFunc(capacity, func(name corev1.ResourceName, quantity resource.Quantity) bool {
		return quantity.IsZero() || len(validation.IsQualifiedName(string(name))) > 0
	})
	if _, ok := capacity[corev1.ResourcePods]; !ok {
		capacity[corev1.ResourcePods] = *resource.NewQuantity(DefaultPods, resource.DecimalSI)
	}
	return capacity, err
}

// learnedOf returns what real Nodes reserved. It subtracts huge pages from memory, since core
// subtracts them itself.
func learnedOf(source *agentv1alpha1.NodeGroup, capacity corev1.ResourceList) (corev1.ResourceList, error) {
	learned, err := wire.ResourceList(source.GetOverhead())
	if memory, ok := learned[corev1.ResourceMemory]; ok {
		memory.Sub(hugePages(capacity))
		if memory.Sign() < 0 {
			memory = resource.Quantity{}
		}
		learned[corev1.ResourceMemory] = memory
	}
	if err != nil {
		err = fmt.Errorf("overhead: %w", err)
	}
	return learned, err
}

func labelsOf(source *agentv1alpha1.NodeGroup, group *Group) (map[string]string, error) {
	labels := make(map[string]string, len(source.GetNodeLabels())+8)
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(source.GetNodeLabels())) {
		value := source.GetNodeLabels()[key]
		problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...)
		if len(problems) > 0 {
			errs = append(errs, fmt.Errorf("node label %q=%q: %s", key, value, strings.Join(problems, "; ")))
			continue
		}
		if karpv1.IsRestrictedLabel(key) != nil || key == karpv1.NodePoolLabelKey {
			continue // Karpenter's own label or the host name, which the group cannot set.
		}
		if _, ok := karpv1.NormalizedLabels[key]; ok {
			continue // A deprecated name of a well-known label, which core normalizes; the group sets that label itself.
		}
		labels[key] = value
	}
	for key, value := range map[string]string{
		corev1.LabelInstanceTypeStable: group.InstanceType,
		corev1.LabelTopologyRegion:     source.GetRegion(),
		corev1.LabelArchStable:         source.GetArchitecture(),
		corev1.LabelOSStable:           source.GetOperatingSystem(),
		karpv1.CapacityTypeLabelKey:    group.CapacityType,
	} {
		if value != "" {
			labels[key] = value
		}
	}
	labels[corev1.LabelTopologyZone] = group.Zone
	delete(labels, v1alpha1.ReservationLabel)
	if group.CapacityType == karpv1.CapacityTypeReserved {
		labels[v1alpha1.ReservationLabel] = reservationName(source)
	}
	return labels, errors.Join(errs...)
}

func requirementsOf(labels map[string]string) scheduling.Requirements {
	requirements := scheduling.NewLabelRequirements(labels)
	for key := range karpv1.WellKnownLabels {
		if key == karpv1.NodePoolLabelKey || requirements.Has(key) {
			continue
		}
		requirements.Add(scheduling.NewRequirement(key, corev1.NodeSelectorOpDoesNotExist))
	}
	return requirements
}

// lastingTaints drops taints that do not keep pods away, that core itself adds and removes, and
// that core expects to be removed from every new Node.
func lastingTaints(taints []corev1.Taint) []corev1.Taint {
	return slices.DeleteFunc(taints, func(taint corev1.Taint) bool {
		return taint.Effect == corev1.TaintEffectPreferNoSchedule ||
			scheduling.IsKnownEphemeralTaint(&taint) ||
			taint.MatchTaint(&karpv1.DisruptedNoScheduleTaint)
	})
}

// reservationName returns the name of a reserved group's reservation, as a label value. This is the
// MachineDeployment's name, which is unique in the Cluster's namespace, or a hash of the group's id
// if that name is not a valid label value.
func reservationName(source *agentv1alpha1.NodeGroup) string {
	name := source.GetName()
	if name == "" {
		_, name, _ = strings.Cut(source.GetId(), "/")
	}
	if len(validation.IsValidLabelValue(name)) == 0 && name != "" {
		return name
	}
	sum := fnv.New64a()
	_, _ = io.WriteString(sum, source.GetId())
	return fmt.Sprintf("reservation-%016x", sum.Sum64())
}

func reservationLeft(source *agentv1alpha1.NodeGroup) int {
	if atMaxSize(source) {
		return 0
	}
	if source.MaxSize == nil {
		return unlimitedReservation
	}
	return int(max(source.GetMaxSize()-source.GetReplicas(), 0))
}

func atMaxSize(source *agentv1alpha1.NodeGroup) bool {
	return wire.AvailabilityFor(source, v1alpha1.Holder).GetReason() == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE
}

// full reports whether the group is a reservation that is unavailable only because of its max size.
func (g *Group) full() bool {
	return g.CapacityType == karpv1.CapacityTypeReserved && atMaxSize(g.Source) && g.PriceRefused == "" && g.NoCapacity == ""
}

// priceOf returns the agent's price. The shim makes no estimate of its own: with two estimators,
// groups would be ordered by who made the estimate.
func priceOf(source *agentv1alpha1.NodeGroup) (float64, error) {
	if source.GetPrice() == nil {
		return 0, errors.New("the agent reports no price")
	}
	price := source.GetPrice().GetPerHour()
	if math.IsNaN(price) || math.IsInf(price, 0) || price < 0 {
		return 0, fmt.Errorf("the agent reports %v, which is not a price", price)
	}
	return price, nil
}

// hash covers everything that is passed to core, or decides about it, other than what [Conditions]
// decides.
func (g *Group) hash() uint64 {
	sum := fnv.New64a()
	write := func(parts ...string) {
		for _, part := range parts {
			_, _ = io.WriteString(sum, part)
			_, _ = sum.Write([]byte{0})
		}
	}
	write(g.ID, g.InstanceType, g.Zone, g.CapacityType, fmt.Sprint(g.Price, g.Left, g.PriceRefused != ""))
	for _, key := range slices.Sorted(maps.Keys(g.Labels)) {
		write(key, g.Labels[key])
	}
	for _, list := range []corev1.ResourceList{
		g.Capacity, g.Overhead.KubeReserved, g.Overhead.SystemReserved, g.Overhead.EvictionThreshold,
	} {
		for _, name := range slices.Sorted(maps.Keys(list)) {
			quantity := list[name]
			write(string(name), quantity.String())
		}
		write("")
	}
	for _, driver := range slices.Sorted(maps.Keys(g.Volumes)) {
		write(driver, strconv.Itoa(g.Volumes[driver]))
	}
	for _, kind := range sortedKinds(g.Devices) {
		write(kind.Driver, kind.Kind, strconv.Itoa(g.Devices[kind]))
	}
	for _, taint := range g.Taints {
		write(taint.Key, taint.Value, string(taint.Effect))
	}
	return sum.Sum64()
}

// hashShape covers what machines of one instance type should have in common.
func (g *Group) hashShape() uint64 {
	sum := fnv.New64a()
	for _, name := range slices.Sorted(maps.Keys(g.Capacity)) {
		quantity := g.Capacity[name]
		_, _ = fmt.Fprintf(sum, "%s=%s\x00", name, quantity.String())
	}
	for _, kind := range sortedKinds(g.Devices) {
		_, _ = fmt.Fprintf(sum, "%s/%s=%d\x00", kind.Driver, kind.Kind, g.Devices[kind])
	}
	return sum.Sum64()
}

// requireCapacity makes a group unavailable if its machines have no CPU or no memory for pods.
// Otherwise core would plan pods without requests there, or a NodePool's static Nodes.
func (g *Group) requireCapacity() {
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		if _, some := g.Allocatable[name]; some {
			continue
		}
		g.Available = false
		if has, ok := g.Capacity[name]; ok {
			g.NoCapacity = fmt.Sprintf("all of the %s of %s is reserved, see overhead: correct spec.kubelet, or the MachineDeployment's %s",
				has.String(), name, name)
		} else {
			g.NoCapacity = fmt.Sprintf("the amount of %s is unknown: write the annotation capacity.cluster-autoscaler.kubernetes.io/%s "+
				"on the MachineDeployment", name, name)
		}
		return
	}
}

// Accepts reports whether a machine of the group can serve a NodeClaim, by its requirements,
// resource requests and taints. declared must include every taint of the group's machines, or none
// of the pods that core planned for would run there.
func (g *Group) Accepts(requirements scheduling.Requirements, requests corev1.ResourceList, declared []corev1.Taint) error {
	// Intersects, not Compatible: a label of the group that the NodeClaim does not mention is no
	// reason to refuse.
	if err := g.Requirements.Intersects(requirements); err != nil {
		return fmt.Errorf("requirements: %w", err)
	}
	if g.PriceRefused != "" {
		return errors.New(g.PriceRefused)
	}
	if g.NoCapacity != "" {
		return errors.New(g.NoCapacity)
	}
	if !resources.Fits(requests, g.Allocatable) {
		return errors.New("not enough resources")
	}
	for _, taint := range g.Taints {
		if !declares(declared, taint) {
			return fmt.Errorf("taint %s is not in the NodePool", taint.ToString())
		}
	}
	return nil
}

func declares(declared []corev1.Taint, taint corev1.Taint) bool {
	return slices.ContainsFunc(declared, func(d corev1.Taint) bool {
		return d.Key == taint.Key && d.Value == taint.Value && d.Effect == taint.Effect
	})
}

// CorrectChosenLabels replaces label values that core picked from several for a NodeClaim with
// those of its machine.
func CorrectChosenLabels(nodeClaim *karpv1.NodeClaim, labels map[string]string) {
	for i := range nodeClaim.Spec.Requirements {
		key := nodeClaim.Spec.Requirements[i].Key
		chosen, ok := nodeClaim.Labels[key]
		actual, known := labels[key]
		if ok && known && chosen != actual && !karpv1.WellKnownLabels.Has(key) {
			nodeClaim.Labels[key] = actual
		}
	}
}

func isExtended(name corev1.ResourceName) bool {
	return !slices.Contains([]corev1.ResourceName{
		corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods,
	}, name)
}

// Overlaid returns the group with the extended resources and the price that a NodeOverlay set on
// its instance type.
func (g *Group) Overlaid(instanceType *cloudprovider.InstanceType) *Group {
	overlaid := *g
	if instanceType.IsCapacityOverlayApplied() {
		overlaid.Capacity = maps.Clone(g.Capacity)
		// A NodeOverlay changes extended resources only. For those that it does not change, the
		// type has no more than the group.
		for name, quantity := range instanceType.Capacity {
			if _, ok := g.Capacity[name]; !ok || isExtended(name) {
				overlaid.Capacity[name] = quantity
			}
		}
		overlaid.Allocatable = allocatableOf(overlaid.Capacity, overlaid.Overhead)
	}
	// The first one is the group's own. Those that NodeClaims remember come last, and may match
	// several groups.
	own, offered := lo.Find(instanceType.Offerings, func(o *cloudprovider.Offering) bool { return g.Requirements.Intersects(o.Requirements) == nil })
	if offered && own.IsPriceOverlaid() {
		overlaid.Offered = own.Price
	}
	return &overlaid
}
