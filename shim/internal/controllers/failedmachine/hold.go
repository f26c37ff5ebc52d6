package failedmachine

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/operator/injection"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// holdFor is how long after the controller first looked at a NodeClaim core may not delete it yet.
// By then core's cache has what the controller wrote, and a write that was lost was repeated.
const holdFor = 2 * look

// lifecycleController is the name of core's controller that deletes NodeClaims without a Node. Core
// passes it in the context.
var lifecycleController = (&lifecycle.Controller{}).Name()

// Client returns a client for core's controllers, with which core does not give up a launched
// NodeClaim before this process has looked at it. Everything else is passed to kube.
//
// Core counts from a time that this controller advances while the agent waits for the machine. That
// time is old if no process was the leader for long. Core's first pass would then delete every
// NodeClaim that waits for its Node, even if the Node has joined meanwhile. Core treats the refusal
// like any other failed write, and retries after a second.
func (c *Controller) Client(kube client.Client) client.Client {
	return &holding{Client: kube, controller: c}
}

type holding struct {
	client.Client

	controller *Controller
}

func (h *holding) Delete(ctx context.Context, object client.Object, options ...client.DeleteOption) error {
	if nodeClaim, is := object.(*karpv1.NodeClaim); is && injection.GetControllerName(ctx) == lifecycleController && h.controller.holds(nodeClaim) {
		return apierrors.NewTooManyRequests(
			fmt.Sprintf("NodeClaim %s is kept until the agent reports whether its machine will join", nodeClaim.Name), 1)
	}
	return h.Client.Delete(ctx, object, options...)
}

// Status implements [client.Client].
func (h *holding) Status() client.SubResourceWriter { return holdingStatus{h.Client.Status(), h} }

type holdingStatus struct {
	client.SubResourceWriter

	holding *holding
}

// registrationFailed is the reason with which core marks a NodePool whose NodeClaims do not
// register.
const registrationFailed = "RegistrationFailed"

// Patch implements [client.SubResourceWriter]. Core counts a NodeClaim as failed before it deletes
// it, and again with each refused attempt. After the second, the NodePool would not be healthy.
func (s holdingStatus) Patch(ctx context.Context, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
	nodePool, is := object.(*karpv1.NodePool)
	if !is || injection.GetControllerName(ctx) != lifecycleController {
		return s.SubResourceWriter.Patch(ctx, object, patch, options...)
	}
	if health := nodePool.StatusConditions().Get(karpv1.ConditionTypeNodeRegistrationHealthy); health.IsFalse() && health.Reason == registrationFailed {
		held, err := s.holding.held(ctx, nodePool.Name)
		if err != nil {
			return err
		}
		if held != "" {
			return apierrors.NewTooManyRequests(fmt.Sprintf(
				"NodePool %s has no failed registration until the agent reports whether the machine of NodeClaim %s will join", nodePool.Name, held,
			), 1)
		}
	}
	return s.SubResourceWriter.Patch(ctx, object, patch, options...)
}

// held returns a NodeClaim of the NodePool that core would have given up, but for the hold, or "".
func (h *holding) held(ctx context.Context, nodePool string) (string, error) {
	var nodeClaims karpv1.NodeClaimList
	if err := h.List(ctx, &nodeClaims, client.MatchingLabels{karpv1.NodePoolLabelKey: nodePool}); err != nil {
		return "", fmt.Errorf("listing the NodeClaims of NodePool %s: %w", nodePool, err)
	}
	for i := range nodeClaims.Items {
		nodeClaim := &nodeClaims.Items[i]
		registered := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered)
		if !nodeClaim.DeletionTimestamp.IsZero() || registered == nil {
			continue
		}
		if h.controller.Clock.Since(registered.LastTransitionTime.Time) >= registrationTimeout && h.controller.holds(nodeClaim) {
			return nodeClaim.Name, nil
		}
	}
	return "", nil
}

// holds reports whether core may not give up the NodeClaim yet.
func (c *Controller) holds(nodeClaim *karpv1.NodeClaim) bool {
	conditions := nodeClaim.StatusConditions()
	if !conditions.Get(karpv1.ConditionTypeLaunched).IsTrue() || conditions.Get(karpv1.ConditionTypeRegistered).IsTrue() ||
		v1alpha1.ReturnsMachine(nodeClaim) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	first := c.recordOf(nodeClaim).looked
	return first.IsZero() || c.Clock.Since(first) < holdFor
}

// looksAt records that the controller looks at a launched NodeClaim.
func (c *Controller) looksAt(nodeClaim *karpv1.NodeClaim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.recordOf(nodeClaim); r.looked.IsZero() {
		r.looked = c.Clock.Now()
		c.records[nodeClaim.Name] = r
	}
}
