package crosscheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/engine"
	"github.com/karpenter-capi/karpenter-capi/test/nodegroup"
)

// calm is how long nothing in the hub may change before it is considered at rest. It only needs to
// exceed the time that Cluster API takes from an event to its next write: [play.unsettled] waits
// for anything that takes longer.
const calm = 2 * time.Second

// interval is how often the hub is read.
const interval = 750 * time.Millisecond

// Play runs the scripts against the hub's Cluster API concurrently, each on its own
// MachineDeployment. It returns the outcome of each phase of each script, in order.
func Play(ctx context.Context, hub client.Client, scripts []engine.Script) ([][]engine.Outcome, error) {
	plays := lo.Map(scripts, func(s engine.Script, i int) *play {
		return &play{hub: hub, script: s, name: fmt.Sprintf("script-%02d", i)}
	})
	var missing []string
	err := wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		now, err := look(ctx, hub)
		if err != nil {
			return false, err
		}
		missing = missing[:0]
		for _, p := range plays {
			reason, err := p.advance(ctx, now)
			if err != nil {
				return false, fmt.Errorf("%q: %w", p.script.Name, err)
			}
			if reason != "" {
				missing = append(missing, fmt.Sprintf("%q, phase %d: %s", p.script.Name, len(p.outcomes), reason))
			}
		}
		return len(missing) == 0, nil
	})
	if err != nil {
		err = fmt.Errorf("%w; still waiting in\n  %s", err, strings.Join(missing, "\n  "))
	}
	return lo.Map(plays, func(p *play, _ int) []engine.Outcome { return p.outcomes }), err
}

// view is a reading of the objects of all scripts, by name of the MachineDeployment.
type view struct {
	deployments map[string]*clusterv1.MachineDeployment
	sets        map[string][]*clusterv1.MachineSet // oldest first
	machines    map[string][]*clusterv1.Machine    // by name
}

func look(ctx context.Context, hub client.Client) (*view, error) {
	var (
		deployments clusterv1.MachineDeploymentList
		sets        clusterv1.MachineSetList
		machines    clusterv1.MachineList
	)
	// Machines first, so that what is read later does not wait for Machines that are gone.
	for _, list := range []client.ObjectList{&machines, &sets, &deployments} {
		if err := hub.List(ctx, list, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return nil, err
		}
	}
	owner := func(o client.Object) string { return o.GetLabels()[clusterv1.MachineDeploymentNameLabel] }
	out := &view{
		deployments: lo.KeyBy(lo.ToSlicePtr(deployments.Items), func(d *clusterv1.MachineDeployment) string { return d.Name }),
		sets:        lo.GroupBy(lo.ToSlicePtr(sets.Items), func(s *clusterv1.MachineSet) string { return owner(s) }),
		machines:    lo.GroupBy(lo.ToSlicePtr(machines.Items), func(m *clusterv1.Machine) string { return owner(m) }),
	}
	for _, list := range out.sets {
		slices.SortFunc(list, func(a, b *clusterv1.MachineSet) int {
			return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
		})
	}
	return out, nil
}

// machinesOf returns the Machines that a MachineSet controls.
func (v *view) machinesOf(deployment, set string) []*clusterv1.Machine {
	return lo.Filter(v.machines[deployment], func(m *clusterv1.Machine, _ int) bool {
		owner := metav1.GetControllerOf(m)
		return owner != nil && owner.Name == set
	})
}

// play is a running script.
type play struct {
	hub    client.Client
	script engine.Script
	name   string // of its objects

	sets     []string // every MachineSet that has existed, oldest first
	machines []string // the initial Machines of the script
	made     int      // how many of the initial MachineSets exist
	kept     bool     // no further instance boots
	begun    bool     // something was written and must come to rest
	outcomes []engine.Outcome

	seen      string
	seenSince time.Time
}

// advance takes the next step if the hub is at rest, and returns what it is waiting for, or "" when
// the script is over.
func (p *play) advance(ctx context.Context, now *view) (missing string, err error) {
	if p.over() {
		return "", nil
	}
	if p.begun {
		p.learn(now)
		if missing := p.restless(now); missing != "" {
			return missing, nil
		}
		switch {
		case p.made < len(p.script.Machines):
		case p.machines == nil:
			p.meet(now)
		case len(p.outcomes) < len(p.script.Phases):
			p.outcomes = append(p.outcomes, p.outcome(now))
		}
	}
	p.begun, p.seen = true, ""
	switch {
	case p.made < len(p.script.Machines):
		p.made++
		return "its first Machines", p.setUp(ctx)
	case p.over():
		return "", nil
	}
	for _, w := range p.script.Phases[len(p.outcomes)] {
		if err := p.write(ctx, w); err != nil {
			return "", fmt.Errorf("%s: %w", w, err)
		}
	}
	return "rest", nil
}

func (p *play) over() bool { return len(p.outcomes) == len(p.script.Phases) }

