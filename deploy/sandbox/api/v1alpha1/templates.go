package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// SimClusterTemplateResource is what the SimClusters of a ClusterClass are made from.
type SimClusterTemplateResource struct {
	// metadata for the SimClusters.
	//
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// spec of the SimClusters.
	//
	// +optional
	Spec SimClusterSpec `json:"spec,omitempty"`
}

// SimClusterTemplateSpec holds the template.
type SimClusterTemplateSpec struct {
	// template of the SimClusters.
	//
	// +required
	Template SimClusterTemplateResource `json:"template"`
}

// SimClusterTemplate is a ClusterClass's template of SimClusters.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
type SimClusterTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SimClusterTemplateSpec `json:"spec"`
}

// SimClusterTemplateList is a list of SimClusterTemplates.
//
// +kubebuilder:object:root=true
type SimClusterTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimClusterTemplate `json:"items"`
}

// SimControlPlaneTemplateResourceSpec is a SimControlPlaneSpec without the version, which is the
// topology's to say.
type SimControlPlaneTemplateResourceSpec struct {
	// controlPlaneEndpoint is where the API server listens.
	//
	// +optional
	ControlPlaneEndpoint clusterv1.APIEndpoint `json:"controlPlaneEndpoint,omitempty,omitzero"`
}

// SimControlPlaneTemplateResource is what the SimControlPlanes of a ClusterClass are made from.
type SimControlPlaneTemplateResource struct {
	// metadata for the SimControlPlanes.
	//
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// spec of the SimControlPlanes.
	//
	// +optional
	Spec SimControlPlaneTemplateResourceSpec `json:"spec,omitempty"`
}

// SimControlPlaneTemplateSpec holds the template.
type SimControlPlaneTemplateSpec struct {
	// template of the SimControlPlanes.
	//
	// +required
	Template SimControlPlaneTemplateResource `json:"template"`
}

// SimControlPlaneTemplate is a ClusterClass's template of SimControlPlanes.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
type SimControlPlaneTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SimControlPlaneTemplateSpec `json:"spec"`
}

// SimControlPlaneTemplateList is a list of SimControlPlaneTemplates.
//
// +kubebuilder:object:root=true
type SimControlPlaneTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimControlPlaneTemplate `json:"items"`
}
