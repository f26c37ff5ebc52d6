package simprovider

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

func TestLifecycle(t *testing.T) {
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) *metav1.MicroTime { return new(metav1.NewMicroTime(now.Add(-d))) }
	delays := simv1.SimMachineSpec{
		BootDelay:        metav1.Duration{Duration: 3 * time.Second},
		JoinDelay:        metav1.Duration{Duration: 4 * time.Second},
		TerminationDelay: metav1.Duration{Duration: 5 * time.Second},
	}
	failing, stuckAt := delays, func(stage simv1.Stage) simv1.SimMachineSpec {
		spec := delays
		spec.StuckAt = stage
		return spec
	}
	failing.Failure = &simv1.MachineFailure{Reason: "InsufficientCapacity"}

	booting := func(since time.Duration) simv1.SimMachineStatus {
		return simv1.SimMachineStatus{BootStartedAt: ago(since)}
	}
	booted := func(since time.Duration) simv1.SimMachineStatus {
		return simv1.SimMachineStatus{BootStartedAt: ago(time.Hour), BootedAt: ago(since)}
	}
	stopped := func(since time.Duration) simv1.SimMachineStatus { return simv1.SimMachineStatus{StoppedAt: ago(since)} }
	joined := booted(time.Hour)
	joined.JoinedAt = ago(time.Hour)

	for name, c := range map[string]struct {
		spec     simv1.SimMachineSpec
		status   simv1.SimMachineStatus
		deleting bool
		want     action
		wait     time.Duration
	}{
		"a new one is ordered":                   {spec: delays, want: actionOrder},
		"one that boots takes time":              {spec: delays, status: booting(time.Second), wait: 2 * time.Second},
		"it exists when it has booted":           {spec: delays, status: booting(3 * time.Second), want: actionProvision},
		"the kubelet takes time":                 {spec: delays, status: booted(time.Second), wait: 3 * time.Second},
		"the kubelet joins":                      {spec: delays, status: booted(4 * time.Second), want: actionJoin},
		"one that has joined is left alone":      {spec: delays, status: joined},
		"a failure keeps it from being ordered":  {spec: failing},
		"a failure keeps it from booting":        {spec: failing, status: booting(time.Hour)},
		"a failure does not hurt what runs":      {spec: failing, status: booted(time.Hour), want: actionJoin},
		"stuck at boot":                          {spec: stuckAt(simv1.StageBoot)},
		"stuck at join":                          {spec: stuckAt(simv1.StageJoin), status: booted(time.Hour)},
		"stuck at join still boots":              {spec: stuckAt(simv1.StageJoin), status: booting(time.Hour), want: actionProvision},
		"a deleted one stops":                    {spec: delays, deleting: true, want: actionStop},
		"a deleted one that never booted stops":  {spec: failing, deleting: true, want: actionStop},
		"termination takes time":                 {spec: delays, deleting: true, status: stopped(time.Second), wait: 4 * time.Second},
		"then it is gone":                        {spec: delays, deleting: true, status: stopped(5 * time.Second), want: actionRelease},
		"stuck at termination":                   {spec: stuckAt(simv1.StageTermination), deleting: true, status: stopped(time.Hour)},
		"stuck at termination, the kubelet ends": {spec: stuckAt(simv1.StageTermination), deleting: true, want: actionStop},
	} {
		t.Run(name, func(t *testing.T) {
			m := &simv1.SimMachine{Spec: c.spec, Status: c.status}
			if c.deleting {
				m.DeletionTimestamp = new(metav1.NewTime(now))
			}
			if next, wait := lifecycle(m, now); next != c.want || wait != c.wait {
				t.Errorf("got action %d after %s, want %d after %s", next, wait, c.want, c.wait)
			}
		})
	}
}
