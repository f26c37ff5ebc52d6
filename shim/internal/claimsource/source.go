// Package claimsource triggers controllers of NodeClaims on changes of claims in the hub.
package claimsource

import (
	"cmp"
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
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

// NodeClaims returns a source that enqueues the NodeClaim of each claim that appears, changes or
// leaves the mirror. A claim leaves it if the hub no longer has it: normally long after its
// NodeClaim, but also when the hub has been restored from a backup.
func NodeClaims(claims Claims) source.Source {
	return changes(claims, 0, func(seen, seen) bool { return true })
}

// Outdated returns a source that enqueues the NodeClaim of each claim whose Machine stops or
// resumes being up to date with its template, is replaced by another one that is not, or leaves the
// mirror while it is not. Claims of Machines that are outdated when the source starts count. A
// Machine that is being deleted does not. The NodeClaim is enqueued a second time after lag, for
// reconcilers that also depend on what is known of the claim's node group, which comes in another
// stream.
func Outdated(claims Claims, lag time.Duration) source.Source {
	return changes(claims, lag, func(before, after seen) bool { return before.outdated != after.outdated })
}

// seen is what a source remembers of a claim. The zero value is that of a claim that is not there.
type seen struct {
	nodeClaim string
	// outdated is the UID of its Machine if that is not up to date, and not being deleted; else
	// empty.
	outdated string
}

func seenOf(claim *agentv1alpha1.Claim) seen {
	s := seen{nodeClaim: claim.GetDisplayName()}
	if m := claim.GetMachine(); m != nil && !m.GetUpToDate() && m.GetDeletedAt() == nil {
		s.outdated = m.GetUid()
	}
	return s
}

// changes returns a source that calls concerns for each claim that was added, changed or removed,
// and enqueues its NodeClaim if the result is true: at once, and again after lag unless that is 0.
func changes(claims Claims, lag time.Duration, concerns func(before, after seen) bool) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go func() {
			subscription := claims.Subscribe()
			defer subscription.Close()
			known := map[string]seen{} // by the claim's id
			for {
				select {
				case <-ctx.Done():
					return
				case <-subscription.Changed():
				}
				for _, id := range subscription.Take() {
					before, after := known[id], seen{}
					if claim, ok := claims.Get(id); ok {
						after = seenOf(claim)
						known[id] = after
					} else {
						delete(known, id)
					}
					name := cmp.Or(after.nodeClaim, before.nodeClaim)
					if name == "" || !concerns(before, after) {
						continue
					}
					request := reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
					queue.Add(request)
					if lag > 0 {
						time.AfterFunc(lag, func() { queue.Add(request) }) // AddAfter would be dropped while it still is in the queue
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
