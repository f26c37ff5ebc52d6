package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	// livesAtOnce is the number of concurrent scenarios, each with its own node group, NodePool and
	// pod.
	livesAtOnce = 17
	// stageWithin, doneWithin and goneWithin bound the parts of a scenario. The loss of
	// infrastructure is final after a minute, and clocks may differ by another one.
	stageWithin = slow * 3 * time.Minute
	doneWithin  = slow * 6 * time.Minute
	goneWithin  = slow * 4 * time.Minute
	// keeping is the finalizer with which a pod keeps its Node from being drained.
	keeping  = "fleet.example.com/keeps-its-node"
	starting = "fleet.example.com/starting"
)

// stage is the stage of a Node at which a deed is done to it.
type stage struct {
	name string
	// stuckAt is where instances hang from the beginning.
	stuckAt simv1.Stage
	// reach brings the scenario to the stage, once its pod was created, and holds it there.
	reach func(*life, context.Context) error
	// node and instance report whether there is a Node, and a running instance, that could be
	// deleted.
	node, instance bool
	// leaving means that the Node is being removed, so that the pod gets another one anyway.
	leaving bool
}

// deed is an intervention.
type deed struct {
	name string
	at   func(stage) bool
	do   func(*life, context.Context) error
	// replaces means that the pod then needs another Node.
	replaces bool
	// gone means that the pod is no longer wanted.
	gone bool
}

func stages() []stage {
	return []stage{
		// No further than the next stage, however long the deed takes.
		{name: "claimed", stuckAt: simv1.StageBoot, reach: func(l *life, ctx context.Context) error {
			// Before it is in a ledger, nothing but its object knows of it.
			return l.until(ctx, func() string {
				admitted := lo.ContainsBy(l.claims(), func(c agentv1.MachineClaim) bool { return c.Status.NodeGroupUID != "" })
				return lo.Ternary(admitted, "", "a claim that is in a ledger")
			})
		}},
		{name: "booting", stuckAt: simv1.StageBoot, instance: true, reach: func(l *life, ctx context.Context) error {
			return l.until(ctx, func() string {
				return lo.Ternary(len(l.claimedMachines()) == 1 && len(l.instances()) == 1, "", "a claim with a Machine")
			})
		}},
		{name: "joining", stuckAt: simv1.StageJoin, instance: true, reach: func(l *life, ctx context.Context) error {
			return l.until(ctx, func() string {
				provisioned := lo.Filter(l.claimedMachines(), func(m clusterv1.Machine, _ int) bool { return m.Spec.ProviderID != "" })
				return lo.Ternary(len(provisioned) == 1, "", "a claim with a Machine that has a provider ID")
			})
		}},
		{name: "registered", node: true, instance: true, reach: func(l *life, ctx context.Context) error {
			return l.until(ctx, func() string {
				return lo.Ternary(l.ready(karpenterv1.ConditionTypeRegistered) == 1, "", "a registered NodeClaim")
			})
		}},
		{name: "running", node: true, instance: true, reach: (*life).run},
		{name: "draining", node: true, instance: true, leaving: true, reach: func(l *life, ctx context.Context) error {
			if err := l.run(ctx); err != nil {
				return err
			}
			for _, pod := range l.pods() {
				if err := l.Spoke.Patch(ctx, &pod, mergePatch(`{"metadata":{"finalizers":["`+keeping+`"]}}`)); err != nil {
					return err
				}
			}
			if err := l.deleteNodeClaims(ctx); err != nil {
				return err
			}
			return l.until(ctx, func() string {
				held := lo.Filter(l.pods(), func(p corev1.Pod, _ int) bool { return !p.DeletionTimestamp.IsZero() })
				return lo.Ternary(len(held) > 0, "", "an evicted pod that holds its Node")
			})
		}},
		{name: "terminating", leaving: true, reach: func(l *life, ctx context.Context) error {
			if err := l.run(ctx); err != nil {
				return err
			}
			for _, i := range l.instances() {
				if err := l.Hub.Patch(ctx, &i, mergePatch(`{"spec":{"stuckAt":"Termination"}}`)); err != nil {
					return err
				}
			}
			if err := l.deleteNodeClaims(ctx); err != nil {
				return err
			}
			return l.until(ctx, func() string {
				stopped := lo.Filter(l.instances(), func(i simv1.SimMachine, _ int) bool { return i.Status.StoppedAt != nil })
				return lo.Ternary(len(stopped) > 0, "", "an instance that does not stop")
			})
		}},
	}
}

