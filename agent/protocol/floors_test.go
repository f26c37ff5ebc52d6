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

// reporting makes the holder report the Nodes of these Machines as unregistered.
func (s *Snapshot) reporting(machines ...string) *Snapshot {
	s.Nodes = map[string]bool{}
	for _, name := range machines {
		s.Nodes["sim://"+name] = false
	}
	return s
}

func ofTheFloor(m *clusterv1.Machine) {
	node(m)
	m.Annotations = map[string]string{v1alpha1.FloorAnnotation: "true"}
}

// outdated is a Machine with a Node that does not match its template.
func outdated(m *clusterv1.Machine) {
	node(m)
	m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
		Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
	})
}

func TestTheFloorsMachinesAreMarkedByTheLedgerFirst(t *testing.T) {
	for name, c := range map[string]struct {
		ledger *Ledger
		change func(*Snapshot)
		want   []types.UID
	}{
		"those that keep pods out, oldest first": {
			ledger: &Ledger{Version: 1, Floor: 2, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.withMachine("c", "", node).withMachine("a", "", node).withMachine("b", "", node).reporting("a", "b", "c")
			},
			want: []types.UID{"a", "b"},
		},
		"in a group that nobody has claimed from": {
			change: func(s *Snapshot) {
				s.withMachine("a", "", node).withMachine("b", "", node).withMachine("c", "", node).reporting("b")
			},
			want: []types.UID{"b"},
		},
		"not while others of the floor take pods": {
			ledger: &Ledger{Version: 1, Floor: 2, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.withMachine("a", "", node).withMachine("b", "", ofTheFloor).withMachine("c", "", node).reporting("c")
			},
		},
		"none of a claim, of one that had one, or that goes": {
			ledger: &Ledger{Version: 1, Floor: 1, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.withMachine("a", "claim", node).withClaim("claim", v1alpha1.PhaseBound, "a")
				s.withMachine("b", "ended", node).withClaim("ended", v1alpha1.PhaseEnded, "")
				s.withMachine("c", "", func(m *clusterv1.Machine) {
					node(m)
					m.Annotations = map[string]string{clusterv1.DeleteMachineAnnotation: ""}
				})
				s.reporting("a", "b", "c")
			},
		},
		"none of a group that is being deleted": {
			ledger: &Ledger{Version: 1, Floor: 3, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.Deployment.DeletionTimestamp = new(metav1.NewTime(s.Now))
				s.withMachine("a", "", node).withMachine("b", "", node).withMachine("c", "", node).reporting("a", "b", "c")
			},
		},
		"none of a group that does not take part": {
			change: func(s *Snapshot) {
				s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.NotMember}}
				s.withMachine("a", "", node).withMachine("b", "", node).withMachine("c", "", node).reporting("a", "b", "c")
			},
		},
		"one whose Node was registered, and joined anew": {
			ledger: &Ledger{Version: 1, Floor: 1, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.withMachine("a", "", func(m *clusterv1.Machine) {
					node(m)
					m.Annotations = map[string]string{v1alpha1.NodeRegisteredAtAnnotation: "2026-01-01T00:00:00Z"}
				}).reporting("a")
			},
			want: []types.UID{"a"},
		},
		"the one that replaces another in a rolling update, before that goes": {
			ledger: &Ledger{Version: 1, Floor: 1, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.withMachine("a", "", outdated).withMachine("b", "", node).reporting("b")
			},
			want: []types.UID{"b"},
		},
		"none beside one that nobody replaces unasked": {
			ledger: &Ledger{Version: 1, Floor: 1, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.Deployment.Spec.Rollout.Strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
				s.withMachine("a", "", outdated).withMachine("b", "", node).reporting("b")
			},
		},
		"none where a person has paused the group": {
			ledger: &Ledger{Version: 1, Floor: 3, LastReplicas: 3},
			change: func(s *Snapshot) {
				s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Paused}}
				s.withMachine("a", "", node).withMachine("b", "", node).withMachine("c", "", node).reporting("a", "b", "c")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(3, c.ledger)
			c.change(s)
			d := Decide(s)
			assert.NotContains(t, kinds(d), MarkFloor, "not before the ledger says so")
			if c.want == nil {
				if d.Ledger != nil {
					assert.Empty(t, d.Ledger.Marking)
				}
				return
			}
			require.NotNil(t, d.Ledger)
			assert.Equal(t, c.want, d.Ledger.Marking)
			assert.Equal(t, int32(3), d.Replicas)
		})
	}
}

