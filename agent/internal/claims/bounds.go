package claims

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Bounds limit what one Cluster can store in the hub, and how fast it can create and release
// Machines, which limits the damage of a mistake. Zero means no limit. A Cluster's annotations
// replace Claims, Creations and Releases for it ([Bounds.of]).
type Bounds struct {
	// Claims is how many claims that have not ended a Cluster may have.
	Claims int
	// Ended is how many ended claims of a Cluster are kept. When their number approaches the limit,
	// those that ended more than [rememberedAtLeast] ago are deleted. If that does not help, no new
	// claim is made, and no release of an unknown claim is accepted.
	Ended int
	// Creations is how many claims may be made in one node group within [creationWindow].
	Creations int
	// Releases is how many claims with a Machine may be released in one Cluster within
	// ReleaseWindow, by all callers together.
	Releases      int
	ReleaseWindow time.Duration
}

const (
	// rememberedAtLeast is how long an ended claim is kept however many there are. No call takes
	// that long, so a delayed call that arrives after the claim's end is still refused.
	rememberedAtLeast = time.Hour
	// crowdedDelay is how often an ended claim is checked while it is kept.
	crowdedDelay = 10 * time.Minute
	// creationWindow is the window of [Bounds].Creations.
	creationWindow = time.Minute
	// retrySoonest is the shortest time after which a caller should retry, because the counts may
	// be slightly stale.
	retrySoonest = time.Second
)

// Bound is the name of one of [Bounds], or of the hub's own limit.
type Bound string

// The bounds.
const (
	// BoundLive and BoundEnded limit the claims that a Cluster has.
	BoundLive  Bound = "live"
	BoundEnded Bound = "ended"
	// BoundQuota is a ResourceQuota of the hub, which other Clusters of the namespace may have used
	// up.
	BoundQuota Bound = "quota"
	// BoundCreations and BoundReleases limit recent operations.
	BoundCreations Bound = "creations"
	BoundReleases  Bound = "releases"
	// BoundAllEnded and BoundAllBytes limit what all Clusters have together; see package storage.
	BoundAllEnded Bound = "all-ended"
	BoundAllBytes Bound = "all-bytes"
)

// annotations are the annotations of a Cluster that replace its bounds.
var annotations = map[Bound]string{
	BoundLive: v1alpha1.MaxClaimsAnnotation, BoundCreations: v1alpha1.MaxCreationsAnnotation, BoundReleases: v1alpha1.MaxReleasesAnnotation,
}

// unreadable is the value of a bound whose annotation cannot be parsed: it permits nothing.
const unreadable = -1

// of returns the bounds of a Cluster, and a message for each annotation that cannot be parsed. Such
// an annotation permits no further claim. For releases the flag applies instead: a claim that
// cannot be released keeps a Machine that is paid for.
func (b Bounds) of(cluster *clusterv1.Cluster) (own Bounds, wrong []string) {
	if cluster == nil || len(cluster.Annotations) == 0 {
		return b, nil
	}
	for bound, to := range map[Bound]*int{BoundLive: &b.Claims, BoundCreations: &b.Creations, BoundReleases: &b.Releases} {
		text, set := cluster.Annotations[annotations[bound]]
		if !set {
			continue
		}
		n, err := strconv.ParseUint(text, 10, 31)
		switch {
		case err == nil:
			*to = int(n)
			continue
		case bound != BoundReleases:
			*to = unreadable
		}
		wrong = append(wrong, fmt.Sprintf("the annotation %s: %.40q is not a whole number of at least 0: %s", annotations[bound], text,
			lo.Ternary(bound == BoundReleases, "the agent's own limit applies", "no claims are made until it is corrected or removed")))
	}
	slices.Sort(wrong)
	return b, wrong
}