func deeds() []deed {
	always := func(stage) bool { return true }
	return []deed{
		{name: "the pod goes", at: always, gone: true, do: func(l *life, ctx context.Context) error { return l.scale(ctx, 0) }},
		{name: "a person deletes the NodeClaim", replaces: true, at: func(s stage) bool { return !s.leaving }, do: (*life).deleteNodeClaims},
		{name: "a person deletes the Node", replaces: true, at: func(s stage) bool { return s.node }, do: func(l *life, ctx context.Context) error {
			return eachOf(ctx, l.Spoke.Delete, l.nodesFound())
		}},
		{name: "a person deletes the Machine", replaces: true, at: func(s stage) bool { return s.instance }, do: func(l *life, ctx context.Context) error {
			return eachOf(ctx, l.Hub.Delete, l.machinesFound())
		}},
		{name: "a person deletes the MachineClaim", at: always, do: func(l *life, ctx context.Context) error {
			return eachOf(ctx, l.Hub.Delete, lo.Filter(l.claims(), func(c agentv1.MachineClaim, _ int) bool { return lo.Contains(l.found, c.Spec.ClaimID) }))
		}},
		{name: "a person releases the claim", replaces: true, at: func(s stage) bool { return !s.leaving }, do: func(l *life, ctx context.Context) error {
			for _, c := range l.found {
				_, err := l.agent.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
					Cluster: &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}, ClaimId: c,
				})
				if err != nil { // another scenario killed an agent
					return err
				}
			}
			return nil
		}},
		{name: "the instance is lost", replaces: true, at: func(s stage) bool { return s.instance }, do: func(l *life, ctx context.Context) error {
			return eachOf(ctx, l.Hub.Delete, l.instancesFound())
		}},
		{
			name: "the instance is lost, and a cloud controller manager deletes its Node", replaces: true, at: func(s stage) bool { return s.node },
			do: func(l *life, ctx context.Context) error {
				nodes := l.nodesFound()
				if err := eachOf(ctx, l.Hub.Delete, l.instancesFound()); err != nil {
					return err
				}
				return eachOf(ctx, l.Spoke.Delete, nodes)
			},
		},
		{name: "both agents are killed", at: always, do: func(l *life, _ context.Context) error {
			for i := range agents {
				l.kill(sandbox.AgentName(i))
			}
			return nil
		}},
		{name: "the shim is killed", at: always, do: func(l *life, _ context.Context) error {
			l.kill(sandbox.Shim)
			return nil
		}},
	}
}

// eachOf calls do for each object. An object that is gone meanwhile is not an error.
func eachOf[T any, P interface {
	*T
	client.Object
}, O any](ctx context.Context, do func(context.Context, client.Object, ...O) error, objects []T) error {
	for i := range objects {
		if err := client.IgnoreNotFound(do(ctx, P(&objects[i]))); err != nil {
			return err
		}
	}
	return nil
}

// life is one scenario.
type life struct {
	*testenv.Env

	name       string
	stage      stage
	deed       deed
	agent      *agentclient.Client
	hub, spoke client.Reader // caches
	// found are the UIDs of the NodeClaims at the stage, which are the ids of their claims.
	found []string
	// checked is how much of the time was spent on the invariants.
	took, checked time.Duration
	made          int
	err           error
}

// kill kills a component. It may already be dead because of another scenario.
func (l *life) kill(component string) { _ = l.Sandbox.Kill(component) }

// shortLives are the deeds of the short run, one of each stage. Failures of the infrastructure take
// minutes, and are not among them.
var shortLives = map[string]string{
	"claimed":     "both agents are killed",
	"booting":     "a person deletes the Machine",
	"joining":     "a person releases the claim",
	"registered":  "a person deletes the Node",
	"running":     "a person deletes the NodeClaim",
	"draining":    "the shim is killed",
	"terminating": "a person deletes the MachineClaim",
}

