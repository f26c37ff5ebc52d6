package claims

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// decision is what the protocol asks for in a snapshot. It is computed by [decide], which has no side effects.
type decision struct {
	// ledger is the content to write, with the seq of the snapshot's; nil when the ledger is as it should be.
	ledger *Ledger
	// replicas is spec.replicas to write in the same patch.
	replicas int32
	// pause is the change to make in the same patch to Cluster API's paused annotation.
	pause pauseChange
	// lowered says that the group is frozen with the ledger write, and why; empty when it is not.
	lowered string
	// urgent says that somebody waits for the ledger write; the others are coalesced.
	urgent bool
	// refused are the pending claims that cannot be entered here, by claim id.
	refused map[string]eligibility.Refusal
	// queued are the ids of the pending claims that are entered once others have left the ledger.
	queued map[string]bool
	// budget is how much may still be added to the ledger.
	budget *budget
	// actions are the writes on other objects that the snapshot's ledger permits. They are not to be done when the ledger
	// has changed since.
	actions []action
	// spare is whether there is a spare now, for the grace period; also while its release is only decided.
	spare bool
	// chose says that the decision begins to remove Machines of its own choice.
	chose bool
	// unmet is how many claims wait for whom the max size allows no further replica.
	unmet int32
	// again is when to look again without being told; zero for not.
	again time.Duration
}

type pauseChange int

const (
	pauseKeep pauseChange = iota
	pauseSet
	pauseRemove
)

// action is one write on one object.
type action struct {
	kind    actionKind
	claim   *v1alpha1.MachineClaim
	group   types.UID // the MachineDeployment's
	machine *clusterv1.Machine
	set     *clusterv1.MachineSet
	release Release
	// uids are the Machines that a MachineSet is lowered for, counts all those that the ledger lowers under pause.
	uids, counts []types.UID
	event        v1alpha1.Event
}

type actionKind string

const (
	// markEntered notes on the claim that its replica is accounted for.
	markEntered actionKind = "mark-entered"
	// bind moves the claim from Pending to Bound and then labels its Machine.
	bind actionKind = "bind"
	// fail gives a claim's Machine up: the claim is released by the agent itself.
	fail actionKind = "fail"
	// timeOut releases a claim whose Machine is late, which the next claim may have.
	timeOut actionKind = "time-out"
	// explain notes on a pending claim why its Machine does not come.
	explain actionKind = "explain"
	// waitAnew has a claim's wait for a Machine count from now on.
	waitAnew actionKind = "wait-anew"
	// recreate makes the MachineClaim of a claim again whose object was lost, from its Machine.
	recreate actionKind = "recreate"
	// restore makes a claim Bound again that lost its status, or its object, while its Machine still carries its label.
	restore actionKind = "restore"
	// label finishes a binding that stopped before the label.
	label actionKind = "label"
	// unbind takes the label off: the Machine is handed over to whoever comes next.
	unbind actionKind = "unbind"
	// end moves the claim to Ended.
	end actionKind = "end"
	// moveOn moves a claim whose call is gone to its next candidate, and ends it when there is none that takes it.
	moveOn actionKind = "move-on"
	// noteMachine copies provider ID and Node name to the claim, for people.
	noteMachine actionKind = "note-machine"
	// hold puts the finalizer on the Machine and deletes it.
	hold actionKind = "hold"
	// hook puts the pre-terminate hook on a Machine that somebody else is deleting.
	hook actionKind = "hook"
	// letGo takes the finalizer and the hook off.
	letGo actionKind = "let-go"
	// keep takes what [hold] put there off a Machine that its claim has after all.
	keep actionKind = "keep"
	// pauseMachineSet and unpauseMachineSet keep a MachineSet from making Machines while replicas are lowered for those that
	// it has not made.
	pauseMachineSet   actionKind = "pause-machine-set"
	unpauseMachineSet actionKind = "unpause-machine-set"
	// lowerSet lowers one MachineSet while the MachineDeployment is paused.
	lowerSet actionKind = "lower-set"
)

// Reasons of claims, as reported in [v1alpha1.MachineClaimStatus].
const (
	ReasonCreated           = "Created"
	ReasonWaitingForMachine = "WaitingForMachine"
	ReasonMoved             = "Moved"
	ReasonBound             = "Bound"
	ReasonNodeJoined        = "NodeJoined"
	ReasonReleaseRequested  = "ReleaseRequested"
	ReasonCollected         = "Collected"
	ReasonOwnerMissing      = "OwnerMissing"
	ReasonReleased          = "Released"
	ReasonHandedOver        = "HandedOver"
	ReasonCancelled         = "Cancelled"
	ReasonMachineDeleting   = "MachineDeleting"
	ReasonMachineLost       = "MachineLost"
	ReasonFailed            = "Failed"
	ReasonLate              = "Late"
	ReasonNodeNotSeen       = "NodeNotSeen"
	ReasonNoRoom            = "NoRoom"
	ReasonRefused           = "Refused"
	ReasonNodeGroupGone     = "NodeGroupGone"
	ReasonNeverMade         = "NeverMade"
	ReasonWriteRefused      = "WriteRefused"
)

// ReasonReplicasLowered is the reason of the Warning event on a MachineDeployment whose replicas another writer set below what is
// claimed.
const ReasonReplicasLowered = "ReplicasLoweredBelowClaims"

// decide computes the next step of the protocol. It depends on nothing but the snapshot.
func decide(s *snapshot) *decision {
	s.prepare()
	d := &decision{replicas: s.group.Replicas, refused: map[string]eligibility.Refusal{}, queued: map[string]bool{}}
	next := s.fold(d)

	s.dropEntries(next)
	s.unname(next)
	d.budget = s.newBudget(next, cmp.Or(s.ledgerBudget, ledgerBudget))
	s.startReleases(d, next)
	s.giveBack(d, next)
	s.unpause(d, next)
	spare := s.account(d, next)
	spare = s.adopt(d, next, spare)
	spare = s.enter(d, next, spare)
	s.name(d, next)
	s.coverShortage(d, next)
	d.spare = spare > 0
	spare = s.releaseSpare(d, next, spare)
	spare = s.shrink(d, next, spare)

	next.Spare = max(0, spare)
	if next.Lowered {
		next.LastReplicas -= min(max(0, next.LastReplicas-next.Floor), s.group.Replicas-d.replicas) // given back: a difference of others' making stays
	} else {
		next.LastReplicas = d.replicas
	}
	s.dateGiveBacks(d, next)
	s.decideWrite(d, next)
	s.actOnClaims(d)
	s.actOnMachines(d)
	return d
}

