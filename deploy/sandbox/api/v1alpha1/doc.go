// Package v1alpha1 defines the kinds of the simulated infrastructure provider: SimMachineTemplate
// and SimMachine for instances, SimCluster for their shared infrastructure, SimControlPlane for a
// control plane that the provider does not run itself, SimBootstrapConfig for bootstrap data, and
// the templates of a ClusterClass. All are in one API group, unlike in real providers.
//
// They follow the Cluster API contracts, v1beta2, for infrastructure machines, infrastructure
// clusters, control planes and bootstrap configurations. The behaviour of a simulated machine is
// part of its spec: how long it takes to boot, how it fails, and where it hangs. A test sets it
// where a user would set the instance type.
//
// +kubebuilder:object:generate=true
// +groupName=infrastructure.cluster.x-k8s.io
package v1alpha1

import (
	"embed"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the version of the API in this package. Infrastructure providers share this
// group, so that the permissions that other controllers have on it apply here as they do for a real
// provider.
var GroupVersion = schema.GroupVersion{Group: "infrastructure.cluster.x-k8s.io", Version: "v1alpha1"}

// CRDs holds the generated CustomResourceDefinitions of this package, one file each, in the folder
// crds.
//
//go:embed crds/*.yaml
var CRDs embed.FS

// AddToScheme registers the types of this package.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&SimMachine{}, &SimMachineList{},
		&SimMachineTemplate{}, &SimMachineTemplateList{},
		&SimCluster{}, &SimClusterList{},
		&SimControlPlane{}, &SimControlPlaneList{},
		&SimClusterTemplate{}, &SimClusterTemplateList{},
		&SimControlPlaneTemplate{}, &SimControlPlaneTemplateList{},
		&SimBootstrapConfig{}, &SimBootstrapConfigList{},
		&SimBootstrapConfigTemplate{}, &SimBootstrapConfigTemplateList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
