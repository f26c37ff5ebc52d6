package protocol

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// Decision is what the protocol asks for in a snapshot. It is computed by [Decide], which has no side effects.
type Decision struct {
	// Ledger is the content to write, with the seq of the snapshot's; nil when the ledger is as it should be.
	Ledger *Ledger
	// Replicas is spec.replicas to write in the same patch.
	Replicas int32
	// Pause is the change to make in the same patch to Cluster API's paused annotation.
	Pause PauseChange
	// Lowered says that the group is frozen with the ledger write, and why; empty when it is not. LoweredReason is the reason of the
	// event about it.
	Lowered, LoweredReason string
	// Urgent reports that a call, or a claim, waits for the ledger write. Other writes are coalesced.
	Urgent bool
	// Refused are the pending claims that cannot be entered here, by claim id.
	Refused map[string]eligibility.Refusal
	// Queued are the ids of the pending claims that are entered once others have left the ledger.
	Queued map[string]bool
	// Claimed is how many claims have a replica once the ledger is written: no other writer may lower replicas below that.
	Claimed int32
	// Actions are the writes on other objects that the snapshot's ledger permits. They are not to be done when the ledger
	// has changed since.
	Actions []Action
	// Held reports that nothing is ordered and nothing removed until the world has been seen whole again.
	Held bool
	// Spare is whether there is a spare now, for the grace period; also while its release is only decided.
	Spare bool
	// Removes says that the decision lowers replicas, or begins to remove Machines of its own choice. Both depend on the template.
	Removes bool
	// Unusable is how many free Machines beyond the floor no claim may have once the ledger is written: something may run on them, or
	// they will not come.
	Unusable int32
	// Unmet is how many claims wait for whom the max size allows no further replica.
	Unmet int32
	// Again is when to look again without being told; zero for not.
	Again time.Duration
}

// PauseChange is what a ledger write does to Cluster API's paused annotation of the MachineDeployment.
type PauseChange int

const (
	// PauseKeep leaves it as it is.
	PauseKeep PauseChange = iota
	// PauseSet pauses the MachineDeployment for the agent.
	PauseSet
	// PauseRemove takes the agent's pause off, and no other one.
	PauseRemove
)

// Action is one write on one object. Which fields are set depends on the kind.
type Action struct {
	// Kind says what is written.
	Kind ActionKind
	// Claim, Machine and Set are the objects, as they were read.
	Claim   *v1alpha1.MachineClaim
	Machine *clusterv1.Machine
	Set     *clusterv1.MachineSet
	// Group is the MachineDeployment's UID, which a claim that is entered or bound remembers.
	Group types.UID
	// Release is the record of the Machine that is held, or of the one whose claim is restored while it is being released.
	Release Release
	// Remade reports that the claim was moved or restored: what its holder reported of the Machine's Node is lost.
	Remade bool
	// Returned reports that the claim whose status is restored returns its Machine.
	Returned bool
	// UIDs are the Machines that a MachineSet is lowered for, Counts all those that the ledger lowers under pause.
	UIDs, Counts []types.UID
	// Event is added to the claim's history; its time is the writer's to set.
	Event v1alpha1.Event
}

// String says what is written on which object.
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

// ActionKind is what an action does.
type ActionKind string

const (
	// MarkEntered notes on the claim that its replica is accounted for.
	MarkEntered ActionKind = "mark-entered"
	// Bind moves the claim from Pending to Bound and then labels its Machine.
	Bind ActionKind = "bind"
	// Fail gives a claim's Machine up: the claim is released by the agent itself.
	Fail ActionKind = "fail"
	// TimeOut releases a claim whose Machine is late, which the next claim may have.
	TimeOut ActionKind = "time-out"
	// Explain notes on a pending claim why its Machine does not come.
	Explain ActionKind = "explain"
	// WaitAnew has a claim's wait for a Machine count from now on.
	WaitAnew ActionKind = "wait-anew"
	// Recreate makes the MachineClaim of a claim again whose object was lost, from its Machine.
	Recreate ActionKind = "recreate"
	// Restore makes a claim Bound again that lost its status, or its object, while its Machine still carries its label.
	Restore ActionKind = "restore"
	// Label finishes a binding that stopped before the label.
	Label ActionKind = "label"
	// Unbind takes the label off: the Machine is handed over to whoever comes next.
	Unbind ActionKind = "unbind"
	// End moves the claim to Ended.
	End ActionKind = "end"
	// MoveOn moves a claim whose call is gone to its next candidate, and ends it when there is none that takes it.
	MoveOn ActionKind = "move-on"
	// NoteMachine copies provider ID and Node name to the claim, for people.
	NoteMachine ActionKind = "note-machine"
	// Hold puts the finalizer on the Machine and deletes it.
	Hold ActionKind = "hold"
	// LetGo takes the finalizer off.
	LetGo ActionKind = "let-go"
	// Return takes the label of the claim that returned it off a Machine, and marks it as one of the floor's.
	Return ActionKind = "return"
	// MarkFloor marks the Machine as one of the floor's.
	MarkFloor ActionKind = "mark-floor"
	// Keep takes what [Hold] put there off a Machine that its claim has after all.
	Keep ActionKind = "keep"
	// PauseMachineSet keeps a MachineSet from making Machines while replicas are lowered for those that it has not made.
	PauseMachineSet ActionKind = "pause-machine-set"
	// UnpauseMachineSet ends that.
	UnpauseMachineSet ActionKind = "unpause-machine-set"
	// LowerSet lowers one MachineSet while the MachineDeployment is paused.
	LowerSet ActionKind = "lower-set"
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
	ReasonReturnRequested   = "ReturnRequested"
	ReasonReturned          = "Returned"
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
	ReasonStateLost         = "StateLost"
)

