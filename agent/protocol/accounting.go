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

// absorbUserScale begins the next ledger as a copy of the one that was read, and accounts for the
// changes that others made to replicas. If a user (or GitOps) raised replicas, the floor rises; if
// they lowered replicas, the floor falls. If replicas went below what is claimed, or a writer keeps
// setting the same number, the group is frozen.
func (b *books) absorbUserScale() {
	lowered := b.Group.Has(eligibility.ReplicasLowered)
	if b.Ledger == nil {
		b.next = b.rebuild()
		b.next.Lowered = lowered
	} else {
		b.next = b.Ledger.Clone()
	}
	if b.Group.SizesUsable() {
		b.next.Min = b.Group.Min
	}
	switch {
	case lowered:
		b.next.Lowered = true
		return
	case b.next.Lowered:
		// A person removed the annotation. The floor is unchanged: a write below what is claimed
		// does not show how many of the user's Machines it was meant to remove.
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
		// The user asks for more than they have already.
		b.next.Floor = b.userOwned(b.next.LastReplicas)
	}
	b.next.Floor = max(0, b.next.Floor+b.Group.Replicas-b.next.LastReplicas)
	b.next.LastReplicas = b.Group.Replicas
}

// userOwned returns how many of the given replicas belong to the user: the floor, or the min size
// as far as there are enough replicas for it.
func (b *books) userOwned(replicas int32) int32 {
	others := b.labelledAlone() + b.unreleased()
	for id := range b.next.Pending {
		if b.keeps(id) { // the replica of any other entry becomes a spare
			others++
		}
	}
	return max(b.next.Floor, min(b.next.Min, replicas-others))
}

// labelledAlone counts the Machines that own a replica by their label alone: the ledger has neither
// an entry of their claim nor a record of the Machine. A Machine that is being deleted counts until
// it is gone, because nothing replaces it before that.
func (b *books) labelledAlone() int32 {
	return Count(lo.Filter(b.Machines, func(m *clusterv1.Machine, _ int) bool {
		id := ClaimOf(m)
		_, pending := b.next.Pending[id]
		_, released := b.next.Releasing[m.UID]
		return id != "" && !pending && !released && !b.returned(m.UID) && (!Alive(m) || !b.orphaned(id))
	}))
}

// claimed counts the claims that own a replica of this group and have not been released. If waiting
// is set, claims that wait for a Machine count too, once they are in the ledger. A claim whose
// Machine is being deleted or is gone counts, because replicas may have been lowered before the
// agent looked. Without a ledger, the check for lowered replicas leaves out waiting claims: they
// may have been entered after the MachineDeployment was read.
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

// restorable counts the claims that own a Machine only by its label, because they lost their status
// or their object.
func (b *books) restorable() int32 {
	return Count(lo.Filter(b.Machines, func(m *clusterv1.Machine, _ int) bool {
		c := b.Claim(ClaimOf(m))
		_, entered := b.next.Pending[ClaimOf(m)]
		owns := b.class(m) == claimed || b.class(m) == going && c != nil // as [books.claimed] counts
		return owns && !entered && (c == nil || c.CurrentPhase() == v1alpha1.PhasePending)
	}))
}

