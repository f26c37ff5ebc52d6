package claims

import (
	"context"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// censusLife is how long a count of a Cluster's claims is reused. What this agent adds
// meanwhile is counted.
const censusLife = time.Second

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

// over returns how long it takes until the oldest of the recent events leaves the window.
func (r recent) over(window time.Duration, now time.Time) time.Duration {
	return max(retrySoonest, r.oldest.Add(window).Sub(now))
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

// numbers are those of one Cluster: a census, and this agent's reservations. They are guarded by
// [Engine]'s mutex.
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

// reserve counts an operation, unless refuse returns why it is not permitted. An operation that is
// reserved already is permitted.
func (n *numbers) reserve(of reservationKey, r reservation, refuse func(census) *TooManyError) *TooManyError {
	if _, reserved := n.reserved[of]; reserved {
		return nil
	}
	if refused := refuse(n.total()); refused != nil {
		return refused
	}
	n.reserved[of] = r
	return nil
}

// withNumbers calls use with the numbers of a Cluster, of which the census is fresh. Other agents'
// latest operations may be missing. use must not block.
func (e *Engine) withNumbers(ctx context.Context, cluster types.NamespacedName, use func(*numbers)) error {
	now := e.Clock.Now()
	if e.ifFresh(cluster, now, use) {
		return nil
	}
	var list v1alpha1.MachineClaimList
	err := e.Client.List(ctx, &list, client.InNamespace(cluster.Namespace),
		selecting(e.Indexes.Cluster, v1alpha1.ClusterLabel, cluster.Name), client.UnsafeDisableDeepCopy)
	if err != nil {
		return fmt.Errorf("counting the Cluster's claims: %w", err)
	}
	counted := newCensus(now)
	for i := range list.Items {
		counted.take(&list.Items[i], e.Bounds.ReleaseWindow)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.numbers[cluster]
	if n == nil {
		// Those of Clusters that are gone, or that nothing has asked about for long.
		maps.DeleteFunc(e.numbers, func(_ types.NamespacedName, other *numbers) bool {
			return now.Sub(other.census.at) > censusLife+reservedAtMost
		})
		n = &numbers{reserved: map[reservationKey]reservation{}}
		e.numbers[cluster] = n
	}
	if !n.census.fresh(now) { // otherwise another call has taken it meanwhile
		n.settle(*counted, list.Items)
	}
	use(n)
	return nil
}

// ifFresh calls use if the census of the Cluster is fresh, and reports whether it is.
func (e *Engine) ifFresh(cluster types.NamespacedName, now time.Time, use func(*numbers)) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.numbers[cluster]
	if n == nil || !n.census.fresh(now) {
		return false
	}
	use(n)
	return true
}

// unreserve drops the reservation of an operation that was not carried out, if there is one.
func (e *Engine) unreserve(c *v1alpha1.MachineClaim, release bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := e.numbers[clusterOf(c)]; n != nil {
		delete(n.reserved, reservationKey{claim: c.Name, release: release})
	}
}

// countEnded adds to the number of ended claims in the Cluster's present census, if there is one.
func (e *Engine) countEnded(cluster types.NamespacedName, more int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := e.numbers[cluster]; n != nil {
		n.census.ended += more
	}
}
