package fairqueue

import (
	"context"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// These functions return the Cluster that a controller's request is about, so that Clusters can
// share its workers fairly. An object that the cache does not show belongs to a Cluster without a
// name, of the same namespace. The readers must be caches.

// OwnerOfDeployment is for requests that name a MachineDeployment.
func OwnerOfDeployment(cache client.Reader) Owner {
	return func(r reconcile.Request) types.NamespacedName {
		var md clusterv1.MachineDeployment
		_ = cache.Get(context.Background(), r.NamespacedName, &md, client.UnsafeDisableDeepCopy) // else the name is empty
		return types.NamespacedName{Namespace: r.Namespace, Name: md.Spec.ClusterName}
	}
}

// OwnerOfMachine is for requests that name a Machine.
func OwnerOfMachine(cache client.Reader) Owner {
	return func(r reconcile.Request) types.NamespacedName {
		var m clusterv1.Machine
		_ = cache.Get(context.Background(), r.NamespacedName, &m, client.UnsafeDisableDeepCopy)
		return types.NamespacedName{Namespace: r.Namespace, Name: m.Spec.ClusterName}
	}
}

// OwnerOfClaim is for requests that name a MachineClaim. Its name begins with the Cluster's, and
// the ID of a claim contains no dots.
func OwnerOfClaim(r reconcile.Request) types.NamespacedName {
	return types.NamespacedName{Namespace: r.Namespace, Name: r.Name[:max(0, strings.LastIndex(r.Name, "."))]}
}

// OwnerOfNamespace is for requests whose name is a namespace, and that are about all of its
// Clusters at once.
func OwnerOfNamespace(r reconcile.Request) types.NamespacedName {
	return types.NamespacedName{Namespace: r.Name}
}
