package protocol

import (
	"fmt"
	"maps"
	"math"
	"slices"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// fold returns a copy of the ledger into which changes by others are folded: a human (or GitOps) who raised replicas raised
// the floor, one who lowered them lowered it, and one who lowered them below what is claimed froze the group.
func (s *Snapshot) fold(d *Decision) *Ledger {
	marked := s.Group.Has(eligibility.ReplicasLowered)
	var next *Ledger
	if s.Ledger == nil {
		next = s.rebuild()
		next.Lowered = marked
	} else {
		next = s.Ledger.Clone()
	}
	if s.Group.SizesUsable() {
		next.Min = s.Group.Min
	}
	switch {
	case marked:
		next.Lowered = true
		return next
	case next.Lowered:
		// A person cleared it. What the user owns was not lowered with it: that replicas went below what is claimed tells nothing
		// about how many of the rest were meant.
		next.Lowered, next.LastReplicas = false, s.Group.Replicas
		return next
	case s.Group.Replicas < s.claimed(next) && (s.Ledger == nil || s.Group.Replicas < next.LastReplicas):
		next.Lowered = true
		d.Lowered, d.Urgent = s.describeLowering(next), true
		return next
	}
	if s.Group.Replicas > next.LastReplicas {
		// They ask for more than there is for them already, which the min size may have made more than they had asked for.
		next.Floor = max(next.Floor, min(next.Min, next.LastReplicas))
	}
	next.Floor = max(0, next.Floor+s.Group.Replicas-next.LastReplicas)
	next.LastReplicas = s.Group.Replicas
	return next
}

// claimed counts the claims that have, or are accounted for, a replica of this group and have not been released. One whose Machine
// is being deleted, or is gone, counts: replicas may have been lowered before the agent looked. Without a ledger only claims with a
// Machine count, as those that wait may have been entered since the MachineDeployment was read.
func (s *Snapshot) claimed(next *Ledger) int32 {
	var n int32
	for _, c := range s.Claims {
		_, entered := next.Pending[c.Spec.ClaimID]
		waits := entered && s.Ledger != nil && c.CurrentPhase() == v1alpha1.PhasePending
		if waits || c.CurrentPhase() == v1alpha1.PhaseBound && c.Status.Machine != nil && !s.leftBehind(c) {
			n++
		}
	}
	return n
}

// rebuild makes a ledger for a MachineDeployment that has none: because no claim was ever made on it, or because it was
// lost. Claims that had been entered record that themselves, so their replicas are not taken for the user's. No Machine of the
// user's is deleted on the strength of a rebuilt ledger: what it cannot explain is the floor.
func (s *Snapshot) rebuild() *Ledger {
	l := (&Ledger{Version: LedgerVersion}).Clone()
	room := s.newBudget(l, math.MaxInt) // what had entries before fits again
	var ours int32
	for _, m := range s.Machines {
		switch {
		case Held(m):
			// Its release goes on. Its replica may have been given back already, and is then taken as given back.
			back := DeletionCompleted(m)
			if r := (Release{Machine: m.Name, Claim: ClaimOf(m), GivenBack: back}); room.release(m.UID, r) {
				l.Releasing[m.UID] = r
			}
			if !back {
				ours++
			}
		case Alive(m) && s.orphaned(ClaimOf(m)):
			// Nobody's, or the user's.
		case !Alive(m) && !s.keeps(ClaimOf(m)):
			// Replicas may have been lowered for it: were it counted, the user might be left with less.
			if r := (Release{Machine: m.Name, Claim: ClaimOf(m), GivenBack: true}); r.Claim != "" && room.release(m.UID, r) {
				l.Releasing[m.UID] = r
			}
		default:
			ours++
		}
	}
	for _, c := range s.Claims {
		// A claim that is Releasing counts by its label alone: without it, its Machine may have been handed over to a claim
		// that is counted itself.
		entered := c.Status.Phase == v1alpha1.PhasePending || c.Status.Phase == v1alpha1.PhaseBound && c.Status.Machine != nil
		if !entered || s.labelled(c.Spec.ClaimID) != nil {
			continue
		}
		named := Named{}
		if ref := c.Status.Machine; ref != nil {
			m := s.machine(ref.UID)
			_, releasing := l.Releasing[ref.UID]
			if m == nil || !Alive(m) || ClaimOf(m) != "" || releasing {
				continue
			}
			named = Named{Machine: ref.Name, UID: ref.UID}
		} else if m := s.named(c.Spec.Adopt); m != nil {
			named = Named{Machine: m.Name, UID: m.UID, Adopted: true}
		}
		if room.claim(c.Spec.ClaimID, named) {
			l.Pending[c.Spec.ClaimID] = named
		}
		ours++
	}
	l.Floor = max(0, s.Group.Replicas-ours)
	l.LastReplicas = s.Group.Replicas
	return l
}

// keeps reports whether the claim of a label, possibly empty, has not been released.
func (s *Snapshot) keeps(claimID string) bool {
	c := s.Claim(claimID)
	return c != nil && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound)
}

