package protocol

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	// mostWaits is for how many deadlines a claim waits at most while other Machines are made for
	// it.
	mostWaits = 4
	// explainEvery is the minimum time between two explanations of why one claim waits.
	explainEvery = time.Minute
	// slowInfrastructure is how long a bound claim waits for its Machine's infrastructure before it
	// explains why. Until then most infrastructure reports only that it is being created, and an
	// explanation would be a write for every claim.
	slowInfrastructure = 3 * time.Minute
	// ownPauseEnds is how long after the agent has set a pause the end of a pause counts as the end
	// of that one. It takes seconds; the rest is for a slow hub and for clocks that differ.
	ownPauseEnds = 2 * time.Minute
)

// unmade returns a message if no Machine was created for the claim within its deadline, "" while
// one may still come. A claim that the pending ledger write gives a Machine does not fail. The
// deadline counts only for an agent that looks when it passes. If the agent looks later, the hub or
// the agents were away, and Machines may be late for that reason or may have joined unseen. Then
// the wait restarts. It also restarts when the claim has to wait for another Machine than the one
// made for it, or if the deadline passes while that is not certain. A restart is recorded on the
// claim, so that every agent sees it, also after a restart of the agent. The wait also restarts
// after a pause of another actor.
func (s *Snapshot) unmade(d *Decision, c *v1alpha1.MachineClaim) string {
	deadline := s.Failure.ObjectDeadline
	switch {
	case deadline == 0:
		return ""
	case d.Ledger != nil && d.Ledger.Pending[c.Spec.ClaimID].UID != "":
		return ""
	}
	paused := meta.FindStatusCondition(s.Deployment.Status.Conditions, clusterv1.PausedCondition)
	if s.pausedByAgent() && paused != nil && paused.Status == metav1.ConditionTrue {
		// The agent's own pause takes seconds. It lasts longer if a write is refused. The condition
		// may date from a pause of another actor that ended just before.
		begun := paused.LastTransitionTime.Time
		if own := s.ownPause(); own != nil {
			begun = time.Unix(own.At, 0)
		}
		if left := deadline - s.Now.Sub(begun); left > 0 {
			d.Wake(left)
			return ""
		}
	}
	overdue := s.waited(c) - deadline
	unsettled := min(settling, deadline) - s.Now.Sub(s.Started)
	restart := func(why string) {
		d.Actions = append(d.Actions, Action{Kind: WaitAnew, Claim: c, Event: v1alpha1.Event{
			Reason: ReasonWaitingForMachine, Message: fmt.Sprintf("%s, so the deadline is extended by %s", why, deadline),
		}})
	}
	switch {
	case d.reordered != "" && s.restartsWhenReordered(c):
		restart(d.reordered)
		return ""
	case overdue < 0 || unsettled > 0:
		d.Wake(max(-overdue, unsettled))
		return ""
	case d.awaits != "" && s.patient(c):
		restart(d.awaits)
		return ""
	case overdue > punctual:
		restart("no agent was active when the deadline for its Machine passed")
		return ""
	case d.unfit != "":
		return d.unfit
	}
	return fmt.Sprintf("no Machine was created in %s", deadline)
}

// waited returns how long the claim has waited for a Machine to be created.
func (s *Snapshot) waited(c *v1alpha1.MachineClaim) time.Duration {
	since := c.CreationTimestamp.Time
	if c.Status.WaitingSince != nil {
		since = c.Status.WaitingSince.Time
	}
	return s.Now.Sub(latest(since, s.pauseEnded()))
}

// pauseEnded returns when the last pause of the MachineDeployment ended that claims need not count
// as waiting, or a time long ago. The agent's own pauses, which take seconds, count as waiting: a
// group where claims are released again and again would let no claim fail otherwise. A pause of
// another actor that ended up to [ownPauseEnds] after the agent had set one counts, too, since the
// condition shows no difference.
func (s *Snapshot) pauseEnded() time.Time {
	ended := unpausedAt(s.Deployment.Status.Conditions)
	if IsPaused(s.Deployment.Status.Conditions) && !s.pausedByAgent() {
		ended = s.Now // it has just ended, and Cluster API is about to report that
	}
	own := s.ownPause()
	if own != nil && (s.pausedByAgent() || !ended.After(time.Unix(own.At, 0).Add(ownPauseEnds))) {
		return time.Unix(own.Before, 0)
	}
	return ended
}

// ownPause returns the last pause that an agent set, or nil if the ledger has no record of it.
func (s *Snapshot) ownPause() *Paused {
	if s.Ledger == nil {
		return nil
	}
	return s.Ledger.Paused
}

// pausedByAgent reports whether the MachineDeployment carries a pause that an agent set.
func (s *Snapshot) pausedByAgent() bool {
	return s.Deployment.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent
}

// patient reports whether the claim's wait may restart because of the Machines that were made for
// it. A group whose Machines are never of use would let no claim fail otherwise.
func (s *Snapshot) patient(c *v1alpha1.MachineClaim) bool {
	began := latest(c.CreationTimestamp.Time, s.pauseEnded())
	return s.Now.Sub(began) < mostWaits*s.Failure.ObjectDeadline
}

// restartsWhenReordered reports whether the claim's wait restarts when the claim has to wait for
// another Machine. Short waits do not.
func (s *Snapshot) restartsWhenReordered(c *v1alpha1.MachineClaim) bool {
	deadline := s.Failure.ObjectDeadline
	return deadline > 0 && s.patient(c) && s.waited(c) >= min(settling, deadline)/2
}

// ready returns how many of the given number of waiting claims may have a way made for their next
// Machine by this decision: those whose wait does not restart first. Else the next decision would
// see neither, and a claim might fail.
func (b *books) ready(waiting int) int32 {
	return clamp(waiting - lo.CountBy(b.waitingClaims(), func(c *v1alpha1.MachineClaim) bool {
		return c.Status.Phase == v1alpha1.PhasePending && b.restartsWhenReordered(c)
	}))
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
// reports, and takes that back once the infrastructure reports nothing. Only another reason is
// news, because a message may contain the number of an attempt or of a request.
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
			return Line(fmt.Sprintf("MachineSet %s creates no Machines: %s", set.Name, reasons))
		}
	}
	return ""
}

// crowdedOut returns which Machine has to go before Cluster API creates another one; "" if there is
// none. A Machine that is being deleted counts until it is gone.
func (s *Snapshot) crowdedOut() string {
	if len(s.Machines) < int(s.Group.Replicas) {
		return ""
	}
	for _, m := range s.Machines { // oldest first
		if !Alive(m) {
			return Line(fmt.Sprintf("Machine %s is being deleted (%s), and Cluster API creates no other one before it is gone",
				m.Name, cmp.Or(DeletingReason(m), "no reason is given")))
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