// learn numbers the MachineSets as they appear.
func (p *play) learn(now *view) {
	for _, set := range now.sets[p.name] {
		if !slices.Contains(p.sets, set.Name) {
			p.sets = append(p.sets, set.Name)
		}
	}
}

// meet numbers the initial Machines of the script.
func (p *play) meet(now *view) {
	for _, set := range p.sets {
		for _, m := range now.machinesOf(p.name, set) {
			p.machines = append(p.machines, m.Name)
		}
	}
}

// restless returns what is still pending after the last writes, or "" once everything has been at
// rest for long enough.
func (p *play) restless(now *view) string {
	versions := p.versions(now)
	if versions != p.seen {
		p.seen, p.seenSince = versions, time.Now()
	}
	if missing := p.unsettled(now); missing != "" {
		return missing
	}
	return lo.Ternary(time.Since(p.seenSince) < calm, "calm", "")
}

// versions returns a string that changes whenever any object of the script changes.
func (p *play) versions(now *view) string {
	var b strings.Builder
	say := func(o client.Object) { fmt.Fprintf(&b, "%s %s\n", o.GetName(), o.GetResourceVersion()) }
	if md := now.deployments[p.name]; md != nil {
		say(md)
	}
	for _, set := range now.sets[p.name] {
		say(set)
	}
	for _, m := range now.machines[p.name] {
		say(m)
	}
	return b.String()
}

// unsettled returns what the controllers certainly still have to do.
func (p *play) unsettled(now *view) string {
	md := now.deployments[p.name]
	if md == nil {
		return "the MachineDeployment"
	}
	paused := hasPause(md)
	if pausedCondition(md.Status.Conditions) != paused {
		return "the MachineDeployment's condition Paused"
	}
	var replicas, available int32
	for _, set := range now.sets[p.name] {
		if missing := p.unsettledSet(now, set); missing != "" {
			return "MachineSet " + set.Name + ": " + missing
		}
		replicas += ptr.Deref(set.Status.Replicas, 0)
		available += ptr.Deref(set.Status.AvailableReplicas, 0)
	}
	if !paused && (md.Status.ObservedGeneration < md.Generation ||
		ptr.Deref(md.Status.Replicas, 0) != replicas || ptr.Deref(md.Status.AvailableReplicas, 0) != available) {
		return "the MachineDeployment's status"
	}
	return ""
}

func (p *play) unsettledSet(now *view, set *clusterv1.MachineSet) string {
	machines := now.machinesOf(p.name, set.Name)
	deleting := 0
	for _, m := range machines {
		switch {
		case !m.DeletionTimestamp.IsZero():
			deleting++
			if stage(m) == engine.Unsettled {
				return "the deletion of Machine " + m.Name
			}
		case !m.Status.NodeRef.IsDefined() && !p.kept:
			return "the Node of Machine " + m.Name
		}
	}
	paused := hasPause(set)
	over := len(machines) - int(ptr.Deref(set.Spec.Replicas, 0))
	switch {
	case !set.DeletionTimestamp.IsZero():
		return "its deletion"
	case pausedCondition(set.Status.Conditions) != paused:
		return "its condition Paused"
	case paused:
		return ""
	case set.Status.ObservedGeneration < set.Generation || int(ptr.Deref(set.Status.Replicas, 0)) != len(machines):
		return "its status"
	case over < 0 && set.Annotations[clusterv1.DisableMachineCreateAnnotation] != "true":
		return "a new Machine"
	case over > deleting:
		return "a deletion"
	}
	return ""
}

func hasPause(o client.Object) bool {
	_, found := o.GetAnnotations()[clusterv1.PausedAnnotation]
	return found
}

func pausedCondition(conditions []metav1.Condition) bool {
	return meta.IsStatusConditionTrue(conditions, clusterv1.PausedCondition)
}

// stage returns the stage of an existing Machine.
func stage(m *clusterv1.Machine) engine.Stage {
	if m.DeletionTimestamp.IsZero() {
		return engine.Alive
	}
	why := ptr.Deref(meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineDeletingCondition), metav1.Condition{}).Reason
	if slices.Equal(m.Finalizers, []string{agentv1.ReleaseFinalizer}) && why == clusterv1.MachineDeletingDeletionCompletedReason {
		return engine.Held
	}
	return engine.Unsettled
}

func (p *play) outcome(now *view) engine.Outcome {
	var out engine.Outcome
	for i := range p.machines {
		out.Machines[i] = engine.Gone
	}
	for i, name := range p.sets {
		to := &out.Sets[i]
		if set, found := lo.Find(now.sets[p.name], func(s *clusterv1.MachineSet) bool { return s.Name == name }); found {
			to.Replicas, to.Paused = int(ptr.Deref(set.Spec.Replicas, 0)), hasPause(set)
		}
		for _, m := range now.machinesOf(p.name, name) {
			switch known := slices.Index(p.machines, m.Name); {
			case known >= 0:
				out.Machines[known] = stage(m)
			case m.Status.NodeRef.IsDefined():
				to.New++
			default:
				to.Young++
			}
		}
	}
	return out
}

