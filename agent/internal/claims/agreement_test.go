package claims

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// TestAgreement asks that this package decides as the explored model does (test/claimmodel), on snapshots that the model
// reaches: of what holds in every state of the model, nothing follows for an engine that decides otherwise.
func TestAgreement(t *testing.T) {
	_ = os.Getenv("TESTED_FILES") // says to the test cache that the explored model is used here
	for name, world := range map[string]string{
		"one MachineSet":  "-claims=3 -floor=1 -stale=1 -outsiders=1 -raises=1 -lowers=1",
		"several":         "-claims=2 -floor=2 -sets=2 -stale=1 -outsiders=1 -rollouts=1 -pauses=1",
		"max size":        "-claims=3 -floor=0 -groups=2 -max=2 -stale=1",
		"RollingUpdate":   "-claims=2 -floor=1 -rolling -rollouts=2",
		"wiped":           "-claims=2 -floor=2 -sets=2 -wipes=2 -stale=1",
		"adoption":        "-claims=2 -floor=1 -adopt -outsiders=1 -stale=1 -wipes=1",
		"blocked":         "-claims=2 -floor=1 -blocks=1 -stale=1",
		"blocked rollout": "-claims=2 -floor=1 -blocks=1 -rollouts=1 -rolling -young",
		"late, forgotten": "-claims=2 -floor=1 -repeat -forget -stale=1",
	} {
		t.Run(name, func(t *testing.T) {
			arguments := append([]string{"run", "./claimmodel", "-model=engine", "-hooks", "-cases=2000"}, strings.Fields(world)...)
			command := exec.CommandContext(t.Context(), "go", arguments...)
			command.Dir = "../../../test"
			command.Stderr = t.Output()
			out, err := command.Output()
			require.NoError(t, err)
			var cases []modelCase
			require.NoError(t, json.Unmarshal(out, &cases)) //nolint:musttag // the model's fields' names
			require.NotEmpty(t, cases)
			for _, c := range cases {
				s := c.snapshot()
				got := inWords(decide(s))
				if !assert.Equal(t, c.Want, got) {
					text, _ := json.MarshalIndent(c, "", " ") //nolint:musttag // the model's fields' names
					t.Fatalf("the model decides otherwise from\n%s", text)
				}
			}
		})
	}
}

// The model's words; see package engine of test/claimmodel, which writes them.
type (
	modelCase struct {
		Replicas, Template int
		RollingUpdate      bool
		Max                int
		PausedBy           int
		Paused, Observed   bool
		Ledger             *modelLedger
		Claims             []struct {
			ID             int
			Phase          v1alpha1.Phase
			Machine, Adopt int
		}
		Sets []struct {
			ID, Replicas, PausedBy int
			Paused, Observed       bool
			Released               []int
		}
		Machines []struct {
			ID, Set, Claim              int
			Phase                       string
			Finalized, Hooked, Outdated bool
		}
		Gone      []struct{ ID, Set int } // Machines of releases that are gone
		GraceOver bool
		Want      modelDecision
	}
	modelLedger struct {
		Floor, LastReplicas int32
		Pending             map[int]int
		Adopted             map[int]bool
		Releasing           map[int]modelRelease
		Shrinks             int // the MachineSet, -1 for none
		Shrunk              bool
	}
	modelRelease  struct{ GivenBack, UnderPause, Hook, Carried bool }
	modelDecision struct {
		Write    bool
		Replicas int32
		Pause    pauseChange
		Ledger   *modelLedger
		Refused  []int
		Actions  []string
	}
)

func letter(kind string, n int) string { return kind + strconv.Itoa(n) }

func number(name string) int {
	n, err := strconv.Atoi(strings.TrimLeft(name, "cmset"))
	if err != nil {
		panic(err)
	}
	return n
}

