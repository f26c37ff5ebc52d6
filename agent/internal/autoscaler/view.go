package autoscaler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// view is what the caches show of a Cluster, by group. It does not change after it was made.
type view struct {
	generations [2]int64
	groups      map[string]*group
	order       []*group // by ID
	// claims are the cluster-autoscaler's claims, by ID.
	claims map[string]*agentv1alpha1.Claim
	// byProviderID names the claim of each machine, by the machine's provider ID.
	byProviderID map[string]string
	// sizes are the live claims of each group.
	sizes map[string]int32
}

// group is a node group with the claims on it.
type group struct {
	nodegroup.NodeGroup

	// claims are the cluster-autoscaler's, oldest first, ended ones included.
	claims []*agentv1alpha1.Claim
	// others is how many live claims other holders have, and leaving how many released claims of
	// all holders have a machine that is not gone yet. It still has its replica.
	others, leaving int32
}

func generations(c Config, name types.NamespacedName) [2]int64 {
	return [2]int64{c.Groups.GenerationIn(name), c.Claims.GenerationIn(name)}
}

// current reports whether the view is still what the caches show.
func (v *view) current(c Config, name types.NamespacedName) bool {
	return v != nil && v.generations == generations(c, name) && !closed(c)
}

// closed reports whether the caches have been closed, after which nothing is served.
func closed(c Config) bool {
	_, _, err := c.Groups.Get(types.NamespacedName{}, "")
	return err != nil
}

