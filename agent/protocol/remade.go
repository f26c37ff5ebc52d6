package protocol

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// A move to another hub, or a restore from a backup, creates every object again with its spec and
// annotations, but with another UID, without a status and without its deletion. Objects that were
// known by UID are found again by name. State that was in a status is restored from the ledger and
// the labels.

const (
	// remadeSettles is how long objects of a Cluster that is not paused may still be arriving after
	// the youngest of them was created again.
	remadeSettles = 30 * time.Second
	// remadeWithin is how long after a claim and its MachineDeployment were created again its
	// Machine may follow. All Machines of a move are there when it ends the pause; a backup
	// restores them for longer.
	remadeWithin = 10 * time.Minute
	// SuspendedDelay is how soon a held group is read again, because the end of a pause need not
	// change any of the group's objects.
	SuspendedDelay = 10 * time.Second
)

// Carried reports whether a claim was created again together with its Cluster, and lost its status
// with that. cluster is the present UID of the Cluster. Such a claim shows neither what it had nor
// whether it had ended.
func Carried(c *v1alpha1.MachineClaim, cluster types.UID) bool {
	return c.Status.Phase == "" && c.Spec.NodeGroup != "" && c.Spec.ClusterUID != "" && cluster != "" && c.Spec.ClusterUID != cluster
}

// carried is [Carried] that also covers claims of older agents. Those do not record the UID of
// their Cluster, so the ledger decides.
func (s *Snapshot) carried(c *v1alpha1.MachineClaim) bool {
	return Carried(c, s.ClusterUID) || c.Status.Phase == "" && c.Spec.NodeGroup != "" && c.Spec.ClusterUID == "" && s.moved()
}

// moved reports whether the ledger was last written for the MachineDeployment as it was before it
// was moved or restored.
func (s *Snapshot) moved() bool {
	return s.Ledger != nil && s.Ledger.UID != "" && s.Deployment.UID != "" && s.Ledger.UID != s.Deployment.UID
}

// rename rewrites the ledger of a moved MachineDeployment with the present UIDs of its Machines.
func (s *Snapshot) rename() {
	if !s.moved() {
		return
	}
	l := s.Ledger.Clone()
	for id, entry := range s.Ledger.Pending {
		if m := s.machineNamed(entry.Machine); m != nil && entry.UID != "" {
			entry.UID = m.UID
			l.Pending[id] = entry
		}
	}
	for uid, r := range s.Ledger.Releasing {
		m := s.machineNamed(r.Machine)
		if m == nil || m.UID == uid {
			continue
		}
		if set := s.set(r.Set); set != nil && slices.Contains(ReleasedFrom(set), uid) {
			r.LoweredAs = uid
		}
		if r.Decremented {
			// The Machine lives again and takes a replica. If Cluster API has removed it by itself
			// already, the MachineDeployment began with the lowered number.
			r.Decremented, r.Generation = !Alive(m), s.Deployment.Generation
		}
		delete(l.Releasing, uid)
		l.Releasing[m.UID] = r
	}
	for uid, r := range s.Ledger.Returning {
		if m := s.machineNamed(r.Machine); m != nil && m.UID != uid {
			delete(l.Returning, uid)
			l.Returning[m.UID] = r
		}
	}
	s.Ledger = l
}

// Lacks reports whether the snapshot misses a Machine that the claims or the ledger refer to, or a
// claim that the ledger refers to.
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
	for id, entry := range s.Ledger.Pending {
		if !claims[id] || entry.UID != "" && !machines[entry.UID] {
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

// Reported reports whether live sets of the claim's holder decide whether the claim lives. They do
// not for a claim that is being released or returns its Machine.
func Reported(c *v1alpha1.MachineClaim) bool {
	return c.Spec.Spoke != "" && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound && !c.Returns())
}

// held returns why nothing is ordered and nothing removed, nil when nothing holds the group. A
// group is held while its Cluster is paused. After a move or a restore it is held until it is known
// what its claims have and their holder has reported which of them live.
func (s *Snapshot) held() *eligibility.Refusal {
	switch {
	case s.Group.Suspended:
		return s.Group.Refusal()
	case slices.ContainsFunc(s.Claims, s.carried):
		return s.remade("the state of its claims is still being reconstructed")
	case s.deleted():
		return nil // all of it goes, whoever lives
	case s.moved() && !s.Synced && slices.ContainsFunc(s.Claims, Reported):
		return s.remade("the holder of its claims has not sent its live set since")
	}
	return nil
}

func (s *Snapshot) remade(and string) *eligibility.Refusal {
	return &eligibility.Refusal{
		NodeGroup: s.Deployment.Name, Reason: eligibility.Paused, Message: "the MachineDeployment was moved or restored, and " + and,
	}
}

// wait returns the decision while the group is held. Claims that were never entered are refused.
// Claims that lost their status get it again, unless the Cluster is paused, because then not all of
// its objects need to be there.
func (s *Snapshot) wait(why *eligibility.Refusal) *Decision {
	d := &Decision{Refused: map[string]eligibility.Refusal{}, Queued: map[string]bool{}, Held: true}
	d.Wake(SuspendedDelay)
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

// actOnCarried restores the status of a claim that was carried over, from its Machine's label and
// from the ledger. A claim that neither knows had ended or had nothing yet.
func (s *Snapshot) actOnCarried(d *Decision, c *v1alpha1.MachineClaim) {
	switch {
	case s.labelled(c.Spec.ClaimID) != nil:
		d.Actions = append(d.Actions, s.restore(c))
	case s.recordsReturn(c):
		d.end(c, ReasonReturned, returned)
	case s.entered(c):
		s.markAdmitted(d, c)
	default:
		began := latest(c.CreationTimestamp.Time, s.Deployment.CreationTimestamp.Time)
		made := began
		for _, m := range s.Machines {
			made = latest(made, m.CreationTimestamp.Time)
		}
		if longest := began.Add(remadeWithin); made.After(longest) {
			made = longest // Cluster API creates Machines as well: a rollout would never let the claim end
		}
		if left := remadeSettles - s.ago(made); left > 0 {
			d.Wake(left)
			return
		}
		d.end(c, ReasonStateLost, "it was moved or restored without its status, and neither a Machine nor the node group's ledger knows it")
	}
}

// restore returns the action for a claim whose label a Machine carries, but whose status does not
// show it.
func (s *Snapshot) restore(c *v1alpha1.MachineClaim) Action {
	m := s.labelled(c.Spec.ClaimID)
	a := Action{
		Kind: Restore, Claim: c, Group: s.Deployment.UID, Machine: m, Remade: s.carried(c) || s.moved(), Returned: s.recordsReturn(c),
	}
	var release Release
	if s.Ledger != nil {
		release = s.Ledger.Releasing[m.UID]
	}
	// While the Machine is not being deleted, its release is undone instead, except after a move.
	switch {
	case release.Claim == c.Spec.ClaimID && (s.moved() || !Alive(m)):
		a.Release = release
	case !Alive(m) && HasFinalizer(m) && !a.Returned: // the agent is deleting it, and the ledger was lost as well
		a.Release = Release{Machine: m.Name, Claim: c.Spec.ClaimID}
	}
	return a
}
