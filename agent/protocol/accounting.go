package protocol

import (
	"fmt"
	"math"
	"slices"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// fold begins the next ledger: the one that was read, with changes by others folded in: a human (or GitOps) who raised replicas raised
// the floor, one who lowered them lowered it, and one who lowered them below what is claimed, or who keeps writing one number, froze the group.
func (b *books) fold() {
	marked := b.Group.Has(eligibility.ReplicasLowered)
	if b.Ledger == nil {
		b.next = b.rebuild()
		b.next.Lowered = marked
	} else {
		b.next = b.Ledger.Clone()
	}
	if b.Group.SizesUsable() {
		b.next.Min = b.Group.Min
	}
	switch {
	case marked:
		b.next.Lowered = true
		return
	case b.next.Lowered:
		// A person cleared it. What the user owns was not lowered with it: that replicas went below what is claimed tells nothing
		// about how many of the rest were meant.
		b.next.Lowered, b.next.LastReplicas = false, b.Group.Replicas
		b.next.Written = &Written{Replicas: b.Group.Replicas}
		return
	case b.Group.Replicas < b.claimed(b.Ledger != nil) && (b.Ledger == nil || b.Group.Replicas < b.next.LastReplicas):
		b.freeze(ReasonReplicasLowered, b.describeLowering())
		return
	case b.Group.Replicas != b.next.LastReplicas && b.writtenBack():
		b.freeze(ReasonReplicasRestored, b.describeRestoring())
		return
	}
	if b.Group.Replicas > b.next.LastReplicas {
		// They ask for more than there is for them already.
		b.next.Floor = b.users(b.next.LastReplicas)
	}
	b.next.Floor = max(0, b.next.Floor+b.Group.Replicas-b.next.LastReplicas)
	b.next.LastReplicas = b.Group.Replicas
}

// users returns how many of the given replicas belong to the user: the floor, or the min size as far as replicas allow.
func (b *books) users(replicas int32) int32 {
	others := b.labelledAlone() + b.unreleased()
	for id := range b.next.Pending {
		if b.keeps(id) { // the replica of any other entry becomes a spare
			others++
		}
	}
	return max(b.next.Floor, min(b.next.Min, replicas-others))
}

// labelledAlone counts the Machines that have a replica by their label alone: the ledger has neither an entry of their claims nor a record of
// them. One that is being deleted counts until it is gone, as nothing replaces it before.
func (b *books) labelledAlone() int32 {
	return Count(lo.Filter(b.Machines, func(m *clusterv1.Machine, _ int) bool {
		id := ClaimOf(m)
		_, pending := b.next.Pending[id]
		_, released := b.next.Releasing[m.UID]
		return id != "" && !pending && !released && !b.returned(m.UID) && (!Alive(m) || !b.orphaned(id))
	}))
}

// claimed counts the claims that have, or if waiting are accounted for, a replica of this group and have not been released. One whose
// Machine is being deleted, or is gone, counts: replicas may have been lowered before the agent looked. Where there was no ledger, those
// that wait may have been entered since the MachineDeployment was read.
func (b *books) claimed(waiting bool) int32 {
	var n int32
	for _, c := range b.Claims {
		_, entered := b.next.Pending[c.Spec.ClaimID]
		waits := waiting && entered && c.CurrentPhase() == v1alpha1.PhasePending
		if waits || c.CurrentPhase() == v1alpha1.PhaseBound && c.Status.Machine != nil && !b.leftBehind(c) && !b.returned(c.Status.Machine.UID) {
			n++
		}
	}
	return n
}

// restorable counts the claims that have a Machine by its label alone, as they lost their status, or their object.
func (b *books) restorable() int32 {
	return Count(lo.Filter(b.Machines, func(m *clusterv1.Machine, _ int) bool {
		c := b.Claim(ClaimOf(m))
		_, entered := b.next.Pending[ClaimOf(m)]
		return b.class(m) == claimed && !entered && (c == nil || c.CurrentPhase() == v1alpha1.PhasePending)
	}))
}

// rebuild makes a ledger for a MachineDeployment that has none: because no claim was ever made on it, or because it was
// lost. Claims that had been entered record that themselves, so their replicas are not taken for the user's. No Machine of the
// user's is deleted on the strength of a rebuilt ledger: what it cannot explain is the floor.
func (s *Snapshot) rebuild() *Ledger {
	l := (&Ledger{}).Clone()
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
	if ours == 0 {
		l.Written = &Written{Replicas: s.Group.Replicas} // the user's
	}
	return l
}

// keeps reports whether the claim of a label, possibly empty, has not been released.
func (s *Snapshot) keeps(claimID string) bool {
	c := s.Claim(claimID)
	return c != nil && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound)
}

