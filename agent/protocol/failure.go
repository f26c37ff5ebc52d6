package protocol

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/samber/lo"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
)

// FailurePolicy defines when a claim's Machine is given up, and how long its node group takes no
// claims after that. Cluster API has no notion of a final failure, so this is configurable.
type FailurePolicy struct {
	// Known enables the built-in knowledge of infrastructure providers; see package failures.
	Known bool
	// Reasons are further reasons of a Machine's InfrastructureReady condition that mean the
	// Machine will not come. The condition mirrors the infrastructure provider's own. A reason of
	// the form Kind/Reason applies to infrastructure objects of that kind only.
	Reasons []string
	// ObjectDeadline is how long a claim waits for a Machine object; zero means for ever.
	ObjectDeadline time.Duration
	// ProviderIDDeadline is how long a bound claim waits for its Machine's provider ID; zero means
	// for ever.
	ProviderIDDeadline time.Duration
	// NodeDeadline is how long a bound claim waits for its Machine's Node; zero means for ever.
	NodeDeadline time.Duration
	// CoolDown is how long a node group refuses claims after one failed there. It is derived from
	// the failed claims themselves, so it survives a restart but cannot outlast them.
	CoolDown time.Duration
}

// Patience is how many deadlines a Machine may take, counted from its creation, before it has
// failed. Until then it is only late for the claim that waits for it and goes to the next one, so
// that slow Machines are not thrown away. By default a Machine has an hour to get its provider ID.
const Patience = 3

// of classifies what a Machine's infrastructure reports.
func (f FailurePolicy) of(kind, reason, message string) failures.Verdict {
	switch {
	case reason == "":
	case slices.Contains(f.Reasons, reason), slices.Contains(f.Reasons, kind+"/"+reason):
		return failures.Verdict{Class: failures.GivenUp, Gone: f.Known && failures.Of(kind, reason, message).Gone}
	case f.Known:
		return failures.Of(kind, reason, message)
	}
	return failures.Verdict{Class: failures.Transient}
}

// Report is a condition of a Machine's infrastructure object.
type Report struct {
	Reason, Message string
	// Stale means that it is older than [ReportLife], and is being read again.
	Stale bool
}

const (
	// ReportLife is how long a [Report] stays valid.
	ReportLife = 30 * time.Second
	// reportSoon is after how long to look again for a report that is being read.
	reportSoon = 2 * time.Second
)

// See returns the condition of the Machine's infrastructure object that shows whether the Machine
// will come, or "" if none needs to be read.
func (f FailurePolicy) See(m *clusterv1.Machine) string {
	if m.Spec.ProviderID != "" || !Alive(m) {
		return ""
	}
	reason, message := infrastructureTrouble(m)
	return f.of(m.Spec.InfrastructureRef.Kind, reason, message).See
}

// final returns why the Machine will not come, as its infrastructure reports, and the class of the
// report; "" if it may come. left is when to look again; zero means at no particular time.
func (s *Snapshot) final(m *clusterv1.Machine) (why string, class failures.Class, left time.Duration) {
	reason, message := s.trouble(m)
	verdict := s.Failure.of(m.Spec.InfrastructureRef.Kind, reason, message)
	if m.Spec.ProviderID != "" && (!verdict.Gone || !s.nodeless(m)) {
		return "", failures.Transient, 0
	}
	if verdict.Class == failures.Transient {
		if s.Failure.See(m) == "" {
			return "", failures.Transient, 0
		}
		report, known := s.Reports[m.UID]
		return "", failures.Transient, lo.Ternary(known && !report.Stale, ReportLife, reportSoon)
	}
	if left := verdict.After - s.Now.Sub(latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions))); verdict.After > 0 && left > 0 {
		return "", failures.Transient, left
	}
	return fmt.Sprintf("%s: %s%s", verdict.Class.Says(), reports(m, reason), message), verdict.Class, 0
}

// reports returns the beginning of a message about what a Machine's infrastructure reports.
func reports(m *clusterv1.Machine, reason string) string {
	return fmt.Sprintf("the infrastructure of Machine %s reports %s: ", m.Name, reason)
}

// missingAfter is how long Cluster API must have found no infrastructure object of a Machine for
// that to be final. The Machine is created after that object, so a shorter absence may be a lagging
// cache.
const missingAfter = time.Minute

// missing returns a message and a time if Cluster API reports that the Machine's infrastructure
// object does not exist, and "" if it exists. The object is not created again: another actor
// deleted it, or Cluster API itself did after a call to create the Machine whose answer was lost.
// Until this Machine goes, each reconcile of its MachineSet ends with an error.
func missing(m *clusterv1.Machine) (what string, since time.Time) {
	for i := range m.Status.Conditions {
		c := &m.Status.Conditions[i]
		if c.Type == clusterv1.MachineInfrastructureReadyCondition && c.Status == "False" &&
			(c.Reason == clusterv1.MachineInfrastructureDoesNotExistReason || c.Reason == clusterv1.MachineInfrastructureDeletedReason) {
			return fmt.Sprintf("the infrastructure of Machine %s is gone: %s", m.Name, c.Message), c.LastTransitionTime.Time
		}
	}
	return "", time.Time{}
}

