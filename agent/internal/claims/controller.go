package claims

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// concurrentGroups is how many node groups are reconciled at once. One Cluster has at most 16 of
// them: see [fairqueue.NewShared].
const concurrentGroups = 24

const (
	// occupiedDelay is the delay of an event for a node group that a run or a call of this process
	// is writing to.
	occupiedDelay = 100 * time.Millisecond
	// longestOccupied bounds that delay: writes may hang, and calls may follow each other without a
	// pause.
	longestOccupied = time.Second
)

// SetupWithManager connects the engine to the hub's events: each change of a MachineDeployment, or
// of its claims, Machines or MachineSets, reconciles that node group.
func (e *Engine) SetupWithManager(mgr ctrl.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).
		Named("claims").
		For(&clusterv1.MachineDeployment{}).
		Watches(&v1alpha1.MachineClaim{}, handler.EnqueueRequestsFromMapFunc(groupOfClaim)).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(groupOfMember)).
		Watches(&clusterv1.MachineSet{}, handler.EnqueueRequestsFromMapFunc(groupOfMember)).
		WatchesRawSource(source.Func(e.wakeIn)).
		WithOptions(options(mgr.GetCache())).
		Complete(e)
	if err != nil {
		return fmt.Errorf("setting up the claim controller: %w", err)
	}
	return tombstones{e}.setupWithManager(mgr)
}

// options returns the options of the node groups' controller.
func options(cache client.Reader) controller.Options {
	needLeaderElection := false // every agent may do every step; see the package's documentation
	return controller.Options{
		MaxConcurrentReconciles: concurrentGroups, NeedLeaderElection: &needLeaderElection,
		NewQueue: fairqueue.NewShared(fairqueue.OwnerOfDeployment(cache), concurrentGroups),
	}
}

// wakeIn makes [Engine.wake] use the controller's queue.
func (e *Engine) wakeIn(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.queue = queue
	return nil
}

// wake has a node group looked at after a delay, or earlier if there is another cause. It is for
// what no watched object shows. Before the controller starts it does nothing, because the
// controller looks at every node group then.
func (e *Engine) wake(group types.NamespacedName, after time.Duration) {
	e.mu.Lock()
	queue := e.queue
	e.mu.Unlock()
	if queue != nil {
		queue.AddAfter(reconcile.Request{NamespacedName: group}, after)
	}
}

func groupOfClaim(_ context.Context, object client.Object) []reconcile.Request {
	c, ok := object.(*v1alpha1.MachineClaim)
	if !ok || c.Spec.NodeGroup == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.NodeGroup}}}
}

func groupOfMember(_ context.Context, object client.Object) []reconcile.Request {
	name := object.GetLabels()[clusterv1.MachineDeploymentNameLabel]
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: object.GetNamespace(), Name: name}}}
}

// Reconcile runs the steps of one node group. It looks at the caches first, and reads from the API
// server only if they show something to do.
func (e *Engine) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	g := e.group(r.Namespace, r.Name)
	d, err := g.plan(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	if d != nil && d.Ledger == nil && len(d.Actions) == 0 {
		return reconcile.Result{RequeueAfter: d.RequeueAfter}, nil
	}
	if d != nil && g.occupied() {
		return reconcile.Result{RequeueAfter: occupiedDelay}, nil // what is due may already be in progress
	}
	requeueAfter, err := g.run(ctx)
	if err != nil && requeueAfter > 0 {
		log.FromContext(ctx).Error(err, "some writes failed; they are tried again", "in", requeueAfter)
		return reconcile.Result{RequeueAfter: requeueAfter}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	if d == nil {
		e.dropGroup(g)
	}
	return reconcile.Result{RequeueAfter: requeueAfter}, nil
}

// plan decides from a cached snapshot what this agent has to do now, without doing it. It returns
// nil if the caches show no such group.
func (g *group) plan(ctx context.Context) (*protocol.Decision, error) {
	if err := g.acquire(ctx); err != nil {
		return nil, err
	}
	defer func() { <-g.lock }()
	return g.planLocked(ctx)
}

// planLocked is [group.plan] for a caller that holds lock. It decides from the caches and this
// process's own writes.
func (g *group) planLocked(ctx context.Context) (*protocol.Decision, error) {
	s, err := g.engine.read(ctx, cached, g.key)
	if s == nil || err != nil {
		return nil, err
	}
	g.belongsTo(s)
	g.answerAdmitted(s) // whichever agent entered them
	s.SpareSince = g.spareSince
	if left, _ := g.panicBackoff(); left > 0 {
		return &protocol.Decision{RequeueAfter: left}, nil
	}
	var d *protocol.Decision
	err = recovered(ctx, func() error {
		g.warnOfLabels(s)
		d = g.engine.decide(s)
		keepClaimed(s, d)
		return nil
	})
	if bug, panicked := errors.AsType[*panics.Error](err); panicked {
		return &protocol.Decision{RequeueAfter: g.notePanic(bug)}, nil
	}
	// A lagging cache must not restart the grace period of a spare. A cache that shows a later
	// ledger does not lag, unless that ledger is this agent's own: the spare went to a claim, which
	// another agent may have served, and the next spare has a grace period of its own.
	if d.HasSpare || s.Seq() > g.spareSeq && !g.engine.written.has(s.Deployment) {
		g.noteSpare(s, d)
	}
	if wait := g.coalesce(s, d); wait > 0 {
		d.Ledger = nil
		d.Wake(wait)
	}
	if left := g.deferToOther(s, d); left > 0 {
		d.Ledger, d.Actions = nil, nil
		d.Wake(left)
	}
	return d, nil
}

// dropGroup drops the state of a group that is gone, unless a call waits for it or a run is due.
func (e *Engine) dropGroup(g *group) {
	e.mu.Lock()
	defer e.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiters) == 0 && !g.kicked && e.groups[g.key] == g {
		delete(e.groups, g.key)
	}
}
