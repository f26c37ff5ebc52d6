package claims

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

func TestConditionsFollowFromTheStatus(t *testing.T) {
	made := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(minutes int) *metav1.Time {
		return new(metav1.NewTime(made.Add(time.Duration(minutes) * time.Minute)))
	}
	const (
		yes = metav1.ConditionTrue
		no  = metav1.ConditionFalse
	)
	machine := &v1alpha1.MachineReference{Name: "m", UID: "u"}
	withNode := &v1alpha1.MachineReference{Name: "m", UID: "u", NodeName: "n"}
	is := func(kind string, status metav1.ConditionStatus, reason, message string, minutes int) metav1.Condition {
		return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, LastTransitionTime: *at(minutes)}
	}
	const assigned, ready, ended, stalled = v1alpha1.ConditionAssigned, v1alpha1.ConditionReady, v1alpha1.ConditionEnded, v1alpha1.ConditionStalled
	for name, c := range map[string]struct {
		status v1alpha1.MachineClaimStatus
		want   []metav1.Condition
	}{
		"new": {v1alpha1.MachineClaimStatus{}, []metav1.Condition{
			is(assigned, no, "Pending", "", 0), is(ready, no, "Pending", "", 0), is(ended, no, "Live", "", 0),
		}},
		"pending": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhasePending, Reason: protocol.ReasonWaitingForMachine, Message: "waits", WaitingSince: at(1),
			},
			[]metav1.Condition{
				is(assigned, no, "WaitingForMachine", "", 0), is(ready, no, "WaitingForMachine", "waits", 0), is(ended, no, "Live", "", 0),
			},
		},
		"bound": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonBound, Message: "bound to Machine m", Machine: machine, BoundAt: at(2),
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, no, "WaitingForNode", "bound to Machine m", 0), is(ended, no, "Live", "", 0),
			},
		},
		"the Machine has trouble": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonWriteRefused, Message: "denied", Machine: machine, BoundAt: at(2),
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, no, "WriteRefused", "denied", 0), is(ended, no, "Live", "", 0),
			},
		},
		"its Node is registered": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonBound, Machine: machine, BoundAt: at(2), NodeRegisteredAt: at(4),
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, yes, "NodeJoined", "", 4), is(ended, no, "Live", "", 0),
			},
		},
		"Cluster API saw its Node first": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonNodeJoined, Machine: withNode, BoundAt: at(2), NodeRegisteredAt: at(4),
				History: []v1alpha1.Event{{Time: *at(3), Reason: protocol.ReasonNodeJoined}},
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, yes, "NodeJoined", "Node n", 3), is(ended, no, "Live", "", 0),
			},
		},
		"it is kept without an owner": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonOwnerMissing, Machine: withNode, BoundAt: at(2), NodeRegisteredAt: at(4),
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, yes, "NodeJoined", "Node n", 4), is(ended, no, "Live", "", 0),
			},
		},
		"a user deletes the Machine": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonMachineDeleting, Message: "another actor", Machine: withNode, BoundAt: at(2),
				NodeRegisteredAt: at(4), History: []v1alpha1.Event{{Time: *at(6), Reason: protocol.ReasonMachineDeleting}},
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, no, "MachineDeleting", "another actor", 6), is(ended, no, "Live", "", 0),
			},
		},
		"it is being released": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseReleasing, Reason: protocol.ReasonReleaseRequested, Message: "expired", Machine: withNode, BoundAt: at(2),
				NodeRegisteredAt: at(4), ReleasedAt: at(7),
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, no, "ReleaseRequested", "expired", 7), is(ended, no, "Releasing", "", 0),
			},
		},
		"it is being returned": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseBound, Reason: protocol.ReasonReturnRequested, Machine: withNode, BoundAt: at(2), NodeRegisteredAt: at(4),
				Returned: true, History: []v1alpha1.Event{{Time: *at(7), Reason: protocol.ReasonReturnRequested}},
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, no, "ReturnRequested", "", 7), is(ended, no, "Releasing", "", 0),
			},
		},
		"it has failed": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseReleasing, Reason: protocol.ReasonFailed, Message: "no capacity", Machine: machine, BoundAt: at(2),
				ReleasedAt: at(5), FailedAt: at(5),
			},
			[]metav1.Condition{
				is(assigned, yes, "Bound", "Machine m", 2), is(ready, no, "Failed", "no capacity", 0), is(ended, no, "Releasing", "", 0),
				is(stalled, yes, "Failed", "no capacity", 5),
			},
		},
		"it has ended": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseEnded, Reason: protocol.ReasonReleased, Message: "gone", Machine: withNode, BoundAt: at(2),
				NodeRegisteredAt: at(4), ReleasedAt: at(7), EndedAt: at(9),
			},
			[]metav1.Condition{
				is(assigned, no, "Released", "", 9), is(ready, no, "Released", "gone", 7), is(ended, yes, "Released", "", 9),
			},
		},
		"it has lost its Machine": {
			v1alpha1.MachineClaimStatus{
				Phase: v1alpha1.PhaseEnded, Reason: protocol.ReasonMachineLost, Machine: withNode, BoundAt: at(2), NodeRegisteredAt: at(4), EndedAt: at(9),
			},
			[]metav1.Condition{
				is(assigned, no, "MachineLost", "", 9), is(ready, no, "MachineLost", "", 9), is(ended, yes, "MachineLost", "", 9),
			},
		},
		"its reason is none of a condition": {
			v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending, Reason: "no word"},
			[]metav1.Condition{is(assigned, no, "Pending", "", 0), is(ready, no, "Pending", "", 0), is(ended, no, "Live", "", 0)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			claim := &v1alpha1.MachineClaim{
				ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(made)}, Spec: v1alpha1.MachineClaimSpec{NodeGroup: "small"}, Status: c.status,
			}
			assert.Equal(t, c.want, conditionsOf(claim, *at(99)))
			claim.Status.Conditions = conditionsOf(claim, *at(99))
			assert.Equal(t, c.want, conditionsOf(claim, *at(100)), "what was written before does not matter")
		})
	}
}

