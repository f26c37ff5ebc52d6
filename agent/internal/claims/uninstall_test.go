package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// TestUninstallLeavesNothingAndTakesNothing uninstalls in the middle of random histories.
func TestUninstallLeavesNothingAndTakesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, 1, rapid.Int32Range(0, 2).Draw(t, "floor"), "")
		group := w.groups[0]
		pick := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "pick") }
		// Short histories: what counts is what is half done when they end.
		actions := map[string]func(){
			"agent": func() {
				w.crash, w.crashAfter = max(-1, rapid.IntRange(-6, 8).Draw(t, "crash")), rapid.Bool().Draw(t, "after")
				w.agentStep(0, group)
			},
			"create": func() {
				if len(w.claims) < 4 {
					w.claims = append(w.claims, fmt.Sprintf("c%d", len(w.claims)))
					w.create(0, w.claims[len(w.claims)-1], w.groups)
				}
			},
			"release": func() {
				if len(w.claims) > 0 {
					w.release(0, rapid.SampledFrom(w.claims).Draw(t, "claim"))
				}
			},
			"controllers": func() {
				w.deploymentStep(group, pick)
				for _, s := range w.sets(group) {
					w.setStep(s, pick)
				}
				for _, m := range w.machines(group) {
					w.machineStep(m)
				}
			},
			"rollout": func() {
				if rapid.IntRange(0, 4).Draw(t, "rarely") == 0 {
					w.rollout(group)
				}
			},
		}
		names := slices.Sorted(maps.Keys(actions))
		for range rapid.IntRange(0, 16).Draw(t, "actions") {
			actions[rapid.SampledFrom(names).Draw(t, "action")]()
			w.check()
		}
		going := map[types.UID]bool{}
		for _, c := range w.allClaims() {
			if c.Status.Phase == v1alpha1.PhaseReleasing && c.Status.Machine != nil {
				going[c.Status.Machine.UID] = true
			}
		}
		var staying []types.UID
		for _, m := range w.machines(group) {
			if alive(m) && !going[m.UID] && !held(m) {
				staying = append(staying, m.UID)
			}
		}

		engine := w.newAgent()
		key := types.NamespacedName{Namespace: namespace, Name: group}
		for round := 0; ; round++ {
			if round > 100 {
				t.Fatalf("not withdrawn\n%s", w.describe())
			}
			// The agent dies now and then, and is started anew.
			w.crash, w.crashAfter, w.inAgent = max(-1, rapid.IntRange(-20, 6).Draw(t, "crash")), rapid.Bool().Draw(t, "after"), true
			waiting, err := engine.withdraw(context.Background(), key, false)
			crashed := w.crash == 0
			w.crash, w.inAgent = -1, false
			if err == nil && waiting == "" && !crashed {
				break
			}
			if crashed {
				engine = w.newAgent()
			}
			for w.deploymentStep(group, pick) {
			}
			for _, s := range w.sets(group) {
				w.setStep(s, pick)
			}
			for _, m := range w.machines(group) {
				w.machineStep(m)
			}
		}
		must(t, engine.deleteClaims(context.Background(), UninstallOptions{
			Serves: func(types.NamespacedName) bool { return true }, Report: func(string, ...any) {},
		}))
		w.claims = nil
		w.rest()

		md := w.md(group)
		if md.Annotations[v1alpha1.LedgerAnnotation] != "" || pausedByAgent(md) || len(w.allClaims()) > 0 {
			t.Fatalf("something was left behind\n%s", w.describe())
		}
		for _, s := range w.sets(group) {
			if cleaned(s) != nil {
				t.Fatalf("something was left on MachineSet %s: %v", s.Name, s.Annotations)
			}
		}
		machines := w.machines(group)
		for _, m := range machines {
			if cleaned(m) != nil {
				t.Fatalf("something was left on Machine %s: %v %v %v", m.Name, m.Labels, m.Annotations, m.Finalizers)
			}
		}
		if len(machines) != int(*md.Spec.Replicas) {
			t.Fatalf("%d Machines for %d replicas\n%s", len(machines), *md.Spec.Replicas, w.describe())
		}
		for _, uid := range staying {
			if !slices.ContainsFunc(machines, func(m *clusterv1.Machine) bool { return m.UID == uid }) {
				t.Fatalf("Machine %s was taken from the user\n%s", uid, w.describe())
			}
		}
	})
}
