//nolint:lll // a marker cannot be broken into lines
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// NodePoolSet publishes NodePools and NodeClasses to the spokes of Clusters in its namespace. It
// has no effect unless both the agent and the shim are configured for it.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:labels={"clusterctl.cluster.x-k8s.io=","clusterctl.cluster.x-k8s.io/move="}
// +kubebuilder:resource:categories=cluster-api,shortName=nps
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Clusters",type=integer,JSONPath=`.status.clusters`
// +kubebuilder:printcolumn:name="Applied",type=integer,JSONPath=`.status.appliedClusters`
// +kubebuilder:printcolumn:name="Failing",type=integer,JSONPath=`.status.failingClusters`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Deletion Policy",type=string,JSONPath=`.spec.deletionPolicy`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="metadata.name must have at most 63 characters, because it is the value of a label in the spokes"
type NodePoolSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what is published, and to which Clusters.
	// +required
	Spec NodePoolSetSpec `json:"spec,omitzero"`
	// status reports whether the spokes have applied it.
	// +optional
	Status NodePoolSetStatus `json:"status,omitzero"`
}

// DeletionPolicy is what happens to an object in a spoke that its NodePoolSet no longer publishes.
//
// +kubebuilder:validation:Enum=Retain;Delete
type DeletionPolicy string

const (
	// DeletionPolicyRetain leaves the object in the spoke, without our label.
	DeletionPolicyRetain DeletionPolicy = "Retain"
	// DeletionPolicyDelete deletes the object, if it still carries our label.
	DeletionPolicyDelete DeletionPolicy = "Delete"
)

// NodePoolSetSpec is what is published, and to which Clusters.
//
// +kubebuilder:validation:XValidation:rule="(has(self.nodePools) && size(self.nodePools) > 0) || (has(self.nodeClasses) && size(self.nodeClasses) > 0)",message="spec needs at least one entry of nodePools or nodeClasses"
type NodePoolSetSpec struct {
	// clusterSelector selects Clusters of the NodePoolSet's namespace by their labels. `{}` selects
	// all of them.
	// +required
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In','NotIn','Exists','DoesNotExist'])",message="clusterSelector.matchExpressions[].operator must be one of In, NotIn, Exists, DoesNotExist"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In','NotIn'] ? has(e.values) && size(e.values) > 0 : !has(e.values) || size(e.values) == 0)",message="clusterSelector.matchExpressions[].values must be set with the operators In and NotIn, and must not be set with the others"
	ClusterSelector *metav1.LabelSelector `json:"clusterSelector"`
	// nodePools are Karpenter's NodePools.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	NodePools []PublishedTemplate `json:"nodePools,omitempty"`
	// nodeClasses are ClusterAPINodeClasses.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	NodeClasses []PublishedTemplate `json:"nodeClasses,omitempty"`
	// deletionPolicy is what happens to an object in a spoke that is no longer published, because
	// its entry was removed or because the Cluster is no longer selected. Retain leaves it there,
	// without our label. Delete deletes it if it still carries our label. If the NodePoolSet itself
	// is deleted, its objects stay as they are, with our label.
	// +optional
	// +kubebuilder:default=Retain
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`
}

// PublishedTemplate is an object as it is created in the spokes.
type PublishedTemplate struct {
	// name is the object's name in the spokes.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	Name string `json:"name"`
	// labels are the object's labels.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.size() <= 317 && self[k].size() <= 63)",message="labels: a key may have at most 317 characters, and a value 63"
	// +kubebuilder:validation:XValidation:rule="!self.exists(k, k.startsWith('karpenter.cluster.x-k8s.io/published-'))",message="labels: keys that begin with karpenter.cluster.x-k8s.io/published- are set by the shim"
	Labels map[string]PublishedValue `json:"labels,omitempty"`
	// annotations are the object's annotations.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="!self.exists(k, k.startsWith('karpenter.cluster.x-k8s.io/published-'))",message="annotations: keys that begin with karpenter.cluster.x-k8s.io/published- are set by the shim"
	Annotations map[string]PublishedValue `json:"annotations,omitempty"`
	// spec is the object's spec, in the version that the spoke's CustomResourceDefinition has. The
	// spoke's API server validates it. At most 32 KiB of JSON.
	// +required
	// +kubebuilder:pruning:PreserveUnknownFields
	Spec runtime.RawExtension `json:"spec,omitzero"`
}

// PublishedValue is the value of a label or an annotation.
//
// +kubebuilder:validation:MaxLength=4096
type PublishedValue string

// ReadyCondition of a NodePoolSet is True when every selected Cluster has applied everything that
// the set publishes to it.
const ReadyCondition = "Ready"

// Reasons of [ReadyCondition].
const (
	// AppliedReason means that every selected Cluster has applied everything.
	AppliedReason = "Applied"
	// WaitingReason means that some Clusters have not reported yet.
	WaitingReason = "WaitingForClusters"
	// NotAppliedReason means that some Clusters cannot apply something.
	NotAppliedReason = "NotApplied"
	// InvalidReason means that an entry cannot be published anywhere.
	InvalidReason = "Invalid"
	// NoClustersReason means that no Cluster is selected.
	NoClustersReason = "NoClusters"
)

// NodePoolSetStatus is what became of a NodePoolSet in the spokes.
type NodePoolSetStatus struct {
	// observedGeneration is the generation of the spec that the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions has one condition, Ready. Its message names the first Clusters that fail.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// clusters is how many Clusters are selected.
	// +optional
	Clusters *int32 `json:"clusters,omitempty"`
	// appliedClusters is how many of them have applied everything.
	// +optional
	AppliedClusters *int32 `json:"appliedClusters,omitempty"`
	// failingClusters is how many of them cannot apply something.
	// +optional
	FailingClusters *int32 `json:"failingClusters,omitempty"`
}

// NodePoolSetList is a list of NodePoolSets.
//
// +kubebuilder:object:root=true
type NodePoolSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []NodePoolSet `json:"items"`
}