// rebuild makes a ledger for a MachineDeployment that has none, either because no claim was ever
// made on it or because the ledger was lost. Claims record in their status that they were entered,
// so their replicas are not mistaken for the user's. Whatever a rebuilt ledger cannot explain is
// the floor, so it never causes one of the user's Machines to be deleted.
func (s *Snapshot) rebuild() *Ledger {
	l := (&Ledger{}).Clone()
	room := s.newBudget(l, math.MaxInt) // what had entries before fits again
	var ours int32
	for _, m := range s.Machines {
		switch {
		case HasFinalizer(m):
			// Its release goes on. If replicas may have been decremented for it already, it is
			// recorded so.
			back := DeletionCompleted(m)
			if r := (Release{Machine: m.Name, Claim: ClaimOf(m), Decremented: back}); room.release(m.UID, r) {
				l.Releasing[m.UID] = r
			}
			if !back {
				ours++
			}
		case Alive(m) && s.orphaned(ClaimOf(m)):
			// Unowned, or the user's.
		case !Alive(m) && !s.keeps(ClaimOf(m)):
			// Replicas may have been lowered for it. Counting it could leave the user with fewer
			// replicas.
			if r := (Release{Machine: m.Name, Claim: ClaimOf(m), Decremented: true}); r.Claim != "" && room.release(m.UID, r) {
				l.Releasing[m.UID] = r
			}
		default:
			ours++
		}
	}
	for _, c := range s.Claims {
		// A Releasing claim counts only by its label. Without the label, its Machine may have been
		// handed over to another claim, which counts itself.
		entered := c.Status.Phase == v1alpha1.PhasePending || c.Status.Phase == v1alpha1.PhaseBound && c.Status.Machine != nil
		if !entered || s.labelled(c.Spec.ClaimID) != nil {
			continue
		}
		entry := Assignment{}
		if ref := c.Status.Machine; ref != nil {
			m := s.machine(ref.UID)
			_, releasing := l.Releasing[ref.UID]
			if m == nil || !Alive(m) || ClaimOf(m) != "" || releasing {
				continue
			}
			entry = Assignment{Machine: ref.Name, UID: ref.UID}
		} else if m := s.machineNamed(c.Spec.Adopt); m != nil {
			entry = Assignment{Machine: m.Name, UID: m.UID, Adopted: true}
		}
		if room.claim(c.Spec.ClaimID, entry) {
			l.Pending[c.Spec.ClaimID] = entry
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

// keeps reports whether the claim of a label exists and has not been released. The label may be
// empty.
func (s *Snapshot) keeps(claimID string) bool {
	c := s.Claim(claimID)
	return c != nil && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound)
}

// dropEntries removes pending entries that are no longer needed: the claim's Machine is labelled,
// or the claim needs no Machine any more. In the latter case, accounting makes the replica a spare.
func (b *books) dropEntries() {
	drop := func(id string, entry Assignment) {
		delete(b.next.Pending, id)
		if entry.Adopted && b.labelled(id) == nil {
			b.next.Floor++ // the claim never got the user's Machine: it, or its replacement, is the user's again
		}
	}
	for id, entry := range b.next.Pending {
		c := b.Claim(id)
		if c == nil {
			drop(id, entry)
			continue
		}
		var assigned *clusterv1.Machine
		if c.Status.Machine != nil {
			assigned = b.machine(c.Status.Machine.UID)
		}
		switch c.CurrentPhase() {
		case v1alpha1.PhasePending:
			// Still waiting.
		case v1alpha1.PhaseBound, v1alpha1.PhaseReleasing:
			switch {
			case assigned == nil:
				drop(id, entry) // cancelled before it had a Machine, or its Machine is gone
			case entry.UID != assigned.UID:
				drop(id, entry)
			case ClaimOf(assigned) == id:
				drop(id, entry)
			case ClaimOf(assigned) != "" || !Alive(assigned) || HasFinalizer(assigned):
				drop(id, entry) // the Machine died before it was labelled
			}
		case v1alpha1.PhaseEnded:
			drop(id, entry)
		}
	}
	b.next.Marking = lo.Filter(b.next.Marking, func(uid types.UID, _ int) bool {
		m := b.machine(uid)
		return m != nil && b.mayMark(m)
	})
}

// Count returns a length as a number of replicas.
func Count[T any](items []T) int32 { return clamp(len(items)) }

func clamp(n int) int32 { return int32(max(math.MinInt32, min(math.MaxInt32, n))) }

// raiseToOwned raises replicas when owners own more of them than there are. It never lowers
// replicas.
func (b *books) raiseToOwned() {
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

// orphaned reports whether a label, possibly empty, names no claim with a right to a Machine. A
// label whose MachineClaim is missing is not orphaned: ended claims are kept while a Machine
// carries their label, so the object must have been lost (restore, move, reinstalled CRD) and is
// recreated from the label.
func (s *Snapshot) orphaned(claimID string) bool {
	if claimID == "" {
		return true
	}
	c := s.Claim(claimID)
	return c != nil && c.CurrentPhase() == v1alpha1.PhaseEnded
}

// readmit enters claims again whose status records that they were entered, but whose entries a
// person removed from the ledger. Their replicas still exist, even if without a usable Machine, and
// belong to no other claim.
func (b *books) readmit() {
	for _, c := range b.Claims {
		_, entered := b.next.Pending[c.Spec.ClaimID]
		if c.Status.Phase != v1alpha1.PhasePending || c.Spec.Adopt != "" || entered || b.labelled(c.Spec.ClaimID) != nil {
			continue
		}
		if b.spare() > 0 && !b.next.Lowered {
			b.admit(c.Spec.ClaimID, Assignment{})
		}
	}
}

// admitWaiting accounts for the claims that have no entry yet, oldest first: from the spare,
// otherwise by raising replicas.
func (b *books) admitWaiting() {
	refusal := b.refusal()
	spendable := b.spare() - b.unusable(b.settled())
	size := b.d.Replicas // including those that the ledger has no room for yet
	crowded := b.crowded()
	for _, c := range b.Claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
			continue
		}
		if _, entered := b.next.Pending[id]; entered || b.d.Queued[id] || b.labelled(id) != nil {
			continue // a claim that lost its status already has its Machine
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
			b.admit(id, Assignment{})
		case b.room(size):
			size++
			if b.admit(id, Assignment{}) {
				b.d.Replicas++
			}
		case c.Status.Phase == v1alpha1.PhasePending && b.leaves():
			// It was entered before. Its replica is taken up by Machines whose release records were
			// removed from the ledger too, until those are gone.
		default:
			b.d.Refused[id] = b.full()
		}
	}
}

// leaves reports whether a Machine with a claim's label is being deleted without a recorded
// release, and so counts until it is gone.
func (b *books) leaves() bool {
	return slices.ContainsFunc(b.Machines, func(m *clusterv1.Machine) bool { return b.class(m) == going && ClaimOf(m) != "" })
}

// mayGrow reports whether replicas may be raised for owners that lack one.
func (b *books) mayGrow() bool { return b.Group.MayGrow() && !b.next.Lowered }

// mayShrink reports whether unclaimed Machines or replicas may be removed.
func (b *books) mayShrink() bool { return b.Group.MayShrink() && !b.next.Lowered }

// refusal explains to users why no claim may be made here. It is nil when claims may be made.
func (b *books) refusal() *eligibility.Refusal {
	if b.d.Lowered != "" { // the annotation's value from this write on
		return &eligibility.Refusal{NodeGroup: b.Deployment.Name, Reason: eligibility.ReplicasLowered, Message: b.d.Lowered}
	}
	return b.Group.Refusal()
}

// adopt enters the claims that take over an existing Machine, and assigns it to them in the same
// write. The replica comes from a spare if there is one, otherwise from the floor, which falls by
// one. If the floor is at the min size, replicas are raised instead.
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
		entry := Assignment{Machine: m.Name, UID: m.UID}
		switch {
		case b.spare() > 0:
			b.admit(id, entry)
		case b.next.Floor > b.next.Min:
			entry.Adopted = true
			if b.admit(id, entry) {
				b.next.Floor--
			}
		case c.Spec.AdoptAboveMinSize:
			b.d.Refused[id] = eligibility.Refusal{
				NodeGroup: b.Deployment.Name, Reason: eligibility.NotAdoptable, Message: fmt.Sprintf(
					"Machine %s belongs to the floor, which is at the min size %d already; lower metadata.annotations[%s]",
					m.Name, b.next.Min, clusterv1.AutoscalerMinSizeAnnotation),
			}
		case b.room(b.d.Replicas):
			if b.admit(id, entry) {
				b.d.Replicas++ // the user keeps the min size
			}
		default:
			b.d.Refused[id] = b.full()
		}
	}
}

