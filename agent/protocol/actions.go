package protocol

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// hasMachine reports whether a claim that has not ended has a Machine, possibly one that is being
// released.
func hasMachine(c *v1alpha1.MachineClaim) bool {
	return c.Status.Machine != nil && c.Status.Phase != v1alpha1.PhaseEnded
}

// actOnClaims adds the writes that the snapshot's ledger permits on claims and on the Machines that
// they bind.
func (s *Snapshot) actOnClaims(d *Decision) {
	ledger := s.Ledger
	if ledger == nil {
		ledger = &Ledger{}
	}
	s.recreate(d)
	s.actOnForeign(d)
	for _, c := range s.Claims {
		if c.CurrentPhase() == v1alpha1.PhaseEnded {
			continue
		}
		id := c.Spec.ClaimID
		entry, entered := ledger.Pending[id]
		var m *clusterv1.Machine
		if c.Status.Machine != nil {
			m = s.machine(c.Status.Machine.UID)
		}
		if s.actOnReturned(d, c, m, entry, entered) {
			continue
		}
		switch c.Status.Phase {
		case "", v1alpha1.PhasePending:
			if s.labelled(id) != nil {
				// Its status was lost, possibly before its entry was dropped. The label proves that the
				// claim had a Machine, even one that is being deleted: it gets no other, and ends with
				// that one.
				d.Actions = append(d.Actions, s.restore(c))
			} else if entered {
				s.actOnPending(d, c, entry)
			} else if refusal, refused := d.Refused[id]; refused {
				reason := ReasonRefused
				if refusal.Reason == eligibility.AtMaxSize || refusal.Reason == eligibility.CoolingDown {
					reason = ReasonNoRoom
				}
				if c.Status.Phase == v1alpha1.PhasePending {
					d.end(c, reason, refusal.Message) // it was entered once, and another owner has its replica now
				} else {
					s.moveOn(d, c, reason, refusal.Message)
				}
			}
		case v1alpha1.PhaseBound:
			switch owned := s.labelled(id); {
			case m == nil && owned != nil:
				d.Actions = append(d.Actions, s.restore(c)) // its status names another Machine
			case m == nil || DeletionCompleted(m):
				s.endWithMachine(d, c)
			case !Alive(m):
				// Another actor is deleting it. Until it is gone the instance may run, and the
				// claim keeps it.
				if c.Status.Reason != ReasonMachineDeleting {
					d.Actions = append(d.Actions, Action{Kind: Explain, Claim: c, Event: v1alpha1.Event{
						Reason: ReasonMachineDeleting, Message: "another actor is deleting its Machine",
					}})
				}
			case ClaimOf(m) == "" && entered && entry.UID == m.UID && !HasFinalizer(m):
				d.Actions = append(d.Actions, Action{Kind: Label, Claim: c, Machine: m})
			case ClaimOf(m) == "" && !entered && s.Ledger != nil:
				d.end(c, ReasonMachineLost, "another actor removed the claim's label from its Machine")
			case ClaimOf(m) != "" && ClaimOf(m) != id:
				d.end(c, ReasonMachineLost, "its Machine carries another claim's label")
			case HasNode(m) && c.Status.Machine.NodeName != m.Status.NodeRef.Name:
				d.Actions = append(d.Actions, Action{Kind: NoteMachine, Claim: c, Machine: m, Event: v1alpha1.Event{
					Reason: ReasonNodeJoined, Message: "Node " + m.Status.NodeRef.Name + " joined",
				}})
			default:
				s.checkDeadlines(d, c, m)
			}
		case v1alpha1.PhaseReleasing:
			s.actOnReleasing(d, c, m, entry, entered)
		case v1alpha1.PhaseEnded:
		}
	}
}

// recreate adds actions that recreate the missing objects of claims whose labels Machines carry.
func (s *Snapshot) recreate(d *Decision) {
	for _, m := range s.Lost {
		if Alive(m) && !s.returning(m) {
			d.Actions = append(d.Actions, Action{Kind: Recreate, Machine: m})
		}
	}
}

// endWithMachine ends a claim whose Machine another actor removed.
func (s *Snapshot) endWithMachine(d *Decision, c *v1alpha1.MachineClaim) {
	if s.deleted() {
		d.end(c, ReasonNodeGroupGone, "its MachineDeployment is being deleted, and its Machine with it")
		return
	}
	d.end(c, ReasonMachineLost, "its Machine was deleted by another actor")
}

