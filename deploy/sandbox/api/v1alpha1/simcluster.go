package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SimClusterSpec says nothing: a simulated network takes no describing.
type SimClusterSpec struct{}

// ClusterInitialization is the part of the contract that Cluster API waits for.
type ClusterInitialization struct {
	// provisioned is true once the Cluster's infrastructure is there.
	//
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// SimClusterStatus is what the contract asks for.
type SimClusterStatus struct {
	// initialization of the infrastructure.
	//
	// +optional
	Initialization ClusterInitialization `json:"initialization,omitempty,omitzero"`
}

// SimCluster stands for what a Cluster's machines share, such as a network. A Cluster without any
// has no infrastructure that is ready, in Cluster API's eyes, and its MachineHealthChecks remediate
// nothing.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
// +kubebuilder:printcolumn:name="Provisioned",type=boolean,JSONPath=`.status.initialization.provisioned`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SimCluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SimClusterSpec   `json:"spec,omitempty,omitzero"`
	Status SimClusterStatus `json:"status,omitempty,omitzero"`
}

// SimClusterList is a list of SimClusters.
//
// +kubebuilder:object:root=true
type SimClusterList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimCluster `json:"items"`
}
