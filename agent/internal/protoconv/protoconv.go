// Package protoconv converts the hub's objects and the agent's own values to messages of the API.
package protoconv

import (
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/samber/lo"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Cluster returns a reference to a Cluster.
func Cluster(name types.NamespacedName) *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: name.Namespace, Name: name.Name}
}

// FleetCluster converts a Cluster, without what it has and without its shim.
func FleetCluster(c *clusterv1.Cluster) *agentv1alpha1.Cluster {
	return &agentv1alpha1.Cluster{
		Ref:       Cluster(types.NamespacedName{Namespace: c.Namespace, Name: c.Name}),
		Uid:       string(c.UID),
		CreatedAt: timestamp(c.CreationTimestamp.Time),
		Paused:    c.Spec.Paused != nil && *c.Spec.Paused,
		Deleting:  !c.DeletionTimestamp.IsZero(),
	}
}

// Shim converts what the agents have seen of a shim. It returns nil for a shim that has never
// synchronized.
func Shim(s *v1alpha1.SpokeStatus) *agentv1alpha1.Shim {
	if s.LastSyncTime == nil {
		return nil
	}
	message := &agentv1alpha1.Shim{
		Connected: meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConnectedCondition),
		LastSync:  timestamp(s.LastSyncTime.Time),
		Version:   text(s.ShimVersion),
		SpokeId:   text(s.SpokeID),
	}
	if s.Certificate != nil && s.Certificate.NotAfter != nil {
		message.CertificateNotAfter = timestamp(s.Certificate.NotAfter.Time)
	}
	return message
}

// NodeGroup converts a node group.
func NodeGroup(g nodegroup.NodeGroup) *agentv1alpha1.NodeGroup {
	capacityType, err := wire.ParseCapacityType(g.Machine.CapacityType)
	if err != nil {
		capacityType = agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND
	}
	strategy := agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ROLLING_UPDATE
	if g.OnDelete {
		strategy = agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE
	}
	sources := make(map[string]*agentv1alpha1.ValueSource, len(g.Machine.Sources)+1)
	for path, source := range g.Machine.Sources {
		sources[text(path)] = valueSource(source)
	}
	sources["price"] = valueSource(g.Price.Source)
	message := &agentv1alpha1.NodeGroup{
		Id:                g.ID(),
		Cluster:           Cluster(g.Cluster),
		Name:              g.Key.Name,
		Labels:            texts(g.Labels),
		InstanceType:      g.Machine.InstanceType,
		Capacity:          wire.Quantities(g.Machine.Resources),
		NodeLabels:        texts(g.Machine.Labels),
		Taints:            wire.FromTaints(g.Machine.Taints),
		Architecture:      g.Machine.Architecture,
		OperatingSystem:   g.Machine.OperatingSystem,
		Zone:              g.Machine.Zone,
		Region:            g.Machine.Region,
		CapacityType:      capacityType,
		Price:             &agentv1alpha1.Price{PerHour: g.Price.PerHour, Currency: g.Price.Currency},
		Overhead:          wire.Quantities(g.Machine.Overhead),
		AttachableVolumes: maps.Clone(g.Machine.AttachableVolumes),
		RollingOut:        g.Rolling,
		MinSize:           g.Limits.Min,
		MaxSize:           g.Limits.Max,
		Replicas:          g.Limits.Replicas,
		FloorReplicas:     g.Floor,
		Holder:            text(g.Limits.Holder),
		Availability:      availability(g.Limits, g.Limits.For(g.Key.Name, "")),
		KubernetesVersion: text(g.KubernetesVersion),
		TemplateRevision:  g.TemplateRevision,
		RolloutStrategy:   strategy,
		Sources:           sources,
		CreatedAt:         timestamp(g.CreatedAt),
	}
	if g.Limits.Holder != "" {
		message.HolderAvailability = availability(g.Limits, nil)
	}
	for _, devices := range g.Machine.Devices {
		message.Devices = append(message.Devices, &agentv1alpha1.DeviceCount{
			Driver: devices.Driver, Count: devices.Count, Kind: text(devices.Kind),
		})
	}
	for _, p := range g.Problems {
		message.Problems = append(message.Problems, &agentv1alpha1.Problem{
			Field: text(p.Field), Value: cut(text(p.Value)), Message: text(p.Message),
		})
	}
	return message
}

