package claims

import (
	"context"
	"errors"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// SyncRequest is a holder's complete set of live claims.
type SyncRequest struct {
	Namespace, Cluster, Holder string
	// Token is from [Engine.List]; only claims older than it can be collected.
	Token string
	// LiveIDs are the ids of the claims whose owner lives.
	LiveIDs []string
	// Spoke is the cluster that the set was read in. It is empty when unknown, and then nothing is
	// collected.
	Spoke string
	// Nodes describes all Nodes of the Cluster. Nil means that this holder does not report Nodes,
	// so nothing is known about them. Empty means that there are none.
	Nodes []NodeReport
	// HolderRepairs is whether the holder replaces the Nodes of its claims while they are
	// unhealthy. Nil means that the claims stay as they are.
	HolderRepairs *bool
	// NodesComplete reports that Nodes has every Node with a provider ID, read consistently after
	// the token was taken.
	NodesComplete bool
}

// NodeReport describes one existing Node.
type NodeReport struct {
	ProviderID            string
	Capacity, Allocatable corev1.ResourceList
	// Unregistered means that nothing runs on the Node yet.
	Unregistered bool
}

// SyncResult is the outcome of [Engine.Sync].
type SyncResult struct {
	// Collected are the ids of claims that are being released now, because their owner is gone.
	Collected []string
	// Unknown are the ids of the live set without a live claim.
	Unknown []string
	// Kept are the ids of claims that are missing from the set but are not released.
	Kept []string
	// Matched reports that the live set has an existing claim.
	Matched bool
}

// Sync releases the holder's claims that were in the token's listing, are older than it by
// [Config].CollectGrace, are missing from the live set, and have no reason to be kept. Errors:
// [ErrInvalidToken], [ErrStaleToken], [*ForeignSpokeError], [ErrConflict], those of [Engine.List],
// or the API server's. After [ErrConflict] or an error from the API server, some claims may already
// have been released, and the call can be repeated.
func (e *Engine) Sync(ctx context.Context, r SyncRequest) (SyncResult, error) {
	taken, err := e.parseToken(r)
	if err != nil {
		return SyncResult{}, err
	}
	claims, _, err := e.List(ctx, ListOptions{Namespace: r.Namespace, Cluster: r.Cluster, Holder: r.Holder})
	if err != nil {
		return SyncResult{}, err
	}
	set := newLiveSet(r, claims)
	key := types.NamespacedName{Namespace: r.Namespace, Name: r.Cluster}
	set.known, err = e.checkSpoke(ctx, key, r.Holder, r.Spoke, func() (origins, error) { return set.origins, nil })
	if foreign := (*ForeignSpokeError)(nil); errors.As(err, &foreign) {
		e.warnCluster(ctx, r, err)
	}
	if err != nil {
		return SyncResult{}, err
	}
	nodes, before := nodesOf(r.Nodes), map[string]bool(nil)
	if r.Nodes != nil {
		before = e.recordReport(key, nodes)
	}
	listed := taken.listed(claims)
	running, err := e.noteNodes(ctx, set, taken.Time, claims, nodes, before)
	if err != nil {
		return SyncResult{}, err
	}
	result := SyncResult{Matched: set.matched}
	var notes []note
	known, decided := make(map[string]bool, len(claims)), make(map[types.UID]bool, len(claims))
	for i := range claims {
		c := &claims[i]
		id := c.Spec.ClaimID
		leaving := c.Status.Phase == v1alpha1.PhaseReleasing || c.Returns()
		known[id] = !leaving
		switch {
		case set.live[id]:
			decided[c.UID] = true
			notes = append(notes, e.noteOwner(set, c)...)
			continue
		case r.Spoke == "" || leaving:
			continue
		case !listed(c) || !c.CreationTimestamp.Add(e.CollectGrace).Before(taken.Time):
			continue
		}
		decided[c.UID] = true
		var tooMany *TooManyError
		switch kept, err := e.collect(ctx, set, c, running[id]); {
		case errors.As(err, &tooMany):
			result.Kept = append(result.Kept, id) // until a later set
		case err != nil:
			return result, err
		case kept != "":
			result.Kept = append(result.Kept, id)
			notes = append(notes, e.noteKept(c, kept)...)
		default:
			result.Collected = append(result.Collected, id)
		}
	}
	for _, id := range r.LiveIDs {
		if !known[id] {
			result.Unknown = append(result.Unknown, id)
		}
	}
	e.writeNotes(ctx, append(notes, e.noteRepairs(set, claims, notes)...)) // last: there is a limit to the notes of a set
	if r.Spoke != "" {
		e.recordDecided(holderKey{key, r.Holder}, decided)
	}
	return result, nil
}

// recordDecided records which claims a holder's last live set decided. A holder without claims
// takes no memory, because a caller may have many names for holders.
func (e *Engine) recordDecided(holder holderKey, claims map[types.UID]bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(claims) == 0 {
		delete(e.synced, holder)
	} else {
		e.synced[holder] = claims
	}
}

// ForgetCluster drops what is kept of a Cluster that is gone.
func (e *Engine) ForgetCluster(cluster types.NamespacedName) {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.synced, func(holder holderKey, _ map[types.UID]bool) bool { return holder.cluster == cluster })
	maps.DeleteFunc(e.repairs, func(holder holderKey, _ repairSetting) bool { return holder.cluster == cluster })
	delete(e.numbers, cluster)
	delete(e.reports, cluster)
}