// fold returns a copy of the ledger into which changes by others are folded: a human (or GitOps) who raised replicas raised
// the floor, one who lowered them lowered it, and one who lowered them below what is claimed froze the group.
func (s *snapshot) fold(d *decision) *Ledger {
	marked := s.group.Has(eligibility.ReplicasLowered)
	var next *Ledger
	if s.ledger == nil {
		next = s.rebuild()
		next.Lowered = marked
	} else {
		next = s.ledger.clone()
	}
	if s.group.SizesUsable() {
		next.Min = s.group.Min
	}
	switch {
	case marked:
		next.Lowered = true
		return next
	case next.Lowered:
		// A person cleared it. What the user owns was not lowered with it: that replicas went below what is claimed tells nothing
		// about how many of the rest were meant.
		next.Lowered, next.LastReplicas = false, s.group.Replicas
		return next
	case s.group.Replicas < s.claimed(next) && (s.ledger == nil || s.group.Replicas < next.LastReplicas):
		next.Lowered = true
		d.lowered, d.urgent = s.describeLowering(next), true
		return next
	}
	if s.group.Replicas > next.LastReplicas {
		// They ask for more than there is for them already, which the min size may have made more than they had asked for.
		next.Floor = max(next.Floor, min(next.Min, next.LastReplicas))
	}
	next.Floor = max(0, next.Floor+s.group.Replicas-next.LastReplicas)
	next.LastReplicas = s.group.Replicas
	return next
}

// claimed counts the claims that have, or are accounted for, a replica of this group and have not been released. One whose Machine
// is being deleted, or is gone, counts: replicas may have been lowered before the agent looked. Without a ledger only claims with a
// Machine count, as those that wait may have been entered since the MachineDeployment was read.
func (s *snapshot) claimed(next *Ledger) int32 {
	var n int32
	for _, c := range s.claims {
		_, entered := next.Pending[c.Spec.ClaimID]
		waits := entered && s.ledger != nil && c.CurrentPhase() == v1alpha1.PhasePending
		if waits || c.CurrentPhase() == v1alpha1.PhaseBound && c.Status.Machine != nil && !s.leftBehind(c) {
			n++
		}
	}
	return n
}

// describeLowering says what is wrong, who did it, as far as the API server knows, and what to do.
func (s *snapshot) describeLowering(next *Ledger) string {
	by := "another writer"
	if manager := s.replicasManager(); manager != "" {
		by = "field manager " + strconv.Quote(manager)
	}
	return fmt.Sprintf("%s set spec.replicas to %d, below the %d machines that are claimed, so Cluster API removed machines of its own choice; "+
		"the node group is frozen: take replicas out of the manifest, or have the tool ignore the field, then remove the annotation %s",
		by, s.group.Replicas, s.claimed(next), v1alpha1.ReplicasLoweredAnnotation)
}

// replicasManager returns the field manager that wrote spec.replicas last, "" when only the agent itself is known to have.
func (s *snapshot) replicasManager() string {
	var last *metav1.ManagedFieldsEntry
	for i := range s.md.ManagedFields {
		entry := &s.md.ManagedFields[i]
		if entry.Manager == string(fieldOwner) || entry.FieldsV1 == nil || !ownsSpecReplicas(entry.FieldsV1.GetRawBytes()) {
			continue
		}
		if last == nil || entry.Time != nil && (last.Time == nil || last.Time.Before(entry.Time)) {
			last = entry
		}
	}
	if last == nil {
		return ""
	}
	return last.Manager
}

// ownsSpecReplicas reports whether a set of managed fields contains spec.replicas.
func ownsSpecReplicas(fields []byte) bool {
	var owned struct {
		Spec struct {
			Replicas *struct{} `json:"f:replicas"`
		} `json:"f:spec"`
	}
	return json.Unmarshal(fields, &owned) == nil && owned.Spec.Replicas != nil
}

// rebuild makes a ledger for a MachineDeployment that has none: because no claim was ever made on it, or because somebody
// wiped it. Claims that had been entered say so themselves, so their replicas are not taken for the user's. No Machine of the
// user's is deleted on the strength of a rebuilt ledger: what it cannot explain is the floor.
func (s *snapshot) rebuild() *Ledger {
	l := (&Ledger{Version: ledgerVersion}).clone()
	room := s.newBudget(l, math.MaxInt) // what had entries before fits again
	var ours int32
	for _, m := range s.machines {
		switch {
		case held(m) || hooked(m):
			// Its release goes on. If it got so far that its replica may have been given back, that is taken for done.
			back := deletionCompleted(m) || waitsForHook(m)
			if r := (Release{Machine: m.Name, Claim: claimOf(m), Hook: !held(m), GivenBack: back}); room.release(m.UID, r) {
				l.Releasing[m.UID] = r
			}
			if !back {
				ours++
			}
		case alive(m) && s.orphaned(claimOf(m)):
			// Nobody's, or the user's.
		case !alive(m) && !s.keeps(claimOf(m)):
			// Our hook may have been taken off it, after its replica was given back.
			if r := (Release{Machine: m.Name, Claim: claimOf(m), GivenBack: true}); r.Claim != "" && room.release(m.UID, r) {
				l.Releasing[m.UID] = r
			}
		default:
			ours++
		}
	}
	for _, c := range s.claims {
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
			if m == nil || !alive(m) || claimOf(m) != "" || releasing {
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
	l.Floor = max(0, s.group.Replicas-ours)
	l.LastReplicas = s.group.Replicas
	return l
}

// keeps reports whether the claim of a label, possibly empty, has not been released.
func (s *snapshot) keeps(claimID string) bool {
	c := s.claim(claimID)
	return c != nil && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound)
}

// dropEntries removes pending entries that have done their service: the claim's Machine is labelled, or the claim needs
// none any more. The replica of the latter becomes a spare by accounting.
func (s *snapshot) dropEntries(next *Ledger) {
	drop := func(id string, named Named) {
		delete(next.Pending, id)
		if named.Adopted && s.labelled(id) == nil {
			next.Floor++ // the claim never got the user's Machine: it, or what replaces it, is the user's again
		}
	}
	for id, named := range next.Pending {
		c := s.claim(id)
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
			case claimOf(promised) == id:
				drop(id, named)
			case claimOf(promised) != "" || !alive(promised) || held(promised):
				drop(id, named) // it died before it was labelled
			}
		case v1alpha1.PhaseEnded:
			drop(id, named)
		}
	}
}

// unname takes a promise back whose Machine died before the claim became Bound.
func (s *snapshot) unname(next *Ledger) {
	for id, named := range next.Pending {
		if named.UID == "" {
			continue
		}
		if c := s.claim(id); c == nil || c.CurrentPhase() != v1alpha1.PhasePending {
			continue
		}
		m := s.machine(named.UID)
		if m == nil || !alive(m) || held(m) || claimOf(m) != "" && claimOf(m) != id {
			named.Machine, named.UID = "", ""
			next.Pending[id] = named
		}
	}
}

