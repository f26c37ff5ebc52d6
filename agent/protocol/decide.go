package protocol

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
)

// Decision is what the protocol asks for, given a snapshot. [Decide] computes it without side
// effects.
type Decision struct {
	// Ledger is the ledger to write, with the seq of the snapshot's; nil when the ledger needs no
	// change.
	Ledger *Ledger
	// Replicas is the spec.replicas to write in the same patch.
	Replicas int32
	// Pause is the change to Cluster API's paused annotation in the same patch.
	Pause PauseChange
	// Lowered is why the ledger write freezes the group; empty when it does not. LoweredReason is
	// the reason of the event about it.
	Lowered, LoweredReason string
	// Urgent reports that a call or a claim waits for the ledger write. Other writes are coalesced.
	Urgent bool
	// Refused holds the pending claims that cannot be entered here, by claim id.
	Refused map[string]eligibility.Refusal
	// Queued holds the ids of the pending claims that are entered once others have left the ledger.
	Queued map[string]bool
	// Claimed is how many claims own a replica once the ledger is written. No other writer may
	// lower replicas below it.
	Claimed int32
	// Actions are the writes on other objects that the snapshot's ledger permits. They must not be
	// performed if the ledger has changed since, except for [WaitAnew], which depends on the claim
	// alone.
	Actions []Action
	// Held reports that nothing is ordered and nothing removed until the Cluster is unpaused and
	// all of its state is known again.
	Held bool
	// HasSpare reports whether there is a spare now, or a Machine that has to make room for a
	// waiting claim, for the grace period. It is also true when its release has only been decided.
	HasSpare bool
	// Removes reports that the decision lowers replicas or begins to remove Machines that it chose
	// itself. Both depend on the template.
	Removes bool
	// Unusable is how many free Machines beyond the floor no claim may have once the ledger is
	// written, because something may run on them or they will not come.
	Unusable int32
	// Unmet is how many waiting claims get no further replica because of the max size or a quota.
	Unmet int32
	// awaits is what may decide soon whether a waiting claim gets a Machine, and for which the
	// decision asks to be woken; empty if there is nothing. reordered is why waiting claims have to
	// wait for other Machines than those that were made for them; empty if they do not. unfit is
	// why Machines that were made since do not suit any claim either.
	awaits, reordered, unfit string
	// RequeueAfter is after how long to look again if no event comes; zero means never.
	RequeueAfter time.Duration
}

// PauseChange is the change that a ledger write makes to Cluster API's paused annotation of the
// MachineDeployment.
type PauseChange int

const (
	// PauseKeep leaves it as it is.
	PauseKeep PauseChange = iota
	// PauseSet pauses the MachineDeployment for the agent.
	PauseSet
	// PauseRemove takes off a pause that the agent set, and no other.
	PauseRemove
)

// Action is one write on one object. Which fields are set depends on the kind.
type Action struct {
	Kind ActionKind
	// Claim, Machine and Set are the objects, as they were read.
	Claim   *v1alpha1.MachineClaim
	Machine *clusterv1.Machine
	Set     *clusterv1.MachineSet
	// Group is the UID of the MachineDeployment. A claim records it when it is entered or bound.
	Group types.UID
	// Release is the record of the Machine to delete, or of the Machine whose claim is restored
	// while it is being released.
	Release Release
	// Remade reports that the claim was moved or restored, so that what its holder reported about
	// the Machine's Node is lost.
	Remade bool
	// Returned reports that the claim whose status is restored returns its Machine.
	Returned bool
	// UIDs are the Machines that a MachineSet is lowered for. Counts are all Machines that the
	// ledger lowers for under pause.
	UIDs, Counts []types.UID
	// Class is why the Machine of a claim that fails does not come.
	Class failures.Class
	// Event is added to the claim's history. The writer sets its time.
	Event v1alpha1.Event
}

// String returns the kind of the action and the names of its objects.
func (a Action) String() string {
	text := string(a.Kind)
	if a.Claim != nil {
		text += " " + a.Claim.Name
	}
	if a.Machine != nil {
		text += " " + a.Machine.Name
	}
	if a.Set != nil {
		text += " " + a.Set.Name
	}
	return text
}

// ActionKind is the kind of an [Action].
type ActionKind string