// infrastructureGone reports whether the Machine's infrastructure object has been missing for so
// long that the Machine will not come.
func (s *Snapshot) infrastructureGone(m *clusterv1.Machine) bool {
	what, since := missing(m)
	return what != "" && s.nodeless(m) && s.ago(since) >= missingAfter
}

// checkDeadlines releases the claim if its Machine failed or is late, and reports whether it did. m
// is nil if there is no Machine yet. A claim that only waits gets an explanation if Cluster API
// gives one. A late Machine goes to the next claim. A Machine object that was never created is a
// failure, because there is nothing to hand over.
func (s *Snapshot) checkDeadlines(d *Decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine) bool {
	if m != nil && HasNode(m) || s.paused(m) {
		return false
	}
	var why string
	verdict, reason, class := Fail, ReasonFailed, failures.TimedOut
	switch {
	case m == nil:
		if why = s.unmade(d, c); why == "" {
			s.explainBlocked(d, c)
		} else if s.Quota != "" {
			why += ": " + s.Quota
			class = failures.Quota
		} else if cause := cmp.Or(s.blocked(), s.crowdedOut()); cause != "" {
			why += ": " + cause
		}
	case s.infrastructureGone(m):
		why, _ = missing(m)
		class = failures.GivenUp
	default:
		if what, since := missing(m); what != "" {
			// By then it is certain that there is no Node, unless that depends on more than time.
			if left := max(missingAfter-s.ago(since), unpauseSettles-s.ago(unpausedAt(m.Status.Conditions))); left > 0 {
				d.Wake(left)
			}
		}
		final, reported, counts := s.final(m)
		if final != "" {
			why, class = final, reported
			break
		}
		if counts > 0 {
			d.Wake(counts)
		}
		trouble, message := s.trouble(m)
		what, option := s.awaited(m)
		since, given := latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions)), s.failsAfter(option)
		if why = s.overdue(d, since, given, what); why == "" {
			verdict, reason = TimeOut, ReasonLate
			since, given = waitsSince(c, m), lateAfter(s.Group.MaxNodeProvisionTime, c, option)
			why = s.overdue(d, since, given, what)
		}
		if unseen := s.unseen(c, m, since.Add(given)); why != "" && unseen != "" {
			if c.Status.Reason != ReasonOwnerMissing { // whose message also reports that the Machine is kept, and each live set renews it
				d.explainOnce(c, ReasonNodeNotSeen, why+"; the Machine is kept, as "+unseen)
			}
			return false
		}
		if why == "" {
			s.explainTrouble(d, c, m, trouble, message)
		} else if trouble != "" {
			why += fmt.Sprintf("; its infrastructure reports %s: %s", trouble, message)
		}
	}
	if why == "" {
		return false
	}
	d.Actions = append(d.Actions, Action{Kind: verdict, Claim: c, Machine: m, Class: class, Event: v1alpha1.Event{Reason: reason, Message: why}})
	return true
}

// awaited returns what the Machine lacks, and the option that limits how long claims wait for it by
// default.
func (s *Snapshot) awaited(m *clusterv1.Machine) (what string, option time.Duration) {
	if m.Spec.ProviderID == "" {
		return "Machine " + m.Name + " got no provider ID", s.Failure.ProviderIDDeadline
	}
	return "no Node joined for Machine " + m.Name, s.Failure.NodeDeadline
}

// lateAfter returns how long a claim waits: the node group's setting, else the claim's own, else
// the option. Zero means for ever.
func lateAfter(ofGroup time.Duration, c *v1alpha1.MachineClaim, option time.Duration) time.Duration {
	return cmp.Or(ofGroup, c.MaxNodeProvisionTime(), option)
}

// failsAfter returns the age at which a Machine has failed. It allows for the longest wait of any
// claim: a Machine that is late for one claim may serve another that waits longer. Zero means
// never.
func (s *Snapshot) failsAfter(option time.Duration) time.Duration {
	switch {
	case s.Group.MaxNodeProvisionTime > 0:
		return Patience * s.Group.MaxNodeProvisionTime
	case option == 0:
		return 0
	}
	return Patience * max(option, s.longest)
}

// NodeDeadlineOf returns how long the claim waits for its Machine's Node; zero means for ever. md
// is the claim's node group.
func (f FailurePolicy) NodeDeadlineOf(md *clusterv1.MachineDeployment, c *v1alpha1.MachineClaim) time.Duration {
	ofGroup, _ := eligibility.MaxNodeProvisionTime(md)
	return lateAfter(ofGroup, c, f.NodeDeadline)
}

