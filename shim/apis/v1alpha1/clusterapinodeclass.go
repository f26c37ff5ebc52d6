//nolint:lll // a marker cannot be broken into lines
package v1alpha1

import (
	"github.com/awslabs/operatorpkg/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterAPINodeClass selects the node groups in the hub that NodePools referring to it may use.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=clusterapinodeclasses,scope=Cluster,categories=karpenter,shortName={capinc,capincs}
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].status"
// +kubebuilder:printcolumn:name="NodeGroups",type="integer",JSONPath=".status.nodeGroups"
// +kubebuilder:printcolumn:name="Available",type="integer",JSONPath=".status.availableNodeGroups"
// +kubebuilder:printcolumn:name="InstanceTypes",type="integer",JSONPath=".status.instanceTypes"
// +kubebuilder:printcolumn:name="Zones",type="integer",JSONPath=".status.zones",priority=1
// +kubebuilder:printcolumn:name="Problems",type="integer",JSONPath=".status.problems",priority=1
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp"
type ClusterAPINodeClass struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired configuration.
	// +optional
	Spec ClusterAPINodeClassSpec `json:"spec,omitempty"`
	// status is what the shim observed.
	// +optional
	Status ClusterAPINodeClassStatus `json:"status,omitempty"`
}

// ClusterAPINodeClassSpec is the desired configuration.
type ClusterAPINodeClassSpec struct {
	// scalableResourceSelector selects node groups by the labels of their MachineDeployments.
	// Absent or empty selects every node group of the Cluster. Only MachineDeployments with the
	// label node.cluster.x-k8s.io/karpenter-member are node groups at all.
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In','NotIn','Exists','DoesNotExist'])",message="scalableResourceSelector.matchExpressions[].operator must be one of In, NotIn, Exists, DoesNotExist"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In','NotIn'] ? has(e.values) && size(e.values) > 0 : !has(e.values) || size(e.values) == 0)",message="scalableResourceSelector.matchExpressions[].values must be set with the operators In and NotIn, and must not be set with the others"
	// +optional
	ScalableResourceSelector *metav1.LabelSelector `json:"scalableResourceSelector,omitempty"`
	// kubelet describes how the kubelets of the selected node groups are configured, so that
	// Karpenter plans with the resources that Nodes will offer.
	// +optional
	Kubelet *Kubelet `json:"kubelet,omitempty"`
	// drift selects the reasons for which Karpenter replaces Nodes.
	// +optional
	Drift DriftPolicy `json:"drift,omitzero"`
	// price selects the prices that Karpenter may use.
	// +optional
	Price PricePolicy `json:"price,omitzero"`
	// adoption selects the existing machines that Karpenter adopts.
	// +optional
	Adoption AdoptionPolicy `json:"adoption,omitzero"`
	// maxNodeProvisionTime is how long a NodeClaim waits, once it has a machine, for that machine's
	// provider ID and for its Node, before the agent releases its claim as late and hands the
	// machine over to the next claim. The annotation
	// cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime of a node group's MachineDeployment
	// takes precedence. Without either, the agent's options --machine-provider-id-deadline and
	// --machine-node-deadline apply. A change only affects NodeClaims that are created later.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]+(s|m|h))+$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('10s') && duration(self) <= duration('168h')",message="maxNodeProvisionTime must be from 10s to 168h"
	// +optional
	MaxNodeProvisionTime *metav1.Duration `json:"maxNodeProvisionTime,omitempty"`
}

// ClusterAPINodeClassList is a list of NodeClasses.
//
// +kubebuilder:object:root=true
type ClusterAPINodeClassList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the NodeClasses.
	Items []ClusterAPINodeClass `json:"items"`
}

const (
	// ConditionNodeGroupsFound is True when the selector matches at least one node group. Ready
	// needs it.
	ConditionNodeGroupsFound = "NodeGroupsFound"
	// ConditionAgentReachable is False when the agent has been unreachable for the grace period.
	// Ready needs it.
	ConditionAgentReachable = "AgentReachable"
	// ConditionAgentCertificateValid is False when the shim's client certificate has expired, or
	// expires soon, and has not been renewed. It is absent if the shim calls the agent without a
	// certificate.
	ConditionAgentCertificateValid = "AgentCertificateValid"
	// ConditionAgentCompatible is False when the versions of the agent and this shim are not
	// compatible, or the agent lacks a feature that the shim relies on. Ready does not need it:
	// everything that still works continues. It is absent until an agent has answered.
	ConditionAgentCompatible = "AgentCompatible"
	// ConditionNodeGroupsValid is False when the description of a selected node group has values
	// that could not be used, or when node groups or fields of the NodeClass have no effect in the
	// way that they are combined. Ready does not need it: such a group is used without those
	// values, or not at all.
	ConditionNodeGroupsValid = "NodeGroupsValid"
)