// adoptable returns the Machine that a claim is to take over, or the reason why it cannot have it.
// A Machine that is marked to be removed next by Cluster API may be adopted, unless the claim
// forbids raising replicas: the process that marked it may have stopped before it lowered replicas,
// as can happen when another provider is replaced. The claim's label takes the mark off.
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
	m := b.machineNamed(c.Spec.Adopt)
	if m == nil {
		return refuse("does not exist in this node group")
	}
	switch b.class(m) {
	case claimed, assigned:
		return refuse("already has a claim")
	case releasing, decremented, going, stranded:
		return refuse("is being deleted")
	case fresh, suspect, failed, inhabited, ofFloor:
	}
	if _, deleteRequested := m.Annotations[clusterv1.DeleteMachineAnnotation]; deleteRequested && c.Spec.AdoptAboveMinSize {
		return refuse("is to be removed next; remove the annotation " + clusterv1.DeleteMachineAnnotation + " first")
	}
	if b.returned(m.UID) {
		return refuse("is being returned to the user by another claim")
	}
	if ClaimOf(m) != "" {
		return refuse("still carries the label of a claim that has ended; remove the label first")
	}
	return m, nil
}

func (s *Snapshot) full() eligibility.Refusal { return FullGroup(s.Deployment.Name, *s.Group.Max) }