// startReleases enters the Machines of claims that are being released and that cannot be handed over. A record that names a
// Machine whose claim is not being released (somebody edited the ledger) is dropped: no claimed Machine is ever deleted.
func (s *snapshot) startReleases(d *decision, next *Ledger) {
	for uid, r := range next.Releasing {
		m := s.machine(uid)
		if m == nil || r.GivenBack {
			continue
		}
		if !alive(m) {
			s.overtake(next, uid, r, m)
			continue
		}
		if s.orphaned(claimOf(m)) {
			continue
		}
		if c := s.claim(claimOf(m)); c == nil || c.CurrentPhase() != v1alpha1.PhaseReleasing {
			delete(next.Releasing, uid)
		}
	}
	for _, c := range s.claims {
		if c.CurrentPhase() != v1alpha1.PhaseReleasing || c.Status.Machine == nil {
			continue
		}
		m := s.machine(c.Status.Machine.UID)
		if m == nil || claimOf(m) != c.Spec.ClaimID || s.handsOver(m) {
			continue
		}
		if _, begun := next.Releasing[m.UID]; begun {
			continue
		}
		r := Release{Machine: m.Name, Claim: c.Spec.ClaimID, Drained: c.Status.Drained, Hook: !alive(m)}
		if (alive(m) || stoppable(m) && !held(m)) && d.budget.release(m.UID, r) {
			next.Releasing[m.UID] = r
		}
	}
	s.resumeReleases(d, next)
}

// resumeReleases enters the Machines that no claim has and that the finalizer says were being released, although they live and the
// ledger does not record them: a move or a restore makes Machines again without their deletion and under another UID. Nothing
// else would ever take them, as nothing but their release takes that finalizer off.
func (s *snapshot) resumeReleases(d *decision, next *Ledger) {
	if !s.mayShrink(next) {
		return
	}
	for _, m := range s.machines {
		if !alive(m) || !held(m) || !s.orphaned(claimOf(m)) {
			continue
		}
		r := Release{Machine: m.Name, Claim: claimOf(m)}
		if _, recorded := next.Releasing[m.UID]; !recorded && d.budget.release(m.UID, r) {
			next.Releasing[m.UID] = r
		}
	}
}

// overtake deals with a Machine that is being released and that somebody else began to delete before our finalizer was on it:
// a hook holds it instead, as long as its instance is there. Once it is not, the Machine goes as it does without us, and its
// replacement is a spare.
func (s *snapshot) overtake(next *Ledger, uid types.UID, r Release, m *clusterv1.Machine) {
	switch {
	case held(m) || r.Set != "":
		// Held as it should be, or its replica is being given back already.
	case !r.Hook && stoppable(m):
		r.Hook = true
		next.Releasing[uid] = r
	case !hooked(m) && !stoppable(m):
		delete(next.Releasing, uid)
	}
}

// handsOver reports whether a Machine whose claim is released should be kept for the next claim instead of being deleted:
// it is on its way and certainly has no Node yet. That its Node was drained proves that there is one.
func (s *snapshot) handsOver(m *clusterv1.Machine) bool {
	if !alive(m) || held(m) || !s.nodeless(m) || outdated(m) || s.hopeless(m) {
		return false
	}
	if c := s.claim(claimOf(m)); c != nil && (c.Status.FailedAt != nil || c.Status.Drained) {
		return false
	}
	_, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]
	return !marked
}

// giveBack lowers replicas for the Machines that are held by our finalizer only, their instance gone, or by our hook, and drops
// the records of Machines that are gone.
func (s *snapshot) giveBack(d *decision, next *Ledger) {
	var ready []types.UID
	for uid, r := range next.Releasing {
		if s.deleted() && r.Set != "" {
			// All of it goes, and Cluster API must not be paused for that.
			r.GivenBack = true
			next.Releasing[uid] = r
		}
		m := s.machine(uid)
		switch {
		case m == nil:
			// Marked: done. Not marked: somebody else removed it, its replacement is a spare. Under pause the lowering
			// is completed below all the same, as the MachineSet may have been lowered already.
			if r.GivenBack || r.Set == "" {
				delete(next.Releasing, uid)
			} else {
				ready = append(ready, uid)
			}
		case !r.GivenBack && (deletionCompleted(m) || r.Hook && waitsForHook(m)):
			if setOf(m) == "" && r.Set == "" { // its MachineSet was deleted and left it behind: nothing counts it
				r.GivenBack = true
				next.Releasing[uid] = r
				continue
			}
			ready = append(ready, uid)
		}
	}
	if len(ready) == 0 || s.deleted() {
		return
	}
	slices.Sort(ready)

	active := s.activeSets()
	sole := len(active) == 1 && !slices.ContainsFunc(ready, func(uid types.UID) bool {
		m := s.machine(uid)
		return m == nil || next.Releasing[uid].Set != "" || setOf(m) != active[0].Name
	})
	if sole {
		if s.md.Status.ObservedGeneration < s.md.Generation {
			return // a template change that is not observed yet would make it the wrong variant
		}
		// Those beyond the MachineSet's replicas a human's lowering has taken already: to lower once more would have Cluster API
		// choose a Machine.
		taken := -replicasOf(active[0])
		for _, m := range s.machines {
			if setOf(m) == active[0].Name && !next.Releasing[m.UID].GivenBack {
				taken++
			}
		}
		d.replicas -= min(max(0, count(ready)-max(0, taken)), d.replicas)
		for _, uid := range ready {
			r := next.Releasing[uid]
			r.GivenBack = true
			next.Releasing[uid] = r
		}
		d.urgent = true
		return
	}
	s.giveBackPaused(d, next, ready)
}

// dateGiveBacks notes which generation carries the replicas that this decision gives back. When claims entered in the same
// write take as many, spec does not change and no new generation comes: the present one is right then, as the MachineSets
// need not change either.
func (s *snapshot) dateGiveBacks(d *decision, next *Ledger) {
	generation := s.md.Generation
	if d.replicas != s.group.Replicas {
		generation++
	}
	for uid, r := range next.Releasing {
		if r.GivenBack && (s.ledger == nil || !s.ledger.Releasing[uid].GivenBack) {
			r.Generation = generation
			next.Releasing[uid] = r
		}
	}
}

// giveBackPaused is the variant for several active MachineSets, where lowering the MachineDeployment could be charged to
// another one: pause, lower the right MachineSet, then lower the MachineDeployment and unpause in one write. Every step
// can be repeated, and whoever finds it half done completes it.
func (s *snapshot) giveBackPaused(d *decision, next *Ledger, ready []types.UID) {
	value, paused := s.md.Annotations[clusterv1.PausedAnnotation]
	ours := paused && value == v1alpha1.PausedByAgent
	begun := slices.DeleteFunc(slices.Clone(ready), func(uid types.UID) bool { return next.Releasing[uid].Set == "" })
	if len(begun) == 0 {
		// Else somebody else paused it: wait for them. Nor while a MachineSet is paused for spares that never came: it would not
		// say that it observed its lowering, and is not unpaused before the MachineDeployment goes on.
		if !paused && next.Shrink == nil {
			s.beginPause(d, next, ready)
		}
		return
	}
	begun = slices.DeleteFunc(begun, func(uid types.UID) bool {
		// Somebody took our finalizer off before its MachineSet was lowered: it is being replaced, so nothing may be lowered.
		lost := s.machine(uid) == nil && !s.lowered(next.Releasing[uid].Set, uid)
		if lost {
			delete(next.Releasing, uid)
		}
		return lost
	})
	if ours && isPaused(s.md.Status.Conditions) {
		begun = s.skipReplaced(d, next, begun)
	}
	switch {
	case len(begun) == 0:
		if ours {
			d.pause, d.urgent = pauseRemove, true
		}
	case !paused:
		d.pause, d.urgent = pauseSet, true // our pause was removed; put it back and go on
	case ours && isPaused(s.md.Status.Conditions) && s.setsLowered(d, next, begun):
		d.replicas -= min(count(begun), d.replicas)
		for _, uid := range begun {
			r := next.Releasing[uid]
			r.GivenBack = true
			next.Releasing[uid] = r
		}
		d.pause, d.urgent = pauseRemove, true
	}
}