func status(yes bool) metav1.ConditionStatus {
	if yes {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

func pausedBy(who int) map[string]string {
	switch who {
	case 1:
		return map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
	case 2:
		return map[string]string{clusterv1.PausedAnnotation: "a human"}
	}
	return map[string]string{}
}

// snapshot is the case as this package reads it.
func (c *modelCase) snapshot() *snapshot {
	const generation = 10
	s := scene(int32(c.Replicas), nil)
	s.sets = nil
	s.md.Generation, s.md.Status.ObservedGeneration = generation, generation-1
	if c.Observed {
		s.md.Status.ObservedGeneration = generation
	}
	if !c.RollingUpdate {
		s.md.Spec.Rollout.Strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
	}
	s.md.Annotations = pausedBy(c.PausedBy)
	s.md.Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: status(c.Paused)}}
	if c.Max > 0 {
		s.group.Max = new(int32(c.Max))
	}
	if c.PausedBy == 2 {
		s.group.Refusals = []eligibility.Refusal{{Reason: eligibility.Paused}}
	}
	if c.GraceOver {
		s.spareSince = s.now.Add(-time.Hour)
	}
	if c.Ledger != nil {
		s.ledger = (&Ledger{Version: ledgerVersion, Seq: 1, Floor: c.Ledger.Floor, LastReplicas: c.Ledger.LastReplicas}).clone()
		for id, m := range c.Ledger.Pending {
			named := Named{Adopted: c.Ledger.Adopted[id]}
			if m >= 0 {
				named.Machine, named.UID = letter("m", m), types.UID(letter("m", m))
			}
			s.ledger.Pending[letter("c", id)] = named
		}
		if c.Ledger.Shrinks >= 0 {
			s.ledger.Shrink = &Shrink{Set: letter("set", c.Ledger.Shrinks), Done: c.Ledger.Shrunk}
		}
		for m, r := range c.Ledger.Releasing {
			release := Release{Machine: letter("m", m), GivenBack: r.GivenBack, Hook: r.Hook}
			if r.UnderPause {
				release.Set = letter("set", c.setOf(m))
			}
			if r.GivenBack {
				release.Generation = generation
				if r.Carried {
					release.Generation = s.md.Status.ObservedGeneration
				}
			}
			s.ledger.Releasing[types.UID(release.Machine)] = release
		}
	}
	for _, set := range c.Sets {
		x := &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{Name: letter("set", set.ID), Generation: 5, Annotations: pausedBy(set.PausedBy)},
			Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(set.Replicas))},
			Status: clusterv1.MachineSetStatus{
				ObservedGeneration: 4,
				Conditions:         []metav1.Condition{{Type: clusterv1.PausedCondition, Status: status(set.Paused)}},
			},
		}
		if set.Observed {
			x.Status.ObservedGeneration = 5
		}
		var uids []types.UID
		for _, m := range set.Released {
			uids = append(uids, types.UID(letter("m", m)))
		}
		x.Annotations[v1alpha1.ReleasedAnnotation] = joinUIDs(uids)
		x.Annotations[clusterv1.RevisionAnnotation] = strconv.Itoa(set.ID)
		s.sets = append(s.sets, x)
	}
	c.addMachines(s)
	c.addClaims(s)
	return s
}

// setOf returns the MachineSet of a Machine, of one that is gone too.
func (c *modelCase) setOf(machine int) int {
	for _, m := range c.Machines {
		if m.ID == machine {
			return m.Set
		}
	}
	for _, gone := range c.Gone {
		if gone.ID == machine {
			return gone.Set
		}
	}
	return 0
}