// ClusterAPINodeClassStatus is what the shim observed.
type ClusterAPINodeClassStatus struct {
	// nodeGroups is how many node groups the selector matches.
	// +optional
	NodeGroups int32 `json:"nodeGroups"`
	// availableNodeGroups is how many of these accept a claim now.
	// +optional
	AvailableNodeGroups int32 `json:"availableNodeGroups"`
	// instanceTypes is how many instance types these node groups offer.
	// +optional
	InstanceTypes int32 `json:"instanceTypes"`
	// zones is how many failure domains these node groups have.
	// +optional
	Zones int32 `json:"zones"`
	// problems is how many values in the descriptions of these node groups could not be used.
	// +optional
	Problems int32 `json:"problems"`
	// selected lists the node groups that the selector matches, ordered by name. At most 50 are
	// listed; unavailable ones take precedence. It follows the agent's reports within seconds.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=50
	// +optional
	Selected []SelectedNodeGroup `json:"selected,omitempty"`
	// conditions are the signals for health and readiness: Ready, NodeGroupsFound, AgentReachable,
	// AgentCertificateValid, AgentCompatible, NodeGroupsValid.
	// +optional
	Conditions []status.Condition `json:"conditions,omitempty"`
}

// MaxSelectedNodeGroups bounds [ClusterAPINodeClassStatus.Selected].
const MaxSelectedNodeGroups = 50

// SelectedNodeGroup is a node group that a NodeClass selects.
type SelectedNodeGroup struct {
	// name is the node group's id: namespace/name of its MachineDeployment in the hub.
	Name string `json:"name"`
	// instanceType is the label node.kubernetes.io/instance-type of its Nodes.
	// +optional
	InstanceType string `json:"instanceType,omitempty"`
	// zone is the failure domain; absent when it has none.
	// +optional
	Zone string `json:"zone,omitempty"`
	// capacityType is the capacity type of its machines: on-demand, spot or reserved.
	// +optional
	CapacityType string `json:"capacityType,omitempty"`
	// price is the price of one machine per hour, in currency. Karpenter uses it unless a
	// NodeOverlay changes it.
	// +optional
	Price string `json:"price,omitempty"`
	// currency is an ISO 4217 code; absent if none is configured, as with an estimate.
	// +optional
	Currency string `json:"currency,omitempty"`
	// priceSource is where the price came from: Annotation, PriceList, Estimate, or Unknown.
	// +optional
	PriceSource string `json:"priceSource,omitempty"`
	// available is whether the node group accepts a claim now.
	Available bool `json:"available"`
	// reason is why it is unavailable: AtMaxSize, CoolingDown, Paused, Deleting, ReplicasOwned,
	// ReplicasLowered, Invalid, QuotaExceeded, MachinesBlocked, Reserved, NoRoom, PriceUnknown,
	// NoCapacity, Unusable, or Other. Absent when available.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message is the reason in a sentence.
	// +optional
	Message string `json:"message,omitempty"`
	// rolloutStrategy is who replaces machines whose template has changed, as the MachineDeployment
	// has it: OnDelete (Karpenter, according to spec.drift.machineNotUpToDate) or RollingUpdate
	// (Cluster API). Absent if the agent does not report it.
	// +optional
	RolloutStrategy string `json:"rolloutStrategy,omitempty"`
	// rollingOut is whether Cluster API is replacing machines after a template change. The node
	// group accepts claims meanwhile.
	// +optional
	RollingOut bool `json:"rollingOut,omitempty"`
}

// Values of [SelectedNodeGroup.RolloutStrategy].
const (
	// StrategyOnDelete leaves the replacement of outdated machines to Karpenter.
	StrategyOnDelete = "OnDelete"
	// StrategyRollingUpdate has Cluster API replace outdated machines.
	StrategyRollingUpdate = "RollingUpdate"
)

// Reasons of a [SelectedNodeGroup] that is not available. Reasons that the agent reports keep their
// names.
const (
	// ReasonNoRoom means that the agent has just refused a claim.
	ReasonNoRoom = "NoRoom"
	// ReasonPriceUnknown means that spec.price excludes the node group, or that the agent reports
	// no price at all.
	ReasonPriceUnknown = "PriceUnknown"
	// ReasonNoCapacity means that its machines would have no CPU or no memory for pods.
	ReasonNoCapacity = "NoCapacity"
	// ReasonUnusable means that Nodes of the node group could not be described to Karpenter.
	ReasonUnusable = "Unusable"
	// ReasonOther means a reason that this version does not know; the message describes it.
	ReasonOther = "Other"
)

// StatusConditions returns the conditions, with Ready computed from those that it needs.
func (in *ClusterAPINodeClass) StatusConditions(opts ...status.ForOption) status.ConditionSet {
	return status.NewReadyConditions(ConditionNodeGroupsFound, ConditionAgentReachable).For(in, opts...)
}

// GetConditions returns the conditions as they are stored.
func (in *ClusterAPINodeClass) GetConditions() []status.Condition {
	return in.Status.Conditions
}

// SetConditions replaces the conditions.
func (in *ClusterAPINodeClass) SetConditions(conditions []status.Condition) {
	in.Status.Conditions = conditions
}