// requireDocumented compares the scenarios with the table of docs/lifecycle.md.
func requireDocumented(t *testing.T, lives []*life) {
	t.Helper()
	require.GreaterOrEqual(t, len(lives), 50)
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "lifecycle.md"))
	require.NoError(t, err)
	names := strings.Join(lo.Map(stages(), func(s stage, _ int) string { return s.name }), " | ")
	_, after, found := strings.Cut(string(page), "| who does what | "+names+" |\n")
	require.True(t, found, "a table with the stages %s", names)
	table, _, _ := strings.Cut(after, "\n\n")
	rows := strings.Split(table, "\n")[1:] // the line below the head comes first
	require.Len(t, rows, len(deeds()))
	for i, d := range deeds() {
		cells := strings.Split(strings.Trim(rows[i], "|"), "|")
		for n, s := range stages() {
			require.Equal(t, d.at(s), strings.TrimSpace(cells[n+1]) == "✓", "%s while it is %s", d.name, s.name)
		}
	}
}

// TestNodesSurviveWhateverIsDoneToThem is a table of stages of a Node and deeds done to it. In
// every case the pod finally runs on one node that was created for it, no Machine, claim or replica
// is left over, and no more Nodes were created than needed.
func TestNodesSurviveWhateverIsDoneToThem(t *testing.T) {
	figure := shows(t, "a node's life: seven stages, ten deeds")
	var lives []*life
	for _, s := range stages() {
		for _, d := range deeds() {
			if d.at(s) {
				lives = append(lives, &life{name: fmt.Sprintf("life-%02d", len(lives)), stage: s, deed: d})
			}
		}
	}
	requireDocumented(t, lives)
	if testing.Short() {
		lives = lo.Filter(lives, func(l *life, _ int) bool { return shortLives[l.stage.name] == l.deed.name })
		require.Len(t, lives, len(shortLives))
	}
	inSandbox(t, sandbox.Options{Name: "e2e-life", AgentArgs: []string{"--failure-cool-down=5s"}})
	hub, spoke := cached(t, w.Sandbox.HubConfig()), cached(t, w.Sandbox.SpokeConfig())
	paths := w.Sandbox.State().Paths
	agent := agentAs(t, paths.AdminCertificate, paths.AdminKey)

	var going errgroup.Group
	going.SetLimit(livesAtOnce)
	for _, l := range lives {
		l.Env, l.hub, l.spoke, l.agent = w, hub, spoke, agent
		going.Go(func() error {
			began := time.Now()
			l.err = l.live(t.Context())
			l.took = time.Since(began)
			return nil
		})
	}
	require.NoError(t, going.Wait())
	tellLives(lives)
	for _, l := range lives {
		if l.err != nil {
			t.Errorf("%s: %s while it is %s: %v", l.name, l.deed.name, l.stage.name, l.err)
		}
	}
	settle(t, w, settleWithin)
	require.Empty(t, faultsInLogs(w, append(lo.Times(agents, sandbox.AgentName), sandbox.Shim)...))
	checks := lo.Map(lives, func(l *life, _ int) time.Duration { return l.checked })
	figure("%d scenarios, each with the invariants twice: median %.1f s, at most %.1f s", len(lives),
		timeline.Median(checks).Seconds(), slices.Max(checks).Seconds())
}

func tellLives(lives []*life) {
	tabs := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tabs, "result\tseconds\tof them for the invariants\tthe Node is\twhen\tNodeClaims made")
	for _, l := range lives {
		_, _ = fmt.Fprintf(tabs, "%s\t%.0f\t%.1f\t%s\t%s\t%d\n", lo.Ternary(l.err == nil, "PASS", "FAIL"),
			l.took.Seconds(), l.checked.Seconds(), l.stage.name, l.deed.name, l.made)
	}
	_ = tabs.Flush()
}

