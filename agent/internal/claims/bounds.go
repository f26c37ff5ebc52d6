package claims

import (
	"context"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Bounds limit what one Cluster can store in the hub. Zero means no limit.
type Bounds struct {
	// Claims is how many claims a Cluster may have that have not ended.
	Claims int
	// Ended is how many ended claims of a Cluster are remembered. When there are nearly so many, those that ended more than
	// [rememberedAtLeast] ago are forgotten; when that does not help, no further claim is made and no release of an unknown one
	// is remembered.
	Ended int
}

const (
	// rememberedAtLeast is how long an ended claim is remembered however many there are. No call is under way for so long: one that
	// was delayed and comes after the claim's end is still refused.
	rememberedAtLeast = time.Hour
	// crowdedLook is how often an ended claim is looked at while it is remembered.
	crowdedLook = 10 * time.Minute
	// censusLife is how long the claims of a Cluster are not counted anew. What this agent adds meanwhile is counted.
	censusLife = time.Second
)

// TooManyError means that a Cluster has as many claims, or as many ended claims that are remembered, as it may have.
type TooManyError struct {
	// Ended says that it is the ended ones.
	Ended bool
	// Limit is how many it may have. Zero when a ResourceQuota of the hub is used up, which is no limit of this Cluster alone.
	Limit int
	// RetryAfter is when it may be worth asking again.
	RetryAfter time.Duration
}

func (e *TooManyError) Error() string {
	if e.Limit == 0 {
		return "the hub's ResourceQuota for MachineClaims in the Cluster's namespace is used up"
	}
	if e.Ended {
		return fmt.Sprintf("the Cluster has %d ended claims that are remembered, as many as it may have; "+
			"they are forgotten an hour after their end", e.Limit)
	}
	return fmt.Sprintf("the Cluster has %d claims, as many as it may have", e.Limit)
}

// overQuota returns a [*TooManyError] when the API server refused a claim's object because of a ResourceQuota.
func overQuota(cluster types.NamespacedName, err error) error {
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota") {
		return nil
	}
	countRefused(cluster, "quota")
	return &TooManyError{RetryAfter: time.Minute}
}

// census is how many claims a Cluster has.
type census struct {
	live, ended int
	at          time.Time
}

// count counts the claims of a Cluster in the caches. The numbers may be a little old, which limits need not mind.
func (e *Engine) count(ctx context.Context, cluster types.NamespacedName) (census, error) {
	now := e.Clock.Now()
	e.mu.Lock()
	known, ok := e.censuses[cluster]
	e.mu.Unlock()
	if age := now.Sub(known.at); ok && age >= 0 && age < censusLife {
		return known, nil
	}
	var list v1alpha1.MachineClaimList
	err := e.Client.List(ctx, &list, client.InNamespace(cluster.Namespace),
		selecting(e.Indexes.Cluster, v1alpha1.ClusterLabel, cluster.Name), client.UnsafeDisableDeepCopy)
	if err != nil {
		return census{}, fmt.Errorf("counting the Cluster's claims: %w", err)
	}
	counted := census{at: now}
	for i := range list.Items {
		if list.Items[i].CurrentPhase() == v1alpha1.PhaseEnded {
			counted.ended++
		} else {
			counted.live++
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.censuses[cluster] = counted
	return counted, nil
}

// added counts claims that this agent has just made.
func (e *Engine) added(cluster types.NamespacedName, live, ended int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if known, ok := e.censuses[cluster]; ok {
		known.live += live
		known.ended += ended
		e.censuses[cluster] = known
	}
}

// room returns a [*TooManyError] when the Cluster may have no further claim, or no further ended one.
func (e *Engine) room(ctx context.Context, cluster types.NamespacedName, ended bool) error {
	if e.Bounds == (Bounds{}) {
		return nil
	}
	has, err := e.count(ctx, cluster)
	if err != nil {
		return err
	}
	switch {
	case e.Bounds.Ended > 0 && has.ended >= e.Bounds.Ended: // for a new claim too: it is remembered when it ends
		countRefused(cluster, "ended")
		return &TooManyError{Ended: true, Limit: e.Bounds.Ended, RetryAfter: time.Minute}
	case !ended && e.Bounds.Claims > 0 && has.live >= e.Bounds.Claims:
		countRefused(cluster, "live")
		return &TooManyError{Limit: e.Bounds.Claims, RetryAfter: 10 * time.Second}
	}
	return nil
}

// remembered returns how long an ended claim of the Cluster is remembered: shorter when there are nearly too many.
func (e *Engine) remembered(ctx context.Context, cluster types.NamespacedName) (time.Duration, error) {
	if e.Bounds.Ended == 0 {
		return e.TombstoneRetention, nil
	}
	has, err := e.count(ctx, cluster)
	if err != nil || has.ended < e.Bounds.Ended-e.Bounds.Ended/10 {
		return e.TombstoneRetention, err
	}
	// A group's cool-down follows from its failed claims.
	return min(e.TombstoneRetention, max(rememberedAtLeast, e.Failure.CoolDown)), nil
}
