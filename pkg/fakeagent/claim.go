package fakeagent

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// maxHistory is the maximum number of events in a claim's history.
const maxHistory = 32

// These are what the fake gives up machines for.
const (
	notFailed = agentv1alpha1.FailureClass_FAILURE_CLASS_UNSPECIFIED
	givenUp   = agentv1alpha1.FailureClass_FAILURE_CLASS_GIVEN_UP
	reported  = agentv1alpha1.FailureClass_FAILURE_CLASS_REPORTED
)

// unknownHolder is the holder of the tombstone of a claim that was never made.
const unknownHolder = "unknown"

type claim struct {
	cluster         clusterKey
	id, holder      string
	displayName     string
	groupID         string
	adopts          string // name of the machine that the claim is to adopt
	phase           agentv1alpha1.ClaimPhase
	reason, message string
	machine         *machine
	lastSeen        *agentv1alpha1.Machine // the machine as it was when the claim ended
	sequence        int64
	createdAt       time.Time
	releasedAt      time.Time
	endedAt         time.Time
	failedAt        time.Time // when its machine was given up
	failure         agentv1alpha1.FailureClass
	spoke           string
	registered      bool                 // its machine's Node was reported as registered
	patience        *durationpb.Duration // the requested MaxNodeProvisionTime; nil if none
	returned        bool                 // its holder returned its machine to the user
	drained         bool                 // its caller drained its machine's Node, so there is one
	history         []*agentv1alpha1.ClaimEvent
}

func (c *claim) live() bool {
	return c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING || c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
}

func (c *claim) happened(now time.Time, reason, message string) {
	c.history = append(c.history, &agentv1alpha1.ClaimEvent{Time: timestamppb.New(now), Reason: reason, Message: message})
	if excess := len(c.history) - maxHistory; excess > 0 {
		c.history = slices.Clone(c.history[excess:])
	}
}

// Claim returns the claim as callers see it, or nil.
func (a *Agent) Claim(cluster *agentv1alpha1.ClusterRef, claimID string) *agentv1alpha1.Claim {
	a.mu.Lock()
	defer a.mu.Unlock()
	object, ok := a.claimView.get(keyOf(cluster), claimID)
	if !ok {
		return nil
	}
	return object
}

// GiveUp makes the agent treat the claim's machine as failed: the claim is released, the machine is
// removed, and the node group cools down. It panics if there is no such claim, or the claim is not
// live.
func (a *Agent) GiveUp(cluster *agentv1alpha1.ClusterRef, claimID, message string) {
	a.edit(func() { a.release(a.mustLive(cluster, claimID), claimreasons.Failed, message, givenUp) })
}

// TimeOut makes the agent treat the claim's machine as late: the claim is released, and a machine
// without a Node is handed over. It panics if there is no such claim, or the claim is not live.
func (a *Agent) TimeOut(cluster *agentv1alpha1.ClusterRef, claimID, message string) {
	a.edit(func() { a.release(a.mustLive(cluster, claimID), claimreasons.Late, message, notFailed) })
}

func (a *Agent) mustLive(cluster *agentv1alpha1.ClusterRef, claimID string) *claim {
	c, ok := a.claims[keyOf(cluster)][claimID]
	if !ok || !c.live() {
		panic(fmt.Sprintf("fakeagent: no live claim %s", claimID))
	}
	return c
}

// Forget makes the agent forget an ended claim, as a real agent does after a long time. It has no
// effect on other claims.
func (a *Agent) Forget(cluster *agentv1alpha1.ClusterRef, claimID string) {
	a.edit(func() {
		c, ok := a.claims[keyOf(cluster)][claimID]
		if ok && c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
			delete(a.claims[c.cluster], claimID)
			a.touchClaim(c)
		}
	})
}

// NodeReports returns the Nodes in the last report for the Cluster. The result must not be
// modified.
func (a *Agent) NodeReports(cluster *agentv1alpha1.ClusterRef) []*agentv1alpha1.NodeReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reports[keyOf(cluster)]
}

// choose returns the first available candidate, or an error with the reason of each candidate.
func (a *Agent) choose(cluster clusterKey, holder string, candidates []string) (*group, error) {
	now := a.now()
	rejections := make([]agenterrors.Rejection, 0, len(candidates))
	for _, id := range candidates {
		g, ok := a.groups[id]
		if !ok || g.cluster != cluster {
			rejections = append(rejections, agenterrors.Rejection{
				NodeGroup: id,
				Reason:    agenterrors.ReasonNodeGroupNotFound,
				Message:   "does not exist in this cluster or has not opted in",
			})
			continue
		}
		availability := a.availability(g, holder)
		if availability.GetAvailable() {
			return g, nil
		}
		rejections = append(rejections, g.rejection(availability))
	}
	return nil, agenterrors.Rejected(now, rejections...)
}

