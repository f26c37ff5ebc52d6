// Package owners decides which NodeClaim owns a machine if several have its provider ID, as can
// happen after a migration from another Cluster API provider.
package owners

import (
	"context"
	"fmt"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"
)

// With returns the NodeClaims with the provider ID. Here and below, kube must have indexes on the
// provider IDs of NodeClaims and Nodes.
func With(ctx context.Context, kube client.Reader, providerID string) ([]*karpv1.NodeClaim, error) {
	if providerID == "" {
		return nil, nil
	}
	list := &karpv1.NodeClaimList{}
	if err := kube.List(ctx, list, nodeclaimutils.ForProviderID(providerID)); err != nil {
		return nil, fmt.Errorf("listing the NodeClaims with provider ID %s: %w", providerID, err)
	}
	return lo.ToSlicePtr(list.Items), nil
}

// Others returns the NodeClaims with the provider ID other than this one, which need not have that
// provider ID.
func Others(ctx context.Context, kube client.Reader, nodeClaim *karpv1.NodeClaim, providerID string) ([]*karpv1.NodeClaim, error) {
	all, err := With(ctx, kube, providerID)
	return lo.Reject(all, func(other *karpv1.NodeClaim, _ int) bool { return other.UID == nodeClaim.UID }), err
}

// Of returns the NodeClaim that owns the machine with the NodeClaim's provider ID: the NodeClaim
// itself, or another one.
func Of(ctx context.Context, kube client.Reader, nodeClaim *karpv1.NodeClaim) (*karpv1.NodeClaim, error) {
	others, err := Others(ctx, kube, nodeClaim, nodeClaim.Status.ProviderID)
	if err != nil || len(others) == 0 {
		return nodeClaim, err
	}
	node, err := Node(ctx, kube, nodeClaim.Status.ProviderID)
	if err != nil {
		return nil, err
	}
	return Rightful(append(others, nodeClaim), node), nil
}

// Node returns the Node with the provider ID, or nil.
func Node(ctx context.Context, kube client.Reader, providerID string) (*corev1.Node, error) {
	nodes := &corev1.NodeList{}
	if err := kube.List(ctx, nodes, client.MatchingFields{"spec.providerID": providerID}); err != nil {
		return nil, fmt.Errorf("listing the Nodes with provider ID %s: %w", providerID, err)
	}
	if len(nodes.Items) == 0 {
		return nil, nil //nolint:nilnil // documented
	}
	return &nodes.Items[0], nil
}

// Rightful returns the owner of a machine among NodeClaims with the same provider ID, of which
// there must be at least one. It prefers the owner of the Node (nil if there is no Node), then a
// registered NodeClaim, then one that is not being deleted, then the oldest.
func Rightful(nodeClaims []*karpv1.NodeClaim, node *corev1.Node) *karpv1.NodeClaim {
	criteria := []func(*karpv1.NodeClaim) bool{
		func(nc *karpv1.NodeClaim) bool {
			return node != nil && lo.ContainsBy(node.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == nc.UID })
		},
		func(nc *karpv1.NodeClaim) bool {
			return nc.StatusConditions().Get(karpv1.ConditionTypeRegistered).IsTrue()
		},
		func(nc *karpv1.NodeClaim) bool { return nc.DeletionTimestamp.IsZero() },
	}
	before := func(a, b *karpv1.NodeClaim) bool {
		for _, meets := range criteria {
			if meets(a) != meets(b) {
				return meets(a)
			}
		}
		if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
			return a.CreationTimestamp.Before(&b.CreationTimestamp)
		}
		return a.UID < b.UID
	}
	return lo.MinBy(nodeClaims, before)
}
