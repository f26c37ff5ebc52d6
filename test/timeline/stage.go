package timeline

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
)

// Stage is a point in the life of a NodeClaim.
type Stage int

// The stages, in their usual order.
const (
	// Created: the NodeClaim exists.
	Created Stage = iota
	// Launched: Karpenter has the result of Create.
	Launched
	// Claimed: the claim is durable in the hub.
	Claimed
	// Bound: the claim has its Machine.
	Bound
	// Provisioned: the Machine has a provider ID.
	Provisioned
	// Registered: the Node has joined and Karpenter has registered it.
	Registered
	// Initialized: pods may run on the Node.
	Initialized
	// Deleting: the NodeClaim is being deleted.
	Deleting
	// Gone: the NodeClaim no longer exists.
	Gone
	// Returned: the claim has ended and its replica is being returned.
	Returned
	// Failed: the hub shows that the claim has failed. Most claims do not get there.
	Failed

	stages = iota
)

func (s Stage) String() string {
	return [stages]string{
		"created", "launched", "claimed", "bound", "provisioned", "registered", "initialized", "deleting", "gone", "returned", "failed",
	}[s]
}

// Timeline is the life of one NodeClaim. Unknown names are empty.
type Timeline struct {
	UID       types.UID
	NodeClaim string
	NodePool  string
	// Group is the MachineDeployment's name.
	Group      string
	ClaimPhase string
	Machine    string
	Node       string
	ProviderID string
	// Disrupted is Karpenter's own reason for removing it (Empty, Underutilized, Drifted, …), or
	// empty if there is none.
	Disrupted string

	at [stages]time.Time
}

// At returns when the stage was first seen, or the zero time.
func (j Timeline) At(stage Stage) time.Time { return j.at[stage] }

// Reached reports whether the stage was seen.
func (j Timeline) Reached(stage Stage) bool { return !j.at[stage].IsZero() }

// Took returns the time between two stages, and false if one of them was not seen.
func (j Timeline) Took(from, to Stage) (time.Duration, bool) {
	if !j.Reached(from) || !j.Reached(to) {
		return 0, false
	}
	return max(0, j.at[to].Sub(j.at[from])), true
}

// String formats the timeline on one line, for test messages.
func (j Timeline) String() string {
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

// Group is the state of one MachineDeployment.
type Group struct {
	Name     string
	Replicas int32
	// Machines counts all Machines, and Running those that have joined and are not being deleted.
	Machines, Running int
	// Claims counts the live claims.
	Claims int
}

// Pods counts the pods that are not being deleted.
type Pods struct {
	// Waiting pods have no Node, Starting ones have one, and Running ones run.
	Waiting, Starting, Running int
}

// Total returns the number of pods.
func (p Pods) Total() int { return p.Waiting + p.Starting + p.Running }

// State is the state of everything at one moment.
type State struct {
	Pods Pods
	// Timelines are in the order in which their NodeClaims were created. Ended ones are kept.
	Timelines []Timeline
	// Groups by name.
	Groups []Group
	// Nodes is the number of Nodes, claimed or not.
	Nodes int
}

// Live returns the timelines whose NodeClaim exists.
func (s State) Live() []Timeline {
	return slices.DeleteFunc(slices.Clone(s.Timelines), func(j Timeline) bool { return j.Reached(Gone) })
}

// Latency summarises durations.
type Latency struct {
	Count       int
	Median, P99 time.Duration
	Max         time.Duration
}

// LatencyOf summarises the durations of the timelines from one stage to another. It ignores
// timelines that did not reach both.
func LatencyOf(timelines []Timeline, from, to Stage) Latency {
	var took []time.Duration
	for _, j := range timelines {
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

// percentile returns the smallest value that p percent of the sorted values do not exceed (nearest
// rank).
func percentile(sorted []time.Duration, p int) time.Duration {
	rank := (p*len(sorted) + 99) / 100
	return sorted[max(rank, 1)-1]
}