// newClaim returns a claim on the group, which is not stored yet.
func (a *Agent) newClaim(request *agentv1alpha1.CreateClaimRequest, g *group) *claim {
	c := &claim{
		cluster:     keyOf(request.GetCluster()),
		id:          request.GetClaimId(),
		holder:      request.GetHolder(),
		displayName: request.GetDisplayName(),
		spoke:       request.GetSpokeId(),
		patience:    request.GetMaxNodeProvisionTime(),
		groupID:     g.id,
		adopts:      request.GetAdoptMachine(),
		phase:       agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING,
		reason:      claimreasons.WaitingForMachine,
		message:     "a machine of " + g.id + " is on its way",
		createdAt:   a.now(),
	}
	c.happened(c.createdAt, claimreasons.WaitingForMachine, "a replica of node group "+g.id+" is reserved")
	return c
}

// store adds the claim to the Cluster's.
func (a *Agent) store(c *claim) {
	if a.claims[c.cluster] == nil {
		a.claims[c.cluster] = map[string]*claim{}
	}
	a.sequence++
	c.sequence = a.sequence
	a.claims[c.cluster][c.id] = c
	a.touchClaim(c)
}

// createTombstone stores a tombstone for a claim that was released before it was made.
func (a *Agent) createTombstone(cluster clusterKey, id string) *claim {
	now := a.now()
	c := &claim{
		cluster: cluster, id: id, holder: unknownHolder, phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED,
		reason: claimreasons.NeverMade, message: "it was released before it was made", createdAt: now, releasedAt: now, endedAt: now,
	}
	c.happened(now, c.reason, c.message)
	a.store(c)
	return c
}

// adoptable returns the machine of the group that a claim is to adopt, or an error with the reason
// why it cannot be adopted.
func (a *Agent) adoptable(g *group, name string, aboveMin bool) (*machine, error) {
	refuse := func(why string) (*machine, error) {
		return nil, agenterrors.Rejected(a.now(), agenterrors.Rejection{
			NodeGroup: g.id, Reason: agenterrors.ReasonNotOpen, Message: fmt.Sprintf("Machine %s %s", name, why),
		})
	}
	i := slices.IndexFunc(g.machines, func(m *machine) bool { return m.name == name && m.appeared })
	if i < 0 {
		return refuse("does not exist in this node group")
	}
	m := g.machines[i]
	atMin := m.owned && g.owned() <= int(g.described.GetMinSize())
	switch {
	case m.claim != nil:
		return refuse("already has a claim")
	case !m.deletedAt.IsZero() || m.gone:
		return refuse("is being deleted")
	case !m.owned && g.spares() <= 0:
		return refuse("is promised to another claim")
	case atMin && aboveMin:
		return refuse(fmt.Sprintf("belongs to the floor, which is at the min size %d already", g.described.GetMinSize()))
	case atMin && g.described.MaxSize != nil && g.replicas() >= g.described.GetMaxSize():
		return nil, agenterrors.Rejected(a.now(), agenterrors.Rejection{
			NodeGroup: g.id, Reason: agenterrors.ReasonNoRoom,
			Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, Message: "replicas have reached the max size",
		})
	}
	return m, nil
}

// adopt stores the claim and binds it to the machine.
func (a *Agent) adopt(c *claim, m *machine) {
	a.store(c)
	g := m.group
	if m.owned && g.owned() <= int(g.described.GetMinSize()) {
		a.addOwned(g) // the user keeps the min size
	}
	m.owned = false
	g.pending++
	a.bind(c, m)
}

// make stores the claim. It adds a machine to the group if there is no spare for the claim.
func (a *Agent) make(c *claim, g *group) {
	a.store(c)
	spare := g.spares() > 0
	g.pending++
	a.touch(g)
	if !spare {
		a.addMachine(g)
	}
}

// release starts the release of a live claim, and completes it if there is nothing to wait for. A
// failed machine is not handed over, and its group cools down.
func (a *Agent) release(c *claim, reason, why string, failure agentv1alpha1.FailureClass) {
	failed := failure != notFailed
	c.releasedAt = a.now()
	c.reason, c.message = reason, why
	c.happened(c.releasedAt, reason, why)
	a.touchClaim(c)
	g := a.groups[c.groupID]
	m := c.machine
	if failed {
		c.failedAt, c.failure = c.releasedAt, failure
	}
	if failed && a.settings.coolDown > 0 && g != nil {
		a.block(g, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, why, a.now().Add(a.settings.coolDown))
	}
	switch {
	case m == nil:
		a.end(c, claimreasons.Cancelled, "released before it had a machine")
	case m.nodeName == "" && !failed && !c.drained && m.deletedAt.IsZero():
		// The machine is handed over to the next claim.
		m.claim = nil
		m.spareSince = a.now()
		a.touchMachine(m)
		a.end(c, claimreasons.HandedOver, "the machine was handed over before it had a Node")
	default:
		c.phase = agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
		a.terminate(m)
	}
	if g != nil {
		a.touch(g)
		a.reconcile(g)
	}
}

