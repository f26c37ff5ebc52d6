package fakeagent

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Stage is how far a machine gets.
type Stage string

const (
	// StageObject is the Machine object.
	StageObject Stage = "object"
	// StageProviderID is the machine's provider ID.
	StageProviderID Stage = "providerID"
	// StageNode is the machine's Node.
	StageNode Stage = "node"
)

// Outcome is what comes of a machine that fails.
type Outcome string

const (
	// OutcomeStuck leaves it as it is: its holder has to judge.
	OutcomeStuck Outcome = "stuck"
	// OutcomeFailed is the agent's judgement that it will not come; see [Agent.GiveUp].
	OutcomeFailed Outcome = "failed"
	// OutcomeLate is the agent's judgement that it is late; see [Agent.TimeOut].
	OutcomeLate Outcome = "late"
	// OutcomeLost is that another actor deletes it; see [Agent.LoseMachine]. Without a Machine object nothing can be deleted.
	OutcomeLost Outcome = "lost"
)

// DefaultFailureDelay is that of a [MachineFailure] without one.
const DefaultFailureDelay = time.Second

// MachineFailure is the failure of machines that are made for claims. The claim that meets it is the oldest that waits when the machine appears.
type MachineFailure struct {
	// Machine is which of the node group's machines fails, counted from 1 in the order of their making; machines of the user's own are not counted.
	// Every is that each so-manieth does. Exactly one of the two is positive.
	Machine, Every int
	// Stage is what the machine does not get to. REQUIRED.
	Stage Stage
	// After is how long after the step before it the failure shows. Zero means [DefaultFailureDelay].
	After time.Duration
	// Reason and Message are what the machine's infrastructure reports then. OPTIONAL.
	Reason, Message string
	// Outcome is what comes of it. Empty means [OutcomeStuck].
	Outcome Outcome
}

// Validate returns an error that names the first field that cannot be used, as it is called in scenarios.
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
		return fmt.Errorf("stage: %q is none of object, providerID, node", f.Stage)
	}
	switch f.Outcome {
	case "", OutcomeStuck, OutcomeFailed, OutcomeLate:
	case OutcomeLost:
		if f.Stage == StageObject {
			return errors.New("outcome: a machine without a Machine object cannot be lost; use another stage")
		}
	default:
		return fmt.Errorf("outcome: %q is none of stuck, failed, late, lost", f.Outcome)
	}
	return nil
}

// FailMachines replaces the failures of the node group's machines that are made from here on. Of several that meet one machine the first counts. It
// panics when there is no such group, or a failure is not valid.
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

// failureOf returns how the n-th machine is to fail, or nil.
func (g *group) failureOf(n int) *MachineFailure {
	for _, f := range g.failures {
		if n == f.Machine || f.Every > 0 && n%f.Every == 0 {
			return &f
		}
	}
	return nil
}

// step has the machine get to a stage after the delay, or fail there.
func (a *Agent) step(m *machine, to Stage, delay time.Duration, f func()) {
	if m.fails == nil || m.fails.Stage != to {
		a.after(delay, f)
		return
	}
	a.after(cmp.Or(m.fails.After, DefaultFailureDelay), func() { a.failed(m) })
}

// failed shows the failure, and what comes of it.
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
		reason := reasonFailed
		if m.fails.Outcome == OutcomeLate {
			reason = reasonLate
		}
		a.release(c, reason, why, m.fails.Outcome == OutcomeFailed)
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