// skipReplaced counts replicas as given back that are taken already, by a rollout or by a human's lowering: nothing is lowered
// for those Machines, and what replaces them is a spare. It returns the others. Nothing changes the numbers meanwhile, as the
// MachineDeployment is paused.
func (s *snapshot) skipReplaced(d *decision, next *Ledger, begun []types.UID) []types.UID {
	lowered := func(uid types.UID) bool { return s.lowered(next.Releasing[uid].Set, uid) }
	skip := func(uid types.UID) {
		r := next.Releasing[uid]
		r.GivenBack = true
		next.Releasing[uid] = r
	}
	after, excess := map[string]int32{}, map[string]int32{} // by MachineSet: replicas once all is lowered; Machines beyond them
	for _, set := range s.sets {
		after[set.Name], excess[set.Name] = replicasOf(set), -replicasOf(set)
	}
	for _, m := range s.machines {
		if !next.Releasing[m.UID].GivenBack && (!slices.Contains(begun, m.UID) || !lowered(m.UID)) {
			excess[setOf(m)]++
		}
	}
	left := slices.DeleteFunc(slices.Clone(begun), func(uid types.UID) bool {
		name := next.Releasing[uid].Set
		switch {
		case lowered(uid):
			return false
		case excess[name] > 0 && s.machine(uid) != nil:
			excess[name]--
			skip(uid)
			return true
		}
		after[name]--
		return false
	})
	// Cluster API cuts a MachineSet that has more replicas than the MachineDeployment down to them, whoever's Machines it has.
	for _, uid := range slices.Clone(left) {
		name := next.Releasing[uid].Set
		most := slices.Max(append(slices.Collect(maps.Values(after)), 0))
		if !lowered(uid) && most > d.replicas-count(left) {
			after[name]++
			skip(uid)
			left = slices.DeleteFunc(left, func(other types.UID) bool { return other == uid })
		}
	}
	return left
}

// unpause takes off our pause where no release needs it: the ledger that did is lost.
func (s *snapshot) unpause(d *decision, next *Ledger) {
	ours := s.md.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
	if ours && d.pause == pauseKeep && !lowersUnderPause(next) {
		d.pause, d.urgent = pauseRemove, true
	}
}

// lowersUnderPause reports whether a release has, or is to have, the MachineDeployment paused.
func lowersUnderPause(next *Ledger) bool {
	for _, r := range next.Releasing {
		if r.Set != "" && !r.GivenBack {
			return true
		}
	}
	return false
}

// beginPause notes which MachineSet each Machine's replica belongs to, and pauses the MachineDeployment in the same write.
func (s *snapshot) beginPause(d *decision, next *Ledger, ready []types.UID) {
	for _, uid := range ready {
		if m := s.machine(uid); m != nil && setOf(m) != "" {
			r := next.Releasing[uid]
			r.Set = setOf(m)
			next.Releasing[uid] = r
			d.pause, d.urgent = pauseSet, true
		}
	}
}

// setsLowered reports whether every MachineSet has given the replicas back and observed it; until then it asks for it.
func (s *snapshot) setsLowered(d *decision, next *Ledger, begun []types.UID) bool {
	missing := map[string][]types.UID{}
	done := true
	for _, uid := range begun {
		name := next.Releasing[uid].Set
		set := s.set(name)
		switch {
		case !s.lowered(name, uid):
			missing[name] = append(missing[name], uid)
			done = false
		case set != nil && set.Status.ObservedGeneration < set.Generation:
			done = false
		}
	}
	for _, set := range s.sets {
		if uids := missing[set.Name]; len(uids) > 0 {
			d.actions = append(d.actions, action{kind: lowerSet, set: set, uids: uids, counts: begun})
		}
	}
	return done
}

func (s *snapshot) set(name string) *clusterv1.MachineSet {
	for _, set := range s.sets {
		if set.Name == name {
			return set
		}
	}
	return nil
}

// lowered reports whether the MachineSet has given the Machine's replica back under pause; one that is gone has.
func (s *snapshot) lowered(set string, uid types.UID) bool {
	found := s.set(set)
	return found == nil || slices.Contains(releasedFrom(found), uid)
}

// isPaused reports whether Cluster API says that it leaves the object of these conditions alone.
func isPaused(conditions []metav1.Condition) bool {
	return slices.ContainsFunc(conditions, func(c metav1.Condition) bool {
		return c.Type == clusterv1.PausedCondition && c.Status == metav1.ConditionTrue
	})
}

// count is a length as a number of replicas.
func count[T any](items []T) int32 { return clamp(len(items)) }

func clamp(n int) int32 { return int32(max(math.MinInt32, min(math.MaxInt32, n))) }

// floor is the number of machines that are not the claims' to have: what the user owns, and at least the min size.
func (s *snapshot) floor(next *Ledger) int32 {
	return max(next.Floor, next.Min)
}

// account returns the spare: the replicas that are neither the floor's, nor accounted for by a claim, nor held by a release.
// It is computed anew each time, never added up. When there are fewer replicas than owners, replicas are raised; nothing is
// ever lowered here.
func (s *snapshot) account(d *decision, next *Ledger) int32 {
	used := s.floor(next) + count(slices.Collect(maps.Keys(next.Pending)))
	for _, r := range next.Releasing {
		if !r.GivenBack {
			used++
		}
	}
	for _, m := range s.machines {
		id := claimOf(m)
		if id == "" {
			continue
		}
		if _, releasing := next.Releasing[m.UID]; releasing {
			continue
		}
		if _, pending := next.Pending[id]; pending {
			continue
		}
		if alive(m) && s.orphaned(id) {
			continue // its claim has ended or never was: nobody's
		}
		used++
	}
	spare := d.replicas - used
	if spare < 0 && s.group.MayGrow() && !next.Lowered {
		raised := used
		if s.group.Max != nil {
			raised = min(raised, max(d.replicas, *s.group.Max))
		}
		if raised > d.replicas {
			d.replicas, d.urgent = raised, true
		}
		spare = d.replicas - used
	}
	return spare
}

// orphaned reports whether a label, possibly empty, names no claim that has a right to a Machine. A claim that the agent has
// no object of is no such claim: an ended one is not forgotten while a Machine carries its label, so its object was lost (by
// a restore, a move, a reinstalled CRD), and the claim is restored from the label.
func (s *snapshot) orphaned(claimID string) bool {
	if claimID == "" {
		return true
	}
	c := s.claim(claimID)
	return c != nil && c.CurrentPhase() == v1alpha1.PhaseEnded
}

