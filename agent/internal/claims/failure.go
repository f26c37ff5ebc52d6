package claims

import (
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// Failure says when a claim's Machine is given up, and how long its node group is left alone then. Cluster API knows no final
// failure, so that this is a matter of configuration.
type Failure struct {
	// Reasons are reasons of a Machine's InfrastructureReady condition, which mirror the infrastructure provider's own, that
	// mean the machine will not come: for example that there is no capacity. One with the kind of the infrastructure before it
	// and a slash between holds for that kind only.
	Reasons []string
	// ObjectDeadline is how long a claim waits for a Machine object; zero means for ever.
	ObjectDeadline time.Duration
	// ProviderIDDeadline is how long a Machine may take from its creation to its provider ID; zero means for ever.
	ProviderIDDeadline time.Duration
	// NodeDeadline is how long a Machine may take from its creation to its Node; zero means for ever.
	NodeDeadline time.Duration
	// CoolDown is how long a node group takes no claims after one failed there. It follows from the failed claims
	// themselves, and so survives a restart; longer than they are remembered it cannot be.
	CoolDown time.Duration
}

// final reports whether a reason that the Machine's infrastructure gives means that it will not come.
func (f Failure) final(m *clusterv1.Machine, reason string) bool {
	return reason != "" && (slices.Contains(f.Reasons, reason) || slices.Contains(f.Reasons, m.Spec.InfrastructureRef.Kind+"/"+reason))
}

// missingAfter is for how long Cluster API must have found no infrastructure object of a Machine for that to be final. The Machine
// is made after that object, so a shorter time is a cache that lags behind.
const missingAfter = time.Minute

// missing says that the Machine's infrastructure object does not exist, and since when Cluster API says so; "" when it does. It is
// not made again: somebody deleted it, or Cluster API itself did, after a call to create the Machine whose answer was lost. Nor
// does Cluster API see to any other Machine of the MachineSet until this one goes.
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

// gone reports whether the Machine's infrastructure object has been missing for so long that it will not come.
func (s *snapshot) gone(m *clusterv1.Machine) bool {
	what, since := missing(m)
	return what != "" && !hasNode(m) && s.now.Sub(since) >= missingAfter
}

// judge gives the claim's Machine (nil when there is none yet) up if it failed or is too late, and reports whether it did. A
// claim that only waits is told why, where Cluster API says why.
func (s *snapshot) judge(d *decision, c *v1alpha1.MachineClaim, m *clusterv1.Machine) bool {
	if m != nil && hasNode(m) {
		return false
	}
	var why string
	switch {
	case m == nil:
		why = s.late(d, c.CreationTimestamp.Time, s.failure.ObjectDeadline, "no Machine was created")
		if blocked := s.blocked(); blocked != "" {
			if why != "" {
				why += ": " + blocked
			} else if c.Status.Message != blocked {
				d.actions = append(d.actions, action{kind: explain, claim: c, event: v1alpha1.Event{
					Reason: ReasonWaitingForMachine, Message: blocked,
				}})
				return true
			}
		}
	case s.gone(m):
		why, _ = missing(m)
	case m.Spec.ProviderID == "":
		if what, since := missing(m); what != "" {
			d.wake(missingAfter - s.now.Sub(since))
		}
		reason, message := infrastructureTrouble(m)
		if s.failure.final(m, reason) {
			why = fmt.Sprintf("the infrastructure of Machine %s reports %s: %s", m.Name, reason, message)
			break
		}
		why = s.late(d, m.CreationTimestamp.Time, s.failure.ProviderIDDeadline, "Machine "+m.Name+" got no provider ID")
		if why != "" && reason != "" {
			why += fmt.Sprintf("; its infrastructure reports %s: %s", reason, message)
		}
	default:
		why = s.late(d, m.CreationTimestamp.Time, s.failure.NodeDeadline, "no Node joined for Machine "+m.Name)
	}
	if why == "" {
		return false
	}
	d.actions = append(d.actions, action{kind: fail, claim: c, machine: m, event: v1alpha1.Event{Reason: ReasonFailed, Message: why}})
	return true
}

// hopeless reports whether the Machine is known not to come: no claim should be given it.
func (s *snapshot) hopeless(m *clusterv1.Machine) bool {
	late := func(deadline time.Duration) bool {
		return deadline > 0 && s.now.Sub(m.CreationTimestamp.Time) >= deadline
	}
	switch {
	case hasNode(m):
		return false
	case s.gone(m):
		return true
	case m.Spec.ProviderID != "":
		return late(s.failure.NodeDeadline)
	}
	reason, _ := infrastructureTrouble(m)
	return late(s.failure.ProviderIDDeadline) || s.failure.final(m, reason)
}

// late returns what has not happened when the time for it is over, else "" after asking to be woken in time.
func (s *snapshot) late(d *decision, since time.Time, deadline time.Duration, what string) string {
	if deadline == 0 {
		return ""
	}
	if left := deadline - s.now.Sub(since); left > 0 {
		d.wake(left)
		return ""
	}
	return fmt.Sprintf("%s in %s", what, deadline)
}

// infrastructureTrouble returns why the Machine's infrastructure is not ready, as its provider reports it; "" when it is, or
// when nothing is known.
func infrastructureTrouble(m *clusterv1.Machine) (reason, message string) {
	for i := range m.Status.Conditions {
		if c := &m.Status.Conditions[i]; c.Type == clusterv1.MachineInfrastructureReadyCondition && c.Status == "False" {
			return c.Reason, c.Message
		}
	}
	return "", ""
}

// blocked returns why the MachineSets make no Machines, "" when they do.
func (s *snapshot) blocked() string {
	for _, set := range s.sets {
		for i := range set.Status.Conditions {
			c := &set.Status.Conditions[i]
			if c.Type == clusterv1.MachineSetScalingUpCondition && c.Status == "True" && strings.Contains(c.Message, "blocked") {
				return fmt.Sprintf("MachineSet %s: %s", set.Name, c.Message)
			}
		}
	}
	return ""
}

// coolDownOf says why a node group takes no claims after one of the given claims, all of that group, failed; nil when no
// failure is more recent than the cool-down.
func coolDownOf(nodeGroup string, claims []*v1alpha1.MachineClaim, now time.Time, coolDown time.Duration) *eligibility.Refusal {
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