// dropEntries removes pending entries that have done their service: the claim's Machine is labelled, or the claim needs
// none any more. The replica of the latter becomes a spare by accounting.
func (s *Snapshot) dropEntries(next *Ledger) {
	drop := func(id string, named Named) {
		delete(next.Pending, id)
		if named.Adopted && s.labelled(id) == nil {
			next.Floor++ // the claim never got the user's Machine: it, or what replaces it, is the user's again
		}
	}
	for id, named := range next.Pending {
		c := s.Claim(id)
		if c == nil {
			drop(id, named)
			continue
		}
		var promised *clusterv1.Machine
		if c.Status.Machine != nil {
			promised = s.machine(c.Status.Machine.UID)
		}
		switch c.CurrentPhase() {
		case v1alpha1.PhasePending:
			// Still waiting.
		case v1alpha1.PhaseBound, v1alpha1.PhaseReleasing:
			switch {
			case promised == nil:
				drop(id, named) // cancelled before it had a Machine, or its Machine is gone
			case named.UID != promised.UID:
				drop(id, named)
			case ClaimOf(promised) == id:
				drop(id, named)
			case ClaimOf(promised) != "" || !Alive(promised) || Held(promised):
				drop(id, named) // it died before it was labelled
			}
		case v1alpha1.PhaseEnded:
			drop(id, named)
		}
	}
}

// Count is a length as a number of replicas.
func Count[T any](items []T) int32 { return clamp(len(items)) }

func clamp(n int) int32 { return int32(max(math.MinInt32, min(math.MaxInt32, n))) }

// floor is the number of machines that are not the claims' to have: what the user owns, and at least the min size.
func (s *Snapshot) floor(next *Ledger) int32 {
	return max(next.Floor, next.Min)
}

// account returns the spare: the replicas that are neither the floor's, nor accounted for by a claim, nor held by a release.
// It is computed anew each time, never added up. When there are fewer replicas than owners, replicas are raised; nothing is
// ever lowered here.
func (s *Snapshot) account(d *Decision, next *Ledger) int32 {
	used := s.floor(next) + Count(slices.Collect(maps.Keys(next.Pending)))
	for _, r := range next.Releasing {
		if !r.GivenBack {
			used++
		}
	}
	for _, m := range s.Machines {
		id := ClaimOf(m)
		if id == "" {
			continue
		}
		if _, releasing := next.Releasing[m.UID]; releasing {
			continue
		}
		if _, pending := next.Pending[id]; pending {
			continue
		}
		if Alive(m) && s.orphaned(id) {
			continue // its claim has ended or never was: nobody's
		}
		used++
	}
	spare := d.Replicas - used
	if spare < 0 && s.Group.MayGrow() && !next.Lowered {
		raised := used
		if s.Group.Max != nil {
			raised = min(raised, max(d.Replicas, *s.Group.Max))
		}
		if raised > d.Replicas {
			d.Replicas, d.Urgent = raised, true
		}
		spare = d.Replicas - used
	}
	return spare
}

// orphaned reports whether a label, possibly empty, names no claim that has a right to a Machine. A claim that the agent has
// no object of is no such claim: an ended one is not forgotten while a Machine carries its label, so its object was lost (by
// a restore, a move, a reinstalled CRD), and the claim is restored from the label.
func (s *Snapshot) orphaned(claimID string) bool {
	if claimID == "" {
		return true
	}
	c := s.Claim(claimID)
	return c != nil && c.CurrentPhase() == v1alpha1.PhaseEnded
}

// enter accounts for the claims that have no entry yet, oldest first: from the spare, else by raising replicas. It returns
// the spare that is left.
func (s *Snapshot) enter(d *Decision, next *Ledger, spare int32) int32 {
	refusal := s.refusal(d)
	spendable := spare - s.Unusable(next)
	size := d.Replicas // with those for which there is no room in the ledger yet
	crowded := s.crowded()
	for _, c := range s.Claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
			continue
		}
		if _, entered := next.Pending[id]; entered || s.labelled(id) != nil {
			continue // a claim that lost its status has its Machine already
		}
		switch {
		case refusal != nil:
			d.Refused[id] = *refusal
			continue
		case crowded != nil:
			d.Refused[id] = *crowded
			continue
		case spendable > 0:
			spendable--
			if d.admit(next, id, Named{}) {
				spare--
			}
		case s.Group.Max == nil || size < *s.Group.Max:
			size++
			if d.admit(next, id, Named{}) {
				d.Replicas++
			}
		default:
			d.Refused[id] = s.full()
		}
	}
	return spare
}

