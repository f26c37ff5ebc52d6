package protocol

import (
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

const (
	// settling is how long after its start an agent fails no waiting claim. It does not know yet
	// which Machines may be given to the claim, because holders report their Nodes about once a
	// minute.
	settling = 2 * time.Minute
	// punctual is the longest time after a claim's deadline at which a running agent looks.
	punctual = time.Minute
	// explainEvery is the minimum time between two explanations of why one claim waits.
	explainEvery = time.Minute
	// slowInfrastructure is how long a bound claim waits for its Machine's infrastructure before it
	// explains why. Until then most infrastructure reports only that it is being created, and an
	// explanation would be a write for every claim.
	slowInfrastructure = 3 * time.Minute
)

// unmade returns a message if no Machine was created for the claim within its deadline, "" while
// one may still come. A claim that the pending ledger write gives a Machine does not fail. The
// deadline counts only for an agent that looks when it passes. If the agent looks later, the hub or
// the agents were away, and Machines may be late for that reason or may have joined unseen. Then
// the wait restarts. It also restarts when another Machine is ordered in place of one that joined too
// early, or if the deadline passes while that is not certain. A restart is recorded on the claim, so
// that every agent sees it, also after a restart of the agent. The wait also restarts after a pause.
func (s *Snapshot) unmade(d *Decision, c *v1alpha1.MachineClaim) string {
	deadline := s.Failure.ObjectDeadline
	switch {
	case deadline == 0:
		return ""
	case d.Ledger != nil && d.Ledger.Pending[c.Spec.ClaimID].UID != "":
		return ""
	}
	since := c.CreationTimestamp.Time
	if c.Status.WaitingSince != nil {
		since = c.Status.WaitingSince.Time
	}
	since = latest(since, unpausedAt(s.Deployment.Status.Conditions))
	waited := s.Now.Sub(since)
	overdue := waited - deadline
	unsettled := min(settling, deadline) - s.Now.Sub(s.Started)
	restart := func(why string) {
		d.Actions = append(d.Actions, Action{Kind: WaitAnew, Claim: c, Event: v1alpha1.Event{
			Reason: ReasonWaitingForMachine, Message: fmt.Sprintf("%s, so the deadline is extended by %s", why, deadline),
		}})
	}
	switch {
	case d.reordered && waited >= min(settling, deadline)/2:
		restart("its Machine joined before it could be assigned, and another one is ordered")
		return ""
	case overdue < 0 || unsettled > 0:
		d.Wake(max(-overdue, unsettled))
		return ""
	case d.awaitsReport:
		restart("it is not certain yet whether a Machine that joined just now can be assigned")
		return ""
	case overdue > punctual:
		restart("no agent was active when the deadline for its Machine passed")
		return ""
	}
	return fmt.Sprintf("no Machine was created in %s", deadline)
}

// restartWaits puts off the ledger write that orders another Machine for waiting claims until the
// restart of their wait is recorded. Else the step after that write would see neither, and a claim
// might fail.
func (b *books) restartWaits() {
	if b.d.reordered && slices.ContainsFunc(b.d.Actions, func(a Action) bool { return a.Kind == WaitAnew }) {
		b.d.Ledger, b.d.Replicas = nil, b.Group.Replicas
	}
}

// explainBlocked records on a waiting claim why its Machine does not come, if Cluster API reports
// it.
func (s *Snapshot) explainBlocked(d *Decision, c *v1alpha1.MachineClaim) {
	blocked := s.blocked()
	if blocked == "" || c.Status.Message == blocked {
		return
	}
	// The first entry only records that it waits.
	if n := len(c.Status.History); n > 1 && c.Status.Reason == ReasonWaitingForMachine {
		if left := explainEvery - s.Now.Sub(c.Status.History[n-1].Time.Time); left > 0 {
			d.Wake(left)
			return
		}
	}
	d.Actions = append(d.Actions, Action{Kind: Explain, Claim: c, Event: v1alpha1.Event{Reason: ReasonWaitingForMachine, Message: blocked}})
}

// explainTrouble records on a bound claim that waits for long what its Machine's infrastructure
// reports, and takes that back once the infrastructure reports nothing. Only another reason is news,
// because a message may contain the number of an attempt or of a request.
func (s *Snapshot) explainTrouble(d *Decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine, reason, message string) {
	event := v1alpha1.Event{Reason: ReasonInfrastructure, Message: Line(reports(m, reason) + message)}
	head := Line(reports(m, reason))
	head = head[:min(len(head), MaxMessage/2)] // of what is left of a message that was cut
	switch c.Status.Reason {
	case ReasonBound, ReasonWaitingForNode:
		if reason == "" {
			return
		}
	case ReasonInfrastructure:
		if reason == "" {
			event = v1alpha1.Event{
				Reason: ReasonWaitingForNode, Message: "the infrastructure of Machine " + m.Name + " reports no trouble any more; no Node has joined yet",
			}
		} else if strings.HasPrefix(c.Status.Message, head) {
			return
		}
	default: // another explanation, which matters more
		return
	}
	left := slowInfrastructure - s.Now.Sub(waitsSince(c, m))
	if n := len(c.Status.History); n > 0 {
		left = max(left, explainEvery-s.Now.Sub(c.Status.History[n-1].Time.Time))
	}
	if left > 0 {
		d.Wake(left)
		return
	}
	d.Actions = append(d.Actions, Action{Kind: Explain, Claim: c, Event: event})
}

// blocked returns which MachineSet creates no Machines, and why; "" if none is blocked.
func (s *Snapshot) blocked() string {
	for _, set := range s.Sets {
		if reasons := Blocked(set); reasons != "" {
			return Line(fmt.Sprintf("MachineSet %s makes no Machines: %s", set.Name, reasons))
		}
	}
	return ""
}

// Blocked returns Cluster API's reasons why a MachineSet creates no Machines; "" if it does, or if
// none are asked for. It leaves out the replica numbers that Cluster API puts before the reasons,
// because they change with each claim.
func Blocked(set *clusterv1.MachineSet) string {
	for i := range set.Status.Conditions {
		c := &set.Status.Conditions[i]
		if c.Type != clusterv1.MachineSetScalingUpCondition || c.Status != "True" {
			continue
		}
		if _, reasons, is := strings.Cut(c.Message, "blocked because:"); is {
			return oneLine(reasons)
		}
	}
	return ""
}

// oneLine joins one of Cluster API's lists, with one item a line, into a single line.
func oneLine(list string) string {
	var items []string
	for item := range strings.Lines(list) {
		if item = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(item), "*")); item != "" {
			items = append(items, item)
		}
	}
	return strings.Join(items, "; ")
}
