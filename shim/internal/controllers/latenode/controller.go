// Package latenode keeps Nodes that took long to join from being removed before they are used.
//
// Core replaces a Node, for example a drifted one, by making the replacement first. It waits ten
// minutes for the replacement. After that it forgets what the replacement is for, and plans anew as
// soon as that is initialized: it would now find that the pods of the old Node fit it. But core
// looks for empty Nodes first, and removes the replacement if the NodePool's consolidateAfter is as
// short as it is by default. The next replacement then takes as long, and has the same fate. With
// infrastructure that takes more than ten minutes, such as bare metal, nothing is ever replaced.
//
// This controller marks such a Node as nominated for a pod for a while, in core's state in memory,
// which is how core itself keeps a Node for pods that are about to be bound to it.
package latenode

import (
	"context"
	"time"

	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"
)

const (
	name = "nodeclaim.latenode"
	// commandTimeout is how long core waits for the replacements of a Node: minRetryDuration of its
	// package disruption. Core waits longer only if it replaces thousands of Nodes at once.
	commandTimeout = 10 * time.Minute
	// keep is how long a late Node is kept at most once it is initialized: many rounds of core's
	// planning, which take ten seconds and more each, so that a Node can also wait for a disruption
	// budget.
	keep = 5 * time.Minute
	// renew is the interval of the nominations. Each is valid for at least ten seconds.
	renew       = 5 * time.Second
	concurrency = 10
)

// State is the part of core's cluster state that this controller uses.
type State interface {
	// NominateNodeForPod keeps the Node with the provider ID from disruption for at least ten
	// seconds. It does nothing if there is no such Node.
	NominateNodeForPod(ctx context.Context, providerID string)
}

// Controller keeps late Nodes.
type Controller struct {
	clock         clock.PassiveClock
	cloudProvider cloudprovider.CloudProvider
	state         State
}

// New returns the controller.
func New(clk clock.PassiveClock, cloudProvider cloudprovider.CloudProvider, state State) *Controller {
	return &Controller{clock: clk, cloudProvider: cloudProvider, state: state}
}

// Reconcile checks one NodeClaim.
func (c *Controller) Reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	if !nodeClaim.DeletionTimestamp.IsZero() || !nodeclaimutils.IsManaged(nodeClaim, c.cloudProvider) {
		return reconcile.Result{}, nil
	}
	late := nodeClaim.CreationTimestamp.Add(commandTimeout)
	initialized := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeInitialized)
	if initialized.IsTrue() {
		joined := initialized.LastTransitionTime.Time
		// Core records when a pod that is no DaemonSet's comes to the Node or goes. From then on it
		// is a Node like any other.
		used := !nodeClaim.Status.LastPodEventTime.IsZero()
		if joined.Before(late) || used || c.clock.Since(joined) >= keep {
			return reconcile.Result{}, nil
		}
	} else if left := late.Sub(c.clock.Now()); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	// Nominations begin before the Node is initialized, because core may remove it in the same
	// moment.
	c.state.NominateNodeForPod(ctx, nodeClaim.Status.ProviderID)
	log.FromContext(ctx).V(1).Info("keeping a late Node", "age", c.clock.Since(nodeClaim.CreationTimestamp.Time).String())
	return reconcile.Result{RequeueAfter: renew}, nil
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(c.cloudProvider))).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(reconcile.AsReconciler(m.GetClient(), c))
}
