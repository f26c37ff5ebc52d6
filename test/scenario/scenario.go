// Package scenario runs the product's main task from end to end: pods that need nodes get them,
// fewer pods are consolidated onto fewer nodes, and no pods leave nothing behind. The demo shows
// it, and the end-to-end tests assert it.
package scenario

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	// Timeouts of the parts, on a slow machine.
	readyWithin       = 2 * time.Minute // the shim reports its Nodes to the agent once a minute
	scaleUpWithin     = 3 * time.Minute
	consolidateWithin = 3 * time.Minute
	scaleDownWithin   = 3 * time.Minute
	settleWithin      = 2 * time.Minute
	restartWithin     = time.Minute

	// quietFor is the maximum time without output while waiting.
	quietFor = 5 * time.Second
)

// Load is the number of pods of each Deployment of the fleet's workload, and the number of nodes,
// claimed or the user's own, that each node group needs for them given the pods' requests and the
// machines' sizes.
type Load struct {
	Pods  map[string]int32
	Nodes map[string]int
}

// TotalPods returns the sum over the Deployments.
func (l Load) TotalPods() int { return int(lo.Sum(lo.Values(l.Pods))) }

// TotalNodes returns the sum over the node groups.
func (l Load) TotalNodes() int { return lo.Sum(lo.Values(l.Nodes)) }

// Loads of the fleet in package manifests. Two pods of web fit on a small machine, six of data on a
// large one, one of batch on a small one.
var (
	Full = Load{
		Pods:  map[string]int32{"web": 12, "data": 12, "batch": 4},
		Nodes: map[string]int{"small-a": 6, "large-b": 2, "small-b-spot": 4},
	}
	Reduced = Load{
		Pods:  map[string]int32{"web": 3, "data": 4, "batch": 1},
		Nodes: map[string]int{"small-a": 2, "large-b": 1, "small-b-spot": 1},
	}
	Nothing = Load{Pods: map[string]int32{"web": 0, "data": 0, "batch": 0}}
)

// Options configures a run.
type Options struct {
	// Chaos kills the shim and the agent, as kill -9 does, while nodes are being created.
	Chaos bool
	// Title is called when a part begins.
	Title func(format string, args ...any)
	// Note is called with messages: every few seconds with what the run is waiting for, and with
	// what was done.
	Note func(format string, args ...any)
}

// Result is the result of a run.
type Result struct {
	// Pods is the maximum number of pods that ran at once, and Nodes the number of Nodes created
	// for them.
	Pods, Nodes int
	// Consolidated is the number of nodes that Karpenter removed because the pods fit on fewer.
	Consolidated int
	// FinalReplicas are the replicas of the MachineDeployments, which equal those at the start.
	FinalReplicas map[string]int32
	// Launch is the time from a NodeClaim's creation to its launch.
	Launch timeline.Latency
	// Join is the time from a NodeClaim's creation until pods can run on its Node.
	Join timeline.Latency
	// Killed is the number of processes killed.
	Killed int
}

type run struct {
	*testenv.Env
	Options

	result Result
	start  map[string]int32 // replicas at the start
	began  time.Time
}

// own returns the number of nodes that the user has without any claim.
func (r *run) own() int { return int(lo.Sum(lo.Values(r.start))) }

// mine returns the timelines that began during the run.
func (r *run) mine(s timeline.State) []timeline.Timeline {
	return lo.Filter(s.Timelines, func(j timeline.Timeline, _ int) bool { return j.At(timeline.Created).After(r.began) })
}

// Run applies the fleet's manifests and runs all parts once. If it returns without an error, all
// invariants hold and all numbers are as at the start.
func Run(ctx context.Context, w *testenv.Env, options Options) (Result, error) {
	r := &run{Env: w, Options: options, began: time.Now()}
	for _, part := range []func(context.Context) error{r.prepare, r.scaleUp, r.consolidate, r.scaleToZero} {
		if err := part(ctx); err != nil {
			return r.result, err
		}
	}
	return r.result, nil
}