// The API server refuses a status with a condition that has no time, and a claim without one
// would make no progress.
func TestEveryConditionHasATimeAndAReason(t *testing.T) {
	now := metav1.NewTime(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	for _, c := range append(recordedAs[v1alpha1.MachineClaim](t, "MachineClaim"), &v1alpha1.MachineClaim{}) {
		for _, condition := range conditionsOf(c, now) {
			assert.False(t, condition.LastTransitionTime.IsZero(), "%s of %+v", condition.Type, c.Status)
			assert.Regexp(t, reasonFormat, condition.Reason, condition.Type)
		}
	}
}

// There may be thousands of claims with the longest message.
func TestConditionsTakeLittleRoom(t *testing.T) {
	now := metav1.NewTime(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	size := func(message string, failed *metav1.Time) int {
		text, err := json.Marshal(conditionsOf(&v1alpha1.MachineClaim{Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseReleasing, Reason: protocol.ReasonFailed, Message: message, FailedAt: failed,
			Machine: &v1alpha1.MachineReference{Name: strings.Repeat("m", 63)},
		}}, now))
		require.NoError(t, err)
		return len(text)
	}
	assert.Less(t, size("", nil), 512)
	assert.Less(t, size(strings.Repeat("x", protocol.MaxMessage), nil), 512+protocol.MaxMessage, "the message is there once")
	assert.Less(t, size(strings.Repeat("x", protocol.MaxMessage), &now), 768+2*protocol.MaxMessage)
}

// A write of the conditions alone would be one more for each claim.
func TestAClaimHasItsConditionsFromTheWritesThatItHasAnyway(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil), claimIn("", "a", "", ""))
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "a"}
	entered, err := e.getUncached(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, v1alpha1.PhasePending, entered.Status.Phase)
	status := func(c *v1alpha1.MachineClaim) map[string]metav1.ConditionStatus {
		return lo.SliceToMap(c.Status.Conditions, func(c metav1.Condition) (string, metav1.ConditionStatus) { return c.Type, c.Status })
	}
	assert.Equal(t, map[string]metav1.ConditionStatus{"Assigned": "False", "Ready": "False", "Ended": "False"}, status(entered))
	released, err := e.Release(t.Context(), key, ReleaseOptions{})
	require.NoError(t, err)
	assert.NotEmpty(t, released.Status.Conditions)
	_, err = e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	ended, err := e.getUncached(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, v1alpha1.PhaseEnded, ended.Status.Phase)
	assert.Equal(t, map[string]metav1.ConditionStatus{"Assigned": "False", "Ready": "False", "Ended": "True"}, status(ended))
}
