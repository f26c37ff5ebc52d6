// Package v1alpha1 holds the agent's own API in the hub: the MachineClaim, Spoke and NodePoolSet
// resources, and the keys of the annotations, labels and finalizers that the agent uses on Cluster
// API's objects.
//
// +kubebuilder:object:generate=true
// +groupName=agent.karpenter.cluster.x-k8s.io
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Group is the API group of the agent's own resources, and the prefix of every key that it sets on
// other resources.
const Group = "agent.karpenter.cluster.x-k8s.io"

// GroupVersion is the version of the API in this package.
var GroupVersion = schema.GroupVersion{Group: Group, Version: "v1alpha1"}

// AddToScheme registers the types of this package.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &MachineClaim{}, &MachineClaimList{}, &Spoke{}, &SpokeList{}, &NodePoolSet{}, &NodePoolSetList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