// giveToUser ends a claim that has a machine, and returns the machine to the user.
func (a *Agent) giveToUser(c *claim, why string) {
	m := c.machine
	c.returned = true
	c.phase, c.reason, c.message = agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, claimreasons.ReturnRequested, why
	c.happened(a.now(), claimreasons.ReturnRequested, why)
	a.touchClaim(c)
	a.publish() // a real hub also takes a moment to do the rest
	m.claim, m.owned = nil, true
	a.touchMachine(m)
	a.end(c, claimreasons.Returned, "its machine is the user's now")
	a.touch(m.group)
}

// end ends the claim.
func (a *Agent) end(c *claim, reason, message string) {
	if c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING {
		if g := a.groups[c.groupID]; g != nil {
			g.pending--
		}
	}
	c.phase = agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	if !c.failedAt.IsZero() {
		reason, message = claimreasons.Failed, c.message
	}
	c.reason, c.message, c.endedAt = reason, message, a.now()
	if c.machine != nil {
		c.lastSeen = c.machine.render()
		c.lastSeen.ClaimId = c.id // also after a hand-over
	}
	c.happened(c.endedAt, reason, message)
	a.touchClaim(c)
}

// claimsOf returns the group's claims, oldest first.
func (a *Agent) claimsOf(g *group) []*claim {
	var claims []*claim
	for _, c := range a.claims[g.cluster] {
		if c.groupID == g.id {
			claims = append(claims, c)
		}
	}
	slices.SortFunc(claims, func(x, y *claim) int { return cmp.Compare(x.sequence, y.sequence) })
	return claims
}

// reconcile binds waiting claims to machines, and removes machines that no claim waits for.
func (a *Agent) reconcile(g *group) {
	if a.groups[g.id] != g {
		return
	}
	if g.pending > 0 {
		for _, c := range a.claimsOf(g) {
			if c.phase != agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING {
				continue
			}
			free := slices.IndexFunc(g.machines, (*machine).usable)
			if free < 0 {
				break
			}
			a.bind(c, g.machines[free])
		}
	}
	now := a.now()
	for _, m := range surplus(g) {
		if m.spareSince.IsZero() {
			m.spareSince = now
		}
		if left := m.spareSince.Add(a.settings.spareGrace).Sub(now); left > 0 {
			a.after(left, func() { a.reconcile(g) })
			continue
		}
		a.terminate(m)
	}
}

// surplus returns the machines that no claim can use or waits for: first those with a Node, then
// those that have not appeared, then the newest.
func surplus(g *group) []*machine {
	var joined, awaited, idle []*machine
	for _, m := range slices.Backward(g.machines) {
		switch {
		case m.owned || m.claim != nil || !m.deletedAt.IsZero():
		case m.nodeName != "":
			joined = append(joined, m)
		case m.awaited():
			awaited = append(awaited, m)
		case m.usable():
			idle = append(idle, m)
		}
	}
	spares := slices.Concat(awaited, idle)
	return slices.Concat(joined, spares[:max(0, min(g.spares(), len(spares)))])
}

func (a *Agent) bind(c *claim, m *machine) {
	m.group.pending--
	m.claim, m.spareSince = c, time.Time{}
	c.machine = m
	c.phase, c.reason, c.message = agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, claimreasons.Bound, "bound to machine "+m.name
	c.happened(a.now(), claimreasons.Bound, c.message)
	a.touchMachine(m)
	a.touchClaim(c)
	a.touch(m.group)
}

func (c *claim) render() *agentv1alpha1.Claim {
	object := &agentv1alpha1.Claim{
		Cluster:      c.cluster.ref(),
		ClaimId:      c.id,
		Holder:       c.holder,
		DisplayName:  c.displayName,
		NodeGroupId:  c.groupID,
		AdoptMachine: c.adopts,
		Phase:        c.phase,
		Reason:       c.reason,
		Message:      c.message,
		CreatedAt:    timestamppb.New(c.createdAt),
		History:      slices.Clone(c.history),
	}
	switch {
	case c.lastSeen != nil:
		object.Machine = c.lastSeen
	case c.machine != nil:
		object.Machine = c.machine.render()
	}
	if !c.releasedAt.IsZero() {
		object.ReleasedAt = timestamppb.New(c.releasedAt)
	}
	if !c.endedAt.IsZero() {
		object.EndedAt = timestamppb.New(c.endedAt)
	}
	if !c.failedAt.IsZero() {
		object.FailedAt, object.FailureClass = timestamppb.New(c.failedAt), c.failure
	}
	object.Drained, object.Returned, object.MaxNodeProvisionTime = c.drained, c.returned, c.patience
	return object
}
