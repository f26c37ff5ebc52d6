package fakeagent

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Stage is a stage of a machine's progress.
type Stage string

const (
	// StageObject means that the Machine object exists.
	StageObject Stage = "object"
	// StageProviderID means that the machine has its provider ID.
	StageProviderID Stage = "providerID"
	// StageNode means that the machine has its Node.
	StageNode Stage = "node"
)

// Outcome is the outcome of a machine that fails.
type Outcome string

const (
	// OutcomeStuck leaves the machine as it is. Its holder has to decide.
	OutcomeStuck Outcome = "stuck"
	// OutcomeFailed means that the agent decides that the machine has failed; see [Agent.GiveUp].
	OutcomeFailed Outcome = "failed"
	// OutcomeLate means that the agent decides that the machine is late; see [Agent.TimeOut].
	OutcomeLate Outcome = "late"
	// OutcomeLost means that another actor deletes the machine; see [Agent.LoseMachine]. Without a
	// Machine object, nothing can be deleted.
	OutcomeLost Outcome = "lost"
)

// DefaultFailureDelay is the delay of a [MachineFailure] that does not set one.
const DefaultFailureDelay = time.Second

// MachineFailure is a failure of machines created for claims. It affects the oldest claim that is
// waiting when the machine appears.
type MachineFailure struct {
	// Machine is the number of the failing machine of the node group, counted from 1 in order of
	// creation. The user's own machines are not counted. Every makes every n-th machine fail.
	// Exactly one of the two is positive.
	Machine, Every int
	// Stage is the stage that the machine does not reach. REQUIRED.
	Stage Stage
	// After is how long after the previous stage the failure is reported. Zero means
	// [DefaultFailureDelay].
	After time.Duration
	// Reason and Message are reported by the machine's infrastructure. OPTIONAL.
	Reason, Message string
	// Outcome is the outcome of the failure. Empty means [OutcomeStuck].
	Outcome Outcome
}

// Validate returns an error that names the first invalid field, by its name in scenarios.
func (f MachineFailure) Validate() error {
	switch {
	case f.Machine < 0:
		return fmt.Errorf("machine: %d is negative; machines are counted from 1", f.Machine)
	case f.Every < 0:
		return fmt.Errorf("every: %d is negative", f.Every)
	case (f.Machine > 0) == (f.Every > 0):
		return errors.New("machine: set either machine or every")
	case f.After < 0:
		return fmt.Errorf("after: %s is negative", f.After)
	}
	switch f.Stage {
	case StageObject, StageProviderID, StageNode:
	default:
		return fmt.Errorf("stage: %q is not one of object, providerID, node", f.Stage)
	}
	switch f.Outcome {
	case "", OutcomeStuck, OutcomeFailed, OutcomeLate:
	case OutcomeLost:
		if f.Stage == StageObject {
			return errors.New("outcome: a machine without a Machine object cannot be lost; use another stage")
		}
	default:
		return fmt.Errorf("outcome: %q is not one of stuck, failed, late, lost", f.Outcome)
	}
	return nil
}

// FailMachines replaces the planned failures of the node group's future machines. If several match
// a machine, the first applies. It panics if the group does not exist or a failure is invalid.
func (a *Agent) FailMachines(groupID string, failures ...MachineFailure) {
	for _, f := range failures {
		if err := f.Validate(); err != nil {
			panic(fmt.Sprintf("fakeagent: %v", err))
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mustGroup(groupID).failures = failures
}

// failureOf returns the planned failure of the n-th machine, or nil.
func (g *group) failureOf(n int) *MachineFailure {
	for _, f := range g.failures {
		if n == f.Machine || f.Every > 0 && n%f.Every == 0 {
			return &f
		}
	}
	return nil
}

// step moves the machine to a stage after the delay, or makes it fail there.
func (a *Agent) step(m *machine, to Stage, delay time.Duration, f func()) {
	if m.fails == nil || m.fails.Stage != to {
		a.after(delay, f)
		return
	}
	a.after(cmp.Or(m.fails.After, DefaultFailureDelay), func() { a.failed(m) })
}

// failed reports the failure, and applies its outcome.
func (a *Agent) failed(m *machine) {
	if m.gone || !m.deletedAt.IsZero() {
		return
	}
	m.failureReason, m.failureMessage = m.fails.Reason, m.fails.Message
	a.touchMachine(m)
	c := m.claim
	if c == nil && !m.appeared {
		c = a.firstWaiting(m.group)
	}
	why := cmp.Or(m.fails.Message, m.fails.Reason, fmt.Sprintf("the machine does not get to its %s", m.fails.Stage))
	switch m.fails.Outcome {
	case OutcomeFailed, OutcomeLate:
		if c == nil || !c.live() {
			return
		}
		reason, failure := claimreasons.Failed, givenUp
		if m.fails.Outcome == OutcomeLate {
			reason, failure = claimreasons.Late, notFailed
		}
		a.release(c, reason, why, failure)
	case OutcomeLost:
		a.lose(m)
	default:
	}
}

// firstWaiting returns the oldest claim that waits for a machine of the group, or nil.
func (a *Agent) firstWaiting(g *group) *claim {
	for _, c := range a.claimsOf(g) {
		if c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING {
			return c
		}
	}
	return nil
}