// refusal says why no claim may be made here; nil when claims may be made.
func (s *Snapshot) refusal(d *Decision) *eligibility.Refusal {
	if d.Lowered != "" { // what the annotation says from this write on
		return &eligibility.Refusal{NodeGroup: s.Deployment.Name, Reason: eligibility.ReplicasLowered, Message: d.Lowered}
	}
	return s.Group.Refusal()
}

// admit enters a claim, or has it wait when there is no room in the ledger. It reports which.
func (d *Decision) admit(next *Ledger, claimID string, named Named) bool {
	if !d.budget.claim(claimID, named) {
		d.Queued[claimID] = true
		return false
	}
	next.Pending[claimID] = named
	d.Urgent = true
	return true
}

// adopt enters the claims that take an existing Machine over, and names it for them in the same write: a spare's, else the
// user's, who then owns one less. It returns the spare that is left.
func (s *Snapshot) adopt(d *Decision, next *Ledger, spare int32) int32 {
	for _, c := range s.Claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt == "" {
			continue
		}
		if _, entered := next.Pending[id]; entered || s.labelled(id) != nil {
			continue
		}
		m, refusal := s.adoptable(c, d, next)
		if refusal != nil {
			d.Refused[id] = *refusal
			continue
		}
		named := Named{Machine: m.Name, UID: m.UID}
		switch {
		case spare > 0:
			if d.admit(next, id, named) {
				spare--
			}
		case next.Floor > next.Min:
			named.Adopted = true
			if d.admit(next, id, named) {
				next.Floor--
			}
		case s.Group.Max == nil || d.Replicas < *s.Group.Max:
			if d.admit(next, id, named) {
				d.Replicas++ // the user is still to have the min size
			}
		default:
			d.Refused[id] = s.full()
		}
	}
	return spare
}

// adoptable returns the Machine that a claim is to take over, or why it cannot have it.
func (s *Snapshot) adoptable(c *v1alpha1.MachineClaim, d *Decision, next *Ledger) (*clusterv1.Machine, *eligibility.Refusal) {
	if refusal := s.refusal(d); refusal != nil && (!s.Group.MayGrow() || d.Lowered != "") {
		return nil, refusal
	}
	refuse := func(why string) (*clusterv1.Machine, *eligibility.Refusal) {
		return nil, &eligibility.Refusal{
			NodeGroup: s.Deployment.Name, Reason: eligibility.NotAdoptable, Message: "Machine " + c.Spec.Adopt + " " + why,
		}
	}
	m := s.named(c.Spec.Adopt)
	if m == nil {
		return refuse("does not exist in this node group")
	}
	_, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]
	switch _, releasing := next.Releasing[m.UID]; {
	case !s.orphaned(ClaimOf(m)) || next.Promised()[m.UID]:
		return refuse("has a claim already")
	case releasing || Held(m) || !Alive(m) || marked:
		return refuse("is being deleted")
	case ClaimOf(m) != "":
		return refuse("still carries the label of a claim that has ended; take the label off first")
	}
	return m, nil
}

func (s *Snapshot) full() eligibility.Refusal { return FullGroup(s.Deployment.Name, *s.Group.Max) }

// FullGroup is the refusal of a node group whose replicas are at its max size.
func FullGroup(name string, size int32) eligibility.Refusal {
	return eligibility.Refusal{
		NodeGroup: name, Reason: eligibility.AtMaxSize, Message: fmt.Sprintf("replicas are at the max size %d", size),
	}
}

// waiting counts the claims that a Machine is still to be named for.
func (s *Snapshot) waiting(next *Ledger) int {
	n := 0
	for id, named := range next.Pending {
		if c := s.Claim(id); named.UID == "" && c != nil && c.Spec.Adopt == "" {
			n++
		}
	}
	return n
}

// coverShortage raises replicas when Cluster API has made every Machine it was asked for and claims still wait: the Machine
// that was meant for them joined before it could be promised, and is nobody's now.
func (s *Snapshot) coverShortage(d *Decision, next *Ledger) {
	waiting := s.waiting(next)
	if waiting == 0 || d.Replicas != s.Group.Replicas || !s.settled() || s.refusal(d) != nil {
		return
	}
	free := s.free(next)
	usable := 0
	for _, m := range free {
		// One that may have a Node that Cluster API has not seen is waited for: it is usable, or not, once that is stated.
		if s.usable(m) || !HasNode(m) && m.Spec.ProviderID != "" && !s.registered(m) && !s.hopeless(m) {
			usable++
		}
	}
	floorNeeds := max(0, int(s.floor(next))-(len(free)-usable))
	short := clamp(waiting - (usable - floorNeeds))
	room := short
	if s.Group.Max != nil {
		room = min(short, max(0, *s.Group.Max-d.Replicas))
	}
	if room > 0 {
		d.Replicas += room
		d.Urgent = true
	}
	d.Unmet = max(0, short-room)
}
