// Package v1alpha1 holds the objects that a user of the shim creates in the spoke, and
// the keys that the shim sets on objects there.
//
// Importing it registers ClusterAPINodeClass and its list in client-go's scheme, where Karpenter
// core looks NodeClasses up.
//
// +kubebuilder:object:generate=true
// +groupName=karpenter.cluster.x-k8s.io
package v1alpha1
