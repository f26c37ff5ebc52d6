package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
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

// unreadable is the value of a bound whose annotation cannot be parsed: it permits nothing.
const unreadable = -1

// of returns the bounds of a Cluster, and a message for each annotation that cannot be parsed. Such
// an annotation permits no further claim. For releases the flag applies instead: a claim that cannot
// be released keeps a Machine that is paid for.
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

// reservationKey names the creation, or the release, of a claim by its object's name.
type reservationKey struct {
	claim   string
	release bool
}

// reservation is an operation of this agent that the caches may not show yet. It counts in addition
// to the census.
type reservation struct {
	nodeGroup string
	at        time.Time
}

// reservedAtMost is how long a reservation counts whose outcome the caches do not show: longer than
// a write may take.
const reservedAtMost = 2 * time.Minute

// numbers are those of one Cluster: a census, and this agent's reservations.
type numbers struct {
	census   census
	reserved map[reservationKey]reservation
}

// settle replaces the census, and drops the reservations that it covers.
func (n *numbers) settle(counted census, shown []v1alpha1.MachineClaim) {
	n.census = counted
	for i := range shown {
		delete(n.reserved, reservationKey{claim: shown[i].Name})
		if shown[i].Status.ReleasedAt != nil {
			delete(n.reserved, reservationKey{claim: shown[i].Name, release: true})
		}
	}
	maps.DeleteFunc(n.reserved, func(_ reservationKey, r reservation) bool { return counted.at.Sub(r.at) > reservedAtMost })
}

// total is the census with the reservations.
func (n *numbers) total() census {
	total := n.census
	total.made = maps.Clone(total.made)
	for of, r := range n.reserved {
		if of.release {
			total.released = total.released.and(r.at)
			continue
		}
		total.live++
		total.made[r.nodeGroup] = total.made[r.nodeGroup].and(r.at)
	}
	return total
}

// count counts the claims of a Cluster in the caches, and what this agent has reserved. Other agents'
// latest operations may be missing.
func (e *Engine) count(ctx context.Context, cluster types.NamespacedName) (census, error) {
	now := e.Clock.Now()
	if total, ok := e.freshTotal(cluster, now); ok {
		return total, nil
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
	b := e.numbers[cluster]
	if b == nil {
		b = &numbers{reserved: map[reservationKey]reservation{}}
		e.numbers[cluster] = b
	}
	if !b.census.fresh(now) { // otherwise another call has taken it meanwhile
		b.settle(*counted, list.Items)
	}
	return b.total(), nil
}

// freshTotal returns the total of a Cluster whose census is fresh.
func (e *Engine) freshTotal(cluster types.NamespacedName, now time.Time) (total census, fresh bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.numbers[cluster]; b != nil && b.census.fresh(now) {
		return b.total(), true
	}
	return census{}, false
}

// reserve counts the creation or the release of a claim, unless refuse returns why it is not
// permitted. The Cluster must have been counted. An operation that is reserved already is permitted.
func (e *Engine) reserve(c *v1alpha1.MachineClaim, release bool, refuse func(census) *TooManyError) *TooManyError {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, of := e.numbers[clusterOf(c)], reservationKey{claim: c.Name, release: release}
	if _, reserved := b.reserved[of]; reserved {
		return nil
	}
	if refused := refuse(b.total()); refused != nil {
		return refused
	}
	b.reserved[of] = reservation{nodeGroup: c.Spec.NodeGroup, at: e.Clock.Now()}
	return nil
}

// unreserve drops the reservation of an operation that was not carried out, if there is one.
func (e *Engine) unreserve(c *v1alpha1.MachineClaim, release bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.numbers[clusterOf(c)]; b != nil {
		delete(b.reserved, reservationKey{claim: c.Name, release: release})
	}
}

// countEnded adds to the number of ended claims in the Cluster's present census, if there is one.
func (e *Engine) countEnded(cluster types.NamespacedName, more int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.numbers[cluster]; b != nil {
		b.census.ended += more
	}
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
// tombstone when it ends, or if its node group may have none now. Unless the call only validates, it
// counts the claim as created, so that concurrent calls do not exceed the bounds.
func (e *Engine) room(ctx context.Context, c *v1alpha1.MachineClaim, validateOnly bool) error {
	cluster := clusterOf(c)
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
	refuse := func(has census) *TooManyError { return may.refuseClaim(has, c.Spec.NodeGroup, e.Clock.Now()) }
	var refused *TooManyError
	if validateOnly {
		refused = refuse(has)
	} else {
		refused = e.reserve(c, false, refuse)
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
			Message: fmt.Sprintf("the Cluster has %d claims, as many as it may have (--max-claims-per-cluster, or its annotation %s)",
				b.Claims, v1alpha1.MaxClaimsAnnotation),
		}
	case b.Creations > 0 && made.n >= b.Creations:
		return &TooManyError{
			Bound: BoundCreations, RetryAfter: made.over(creationWindow, now),
			Message: fmt.Sprintf("the node group %s had %d claims within a minute, as many as it may have "+
				"(--max-creations-per-minute, or its Cluster's annotation %s)", nodeGroup, b.Creations, v1alpha1.MaxCreationsAnnotation),
		}
	}
	return nil
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
	if _, err := e.count(ctx, cluster); err != nil {
		return err
	}
	refused := e.reserve(c, true, func(has census) *TooManyError {
		if has.released.n < may.Releases {
			return nil
		}
		return &TooManyError{
			Bound: BoundReleases, RetryAfter: has.released.over(may.ReleaseWindow, e.Clock.Now()),
			Message: fmt.Sprintf("%d claims with a Machine were released in the Cluster within %s, as many as may be "+
				"(--max-releases-per-window, or its annotation %s)", may.Releases, may.ReleaseWindow, v1alpha1.MaxReleasesAnnotation),
		}
	})
	if refused != nil {
		return e.tooMany(ctx, cluster, refused)
	}
	return nil
}

// over returns how long it takes until the oldest of the recent events leaves the window.
func (r recent) over(window time.Duration, now time.Time) time.Duration {
	return max(retrySoonest, r.oldest.Add(window).Sub(now))
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