var sourceKinds = map[capacity.SourceKind]agentv1alpha1.SourceKind{
	capacity.FromAnnotation:             agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION,
	capacity.FromMachineTemplate:        agentv1alpha1.SourceKind_SOURCE_KIND_MACHINE_TEMPLATE,
	capacity.FromInfrastructureTemplate: agentv1alpha1.SourceKind_SOURCE_KIND_INFRASTRUCTURE_TEMPLATE,
	capacity.FromNodes:                  agentv1alpha1.SourceKind_SOURCE_KIND_LEARNED,
	capacity.FromPriceList:              agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST,
	capacity.FromEstimate:               agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE,
	capacity.FromDefault:                agentv1alpha1.SourceKind_SOURCE_KIND_DEFAULT,
}

func valueSource(source capacity.Source) *agentv1alpha1.ValueSource {
	return &agentv1alpha1.ValueSource{Kind: sourceKinds[source.Kind], Detail: text(source.Detail)}
}

// availability puts reserved, if it is not nil, before the other refusals, because a caller may
// wait for those to pass.
func availability(limits eligibility.Group, reserved *eligibility.Refusal) *agentv1alpha1.Availability {
	if reserved != nil {
		limits.Refusals = append([]eligibility.Refusal{*reserved}, limits.Refusals...)
	}
	refusal := limits.Refusal()
	switch {
	case refusal != nil:
		return &agentv1alpha1.Availability{
			Reason:  UnavailableReason(refusal.Reason),
			Message: text(refusal.Message),
			RetryAt: timestamp(refusal.RetryAt),
		}
	case limits.Full():
		return &agentv1alpha1.Availability{
			Reason:  agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE,
			Message: "replicas have reached the max size",
		}
	}
	return &agentv1alpha1.Availability{Available: true}
}

// UnavailableReason converts the reason why a node group refuses claims. Reasons that mean that
// there is no such group, or concern a single Machine, become UNSPECIFIED.
func UnavailableReason(reason eligibility.Reason) agentv1alpha1.UnavailableReason {
	switch reason {
	case eligibility.AtMaxSize:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE
	case eligibility.CoolingDown:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN
	case eligibility.Paused:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED
	case eligibility.Deleting:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_DELETING
	case eligibility.ReplicasOwned:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_OWNED
	case eligibility.ReplicasLowered:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_LOWERED
	case eligibility.Invalid:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID
	case eligibility.QuotaExceeded:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED
	case eligibility.MachinesBlocked:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED
	case eligibility.Reserved:
		return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED
	case eligibility.NotMember, eligibility.Gone, eligibility.NotAdoptable:
	}
	return agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_UNSPECIFIED
}

