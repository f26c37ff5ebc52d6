package journey

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
)

// Stage is a point on the way of a NodeClaim.
type Stage int

// The stages, in their usual order.
const (
	// Created: the NodeClaim exists.
	Created Stage = iota
	// Launched: Karpenter has the answer of Create.
	Launched
	// Claimed: the claim is durable in the hub.
	Claimed
	// Bound: the claim has its Machine.
	Bound
	// Provisioned: the Machine has a provider ID.
	Provisioned
	// Registered: the Node has joined and Karpenter knows it.
	Registered
	// Initialized: pods may run on the Node.
	Initialized
	// Deleting: the NodeClaim's deletion was asked for.
	Deleting
	// Gone: the NodeClaim does not exist any more.
	Gone
	// Returned: the claim has ended and its replica is on its way back.
	Returned

	stages = iota
)

func (s Stage) String() string {
	return [stages]string{
		"created", "launched", "claimed", "bound", "provisioned", "registered", "initialized", "deleting", "gone", "returned",
	}[s]
}

// Journey is the way of one NodeClaim. Names are empty while unknown.
type Journey struct {
	UID       types.UID
	NodeClaim string
	NodePool  string
	// Group is the MachineDeployment's name.
	Group      string
	ClaimPhase string
	Machine    string
	Node       string
	ProviderID string
	// Disrupted is why Karpenter itself decided to remove it: Empty, Underutilized, Drifted, …; empty if it did not.
	Disrupted string

	at [stages]time.Time
}

// At returns when the stage was first seen; zero if it never was.
func (j Journey) At(stage Stage) time.Time { return j.at[stage] }

// Reached reports whether the stage was seen.
func (j Journey) Reached(stage Stage) bool { return !j.at[stage].IsZero() }

// Took returns the time between two stages, and false if one of them was not seen.
func (j Journey) Took(from, to Stage) (time.Duration, bool) {
	if !j.Reached(from) || !j.Reached(to) {
		return 0, false
	}
	return max(0, j.at[to].Sub(j.at[from])), true
}

// String tells the journey in one line, for messages of tests.
func (j Journey) String() string {
	var b strings.Builder
	_, _ = fmt.Fprintf(&b, "NodeClaim %s on %s, Machine %s, Node %s:", j.NodeClaim, j.Group,
		lo.CoalesceOrEmpty(j.Machine, "none"), lo.CoalesceOrEmpty(j.Node, "none"))
	for stage := range Stage(stages) {
		if j.Reached(stage) {
			_, _ = fmt.Fprintf(&b, " %s %s,", stage, j.at[stage].Format(time.TimeOnly))
		}
	}
	if j.Disrupted != "" {
		_, _ = fmt.Fprintf(&b, " disrupted: %s", j.Disrupted)
	}
	return strings.TrimSuffix(b.String(), ",")
}

// Group is what is known of one MachineDeployment.
type Group struct {
	Name     string
	Replicas int32
	// Machines there are, and those of them that have joined and are not being deleted.
	Machines, Running int
	// Claims that live.
	Claims int
}

// Pods counts the pods that are not being deleted.
type Pods struct {
	// Waiting have no Node, Starting have one, Running run.
	Waiting, Starting, Running int
}

// Total is how many pods there are.
func (p Pods) Total() int { return p.Waiting + p.Starting + p.Running }

// State is everything at one moment.
type State struct {
	Pods Pods
	// Journeys in the order in which their NodeClaims were created; ended ones stay.
	Journeys []Journey
	// Groups by name.
	Groups []Group
	// Nodes there are, claimed or not.
	Nodes int
}

// Live returns the journeys whose NodeClaim exists.
func (s State) Live() []Journey {
	return slices.DeleteFunc(slices.Clone(s.Journeys), func(j Journey) bool { return j.Reached(Gone) })
}

// Latency summarises durations.
type Latency struct {
	Count       int
	Median, P99 time.Duration
	Max         time.Duration
}

// LatencyOf summarises how long the journeys took from one stage to another. Those that did not see both are left out.
func LatencyOf(journeys []Journey, from, to Stage) Latency {
	var took []time.Duration
	for _, j := range journeys {
		if d, ok := j.Took(from, to); ok {
			took = append(took, d)
		}
	}
	if len(took) == 0 {
		return Latency{}
	}
	slices.Sort(took)
	return Latency{Count: len(took), Median: percentile(took, 50), P99: percentile(took, 99), Max: took[len(took)-1]}
}

// percentile returns the smallest value that p percent of the sorted values do not exceed (nearest rank).
func percentile(sorted []time.Duration, p int) time.Duration {
	rank := (p*len(sorted) + 99) / 100
	return sorted[max(rank, 1)-1]
}
