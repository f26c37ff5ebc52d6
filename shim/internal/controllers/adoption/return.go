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

// giveBack leaves the NodeClaim's machine to the user, as the annotation asks. Each step can be repeated: the claim ends; the Node loses what
// is Karpenter's, so that the NodeClaim's end does not concern it; the NodeClaim gets a provider ID that no Node has, so that core drains none;
// the Node loses what core has put there in between; then the NodeClaim is deleted.
func (c *Controller) giveBack(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	response, err := c.agent.Claims.ReturnMachine(ctx, &agentv1alpha1.ReturnMachineRequest{
		Cluster: c.cluster, ClaimId: string(nodeClaim.UID), Reason: "NodeClaim " + nodeClaim.Name + " returns its machine",
	})
	claim := response.GetClaim()
	switch {
	case agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound, unclaimed.NeverMade(claim):
		// The machine is the user's in any case, or another NodeClaim's.
		rightful, err := owners.Of(ctx, c.kube, nodeClaim)
		if err != nil {
			return reconcile.Result{}, err
		}
		if rightful.UID != nodeClaim.UID {
			c.recorder.Publish(c.duplicate(nodeClaim, rightful))
			return reconcile.Result{RequeueAfter: look}, nil
		}
	case agenterrors.IsNotReturnable(err):
		c.recorder.Publish(notReturned(nodeClaim, status.Convert(err).Message()))
		return reconcile.Result{RequeueAfter: look}, nil
	case err != nil:
		log.FromContext(ctx).V(1).Info("the agent did not return the machine yet", "reason", err.Error())
		return reconcile.Result{RequeueAfter: soon}, nil
	case claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		return reconcile.Result{RequeueAfter: soon}, nil
	case !claim.GetReturned():
		c.recorder.Publish(notReturned(nodeClaim, "the claim has ended otherwise: "+claim.GetMessage()))
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
	own := placeholder.ProviderID(c.cluster.GetNamespace(), c.cluster.GetName(), string(nodeClaim.UID))
	if nodeClaim.Status.ProviderID != own {
		stored := nodeClaim.DeepCopy()
		nodeClaim.Status.ProviderID = own
		if err := c.kube.Status().Patch(ctx, nodeClaim, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
			return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("detaching the NodeClaim from its Node: %w", err))
		}
		if node != nil { // core labels the Nodes of NodeClaims: it is given the time to see that this is none
			return reconcile.Result{RequeueAfter: soon}, nil
		}
	}
	log.FromContext(ctx).Info("returned a machine to the user", "machine", claim.GetMachine().GetName())
	// Only as it was just written: core would drain the Node of one with another provider ID.
	preconditions := client.Preconditions{UID: &nodeClaim.UID, ResourceVersion: &nodeClaim.ResourceVersion}
	if err := c.kube.Delete(ctx, nodeClaim, preconditions); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("deleting the NodeClaim: %w", err))
	}
	returnsTotal.Inc(nil)
	return reconcile.Result{}, nil
}

// returned returns the Node of a NodeClaim that is being detached from it, nil when it has none. Its provider ID may be the NodeClaim's, that of the
// claim's machine, or, when the NodeClaim has its placeholder and there is no claim, only be that of the Node by the name in its status.
func (c *Controller) returned(ctx context.Context, nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) (*corev1.Node, error) {
	for _, id := range []string{nodeClaim.Status.ProviderID, claim.GetMachine().GetProviderId()} {
		if id == "" || placeholder.Is(id) {
			continue
		}
		if node, err := owners.Node(ctx, c.kube, id); node != nil || err != nil {
			return node, err
		}
	}
	if nodeClaim.Status.NodeName == "" {
		return nil, nil //nolint:nilnil // documented
	}
	node := &corev1.Node{}
	if err := c.kube.Get(ctx, client.ObjectKey{Name: nodeClaim.Status.NodeName}, node); err != nil {
		return nil, client.IgnoreNotFound(fmt.Errorf("getting Node %s: %w", nodeClaim.Status.NodeName, err))
	}
	if others, err := owners.Others(ctx, c.kube, nodeClaim, node.Spec.ProviderID); len(others) > 0 || err != nil {
		return nil, err // it is another one's
	}
	return node, nil
}

// detach takes off the Node what Karpenter put there, so that it is as Nodes of the user's are.
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
	if err := c.kube.Patch(ctx, node, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("detaching Node %s: %w", node.Name, err)
	}
	c.recorder.Publish(events.Event{
		InvolvedObject: node,
		Type:           corev1.EventTypeNormal,
		Reason:         "MachineReturned",
		Message: fmt.Sprintf("The machine is the user's: NodeClaim %s returned it, and Karpenter does not manage the Node any more.",
			nodeClaim.Name),
		DedupeValues: []string{string(node.UID)},
	})
	return nil
}

// notReturned tells the user why the annotation has no effect.
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