// bounds returns the bounds of a Cluster, and records an event on it if its annotations cannot be
// parsed.
func (e *Engine) bounds(ctx context.Context, key types.NamespacedName) (Bounds, error) {
	cluster, err := e.cluster(ctx, key.Namespace, key.Name)
	if err != nil {
		return Bounds{}, err
	}
	own, wrong := e.Bounds.of(cluster)
	if len(wrong) > 0 { // in one event, because events that differ in their message alone are counted as one
		e.warn(cluster, "InvalidLimit", "Limit", strings.Join(wrong, "; "))
	}
	return own, nil
}

// TooManyError means that a bound has been reached.
type TooManyError struct {
	Bound Bound
	// Message states which bound, as a sentence without a period.
	Message string
	// RetryAfter is after how long a retry may succeed.
	RetryAfter time.Duration
}

func (e *TooManyError) Error() string { return e.Message }

// overQuota returns a [*TooManyError] if the API server refused a claim's object because of a
// ResourceQuota, else nil.
func overQuota(cluster types.NamespacedName, err error) error {
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota") {
		return nil
	}
	CountRefused(cluster, BoundQuota)
	return &TooManyError{
		Bound: BoundQuota, RetryAfter: time.Minute,
		Message: "the hub's ResourceQuota for MachineClaims in the Cluster's namespace is used up",
	}
}

func clusterOf(c *v1alpha1.MachineClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}
}

// ended returns how many ended claims a Cluster has.
func (e *Engine) ended(ctx context.Context, cluster types.NamespacedName) (ended int, err error) {
	err = e.withNumbers(ctx, cluster, func(n *numbers) { ended = n.census.ended })
	return ended, err
}

// roomForTombstone returns a [*TooManyError] if the Cluster may have no further ended claim.
func (e *Engine) roomForTombstone(ctx context.Context, cluster types.NamespacedName) error {
	if e.Bounds.Ended == 0 {
		return nil
	}
	ended, err := e.ended(ctx, cluster)
	if err != nil || ended < e.Bounds.Ended {
		return err
	}
	return e.tooMany(ctx, cluster, &TooManyError{
		Bound: BoundEnded, RetryAfter: time.Minute,
		Message: fmt.Sprintf("the Cluster has reached its limit of %d tombstones (--max-ended-claims-per-cluster); "+
			"they are deleted an hour after their claims ended", e.Bounds.Ended),
	})
}

// room returns a [*TooManyError] if the Cluster may have no further claim, which is kept as a
// tombstone when it ends, or if its node group may have none now. Unless the call only validates,
// it counts the claim as created, so that concurrent calls do not exceed the bounds.
func (e *Engine) room(ctx context.Context, c *v1alpha1.MachineClaim, validateOnly bool) error {
	cluster := clusterOf(c)
	if err := e.roomForTombstone(ctx, cluster); err != nil {
		return err
	}
	may, err := e.bounds(ctx, cluster)
	if err != nil || may.Claims == 0 && may.Creations == 0 {
		return err
	}
	var refused *TooManyError
	err = e.withNumbers(ctx, cluster, func(n *numbers) {
		now := e.Clock.Now()
		refuse := func(has census) *TooManyError { return may.refuseClaim(has, c.Spec.NodeGroup, now) }
		if validateOnly {
			refused = refuse(n.total())
		} else {
			refused = n.reserve(reservationKey{claim: c.Name}, reservation{nodeGroup: c.Spec.NodeGroup, at: now}, refuse)
		}
	})
	if err != nil {
		return err
	}
	if refused != nil {
		return e.tooMany(ctx, cluster, refused)
	}
	return nil
}

