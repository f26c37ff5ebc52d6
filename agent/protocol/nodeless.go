package protocol

import (
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

const (
	// absenceLife is how long a holder's report that a Node is absent stays valid. Holders renew it
	// each minute.
	absenceLife = 3 * time.Minute
	// unpauseSettles is how long after a pause Cluster API's statements about a Machine may still
	// be older than the pause.
	unpauseSettles = time.Minute
	// reportDue is how long after a Node joined its holder's report of it may take. Holders report
	// each minute.
	reportDue = time.Minute
)

// nodeless reports whether the Machine certainly has no Node. An empty status.nodeRef proves
// nothing: Cluster API does not see the Nodes of a cluster that it cannot reach, and a moved or
// restored Machine begins with an empty status. A Machine without a provider ID has no instance
// yet. For a Machine with a provider ID, Cluster API must have looked for its Node and not found
// it, and its holder must never have reported that Node as registered. Code that removes, hands
// over or assigns a Machine because it has no Node must check this.
func (s *Snapshot) nodeless(m *clusterv1.Machine) bool {
	switch {
	case HasNode(m), s.registered(m):
		return false
	case m.Spec.ProviderID == "":
		return true
	case s.paused(m):
		return false
	}
	if at := unpausedAt(m.Status.Conditions); at.Sub(m.CreationTimestamp.Time) > unpauseSettles && s.ago(at) < unpauseSettles {
		return false
	}
	return inspected(m)
}

// inspected reports whether Cluster API states that it looked for the Machine's Node by its
// provider ID and found none. Cluster API uses the same reason when it waits for other things. Only
// the message for a missing Node contains the provider ID.
func inspected(m *clusterv1.Machine) bool {
	c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineNodeReadyCondition)
	return c != nil && c.Reason == clusterv1.MachineNodeInspectionFailedReason && strings.Contains(c.Message, m.Spec.ProviderID)
}

// registered reports whether the holder ever reported the Machine's Node as registered.
func (s *Snapshot) registered(m *clusterv1.Machine) bool {
	if _, noted := m.Annotations[v1alpha1.NodeRegisteredAtAnnotation]; noted {
		return true
	}
	for _, id := range []string{ClaimOf(m), s.holders[m.UID]} {
		c := s.Claim(id)
		if c != nil && c.Status.NodeRegisteredAt != nil && c.Status.Machine != nil && c.Status.Machine.UID == m.UID {
			return true
		}
	}
	return false
}

// joinedJustNow reports whether the Machine's Node joined so recently that this agent may not have
// its holder's report of it yet, be it because the agent has just started. Nothing is expected of
// holders that report no Nodes.
func (s *Snapshot) joinedJustNow(m *clusterv1.Machine) bool {
	return s.expectsReport && HasNode(m) && !s.registered(m) && !s.Nodes[m.Spec.ProviderID] && s.reportDueIn(m) > 0
}

// reportDueIn returns how long a report of the Machine's Node may still take. Cluster API records
// when the Machine's phase last changed. It changes when the Node joins; a later change, as in an
// update in place, or a move only makes the wait longer.
func (s *Snapshot) reportDueIn(m *clusterv1.Machine) time.Duration {
	return reportDue - s.ago(latest(m.Status.LastUpdated.Time, s.Started))
}

// unseen returns why the Machine's Node may exist although it missed the deadline due; "" when it
// certainly does not exist. Cluster API's statement may be old, for example after its restart, so
// the holder must also have listed all of its Nodes since due.
func (s *Snapshot) unseen(c *v1alpha1.MachineClaim, m *clusterv1.Machine, due time.Time) string {
	absent := c.Status.NodeAbsentAt
	switch {
	case m.Spec.ProviderID == "":
		return ""
	case s.registered(m):
		return "its holder reported its Node as registered"
	case !s.nodeless(m):
		return "Cluster API does not state that its Node does not exist"
	case absent == nil || absent.Time.Before(due.Truncate(time.Second)) || s.Now.Sub(absent.Time) > absenceLife:
		return "its holder has not listed all of its Nodes since"
	}
	return ""
}

// paused reports whether Cluster API does not reconcile the Machine, or is about to stop, so that
// its statements about the Machine may be old. m may be nil.
func (s *Snapshot) paused(m *clusterv1.Machine) bool {
	if s.Group.Has(eligibility.Paused) {
		return true
	}
	if m == nil {
		return false
	}
	_, annotated := m.Annotations[clusterv1.PausedAnnotation]
	return annotated || IsPaused(m.Status.Conditions)
}

// unpausedAt returns since when Cluster API reconciles the object with these conditions: its first
// reconcile, or the end of a pause. It is zero if that is not known.
func unpausedAt(conditions []metav1.Condition) time.Time {
	c := meta.FindStatusCondition(conditions, clusterv1.PausedCondition)
	if c == nil || c.Status != metav1.ConditionFalse {
		return time.Time{}
	}
	return c.LastTransitionTime.Time
}

// skew is how far an agent's clock may be ahead of the clocks of the API server and Cluster API.
const skew = time.Minute

// ago returns the minimum time since a timestamp written by the API server or Cluster API. It is
// used for what must not happen too soon. Deadlines and cool-downs may be off by the clock
// difference and do not use it.
func (s *Snapshot) ago(at time.Time) time.Duration { return s.Now.Sub(at) - skew }

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
