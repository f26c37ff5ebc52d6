package protocol

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// A move to another hub, and a restore from a backup, make every object again: with its spec and its annotations, under another UID,
// without a status and without its deletion. What was known by a UID is found again by its name, what was in a status by what the ledger
// and the labels say.

const (
	// remadeSettles is how long after the youngest of them was made again the objects of a Cluster that was not paused meanwhile may
	// still be coming.
	remadeSettles = 30 * time.Second
	// SuspendedLook is how soon a held group is read again: the end of a pause need not change any of the group's objects.
	SuspendedLook = 10 * time.Second
)

// Carried reports whether a claim was made again together with its Cluster, the present UID of which is given, and has lost its status
// with that. It says neither what the claim had nor whether it had ended.
func Carried(c *v1alpha1.MachineClaim, cluster types.UID) bool {
	return c.Status.Phase == "" && c.Spec.NodeGroup != "" && c.Spec.ClusterUID != "" && cluster != "" && c.Spec.ClusterUID != cluster
}

// carried is [Carried]. Claims of older agents do not say of which life of the Cluster they are; the ledger beside them does.
func (s *Snapshot) carried(c *v1alpha1.MachineClaim) bool {
	return Carried(c, s.ClusterUID) || c.Status.Phase == "" && c.Spec.NodeGroup != "" && c.Spec.ClusterUID == "" && s.moved()
}

// moved reports whether the ledger was last written for the MachineDeployment as it was before it was moved or restored.
func (s *Snapshot) moved() bool {
	return s.Ledger != nil && s.Ledger.UID != "" && s.Deployment.UID != "" && s.Ledger.UID != s.Deployment.UID
}

// rename has the ledger of a MachineDeployment that was moved speak of its Machines by the UIDs that they have now.
func (s *Snapshot) rename() {
	if !s.moved() {
		return
	}
	l := s.Ledger.Clone()
	for id, named := range s.Ledger.Pending {
		if m := s.named(named.Machine); m != nil && named.UID != "" {
			named.UID = m.UID
			l.Pending[id] = named
		}
	}
	for uid, r := range s.Ledger.Releasing {
		m := s.named(r.Machine)
		if m == nil || m.UID == uid {
			continue
		}
		if set := s.set(r.Set); set != nil && slices.Contains(ReleasedFrom(set), uid) {
			r.LoweredAs = uid
		}
		if r.GivenBack {
			// It lives again, and takes a replica. If Cluster API has seen to it by itself already, the number that the MachineDeployment began
			// with is the lowered one.
			r.GivenBack, r.Generation = !Alive(m), s.Deployment.Generation
		}
		delete(l.Releasing, uid)
		l.Releasing[m.UID] = r
	}
	for uid, r := range s.Ledger.Returning {
		if m := s.named(r.Machine); m != nil && m.UID != uid {
			delete(l.Returning, uid)
			l.Returning[m.UID] = r
		}
	}
	s.Ledger = l
}

// Lacks reports whether the claims or the ledger speak of a Machine, or the ledger of a claim, that is not among those that were read.
func (s *Snapshot) Lacks() bool {
	machines := make(map[types.UID]bool, len(s.Machines))
	for _, m := range s.Machines {
		machines[m.UID] = true
	}
	claims := make(map[string]bool, len(s.Claims))
	for _, c := range s.Claims {
		claims[c.Spec.ClaimID] = true
		if hasMachine(c) && !machines[c.Status.Machine.UID] {
			return true
		}
	}
	if s.Ledger == nil {
		return false
	}
	for id, named := range s.Ledger.Pending {
		if !claims[id] || named.UID != "" && !machines[named.UID] {
			return true
		}
	}
	for uid := range s.Ledger.Releasing {
		if !machines[uid] {
			return true
		}
	}
	for uid := range s.Ledger.Returning {
		if !machines[uid] {
			return true
		}
	}
	return false
}