const (
	// MarkAdmitted records on the claim that its replica is accounted for.
	MarkAdmitted ActionKind = "mark-admitted"
	// Bind moves the claim from Pending to Bound and then labels its Machine.
	Bind ActionKind = "bind"
	// Fail gives up a claim's Machine: the agent itself releases the claim.
	Fail ActionKind = "fail"
	// TimeOut releases a claim whose Machine is late. The next claim may have the Machine.
	TimeOut ActionKind = "time-out"
	// Explain records a reason and a message on the claim, without changing its phase.
	Explain ActionKind = "explain"
	// WaitAnew restarts a claim's wait for a Machine.
	WaitAnew ActionKind = "wait-anew"
	// Recreate creates a lost MachineClaim again from the Machine that carries its label.
	Recreate ActionKind = "recreate"
	// Restore binds a claim that lost its status or its object to the Machine that still carries
	// its label.
	Restore ActionKind = "restore"
	// Label completes a binding that stopped before the Machine was labelled.
	Label ActionKind = "label"
	// Unbind takes the label off: the Machine is handed over to the next claim.
	Unbind ActionKind = "unbind"
	// End moves the claim to Ended.
	End ActionKind = "end"
	// MoveOn moves a claim whose call is gone to its next candidate, or ends it if no candidate
	// takes it.
	MoveOn ActionKind = "move-on"
	// NoteMachine copies provider ID and Node name to the claim, for users.
	NoteMachine ActionKind = "note-machine"
	// BeginDelete adds the finalizer to the Machine and deletes it.
	BeginDelete ActionKind = "begin-delete"
	// RemoveFinalizer removes the finalizer.
	RemoveFinalizer ActionKind = "remove-finalizer"
	// Return takes the label off a Machine that its claim has returned, and marks the Machine as
	// one of the floor's.
	Return ActionKind = "return"
	// MarkFloor marks the Machine as one of the floor's.
	MarkFloor ActionKind = "mark-floor"
	// Keep takes off what [BeginDelete] wrote on a Machine that its claim keeps after all.
	Keep ActionKind = "keep"
	// MarkRepair makes the Machine's annotation for MachineHealthChecks agree with its claim; see
	// [SetRepair].
	MarkRepair ActionKind = "mark-repair"
	// PauseMachineSet stops a MachineSet from creating Machines while replicas are lowered for
	// those that it has not created.
	PauseMachineSet ActionKind = "pause-machine-set"
	// UnpauseMachineSet takes that pause off.
	UnpauseMachineSet ActionKind = "unpause-machine-set"
	// LowerSet lowers one MachineSet while the MachineDeployment is paused.
	LowerSet ActionKind = "lower-set"
)

// Reasons of claims, as reported in [v1alpha1.MachineClaimStatus].
const (
	ReasonWaitingForMachine = claimreasons.WaitingForMachine
	ReasonBound             = claimreasons.Bound
	ReasonNodeJoined        = claimreasons.NodeJoined
	ReasonReleaseRequested  = claimreasons.ReleaseRequested
	ReasonCollected         = claimreasons.Collected
	ReasonOwnerMissing      = claimreasons.OwnerMissing
	ReasonReleased          = claimreasons.Released
	ReasonHandedOver        = claimreasons.HandedOver
	ReasonReturnRequested   = claimreasons.ReturnRequested
	ReasonReturned          = claimreasons.Returned
	ReasonCancelled         = claimreasons.Cancelled
	ReasonMachineDeleting   = claimreasons.MachineDeleting
	ReasonMachineLost       = claimreasons.MachineLost
	ReasonFailed            = claimreasons.Failed
	ReasonLate              = claimreasons.Late
	ReasonNodeNotSeen       = claimreasons.NodeNotSeen
	ReasonInfrastructure    = claimreasons.WaitingForInfrastructure
	ReasonWaitingForNode    = claimreasons.WaitingForNode
	ReasonNoRoom            = claimreasons.NoRoom
	ReasonRefused           = claimreasons.Refused
	ReasonNodeGroupGone     = claimreasons.NodeGroupGone
	ReasonNeverMade         = claimreasons.NeverMade
	ReasonWriteRefused      = claimreasons.WriteRefused
	ReasonStateLost         = claimreasons.StateLost
)

// IsTrouble reports whether a claim's reason means that its holder did not get, or did not keep,
// what it asked for.
func IsTrouble(reason string) bool {
	return slices.Contains([]string{
		ReasonMachineLost, ReasonFailed, ReasonLate, ReasonNoRoom, ReasonRefused, ReasonNodeGroupGone, ReasonStateLost,
	}, reason)
}

