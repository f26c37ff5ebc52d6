package simprovider

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// action is the provider's next action on an instance.
type action int

const (
	// actionNone: nothing until the spec changes or the wait, if any, has passed.
	actionNone action = iota
	// actionOrder: record that booting begins now.
	actionOrder
	// actionProvision: the instance exists from now on; publish its providerID.
	actionProvision
	// actionJoin: register the Node.
	actionJoin
	// actionStop: silence the kubelet.
	actionStop
	// actionRelease: the instance is gone; remove the finalizer.
	actionRelease
)

// lifecycle returns the next action on an instance at the time now. For [actionNone] it also
// returns how long until the next action (0: not by itself). The Machine and its bootstrap data
// must exist unless the instance is being deleted.
func lifecycle(m *simv1.SimMachine, now time.Time) (action, time.Duration) {
	spec, status := &m.Spec, &m.Status
	if m.DeletionTimestamp != nil {
		switch {
		case status.StoppedAt == nil:
			return actionStop, 0
		case spec.StuckAt == simv1.StageTermination:
			return actionNone, 0
		default:
			return after(status.StoppedAt, spec.TerminationDelay, now, actionRelease)
		}
	}
	switch {
	case status.BootedAt == nil && (spec.Failure != nil || spec.StuckAt == simv1.StageBoot):
		return actionNone, 0
	case status.BootStartedAt == nil:
		return actionOrder, 0
	case status.BootedAt == nil:
		return after(status.BootStartedAt, spec.BootDelay, now, actionProvision)
	case status.JoinedAt != nil || spec.StuckAt == simv1.StageJoin:
		return actionNone, 0
	default:
		return after(status.BootedAt, spec.JoinDelay, now, actionJoin)
	}
}

// after returns the action if the delay has passed since the given time, or else the rest of the
// delay.
func after(since *metav1.MicroTime, delay metav1.Duration, now time.Time, then action) (action, time.Duration) {
	if left := since.Add(delay.Duration).Sub(now); left > 0 {
		return actionNone, left
	}
	return then, 0
}