// waitsSince returns when the claim's wait for the Machine starts, after the last pause.
func waitsSince(c *v1alpha1.MachineClaim, m *clusterv1.Machine) time.Time {
	return latest(boundAt(c, m), unpausedAt(m.Status.Conditions))
}

// boundAt returns since when the claim waits for the Machine: the time of binding if the Machine
// existed before, else its creation.
func boundAt(c *v1alpha1.MachineClaim, m *clusterv1.Machine) time.Time {
	if at := c.Status.BoundAt; at != nil && at.After(m.CreationTimestamp.Time) {
		return at.Time
	}
	return m.CreationTimestamp.Time
}

// keptAtOnce is how many failed Machines of one node group are kept at a time. Each keeps its
// replica and continues to cost money.
const keptAtOnce = 3

// keepFailed returns the ids of the failed claims whose Machines are still kept for debugging,
// earliest failures first, and asks to be woken when one is due to go. A Machine without
// infrastructure is not kept: there is nothing to inspect, and each reconcile of its MachineSet
// ends with an error until it goes.
func (b *books) keepFailed() map[string]bool {
	if b.Group.KeepFailed == 0 {
		return nil
	}
	left := func(c *v1alpha1.MachineClaim) time.Duration {
		return b.Group.KeepFailed - b.ago(c.Status.FailedAt.Time)
	}
	failed := lo.Filter(b.Claims, func(c *v1alpha1.MachineClaim, _ int) bool {
		if c.Status.FailedAt == nil || c.Status.Machine == nil || c.CurrentPhase() != v1alpha1.PhaseReleasing {
			return false
		}
		m := b.machine(c.Status.Machine.UID)
		return m != nil && Alive(m) && !b.infrastructureGone(m) && left(c) > 0
	})
	slices.SortStableFunc(failed, func(x, y *v1alpha1.MachineClaim) int { return x.Status.FailedAt.Compare(y.Status.FailedAt.Time) })
	kept := map[string]bool{}
	for _, c := range lo.Slice(failed, 0, keptAtOnce) {
		kept[c.Spec.ClaimID] = true
		b.d.Wake(left(c))
	}
	return kept
}

// hasFailed reports whether the Machine is known not to come. No claim should be given it.
func (s *Snapshot) hasFailed(m *clusterv1.Machine) bool {
	switch {
	case m.Spec.ProviderID != "" && !s.nodeless(m):
		return false
	case s.infrastructureGone(m):
		return true
	}
	_, option := s.awaited(m)
	if given := s.failsAfter(option); given > 0 && s.Now.Sub(latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions))) >= given {
		return true
	}
	why, _, _ := s.final(m)
	return why != ""
}

// overdue returns a message if the time for what is awaited is over. Otherwise it returns "" and
// asks to be woken when it is.
func (s *Snapshot) overdue(d *Decision, since time.Time, deadline time.Duration, what string) string {
	if deadline == 0 {
		return ""
	}
	if left := deadline - s.Now.Sub(since); left > 0 {
		d.Wake(left)
		return ""
	}
	return fmt.Sprintf("%s in %s", what, deadline)
}

// trouble returns what the infrastructure object itself reports, if that was read, else
// [infrastructureTrouble].
func (s *Snapshot) trouble(m *clusterv1.Machine) (reason, message string) {
	if report, seen := s.Reports[m.UID]; seen && report.Reason != "" {
		return report.Reason, report.Message
	}
	return infrastructureTrouble(m)
}

// infrastructureTrouble returns why the Machine's infrastructure is not ready, as its provider
// reports it; "" if it is ready or nothing is known.
func infrastructureTrouble(m *clusterv1.Machine) (reason, message string) {
	for i := range m.Status.Conditions {
		if c := &m.Status.Conditions[i]; c.Type == clusterv1.MachineInfrastructureReadyCondition && c.Status == "False" {
			return c.Reason, c.Message
		}
	}
	return "", ""
}

// CoolDownOf returns why a node group takes no claims after one of the given claims failed; nil
// when no failure is more recent than the cool-down. All claims must be of that group.
func CoolDownOf(nodeGroup string, claims []*v1alpha1.MachineClaim, now time.Time, coolDown time.Duration) *eligibility.Refusal {
	var last *v1alpha1.MachineClaim
	for _, c := range claims {
		if c.Status.FailedAt != nil && (last == nil || last.Status.FailedAt.Before(c.Status.FailedAt)) {
			last = c
		}
	}
	if last == nil || now.Sub(last.Status.FailedAt.Time) >= coolDown {
		return nil
	}
	return &eligibility.Refusal{
		NodeGroup: nodeGroup,
		Reason:    eligibility.CoolingDown,
		Message:   "claim " + last.Spec.ClaimID + " failed here: " + last.Status.Message,
		RetryAt:   last.Status.FailedAt.Add(coolDown),
	}
}
