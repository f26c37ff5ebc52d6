package claimsync

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

func newest(nodes []corev1.Node, n int) []corev1.Node {
	slices.SortFunc(nodes, func(a, b corev1.Node) int {
		return b.CreationTimestamp.Compare(a.CreationTimestamp.Time)
	})
	return nodes[:n]
}
