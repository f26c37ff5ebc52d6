// Command many-nodes measures the cost of one spoke with thousands of Nodes, at rest and while
// hundreds of them are removed: calls to the agent, requests to both API servers, memory and CPU
// time. It uses its own sandbox with one agent.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	startWithin  = 5 * time.Minute
	settleWithin = 5 * time.Minute
	// progress is the interval between progress messages.
	progress = 30 * time.Second
	// pool is the name of the static NodePool, and of the NodeClass that selects the node groups.
	pool = "crowd"
	// groupSize is the size of each node group: Cluster API's work for a MachineDeployment grows
	// with the square of its size, and fleets of thousands consist of several.
	groupSize = 250
)

type settings struct {
	nodes, terminate, step int
	name                   string
	rest, within           time.Duration
}

func main() {
	var s settings
	flag.IntVar(&s.nodes, "nodes", 1000, "Number of `nodes`.")
	flag.IntVar(&s.terminate, "terminate", 100, "Number of `nodes` that go at once.")
	flag.IntVar(&s.step, "step", 250, "Number of `nodes` that come at once.")
	flag.DurationVar(&s.rest, "rest", 5*time.Minute, "Duration of the measurement at rest.")
	flag.DurationVar(&s.within, "within", time.Hour, "Maximum time for the nodes to come, and to go.")
	flag.StringVar(&s.name, "name", "many-nodes", "Name of the sandbox.")
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	began := time.Now()
	if _, err := run(ctx, s); err != nil {
		say("many-nodes: FAIL %v", err)
		stop()
		os.Exit(1) //nolint:gocritic // nothing but stop is deferred
	}
	say("many-nodes: PASS nodes=%d terminated=%d seconds=%.0f", s.nodes, s.terminate, time.Since(began).Seconds())
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// run measures the phases, in a sandbox that it starts and stops, and returns their costs.
func run(ctx context.Context, s settings) ([]cost, error) {
	if s.terminate < 1 || s.terminate > s.nodes {
		return nil, errors.New("--terminate must be from 1 to --nodes")
	}
	if s.step < 1 {
		return nil, errors.New("--step must be at least 1")
	}
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	w, err := testenv.Start(starting, sandbox.Options{Name: s.name, FeatureGates: []string{"StaticCapacity"}}, nil)
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	if err := prepare(starting, w, s.nodes); err != nil {
		return nil, err
	}
	m := meter{env: w}
	m.head()
	var costs []cost
	for _, phase := range []struct {
		name  string
		nodes int
		do    func(context.Context) error
	}{
		{fmt.Sprintf("%d nodes come", s.nodes), s.nodes, func(ctx context.Context) error { return grow(ctx, w, s) }},
		{fmt.Sprintf("rest with %d", s.nodes), s.nodes, func(ctx context.Context) error {
			select {
			case <-ctx.Done():
			case <-time.After(s.rest):
			}
			return ctx.Err()
		}},
		{fmt.Sprintf("%d go at once", s.terminate), s.terminate, func(ctx context.Context) error {
			return size(ctx, w, s.nodes-s.terminate, s.within)
		}},
	} {
		is, err := m.phase(ctx, phase.name, phase.nodes, phase.do)
		if err != nil {
			return nil, err
		}
		costs = append(costs, is)
	}
	settling, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	violations, err := w.Checker.Settle(settling)
	if len(violations) > 0 {
		return nil, errors.New("invariants are violated:\n" + invariants.Describe(violations))
	}
	return costs, err
}

// prepare creates the node groups and the static NodePool, without Nodes.
func prepare(ctx context.Context, w *testenv.Env, nodes int) error {
	for i := range (nodes + groupSize - 1) / groupSize {
		group, err := manifests.LoadAs(manifests.CrowdHub, pool, fmt.Sprintf("%s-%02d", pool, i))
		if err != nil {
			return err
		}
		for _, o := range group {
			if o.GetKind() == "MachineDeployment" {
				o.SetLabels(lo.Assign(o.GetLabels(), map[string]string{"fleet.example.com/pool": pool}))
				o.SetAnnotations(lo.Assign(o.GetAnnotations(), map[string]string{clusterv1.AutoscalerMaxSizeAnnotation: strconv.Itoa(groupSize)}))
			}
		}
		if err := manifests.ApplyObjects(ctx, w.Hub, group...); err != nil {
			return err
		}
	}
	spoke, err := manifests.Load(manifests.CrowdSpoke)
	if err != nil {
		return err
	}
	for _, o := range spoke {
		if o.GetKind() == "NodePool" {
			if err := unstructured.SetNestedField(o.Object, int64(0), "spec", "replicas"); err != nil {
				return err
			}
		}
	}
	return errors.Join(manifests.ApplyObjects(ctx, w.Spoke, spoke...), w.AwaitNodePool(ctx, pool))
}

// grow scales the NodePool to its size, step by step.
func grow(ctx context.Context, w *testenv.Env, s settings) error {
	ctx, cancel := context.WithTimeout(ctx, s.within)
	defer cancel()
	for nodes := 0; nodes < s.nodes; {
		nodes = min(nodes+s.step, s.nodes)
		if err := size(ctx, w, nodes, s.within); err != nil {
			return err
		}
	}
	return nil
}

// size scales the NodePool to this many Nodes, and waits until it has them.
func size(ctx context.Context, w *testenv.Env, nodes int, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	nodePool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: pool}}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, nodes))
	if err := w.Spoke.Patch(ctx, nodePool, patch); err != nil {
		return err
	}
	began, said := time.Now(), time.Now()
	return w.Recorder.Await(ctx, func(state timeline.State) string {
		live := state.Live()
		ready := lo.CountBy(live, func(j timeline.Timeline) bool {
			return j.Reached(timeline.Initialized) && !j.Reached(timeline.Deleting)
		})
		missing := fmt.Sprintf("%d NodeClaims, %d of them initialized", len(live), ready)
		if time.Since(said) >= progress {
			said = time.Now()
			say("  after %4.0f s: %s", time.Since(began).Seconds(), missing)
		}
		return lo.Ternary(len(live) == nodes && ready == nodes, "", missing)
	})
}