// Reported reports whether the claim's holder says with its live sets whether the claim lives. One that is released, or returns its Machine, does
// not depend on that.
func Reported(c *v1alpha1.MachineClaim) bool {
	return c.Spec.Spoke != "" && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound && !c.Returns())
}

// held says why nothing is ordered and nothing removed until the world has been seen whole again, nil when it has: the Cluster is paused,
// or it was moved or restored, and it is not known yet what its claims have, or their holder has not said since which of them live.
func (s *Snapshot) held() *eligibility.Refusal {
	switch {
	case s.Group.Suspended:
		return s.Group.Refusal()
	case slices.ContainsFunc(s.Claims, s.carried):
		return s.remade("what its claims have is still being found out")
	case s.deleted():
		return nil // all of it goes, whoever lives
	case s.moved() && !s.Synced && slices.ContainsFunc(s.Claims, Reported):
		return s.remade("its claims' holder has not said since which of them live")
	}
	return nil
}

func (s *Snapshot) remade(and string) *eligibility.Refusal {
	return &eligibility.Refusal{
		NodeGroup: s.Deployment.Name, Reason: eligibility.Paused, Message: "the MachineDeployment was moved or restored, and " + and,
	}
}

// wait is the decision while something holds the group: claims that were never entered are refused, and those that lost their status get
// it again, unless the Cluster is paused: not all of its objects need be there.
func (s *Snapshot) wait(why *eligibility.Refusal) *Decision {
	d := &Decision{Refused: map[string]eligibility.Refusal{}, Queued: map[string]bool{}, Held: true}
	d.Wake(SuspendedLook)
	if !s.Group.Suspended {
		s.recreate(d)
	}
	for _, c := range s.Claims {
		carried, owns := s.carried(c), s.labelled(c.Spec.ClaimID) != nil
		switch {
		case c.Status.Phase != "" || c.Spec.NodeGroup == "":
		case !carried && !owns && !s.entered(c):
			d.Refused[c.Spec.ClaimID] = *why
		case s.Group.Suspended:
		case carried:
			s.actOnCarried(d, c)
		case owns:
			d.Actions = append(d.Actions, s.restore(c))
		}
	}
	return d
}

func (s *Snapshot) entered(c *v1alpha1.MachineClaim) bool {
	if s.Ledger == nil {
		return false
	}
	_, entered := s.Ledger.Pending[c.Spec.ClaimID]
	return entered
}

// actOnCarried gives a claim that was carried over its status again: what it has is known from its Machine's label and from the ledger.
// One that neither knows had ended, or had nothing yet.
func (s *Snapshot) actOnCarried(d *Decision, c *v1alpha1.MachineClaim) {
	switch {
	case s.labelled(c.Spec.ClaimID) != nil:
		d.Actions = append(d.Actions, s.restore(c))
	case s.recordsReturn(c):
		d.end(c, ReasonReturned, returned)
	case s.entered(c):
		s.markEntered(d, c)
	default:
		made := latest(c.CreationTimestamp.Time, s.Deployment.CreationTimestamp.Time)
		for _, m := range s.Machines {
			made = latest(made, m.CreationTimestamp.Time)
		}
		if left := remadeSettles - s.ago(made); left > 0 {
			d.Wake(left)
			return
		}
		d.end(c, ReasonStateLost, "it was moved or restored without its status, and neither a Machine nor the node group's ledger knows it")
	}
}

// restore is the action for a claim that has the Machine with its label and does not say so.
func (s *Snapshot) restore(c *v1alpha1.MachineClaim) Action {
	m := s.labelled(c.Spec.ClaimID)
	a := Action{
		Kind: Restore, Claim: c, Group: s.Deployment.UID, Machine: m, Remade: s.carried(c) || s.moved(), Returned: s.recordsReturn(c),
	}
	if s.moved() {
		if r := s.Ledger.Releasing[m.UID]; r.Claim == c.Spec.ClaimID {
			a.Release = r
		}
	}
	return a
}
