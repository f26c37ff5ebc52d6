// Package claimsource triggers controllers of NodeClaims on changes of claims in the hub.
package claimsource

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Claims is a mirror of the shim's claims.
type Claims interface {
	Get(claimID string) (*agentv1alpha1.Claim, bool)
	Subscribe() *agentclient.Subscription
}

// NodeClaims returns a source that enqueues the NodeClaim of each claim that appears, changes or leaves
// the mirror. A claim leaves it if the hub no longer has it: normally long after its NodeClaim, but also
// when the hub has been restored from a backup.
func NodeClaims(claims Claims) source.Source {
	names := map[string]string{} // of the NodeClaims, by the claims that were seen
	return changes(claims, func(id string, claim *agentv1alpha1.Claim) string {
		if claim == nil {
			defer delete(names, id)
		} else {
			names[id] = claim.GetDisplayName()
		}
		return names[id]
	})
}

// Outdated returns a source that enqueues the NodeClaim of each claim whose Machine turns from being up
// to date with its template to not being so, or back.
func Outdated(claims Claims) source.Source {
	outdated := sets.New[string]() // ids of claims
	return changes(claims, func(id string, claim *agentv1alpha1.Claim) string {
		is := claim.GetMachine() != nil && !claim.GetMachine().GetUpToDate()
		if is == outdated.Has(id) {
			return ""
		}
		if is {
			outdated.Insert(id)
		} else {
			outdated.Delete(id)
		}
		return claim.GetDisplayName()
	})
}

// changes returns a source that enqueues the NodeClaims that affected names, from a single goroutine,
// for each claim that appears, changes or, with nil, leaves the mirror. An empty name is none.
func changes(claims Claims, affected func(id string, claim *agentv1alpha1.Claim) (nodeClaim string)) source.Source {
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
					claim, _ := claims.Get(id)
					if name := affected(id, claim); name != "" {
						queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: name}})
					}
				}
			}
		}()
		return nil
	})
}

// Synced is a mirror that reports when it has its first complete view.
type Synced interface {
	Synced() <-chan struct{}
}

// AllNodeClaims returns a source that enqueues every NodeClaim once, when the mirror is synced. It
// is for controllers that conclude nothing about a NodeClaim before that. kube reads from a cache.
func AllNodeClaims(claims Synced, kube client.Reader) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go func() {
			select {
			case <-ctx.Done():
				return
			case <-claims.Synced():
			}
			_ = wait.PollUntilContextCancel(ctx, retry, true, func(ctx context.Context) (bool, error) {
				nodeClaims := &karpv1.NodeClaimList{}
				if err := kube.List(ctx, nodeClaims, client.UnsafeDisableDeepCopy); err != nil {
					log.FromContext(ctx).Error(err, "listing the NodeClaims")
					return false, nil
				}
				for i := range nodeClaims.Items {
					queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: nodeClaims.Items[i].Name}})
				}
				return true, nil
			})
		}()
		return nil
	})
}

// retry is the interval after a failed listing.
const retry = time.Second