// actOnForeign ends or moves on the claims of a former MachineDeployment of this name that lost
// their Machine, or wait for one.
func (s *Snapshot) actOnForeign(d *Decision) {
	for _, c := range s.former {
		d.end(c, ReasonNodeGroupGone, "its MachineDeployment was deleted; another one has its name now")
	}
	for _, c := range s.Foreign {
		var m *clusterv1.Machine
		if c.Status.Machine != nil {
			m = s.machine(c.Status.Machine.UID)
		}
		const gone = "its MachineDeployment was deleted; a MachineDeployment of another Cluster has its name now"
		switch {
		case c.Status.Phase == "":
			s.moveOn(d, c, ReasonNodeGroupGone, gone)
		case m == nil || DeletionCompleted(m):
			d.end(c, ReasonNodeGroupGone, gone)
		}
	}
}

// AbandonedAfter is how long a claim that no node group has admitted is left to its CreateClaim
// call. After that the agent moves or ends the claim itself. A later retry of the call is
// unaffected.
const AbandonedAfter = 2 * time.Minute

// moveOn does what the CreateClaim call would do for a claim that finds no room here, in case that
// call is gone together with the agent that served it.
func (s *Snapshot) moveOn(d *Decision, c *v1alpha1.MachineClaim, reason, message string) {
	if left := AbandonedAfter - s.Now.Sub(c.CreationTimestamp.Time); left > 0 {
		d.Wake(left)
		return
	}
	d.Actions = append(d.Actions, Action{Kind: MoveOn, Claim: c, Event: v1alpha1.Event{Reason: reason, Message: message}})
}

func (s *Snapshot) actOnPending(d *Decision, c *v1alpha1.MachineClaim, entry Assignment) {
	m := s.machine(entry.UID)
	holder, had := s.holders[entry.UID]
	had = had && holder != c.Spec.ClaimID // held by a claim that hands it over and has not ended yet
	had = had || m != nil && hasFloorMark(m) && c.Spec.Adopt == ""
	switch {
	case entry.UID != "" && m != nil && Alive(m) && !HasFinalizer(m) && ClaimOf(m) == "" && !had:
		d.Actions = append(d.Actions, Action{Kind: Bind, Claim: c, Group: s.Deployment.UID, Machine: m})
	case c.Spec.Adopt != "" && entry.UID == "":
		d.end(c, ReasonMachineLost, "the Machine to adopt was deleted before it was adopted")
	case c.Status.Phase == v1alpha1.PhasePending && entry.UID == "" && s.checkDeadlines(d, c, nil):
		// It waited long enough.
	case c.Status.Phase == "":
		s.markAdmitted(d, c)
	}
}

func (s *Snapshot) markAdmitted(d *Decision, c *v1alpha1.MachineClaim) {
	d.Actions = append(d.Actions, s.Admitted(c))
}

// Admitted returns the action that records on a claim that its replica is accounted for, so that
// this is known even if the ledger is lost.
func (s *Snapshot) Admitted(c *v1alpha1.MachineClaim) Action {
	return Action{Kind: MarkAdmitted, Claim: c, Group: s.Deployment.UID, Event: v1alpha1.Event{
		Reason:  ReasonWaitingForMachine,
		Message: fmt.Sprintf("a replica of MachineDeployment %s is reserved; waiting for its Machine", c.Spec.NodeGroup),
	}}
}

func (s *Snapshot) actOnReleasing(d *Decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine, entry Assignment, entered bool) {
	id := c.Spec.ClaimID
	labelled := s.labelled(id)
	switch {
	case m == nil && labelled != nil:
		d.Actions = append(d.Actions, s.restore(c)) // its status was lost before its release
	case c.Status.Machine == nil:
		if !entered && labelled == nil && c.Status.FailedAt != nil {
			d.end(c, ReasonFailed, c.Status.Message)
		} else if !entered && labelled == nil {
			d.end(c, ReasonCancelled, "released before it had a Machine; the replica goes to the next claim or is removed")
		}
	case m != nil && Alive(m) && entered && entry.UID == m.UID && ClaimOf(m) == "" && !HasFinalizer(m):
		// The label first: a Machine that is released must be recognizable as this claim's.
		d.Actions = append(d.Actions, Action{Kind: Label, Claim: c, Machine: m})
	case m != nil && Alive(m) && !entered && ClaimOf(m) == id && s.handsOver(m) && !s.releasing(m.UID):
		d.Actions = append(d.Actions, Action{Kind: Unbind, Claim: c, Machine: m})
	case !entered && (labelled == nil || !Alive(labelled) && DeletionCompleted(labelled)) && (m == nil || Alive(m) || DeletionCompleted(m)):
		reason, message := ReasonReleased, "its instance and its Node are gone"
		if c.Status.FailedAt != nil {
			reason, message = ReasonFailed, c.Status.Message
		}
		switch {
		case m != nil && Alive(m) && HasNode(m) && m.Annotations[v1alpha1.HandedOverAnnotation] != id:
			reason, message = ReasonMachineLost, "another actor removed the claim's label from its Machine"
		case m != nil && Alive(m):
			reason, message = ReasonHandedOver, "its Machine had no Node yet and was kept for the next claim"
			if c.Status.Reason == ReasonLate {
				message = c.Status.Message + "; the Machine is kept for the next claim"
			}
		}
		d.end(c, reason, message)
	case m != nil && !Alive(m):
		s.explainDeletion(d, c, m)
	}
}

