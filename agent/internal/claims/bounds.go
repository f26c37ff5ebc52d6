package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
	// crowdedLook is how often an ended claim is checked while it is kept.
	crowdedLook = 10 * time.Minute
	// censusLife is how long a count of a Cluster's claims is reused. What this agent adds
	// meanwhile is counted.
	censusLife = time.Second
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
)

// annotations are the annotations of a Cluster that replace its bounds.
var annotations = map[Bound]string{
	BoundLive: v1alpha1.MaxClaimsAnnotation, BoundCreations: v1alpha1.MaxCreationsAnnotation, BoundReleases: v1alpha1.MaxReleasesAnnotation,
}

// of returns the bounds of a Cluster, and a message for each annotation that cannot be parsed. In
// that case the flag applies.
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
		if err != nil {
			wrong = append(wrong, fmt.Sprintf("the annotation %s: %.40q is not a whole number of at least 0, so the agent's own limit applies",
				annotations[bound], text))
			continue
		}
		*to = int(n)
	}
	slices.Sort(wrong)
	return b, wrong
}

// bounds returns the bounds of a Cluster, and records an event on it for each annotation that
// cannot be parsed.
func (e *Engine) bounds(ctx context.Context, key types.NamespacedName) (Bounds, error) {
	cluster, err := e.cluster(ctx, key.Namespace, key.Name)
	if err != nil {
		return Bounds{}, err
	}
	own, wrong := e.Bounds.of(cluster)
	for _, message := range wrong {
		e.warn(cluster, "InvalidLimit", "Limit", message)
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
	countRefused(cluster, BoundQuota)
	return &TooManyError{
		Bound: BoundQuota, RetryAfter: time.Minute,
		Message: "the hub's ResourceQuota for MachineClaims in the Cluster's namespace is used up",
	}
}

// census is a count of a Cluster's claims.
type census struct {
	live, ended int
	// made counts the claims of each node group that were made within [creationWindow]. released
	// counts the claims with a Machine that were released within [Bounds].ReleaseWindow.
	made     map[string]recent
	released recent
	at       time.Time
}

// recent counts events within a window.
type recent struct {
	n      int
	oldest time.Time
}

func (r recent) and(moment time.Time) recent {
	if r.n == 0 || moment.Before(r.oldest) {
		r.oldest = moment
	}
	r.n++
	return r
}

func newCensus(at time.Time) *census { return &census{at: at, made: map[string]recent{}} }

// fresh reports whether the census is recent enough at the given time, which may be slightly before
// the census was taken.
func (c *census) fresh(now time.Time) bool { return now.Sub(c.at).Abs() < censusLife }

// take adds a claim to the census.
func (c *census) take(claim *v1alpha1.MachineClaim, releaseWindow time.Duration) {
	if claim.CurrentPhase() == v1alpha1.PhaseEnded {
		c.ended++
	} else {
		c.live++
	}
	if made := claim.CreationTimestamp.Time; c.at.Sub(made) < creationWindow && claim.Spec.NodeGroup != "" {
		c.made[claim.Spec.NodeGroup] = c.made[claim.Spec.NodeGroup].and(made)
	}
	if at := claim.Status.ReleasedAt; at != nil && claim.Status.Machine != nil && c.at.Sub(at.Time) < releaseWindow {
		c.released = c.released.and(at.Time)
	}
}

// count counts the claims of a Cluster in the caches. The numbers may be slightly stale, which does
// not matter for limits.
func (e *Engine) count(ctx context.Context, cluster types.NamespacedName) (census, error) {
	now := e.Clock.Now()
	e.mu.Lock()
	known, ok := e.censuses[cluster]
	e.mu.Unlock()
	if ok && known.fresh(now) {
		return known, nil
	}
	var list v1alpha1.MachineClaimList
	err := e.Client.List(ctx, &list, client.InNamespace(cluster.Namespace),
		selecting(e.Indexes.Cluster, v1alpha1.ClusterLabel, cluster.Name), client.UnsafeDisableDeepCopy)
	if err != nil {
		return census{}, fmt.Errorf("counting the Cluster's claims: %w", err)
	}
	counted := newCensus(now)
	for i := range list.Items {
		counted.take(&list.Items[i], e.Bounds.ReleaseWindow)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if known, ok := e.censuses[cluster]; ok && known.fresh(now) {
		return known, nil // another call took the census meanwhile; what was added to it since must not be lost
	}
	e.censuses[cluster] = *counted
	return *counted, nil
}

// recount adds an operation of this agent to the Cluster's present census, if there is one.
func (e *Engine) recount(cluster types.NamespacedName, add func(*census)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if known, ok := e.censuses[cluster]; ok {
		known.made = maps.Clone(known.made) // others may be reading it
		add(&known)
		e.censuses[cluster] = known
	}
}

// added counts a claim that this agent has just made.
func (e *Engine) added(c *v1alpha1.MachineClaim) {
	e.recount(clusterOf(c), func(known *census) {
		known.live++
		known.made[c.Spec.NodeGroup] = known.made[c.Spec.NodeGroup].and(e.Clock.Now())
	})
}

func clusterOf(c *v1alpha1.MachineClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}
}

// roomForTombstone returns a [*TooManyError] if the Cluster may have no further ended claim.
func (e *Engine) roomForTombstone(ctx context.Context, cluster types.NamespacedName) error {
	if e.Bounds.Ended == 0 {
		return nil
	}
	has, err := e.count(ctx, cluster)
	if err != nil || has.ended < e.Bounds.Ended {
		return err
	}
	return e.tooMany(ctx, cluster, &TooManyError{
		Bound: BoundEnded, RetryAfter: time.Minute,
		Message: fmt.Sprintf("the Cluster has %d ended claims that are remembered, as many as it may have; they are forgotten an hour after their end",
			e.Bounds.Ended),
	})
}

// room returns a [*TooManyError] if the Cluster may have no further claim, which is kept as a
// tombstone when it ends, or if its node group may have none now.
func (e *Engine) room(ctx context.Context, cluster types.NamespacedName, nodeGroup string) error {
	if err := e.roomForTombstone(ctx, cluster); err != nil {
		return err
	}
	may, err := e.bounds(ctx, cluster)
	if err != nil || may.Claims == 0 && may.Creations == 0 {
		return err
	}
	has, err := e.count(ctx, cluster)
	if err != nil {
		return err
	}
	made := has.made[nodeGroup]
	switch {
	case may.Claims > 0 && has.live >= may.Claims:
		return e.tooMany(ctx, cluster, &TooManyError{
			Bound: BoundLive, RetryAfter: 10 * time.Second,
			Message: fmt.Sprintf("the Cluster has %d claims, as many as it may have (--max-claims-per-cluster, or its annotation %s)",
				may.Claims, v1alpha1.MaxClaimsAnnotation),
		})
	case may.Creations > 0 && made.n >= may.Creations:
		return e.tooMany(ctx, cluster, &TooManyError{
			Bound: BoundCreations, RetryAfter: e.over(made, creationWindow),
			Message: fmt.Sprintf("the node group %s had %d claims within a minute, as many as it may have "+
				"(--max-creations-per-minute, or its Cluster's annotation %s)", nodeGroup, may.Creations, v1alpha1.MaxCreationsAnnotation),
		})
	}
	return nil
}

// mayRelease returns a [*TooManyError] if no further claim of the Cluster that has a Machine may be
// released now. Otherwise it counts the claim as released, so that concurrent calls do not exceed
// the bound. If the release then fails, the claim counts until the next census.
func (e *Engine) mayRelease(ctx context.Context, c *v1alpha1.MachineClaim) error {
	if c.Status.Machine == nil {
		return nil
	}
	cluster := clusterOf(c)
	may, err := e.bounds(ctx, cluster)
	if err != nil || may.Releases == 0 {
		return err
	}
	if _, err := e.count(ctx, cluster); err != nil {
		return err
	}
	var lately recent
	e.recount(cluster, func(known *census) {
		if lately = known.released; lately.n < may.Releases {
			known.released = lately.and(e.Clock.Now())
		}
	})
	if lately.n < may.Releases {
		return nil
	}
	return e.tooMany(ctx, cluster, &TooManyError{
		Bound: BoundReleases, RetryAfter: e.over(lately, e.Bounds.ReleaseWindow),
		Message: fmt.Sprintf("%d claims with a Machine were released in the Cluster within %s, as many as may be "+
			"(--max-releases-per-window, or its annotation %s)", may.Releases, may.ReleaseWindow, v1alpha1.MaxReleasesAnnotation),
	})
}

// over returns how long it takes until the oldest of the recent events leaves the window.
func (e *Engine) over(lately recent, window time.Duration) time.Duration {
	return max(retrySoonest, lately.oldest.Add(window).Sub(e.Clock.Now()))
}

// tooMany counts a refusal and records it on the Cluster as an event. It returns the refusal.
func (e *Engine) tooMany(ctx context.Context, cluster types.NamespacedName, refused *TooManyError) error {
	countRefused(cluster, refused.Bound)
	if object, err := e.cluster(ctx, cluster.Namespace, cluster.Name); err == nil && object != nil {
		e.warn(object, "LimitReached", "Limit", refused.Message)
	}
	return refused
}

// remembered returns how long an ended claim of the Cluster is kept. The time is shorter when there
// are nearly too many.
func (e *Engine) remembered(ctx context.Context, cluster types.NamespacedName) (time.Duration, error) {
	if e.Bounds.Ended == 0 {
		return e.TombstoneRetention, nil
	}
	has, err := e.count(ctx, cluster)
	if err != nil || has.ended < e.Bounds.Ended-e.Bounds.Ended/10 {
		return e.TombstoneRetention, err
	}
	// A group's cool-down is derived from its failed claims.
	return min(e.TombstoneRetention, max(rememberedAtLeast, e.Failure.CoolDown)), nil
}