// prepare applies the users' manifests and waits until the user's own machines run.
func (r *run) prepare(ctx context.Context) error {
	r.Title("Applying three MachineDeployments to the hub; a ClusterAPINodeClass, a NodePool and three Deployments without pods to the spoke")
	if err := manifests.Apply(ctx, r.Hub, manifests.FleetHub); err != nil {
		return err
	}
	for _, file := range []string{manifests.FleetSpoke, manifests.FleetWorkload} {
		if err := manifests.Apply(ctx, r.Spoke, file); err != nil {
			return err
		}
	}
	objects, err := manifests.Load(manifests.FleetHub)
	if err != nil {
		return err
	}
	r.start = map[string]int32{}
	for _, o := range objects {
		if o.GetKind() == "MachineDeployment" {
			replicas, _ := o.Object["spec"].(map[string]any)["replicas"].(int64)
			r.start[o.GetName()] = int32(replicas)
		}
	}
	if err := r.await(ctx, readyWithin, func(s timeline.State) string {
		for _, name := range slices.Sorted(maps.Keys(r.start)) {
			want := int(r.start[name])
			group, _ := lo.Find(s.Groups, func(g timeline.Group) bool { return g.Name == name })
			if group.Machines != want || group.Running != want {
				return fmt.Sprintf("%d Machines of %s to run (%d of %d do)", want, name, group.Running, group.Machines)
			}
		}
		return ""
	}); err != nil {
		return err
	}
	ready, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	stop := r.whileWaiting(func() string {
		return "the NodePool to be ready, and the user's own node to take pods: the shim first makes sure that no claim owns its machine"
	})
	err = errors.Join(r.AwaitNodePool(ready, "default"), testenv.Poll(ready, r.ownTakePods))
	stop()
	if err != nil {
		return err
	}
	r.Note("NodePool and ClusterAPINodeClass are ready, and so is the user's own node; replicas: %s", Replicas(r.start))
	return nil
}

// ownTakePods waits until pods may run on the user's own machines, which are the floor's. Karpenter
// plans with them from then on.
func (r *run) ownTakePods(ctx context.Context) (missing string, err error) {
	var nodes corev1.NodeList
	if err := r.Spoke.List(ctx, &nodes); err != nil {
		return "", err
	}
	for group, want := range r.start {
		open := lo.CountBy(nodes.Items, func(n corev1.Node) bool { return strings.HasPrefix(n.Name, group+"-") && len(n.Spec.Taints) == 0 })
		if open < int(want) {
			return fmt.Sprintf("%d Nodes of %s to take pods: %d do", want, group, open), nil
		}
	}
	return "", nil
}