// Reasons of the Warning event on a MachineDeployment that is frozen.
const (
	// ReasonReplicasLowered means that another writer set replicas below what is claimed.
	ReasonReplicasLowered = "ReplicasLoweredBelowClaims"
	// ReasonReplicasRestored means that another writer keeps setting replicas back to its own
	// number.
	ReasonReplicasRestored = "ReplicasWrittenBack"
)

// Decide computes the next step of the protocol. It depends only on the snapshot.
func Decide(s *Snapshot) *Decision {
	s.prepare()
	if why := s.held(); why != nil {
		return s.wait(why)
	}
	b := s.open()
	b.startReleases()
	b.startReturns()
	b.decrement()
	b.unpause()
	b.raiseToOwned()
	b.readmit()
	b.adopt()
	b.admitWaiting()
	b.assign()
	b.markFloors()
	b.coverShortage()
	b.d.HasSpare = b.spare() > 0 || b.blocking() > 0
	b.releaseSpare()
	b.shrink()
	b.close()
	s.actOnClaims(b.d)
	s.actOnMachines(b.d)
	return b.d
}

// EntersOnly reports whether the decision does nothing but enter the claim, with a new replica for
// it. Such a ledger write is correct whatever has happened to the Machines and the other claims
// since they were read. If something else is due, such as the end of a claim that leaves its
// replica to the next one, that comes first.
func (d *Decision) EntersOnly(s *Snapshot, claimID string) bool {
	// A claim that is not marked as entered yet is mostly a lagging cache, and no reason to wait.
	// Nor is who repairs a Node.
	more := slices.ContainsFunc(d.Actions, func(a Action) bool { return a.Kind != MarkAdmitted && a.Kind != MarkRepair })
	if d.Ledger == nil || more || len(d.Refused) > 0 || s.Ledger == nil || s.moved() || d.Pause != PauseKeep || d.Lowered != "" || d.Removes {
		return false
	}
	rest := d.Ledger.Clone()
	delete(rest.Pending, claimID)
	rest.LastReplicas--
	entry, entered := d.Ledger.Pending[claimID]
	return entered && entry == Assignment{} && d.Replicas == s.Group.Replicas+1 && rest.same(s.Ledger)
}

// Wake asks for another look after the given time, unless an earlier one was asked for.
func (d *Decision) Wake(after time.Duration) {
	after = max(after, 10*time.Millisecond)
	if d.RequeueAfter == 0 || after < d.RequeueAfter {
		d.RequeueAfter = after
	}
}

// close completes the next ledger, and puts it into the decision if it differs from the one that
// was read.
func (b *books) close() {
	b.next.Spare = max(0, b.spare())
	b.next.Version = 1
	if len(b.next.Returning) > 0 {
		b.next.Version = 2
	}
	if b.next.Lowered {
		// Only by the decrements: a difference that others made stays.
		b.next.LastReplicas -= min(max(0, b.next.LastReplicas-b.next.Floor), b.Group.Replicas-b.d.Replicas)
	} else {
		b.next.LastReplicas = b.d.Replicas
	}
	b.stampGenerations()
	b.d.Unusable, b.d.Claimed = b.unusable(false), b.claimed(true)+b.restorable()
	if b.Ledger == nil {
		// A ledger is begun by the first claim, or when something else has to be recorded there,
		// not by a look at the group. One that was wiped is rebuilt.
		_, foreign := b.Deployment.Annotations[v1alpha1.ClaimedAnnotation] // copied with another's ledger: policies read it
		quiet := (!foreign || b.Group.Has(eligibility.NotMember)) &&
			len(b.next.Pending) == 0 && len(b.next.Releasing) == 0 && len(b.next.Returning) == 0 && len(b.next.Marking) == 0 && b.next.Shrink == nil &&
			b.d.Pause == PauseKeep && !b.next.Lowered &&
			b.d.Replicas <= b.Group.Replicas // replicas are raised to the min size without a claim
		if quiet && !slices.ContainsFunc(b.Claims, hasMachine) {
			b.d.Replicas = b.Group.Replicas
			return
		}
		b.d.Ledger = b.next
		return
	}
	if b.d.Replicas != b.Group.Replicas || b.d.Pause != PauseKeep || !b.next.same(b.Ledger) || b.moved() {
		b.d.Ledger = b.next
	}
}