// collect releases a claim whose owner is gone, or returns why it is kept. It checks again with the
// claim as it is released, because another agent may have recorded a reason to keep it since it was
// listed.
func (e *Engine) collect(ctx context.Context, set *liveSet, c *v1alpha1.MachineClaim, running bool) (kept string, err error) {
	if kept = set.keeps(c, running); kept != "" {
		return kept, nil
	}
	o := ReleaseOptions{unless: func(now *v1alpha1.MachineClaim) bool {
		kept = set.keeps(now, running)
		return kept != ""
	}}
	why := v1alpha1.Event{Reason: protocol.ReasonCollected, Message: "its owner is gone: it was not in the live set of " + set.Holder}
	_, err = e.release(ctx, Key{Namespace: c.Namespace, Cluster: c.Spec.ClusterName, ID: c.Spec.ClaimID}, o, why)
	if err == nil && kept == "" {
		log.FromContext(ctx).Info("collected a claim whose owner is gone", "claim", c.Spec.ClaimID, "name", c.Spec.DisplayName)
	}
	return kept, err
}

// liveSet is a holder's live set, compared with the claims that the holder has.
type liveSet struct {
	SyncRequest
	origins

	live map[string]bool
	// known is the cluster whose live set was accepted last, "" if it is not known.
	known string
}

func newLiveSet(r SyncRequest, claims []v1alpha1.MachineClaim) *liveSet {
	s := &liveSet{SyncRequest: r, live: make(map[string]bool, len(r.LiveIDs))}
	for _, id := range r.LiveIDs {
		s.live[id] = true
	}
	for i := range claims {
		if c := &claims[i]; s.live[c.Spec.ClaimID] {
			s.matched = true
		} else {
			s.add(r.Spoke, c)
		}
	}
	return s
}

// covers reports whether the claim belongs to the set's cluster. A claim without a recorded
// cluster does if the set has another claim and no other cluster made any, because owners have the
// same ids in one cluster only.
func (s *liveSet) covers(c *v1alpha1.MachineClaim) bool {
	switch {
	case s.live[c.Spec.ClaimID]:
		return true
	case c.Spec.Spoke != "":
		return c.Spec.Spoke == s.Spoke
	case s.Spoke == "":
		return true // both are unknown; nothing is collected then
	}
	return s.matched && s.others == ""
}

// keeps returns why a claim that is missing from the set is kept, "" when it is not. running
// reports that its Node is registered according to the report that came with the set.
func (s *liveSet) keeps(c *v1alpha1.MachineClaim, running bool) string {
	const toDo = "; release it if it is not needed: see \"Claims whose owner is missing\" in docs/troubleshooting.md"
	switch {
	case !s.covers(c) && c.Spec.Spoke != "":
		return "it is not in the live set of cluster " + s.Spoke + ", but cluster " + c.Spec.Spoke + " made it" + toDo
	case !s.covers(c):
		return "it is not in the live set of cluster " + s.Spoke + ", but it is not known which cluster made it" + toDo
	case running || c.Status.NodeRegisteredAt != nil:
		return "its owner is gone and did not release the claim, but its Node had registered, so pods may be running on it" + toDo
	}
	return ""
}

