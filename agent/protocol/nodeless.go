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
	// absenceLife is how long a holder's statement that a Node is absent counts. Holders renew it each minute.
	absenceLife = 3 * time.Minute
	// unpauseSettles is how long after a pause what Cluster API states about a Machine may still be from before it.
	unpauseSettles = time.Minute
)

// nodeless reports whether it is stated that no Node of the Machine exists. That status.nodeRef is empty states nothing: Cluster API
// does not see the Nodes of a cluster that it cannot reach, and a moved or restored Machine begins with an empty status. A Machine
// without a provider ID has no instance yet. With one, Cluster API must have looked for its Node and not found it, and its holder
// must never have reported that Node as registered. Whoever removes, hands over or promises a Machine because it has no Node asks this.
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

// inspected reports whether Cluster API states that it looked for the Machine's Node, by its provider ID, and found none. For the same
// reason it also waits for other things, of which its message tells: only that one names the provider ID.
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

// unseen says why the Machine's Node, due at a time that is over, may exist all the same; "" when it is certain that it does not.
// Cluster API's statement may be old, after its restart for instance, so that the holder must have listed all of its Nodes since.
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

// paused reports whether Cluster API leaves the Machine alone, or is about to: what it states about it is from before. The Machine
// may be nil.
func (s *Snapshot) paused(m *clusterv1.Machine) bool {
	if s.Group.Has(eligibility.Paused) {
		return true
	}
	if m == nil {
		return false
	}
	_, marked := m.Annotations[clusterv1.PausedAnnotation]
	return marked || IsPaused(m.Status.Conditions)
}

// unpausedAt returns since when Cluster API does not leave the object of these conditions alone: its first reconcile, or the end of a pause;
// zero when it does not say.
func unpausedAt(conditions []metav1.Condition) time.Time {
	c := meta.FindStatusCondition(conditions, clusterv1.PausedCondition)
	if c == nil || c.Status != metav1.ConditionFalse {
		return time.Time{}
	}
	return c.LastTransitionTime.Time
}

// skew is how far an agent's clock may be ahead of those of the API server and of Cluster API.
const skew = time.Minute

// ago returns for how long, at least, a time is past that the API server or Cluster API wrote. What must not come too soon waits by that;
// deadlines and cool-downs, which may, are inexact by what clocks differ.
func (s *Snapshot) ago(at time.Time) time.Duration { return s.Now.Sub(at) - skew }

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