func (p *play) metadata() metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: p.name}
}

// setUp creates the next of the initial MachineSets: the first together with the MachineDeployment,
// the others through a new template and more replicas, which go to the newest MachineSet.
func (p *play) setUp(ctx context.Context) error {
	if p.made > 1 {
		return p.changeDeployment(ctx, func(md *clusterv1.MachineDeployment) {
			p.changeTemplate(md)
			*md.Spec.Replicas += int32(p.script.Machines[p.made-1])
		})
	}
	template := nodegroup.Template(p.name)
	template.Spec.Template.Spec.NodeTaints = []corev1.Taint{}
	md := nodegroup.Deployment(sandbox.ClusterName, p.name, template.Name)
	md.Spec.Replicas = new(int32(p.script.Machines[0]))
	strategy := &md.Spec.Rollout.Strategy
	strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
	if p.script.RollingUpdate {
		strategy.Type = clusterv1.RollingUpdateMachineDeploymentStrategyType
		strategy.RollingUpdate.MaxSurge, strategy.RollingUpdate.MaxUnavailable = new(intstr.FromInt32(1)), new(intstr.FromInt32(0))
	}
	for _, object := range []client.Object{template, md} {
		if err := p.hub.Create(ctx, object); err != nil {
			return err
		}
	}
	return nil
}

// changeTemplate sets a new template: the failure domain of a simulated machine does not matter.
func (p *play) changeTemplate(md *clusterv1.MachineDeployment) {
	md.Spec.Template.Spec.FailureDomain += "x"
}

// write performs one write of the script.
func (p *play) write(ctx context.Context, w engine.Write) error {
	switch w.Verb {
	case engine.PauseSet, engine.UnpauseSet, engine.LowerSet:
		return p.writeSet(ctx, w)
	case engine.Mark, engine.AddFinalizer, engine.Delete, engine.RemoveFinalizer:
		return p.writeMachine(ctx, w)
	case engine.KeepFromBooting:
		p.kept = true
		template := &simv1.SimMachineTemplate{ObjectMeta: p.metadata()}
		return p.change(ctx, template, func() { template.Spec.Template.Spec.StuckAt = simv1.StageBoot })
	default:
		return p.changeDeployment(ctx, func(md *clusterv1.MachineDeployment) {
			switch w.Verb {
			case engine.ChangeTemplate:
				p.changeTemplate(md)
			case engine.Pause:
				annotate(md, clusterv1.PausedAnnotation)
			case engine.Unpause, engine.UnpauseWith:
				delete(md.Annotations, clusterv1.PausedAnnotation)
			default:
			}
			if w.Verb == engine.SetReplicas || w.Verb == engine.UnpauseWith {
				md.Spec.Replicas = new(int32(w.N))
			}
		})
	}
}

func (p *play) writeSet(ctx context.Context, w engine.Write) error {
	set := &clusterv1.MachineSet{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: p.sets[w.N]}}
	return p.change(ctx, set, func() {
		switch w.Verb {
		case engine.PauseSet:
			annotate(set, clusterv1.PausedAnnotation)
		case engine.UnpauseSet:
			delete(set.Annotations, clusterv1.PausedAnnotation)
		default:
			*set.Spec.Replicas--
		}
	})
}

func (p *play) writeMachine(ctx context.Context, w engine.Write) error {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: p.machines[w.N]}}
	if w.Verb == engine.Delete {
		return client.IgnoreNotFound(p.hub.Delete(ctx, m))
	}
	return client.IgnoreNotFound(p.change(ctx, m, func() {
		switch w.Verb {
		case engine.Mark:
			annotate(m, clusterv1.DeleteMachineAnnotation)
		case engine.AddFinalizer:
			annotate(m, clusterv1.DeleteMachineAnnotation)
			controllerutil.AddFinalizer(m, agentv1.ReleaseFinalizer)
		default:
			controllerutil.RemoveFinalizer(m, agentv1.ReleaseFinalizer)
		}
	}))
}

func annotate(o client.Object, name string) {
	annotations := o.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[name] = ""
	o.SetAnnotations(annotations)
}

func (p *play) changeDeployment(ctx context.Context, how func(*clusterv1.MachineDeployment)) error {
	md := &clusterv1.MachineDeployment{ObjectMeta: p.metadata()}
	return p.change(ctx, md, func() { how(md) })
}

// change applies how to the current version of an object and writes it.
func (p *play) change(ctx context.Context, o client.Object, how func()) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := p.hub.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		before, ok := o.DeepCopyObject().(client.Object)
		if !ok {
			return errors.New("a copy of another kind")
		}
		how()
		return p.hub.Patch(ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	})
}
