// Package spoke identifies the cluster that the shim provisions nodes for, so that the agent can
// tell its live set from another cluster's. The shim's kubeconfig and the name of its Cluster are
// independent settings, and may not match.
package spoke

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ID returns the UID of the namespace kube-system. It never changes during a cluster's life, not
// even when the cluster is restored from a backup of its etcd.
func ID(ctx context.Context, reader client.Reader) (string, error) {
	namespace := &corev1.Namespace{}
	if err := reader.Get(ctx, types.NamespacedName{Name: metav1.NamespaceSystem}, namespace); err != nil {
		return "", fmt.Errorf("reading the cluster's identity, the UID of the namespace %s: %w", metav1.NamespaceSystem, err)
	}
	return string(namespace.UID), nil
}