// viewOf reads the caches.
func viewOf(c Config, name types.NamespacedName) (*view, error) {
	// Read first: a change in between makes the view outdated, and it is made again.
	v := &view{
		generations: generations(c, name), groups: map[string]*group{}, claims: map[string]*agentv1alpha1.Claim{},
		byProviderID: map[string]string{}, sizes: map[string]int32{},
	}
	groups, _, err := c.Groups.List(name)
	if err != nil {
		return nil, fmt.Errorf("listing node groups: %w", err)
	}
	all, _, err := c.Claims.List(name)
	if err != nil {
		return nil, fmt.Errorf("listing claims: %w", err)
	}
	for _, of := range groups {
		g := &group{NodeGroup: of}
		v.groups[g.ID()] = g
		v.order = append(v.order, g)
	}
	slices.SortStableFunc(all, func(a, b *agentv1alpha1.Claim) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	for _, claim := range all {
		g := v.groups[claim.GetNodeGroupId()]
		if g != nil && claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING && claim.GetMachine() != nil && !claim.GetReturned() {
			g.leaving++
		}
		if claim.GetHolder() != Holder {
			if g != nil && live(claim) {
				g.others++
			}
			continue
		}
		v.claims[claim.GetClaimId()] = claim
		if g != nil {
			g.claims = append(g.claims, claim)
		}
		if live(claim) {
			v.sizes[claim.GetNodeGroupId()]++
		}
		provider := claim.GetMachine().GetProviderId()
		if known, found := v.byProviderID[provider]; provider != "" && (!found || !ours(v.claims[known])) {
			v.byProviderID[provider] = claim.GetClaimId()
		}
	}
	return v, nil
}

// live reports whether a claim counts for the size of its group.
func live(c *agentv1alpha1.Claim) bool {
	return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING || c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
}

// ours reports whether the machine of a claim still belongs to it: it is neither gone nor the
// user's.
func ours(c *agentv1alpha1.Claim) bool {
	return c.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED && !c.GetReturned()
}

// settle forgets what the view shows by now.
func (c *cluster) settle(now time.Time) {
	for id, r := range c.recent {
		shown := c.view.claims[id]
		if now.Sub(r.at) > recentLife || shown != nil && (!r.released || !live(shown)) {
			delete(c.recent, id)
		}
	}
	for id, until := range c.dismissed {
		if now.After(until) {
			delete(c.dismissed, id)
		}
	}
}

// size returns how many claims a group has that may have, or get, a node.
func (c *cluster) size(id string) int32 {
	size := c.view.sizes[id]
	for claim, r := range c.recent {
		if r.group == id {
			size += c.correction(claim, r)
		}
	}
	return size
}

// target returns the target size of a group. Claims that are shown as failed count: the
// cluster-autoscaler backs off only from groups with fewer nodes than their target size, and
// deletes what failed.
func (c *cluster) target(id string, now time.Time) int32 {
	target := c.size(id)
	if g := c.view.groups[id]; g != nil {
		target += int32(len(c.failures(g, now)))
	}
	return target
}

// targets returns the target sizes of all groups.
func (c *cluster) targets(now time.Time) map[string]int32 {
	targets := maps.Clone(c.view.sizes)
	for claim, r := range c.recent {
		targets[r.group] += c.correction(claim, r)
	}
	for id, g := range c.view.groups {
		targets[id] += int32(len(c.failures(g, now)))
	}
	return targets
}

// failures returns the claims of a group that are shown as failed, oldest first.
func (c *cluster) failures(g *group, now time.Time) []*agentv1alpha1.Claim {
	return lo.Filter(g.claims, func(claim *agentv1alpha1.Claim, _ int) bool { return !live(claim) && c.showsFailure(claim, now) })
}

// showsFailure reports whether a claim's machine will not come, and the cluster-autoscaler is still
// told so.
func (c *cluster) showsFailure(claim *agentv1alpha1.Claim, now time.Time) bool {
	_, dismissed := c.dismissed[claim.GetClaimId()]
	return failureOf(claim) != nil && !dismissed && now.Sub(claim.GetFailedAt().AsTime()) < failureLife
}

// dismiss records that the cluster-autoscaler knows of a claim's failure, if it has failed.
func (c *cluster) dismiss(claim *agentv1alpha1.Claim) {
	if claim.GetFailedAt() != nil {
		c.dismissed[claim.GetClaimId()] = claim.GetFailedAt().AsTime().Add(failureLife)
	}
}

// correction is what a recent claim adds to the size that the view shows.
func (c *cluster) correction(id string, r recent) int32 {
	switch shown := c.view.claims[id]; {
	case r.released && shown != nil && live(shown):
		return -1
	case !r.released && shown == nil:
		return 1
	}
	return 0
}

// groupOf returns the ID of the group that a claim of the cluster-autoscaler is on, or "".
func (c *cluster) groupOf(id string) string {
	if claim := c.view.claims[id]; claim != nil {
		return claim.GetNodeGroupId()
	}
	return c.recent[id].group
}

// claimOf returns the ID of the claim that a node belongs to, or "".
func (c *cluster) claimOf(name types.NamespacedName, node Node) string {
	// The cluster-autoscaler names a node that has not registered after its instance.
	for _, id := range []string{node.ProviderID, node.Name} {
		if claim, is := strings.CutPrefix(id, prefix(name)); is && c.groupOf(claim) != "" {
			return claim
		}
	}
	if node.ProviderID == "" {
		return ""
	}
	return c.view.byProviderID[node.ProviderID]
}

func prefix(name types.NamespacedName) string {
	return fmt.Sprintf("capi-claim://%s/%s/", name.Namespace, name.Name)
}

// InstanceID is the ID of the instance of a claim without a provider ID.
func InstanceID(cluster types.NamespacedName, claim string) string { return prefix(cluster) + claim }

// instance returns the instance of a claim. shown is false if there is none, or none any more.
func (c *cluster) instance(name types.NamespacedName, claim *agentv1alpha1.Claim, now time.Time) (instance Instance, shown bool) {
	id := claim.GetClaimId()
	if c.showsFailure(claim, now) {
		return Instance{ID: InstanceID(name, id), State: Creating, Failure: failureOf(claim)}, true
	}
	machine := claim.GetMachine()
	instance = Instance{ID: cmp.Or(machine.GetProviderId(), InstanceID(name, id))}
	switch {
	case !ours(claim):
		return Instance{}, false
	case !live(claim), c.recent[id].released:
		// Without a machine there is nothing to delete, and what failed was shown as such.
		instance.State = Deleting
		return instance, machine != nil && failureOf(claim) == nil
	case machine.GetNodeName() == "":
		instance.State = Creating
	}
	return instance, true
}

// failureOf returns why a claim's machine did not come, or nil if it may come or has come.
func failureOf(claim *agentv1alpha1.Claim) *Failure {
	if claim.GetFailedAt() == nil || claim.GetMachine().GetNodeName() != "" {
		return nil
	}
	f := &Failure{Code: "ProvisioningFailed", Message: claim.GetMessage()}
	switch claim.GetFailureClass() {
	case agentv1alpha1.FailureClass_FAILURE_CLASS_CAPACITY:
		f.OutOfResources, f.Code = true, "OutOfCapacity"
	case agentv1alpha1.FailureClass_FAILURE_CLASS_QUOTA:
		f.OutOfResources, f.Code = true, "QuotaExceeded"
	default:
	}
	return f
}