// Machine converts a Machine.
func Machine(m *clusterv1.Machine) *agentv1alpha1.Machine {
	message := &agentv1alpha1.Machine{
		Cluster:           Cluster(types.NamespacedName{Namespace: m.Namespace, Name: m.Spec.ClusterName}),
		Name:              m.Name,
		Uid:               string(m.UID),
		ClaimId:           protocol.ClaimOf(m),
		ProviderId:        text(m.Spec.ProviderID),
		NodeName:          text(m.Status.NodeRef.Name),
		Zone:              text(m.Status.FailureDomain),
		KubernetesVersion: text(m.Spec.Version),
		Phase:             m.Status.Phase,
		CreatedAt:         timestamp(m.CreationTimestamp.Time),
		UpToDate:          true,
	}
	if deployment := m.Labels[clusterv1.MachineDeploymentNameLabel]; deployment != "" {
		message.NodeGroupId = nodegroup.ID(types.NamespacedName{Namespace: m.Namespace, Name: deployment})
	}
	_, floors := m.Annotations[v1alpha1.FloorAnnotation]
	switch {
	case message.GetClaimId() != "":
		message.Owner = agentv1alpha1.MachineOwner_MACHINE_OWNER_CLAIM
	case floors && m.DeletionTimestamp == nil && !slices.Contains(m.Finalizers, v1alpha1.ReleaseFinalizer):
		message.Owner = agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR
	}
	if m.DeletionTimestamp != nil {
		message.DeletedAt = timestamp(m.DeletionTimestamp.Time)
	}
	// Other reasons for a false condition, such as another kubelet version, do not mean that the
	// template has changed.
	upToDate := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineUpToDateCondition)
	if upToDate != nil && upToDate.Status == metav1.ConditionFalse && upToDate.Reason == clusterv1.MachineNotUpToDateReason {
		message.UpToDate, message.NotUpToDateMessage = false, text(upToDate.Message)
	}
	infrastructure := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineInfrastructureReadyCondition)
	if infrastructure != nil && infrastructure.Status == metav1.ConditionFalse {
		message.InfrastructureReason, message.InfrastructureMessage = text(infrastructure.Reason), text(infrastructure.Message)
	}
	deleting := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineDeletingCondition)
	if deleting != nil && deleting.Status == metav1.ConditionTrue {
		message.DeletingReason, message.DeletingMessage = text(deleting.Reason), text(deleting.Message)
	}
	return message
}

// WaitingReason is the reason of a pending claim whose status has none yet.
const WaitingReason = claimreasons.WaitingForMachine

// BindingReason is the reason of a claim whose Machine is assigned and about to be labelled.
const BindingReason = claimreasons.Binding

// Claim converts a claim. The machine is the last known state of the Machine that
// claim.Status.Machine names, or nil if it was not found.
//
// A Bound claim is shown as bound, with its Machine, only once the Machine carries its label. Until
// then the binding can still be lost if the Machine dies.
func Claim(c *v1alpha1.MachineClaim, machine *clusterv1.Machine) *agentv1alpha1.Claim {
	message := &agentv1alpha1.Claim{
		Cluster:      Cluster(types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}),
		ClaimId:      c.Spec.ClaimID,
		Holder:       c.Spec.Holder,
		DisplayName:  text(c.Spec.DisplayName),
		AdoptMachine: text(c.Spec.Adopt),
		Phase:        phases[c.CurrentPhase()],
		Reason:       text(c.Status.Reason),
		Message:      text(shown(c.Status.Reason, c.Status.Message)),
		CreatedAt:    timestamp(c.CreationTimestamp.Time),
		History: lo.Map(c.Status.History, func(event v1alpha1.Event, _ int) *agentv1alpha1.ClaimEvent {
			return &agentv1alpha1.ClaimEvent{Time: timestamp(event.Time.Time), Reason: text(event.Reason), Message: text(shown(event.Reason, event.Message))}
		}),
	}
	if c.Returns() {
		message.Phase = agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
	}
	if c.Spec.NodeGroup != "" {
		message.NodeGroupId = nodegroup.ID(types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.NodeGroup})
	}
	if c.Status.ReleasedAt != nil {
		message.ReleasedAt = timestamp(c.Status.ReleasedAt.Time)
	}
	if c.Status.EndedAt != nil {
		message.EndedAt = timestamp(c.Status.EndedAt.Time)
	}
	message.Drained, message.Returned = c.Status.Drained, c.Status.Returned
	if patience := c.MaxNodeProvisionTime(); patience > 0 {
		message.MaxNodeProvisionTime = durationpb.New(patience)
	}
	if c.Status.FailedAt != nil {
		message.FailedAt, message.FailureClass = timestamp(c.Status.FailedAt.Time), failureClasses[failures.Class(c.Status.FailureClass)]
	}
	if message.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING && message.GetReason() == "" {
		message.Reason, message.Message = WaitingReason, "waiting for a Machine of "+c.Spec.NodeGroup
	}
	reference := c.Status.Machine
	switch {
	case reference == nil:
	case machine != nil && machine.UID == reference.UID && machine.Labels[v1alpha1.ClaimLabel] == c.Spec.ClaimID:
		message.Machine = Machine(machine)
	case c.CurrentPhase() == v1alpha1.PhaseBound && !c.Status.Returned && machine != nil && machine.UID == reference.UID:
		message.Phase, message.Reason = agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, BindingReason
		message.Message = "Machine " + reference.Name + " is about to be bound"
	default:
		message.Machine = &agentv1alpha1.Machine{
			Cluster:     message.GetCluster(),
			Name:        reference.Name,
			Uid:         string(reference.UID),
			NodeGroupId: message.GetNodeGroupId(),
			ClaimId:     c.Spec.ClaimID,
			ProviderId:  text(reference.ProviderID),
			NodeName:    text(reference.NodeName),
			UpToDate:    true,
		}
	}
	return message
}

