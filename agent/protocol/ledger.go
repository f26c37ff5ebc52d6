package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// LedgerVersion is the newest ledger format that this agent reads. It writes the oldest format that
// can express the ledger, so that older agents keep working on a node group that uses nothing new.
const LedgerVersion = 2

// ErrNewerLedger means that a newer agent wrote the ledger. This agent must not touch the node
// group.
var ErrNewerLedger = errors.New("the ledger was written by a newer agent")

// Ledger records what is in flight on one MachineDeployment. It is stored as JSON in an annotation
// there, and changes only in the same write as spec.replicas, by compare-and-swap.
type Ledger struct {
	// Version is the version of the format.
	Version int `json:"v"`
	// Of is the MachineDeployment, as namespace/name, because a copied MachineDeployment carries
	// the annotations of the original. It is empty in ledgers of older agents.
	Of string `json:"of,omitempty"`
	// UID is that MachineDeployment's; empty in ledgers of older agents.
	UID types.UID `json:"uid,omitempty"`
	// Seq is raised by every write and never goes back, so that two ledgers with the same content
	// differ.
	Seq int64 `json:"seq"`
	// By is the agent process that wrote the ledger. The others leave the node group to it while it
	// makes progress. It is empty in ledgers of older agents.
	By string `json:"by,omitempty"`
	// Floor is the number of machines that the user owns.
	Floor int32 `json:"floor"`
	// LastReplicas is spec.replicas as the agent last wrote or accounted for it. Any difference was
	// made by another writer.
	LastReplicas int32 `json:"lastReplicas"`
	// Min is the last min size that was read without a problem. It stays in force while the
	// annotation cannot be used.
	Min int32 `json:"min,omitempty"`
	// Lowered means that another writer set replicas below what is claimed, or keeps setting them
	// to its own number. The group is frozen, and Floor and LastReplicas stay as they were, until a
	// person takes [v1alpha1.ReplicasLoweredAnnotation] off.
	Lowered bool `json:"lowered,omitempty"`
	// Written is the last known number of replicas that another writer enforces; nil in ledgers of
	// older agents. It is replaced, never changed in place.
	Written *Written `json:"written,omitempty"`
	// Spare is the number of replicas without an owner. It is derived, and kept for users and
	// metrics.
	Spare int32 `json:"spare"`
	// Pending holds the claims whose replica is accounted for and whose Machine is not labelled
	// yet, by claim id.
	Pending map[string]Assignment `json:"pending,omitempty"`
	// Releasing holds the Machines that are being removed, by UID.
	Releasing map[types.UID]Release `json:"releasing,omitempty"`
	// Returning holds the Machines, by UID, that claims have returned to the user. The floor counts
	// them. A record stays until its claim has ended. Since version 2.
	Returning map[types.UID]Returned `json:"returning,omitempty"`
	// Marking holds the UIDs of the Machines that are about to be marked as the floor's. It is
	// replaced, never changed in place.
	Marking []types.UID `json:"marking,omitempty"`
	// Shrink means that a MachineSet is paused to remove spares whose Machines never came; nil
	// for none. It is replaced, never changed in place.
	Shrink *Shrink `json:"shrink,omitempty"`
	// Paused is the last pause that the agent set on the MachineDeployment, as long as claims are
	// pending. It is nil in ledgers of older agents, which drop it: then the pause restarts the
	// deadlines of waiting claims. It is replaced, never changed in place.
	Paused *Paused `json:"paused,omitempty"`
}

// Paused is a pause that the agent set on the MachineDeployment.
type Paused struct {
	// At is when the agent set it, by its clock, in seconds since 1970.
	At int64 `json:"at"`
	// Before is when the last pause before it ended that was not the agent's own, in seconds since
	// 1970; zero if that is not known.
	Before int64 `json:"before,omitempty"`
}

// Shrink is a MachineSet that the agent has paused or is about to pause.
type Shrink struct {
	Set string `json:"set"`
	// Done means that replicas were lowered, or no longer need to be. All that is left is to
	// unpause the MachineSet.
	Done bool `json:"done,omitempty"`
}

// Written is the value of spec.replicas that another writer set.
type Written struct {
	// Replicas is the number that it set last, or the one that the ledger began with.
	Replicas int32 `json:"n"`
	// Restored is how often that number was set again over the agent's. Since is when that first
	// happened, in seconds since 1970.
	Restored int32 `json:"restored,omitempty"`
	Since    int64 `json:"since,omitempty"`
}

// Assignment is a pending claim's entry: the Machine assigned to it, or none yet.
type Assignment struct {
	Machine string    `json:"m,omitempty"`
	UID     types.UID `json:"u,omitempty"`
	// Adopted means that the Machine was the user's, and the floor was lowered for it.
	Adopted bool `json:"adopted,omitempty"`
}