func TestAMachineIsMarkedAndThenForgotten(t *testing.T) {
	ledger := func() *Ledger { return &Ledger{Version: 1, Floor: 1, LastReplicas: 1, Marking: []types.UID{"a"}} }
	d := Decide(atRest(1, ledger()).withMachine("a", "", node).reporting("a"))
	assert.Equal(t, []ActionKind{MarkFloor}, kinds(d))
	assert.Nil(t, d.Ledger)
	paused := atRest(1, ledger()).withMachine("a", "", node).reporting("a")
	paused.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Paused}}
	assert.Empty(t, Decide(paused).Actions, "not while a person has paused the group")

	for name, change := range map[string]func(*Snapshot){
		"it is marked": func(s *Snapshot) { s.withMachine("a", "", ofTheFloor) },
		"it is gone":   func(s *Snapshot) { s.withMachine("b", "", node) },
		"it is being deleted": func(s *Snapshot) {
			s.withMachine("a", "", func(m *clusterv1.Machine) {
				node(m)
				m.DeletionTimestamp = &m.CreationTimestamp
			})
		},
	} {
		s := atRest(1, ledger())
		change(s)
		d := Decide(s)
		require.NotNil(t, d.Ledger, name)
		assert.Empty(t, d.Ledger.Marking, name)
		assert.NotContains(t, kinds(d), MarkFloor, name)
	}
}

// The report may be two minutes old, and the taint may be gone.
func TestTheFloorsMachinesArePromisedToNobody(t *testing.T) {
	for name, marking := range map[string][]types.UID{"marked": nil, "about to be": {"a"}} {
		change := node
		if marking == nil {
			change = ofTheFloor
		}
		// Machine x may run pods, so that a claim could only have a.
		s := atRest(2, &Ledger{Version: 1, Floor: 1, LastReplicas: 2, Marking: marking, Pending: map[string]Assignment{"c": {}}}).
			withMachine("a", "", change).withMachine("x", "", node).withClaim("c", v1alpha1.PhasePending, "").reporting("a", "b")
		if d := Decide(s); d.Ledger != nil {
			assert.Empty(t, d.Ledger.Pending["c"].Machine, name)
		}
		d := Decide(s.withMachine("b", "", node))
		require.NotNil(t, d.Ledger, name)
		assert.Equal(t, "b", d.Ledger.Pending["c"].Machine, name)
	}
}

// The mark was written late by a stalled agent, after the ledger that named the Machine for it was
// lost.
func TestAPromiseIsTakenBackWhenAMarkComesLate(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Floor: 1, LastReplicas: 2, Pending: map[string]Assignment{"c": {Machine: "a", UID: "a"}}}).
		withMachine("a", "", ofTheFloor).withMachine("b", "", booting).withClaim("c", v1alpha1.PhasePending, "")
	d := Decide(s)
	assert.NotContains(t, kinds(d), Bind)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, "b", d.Ledger.Pending["c"].Machine)

	s.Claims[0].Spec.Adopt, s.Ledger.Pending["c"] = "a", Assignment{Machine: "a", UID: "a", Adopted: true}
	assert.Contains(t, kinds(Decide(s)), Bind, "but who adopts it has it")
}

func TestAMarkThatTheFloorHasNoUseForAnyMoreKeepsNoMachine(t *testing.T) {
	s := atRest(2, &Ledger{Version: 1, Floor: 1, LastReplicas: 2}).
		withMachine("a", "", ofTheFloor).withMachine("b", "", ofTheFloor)
	s.SpareSince = s.Now.Add(-2 * time.Minute)
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Len(t, d.Ledger.Releasing, 1)
	assert.Contains(t, d.Ledger.Releasing, types.UID("b"), "the oldest stay")
}

func TestMarkingFillsNoLedger(t *testing.T) {
	s := atRest(100, &Ledger{Version: 1, Floor: 100, LastReplicas: 100})
	var names []string
	for i := range 100 {
		name := "m-" + string(rune('a'+i/26)) + string(rune('a'+i%26))
		names = append(names, name)
		s.withMachine(name, "", node)
	}
	d := Decide(s.reporting(names...))
	require.NotNil(t, d.Ledger)
	assert.Len(t, d.Ledger.Marking, markingAtOnce)
}
