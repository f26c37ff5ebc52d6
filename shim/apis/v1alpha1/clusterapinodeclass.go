//nolint:lll // a marker cannot be broken into lines
package v1alpha1

import (
	"github.com/awslabs/operatorpkg/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterAPINodeClass says which node groups of the management cluster the NodePools that refer to it may use.
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

	// spec is what the user wants.
	// +optional
	Spec ClusterAPINodeClassSpec `json:"spec,omitempty"`
	// status is what the shim found.
	// +optional
	Status ClusterAPINodeClassStatus `json:"status,omitempty"`
}

// ClusterAPINodeClassSpec is what the user wants.
type ClusterAPINodeClassSpec struct {
	// scalableResourceSelector selects node groups by the labels of their MachineDeployments. Absent or empty selects every
	// node group of the Cluster. Only MachineDeployments with the label node.cluster.x-k8s.io/karpenter-member are node
	// groups at all.
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In','NotIn','Exists','DoesNotExist'])",message="scalableResourceSelector.matchExpressions[].operator must be one of In, NotIn, Exists, DoesNotExist"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In','NotIn'] ? has(e.values) && size(e.values) > 0 : !has(e.values) || size(e.values) == 0)",message="scalableResourceSelector.matchExpressions[].values must be set with the operators In and NotIn, and must not be set with the others"
	// +optional
	ScalableResourceSelector *metav1.LabelSelector `json:"scalableResourceSelector,omitempty"`
	// kubelet describes how the kubelets of the selected node groups are configured, so that what Karpenter plans with is what
	// Nodes will offer.
	// +optional
	Kubelet *Kubelet `json:"kubelet,omitempty"`
	// drift says for which reasons Karpenter replaces Nodes.
	// +optional
	Drift DriftPolicy `json:"drift,omitzero"`
	// price says which prices Karpenter may decide by.
	// +optional
	Price PricePolicy `json:"price,omitzero"`
	// adoption says which machines that were there before Karpenter become its own.
	// +optional
	Adoption AdoptionPolicy `json:"adoption,omitzero"`
	// maxNodeProvisionTime is how long a NodeClaim waits, once it has a machine, for that machine's provider ID and for its Node, before
	// the agent releases it as late; the next NodeClaim gets the machine then. A node group whose MachineDeployment has the annotation
	// cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime goes by that instead. Without either, the agent's options
	// --machine-provider-id-deadline and --machine-node-deadline count. A change is for NodeClaims that are made later.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]+(s|m|h))+$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('10s') && duration(self) <= duration('168h')",message="maxNodeProvisionTime must be from 10s to 168h"
	// +optional
	MaxNodeProvisionTime *metav1.Duration `json:"maxNodeProvisionTime,omitempty"`
}

// ClusterAPINodeClassList is a list of node classes.
//
// +kubebuilder:object:root=true
type ClusterAPINodeClassList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the node classes.
	Items []ClusterAPINodeClass `json:"items"`
}

const (
	// ConditionNodeGroupsFound is True when the selector matches at least one node group. Ready needs it.
	ConditionNodeGroupsFound = "NodeGroupsFound"
	// ConditionAgentReachable is False when the agent has not been heard of for the grace period. Ready needs it.
	ConditionAgentReachable = "AgentReachable"
	// ConditionAgentCertificateValid is False when the client certificate that the agent is called with has ended, or soon will, and has not been
	// renewed. There is none where the agent is called without a certificate.
	ConditionAgentCertificateValid = "AgentCertificateValid"
	// ConditionAgentCompatible is False when the agent and this shim are of versions that are not meant for each other, or the agent lacks a
	// feature that the shim relies on. Ready does not need it: what works goes on. There is none before an agent has answered.
	ConditionAgentCompatible = "AgentCompatible"
	// ConditionNodeGroupsValid is False when the agent reports values that it could not use in the description of a selected
	// node group. Ready does not need it: such a group is used without those values, or not at all.
	ConditionNodeGroupsValid = "NodeGroupsValid"
)

