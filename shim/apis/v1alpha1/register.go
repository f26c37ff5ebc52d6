package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
)

// Group is the API group of the shim's objects; it also prefixes the keys that the shim writes.
const Group = "karpenter.cluster.x-k8s.io"

// GroupVersion is the version of this package.
var GroupVersion = schema.GroupVersion{Group: Group, Version: "v1alpha1"}

// Karpenter core resolves the kind of a NodeClass through client-go's scheme and panics on a type
// that is not there, so registration cannot be left to the binary.
func init() { //nolint:gochecknoinits // Karpenter core demands it
	AddToScheme(scheme.Scheme)
}

// AddToScheme registers the types of this package.
func AddToScheme(s *runtime.Scheme) {
	metav1.AddToGroupVersion(s, GroupVersion)
	s.AddKnownTypes(GroupVersion, &ClusterAPINodeClass{}, &ClusterAPINodeClassList{})
}