// refuseClaim returns why a Cluster that has so many claims may have no further one in the node
// group; nil if it may.
func (b Bounds) refuseClaim(has census, nodeGroup string, now time.Time) *TooManyError {
	made := has.made[nodeGroup]
	switch {
	case b.Claims == unreadable || b.Creations == unreadable:
		return &TooManyError{
			Bound: lo.Ternary(b.Claims == unreadable, BoundLive, BoundCreations), RetryAfter: time.Minute,
			Message: fmt.Sprintf("the Cluster's annotation %s is not a whole number of at least 0, and no claims are made until it is corrected or removed",
				lo.Ternary(b.Claims == unreadable, v1alpha1.MaxClaimsAnnotation, v1alpha1.MaxCreationsAnnotation)),
		}
	case b.Claims > 0 && has.live >= b.Claims:
		return &TooManyError{
			Bound: BoundLive, RetryAfter: 10 * time.Second,
			Message: fmt.Sprintf("the Cluster has %d claims, its limit (--max-claims-per-cluster, or its annotation %s)",
				b.Claims, v1alpha1.MaxClaimsAnnotation),
		}
	case b.Creations > 0 && made.n >= b.Creations:
		return &TooManyError{
			Bound: BoundCreations, RetryAfter: made.over(creationWindow, now),
			Message: fmt.Sprintf("the node group %s had %d claims within a minute, its limit "+
				"(--max-creations-per-minute, or its Cluster's annotation %s)", nodeGroup, b.Creations, v1alpha1.MaxCreationsAnnotation),
		}
	}
	return nil
}

// refuseRelease returns why no further claim with a Machine may be released in a Cluster that has
// released so many; nil if it may.
func (b Bounds) refuseRelease(has census, now time.Time) *TooManyError {
	if has.released.n < b.Releases {
		return nil
	}
	return &TooManyError{
		Bound: BoundReleases, RetryAfter: has.released.over(b.ReleaseWindow, now),
		Message: fmt.Sprintf("%d claims with a Machine were released in the Cluster within %s, its limit "+
			"(--max-releases-per-window, or its annotation %s)", b.Releases, b.ReleaseWindow, v1alpha1.MaxReleasesAnnotation),
	}
}

// mayRelease returns a [*TooManyError] if no further claim of the Cluster that has a Machine may be
// released now. Otherwise it counts the claim as released, so that concurrent calls do not exceed
// the bound, until [Engine.unreserve] or until the caches show the release.
func (e *Engine) mayRelease(ctx context.Context, c *v1alpha1.MachineClaim) error {
	if c.Status.Machine == nil {
		return nil
	}
	cluster := clusterOf(c)
	may, err := e.bounds(ctx, cluster)
	if err != nil || may.Releases == 0 {
		return err
	}
	var refused *TooManyError
	err = e.withNumbers(ctx, cluster, func(n *numbers) {
		now := e.Clock.Now()
		refused = n.reserve(reservationKey{claim: c.Name, release: true}, reservation{at: now}, func(has census) *TooManyError {
			return may.refuseRelease(has, now)
		})
	})
	if err != nil {
		return err
	}
	if refused != nil {
		return e.tooMany(ctx, cluster, refused)
	}
	return nil
}

// tooMany counts a refusal and records it on the Cluster as an event. It returns the refusal.
func (e *Engine) tooMany(ctx context.Context, cluster types.NamespacedName, refused *TooManyError) error {
	CountRefused(cluster, refused.Bound)
	if object, err := e.cluster(ctx, cluster.Namespace, cluster.Name); err == nil && object != nil {
		e.warn(object, "LimitReached", "Limit", refused.Message)
	}
	return refused
}

// remembered returns how long an ended claim of the Cluster is kept. The time is shorter when there
// are nearly too many.
func (e *Engine) remembered(ctx context.Context, cluster types.NamespacedName) (time.Duration, error) {
	crowded, err := e.crowded(ctx, cluster)
	if err != nil || !crowded {
		return e.TombstoneRetention, err
	}
	// A group's cool-down is derived from its failed claims.
	return min(e.TombstoneRetention, max(rememberedAtLeast, e.Failure.CoolDown)), nil
}

// crowded reports whether the Cluster has nearly as many ended claims as it may have.
func (e *Engine) crowded(ctx context.Context, cluster types.NamespacedName) (bool, error) {
	if e.Crowded != nil && e.Crowded(cluster) {
		return true, nil
	}
	if e.Bounds.Ended == 0 {
		return false, nil
	}
	ended, err := e.ended(ctx, cluster)
	return err == nil && ended >= e.Bounds.Ended-e.Bounds.Ended/10, err
}
