package timeline

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/informers"
)

const (
	// gatherPods is the time over which changes of pods are combined into one event.
	gatherPods = 300 * time.Millisecond
	// gatherChanges is the minimum interval between two evaluations of a condition.
	gatherChanges = 50 * time.Millisecond
)

// Event is a noteworthy change.
type Event struct {
	At time.Time
	// Kind of the object, for example NodeClaim, and its name. The name is empty for counts.
	Kind, Name string
	// What describes the change.
	What string
}

// Options configures a recorder.
type Options struct {
	Hub, Spoke *rest.Config
	// Scheme must include all kinds used by this package.
	Scheme *runtime.Scheme
	// Cluster is the spoke's Cluster in the hub.
	Cluster types.NamespacedName
	// OnEvent, if set, is called for each event in order, one call at a time. It must not call the
	// recorder.
	OnEvent func(Event)
}

// Recorder records what it sees. Its methods are safe for concurrent use.
type Recorder struct {
	options Options
	cancel  context.CancelFunc
	ended   sync.WaitGroup

	mu        sync.Mutex
	timelines map[types.UID]*Timeline
	claims    map[string]*agentv1.MachineClaim
	machines  map[string]*clusterv1.Machine
	groups    map[string]int32
	nodes     map[string]*corev1.Node
	pods      map[types.NamespacedName]*corev1.Pod
	changed   chan struct{} // closed and replaced at each change

	podsTold  Pods
	podsTimer *time.Timer // nil unless their counts are about to be reported
}

// Record starts to watch, and returns once the existing objects have been seen. The context only
// bounds that; [Recorder.Stop] ends the watching.
func Record(ctx context.Context, options Options) (*Recorder, error) {
	r := &Recorder{
		options:   options,
		timelines: map[types.UID]*Timeline{},
		claims:    map[string]*agentv1.MachineClaim{},
		machines:  map[string]*clusterv1.Machine{},
		groups:    map[string]int32{},
		nodes:     map[string]*corev1.Node{},
		pods:      map[types.NamespacedName]*corev1.Pod{},
		changed:   make(chan struct{}),
	}
	hub, err := cache.New(options.Hub, cache.Options{
		Scheme: options.Scheme, DefaultTransform: cache.TransformStripManagedFields(),
		DefaultNamespaces: map[string]cache.Config{options.Cluster.Namespace: {}},
	})
	if err != nil {
		return nil, fmt.Errorf("watching the hub: %w", err)
	}
	spoke, err := cache.New(options.Spoke, cache.Options{Scheme: options.Scheme, DefaultTransform: cache.TransformStripManagedFields()})
	if err != nil {
		return nil, fmt.Errorf("watching the spoke: %w", err)
	}
	running, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	for _, c := range []cache.Cache{hub, spoke} {
		r.ended.Go(func() { _ = c.Start(running) })
	}
	err = errors.Join(
		watch(ctx, hub, r, &agentv1.MachineClaim{}, r.seeClaim, r.claimGone),
		watch(ctx, hub, r, &clusterv1.Machine{}, r.seeMachine, r.machineGone),
		watch(ctx, hub, r, &clusterv1.MachineDeployment{}, r.seeGroup, r.groupGone),
		watch(ctx, spoke, r, &karpenterv1.NodeClaim{}, r.seeNodeClaim, r.nodeClaimGone),
		watch(ctx, spoke, r, &corev1.Node{}, r.seeNode, r.nodeGone),
		watch(ctx, spoke, r, &corev1.Pod{}, r.seePod, r.podGone),
	)
	if err != nil {
		r.Stop()
		return nil, err
	}
	return r, nil
}

// watch follows the objects of a kind. It calls see and gone with the recorder's lock held.
func watch[T client.Object](ctx context.Context, in cache.Cache, r *Recorder, kind T, see, gone func(T)) error {
	locked := func(f func(T)) func(T) {
		return func(object T) {
			r.mu.Lock()
			defer r.mu.Unlock()
			f(object)
			close(r.changed)
			r.changed = make(chan struct{})
		}
	}
	return informers.Follow(ctx, in, kind, locked(see), locked(gone))
}

// Stop ends the watching. The records are kept.
func (r *Recorder) Stop() {
	r.cancel()
	r.ended.Wait()
}

func (r *Recorder) tell(kind, name, format string, args ...any) {
	if r.options.OnEvent != nil {
		r.options.OnEvent(Event{At: time.Now(), Kind: kind, Name: name, What: fmt.Sprintf(format, args...)})
	}
}

// reach records the time of a stage that is seen for the first time, and reports whether it is.
func (r *Recorder) reach(j *Timeline, stage Stage) bool {
	if j.Reached(stage) {
		return false
	}
	j.at[stage] = time.Now()
	return true
}

func (j Timeline) since(stage Stage) string {
	if !j.Reached(stage) {
		return ""
	}
	return time.Since(j.at[stage]).Round(10 * time.Millisecond).String()
}

