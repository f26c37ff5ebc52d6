package protocol

import (
	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// A claim can end without its Machine: its holder returns the Machine to the user, who owns one
// more from then on. Replicas do not change. One ledger write raises the floor and records the
// Machine. Then the claim's label comes off and the claim ends. Then the record is dropped. The
// record survives a move and a restore, which lose the claim's status. Agents that do not support
// this see a Bound claim at first, and later a ledger of a newer version.

// returned is the message of a claim that ended because it returned its Machine.
const returned = "its Machine is the user's now"

// startReturns adds to the floor the Machines that their claims return.
func (b *books) startReturns() {
	for _, c := range b.Claims {
		if !c.Returns() || c.Status.Machine == nil {
			continue
		}
		m := b.machine(c.Status.Machine.UID)
		if m == nil || !Alive(m) || HasFinalizer(m) || b.returned(m.UID) || !b.mayReturn(c, m) {
			continue
		}
		_, releasing := b.next.Releasing[m.UID]
		if releasing || b.next.Lowered || b.Group.Has(eligibility.Paused) { // a move would lose it
			continue
		}
		if !b.budget.give(m.Name, c.Spec.ClaimID) {
			return
		}
		b.next.Floor = b.userOwned(b.Group.Replicas) + 1
		b.next.Returning[m.UID] = Returned{Machine: m.Name, Claim: c.Spec.ClaimID}
		b.floors[m.UID] = true
		b.d.Urgent = true
	}
}

// mayReturn reports whether the claim still has the Machine: it carries the claim's label, or
// another writer took that off.
func (b *books) mayReturn(c *v1alpha1.MachineClaim, m *clusterv1.Machine) bool {
	_, entered := b.next.Pending[c.Spec.ClaimID]
	switch ClaimOf(m) {
	case c.Spec.ClaimID:
		return true
	case "":
		return !entered && !b.assigned[m.UID] && !wasReturned(m)
	}
	return false
}

// dropReturns drops the records whose claims have ended or are gone, once the label is off, and
// those of Machines with another claim's label.
func (b *books) dropReturns() {
	for uid, r := range b.next.Returning {
		label := ""
		if m := b.machine(uid); m != nil {
			label = ClaimOf(m)
		}
		c := b.Claim(r.Claim)
		ended := c == nil || c.CurrentPhase() == v1alpha1.PhaseEnded
		if label != r.Claim && (ended || label != "") {
			delete(b.next.Returning, uid)
		}
	}
}

// returned reports whether the next ledger records the Machine as returned. The floor has it then,
// whatever its label.
func (b *books) returned(machine types.UID) bool {
	_, yes := b.next.Returning[machine]
	return yes
}

// returning reports whether the snapshot's ledger records that the Machine was returned by the
// claim whose label it still carries.
func (s *Snapshot) returning(m *clusterv1.Machine) bool {
	if s.Ledger == nil {
		return false
	}
	r, yes := s.Ledger.Returning[m.UID]
	return yes && r.Claim == ClaimOf(m)
}

// recordsReturn reports whether the snapshot's ledger records that the claim returned its Machine.
func (s *Snapshot) recordsReturn(c *v1alpha1.MachineClaim) bool {
	return s.Ledger != nil && lo.SomeBy(lo.Values(s.Ledger.Returning), func(r Returned) bool { return r.Claim == c.Spec.ClaimID })
}

// actOnReturned ends a claim that has returned its Machine, once the Machine does not carry its
// label any more. It returns false for a claim that is treated like any other: one that returns
// nothing, or whose Machine was lost before the ledger recorded the return.
func (s *Snapshot) actOnReturned(d *Decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine, entry Assignment, entered bool) (done bool) {
	if s.recordsReturn(c) {
		switch labelled := s.labelled(c.Spec.ClaimID); {
		case labelled == nil:
			d.end(c, ReasonReturned, returned)
		case c.Status.Phase == "", c.Status.Phase == v1alpha1.PhasePending:
			return false // its status was lost
		}
		return true
	}
	if !c.Returns() || m == nil || !Alive(m) {
		return false
	}
	switch {
	case ClaimOf(m) == "" && entered && entry.UID == m.UID && !HasFinalizer(m):
		return false // Finish the label first; then only the Return action removes it.
	case ClaimOf(m) == "" && wasReturned(m) && s.Ledger != nil:
		d.end(c, ReasonReturned, returned)
	case ClaimOf(m) != "" && ClaimOf(m) != c.Spec.ClaimID:
		return false
	}
	return true
}
