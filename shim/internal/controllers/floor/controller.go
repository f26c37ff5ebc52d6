// Package floor makes the Nodes of the floor schedulable. The floor is the machines that the user
// keeps in a node group beside those of claims.
//
// If the bootstrap template sets Karpenter's taint for unregistered Nodes, the floor's Nodes join
// with it as well. Core removes the taint only for a NodeClaim, which they never have. This
// controller removes it once the agent reports that the machine belongs to the floor for good.
// Before that, the machine may be promised to a NodeClaim, which must find it empty.
package floor

import (
	"context"
	"fmt"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

const (
	name = "node.floor"
	// look is the age at which a Node is first checked: almost all Nodes are registered by then.
	// For a Node that is not registered, an early report to the agent is requested, and the Node is
	// checked again after secondLook. A Node that keeps the taint is then checked whenever its age
	// has grown by a quarter, and at least every longestLook.
	look, secondLook, longestLook = 20 * time.Second, 10 * time.Second, time.Minute
	// concurrency is low because all reconciles share one listing of the machines.
	concurrency = 5
)

// Controller removes the taint for unregistered Nodes from the floor's Nodes.
type Controller struct {
	clock    clock.PassiveClock
	kube     client.Client
	machines *unclaimed.Finder
	report   func()
	recorder events.Recorder
}

// New returns the controller. kube reads from a cache with an index on the NodeClaims'
// status.providerID; report requests an early report of all Nodes to the agent.
func New(clk clock.PassiveClock, kube client.Client, machines *unclaimed.Finder, report func(), recorder events.Recorder) *Controller {
	return &Controller{clock: clk, kube: kube, machines: machines, report: report, recorder: recorder}
}

// Reconcile checks one Node.
func (c *Controller) Reconcile(ctx context.Context, node *corev1.Node) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	if !isUnregistered(node) || node.Spec.ProviderID == "" || !node.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	age := c.clock.Since(node.CreationTimestamp.Time)
	if left := look - age; left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	again := reconcile.Result{RequeueAfter: min(max(look, age/4), longestLook)}
	nodeClaims := &karpv1.NodeClaimList{}
	if err := c.kube.List(ctx, nodeClaims, nodeclaimutils.ForProviderID(node.Spec.ProviderID), client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("looking for the NodeClaim: %w", err)
	}
	if len(nodeClaims.Items) > 0 {
		return again, nil // core registers it
	}
	if age < look+secondLook {
		again.RequeueAfter = secondLook
		c.report()
	}
	machines, err := c.machines.Machines(ctx)
	if err != nil {
		log.FromContext(ctx).V(1).Info("a Node keeps its taint, because the agent did not report the owner of its machine", "reason", err.Error())
		return again, nil
	}
	candidates := lo.Filter(machines, func(m *agentv1alpha1.Machine, _ int) bool { return m.GetProviderId() == node.Spec.ProviderID })
	if len(candidates) != 1 || candidates[0].GetOwner() != agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR {
		return again, nil
	}
	machine := candidates[0]
	stored := node.DeepCopy()
	node.Spec.Taints = lo.Reject(node.Spec.Taints, func(taint corev1.Taint, _ int) bool { return taint.MatchTaint(&karpv1.UnregisteredNoExecuteTaint) })
	err = c.kube.Patch(ctx, node, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: time.Second}, nil // the cache is behind
	}
	if err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("removing the taint: %w", err))
	}
	log.FromContext(ctx).Info("made a Node of the floor schedulable", "machine", machine.GetName(), "node-group", machine.GetNodeGroupId())
	c.recorder.Publish(events.Event{
		InvolvedObject: node,
		Type:           corev1.EventTypeNormal,
		Reason:         "FloorNodeReady",
		Message: fmt.Sprintf("Removed the taint %s: machine %s of node group %s belongs to the user and gets no NodeClaim.",
			karpv1.UnregisteredTaintKey, machine.GetName(), machine.GetNodeGroupId()),
		DedupeValues: []string{string(node.UID)},
	})
	return reconcile.Result{}, nil
}

func isUnregistered(object client.Object) bool {
	node, ok := object.(*corev1.Node)
	return ok && registration.IsUnregistered(node)
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		For(&corev1.Node{}, builder.WithPredicates(predicate.NewPredicateFuncs(isUnregistered))).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(reconcile.AsReconciler(m.GetClient(), c))
}
