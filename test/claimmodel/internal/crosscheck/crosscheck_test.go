package crosscheck

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/engine"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// patience allows for a machine that is busy with other work.
const patience = 15 * time.Minute

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// TestTheModelAllowsWhatClusterAPIDoes plays all scripts in one hub.
func TestTheModelAllowsWhatClusterAPIDoes(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	scripts := Scripts()
	played, err := Play(ctx, hub(ctx, t), scripts)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range scripts {
		t.Run(s.Name, func(t *testing.T) {
			said, err := compare(&s, played[i])
			t.Log(said)
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// compare follows a script's real outcomes through the model. It returns what the model allows in
// each phase, and an error at the first outcome that is not allowed.
func compare(s *engine.Script, outcomes []engine.Outcome) (said string, err error) {
	var b strings.Builder
	from := []engine.Situation{s.Begin()}
	for i, outcome := range outcomes {
		allowed, err := s.Allowed(i, from)
		if err != nil {
			return b.String(), err
		}
		lines := lo.Map(lo.Keys(allowed), func(o engine.Outcome, _ int) string {
			return fmt.Sprintf("\n    %s %s", lo.Ternary(o == outcome, ">", " "), o)
		})
		slices.Sort(lines)
		fmt.Fprintf(&b, "\n  %v%s", s.Phases[i], strings.Join(lines, ""))
		if from = allowed[outcome]; len(from) == 0 {
			return b.String(), fmt.Errorf("phase %d: the model does not allow\n      %s", i, outcome)
		}
	}
	return b.String(), nil
}

// hub starts a sandbox without our components, and returns an administrator's client for its hub.
func hub(ctx context.Context, t *testing.T) client.Client {
	t.Helper()
	dir, err := os.MkdirTemp("", "crosscheck-") // The logs stay if the test fails.
	if err != nil {
		t.Fatal(err)
	}
	box, err := sandbox.Start(ctx, sandbox.Options{StateDir: filepath.Join(dir, "sandbox"), WithoutAgent: true, ClusterAPIArgs: []string{
		"--clustercache-client-qps=200", "--clustercache-client-burst=400", // many Nodes at the same time, in one Cluster
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		box.Stop()
		if t.Failed() {
			t.Logf("the sandbox's logs are in %s", box.State().Paths.Logs)
		} else if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	config := box.HubConfig()
	config.QPS, config.Burst = 1000, 1000
	c, err := client.New(config, client.Options{Scheme: testenv.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestWrongOutcomesAreRefused verifies that the comparison can fail.
func TestWrongOutcomesAreRefused(t *testing.T) {
	// outcome returns the outcome of one MachineSet with the given replicas, and its Machines.
	outcome := func(replicas int, machines ...engine.Stage) engine.Outcome {
		var out engine.Outcome
		out.Sets[0].Replicas = replicas
		copy(out.Machines[:], machines)
		return out
	}
	const alive, held, gone = engine.Alive, engine.Held, engine.Gone
	for _, test := range []struct {
		name   string
		script engine.Script
		right  engine.Outcome
		wrong  []engine.Outcome
	}{
		{
			"the marked Machine survives",
			engine.Script{Machines: []int{3}, Phases: []phase{{mark(1)}, {replicas(2)}}},
			outcome(2, alive, gone, alive),
			[]engine.Outcome{outcome(2, gone, alive, alive), outcome(2, alive, alive, alive), outcome(2, gone, gone, alive)},
		},
		{
			"another dies for one that is held",
			engine.Script{Machines: []int{2}, Phases: []phase{{addFinalizer(0), remove(0)}, {replicas(1)}}},
			outcome(1, held, alive),
			[]engine.Outcome{outcome(1, held, gone), outcome(1, gone, alive), outcome(2, held, alive)},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := []engine.Situation{test.script.Begin()}
			first, err := test.script.Allowed(0, before)
			if err != nil || len(first) != 1 {
				t.Fatalf("the first phase has %d outcomes, err %v", len(first), err)
			}
			begun := lo.Keys(first)[0]
			if said, err := compare(&test.script, []engine.Outcome{begun, test.right}); err != nil {
				t.Errorf("%v%s", err, said)
			}
			for _, wrong := range test.wrong {
				if _, err := compare(&test.script, []engine.Outcome{begun, wrong}); err == nil {
					t.Errorf("the model allows %s", wrong)
				}
			}
		})
	}
}

// TestAMachineSetMayBeCutBeforeItsStatusCountsItsMachines covers an outcome that is rare in the
// real Cluster API.
func TestAMachineSetMayBeCutBeforeItsStatusCountsItsMachines(t *testing.T) {
	s := engine.Script{Machines: []int{1}, Phases: []phase{{replicas(3), rollout}}}
	var seldom engine.Outcome
	seldom.Sets[0] = engine.SetOutcome{Replicas: 1, New: 1}
	seldom.Sets[1] = engine.SetOutcome{Replicas: 2, New: 2}
	seldom.Machines[0] = engine.Gone
	if said, err := compare(&s, []engine.Outcome{seldom}); err != nil {
		t.Errorf("%v%s", err, said)
	}
}

// TestTheModelHasRoomForTheScripts follows every outcome that the model allows, whether or not the
// real controllers produce it.
func TestTheModelHasRoomForTheScripts(t *testing.T) {
	for _, s := range Scripts() {
		t.Run(s.Name, func(t *testing.T) {
			from := []engine.Situation{s.Begin()}
			for i := range s.Phases {
				allowed, err := s.Allowed(i, from)
				if err != nil {
					t.Fatal(err)
				}
				from = slices.Concat(lo.Values(allowed)...)
			}
		})
	}
}
