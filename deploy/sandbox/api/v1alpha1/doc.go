// Package v1alpha1 holds the kinds of the simulated infrastructure provider: SimMachineTemplate and SimMachine for the
// instances, SimCluster for what they share, SimControlPlane for a control plane that somebody else runs, SimBootstrapConfig for bootstrap
// data, and the templates that a ClusterClass is made of. All are in one API group, which real providers would not do.
//
// They follow the Cluster API contracts for infrastructure machines, infrastructure clusters, control planes and bootstrap configurations,
// v1beta2. What a simulated machine does (how long it takes to boot, how it fails, where it hangs) is part of its spec, so a test says it where a
// user would say the instance type.
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

// GroupVersion is the version of the API in this package. The group is the one that infrastructure providers share, so
// that the permissions other controllers hold on it apply here as they do for a real provider.
var GroupVersion = schema.GroupVersion{Group: "infrastructure.cluster.x-k8s.io", Version: "v1alpha1"}

// CRDs holds the generated CustomResourceDefinitions of this package, one file each, in the folder crds.
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