// timeline returns the timeline of a NodeClaim's UID, and creates it if necessary.
func (r *Recorder) timeline(uid types.UID) *Timeline {
	j := r.timelines[uid]
	if j == nil {
		j = &Timeline{UID: uid}
		r.timelines[uid] = j
	}
	return j
}

func (r *Recorder) seeNodeClaim(n *karpenterv1.NodeClaim) {
	j := r.timeline(n.UID)
	j.NodeClaim, j.NodePool = n.Name, n.Labels[karpenterv1.NodePoolLabelKey]
	if r.reach(j, Created) {
		r.tell("NodeClaim", n.Name, "created")
	}
	if n.Status.NodeName != "" {
		j.Node = n.Status.NodeName
	}
	for _, s := range []struct {
		condition string
		stage     Stage
	}{
		{karpenterv1.ConditionTypeLaunched, Launched},
		{karpenterv1.ConditionTypeRegistered, Registered},
		{karpenterv1.ConditionTypeInitialized, Initialized},
	} {
		if n.StatusConditions().IsTrue(s.condition) && r.reach(j, s.stage) {
			r.tell("NodeClaim", n.Name, "%s %s after creation", s.stage, j.since(Created))
		}
	}
	if id := n.Status.ProviderID; id != j.ProviderID {
		r.tell("NodeClaim", n.Name, "has the provider ID %s", id)
		j.ProviderID = id
	}
	if why := n.StatusConditions().Get(karpenterv1.ConditionTypeDisruptionReason); why.IsTrue() && j.Disrupted == "" {
		j.Disrupted = why.Reason
		r.tell("NodeClaim", n.Name, "is disrupted: %s", why.Reason)
	}
	if !n.DeletionTimestamp.IsZero() && r.reach(j, Deleting) {
		r.tell("NodeClaim", n.Name, "is being deleted")
	}
}

func (r *Recorder) nodeClaimGone(n *karpenterv1.NodeClaim) {
	j := r.timeline(n.UID)
	if r.reach(j, Gone) {
		r.tell("NodeClaim", n.Name, "gone %s after its deletion", j.since(Deleting))
	}
}

// ofAutoscaler reports whether a holder is a cluster-autoscaler or a bridge with its role, whose
// claims have no NodeClaims.
func ofAutoscaler(holder string) bool { return strings.HasPrefix(holder, agentv1.ClusterAutoscaler) }

func (r *Recorder) seeClaim(c *agentv1.MachineClaim) {
	if c.Spec.ClusterName != r.options.Cluster.Name || ofAutoscaler(c.Spec.Holder) {
		return // it has no NodeClaim
	}
	j := r.timeline(types.UID(c.Spec.ClaimID))
	if j.NodeClaim == "" {
		j.NodeClaim = c.Spec.DisplayName
	}
	r.reach(j, Claimed)
	before := r.claims[c.Name]
	r.claims[c.Name] = c
	if before == nil || before.CurrentPhase() != c.CurrentPhase() || before.Spec.NodeGroup != c.Spec.NodeGroup {
		r.tell("MachineClaim", c.Spec.DisplayName, "%s on %s: %s", c.CurrentPhase(), c.Spec.NodeGroup, lo.CoalesceOrEmpty(c.Status.Reason, "new"))
	}
	j.Group, j.ClaimPhase = c.Spec.NodeGroup, string(c.CurrentPhase())
	if c.Status.Machine != nil {
		j.Machine = c.Status.Machine.Name
		if m := r.machines[j.Machine]; m != nil && m.Spec.ProviderID != "" {
			r.reach(j, Provisioned)
		}
	}
	if c.Status.FailedAt != nil {
		r.reach(j, Failed)
	}
	switch c.CurrentPhase() {
	case agentv1.PhaseBound:
		r.reach(j, Bound)
	case agentv1.PhaseEnded:
		r.reach(j, Returned)
	case agentv1.PhasePending, agentv1.PhaseReleasing:
	}
}

func (r *Recorder) claimGone(c *agentv1.MachineClaim) {
	delete(r.claims, c.Name)
}

func (r *Recorder) seeMachine(m *clusterv1.Machine) {
	if m.Spec.ClusterName != r.options.Cluster.Name {
		return
	}
	before := r.machines[m.Name]
	r.machines[m.Name] = m
	if before == nil || before.Status.Phase != m.Status.Phase {
		r.tell("Machine", m.Name, "%s", lo.CoalesceOrEmpty(m.Status.Phase, "created"))
	}
	id := m.Labels[agentv1.ClaimLabel]
	if id != "" && m.Spec.ProviderID != "" && !ofAutoscaler(m.Annotations[agentv1.ClaimHolderAnnotation]) {
		r.reach(r.timeline(types.UID(id)), Provisioned)
	}
}

func (r *Recorder) machineGone(m *clusterv1.Machine) {
	if _, known := r.machines[m.Name]; known {
		delete(r.machines, m.Name)
		r.tell("Machine", m.Name, "gone")
	}
}

