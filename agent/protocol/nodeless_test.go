package protocol

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// unseenNodes are Machines whose Nodes run pods although status.nodeRef is empty, with different
// statements of Cluster API.
func unseenNodes() map[string]func(*Snapshot) {
	machine := func(change func(*clusterv1.Machine)) func(*Snapshot) {
		return func(s *Snapshot) {
			m := s.Machines[len(s.Machines)-1]
			m.Spec.ProviderID = "sim://" + m.Name
			change(m)
		}
	}
	nodeReady := func(reason, message string) func(*Snapshot) {
		return machine(func(m *clusterv1.Machine) {
			m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
				Type: clusterv1.MachineNodeReadyCondition, Status: metav1.ConditionUnknown, Reason: reason, Message: message,
			})
		})
	}
	return map[string]func(*Snapshot){
		"Cluster API cannot reach the cluster": nodeReady(clusterv1.MachineNodeConnectionDownReason, "Remote connection down"),
		"a move or a restore emptied its status": machine(func(m *clusterv1.Machine) {
			m.Status = clusterv1.MachineStatus{}
		}),
		"a move emptied the Cluster's status": nodeReady(clusterv1.MachineNodeInspectionFailedReason,
			"Waiting for Cluster control plane to be initialized"),
		"Cluster API failed to look": nodeReady(clusterv1.MachineNodeInternalErrorReason, "Please check controller logs for errors"),
		"the Cluster is paused": func(s *Snapshot) {
			booting(s.Machines[len(s.Machines)-1])
			s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Paused}}
		},
		"the Machine is paused": machine(func(m *clusterv1.Machine) {
			inspect(m)
			m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue})
		}),
		"the holder reported the Node": machine(func(m *clusterv1.Machine) {
			inspect(m)
			m.Annotations = map[string]string{v1alpha1.NodeRegisteredAtAnnotation: "2026-01-01T00:00:00Z"}
		}),
	}
}

func TestAMachineWhoseNodeIsUnseenIsNotPromised(t *testing.T) {
	for name, change := range unseenNodes() {
		t.Run(name, func(t *testing.T) {
			s := atRest(2, &Ledger{Version: 1, Floor: 1, LastReplicas: 2, Pending: map[string]Assignment{"c": {}}}).
				withMachine("new", "", nil).withMachine("floor", "", nil).withClaim("c", v1alpha1.PhasePending, "")
			change(s)
			d := Decide(s)
			require.NotNil(t, d.Ledger)
			assert.Equal(t, "new", d.Ledger.Pending["c"].Machine)
		})
	}
}

func TestAMachineWhoseNodeIsUnseenIsNotHandedOver(t *testing.T) {
	for name, change := range unseenNodes() {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", nil).withClaim("c", v1alpha1.PhaseReleasing, "m")
			change(s)
			d := Decide(s)
			assert.NotContains(t, kinds(d), Unbind)
			if s.Group.Has(eligibility.Paused) {
				assert.Nil(t, d.Ledger, "its release waits for the end of the pause")
				return
			}
			require.NotNil(t, d.Ledger)
			assert.Contains(t, d.Ledger.Releasing, types.UID("m"), "its own claim is released, so it goes")
		})
	}
}

func TestAMachineWhoseNodeIsUnseenIsNotGivenUp(t *testing.T) {
	for name, change := range unseenNodes() {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", nil).withClaim("c", v1alpha1.PhaseBound, "m")
			change(s)
			s.Failure = FailurePolicy{NodeDeadline: time.Minute}
			s.Claims[0].Status.NodeAbsentAt = new(metav1.NewTime(s.Now.Add(2 * time.Hour)))
			s.Now = s.Now.Add(2 * time.Hour)
			got := kinds(Decide(s))
			assert.NotContains(t, got, Fail)
			assert.NotContains(t, got, TimeOut)
		})
	}
}

// If there are a spare and a Machine of the user's with an unseen Node, the spare goes.
func TestAMachineWhoseNodeIsUnseenIsTheLastToBeTakenForASpare(t *testing.T) {
	for name, change := range unseenNodes() {
		if name == "the Cluster is paused" {
			continue // nothing is removed then
		}
		t.Run(name, func(t *testing.T) {
			s := atRest(2, &Ledger{Version: 1, Floor: 1, LastReplicas: 2, Spare: 1}).withMachine("spare", "", booting).withMachine("floor", "", nil)
			change(s)
			s.SpareSince = s.Now.Add(-time.Hour)
			d := Decide(s)
			require.NotNil(t, d.Ledger)
			assert.Contains(t, d.Ledger.Releasing, types.UID("spare"))
			assert.NotContains(t, d.Ledger.Releasing, types.UID("floor"))
		})
	}
}

func TestWhatWasDrainedIsNeverHandedOver(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", booting).withClaim("c", v1alpha1.PhaseReleasing, "m")
	assert.Contains(t, kinds(Decide(s)), Unbind, "it has no node, and nothing says otherwise")
	s.Claims[0].Status.Drained = true
	d := Decide(s)
	assert.NotContains(t, kinds(d), Unbind)
	require.NotNil(t, d.Ledger)
	assert.Contains(t, d.Ledger.Releasing, types.UID("m"))
}

