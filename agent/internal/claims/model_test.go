package claims

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// TestProtocolAgainstAdversary drives two agents through random histories. It checks the invariants
// after every step and, at the end, when everything has come to rest.
func TestProtocolAgainstAdversary(t *testing.T) {
	inOneGoroutine(t)
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, worldOptions{
			groups:  rapid.IntRange(1, 2).Draw(t, "groups"),
			floor:   rapid.Int32Range(0, 2).Draw(t, "floor"),
			minimum: rapid.SampledFrom([]string{"", "", "1"}).Draw(t, "min"),
			maximum: rapid.SampledFrom([]string{"", "", "3", "4"}).Draw(t, "max"),
			strategy: rapid.SampledFrom([]clusterv1.MachineDeploymentRolloutStrategyType{
				clusterv1.OnDeleteMachineDeploymentStrategyType, clusterv1.RollingUpdateMachineDeploymentStrategyType,
			}).Draw(t, "strategy"),
			noSurge:      rapid.Bool().Draw(t, "no surge"),
			ledgerBudget: rapid.SampledFrom([]int{0, 0, 0, 340, 520}).Draw(t, "ledger budget"), // 340: room for one claim and one release
		})
		w.plan(rapid.Bool().Draw(t, "outsiders"))
		w.runHistory()
	})
}

// TestProtocolAgainstMoves does the same in histories that consist mostly of moves of the hub.
func TestProtocolAgainstMoves(t *testing.T) {
	inOneGoroutine(t)
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, worldOptions{
			groups: 1, floor: rapid.Int32Range(0, 2).Draw(t, "floor"),
			maximum: rapid.SampledFrom([]string{"", "3"}).Draw(t, "max"),
			strategy: rapid.SampledFrom([]clusterv1.MachineDeploymentRolloutStrategyType{
				clusterv1.OnDeleteMachineDeploymentStrategyType, clusterv1.RollingUpdateMachineDeploymentStrategyType,
			}).Draw(t, "strategy"),
		})
		w.plan(true)
		for name := range w.actions {
			if strings.HasPrefix(name, "human") || strings.HasPrefix(name, "group") || strings.Contains(name, "lost") {
				delete(w.actions, name)
			}
		}
		w.actions["the hub is moved"] = func() {
			if w.rarely(2) {
				w.move()
			}
		}
		w.runHistory()
	})
}

func (w *world) runHistory() {
	actions := map[string]func(*rapid.T){"": func(*rapid.T) { w.check() }}
	for name := range w.actions {
		actions[name] = func(*rapid.T) { w.act(name) }
	}
	w.dice.Repeat(actions)
	w.settle()
}

// inOneGoroutine skips a test under the race detector, which would find nothing: its agents take
// turns. `make test` runs it without.
func inOneGoroutine(t *testing.T) {
	t.Helper()
	if raced {
		t.Skip("it runs without the race detector")
	}
}