// writeRefused replaces the text with which the hub refused a write.
const writeRefused = "the hub refuses a write on the claim's Machine; the claim's object in the hub has the reason"

// shown returns what callers see of the message of a claim's event. The text of a webhook, a policy
// or the API server may name what a spoke must not know. It stays in the hub.
func shown(reason, message string) string {
	if reason == protocol.ReasonWriteRefused && message != "" {
		return writeRefused
	}
	return message
}

var phases = map[v1alpha1.Phase]agentv1alpha1.ClaimPhase{
	v1alpha1.PhasePending:   agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING,
	v1alpha1.PhaseBound:     agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
	v1alpha1.PhaseReleasing: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING,
	v1alpha1.PhaseEnded:     agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED,
}

// failureClasses lacks the classes of newer agents, and the empty one of older agents.
var failureClasses = map[failures.Class]agentv1alpha1.FailureClass{
	failures.Capacity:      agentv1alpha1.FailureClass_FAILURE_CLASS_CAPACITY,
	failures.Quota:         agentv1alpha1.FailureClass_FAILURE_CLASS_QUOTA,
	failures.Configuration: agentv1alpha1.FailureClass_FAILURE_CLASS_CONFIGURATION,
	failures.GivenUp:       agentv1alpha1.FailureClass_FAILURE_CLASS_GIVEN_UP,
	failures.TimedOut:      agentv1alpha1.FailureClass_FAILURE_CLASS_TIMED_OUT,
	failures.Reported:      agentv1alpha1.FailureClass_FAILURE_CLASS_REPORTED,
}

// timestamp converts a time. The zero time becomes nil.
func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// text makes a user's string safe for protobuf. Invalid UTF-8 would make the whole message
// unusable.
func text(s string) string { return strings.ToValidUTF8(s, string(utf8.RuneError)) }

func texts(m map[string]string) map[string]string {
	return lo.MapEntries(m, func(key, value string) (string, string) { return text(key), text(value) })
}

// maxProblemValue is how many characters of a user's value are shown.
const maxProblemValue = 128

func cut(s string) string {
	if runes := []rune(s); len(runes) > maxProblemValue {
		return string(runes[:maxProblemValue])
	}
	return s
}

// EndedClaim returns a claim with its end alone.
func EndedClaim(namespace, cluster, id, reason, message string) *agentv1alpha1.Claim {
	return &agentv1alpha1.Claim{
		Cluster: Cluster(types.NamespacedName{Namespace: namespace, Name: cluster}),
		ClaimId: id,
		Phase:   agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED,
		Reason:  text(reason),
		Message: text(shown(reason, message)),
	}
}
