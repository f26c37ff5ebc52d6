// Package claimsource triggers controllers of NodeClaims on changes of claims in the hub.
package claimsource

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Claims is a mirror of the shim's claims.
type Claims interface {
	Get(claimID string) (*agentv1alpha1.Claim, bool)
	Subscribe() *agentclient.Subscription
}

// NodeClaims returns a source that enqueues the NodeClaim of each claim that appears or changes. A
// claim that leaves the mirror triggers nothing, because its NodeClaim's name is lost with it;
// controllers must also check periodically.
func NodeClaims(claims Claims) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go func() {
			subscription := claims.Subscribe()
			defer subscription.Close()
			for {
				select {
				case <-ctx.Done():
					return
				case <-subscription.Changed():
				}
				for _, id := range subscription.Take() {
					if claim, ok := claims.Get(id); ok && claim.GetDisplayName() != "" {
						queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: claim.GetDisplayName()}})
					}
				}
			}
		}()
		return nil
	})
}