// cached returns a cache of a cluster's objects for the duration of the test.
func cached(t *testing.T, config *rest.Config) cache.Cache {
	t.Helper()
	reads, err := cache.New(config, cache.Options{Scheme: testenv.Scheme()})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	running.Go(func() { _ = reads.Start(ctx) })
	return reads
}

// live runs the scenario.
func (l *life) live(ctx context.Context) error {
	for _, part := range []struct {
		what string
		d    time.Duration
		do   func(context.Context) error
	}{
		{"making the node group", stageWithin, func(ctx context.Context) error {
			if err := errors.Join(l.apply(ctx, l.Hub, manifests.LifeHub), l.apply(ctx, l.Spoke, manifests.LifeSpoke)); err != nil {
				return err
			}
			return l.AwaitNodePool(ctx, l.name)
		}},
		{"reaching the stage", stageWithin, func(ctx context.Context) error {
			if err := l.scale(ctx, 1); err != nil {
				return err
			}
			if err := l.stage.reach(l, ctx); err != nil {
				return err
			}
			l.found = lo.FilterMap(l.nodeClaims(), func(n karpenterv1.NodeClaim, _ int) (string, bool) {
				return string(n.UID), !l.stage.leaving || !n.DeletionTimestamp.IsZero() // the pod's next one may already exist
			})
			return nil
		}},
		{"seeing what it is done to", stageWithin, func(ctx context.Context) error {
			return l.until(ctx, func() string { // the caches of hub and spoke may be apart
				seen := (!l.stage.node || len(l.nodesFound()) > 0) && (!l.stage.instance || len(l.instancesFound()) > 0)
				return lo.Ternary(seen, "", "the Node and the instance of the claim")
			})
		}},
		{"doing it", stageWithin, func(ctx context.Context) error {
			return testenv.Poll(ctx, func(ctx context.Context) (string, error) { return "", l.deed.do(l, ctx) })
		}},
		{"what has to come of it", doneWithin, func(ctx context.Context) error { return l.settle(ctx, lo.Ternary(l.deed.gone, 0, 1)) }},
		{"the invariants after it", slow * settleWithin, l.holds},
		{"going home", goneWithin, func(ctx context.Context) error {
			if err := l.scale(ctx, 0); err != nil {
				return err
			}
			return l.settle(ctx, 0)
		}},
		{"the invariants at the end", slow * settleWithin, l.holds},
	} {
		if err := func() error {
			ctx, cancel := context.WithTimeout(ctx, part.d)
			defer cancel()
			return part.do(ctx)
		}(); err != nil {
			return fmt.Errorf("%s: %w", part.what, err)
		}
	}
	made := lo.Filter(l.Recorder.State().Timelines, func(j timeline.Timeline, _ int) bool { return j.NodePool == l.name })
	l.made = len(made)
	needed := lo.Ternary(l.replaces(), 2, 1)
	if l.made > needed || l.made < needed && !l.deed.gone {
		return fmt.Errorf("%d NodeClaims were made; %d are needed: %v", l.made, needed, made)
	}
	return nil
}

// apply creates the scenario's objects from one of the files.
func (l *life) apply(ctx context.Context, c client.Client, file string) error {
	objects, err := manifests.LoadAs(file, "life", l.name)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if o.GetKind() == "SimMachineTemplate" && l.stage.stuckAt != "" {
			set(o, string(l.stage.stuckAt), "spec", "template", "spec", "stuckAt")
		}
	}
	return manifests.ApplyObjects(ctx, c, objects...)
}

// until waits until nothing is missing.
func (l *life) until(ctx context.Context, missing func() string) error {
	return testenv.Poll(ctx, func(context.Context) (string, error) { return missing(), nil })
}

// run waits until the pod runs.
func (l *life) run(ctx context.Context) error {
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		running := lo.CountBy(l.pods(), func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
		return lo.Ternary(running == 1, "", "the pod to run"), l.start(ctx)
	})
}

