package protocol

import (
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// A claim can end without its Machine: its holder returns the Machine to the user, who has one more from then on. Replicas stay. The floor is
// raised, and the Machine recorded as the floor's, in one ledger write; then the claim's label comes off, and the claim ends. An agent that
// knows nothing of this sees a claim that is Bound, and later a ledger that is newer than it knows.

// startReturns gives the floor the Machines that their claims return.
func (b *books) startReturns() {
	for _, c := range b.Claims {
		if c.CurrentPhase() != v1alpha1.PhaseBound || !c.Status.Returned || c.Status.Machine == nil {
			continue
		}
		m := b.machine(c.Status.Machine.UID)
		if m == nil || !Alive(m) || Held(m) || ClaimOf(m) != c.Spec.ClaimID || b.returned(m.UID) {
			continue
		}
		_, releasing := b.next.Releasing[m.UID]
		if releasing || b.next.Lowered || b.Group.Has(eligibility.Paused) { // a move would lose it
			continue
		}
		if !b.budget.give(m.Name, c.Spec.ClaimID) {
			return
		}
		b.next.Floor = b.users(b.Group.Replicas) + 1
		b.next.Returning[m.UID] = Returned{Machine: m.Name, Claim: c.Spec.ClaimID}
		b.floors[m.UID] = true
		b.d.Urgent = true
	}
}

// dropReturns forgets the Machines that carry the label no more, and those that are gone: what replaces one is the user's.
func (b *books) dropReturns() {
	for uid, r := range b.next.Returning {
		if m := b.machine(uid); m == nil || ClaimOf(m) != r.Claim {
			delete(b.next.Returning, uid)
		}
	}
}

// returned reports whether the next ledger records the Machine as returned: the floor has it, whatever its label says.
func (b *books) returned(machine types.UID) bool {
	_, yes := b.next.Returning[machine]
	return yes
}

// returning reports whether the snapshot's ledger records the Machine as returned.
func (s *Snapshot) returning(m *clusterv1.Machine) bool {
	if s.Ledger == nil {
		return false
	}
	r, yes := s.Ledger.Returning[m.UID]
	return yes && r.Claim == ClaimOf(m)
}

// actOnReturned ends a claim that returns its Machine, once that carries its label no more. It reports false for a claim that is treated like any
// other: one that returns nothing, or whose Machine is gone, or another claim's.
func (s *Snapshot) actOnReturned(d *Decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine, named Named, entered bool) (done bool) {
	switch {
	case c.Status.Phase != v1alpha1.PhaseBound, !c.Status.Returned, m == nil || !Alive(m):
		return false
	case ClaimOf(m) == "" && entered && named.UID == m.UID && !Held(m):
		return false // the label first, so that one rule takes it off
	case ClaimOf(m) == "" && !entered && s.Ledger != nil:
		d.end(c, ReasonReturned, "its Machine is the user's now")
	case ClaimOf(m) != "" && ClaimOf(m) != c.Spec.ClaimID:
		return false
	}
	return true
}