// ClusterAPINodeClassStatus is what the shim found.
type ClusterAPINodeClassStatus struct {
	// nodeGroups is how many node groups the selector matches.
	// +optional
	NodeGroups int32 `json:"nodeGroups"`
	// availableNodeGroups is how many of these a machine could be had from.
	// +optional
	AvailableNodeGroups int32 `json:"availableNodeGroups"`
	// instanceTypes is how many instance types these node groups offer.
	// +optional
	InstanceTypes int32 `json:"instanceTypes"`
	// zones is how many failure domains these node groups name.
	// +optional
	Zones int32 `json:"zones"`
	// problems is how many values in the descriptions of these node groups could not be used.
	// +optional
	Problems int32 `json:"problems"`
	// selected are the node groups that the selector matches, ordered by name; at most 50, those without room first to be shown.
	// It follows what the agent reports within seconds.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=50
	// +optional
	Selected []SelectedNodeGroup `json:"selected,omitempty"`
	// conditions are the signals for health and readiness: Ready, NodeGroupsFound, AgentReachable, AgentCertificateValid,
	// AgentCompatible, NodeGroupsValid.
	// +optional
	Conditions []status.Condition `json:"conditions,omitempty"`
}

// MaxSelectedNodeGroups bounds [ClusterAPINodeClassStatus.Selected].
const MaxSelectedNodeGroups = 50

// SelectedNodeGroup is a node group as the node class sees it.
type SelectedNodeGroup struct {
	// name is the node group's id: namespace/name of its MachineDeployment in the management cluster.
	Name string `json:"name"`
	// instanceType is the label node.kubernetes.io/instance-type of its Nodes.
	// +optional
	InstanceType string `json:"instanceType,omitempty"`
	// zone is the failure domain; absent when it has none.
	// +optional
	Zone string `json:"zone,omitempty"`
	// capacityType is how its machines are paid for: on-demand, spot or reserved.
	// +optional
	CapacityType string `json:"capacityType,omitempty"`
	// price is what one machine costs each hour, in currency. It is what Karpenter decides by, unless a NodeOverlay changes it.
	// +optional
	Price string `json:"price,omitempty"`
	// currency is an ISO 4217 code; absent when nobody named one, as with an estimate.
	// +optional
	Currency string `json:"currency,omitempty"`
	// priceSource is where the price came from: Annotation, PriceList, Estimate, or Unknown.
	// +optional
	PriceSource string `json:"priceSource,omitempty"`
	// available says whether a machine could be had now.
	Available bool `json:"available"`
	// reason is why not: AtMaxSize, CoolingDown, Paused, Deleting, ReplicasOwned, ReplicasLowered, Invalid, QuotaExceeded,
	// MachinesBlocked, NoRoom, PriceUnknown, NoCapacity, Unusable, or Other. Absent when available.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message is the same for people.
	// +optional
	Message string `json:"message,omitempty"`
	// rollingOut says that Cluster API is replacing machines after a template change. Machines can be had meanwhile.
	// +optional
	RollingOut bool `json:"rollingOut,omitempty"`
}

// Reasons of a [SelectedNodeGroup] that is not available. Those that the agent gives have its names.
const (
	// ReasonNoRoom means that the agent refused a claim a moment ago.
	ReasonNoRoom = "NoRoom"
	// ReasonPriceUnknown means that spec.price does not let the node group be used, or that the agent reports no price at all.
	ReasonPriceUnknown = "PriceUnknown"
	// ReasonNoCapacity means that pods could have no CPU or no memory of its machines.
	ReasonNoCapacity = "NoCapacity"
	// ReasonUnusable means that Nodes of the node group could not be described to Karpenter.
	ReasonUnusable = "Unusable"
	// ReasonOther means a reason that this version does not know; the message says it.
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
