package adoption

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

// returnMachine returns the NodeClaim's machine to the user, as the annotation requests. Every step
// is idempotent. First the claim ends. Then the Node is stripped of what Karpenter set, so that the
// end of the NodeClaim does not affect it. Then the NodeClaim gets a provider ID that no Node has,
// so that core drains none, and what core has set on the Node meanwhile is removed. Finally the
// NodeClaim is deleted.
func (c *Controller) returnMachine(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	response, err := c.Agent.Claims.ReturnMachine(ctx, &agentv1alpha1.ReturnMachineRequest{
		Cluster: c.Cluster, ClaimId: string(nodeClaim.UID), Reason: "NodeClaim " + nodeClaim.Name + " returns its machine",
	})
	claim := response.GetClaim()
	switch {
	case agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound, unclaimed.NeverMade(claim):
		// The machine belongs to the user anyway, or to another NodeClaim.
		rightful, err := owners.Of(ctx, c.Kube, nodeClaim)
		if err != nil {
			return reconcile.Result{}, err
		}
		if rightful.UID != nodeClaim.UID {
			c.Recorder.Publish(c.duplicate(nodeClaim, rightful))
			return reconcile.Result{RequeueAfter: look}, nil
		}
	case agenterrors.IsNotReturnable(err):
		c.Recorder.Publish(notReturned(nodeClaim, status.Convert(err).Message()))
		return reconcile.Result{RequeueAfter: look}, nil
	case isPassing(ctx, err):
		log.FromContext(ctx).V(1).Info("the agent did not return the machine yet", "reason", err.Error())
		return reconcile.Result{RequeueAfter: c.retryAfter(err)}, nil
	case err != nil:
		log.FromContext(ctx).Error(err, "the agent does not return the machine")
		c.Recorder.Publish(notReturned(nodeClaim, agenterrors.Describe(err)))
		return reconcile.Result{RequeueAfter: look}, nil
	case claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		return reconcile.Result{RequeueAfter: soon}, nil
	case !claim.GetReturned():
		c.Recorder.Publish(notReturned(nodeClaim, "the claim has ended in another way: "+claim.GetMessage()))
		return reconcile.Result{RequeueAfter: look}, nil
	}
	node, err := c.returned(ctx, nodeClaim, claim)
	if err != nil {
		return reconcile.Result{}, err
	}
	if node != nil {
		if err := c.detach(ctx, node, nodeClaim); err != nil {
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
	}
	own := placeholder.ProviderID(c.Cluster.GetNamespace(), c.Cluster.GetName(), string(nodeClaim.UID))
	if nodeClaim.Status.ProviderID != own {
		stored := nodeClaim.DeepCopy()
		nodeClaim.Status.ProviderID = own
		if err := c.Kube.Status().Patch(ctx, nodeClaim, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
			return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("detaching the NodeClaim from its Node: %w", err))
		}
		if node != nil { // core labels the Nodes of NodeClaims: give it time to see that this is not one of them
			return reconcile.Result{RequeueAfter: soon}, nil
		}
	}
	if node != nil {
		// Core may have begun to disrupt the Node, and would never forget that: a disruption that
		// succeeds removes its Nodes. It would plan other Nodes for this one's pods, again and
		// again.
		c.Unmark(node.Spec.ProviderID)
	}
	log.FromContext(ctx).Info("returned a machine to the user", "machine", claim.GetMachine().GetName())
	// Delete only the version just written: with another provider ID, core would drain the Node.
	preconditions := client.Preconditions{UID: &nodeClaim.UID, ResourceVersion: &nodeClaim.ResourceVersion}
	if err := c.Kube.Delete(ctx, nodeClaim, preconditions); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("deleting the NodeClaim: %w", err))
	}
	returnsTotal.Inc(nil)
	return reconcile.Result{}, nil
}

// returned returns the Node that the NodeClaim is being detached from, or nil. It looks the Node up
// by the NodeClaim's provider ID, then by that of the claim's machine. If the NodeClaim has its
// placeholder and there is no claim, it uses the Node's name in the NodeClaim's status.
func (c *Controller) returned(ctx context.Context, nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) (*corev1.Node, error) {
	for _, id := range []string{nodeClaim.Status.ProviderID, claim.GetMachine().GetProviderId()} {
		if id == "" || placeholder.Is(id) {
			continue
		}
		if node, err := owners.Node(ctx, c.Kube, id); node != nil || err != nil {
			return node, err
		}
	}
	if nodeClaim.Status.NodeName == "" {
		return nil, nil //nolint:nilnil // documented
	}
	node := &corev1.Node{}
	if err := c.Kube.Get(ctx, client.ObjectKey{Name: nodeClaim.Status.NodeName}, node); err != nil {
		return nil, client.IgnoreNotFound(fmt.Errorf("getting Node %s: %w", nodeClaim.Status.NodeName, err))
	}
	if others, err := owners.Others(ctx, c.Kube, nodeClaim, node.Spec.ProviderID); len(others) > 0 || err != nil {
		return nil, err // it belongs to another NodeClaim
	}
	return node, nil
}

// detach removes from the Node what Karpenter set, so that it is like the user's own Nodes.
func (c *Controller) detach(ctx context.Context, node *corev1.Node, nodeClaim *karpv1.NodeClaim) error {
	stored := node.DeepCopy()
	controllerutil.RemoveFinalizer(node, karpv1.TerminationFinalizer)
	node.OwnerReferences = slices.DeleteFunc(node.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == nodeClaim.UID })
	node.Labels = lo.OmitBy(node.Labels, func(key, _ string) bool { return isKarpenters(key) })
	node.Annotations = lo.OmitBy(node.Annotations, func(key, _ string) bool { return isKarpenters(key) })
	node.Spec.Taints = lo.Reject(node.Spec.Taints, func(taint corev1.Taint, _ int) bool {
		return taint.MatchTaint(&karpv1.DisruptedNoScheduleTaint) || taint.MatchTaint(&karpv1.UnregisteredNoExecuteTaint)
	})
	if equality.Semantic.DeepEqual(stored, node) {
		return nil
	}
	if err := c.Kube.Patch(ctx, node, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("detaching Node %s: %w", node.Name, err)
	}
	c.Recorder.Publish(events.Event{
		InvolvedObject: node,
		Type:           corev1.EventTypeNormal,
		Reason:         "MachineReturned",
		Message: fmt.Sprintf("NodeClaim %s returned the machine to the user. Karpenter no longer manages the Node.",
			nodeClaim.Name),
		DedupeValues: []string{string(node.UID)},
	})
	return nil
}

// notReturned returns an event with the reason why the annotation has no effect.
func notReturned(nodeClaim *karpv1.NodeClaim, why string) events.Event {
	return events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "MachineNotReturned",
		Message:        lo.Substring(fmt.Sprintf("The machine cannot be returned to the user: %s.", strings.TrimSuffix(why, ".")), 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID), why},
		DedupeTimeout:  10 * time.Minute,
	}
}