// noteOwner records on a claim of the live set which cluster it belongs to, and that its owner
// exists. Each change of the cluster writes all claims and their Machines. Therefore another
// cluster is recorded once it is the known one, which changes only now and then, whatever a caller
// sends. For a holder whose cluster is never known, it is recorded at once.
func (e *Engine) noteOwner(s *liveSet, c *v1alpha1.MachineClaim) []note {
	var notes []note
	record := s.Spoke != "" && c.Spec.Spoke != s.Spoke && (c.Spec.Spoke == "" || s.known == s.Spoke || !e.recordsSpoke(s.Holder))
	back := c.Status.Reason == protocol.ReasonOwnerMissing
	if record || back {
		notes = append(notes, note{of: c, write: func(ctx context.Context) error {
			if record {
				if err := e.recordSpoke(ctx, c, s.Spoke); err != nil {
					return err
				}
			}
			if !back {
				return nil
			}
			after := c.DeepCopy()
			reason := protocol.ReasonWaitingForMachine
			if c.Status.Phase == v1alpha1.PhaseBound {
				reason = protocol.ReasonBound
			}
			e.note(after, v1alpha1.Event{Reason: reason, Message: "its owner is in the live set again"})
			return e.updateStatus(ctx, after)
		}})
	}
	return notes
}

// recordSpoke writes the cluster to the claim, and to its Machine, from which a lost claim is
// recreated.
func (e *Engine) recordSpoke(ctx context.Context, c *v1alpha1.MachineClaim, spoke string) error {
	after := c.DeepCopy()
	after.Spec.Spoke = spoke
	if err := e.Client.Update(ctx, after); err != nil {
		return err
	}
	*c = *after
	if c.Status.Machine == nil {
		return nil // label writes the annotation later
	}
	var m clusterv1.Machine
	found, err := e.get(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Status.Machine.Name}, &m)
	if err != nil || !found || protocol.ClaimOf(&m) != c.Spec.ClaimID || m.Annotations[v1alpha1.ClaimSpokeAnnotation] == spoke {
		return err
	}
	marked := m.DeepCopy()
	metav1.SetMetaDataAnnotation(&marked.ObjectMeta, v1alpha1.ClaimSpokeAnnotation, spoke)
	return e.patchMachine(ctx, &m, marked)
}

// noteKept records on the claim why it is kept, once. A claim that is not Bound, or whose Machine
// is being deleted, has a more important reason.
func (e *Engine) noteKept(c *v1alpha1.MachineClaim, why string) []note {
	if c.Status.Phase != v1alpha1.PhaseBound || c.Status.Reason == protocol.ReasonMachineDeleting ||
		c.Status.Reason == protocol.ReasonOwnerMissing && c.Status.Message == why {
		return nil
	}
	return []note{{of: c, write: func(ctx context.Context) error {
		after := c.DeepCopy()
		e.note(after, v1alpha1.Event{Reason: protocol.ReasonOwnerMissing, Message: why})
		if err := e.updateStatus(ctx, after); err != nil {
			return err
		}
		log.FromContext(ctx).Info("kept a claim whose owner is missing", "claim", c.Spec.ClaimID, "name", c.Spec.DisplayName, "why", why)
		e.warn(after, protocol.ReasonOwnerMissing, "Sync", why)
		return nil
	}}}
}

// warnCluster records an event about a refused set on the Cluster, where the operators who set it
// up will look.
func (e *Engine) warnCluster(ctx context.Context, r SyncRequest, cause error) {
	cluster, err := e.cluster(ctx, r.Namespace, r.Cluster)
	if err != nil || cluster == nil {
		return // the caller gets the error in any case
	}
	e.warn(cluster, "LiveSetRefused", "Sync", cause.Error())
}