func (r *Recorder) seeGroup(md *clusterv1.MachineDeployment) {
	if md.Spec.ClusterName != r.options.Cluster.Name || md.Spec.Replicas == nil {
		return
	}
	before, known := r.groups[md.Name]
	r.groups[md.Name] = *md.Spec.Replicas
	if !known || before != *md.Spec.Replicas {
		r.tell("MachineDeployment", md.Name, "replicas %d -> %d", before, *md.Spec.Replicas)
	}
}

func (r *Recorder) groupGone(md *clusterv1.MachineDeployment) {
	delete(r.groups, md.Name)
}

func (r *Recorder) seeNode(n *corev1.Node) {
	before := r.nodes[n.Name]
	r.nodes[n.Name] = n
	if before == nil {
		r.tell("Node", n.Name, "joined")
	}
	if ready(n) && (before == nil || !ready(before)) {
		r.tell("Node", n.Name, "ready")
	}
	if disrupted(n) && (before == nil || !disrupted(before)) {
		r.tell("Node", n.Name, "takes no more pods")
	}
}

func (r *Recorder) nodeGone(n *corev1.Node) {
	delete(r.nodes, n.Name)
	r.tell("Node", n.Name, "gone")
}

func ready(n *corev1.Node) bool {
	return lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func disrupted(n *corev1.Node) bool {
	return lo.ContainsBy(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == karpenterv1.DisruptedTaintKey })
}

func (r *Recorder) seePod(p *corev1.Pod) {
	r.changePods(func() { r.pods[client.ObjectKeyFromObject(p)] = p })
}

func (r *Recorder) podGone(p *corev1.Pod) {
	r.changePods(func() { delete(r.pods, client.ObjectKeyFromObject(p)) })
}

// changePods applies a change of pods and schedules a report of their counts, one for changes in
// quick succession.
func (r *Recorder) changePods(change func()) {
	change()
	if r.podsTimer == nil {
		r.podsTimer = time.AfterFunc(gatherPods, r.tellPods)
	}
}

func (r *Recorder) tellPods() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.podsTimer = nil
	if now := r.countPods(); now != r.podsTold {
		r.podsTold = now
		r.tell("Pods", "", "%d waiting, %d starting, %d running", now.Waiting, now.Starting, now.Running)
	}
}

func (r *Recorder) countPods() Pods {
	var pods Pods
	for _, p := range r.pods {
		switch {
		case !p.DeletionTimestamp.IsZero(), p.Status.Phase == corev1.PodSucceeded, p.Status.Phase == corev1.PodFailed:
		case p.Status.Phase == corev1.PodRunning:
			pods.Running++
		case p.Spec.NodeName != "":
			pods.Starting++
		default:
			pods.Waiting++
		}
	}
	return pods
}

// State returns what has been seen so far.
func (r *Recorder) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state()
}

func (r *Recorder) state() State {
	s := State{Pods: r.countPods(), Nodes: len(r.nodes)}
	for _, j := range r.timelines {
		s.Timelines = append(s.Timelines, *j)
	}
	slices.SortFunc(s.Timelines, func(a, b Timeline) int {
		return cmp.Or(a.at[Created].Compare(b.at[Created]), cmp.Compare(a.NodeClaim, b.NodeClaim))
	})
	for name, replicas := range r.groups {
		s.Groups = append(s.Groups, Group{
			Name: name, Replicas: replicas,
			Machines: lo.CountBy(lo.Values(r.machines), func(m *clusterv1.Machine) bool {
				return m.Labels[clusterv1.MachineDeploymentNameLabel] == name
			}),
			Running: lo.CountBy(lo.Values(r.machines), func(m *clusterv1.Machine) bool {
				return m.Labels[clusterv1.MachineDeploymentNameLabel] == name && m.Status.GetTypedPhase() == clusterv1.MachinePhaseRunning
			}),
			Claims: lo.CountBy(lo.Values(r.claims), func(c *agentv1.MachineClaim) bool {
				return c.Spec.NodeGroup == name && c.CurrentPhase() != agentv1.PhaseEnded
			}),
		})
	}
	slices.SortFunc(s.Groups, func(a, b Group) int { return cmp.Compare(a.Name, b.Name) })
	return s
}

// Await waits until the condition returns "". Otherwise the condition returns what it is waiting
// for, as text. It is evaluated after each change. The error contains what was missing last.
func (r *Recorder) Await(ctx context.Context, condition func(State) (missing string)) error {
	for {
		r.mu.Lock()
		state, changed := r.state(), r.changed
		r.mu.Unlock()
		missing := condition(state)
		if missing == "" {
			return nil
		}
		// Changes arrive by the hundreds, so several are evaluated together.
		last := time.Now()
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("still waiting for %s: %w", missing, context.Cause(ctx))
		}
		select {
		case <-time.After(gatherChanges - time.Since(last)):
		case <-ctx.Done():
		}
	}
}
