package claims

import (
	"cmp"
	"context"
	"regexp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// reasonLive is the reason of [v1alpha1.ConditionEnded] before the release. All other reasons of
// conditions are reasons of claims.
const reasonLive = "Live"

// reasonFormat is what the API server accepts as the reason of a condition. Reasons of claims may
// come from a Machine's conditions.
var reasonFormat = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`)

// updateStatus writes a claim's status, with its conditions, if the claim is still as it was read.
// Every write of a status goes through it.
func (e *Engine) updateStatus(ctx context.Context, c *v1alpha1.MachineClaim) error {
	c.Status.Conditions = conditionsOf(c, metav1.NewTime(e.Clock.Now()))
	return e.Client.Status().Update(ctx, c)
}

// conditionsOf returns a claim's conditions. They follow from the rest of the claim, including the
// times since when they hold. So they cost no write, the caches need not keep them, and an agent
// that does not know them does no harm: the next write restores them.
//
// The message is only in the condition that people look at first, as claims are numerous.
func conditionsOf(c *v1alpha1.MachineClaim, now metav1.Time) []metav1.Condition {
	s, phase := &c.Status, c.CurrentPhase()
	made := c.CreationTimestamp
	if made.IsZero() {
		made = now
	}
	reason := string(phase)
	if reasonFormat.MatchString(s.Reason) {
		reason = s.Reason
	}
	ended := phase == v1alpha1.PhaseEnded

	assigned := metav1.Condition{Type: v1alpha1.ConditionAssigned, Status: metav1.ConditionFalse, Reason: reason, LastTransitionTime: made}
	switch {
	case s.Machine != nil && !ended:
		assigned.Status, assigned.Reason, assigned.Message = metav1.ConditionTrue, protocol.ReasonBound, "Machine "+s.Machine.Name
		assigned.LastTransitionTime = first(made, s.BoundAt)
	case s.Machine != nil:
		assigned.LastTransitionTime = first(made, s.EndedAt)
	}

	ready := metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: reason, Message: s.Message, LastTransitionTime: made,
	}
	joined := s.Machine != nil && (s.NodeRegisteredAt != nil || s.Machine.NodeName != "")
	switch {
	case joined && phase == v1alpha1.PhaseBound && !s.Returned && s.Reason != protocol.ReasonMachineDeleting:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionTrue, protocol.ReasonNodeJoined, ""
		if s.Machine.NodeName != "" {
			ready.Message = "Node " + s.Machine.NodeName
		}
		ready.LastTransitionTime = first(first(made, s.BoundAt), earlier(s.NodeRegisteredAt, happened(c, protocol.ReasonNodeJoined)))
	case joined:
		ready.LastTransitionTime = first(first(made, s.EndedAt),
			earlier(earlier(s.ReleasedAt, happened(c, protocol.ReasonMachineDeleting)), happened(c, protocol.ReasonReturnRequested)))
	case phase == v1alpha1.PhaseBound && reason == protocol.ReasonBound:
		ready.Reason = protocol.ReasonWaitingForNode
	}

	end := metav1.Condition{Type: v1alpha1.ConditionEnded, Status: metav1.ConditionFalse, Reason: reasonLive, LastTransitionTime: made}
	switch {
	case ended:
		end.Status, end.Reason, end.LastTransitionTime = metav1.ConditionTrue, reason, first(made, s.EndedAt)
	case phase == v1alpha1.PhaseReleasing || s.Returned:
		end.Reason = string(v1alpha1.PhaseReleasing)
	}

	conditions := []metav1.Condition{assigned, ready, end}
	if s.FailedAt != nil {
		conditions = append(conditions, metav1.Condition{
			Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, Reason: protocol.ReasonFailed, Message: s.Message, LastTransitionTime: *s.FailedAt,
		})
	}
	return conditions
}

// first returns the time, or otherwise if there is none.
func first(otherwise metav1.Time, t *metav1.Time) metav1.Time { return *cmp.Or(t, &otherwise) }

// earlier returns the earlier of the times that there are, nil if there is none.
func earlier(a, b *metav1.Time) *metav1.Time {
	if a == nil || b != nil && b.Before(a) {
		return b
	}
	return a
}

// happened returns the time of the first event with the reason in the history, or nil.
func happened(c *v1alpha1.MachineClaim, reason string) *metav1.Time {
	i := slices.IndexFunc(c.Status.History, func(event v1alpha1.Event) bool { return event.Reason == reason })
	if i < 0 {
		return nil
	}
	return &c.Status.History[i].Time
}