// settle releases what the stage holds, and waits until this many pods run, each on its own Node,
// and nothing else is left.
func (l *life) settle(ctx context.Context, pods int) error {
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: l.name}}
	if err := l.Hub.Patch(ctx, template, mergePatch(`{"spec":{"template":{"spec":{"stuckAt":null}}}}`)); err != nil {
		return err
	}
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		if err := errors.Join(l.start(ctx), l.unblock(ctx)); err != nil {
			return "", err
		}
		if missing := l.lacks(pods); missing != "" {
			return missing, nil
		}
		stays := lo.ContainsBy(l.nodeClaims(), func(n karpenterv1.NodeClaim) bool { return lo.Contains(l.found, string(n.UID)) })
		return lo.Ternary(stays && l.replaces(), "another NodeClaim", ""), nil
	})
}

// holds waits until all invariants hold for what the scenario owns, and those that must always hold
// do for everything. Other scenarios are in flight meanwhile.
//
// The caches are asked until they show that, which costs the API servers nothing, as many scenarios
// wait at once. What counts is that the API servers then show it, too. What is waited for after
// [life.settle] is the release's entry in the ledger, which goes after the Machine object.
func (l *life) holds(ctx context.Context) error {
	began := time.Now()
	defer func() { l.checked += time.Since(began) }()
	checker := l.Checker
	checker.Part = &invariants.Part{NodeGroup: l.name, NodePool: l.name, InstanceType: l.name}
	inCaches := checker
	inCaches.Hub, inCaches.Spoke = l.hub, l.spoke
	for _, c := range []invariants.Checker{inCaches, checker} {
		violations, err := c.Settle(ctx)
		if err != nil {
			return err
		}
		if len(violations) > 0 {
			return fmt.Errorf("violated:\n%s", invariants.Describe(violations))
		}
	}
	return nil
}

// replaces reports whether the pod needs a Node other than its current one.
func (l *life) replaces() bool { return l.stage.leaving || l.deed.replaces }

// start does the work of the kubelet's helpers.
func (l *life) start(ctx context.Context) error {
	for _, n := range l.nodes() {
		if !lo.ContainsBy(n.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == starting }) {
			continue
		}
		n.Spec.Taints = lo.Reject(n.Spec.Taints, func(taint corev1.Taint, _ int) bool { return taint.Key == starting })
		if err := l.Spoke.Update(ctx, &n); err != nil {
			return err
		}
	}
	return nil
}

func (l *life) unblock(ctx context.Context) error {
	for _, i := range l.instances() {
		if i.Spec.StuckAt != "" {
			if err := client.IgnoreNotFound(l.Hub.Patch(ctx, &i, mergePatch(`{"spec":{"stuckAt":null}}`))); err != nil {
				return err
			}
		}
	}
	for _, p := range l.pods() {
		if slices.Contains(p.Finalizers, keeping) {
			if err := client.IgnoreNotFound(l.Spoke.Patch(ctx, &p, mergePatch(`{"metadata":{"finalizers":null}}`))); err != nil {
				return err
			}
		}
	}
	return nil
}

// lacks returns what is missing until this many pods run, each on its own Node, and nothing else is
// left, or "".
func (l *life) lacks(pods int) string {
	running := lo.CountBy(l.pods(), func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	for _, each := range []struct {
		what      string
		are, live int
	}{
		{"pods", len(l.pods()), running},
		{"NodeClaims", len(l.nodeClaims()), l.ready(karpenterv1.ConditionTypeInitialized)},
		{"Nodes", len(l.nodes()), len(l.nodes())},
		{"claims", len(l.claims()), len(l.bound())},
		{"Machines", len(l.machines()), lo.CountBy(l.machines(), func(m clusterv1.Machine) bool { return m.DeletionTimestamp.IsZero() })},
		{"instances", len(l.instances()), len(l.instances())},
		{"replicas", l.replicas(), l.replicas()},
	} {
		if each.are != pods || each.live != pods {
			return fmt.Sprintf("%d %s: there are %d, of which %d are as they should be", pods, each.what, each.are, each.live)
		}
	}
	return ""
}

func (l *life) scale(ctx context.Context, pods int32) error {
	return l.Scale(ctx, client.ObjectKey{Namespace: "default", Name: l.name}, pods)
}

func (l *life) deleteNodeClaims(ctx context.Context) error {
	return eachOf(ctx, l.Spoke.Delete, l.nodeClaims())
}

// list returns a cache's objects of the scenario. It panics only on mistakes in the test.
func list[L client.ObjectList](from client.Reader, into L, options ...client.ListOption) L {
	if err := from.List(context.Background(), into, options...); err != nil {
		panic(err)
	}
	return into
}

func (l *life) ofGroup() []client.ListOption {
	return []client.ListOption{client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: l.name}}
}

