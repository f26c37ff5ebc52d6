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
	// ConditionNodeGroupsValid is False when the agent reports values that it could not use in the description of a selected
	// node group. Ready does not need it: such a group is used without those values, or not at all.
	ConditionNodeGroupsValid = "NodeGroupsValid"
)

// ClusterAPINodeClassStatus is what the shim found.
type ClusterAPINodeClassStatus struct {
	// nodeGroups is how many node groups the selector matches.
	// +optional
	NodeGroups int32 `json:"nodeGroups"`
	// instanceTypes is how many instance types these node groups offer.
	// +optional
	InstanceTypes int32 `json:"instanceTypes"`
	// zones is how many failure domains these node groups name.
	// +optional
	Zones int32 `json:"zones"`
	// problems is how many values in the descriptions of these node groups could not be used.
	// +optional
	Problems int32 `json:"problems"`
	// conditions are the signals for health and readiness: Ready, NodeGroupsFound, AgentReachable, NodeGroupsValid.
	// +optional
	Conditions []status.Condition `json:"conditions,omitempty"`
}

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
