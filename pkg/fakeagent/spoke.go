package fakeagent

import (
	"cmp"
	"slices"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// liveSet is a holder's live set, together with the holder's claims. A call without a set has an
// empty one.
type liveSet struct {
	spoke string
	alive map[string]struct{}
	// claims are the holder's live claims, oldest first.
	claims []*claim
	// matched reports whether one of the claims is in the set. own and others report whether a
	// claim that is not in the set was made by the set's cluster, or by another one.
	matched, own, others bool
	// known is the cluster of the last set that was accepted, "" if there was none.
	known string
}

func (a *Agent) liveSet(cluster clusterKey, holder, spoke string, alive map[string]struct{}) *liveSet {
	s := &liveSet{spoke: spoke, alive: alive}
	if c := a.clusters[cluster]; c != nil && c.shim != nil && holder == shimHolder {
		s.known = c.shim.spokeID
	}
	for _, c := range a.claims[cluster] {
		if c.live() && c.holder == holder {
			s.claims = append(s.claims, c)
		}
	}
	slices.SortFunc(s.claims, func(x, y *claim) int { return cmp.Compare(x.sequence, y.sequence) })
	for _, c := range s.claims {
		switch {
		case s.has(c):
			s.matched = true
		case c.spoke == "":
		case c.spoke == s.spoke:
			s.own = true
		default:
			s.others = true
		}
	}
	return s
}

func (s *liveSet) has(c *claim) bool { _, ok := s.alive[c.id]; return ok }

// foreign returns an error if the call comes from a cluster that is unrelated to the existing
// claims and did not send the last set.
func (s *liveSet) foreign() error {
	if s.spoke == "" || s.spoke == s.known || s.matched || s.own || !s.others && s.known == "" {
		return nil
	}
	return agenterrors.SpokeMismatch("spoke_id: the call comes from another cluster than the one that created the claims or sent the last set")
}

// speaksFor reports whether the set's cluster created the claim.
func (s *liveSet) speaksFor(c *claim) bool {
	if c.spoke != "" || s.has(c) {
		return s.has(c) || c.spoke == s.spoke
	}
	return s.spoke == "" || s.matched && !s.others
}

// noteNodes records which claims' Nodes are registered, and the cluster of the claims in the set.
func (s *liveSet) noteNodes(nodes []*agentv1alpha1.NodeReport) {
	registered := map[string]bool{}
	for _, node := range nodes {
		registered[node.GetProviderId()] = registered[node.GetProviderId()] || !node.GetUnregistered()
	}
	for _, c := range s.claims {
		if c.machine != nil && registered[c.machine.providerID] && s.speaksFor(c) {
			c.registered = true
		}
	}
	for _, c := range s.claims {
		if s.has(c) && s.spoke != "" {
			c.spoke = s.spoke
		}
	}
}

// orphans returns the claims that are not in the set and are no newer than its token.
func (s *liveSet) orphans(sequence int64) []*claim {
	if s.spoke == "" {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.claims), func(c *claim) bool { return s.has(c) || c.sequence > sequence })
}

// keeps returns why a claim that is not in the set is kept, or "" if it is not.
func (s *liveSet) keeps(c *claim) string {
	switch {
	case !s.speaksFor(c):
		return "another cluster made it, or it is not known which did"
	case c.registered:
		return "its owner is gone and did not release the claim, but its Node had registered"
	}
	return ""
}

// keep records in a bound claim why it is kept.
func (a *Agent) keep(c *claim, why string) {
	if c.phase != agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND || c.reason == claimreasons.OwnerMissing {
		return
	}
	c.reason, c.message = claimreasons.OwnerMissing, why
	c.happened(a.now(), claimreasons.OwnerMissing, why)
	a.touchClaim(c)
}

// ownerIsBack ends what [Agent.keep] has recorded.
func (a *Agent) ownerIsBack(c *claim) {
	if c.reason != claimreasons.OwnerMissing {
		return
	}
	const why = "its owner is in the live set again"
	c.reason, c.message = claimreasons.Bound, why
	c.happened(a.now(), claimreasons.Bound, why)
	a.touchClaim(c)
}
