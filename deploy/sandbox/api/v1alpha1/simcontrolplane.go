package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// SimControlPlaneSpec describes a control plane that runs already.
type SimControlPlaneSpec struct {
	// version of Kubernetes that the control plane runs, such as v1.36.3. A change starts a
	// simulated upgrade; the API server is not replaced.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	Version string `json:"version"`
	// controlPlaneEndpoint is where its API server listens.
	//
	// +optional
	ControlPlaneEndpoint clusterv1.APIEndpoint `json:"controlPlaneEndpoint,omitempty,omitzero"`
	// upgradeDelay is how long an upgrade takes, to within a second, from when the provider first
	// observes a new version. Another change during an upgrade does not restart it.
	//
	// +optional
	// +kubebuilder:default="2s"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]+([.][0-9]+)?(ms|s|m|h))+$`
	UpgradeDelay metav1.Duration `json:"upgradeDelay,omitempty,omitzero"`
}

// ControlPlaneInitialization is the part of the contract that Cluster API waits for.
type ControlPlaneInitialization struct {
	// controlPlaneInitialized is true once the API server can be reached with the Cluster's
	// kubeconfig.
	//
	// +optional
	ControlPlaneInitialized *bool `json:"controlPlaneInitialized,omitempty"`
}

// SimControlPlaneStatus is what the contract asks for.
type SimControlPlaneStatus struct {
	// initialization of the control plane.
	//
	// +optional
	Initialization ControlPlaneInitialization `json:"initialization,omitempty,omitzero"`
	// externalManagedControlPlane is always true: there are no control plane Machines.
	//
	// +optional
	ExternalManagedControlPlane *bool `json:"externalManagedControlPlane,omitempty"`
	// version that the control plane reports: the previous one during an upgrade.
	//
	// +optional
	Version string `json:"version,omitempty"`
	// conditions of the control plane: Available, and RollingOut while it is upgraded.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SimControlPlane stands for a control plane that is not made of Machines, as a hosted one is not.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=`.status.version`
// +kubebuilder:printcolumn:name="Initialized",type=boolean,JSONPath=`.status.initialization.controlPlaneInitialized`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SimControlPlane struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SimControlPlaneSpec   `json:"spec,omitempty,omitzero"`
	Status SimControlPlaneStatus `json:"status,omitempty,omitzero"`
}

// SimControlPlaneList is a list of SimControlPlanes.
//
// +kubebuilder:object:root=true
type SimControlPlaneList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimControlPlane `json:"items"`
}