func (r *run) load(ctx context.Context, l Load) error {
	for _, name := range slices.Sorted(maps.Keys(l.Pods)) {
		if err := r.Scale(ctx, types.NamespacedName{Namespace: "default", Name: name}, l.Pods[name]); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) scaleUp(ctx context.Context) error {
	r.Title("Scaling up: %d pods, which need %d nodes, %d of them new", Full.TotalPods(), Full.TotalNodes(), Full.TotalNodes()-r.own())
	if err := r.load(ctx, Full); err != nil {
		return err
	}
	if r.Chaos {
		if err := r.chaos(ctx); err != nil {
			return err
		}
	}
	if err := r.await(ctx, scaleUpWithin, func(s timeline.State) string {
		live := s.Live()
		initialized := lo.CountBy(live, func(j timeline.Timeline) bool { return j.Reached(timeline.Initialized) })
		if s.Pods.Running == Full.TotalPods() && s.Pods.Total() == Full.TotalPods() && initialized == len(live) {
			return ""
		}
		return fmt.Sprintf("%d pods to run (%d do) on %d nodes (%d of %d are initialized)",
			Full.TotalPods(), s.Pods.Running, Full.TotalNodes()-r.own(), initialized, len(live))
	}); err != nil {
		return r.withPending(ctx, err)
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	state := r.Recorder.State()
	r.result.Pods, r.result.Nodes = state.Pods.Running, len(state.Live())
	r.result.Launch = timeline.LatencyOf(r.mine(state), timeline.Created, timeline.Launched)
	r.result.Join = timeline.LatencyOf(r.mine(state), timeline.Created, timeline.Initialized)
	r.Note("%d pods run on %d nodes made for them and %d that was there; NodeClaim to launched: median %s, 99th percentile %s; "+
		"to a node that takes pods: median %s, 99th percentile %s",
		r.result.Pods, r.result.Nodes, r.own(),
		round(r.result.Launch.Median), round(r.result.Launch.P99), round(r.result.Join.Median), round(r.result.Join.P99))
	if needed := Full.TotalNodes() - r.own(); r.result.Nodes != needed {
		return fmt.Errorf("%d nodes were made for the pods, %d would do: %s", r.result.Nodes, needed, perGroup(state))
	}
	return nil
}

// chaos kills the shim once NodeClaims appear, and the agent once the first claim has its Machine,
// and waits until both have restarted.
func (r *run) chaos(ctx context.Context) error {
	for _, blow := range []struct {
		component string
		when      string
		stage     timeline.Stage
	}{
		{sandbox.Shim, "a NodeClaim to be created", timeline.Created},
		{sandbox.Agent, "a claim to be bound", timeline.Bound},
	} {
		if err := r.await(ctx, scaleUpWithin, func(s timeline.State) string {
			return lo.Ternary(lo.ContainsBy(s.Live(), func(j timeline.Timeline) bool { return j.Reached(blow.stage) }), "", blow.when)
		}); err != nil {
			return r.withPending(ctx, err)
		}
		pid := r.Status(blow.component).PID
		if err := r.Sandbox.Kill(blow.component); err != nil {
			return err
		}
		r.result.Killed++
		r.Note("kill -9 %d: the %s", pid, blow.component)
		restarted, cancel := context.WithTimeout(ctx, restartWithin)
		err := r.AwaitRestarted(restarted, blow.component, pid)
		cancel()
		if err != nil {
			return err
		}
		r.Note("the %s runs again as process %d", blow.component, r.Status(blow.component).PID)
	}
	return nil
}

func (r *run) consolidate(ctx context.Context) error {
	enough := Reduced.TotalNodes() - r.own()
	r.Title("Scaling down to %d pods, for which %d nodes and the user's own suffice", Reduced.TotalPods(), enough)
	if err := r.load(ctx, Reduced); err != nil {
		return err
	}
	if err := r.await(ctx, consolidateWithin, func(s timeline.State) string {
		live := s.Live()
		deleting := lo.CountBy(live, func(j timeline.Timeline) bool { return j.Reached(timeline.Deleting) })
		if len(live) <= enough && deleting == 0 && s.Pods.Running == Reduced.TotalPods() && s.Pods.Total() == Reduced.TotalPods() {
			return ""
		}
		return fmt.Sprintf("consolidation to %d nodes: there are %d, of which %d are going; %d of %d pods run",
			enough, len(live), deleting, s.Pods.Running, Reduced.TotalPods())
	}); err != nil {
		return r.withPending(ctx, err)
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	state := r.Recorder.State()
	reasons := lo.CountValuesBy(
		lo.Filter(r.mine(state), func(j timeline.Timeline, _ int) bool { return j.Disrupted != "" && j.Reached(timeline.Gone) }),
		func(j timeline.Timeline) string { return j.Disrupted },
	)
	r.result.Consolidated = lo.Sum(lo.Values(reasons))
	r.Note("consolidated %d nodes (%s); left: %s", r.result.Consolidated, counts(reasons), perGroup(state))
	return nil
}

func (r *run) scaleToZero(ctx context.Context) error {
	r.Title("Scaling to zero: every MachineDeployment has to come back to where it began")
	if err := r.load(ctx, Nothing); err != nil {
		return err
	}
	if err := r.await(ctx, scaleDownWithin, func(s timeline.State) string {
		if live := s.Live(); len(live) > 0 {
			return fmt.Sprintf("%d nodes to go (%d are going)", len(live),
				lo.CountBy(live, func(j timeline.Timeline) bool { return j.Reached(timeline.Deleting) }))
		}
		for _, group := range s.Groups {
			if want, mine := r.start[group.Name]; mine && (group.Replicas != want || group.Machines != int(want)) {
				return fmt.Sprintf("%s to have %d replicas and Machines (%d, %d)", group.Name, want, group.Replicas, group.Machines)
			}
		}
		return ""
	}); err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	state := r.Recorder.State()
	r.result.FinalReplicas = map[string]int32{}
	for _, group := range state.Groups {
		if _, mine := r.start[group.Name]; mine {
			r.result.FinalReplicas[group.Name] = group.Replicas
		}
	}
	r.Note("replicas are %s, as at the start", Replicas(r.result.FinalReplicas))
	return nil
}

// settle waits until every invariant holds.
func (r *run) settle(ctx context.Context) error {
	began := time.Now()
	stop := r.whileWaiting(func() string { return "every invariant to hold" })
	defer stop()
	bounded, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	violations, err := r.Checker.Settle(bounded)
	if err != nil {
		return fmt.Errorf("checking the invariants: %w", err)
	}
	if len(violations) > 0 {
		return fmt.Errorf("%d invariants are violated:\n%s", len(violations), invariants.Describe(violations))
	}
	r.Note("every invariant holds (after %s)", round(time.Since(began)))
	return nil
}

// await waits for the recorder's condition and prints what is missing every few seconds.
func (r *run) await(ctx context.Context, within time.Duration, condition func(timeline.State) string) error {
	bounded, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var mu sync.Mutex
	var missing string
	stop := r.whileWaiting(func() string {
		mu.Lock()
		defer mu.Unlock()
		return missing
	})
	defer stop()
	return r.Recorder.Await(bounded, func(s timeline.State) string {
		mu.Lock()
		defer mu.Unlock()
		missing = condition(s)
		return missing
	})
}

// whileWaiting prints every few seconds what the run is waiting for, until stop is called.
func (r *run) whileWaiting(what func() string) (stop func()) {
	began := time.Now()
	ended := make(chan struct{})
	var telling sync.WaitGroup
	telling.Go(func() {
		ticker := time.NewTicker(quietFor)
		defer ticker.Stop()
		for {
			select {
			case <-ended:
				return
			case <-ticker.C:
				r.Note("waiting for %s (%s)", what(), time.Since(began).Round(time.Second))
			}
		}
	})
	return func() {
		close(ended)
		telling.Wait()
	}
}

// withPending adds the scheduler's messages about pending pods to an error.
func (r *run) withPending(ctx context.Context, err error) error {
	// The context of the failed wait may have ended.
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), quietFor)
	defer cancel()
	pods, listErr := r.Pending(bounded)
	if listErr != nil || len(pods) == 0 {
		return err
	}
	if len(pods) > 3 {
		pods = append(pods[:3], fmt.Sprintf("and %d more", len(pods)-3))
	}
	return fmt.Errorf("%w\npods without a Node:\n  %s", err, strings.Join(pods, "\n  "))
}

// Replicas formats numbers of replicas as name:number, sorted by name.
func Replicas(replicas map[string]int32) string {
	return strings.Join(lo.Map(slices.Sorted(maps.Keys(replicas)), func(name string, _ int) string {
		return fmt.Sprintf("%s:%d", name, replicas[name])
	}), ",")
}

func counts(n map[string]int) string {
	return strings.Join(lo.Map(slices.Sorted(maps.Keys(n)), func(name string, _ int) string {
		return fmt.Sprintf("%s %d", name, n[name])
	}), ", ")
}

// perGroup formats the number of live NodeClaims of each node group.
func perGroup(s timeline.State) string {
	return counts(lo.CountValuesBy(s.Live(), func(j timeline.Timeline) string { return lo.CoalesceOrEmpty(j.Group, "no group") }))
}

func round(d time.Duration) time.Duration {
	return d.Round(lo.Ternary(d < time.Second, time.Millisecond, 10*time.Millisecond))
}