// enter accounts for the claims that have no entry yet, oldest first: from the spare, else by raising replicas. It returns
// the spare that is left.
func (s *snapshot) enter(d *decision, next *Ledger, spare int32) int32 {
	refusal := s.refusal(d)
	spendable := spare - s.unusable(next)
	size := d.replicas // with those for which there is no room in the ledger yet
	crowded := s.crowded()
	for _, c := range s.claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
			continue
		}
		if _, entered := next.Pending[id]; entered || s.labelled(id) != nil {
			continue // a claim that lost its status has its Machine already
		}
		switch {
		case refusal != nil:
			d.refused[id] = *refusal
			continue
		case crowded != nil:
			d.refused[id] = *crowded
			continue
		case spendable > 0:
			spendable--
			if d.admit(next, id, Named{}) {
				spare--
			}
		case s.group.Max == nil || size < *s.group.Max:
			size++
			if d.admit(next, id, Named{}) {
				d.replicas++
			}
		default:
			d.refused[id] = s.full()
		}
	}
	return spare
}

// refusal says why no claim may be made here; nil when claims may be made.
func (s *snapshot) refusal(d *decision) *eligibility.Refusal {
	if d.lowered != "" { // what the annotation says from this write on
		return &eligibility.Refusal{NodeGroup: s.md.Name, Reason: eligibility.ReplicasLowered, Message: d.lowered}
	}
	return s.group.Refusal()
}

// admit enters a claim, or has it wait when there is no room in the ledger. It reports which.
func (d *decision) admit(next *Ledger, claimID string, named Named) bool {
	if !d.budget.claim(claimID, named) {
		d.queued[claimID] = true
		return false
	}
	next.Pending[claimID] = named
	d.urgent = true
	return true
}

// adopt enters the claims that take an existing Machine over, and names it for them in the same write: a spare's, else the
// user's, who then owns one less. It returns the spare that is left.
func (s *snapshot) adopt(d *decision, next *Ledger, spare int32) int32 {
	for _, c := range s.claims {
		id := c.Spec.ClaimID
		if c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt == "" {
			continue
		}
		if _, entered := next.Pending[id]; entered || s.labelled(id) != nil {
			continue
		}
		m, refusal := s.adoptable(c, d, next)
		if refusal != nil {
			d.refused[id] = *refusal
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
		case s.group.Max == nil || d.replicas < *s.group.Max:
			if d.admit(next, id, named) {
				d.replicas++ // the user is still to have the min size
			}
		default:
			d.refused[id] = s.full()
		}
	}
	return spare
}

// adoptable returns the Machine that a claim is to take over, or why it cannot have it.
func (s *snapshot) adoptable(c *v1alpha1.MachineClaim, d *decision, next *Ledger) (*clusterv1.Machine, *eligibility.Refusal) {
	if refusal := s.refusal(d); refusal != nil && (!s.group.MayGrow() || d.lowered != "") {
		return nil, refusal
	}
	refuse := func(why string) (*clusterv1.Machine, *eligibility.Refusal) {
		return nil, &eligibility.Refusal{
			NodeGroup: s.md.Name, Reason: eligibility.NotAdoptable, Message: "Machine " + c.Spec.Adopt + " " + why,
		}
	}
	m := s.named(c.Spec.Adopt)
	if m == nil {
		return refuse("does not exist in this node group")
	}
	_, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]
	switch _, releasing := next.Releasing[m.UID]; {
	case !s.orphaned(claimOf(m)) || next.promised()[m.UID]:
		return refuse("has a claim already")
	case releasing || held(m) || !alive(m) || marked:
		return refuse("is being deleted")
	case claimOf(m) != "":
		return refuse("still carries the label of a claim that has ended; take the label off first")
	}
	return m, nil
}

func (s *snapshot) full() eligibility.Refusal { return fullGroup(s.md.Name, *s.group.Max) }

func fullGroup(name string, size int32) eligibility.Refusal {
	return eligibility.Refusal{
		NodeGroup: name, Reason: eligibility.AtMaxSize, Message: fmt.Sprintf("replicas are at the max size %d", size),
	}
}

// free returns the Machines that nobody has: alive, without a claim, a promise or a release.
func (s *snapshot) free(next *Ledger) []*clusterv1.Machine {
	promised := next.promised()
	var free []*clusterv1.Machine
	for _, m := range s.machines {
		if !alive(m) || held(m) || promised[m.UID] {
			continue
		}
		if !s.orphaned(claimOf(m)) {
			continue
		}
		if _, releasing := next.Releasing[m.UID]; releasing {
			continue
		}
		free = append(free, m)
	}
	return free
}

// usable reports whether a free Machine may be given to a claim: nothing can run on it yet. Choosing by count alone could
// take the user's own Node.
func (s *snapshot) usable(m *clusterv1.Machine) bool {
	if _, marked := m.Annotations[clusterv1.DeleteMachineAnnotation]; marked || claimOf(m) != "" || outdated(m) || s.hopeless(m) {
		return false
	}
	return s.nodeless(m) || m.Spec.ProviderID != "" && !s.registered(m) && s.unregistered(m.Spec.ProviderID)
}

// unusable counts the free Machines beyond the floor that no claim may have, because something may run on them.
func (s *snapshot) unusable(next *Ledger) int32 {
	var n int32
	for _, m := range s.free(next) {
		if !s.usable(m) {
			n++
		}
	}
	return max(0, n-s.floor(next))
}

// name promises free Machines to the claims that wait, oldest first, and leaves the floor as many as it owns. A claim for which
// there is none gets one that is known not to come, if it was made after the claim: the claim fails with it then, at once.
func (s *snapshot) name(d *decision, next *Ledger) {
	free := s.free(next)
	give := len(free) - int(s.floor(next))
	var usable, hopeless []*clusterv1.Machine
	for _, m := range free {
		switch {
		case s.usable(m):
			usable = append(usable, m)
		case s.hopeless(m) && claimOf(m) == "" && !outdated(m):
			hopeless = append(hopeless, m)
		}
	}
	// The one that is furthest on comes first.
	slices.SortStableFunc(usable, func(a, b *clusterv1.Machine) int {
		return s.progress(b) - s.progress(a)
	})
	for _, c := range s.claims {
		if give <= 0 {
			return
		}
		named, pending := next.Pending[c.Spec.ClaimID]
		if !pending || named.UID != "" || c.CurrentPhase() != v1alpha1.PhasePending || c.Spec.Adopt != "" {
			continue
		}
		var m *clusterv1.Machine
		if len(usable) > 0 {
			m, usable = usable[0], usable[1:]
		} else if i := slices.IndexFunc(hopeless, func(m *clusterv1.Machine) bool {
			return !m.CreationTimestamp.Before(&c.CreationTimestamp)
		}); i >= 0 {
			m, d.urgent = hopeless[i], true
			hopeless = slices.Delete(hopeless, i, i+1)
		} else {
			continue
		}
		give--
		next.Pending[c.Spec.ClaimID] = Named{Machine: m.Name, UID: m.UID}
	}
}