// FullGroup returns the refusal of a node group whose replicas are at its max size.
func FullGroup(name string, size int32) eligibility.Refusal {
	return eligibility.Refusal{
		NodeGroup: name, Reason: eligibility.AtMaxSize, Message: fmt.Sprintf("replicas are at the max size %d", size),
	}
}

// coverShortage raises replicas when Cluster API has made every Machine that was ordered and claims
// still wait: the Machine meant for them joined before it could be assigned, so no claim may have
// it, unless its holder reports soon that nothing runs on it.
func (b *books) coverShortage() {
	waiting := b.waiting()
	if waiting == 0 {
		return
	}
	free := b.free()
	for _, m := range free {
		if b.undecided(m) {
			b.d.Wake(b.reportDueIn(m)) // no event tells that no report came
			b.d.awaits = "it is not certain yet whether a Machine that joined just now can be assigned"
		}
	}
	if b.d.Replicas != b.Group.Replicas || !b.settled() || !b.mayGrow() {
		return
	}
	if b.d.unfit = b.unfit(free); b.d.unfit != "" {
		return
	}
	usable := lo.CountBy(free, func(m *clusterv1.Machine) bool {
		return b.class(m) == fresh || b.class(m) == suspect // suspect: its Node decides whether it is usable
	})
	floorNeeds := max(0, int(b.floor())-(len(free)-usable))
	short := clamp(waiting - (usable - floorNeeds))
	room := short
	switch {
	case b.Quota != "":
		room = 0 // there would be no Machine
		if short > 0 {
			b.d.Wake(quotaLook) // nothing else tells that the quota has room again
		}
	case b.Group.Max != nil:
		room = min(short, max(0, *b.Group.Max-b.d.Replicas))
	}
	if room > 0 {
		b.d.reordered = "its Machine joined before it could be assigned, and another one is ordered"
		b.covering = min(room, b.ready(waiting))
		b.d.Replicas += b.covering
		b.d.Urgent = b.d.Urgent || b.covering > 0
	}
	b.d.Unmet = max(0, short-room)
}

// unfit returns why no other Machines are ordered for waiting claims: something makes each Machine
// one that no claim may have, so the next would be the same. That is an annotation of the template,
// or what has marked the last ones that no claim may have, one more than claims wait. It is empty
// if there is no such reason.
func (b *books) unfit(free []*clusterv1.Machine) string {
	for _, mark := range []string{v1alpha1.FloorAnnotation, clusterv1.DeleteMachineAnnotation, v1alpha1.NodeRegisteredAtAnnotation} {
		if _, set := b.Deployment.Spec.Template.Annotations[mark]; set {
			return fmt.Sprintf("a Machine with the annotation %s cannot be claimed; remove the annotation from the MachineDeployment's template", mark)
		}
	}
	waiting := b.waitingClaims()
	first := slices.MinFunc(waiting, func(x, y *v1alpha1.MachineClaim) int { return x.CreationTimestamp.Compare(y.CreationTimestamp.Time) })
	last := lo.Filter(free, func(m *clusterv1.Machine, _ int) bool {
		return b.class(m) == inhabited && !m.CreationTimestamp.Before(&first.CreationTimestamp)
	})
	if len(last) <= len(waiting) {
		return ""
	}
	slices.SortFunc(last, func(x, y *clusterv1.Machine) int { return y.CreationTimestamp.Compare(x.CreationTimestamp.Time) })
	last = last[:len(waiting)+1]
	for _, mark := range []string{v1alpha1.FloorAnnotation, clusterv1.DeleteMachineAnnotation} {
		if lo.EveryBy(last, func(m *clusterv1.Machine) bool { _, marked := m.Annotations[mark]; return marked }) {
			return fmt.Sprintf("no claim may have the last %d Machines because of their annotation %s; remove it, and find out what sets it", len(last), mark)
		}
	}
	return ""
}