// dropEntries removes pending entries that have done their service: the claim's Machine is labelled, or the claim needs
// none any more. The replica of the latter becomes a spare by accounting.
func (b *books) dropEntries() {
	drop := func(id string, named Named) {
		delete(b.next.Pending, id)
		if named.Adopted && b.labelled(id) == nil {
			b.next.Floor++ // the claim never got the user's Machine: it, or what replaces it, is the user's again
		}
	}
	for id, named := range b.next.Pending {
		c := b.Claim(id)
		if c == nil {
			drop(id, named)
			continue
		}
		var promised *clusterv1.Machine
		if c.Status.Machine != nil {
			promised = b.machine(c.Status.Machine.UID)
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
	b.next.Marking = lo.Filter(b.next.Marking, func(uid types.UID, _ int) bool {
		m := b.machine(uid)
		return m != nil && b.mayMark(m)
	})
}

// Count is a length as a number of replicas.
func Count[T any](items []T) int32 { return clamp(len(items)) }

func clamp(n int) int32 { return int32(max(math.MinInt32, min(math.MaxInt32, n))) }

// meet raises replicas when there are fewer of them than owners. Nothing is ever lowered here.
func (b *books) meet() {
	b.labelOnly = b.labelledAlone()
	if owed := b.used(); owed > b.d.Replicas && b.mayGrow() {
		if b.Group.Max != nil {
			owed = min(owed, max(b.d.Replicas, *b.Group.Max))
		}
		if owed > b.d.Replicas {
			b.d.Replicas, b.d.Urgent = owed, true
		}
	}
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

// readmit enters the claims again that say that they were entered, and whose entries were taken out of the ledger by a person: their replicas
// are still there, if not with Machines that they may have, and no other claim has them.
func (b *books) readmit() {
	for _, c := range b.Claims {
		_, entered := b.next.Pending[c.Spec.ClaimID]
		if c.Status.Phase != v1alpha1.PhasePending || c.Spec.Adopt != "" || entered || b.labelled(c.Spec.ClaimID) != nil {
			continue
		}
		if b.spare() > 0 && !b.next.Lowered {
			b.admit(c.Spec.ClaimID, Named{})
		}
	}
}

// enter accounts for the claims that have no entry yet, oldest first: from the spare, else by raising replicas.
func (b *books) enter() {
	refusal := b.refusal()
	spendable := b.spare() - b.unusable()
	size := b.d.Replicas // with those for which there is no room in the ledger yet
	crowded := b.crowded()
	for _, c := range b.Claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
			continue
		}
		if _, entered := b.next.Pending[id]; entered || b.d.Queued[id] || b.labelled(id) != nil {
			continue // a claim that lost its status has its Machine already
		}
		switch {
		case refusal != nil:
			b.d.Refused[id] = *refusal
			continue
		case crowded != nil:
			b.d.Refused[id] = *crowded
			continue
		case spendable > 0:
			spendable--
			b.admit(id, Named{})
		case b.room(size):
			size++
			if b.admit(id, Named{}) {
				b.d.Replicas++
			}
		case c.Status.Phase == v1alpha1.PhasePending && b.leaves():
			// It was entered: what takes its replica's place are Machines whose releases were taken out of the ledger with it, until they are gone.
		default:
			b.d.Refused[id] = b.full()
		}
	}
}

// leaves reports whether a Machine with a claim's label is being deleted without a release, and so counts until it is gone.
func (b *books) leaves() bool {
	return slices.ContainsFunc(b.Machines, func(m *clusterv1.Machine) bool { return b.class(m) == going && ClaimOf(m) != "" })
}

// mayGrow reports whether replicas may be raised for what is owed.
func (b *books) mayGrow() bool { return b.Group.MayGrow() && !b.next.Lowered }

// mayShrink reports whether Machines, or replicas, that nobody claims may be removed.
func (b *books) mayShrink() bool { return b.Group.MayShrink() && !b.next.Lowered }

// refusal says to people why no claim may be made here; nil when claims may be made.
func (b *books) refusal() *eligibility.Refusal {
	if b.d.Lowered != "" { // what the annotation says from this write on
		return &eligibility.Refusal{NodeGroup: b.Deployment.Name, Reason: eligibility.ReplicasLowered, Message: b.d.Lowered}
	}
	return b.Group.Refusal()
}

// adopt enters the claims that take an existing Machine over, and names it for them in the same write: a spare's, else the
// user's, who then owns one less.
func (b *books) adopt() {
	for _, c := range b.Claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt == "" {
			continue
		}
		if _, entered := b.next.Pending[id]; entered || b.labelled(id) != nil {
			continue
		}
		m, refusal := b.adoptable(c)
		if refusal != nil {
			b.d.Refused[id] = *refusal
			continue
		}
		named := Named{Machine: m.Name, UID: m.UID}
		switch {
		case b.spare() > 0:
			b.admit(id, named)
		case b.next.Floor > b.next.Min:
			named.Adopted = true
			if b.admit(id, named) {
				b.next.Floor--
			}
		case c.Spec.AdoptAboveMinSize:
			b.d.Refused[id] = eligibility.Refusal{
				NodeGroup: b.Deployment.Name, Reason: eligibility.NotAdoptable, Message: fmt.Sprintf(
					"Machine %s is one of the user's, who has no more than the min size %d; lower metadata.annotations[%s]",
					m.Name, b.next.Min, clusterv1.AutoscalerMinSizeAnnotation),
			}
		case b.room(b.d.Replicas):
			if b.admit(id, named) {
				b.d.Replicas++ // the user is still to have the min size
			}
		default:
			b.d.Refused[id] = b.full()
		}
	}
}