// waiting counts the claims that a Machine is still to be named for.
func (s *snapshot) waiting(next *Ledger) int {
	n := 0
	for id, named := range next.Pending {
		if c := s.claim(id); named.UID == "" && c != nil && c.Spec.Adopt == "" {
			n++
		}
	}
	return n
}

// progress orders Machines by how far they are: no instance yet, no Node yet, and those that may have one.
func (s *snapshot) progress(m *clusterv1.Machine) int {
	switch {
	case m.Spec.ProviderID == "" && !hasNode(m):
		return 0
	case s.nodeless(m):
		return 1
	}
	return 2
}

// coverShortage raises replicas when Cluster API has made every Machine it was asked for and claims still wait: the Machine
// that was meant for them joined before it could be promised, and is nobody's now.
func (s *snapshot) coverShortage(d *decision, next *Ledger) {
	waiting := s.waiting(next)
	if waiting == 0 || d.replicas != s.group.Replicas || !s.settled() || s.refusal(d) != nil {
		return
	}
	free := s.free(next)
	usable := 0
	for _, m := range free {
		// One that may have a Node that Cluster API has not seen is waited for: it is usable, or not, once that is stated.
		if s.usable(m) || !hasNode(m) && m.Spec.ProviderID != "" && !s.registered(m) && !s.hopeless(m) {
			usable++
		}
	}
	floorNeeds := max(0, int(s.floor(next))-(len(free)-usable))
	short := clamp(waiting - (usable - floorNeeds))
	room := short
	if s.group.Max != nil {
		room = min(short, max(0, *s.group.Max-d.replicas))
	}
	if room > 0 {
		d.replicas += room
		d.urgent = true
	}
	d.unmet = max(0, short-room)
}

// releaseSpare begins to remove Machines that nobody has wanted for the grace period: never during a rollout, whose surge
// Machines would be taken for spares, and never the floor's. Nor while a claim waits, unless the max size allows no other Machine
// for it: then those go that it may not have.
func (s *snapshot) releaseSpare(d *decision, next *Ledger, spare int32) int32 {
	if spare <= 0 || !s.mayShrink(next) {
		return spare
	}
	free := s.free(next)
	surplus := min(len(free)-int(s.floor(next)), int(spare))
	// A Machine without infrastructure goes whoever waits: nobody can have it, and Cluster API sees to no other one before.
	gone := slices.DeleteFunc(slices.Clone(free), func(m *clusterv1.Machine) bool { return !s.gone(m) })
	waits := (next.unnamed() > 0 || len(d.queued) > 0) && d.unmet == 0
	if waits && len(gone) == 0 || !s.graceOver(d) {
		return spare
	}
	observed := s.observed(s.md.Generation)
	if s.rollingOut() || !observed && len(gone) == 0 {
		return spare
	}
	switch {
	case waits || !observed:
		free = gone
	case d.unmet > 0:
		free = slices.DeleteFunc(free, s.usable)
	}
	surplus = min(surplus, len(free))
	if surplus <= 0 {
		return spare
	}
	// Those of claims that ended first, as they are certainly not the user's; then those without a Node, then the newest.
	slices.SortStableFunc(free, func(a, b *clusterv1.Machine) int {
		if c := cmp.Or(strings.Compare(claimOf(b), "")-strings.Compare(claimOf(a), ""), s.progress(a)-s.progress(b)); c != 0 {
			return c
		}
		return b.CreationTimestamp.Compare(a.CreationTimestamp.Time)
	})
	for _, m := range free[:surplus] {
		r := Release{Machine: m.Name, Claim: claimOf(m)}
		if !d.budget.release(m.UID, r) {
			break
		}
		next.Releasing[m.UID] = r
		d.chose = true
		spare--
	}
	return spare
}

// mayShrink reports whether Machines, or replicas, that nobody claims may be removed.
func (s *snapshot) mayShrink(next *Ledger) bool { return s.group.MayShrink() && !next.Lowered }

// graceOver reports whether the spare has been there for the grace period, and asks to be woken then.
func (s *snapshot) graceOver(d *decision) bool {
	if s.spareSince.IsZero() {
		d.wake(s.spareGrace)
		return false
	}
	left := s.spareGrace - s.now.Sub(s.spareSince)
	if left > 0 {
		d.wake(left)
	}
	return left <= 0
}

// shrink gives spares back whose Machines never came, because their MachineSet is blocked. Lowering replicas while the
// MachineSet may be making them after all would make it delete others, so it is paused first and its Machines are counted
// then. It is unpaused once the lowered number has reached it, or when the spare found another use. Which of the two it is
// paused for is in the ledger, so that no agent unpauses it while another one counts.
func (s *snapshot) shrink(d *decision, next *Ledger, spare int32) int32 {
	// Spares that are Machines are released, not counted down.
	missing := min(s.group.Replicas-count(s.machines), spare-max(0, count(s.free(next))-s.floor(next)))
	active := s.activeSets()
	may := missing > 0 && len(active) == 1 && !s.rollingOut() && s.mayShrink(next) && !s.deleted() && len(d.queued) == 0
	if next.Shrink == nil {
		for _, set := range s.sets {
			if set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {
				next.Shrink = &Shrink{Set: set.Name, Done: true} // nobody knows why
				return spare
			}
		}
		if may && s.graceOver(d) && s.observed(s.md.Generation) && !marked(active[0]) && !lowersUnderPause(next) {
			next.Shrink = &Shrink{Set: active[0].Name}
		}
		return spare
	}
	set := s.set(next.Shrink.Set)
	ours := set != nil && set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
	may = may && active[0] == set
	switch {
	case !next.Shrink.Done && may && !marked(set):
		if s.observed(s.md.Generation) {
			d.actions = append(d.actions, action{kind: pauseMachineSet, set: set})
		}
	case !next.Shrink.Done && may && ours:
		// That the MachineSet has observed its replicas is not asked: paused, it never will.
		if isPaused(set.Status.Conditions) && s.assigned() {
			d.replicas -= missing
			d.urgent = true
			next.Shrink = &Shrink{Set: set.Name, Done: true}
			return spare - missing
		}
	case !next.Shrink.Done:
		next.Shrink = &Shrink{Set: next.Shrink.Set, Done: true} // the spare found another use
	case !ours:
		next.Shrink = nil
	default:
		// A rollout that began meanwhile waits for the MachineSet to let its Machines go, and so does the deletion of the group.
		overtaken := s.deleted() || len(active) != 1 || active[0] != set || !s.onDelete() && s.newest() != set
		if overtaken || s.allLowered() && d.replicas == s.group.Replicas {
			d.actions = append(d.actions, action{kind: unpauseMachineSet, set: set})
		}
	}
	return spare
}

// marked reports whether somebody wants the MachineSet paused.
func marked(set *clusterv1.MachineSet) bool {
	_, yes := set.Annotations[clusterv1.PausedAnnotation]
	return yes
}