func (c *modelCase) addMachines(s *snapshot) {
	for _, m := range c.Machines {
		claim := ""
		if m.Claim >= 0 {
			claim = letter("c", m.Claim)
		}
		s.withMachine(letter("m", m.ID), claim, func(x *clusterv1.Machine) {
			x.CreationTimestamp = metav1.NewTime(s.now.Add(time.Duration(m.ID-100) * time.Minute))
			x.OwnerReferences[0].Name = letter("set", m.Set)
			x.Finalizers = []string{clusterv1.MachineFinalizer}
			x.Annotations = map[string]string{}
			if m.Outdated {
				x.Status.Conditions = append(x.Status.Conditions, metav1.Condition{
					Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason,
				})
			}
			if m.Hooked {
				x.Annotations[v1alpha1.ReleaseHook] = ""
			}
			if m.Finalized {
				x.Finalizers = append(x.Finalizers, v1alpha1.ReleaseFinalizer)
				x.Annotations[clusterv1.DeleteMachineAnnotation] = v1alpha1.Group
			}
			if m.Phase == "joined" {
				x.Status.NodeRef.Name = "node-" + x.Name
			}
			reason, going := map[string]string{
				"deleting":    clusterv1.MachineDeletingDrainingNodeReason,
				"waiting":     clusterv1.MachineDeletingWaitingForPreTerminateHookReason,
				"terminating": clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason,
				"held":        clusterv1.MachineDeletingDeletionCompletedReason,
			}[m.Phase]
			if !going {
				return
			}
			x.DeletionTimestamp = &metav1.Time{Time: s.now}
			x.Status.Conditions = append(x.Status.Conditions, metav1.Condition{
				Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: reason,
			})
			if m.Phase == "held" {
				x.Finalizers = x.Finalizers[1:]
			}
		})
	}
}

func (c *modelCase) addClaims(s *snapshot) {
	for _, x := range c.Claims {
		machine := ""
		if x.Machine >= 0 {
			machine = letter("m", x.Machine)
		}
		s.withClaim(letter("c", x.ID), x.Phase, machine)
		claim := s.claims[len(s.claims)-1]
		claim.CreationTimestamp = metav1.NewTime(s.now.Add(time.Duration(x.ID-60) * time.Minute))
		if x.Adopt >= 0 {
			claim.Spec.Adopt = letter("m", x.Adopt)
		}
		if machine != "" { // nothing new to note for people
			claim.Status.Machine.NodeName = "node-" + machine
		}
	}
}

// inWords says a decision in the model's words. What is written for people alone is left out.
func inWords(d *decision) modelDecision {
	out := modelDecision{Write: d.ledger != nil, Refused: []int{}}
	if d.ledger != nil {
		out.Replicas, out.Pause = d.replicas, d.pause
		out.Ledger = &modelLedger{
			Floor: d.ledger.Floor, LastReplicas: d.ledger.LastReplicas,
			Pending: map[int]int{}, Adopted: map[int]bool{}, Releasing: map[int]modelRelease{}, Shrinks: -1,
		}
		if d.ledger.Shrink != nil {
			out.Ledger.Shrinks, out.Ledger.Shrunk = number(d.ledger.Shrink.Set), d.ledger.Shrink.Done
		}
		for id, named := range d.ledger.Pending {
			out.Ledger.Pending[number(id)] = -1
			if named.UID != "" {
				out.Ledger.Pending[number(id)] = number(named.Machine)
			}
			if named.Adopted {
				out.Ledger.Adopted[number(id)] = true
			}
		}
		for uid, r := range d.ledger.Releasing {
			out.Ledger.Releasing[number(string(uid))] = modelRelease{GivenBack: r.GivenBack, UnderPause: r.Set != "", Hook: r.Hook}
		}
	}
	for id := range d.refused {
		out.Refused = append(out.Refused, number(id))
	}
	slices.Sort(out.Refused)
	for _, a := range d.actions {
		if a.kind == explain || a.kind == noteMachine {
			continue
		}
		if a.kind == moveOn {
			a.kind = end // in the model only calls move claims
		}
		words := string(a.kind)
		switch a.kind {
		case markEntered, end:
			words += fmt.Sprint(" ", number(a.claim.Spec.ClaimID))
		case bind, restore, label, unbind:
			words += fmt.Sprint(" ", number(a.claim.Spec.ClaimID), " ", number(a.machine.Name))
		case hold, hook, letGo:
			words += fmt.Sprint(" ", number(a.machine.Name))
		case lowerSet:
			uids := []int{}
			for _, uid := range a.uids {
				uids = append(uids, number(string(uid)))
			}
			slices.Sort(uids)
			words += fmt.Sprint(" ", number(a.set.Name), " ", uids)
		default:
			words += fmt.Sprint(" ", number(a.set.Name))
		}
		out.Actions = append(out.Actions, words)
	}
	slices.Sort(out.Actions)
	return out
}