// adoptable returns the Machine that a claim is to take over, or why it cannot have it. One that is marked as the next that Cluster API is to
// remove may be had by a claim that needs this very Machine: the process that marked it may have stopped before it lowered replicas, as can happen
// when another provider is replaced. The claim's label takes the mark off.
func (b *books) adoptable(c *v1alpha1.MachineClaim) (*clusterv1.Machine, *eligibility.Refusal) {
	if crowded := b.crowded(); crowded != nil {
		return nil, crowded
	}
	if !b.mayGrow() {
		return nil, b.refusal()
	}
	refuse := func(why string) (*clusterv1.Machine, *eligibility.Refusal) {
		return nil, &eligibility.Refusal{
			NodeGroup: b.Deployment.Name, Reason: eligibility.NotAdoptable, Message: "Machine " + c.Spec.Adopt + " " + why,
		}
	}
	m := b.named(c.Spec.Adopt)
	if m == nil {
		return refuse("does not exist in this node group")
	}
	switch b.class(m) {
	case claimed, promised:
		return refuse("has a claim already")
	case releasing, givenBack, going, stranded:
		return refuse("is being deleted")
	case fresh, suspect, hopeless, inhabited, ofFloor:
	}
	if _, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]; marked && c.Spec.AdoptAboveMinSize {
		return refuse("is to be removed next; take the annotation " + clusterv1.DeleteMachineAnnotation + " off first")
	}
	if b.returned(m.UID) {
		return refuse("is being returned to the user by another claim")
	}
	if ClaimOf(m) != "" {
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

// coverShortage raises replicas when Cluster API has made every Machine it was asked for and claims still wait: the Machine
// that was meant for them joined before it could be promised, and is nobody's now.
func (b *books) coverShortage() {
	waiting := b.waiting()
	if waiting == 0 || b.d.Replicas != b.Group.Replicas || !b.settled() || !b.mayGrow() {
		return
	}
	free := b.free()
	usable := lo.CountBy(free, func(m *clusterv1.Machine) bool {
		return b.class(m) == fresh || b.class(m) == suspect // which is usable, or not, once its Node is stated
	})
	floorNeeds := max(0, int(b.floor())-(len(free)-usable))
	short := clamp(waiting - (usable - floorNeeds))
	room := short
	switch {
	case b.Group.Has(eligibility.QuotaExceeded):
		room = 0 // there would be no Machine
	case b.Group.Max != nil:
		room = min(short, max(0, *b.Group.Max-b.d.Replicas))
	}
	if room > 0 {
		b.d.Replicas += room
		b.covering, b.d.Urgent = room, true
	}
	b.d.Unmet = max(0, short-room)
}