// wake asks for another look after a while, the soonest of those asked for.
func (d *decision) wake(after time.Duration) {
	after = max(after, 10*time.Millisecond)
	if d.again == 0 || after < d.again {
		d.again = after
	}
}

// decideWrite keeps the next ledger if it says something new.
func (s *snapshot) decideWrite(d *decision, next *Ledger) {
	if s.ledger == nil {
		// A ledger is begun by the first claim, not by being looked at; one that was wiped is rebuilt.
		quiet := len(next.Pending) == 0 && len(next.Releasing) == 0 && next.Shrink == nil && d.pause == pauseKeep && !next.Lowered &&
			d.replicas <= s.group.Replicas // a min size is raised to without a claim
		if quiet && !slices.ContainsFunc(s.claims, hasMachine) {
			d.replicas = s.group.Replicas
			return
		}
		d.ledger = next
		return
	}
	if d.replicas != s.group.Replicas || d.pause != pauseKeep || !next.same(s.ledger) {
		d.ledger = next
	}
}

// hasMachine reports whether a claim has, or is giving back, a Machine.
func hasMachine(c *v1alpha1.MachineClaim) bool {
	return c.Status.Machine != nil && c.Status.Phase != v1alpha1.PhaseEnded
}

// actOnClaims lists the writes on claims, and on the Machines that they bind, that the snapshot's ledger permits.
func (s *snapshot) actOnClaims(d *decision) {
	ledger := s.ledger
	if ledger == nil {
		ledger = &Ledger{}
	}
	for _, m := range s.lost {
		if alive(m) {
			d.actions = append(d.actions, action{kind: recreate, machine: m})
		}
	}
	s.actOnForeign(d)
	for _, c := range s.claims {
		if c.CurrentPhase() == v1alpha1.PhaseEnded {
			continue
		}
		id := c.Spec.ClaimID
		named, entered := ledger.Pending[id]
		var m *clusterv1.Machine
		if c.Status.Machine != nil {
			m = s.machine(c.Status.Machine.UID)
		}
		switch c.Status.Phase {
		case "", v1alpha1.PhasePending:
			if owned := s.labelled(id); owned != nil && alive(owned) {
				// Its status was lost; also when that was before its entry was dropped.
				d.actions = append(d.actions, action{kind: restore, claim: c, group: s.md.UID, machine: owned})
			} else if entered {
				s.actOnPending(d, c, named)
			} else if refusal, refused := d.refused[id]; refused {
				reason := ReasonRefused
				if refusal.Reason == eligibility.AtMaxSize || refusal.Reason == eligibility.CoolingDown {
					reason = ReasonNoRoom
				}
				if c.Status.Phase == v1alpha1.PhasePending {
					d.end(c, reason, refusal.Message) // it was entered once, and somebody edited the ledger
				} else {
					s.moveOn(d, c, reason, refusal.Message)
				}
			}
		case v1alpha1.PhaseBound:
			switch owned := s.labelled(id); {
			case m == nil && owned != nil && alive(owned):
				d.actions = append(d.actions, action{kind: restore, claim: c, group: s.md.UID, machine: owned}) // its status is of another Machine
			case m == nil || deletionCompleted(m):
				s.endWithMachine(d, c)
			case !alive(m):
				// Being deleted by somebody else. Until it is gone the instance may run, and the claim has it.
				if c.Status.Reason != ReasonMachineDeleting {
					d.actions = append(d.actions, action{kind: explain, claim: c, event: v1alpha1.Event{
						Reason: ReasonMachineDeleting, Message: "somebody else is deleting its Machine",
					}})
				}
			case claimOf(m) == "" && entered && named.UID == m.UID && !held(m):
				d.actions = append(d.actions, action{kind: label, claim: c, machine: m})
			case claimOf(m) == "" && !entered && s.ledger != nil:
				d.end(c, ReasonMachineLost, "somebody removed the claim's label from its Machine")
			case claimOf(m) != "" && claimOf(m) != id:
				d.end(c, ReasonMachineLost, "its Machine carries another claim's label")
			case hasNode(m) && c.Status.Machine.NodeName != m.Status.NodeRef.Name:
				d.actions = append(d.actions, action{kind: noteMachine, claim: c, machine: m, event: v1alpha1.Event{
					Reason: ReasonNodeJoined, Message: "Node " + m.Status.NodeRef.Name + " joined",
				}})
			default:
				s.judge(d, c, m)
			}
		case v1alpha1.PhaseReleasing:
			s.actOnReleasing(d, c, m, named, entered)
		case v1alpha1.PhaseEnded:
		}
	}
}

// endWithMachine ends a claim whose Machine somebody else removed.
func (s *snapshot) endWithMachine(d *decision, c *v1alpha1.MachineClaim) {
	if s.deleted() {
		d.end(c, ReasonNodeGroupGone, "its MachineDeployment is being deleted, and its Machine with it")
		return
	}
	d.end(c, ReasonMachineLost, "its Machine was deleted by somebody else")
}

// actOnForeign ends the claims that lost their Machines, or wait for one, with the MachineDeployment that had this one's name before.
func (s *snapshot) actOnForeign(d *decision) {
	for _, c := range s.former {
		d.end(c, ReasonNodeGroupGone, "its MachineDeployment was deleted; another one has its name now")
	}
	for _, c := range s.foreign {
		var m *clusterv1.Machine
		if c.Status.Machine != nil {
			m = s.machine(c.Status.Machine.UID)
		}
		const gone = "its MachineDeployment was deleted; one of another Cluster has its name now"
		switch {
		case c.Status.Phase == "":
			s.moveOn(d, c, ReasonNodeGroupGone, gone)
		case m == nil || deletionCompleted(m):
			d.end(c, ReasonNodeGroupGone, gone)
		}
	}
}

// abandonedAfter is how long after it was made a claim that no group has entered is left to its call, which moves it on or ends
// it. A call that comes again later does not mind.
const abandonedAfter = 2 * time.Minute

// moveOn does for a claim that has no room here what its call would do, if that is gone together with the agent that served it.
func (s *snapshot) moveOn(d *decision, c *v1alpha1.MachineClaim, reason, message string) {
	if left := abandonedAfter - s.now.Sub(c.CreationTimestamp.Time); left > 0 {
		d.wake(left)
		return
	}
	d.actions = append(d.actions, action{kind: moveOn, claim: c, event: v1alpha1.Event{Reason: reason, Message: message}})
}