// slowDeletion is how long a deletion may take before the claim reports what it waits for.
const slowDeletion = time.Minute

// explainDeletion records on the claim what the deletion of its Machine waits for, as reported by
// Cluster API, once the deletion takes long.
func (s *Snapshot) explainDeletion(d *Decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine) {
	reason, message := DeletingReason(m), deletingMessage(m)
	if reason == "" || HasFinalizer(m) && DeletionCompleted(m) || reason == c.Status.Reason || c.Status.FailedAt != nil {
		return // the reason of the failure matters more
	}
	if left := slowDeletion - s.Now.Sub(m.DeletionTimestamp.Time); left > 0 {
		d.Wake(left)
		return
	}
	d.Actions = append(d.Actions, Action{Kind: Explain, Claim: c, Event: v1alpha1.Event{
		Reason: reason, Message: "Machine " + m.Name + " has been deleting for more than a minute: " + cmp.Or(message, reason),
	}})
}

func (s *Snapshot) releasing(uid types.UID) bool {
	if s.Ledger == nil {
		return false
	}
	_, yes := s.Ledger.Releasing[uid]
	return yes
}

// explainOnce records on the claim what it waits for, unless its status has that reason and message
// already.
func (d *Decision) explainOnce(c *v1alpha1.MachineClaim, reason, message string) {
	if c.Status.Reason != reason || c.Status.Message != message {
		d.Actions = append(d.Actions, Action{Kind: Explain, Claim: c, Event: v1alpha1.Event{Reason: reason, Message: message}})
	}
}

func (d *Decision) end(c *v1alpha1.MachineClaim, reason, message string) {
	d.Actions = append(d.Actions, Action{Kind: End, Claim: c, Event: v1alpha1.Event{Reason: reason, Message: message}})
}

// actOnMachines adds the writes that the snapshot's ledger permits on Machines that are being
// released or returned.
func (s *Snapshot) actOnMachines(d *Decision) {
	for _, m := range slices.Concat(s.Machines, s.Strays) {
		var r Release
		recorded := false
		if s.Ledger != nil {
			r, recorded = s.Ledger.Releasing[m.UID]
		}
		ours := HasFinalizer(m) || hasHook(m)
		stopped := HasFinalizer(m) && DeletionCompleted(m) || hasHook(m) && !HasFinalizer(m)
		switch {
		case !recorded && s.returning(m):
			d.Actions = append(d.Actions, Action{Kind: Return, Machine: m})
		case !recorded && s.Ledger != nil && Alive(m) && HasFinalizer(m) && s.boundTo(m) != nil:
			d.Actions = append(d.Actions, Action{Kind: Keep, Claim: s.boundTo(m), Machine: m})
		case recorded && !r.Decremented && Alive(m) && s.mayDelete(m) && !s.Group.Has(eligibility.Paused):
			d.Actions = append(d.Actions, Action{Kind: BeginDelete, Machine: m, Release: r})
		case recorded && r.Decremented && ours && s.reconciledFor(m, r.Generation):
			d.Actions = append(d.Actions, Action{Kind: RemoveFinalizer, Machine: m})
		case stopped && s.deleted():
			// Cluster API deletes the whole group, creates no replacements, and waits for this
			// Machine.
			d.Actions = append(d.Actions, Action{Kind: RemoveFinalizer, Machine: m})
		case !recorded && stopped && s.reconciledFor(m, s.Deployment.Generation):
			// The ledger that the finalizer was added for is lost. It is not known whether replicas
			// were decremented, so they are not lowered. If they were not, the replacement is a
			// spare.
			d.Actions = append(d.Actions, Action{Kind: RemoveFinalizer, Machine: m})
		case !recorded && Alive(m) && s.repairDiffers(m):
			d.Actions = append(d.Actions, Action{Kind: MarkRepair, Claim: s.boundTo(m), Machine: m})
		}
	}
}

// boundTo returns the claim that the Machine is bound to. It is nil if there is none, or if its
// release was requested.
func (s *Snapshot) boundTo(m *clusterv1.Machine) *v1alpha1.MachineClaim {
	c := s.Claim(ClaimOf(m))
	if c == nil || c.CurrentPhase() != v1alpha1.PhaseBound || c.Status.Machine == nil || c.Status.Machine.UID != m.UID {
		return nil
	}
	return c
}