// Release is the removal of one Machine.
type Release struct {
	// Machine is the Machine's name.
	Machine string `json:"m"`
	// Claim is the claim that had the Machine; empty if it was unclaimed.
	Claim string `json:"c,omitempty"`
	// Drained means that the Node need not be drained.
	Drained bool `json:"drained,omitempty"`
	// Set is the MachineSet whose replicas are being lowered under pause; empty in the ordinary
	// case.
	Set string `json:"set,omitempty"`
	// Decremented means that replicas were decremented for the Machine, or were already lowered by
	// a rollout or by another writer.
	Decremented bool `json:"back,omitempty"`
	// LoweredAs is the Machine's UID before a move or a restore, if its MachineSet was lowered for
	// it under that UID; empty otherwise.
	LoweredAs types.UID `json:"as,omitempty"`
	// Generation is the generation of the MachineDeployment that the lowering made. The finalizer
	// is removed once Cluster API has observed it.
	Generation int64 `json:"gen,omitempty"`
}

// Returned is a Machine that its claim has returned to the user.
type Returned struct {
	// Machine is the Machine's name.
	Machine string `json:"m"`
	// Claim is the claim that returned it, whose label is taken off.
	Claim string `json:"c"`
}

// ParseLedger parses a ledger annotation. It returns an error for text that is not a ledger, and
// [ErrNewerLedger] for a newer version.
func ParseLedger(text string) (*Ledger, error) {
	var l Ledger
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return nil, fmt.Errorf("ledger is not readable: %w", err)
	}
	if l.Version > LedgerVersion {
		return nil, fmt.Errorf("%w (format %d, this agent knows %d)", ErrNewerLedger, l.Version, LedgerVersion)
	}
	if l.Version < 1 || l.Floor < 0 || l.LastReplicas < 0 || l.Seq < 0 || l.Min < 0 {
		return nil, fmt.Errorf("ledger is not readable: impossible numbers in %q", text)
	}
	return &l, nil
}

// errOtherLedger means that the ledger was written for another MachineDeployment and copied with
// it.
var errOtherLedger = errors.New("the ledger belongs to another MachineDeployment")

// LedgerOf returns the ledger of a MachineDeployment, nil when it has none. Errors are those of
// [ParseLedger], and errOtherLedger.
func LedgerOf(md *clusterv1.MachineDeployment) (*Ledger, error) {
	text, present := md.Annotations[v1alpha1.LedgerAnnotation]
	if !present {
		return nil, nil
	}
	l, err := ParseLedger(text)
	if err != nil {
		return nil, err
	}
	if l.Of != "" && l.Of != (types.NamespacedName{Namespace: md.Namespace, Name: md.Name}).String() {
		return nil, fmt.Errorf("%w: %s", errOtherLedger, l.Of)
	}
	return l, nil
}

// Encode returns the annotation's value.
func (l *Ledger) Encode() string {
	text, err := json.Marshal(l)
	if err != nil {
		panic(err) // strings, numbers and maps of them always encode
	}
	return string(text)
}

// Clone returns a deep copy with non-nil maps.
func (l *Ledger) Clone() *Ledger {
	c := *l
	c.Pending = make(map[string]Assignment, len(l.Pending))
	maps.Copy(c.Pending, l.Pending)
	c.Releasing = make(map[types.UID]Release, len(l.Releasing))
	maps.Copy(c.Releasing, l.Releasing)
	c.Returning = make(map[types.UID]Returned, len(l.Returning))
	maps.Copy(c.Returning, l.Returning)
	return &c
}

// same reports whether two ledgers have the same content, ignoring seq, the writer, the derived
// spare, and the last pause, which is recorded in the write that sets it.
func (l *Ledger) same(other *Ledger) bool {
	return l.Floor == other.Floor && l.LastReplicas == other.LastReplicas && l.Min == other.Min && l.Lowered == other.Lowered &&
		slices.Equal(l.Marking, other.Marking) && maps.Equal(l.Pending, other.Pending) && maps.Equal(l.Releasing, other.Releasing) &&
		maps.Equal(l.Returning, other.Returning) &&
		samePointed(l.Shrink, other.Shrink) && samePointed(l.Written, other.Written)
}

func samePointed[T comparable](a, b *T) bool {
	return (a == nil) == (b == nil) && (a == nil || *a == *b)
}

// Unassigned counts the pending claims that have been assigned no Machine.
func (l *Ledger) Unassigned() int {
	n := 0
	for _, entry := range l.Pending {
		if entry.UID == "" {
			n++
		}
	}
	return n
}

// Assigned returns the UIDs of the Machines that are assigned to pending claims.
func (l *Ledger) Assigned() map[types.UID]bool {
	uids := make(map[types.UID]bool, len(l.Pending))
	for _, entry := range l.Pending {
		if entry.UID != "" {
			uids[entry.UID] = true
		}
	}
	return uids
}