func (s *snapshot) actOnPending(d *decision, c *v1alpha1.MachineClaim, named Named) {
	m := s.machine(named.UID)
	holder, had := s.holders[named.UID]
	had = had && holder != c.Spec.ClaimID // by a claim that hands it over and has not ended yet
	switch {
	case named.UID != "" && m != nil && alive(m) && !held(m) && claimOf(m) == "" && !had:
		d.actions = append(d.actions, action{kind: bind, claim: c, group: s.md.UID, machine: m})
	case c.Spec.Adopt != "" && named.UID == "":
		d.end(c, ReasonMachineLost, "the Machine that it was to take over was deleted before that")
	case c.Status.Phase == v1alpha1.PhasePending && named.UID == "" && s.judge(d, c, nil):
		// It waited long enough.
	case c.Status.Phase == "":
		d.actions = append(d.actions, action{kind: markEntered, claim: c, group: s.md.UID, event: v1alpha1.Event{
			Reason:  ReasonWaitingForMachine,
			Message: fmt.Sprintf("a replica of MachineDeployment %s is accounted for; its Machine is on its way", c.Spec.NodeGroup),
		}})
	}
}

func (s *snapshot) actOnReleasing(d *decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine, named Named, entered bool) {
	id := c.Spec.ClaimID
	labelled := s.labelled(id)
	switch {
	case c.Status.Machine == nil && labelled != nil, m == nil && labelled != nil && alive(labelled):
		d.actions = append(d.actions, action{kind: restore, claim: c, group: s.md.UID, machine: labelled}) // its status was lost before its release
	case c.Status.Machine == nil:
		if !entered && labelled == nil && c.Status.FailedAt != nil {
			d.end(c, ReasonFailed, c.Status.Message)
		} else if !entered && labelled == nil {
			d.end(c, ReasonCancelled, "released before it had a Machine; the replica goes to the next claim or is given back")
		}
	case m != nil && alive(m) && entered && named.UID == m.UID && claimOf(m) == "" && !held(m):
		// The label first: what is released must be recognisable as this claim's.
		d.actions = append(d.actions, action{kind: label, claim: c, machine: m})
	case m != nil && alive(m) && !entered && claimOf(m) == id && s.handsOver(m) && !s.releasing(m.UID):
		d.actions = append(d.actions, action{kind: unbind, claim: c, machine: m})
	case !entered && (labelled == nil || !alive(labelled) && deletionCompleted(labelled)) && (m == nil || alive(m) || deletionCompleted(m)):
		reason, message := ReasonReleased, "its instance and its Node are gone"
		if c.Status.FailedAt != nil {
			reason, message = ReasonFailed, c.Status.Message
		}
		switch {
		case m != nil && alive(m) && hasNode(m) && m.Annotations[v1alpha1.HandedOverAnnotation] != id:
			reason, message = ReasonMachineLost, "somebody removed the claim's label from its Machine"
		case m != nil && alive(m):
			reason, message = ReasonHandedOver, "its Machine had no Node yet and was kept for the next claim"
			if c.Status.Reason == ReasonLate {
				message = c.Status.Message + "; the Machine is kept for the next claim"
			}
		}
		d.end(c, reason, message)
	case m != nil && !alive(m):
		s.explainDeletion(d, c, m)
	}
}

// slowDeletion is how long a deletion may take before the claim says what it waits for.
const slowDeletion = time.Minute

// explainDeletion notes on the claim what Cluster API says that the deletion of its Machine waits for, once that takes long.
func (s *snapshot) explainDeletion(d *decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine) {
	reason, message := deletingReason(m), deletingMessage(m)
	if reason == "" || held(m) && deletionCompleted(m) || reason == c.Status.Reason || c.Status.FailedAt != nil {
		return // why it failed matters more
	}
	if left := slowDeletion - s.now.Sub(m.DeletionTimestamp.Time); left > 0 {
		d.wake(left)
		return
	}
	d.actions = append(d.actions, action{kind: explain, claim: c, event: v1alpha1.Event{
		Reason: reason, Message: "the deletion of Machine " + m.Name + " takes long: " + cmp.Or(message, reason),
	}})
}

func (s *snapshot) releasing(uid types.UID) bool {
	if s.ledger == nil {
		return false
	}
	_, yes := s.ledger.Releasing[uid]
	return yes
}

// explainOnce notes on the claim what it waits for, unless the claim says so already.
func (d *decision) explainOnce(c *v1alpha1.MachineClaim, reason, message string) {
	if c.Status.Reason != reason || c.Status.Message != message {
		d.actions = append(d.actions, action{kind: explain, claim: c, event: v1alpha1.Event{Reason: reason, Message: message}})
	}
}

func (d *decision) end(c *v1alpha1.MachineClaim, reason, message string) {
	d.actions = append(d.actions, action{kind: end, claim: c, event: v1alpha1.Event{Reason: reason, Message: message}})
}

// actOnMachines lists the writes on Machines that are being released, as the snapshot's ledger permits.
func (s *snapshot) actOnMachines(d *decision) {
	for _, m := range slices.Concat(s.machines, s.strays) {
		var r Release
		recorded := false
		if s.ledger != nil {
			r, recorded = s.ledger.Releasing[m.UID]
		}
		ours := held(m) || hooked(m)
		stopped := held(m) && deletionCompleted(m) || hooked(m) && !held(m)
		switch {
		case !recorded && s.ledger != nil && alive(m) && held(m) && s.boundTo(m) != nil:
			d.actions = append(d.actions, action{kind: keep, claim: s.boundTo(m), machine: m})
		case recorded && !r.GivenBack && alive(m) && s.mayDelete(m):
			d.actions = append(d.actions, action{kind: hold, machine: m, release: r})
		case recorded && !r.GivenBack && r.Hook && !ours && stoppable(m) && !s.deleted():
			d.actions = append(d.actions, action{kind: hook, machine: m, release: r})
		case recorded && r.GivenBack && ours && s.carriedThrough(r.Generation):
			d.actions = append(d.actions, action{kind: letGo, machine: m})
		case stopped && s.deleted():
			// Cluster API deletes the whole group, makes nothing anew, and waits for this Machine.
			d.actions = append(d.actions, action{kind: letGo, machine: m})
		case !recorded && stopped && s.carriedThrough(s.md.Generation):
			// Held by a ledger that is lost. Whether its replica was given back is not known, so it is not lowered; if it
			// was not, the replacement is a spare.
			d.actions = append(d.actions, action{kind: letGo, machine: m})
		}
	}
}

// boundTo returns the claim that has the Machine for good, nil when there is none or its release was asked for.
func (s *snapshot) boundTo(m *clusterv1.Machine) *v1alpha1.MachineClaim {
	c := s.claim(claimOf(m))
	if c == nil || c.CurrentPhase() != v1alpha1.PhaseBound || c.Status.Machine == nil || c.Status.Machine.UID != m.UID {
		return nil
	}
	return c
}

// mayDelete reports whether no live claim has the Machine: its own was released, or there is none.
func (s *snapshot) mayDelete(m *clusterv1.Machine) bool {
	id := claimOf(m)
	if s.orphaned(id) {
		return true
	}
	c := s.claim(id)
	return c != nil && c.CurrentPhase() == v1alpha1.PhaseReleasing
}

// releasedFrom returns the UIDs of the Machines that a MachineSet was lowered for under pause.
func releasedFrom(set *clusterv1.MachineSet) []types.UID {
	return splitUIDs(set.Annotations[v1alpha1.ReleasedAnnotation])
}
