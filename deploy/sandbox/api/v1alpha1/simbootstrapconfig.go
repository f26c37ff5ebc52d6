package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// SimBootstrapConfigSpec says nothing: simulated machines need no bootstrap data.
type SimBootstrapConfigSpec struct{}

// BootstrapInitialization is the part of the contract that Cluster API waits for.
type BootstrapInitialization struct {
	// dataSecretCreated is true once the Secret with the bootstrap data is there.
	//
	// +optional
	DataSecretCreated *bool `json:"dataSecretCreated,omitempty"`
}

// SimBootstrapConfigStatus is what the contract asks for.
type SimBootstrapConfigStatus struct {
	// initialization of the bootstrap data.
	//
	// +optional
	Initialization BootstrapInitialization `json:"initialization,omitempty,omitzero"`
	// dataSecretName is the name of the Secret.
	//
	// +optional
	DataSecretName string `json:"dataSecretName,omitempty"`
}

// SimBootstrapConfig is one Machine's bootstrap configuration. It is for MachineDeployments of a
// ClusterClass, which must name a template of such; others may name a Secret by themselves.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
// +kubebuilder:printcolumn:name="Secret",type=string,JSONPath=`.status.dataSecretName`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SimBootstrapConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SimBootstrapConfigSpec   `json:"spec,omitempty,omitzero"`
	Status SimBootstrapConfigStatus `json:"status,omitempty,omitzero"`
}

// SimBootstrapConfigList is a list of SimBootstrapConfigs.
//
// +kubebuilder:object:root=true
type SimBootstrapConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimBootstrapConfig `json:"items"`
}

// SimBootstrapConfigTemplateResource is what the SimBootstrapConfigs of a template are made from.
type SimBootstrapConfigTemplateResource struct {
	// metadata for the SimBootstrapConfigs.
	//
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// spec of the SimBootstrapConfigs.
	//
	// +optional
	Spec SimBootstrapConfigSpec `json:"spec,omitempty"`
}

// SimBootstrapConfigTemplateSpec holds the template.
type SimBootstrapConfigTemplateSpec struct {
	// template of the SimBootstrapConfigs.
	//
	// +required
	Template SimBootstrapConfigTemplateResource `json:"template"`
}

// SimBootstrapConfigTemplate is the template of the bootstrap configurations of a
// MachineDeployment.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
type SimBootstrapConfigTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SimBootstrapConfigTemplateSpec `json:"spec"`
}

// SimBootstrapConfigTemplateList is a list of SimBootstrapConfigTemplates.
//
// +kubebuilder:object:root=true
type SimBootstrapConfigTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimBootstrapConfigTemplate `json:"items"`
}