// IsTrouble reports whether a claim's reason means that its holder did not get, or keep, what it asked for.
func IsTrouble(reason string) bool {
	return slices.Contains([]string{
		ReasonMachineLost, ReasonFailed, ReasonLate, ReasonNoRoom, ReasonRefused, ReasonNodeGroupGone, ReasonStateLost,
	}, reason)
}

// Reasons of the Warning event on a MachineDeployment that is frozen.
const (
	// ReasonReplicasLowered means that another writer set replicas below what is claimed.
	ReasonReplicasLowered = "ReplicasLoweredBelowClaims"
	// ReasonReplicasRestored means that another writer keeps setting replicas back to a number of its own.
	ReasonReplicasRestored = "ReplicasWrittenBack"
)

// Decide computes the next step of the protocol. It depends on nothing but the snapshot.
func Decide(s *Snapshot) *Decision {
	s.prepare()
	if why := s.held(); why != nil {
		return s.wait(why)
	}
	b := s.open()
	b.startReleases()
	b.startReturns()
	b.giveBacks()
	b.unpause()
	b.meet()
	b.readmit()
	b.adopt()
	b.enter()
	b.name()
	b.markFloors()
	b.d.Spare = b.spare() > 0
	b.coverShortage()
	b.releaseSpare()
	b.shrink()
	b.close()
	s.actOnClaims(b.d)
	s.actOnMachines(b.d)
	return b.d
}

// EntersOnly reports whether the decision does nothing but enter the claim, with a new replica for it. Its ledger write is right whatever has
// become of the Machines and the other claims since they were read. But where something else is due, such as the end
// of a claim that leaves its replica to the next one, that comes first.
func (d *Decision) EntersOnly(s *Snapshot, claimID string) bool {
	// That a claim is not marked as entered yet is mostly a cache that lags behind its mark, and no reason to wait.
	more := slices.ContainsFunc(d.Actions, func(a Action) bool { return a.Kind != MarkEntered })
	if d.Ledger == nil || more || len(d.Refused) > 0 || s.Ledger == nil || s.moved() || d.Pause != PauseKeep || d.Lowered != "" || d.Removes {
		return false
	}
	rest := d.Ledger.Clone()
	delete(rest.Pending, claimID)
	rest.LastReplicas--
	named, entered := d.Ledger.Pending[claimID]
	return entered && named == Named{} && d.Replicas == s.Group.Replicas+1 && rest.same(s.Ledger)
}

// Wake asks for another look after a while, the soonest of those asked for.
func (d *Decision) Wake(after time.Duration) {
	after = max(after, 10*time.Millisecond)
	if d.Again == 0 || after < d.Again {
		d.Again = after
	}
}

// close completes the next ledger, and keeps it if it says something new.
func (b *books) close() {
	b.next.Spare = max(0, b.spare())
	b.next.Version = 1
	if len(b.next.Returning) > 0 {
		b.next.Version = 2
	}
	if b.next.Lowered {
		// What is given back; a difference of others' making stays.
		b.next.LastReplicas -= min(max(0, b.next.LastReplicas-b.next.Floor), b.Group.Replicas-b.d.Replicas)
	} else {
		b.next.LastReplicas = b.d.Replicas
	}
	b.dateGiveBacks()
	b.d.Unusable, b.d.Claimed = b.unusable(), b.claimed(true)+b.restorable()
	if b.Ledger == nil {
		// A ledger is begun by the first claim, or for what else has to be written there, not by being looked at; one that was wiped is rebuilt.
		_, foreign := b.Deployment.Annotations[v1alpha1.ClaimedAnnotation] // copied with a ledger that is another's: policies go by it
		quiet := (!foreign || b.Group.Has(eligibility.NotMember)) &&
			len(b.next.Pending) == 0 && len(b.next.Releasing) == 0 && len(b.next.Returning) == 0 && len(b.next.Marking) == 0 && b.next.Shrink == nil &&
			b.d.Pause == PauseKeep && !b.next.Lowered &&
			b.d.Replicas <= b.Group.Replicas // a min size is raised to without a claim
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