// Cluster API's own statement may be older than its restart, so the holder must also have listed
// its Nodes since the deadline.
func TestANodeDeadlineNeedsBothStatements(t *testing.T) {
	deadline := 30 * time.Minute
	at := func(absent *time.Duration, registered bool) []ActionKind {
		s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", booting).withClaim("c", v1alpha1.PhaseBound, "m")
		s.Failure = FailurePolicy{NodeDeadline: deadline}
		made := s.Now
		s.Now = made.Add(deadline + 2*time.Minute)
		if absent != nil {
			s.Claims[0].Status.NodeAbsentAt = new(metav1.NewTime(made.Add(*absent)))
		}
		if registered {
			s.Claims[0].Status.NodeRegisteredAt = new(metav1.NewTime(made))
		}
		d := Decide(s)
		if len(d.Actions) == 1 && d.Actions[0].Kind == Explain {
			assert.Equal(t, ReasonNodeNotSeen, d.Actions[0].Event.Reason)
			s.Claims[0].Status.Reason, s.Claims[0].Status.Message = d.Actions[0].Event.Reason, d.Actions[0].Event.Message
			assert.Empty(t, Decide(s).Actions, "once")
		}
		return kinds(d)
	}
	since := func(d time.Duration) *time.Duration { return &d }
	assert.Equal(t, []ActionKind{Explain}, at(nil, false), "the holder has listed nothing")
	assert.Equal(t, []ActionKind{Explain}, at(since(deadline-time.Second), false), "it listed its Nodes before the deadline")
	assert.Equal(t, []ActionKind{Explain}, at(since(deadline+time.Minute), true), "it reported the Node as registered once")
	assert.Equal(t, []ActionKind{TimeOut}, at(since(deadline+time.Minute), false))
}

func TestTheTimeOfAPauseDoesNotCount(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", nil).withClaim("c", v1alpha1.PhaseBound, "m")
	s.Failure = FailurePolicy{ProviderIDDeadline: 10 * time.Minute}
	unpaused := s.Now.Add(time.Hour)
	s.Machines[0].Status.Conditions = []metav1.Condition{{
		Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(unpaused),
	}}
	s.Now = unpaused.Add(9 * time.Minute)
	assert.Empty(t, kinds(Decide(s)))
	s.Now = unpaused.Add(10 * time.Minute)
	assert.Equal(t, []ActionKind{TimeOut}, kinds(Decide(s)))
}

func TestTheTimeOfAPauseMakesNoMachineHopeless(t *testing.T) {
	s := atRest(1, nil).withMachine("m", "", nil)
	s.Failure = FailurePolicy{ProviderIDDeadline: time.Minute}
	m := s.Machines[0]
	m.CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
	s.prepare()
	require.True(t, s.hasFailed(m))
	m.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(s.Now.Add(-time.Minute)),
	}}
	assert.False(t, s.hasFailed(m), "it was paused until a minute ago")
}

// A kept claim reports that its owner is missing, and each live set renews that.
func TestAKeptClaimIsNotExplainedInTurns(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 1, LastReplicas: 1}).withMachine("m", "c", func(m *clusterv1.Machine) { m.Spec.ProviderID = "sim://m" }).
		withClaim("c", v1alpha1.PhaseBound, "m")
	s.Failure, s.Now = FailurePolicy{NodeDeadline: time.Minute}, s.Now.Add(time.Hour)
	require.Equal(t, []ActionKind{Explain}, kinds(Decide(s)))
	s.Claims[0].Status.Reason = ReasonOwnerMissing
	assert.Empty(t, kinds(Decide(s)))
}

// Cluster API's statements from before a pause stay in the status until it looks again.
func TestRightAfterAPauseNothingIsStated(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "", booting)
	m := s.Machines[0]
	s.prepare()
	assert.True(t, s.nodeless(m))
	m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
		Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(s.Now.Add(time.Hour)),
	})
	s.Now = s.Now.Add(time.Hour + time.Second)
	assert.False(t, s.nodeless(m))
	s.Now = s.Now.Add(unpauseSettles + skew)
	assert.True(t, s.nodeless(m))
}

// While it is not known whether a Machine may be used, no other one is ordered in its place.
func TestNothingIsOrderedForAClaimThatAnUnseenMachineMayServe(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, LastReplicas: 1, Pending: map[string]Assignment{"c": {}}}).
		withMachine("m", "", func(m *clusterv1.Machine) { m.Spec.ProviderID = "sim://m" }).withClaim("c", v1alpha1.PhasePending, "")
	d := Decide(s)
	assert.Nil(t, d.Ledger)
	inspect(s.Machines[0])
	d = Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, "m", d.Ledger.Pending["c"].Machine)
}

// Only what is certain ends a claim; what is not must not be looked at again and again.
func TestMissingInfrastructureIsNotLookedAtAllTheTime(t *testing.T) {
	for name, change := range unseenNodes() {
		t.Run(name, func(t *testing.T) {
			s := atRest(1, &Ledger{Version: 1, Seq: 9, LastReplicas: 1}).withMachine("m", "c", nil).withClaim("c", v1alpha1.PhaseBound, "m")
			change(s)
			s.Machines[0].Status.Conditions = append(s.Machines[0].Status.Conditions, metav1.Condition{
				Type: clusterv1.MachineInfrastructureReadyCondition, Status: metav1.ConditionFalse,
				Reason: clusterv1.MachineInfrastructureDeletedReason, LastTransitionTime: metav1.NewTime(s.Now.Add(-time.Hour)),
			})
			if after := Decide(s).RequeueAfter; after != 0 {
				require.GreaterOrEqual(t, after, time.Second)
			}
		})
	}
}
