package claims

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// origins relate the cluster that a call of a holder comes from to the holder's claims.
type origins struct {
	// matched reports that the caller has an existing claim in its live set, so that it runs where
	// claims of this Cluster have their owners.
	matched bool
	// own reports that the caller's cluster made some of the other claims. others is another
	// cluster that made some, "" if there is none.
	own    bool
	others string
}

// add adds a claim that has not ended, and that is not in the caller's live set.
func (o *origins) add(spoke string, c *v1alpha1.MachineClaim) {
	switch {
	case c.Spec.Spoke == "" || c.Status.Phase == v1alpha1.PhaseReleasing:
	case c.Spec.Spoke == spoke:
		o.own = true
	default:
		o.others = c.Spec.Spoke
	}
}

// checkSpoke returns a [*ForeignSpokeError] if a call of a holder comes from a cluster that is
// unrelated to the holder's claims and is not the known one. It returns the known cluster, whose
// live set was accepted last, or "". A call that names no cluster is accepted, because older shims
// name none. relate is only called if the claims decide.
func (e *Engine) checkSpoke(
	ctx context.Context, cluster types.NamespacedName, holder, spoke string, relate func() (origins, error),
) (known string, err error) {
	if e.recordsSpoke(holder) {
		known = e.SpokeOf(cluster)
	}
	if spoke == "" || spoke == known {
		return known, nil
	}
	of, err := relate()
	if err != nil || of.matched || of.own {
		return known, err
	}
	// What this agent knows may be outdated, and the call is about to be refused or to be the
	// first.
	if e.recordsSpoke(holder) {
		if known, err = e.ReadSpokeOf(ctx, cluster); err != nil {
			return "", fmt.Errorf("reading the Cluster's spoke: %w", err)
		}
	}
	switch {
	case spoke == known:
	case of.others != "":
		return known, &ForeignSpokeError{Spoke: spoke, Recorded: of.others, ByClaims: true}
	case known != "":
		return known, &ForeignSpokeError{Spoke: spoke, Recorded: known}
	}
	return known, nil
}

// recordsSpoke reports whether the cluster of the holder's last live set is recorded.
func (e *Engine) recordsSpoke(holder string) bool {
	return e.SpokeOf != nil && e.ReadSpokeOf != nil && e.ReportsNodes != nil && e.ReportsNodes(holder)
}

// mayMake returns why no further claim may be made for a request; nil if it may. Unless the request
// only validates, it counts the claim as created: see [Engine.room].
func (e *Engine) mayMake(ctx context.Context, r Request, c *v1alpha1.MachineClaim) error {
	_, err := e.checkSpoke(ctx, clusterOf(c), r.Holder, r.Spoke, func() (origins, error) { return e.cachedOrigins(ctx, r) })
	if err != nil {
		return err
	}
	return e.room(ctx, c, r.ValidateOnly)
}

// cachedOrigins relates a request to the holder's claims in the caches.
func (e *Engine) cachedOrigins(ctx context.Context, r Request) (origins, error) {
	var of origins
	var list v1alpha1.MachineClaimList
	err := e.Client.List(ctx, &list, client.InNamespace(r.Namespace), selecting(e.Indexes.Cluster, v1alpha1.ClusterLabel, r.Cluster),
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return of, fmt.Errorf("listing the Cluster's claims: %w", err)
	}
	for i := range list.Items {
		c := &list.Items[i]
		if c.Spec.ClusterName == r.Cluster && c.Spec.Holder == r.Holder && c.CurrentPhase() != v1alpha1.PhaseEnded {
			of.add(r.Spoke, c)
		}
	}
	return of, nil
}