func (l *life) pods() []corev1.Pod {
	return list(l.spoke, &corev1.PodList{}, client.InNamespace("default"), client.MatchingLabels{"app": l.name}).Items
}

func (l *life) nodeClaims() []karpenterv1.NodeClaim {
	return list(l.spoke, &karpenterv1.NodeClaimList{}, client.MatchingLabels{karpenterv1.NodePoolLabelKey: l.name}).Items
}

func (l *life) nodes() []corev1.Node {
	return list(l.spoke, &corev1.NodeList{}, client.MatchingLabels{corev1.LabelInstanceTypeStable: l.name}).Items
}

func (l *life) machines() []clusterv1.Machine {
	return list(l.hub, &clusterv1.MachineList{}, l.ofGroup()...).Items
}

// claimedMachines returns the Machines with the label of a claim. Before the label is set, a
// deleted Machine is replaced for the same claim, and a claim whose object is deleted cannot be
// restored.
func (l *life) claimedMachines() []clusterv1.Machine {
	return lo.Filter(l.machines(), func(m clusterv1.Machine, _ int) bool { return m.Labels[agentv1.ClaimLabel] != "" })
}

func (l *life) instances() []simv1.SimMachine {
	return list(l.hub, &simv1.SimMachineList{}, l.ofGroup()...).Items
}

// machinesFound returns the Machines of the claims at the stage. While one of them leaves, the
// pod's next one may already exist.
func (l *life) machinesFound() []clusterv1.Machine {
	return lo.Filter(l.machines(), func(m clusterv1.Machine, _ int) bool { return lo.Contains(l.found, m.Labels[agentv1.ClaimLabel]) })
}

func (l *life) instancesFound() []simv1.SimMachine {
	return lo.Filter(l.instances(), func(i simv1.SimMachine, _ int) bool {
		return lo.ContainsBy(l.machinesFound(), func(m clusterv1.Machine) bool { return m.Spec.InfrastructureRef.Name == i.Name })
	})
}

func (l *life) nodesFound() []corev1.Node {
	return lo.Filter(l.nodes(), func(n corev1.Node, _ int) bool {
		return lo.ContainsBy(l.machinesFound(), func(m clusterv1.Machine) bool { return m.Spec.ProviderID == n.Spec.ProviderID })
	})
}

func (l *life) replicas() int {
	all := list(l.hub, &clusterv1.MachineDeploymentList{}, client.InNamespace(sandbox.ClusterNamespace)).Items
	mine, _ := lo.Find(all, func(md clusterv1.MachineDeployment) bool { return md.Name == l.name })
	return int(lo.FromPtr(mine.Spec.Replicas))
}

// claims returns the claims that have not ended.
func (l *life) claims() []agentv1.MachineClaim {
	all := list(l.hub, &agentv1.MachineClaimList{}, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: l.name})
	return lo.Reject(all.Items, func(c agentv1.MachineClaim, _ int) bool { return c.CurrentPhase() == agentv1.PhaseEnded })
}

func (l *life) bound() []agentv1.MachineClaim {
	return lo.Filter(l.claims(), func(c agentv1.MachineClaim, _ int) bool { return c.CurrentPhase() == agentv1.PhaseBound })
}

// ready returns the number of NodeClaims that have a condition and are not being deleted.
func (l *life) ready(condition string) int {
	return lo.CountBy(l.nodeClaims(), func(n karpenterv1.NodeClaim) bool {
		return n.DeletionTimestamp.IsZero() && n.StatusConditions().Get(condition).IsTrue()
	})
}
