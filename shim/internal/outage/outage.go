// Package outage keeps core from removing Nodes that it cannot replace, while the agent or the hub
// is away, and Nodes whose machine could not be removed, because the agent does not report it.
//
// While the agent or the hub is away, core replaces no Node: no NodePool is Ready. But it drains
// Nodes that have expired, whether or not their pods can run elsewhere, and removes those that are
// empty. Their machines stay until the hub is back, and can run no pods meanwhile.
package outage

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/node/legacyrepair"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/expiration"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// retrySeconds is the Retry-After of a refused deletion. [Patient] has core's expiry obey it;
// core's repair of Nodes uses its own backoff.
const retrySeconds = 30

// Names of core's controllers, which it passes in the context.
var (
	expiring   = (&expiration.Controller{}).Name()
	repairing  = (&legacyrepair.Controller{}).Name()
	disrupting = (&disruption.Controller{}).Name()
)

// settled is how long the agent must have been reachable before expired Nodes are removed again,
// about one a second. Connections come and go while a hub recovers.
const settled = 30 * time.Second

// Connection reports the state of the connection to the agent. The mirror of node groups implements
// it.
type Connection interface{ State() agentclient.State }

// Client returns a client for core's controllers, which gets NodeClasses from kube. As long as a
// NodeClass says that the agent is not reachable, core finds none of its NodePools to disrupt, and
// deletes none of its NodeClaims because they have expired, or because their Nodes are unhealthy.
// It does not delete them either until the connection has lasted for half a minute, nor while their
// Nodes are kept ([v1alpha1.IsKept]): expiry heeds no annotation that protects a Node, and neither
// does core's legacy repair. Everything else is passed to kube.
func Client(kube client.Client, connection Connection, clk clock.PassiveClock) client.Client {
	return &holding{kube, connection, clk}
}

type holding struct {
	client.Client

	connection Connection
	clock      clock.PassiveClock
}

// List implements [client.Reader].
func (h *holding) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	if err := h.Client.List(ctx, list, options...); err != nil {
		return err
	}
	if nodePools, is := list.(*karpv1.NodePoolList); is && injection.GetControllerName(ctx) == disrupting {
		nodePools.Items = slices.DeleteFunc(nodePools.Items, func(nodePool karpv1.NodePool) bool {
			_, away := h.away(ctx, nodePool.Spec.Template.Spec.NodeClassRef)
			return away
		})
	}
	return nil
}

// Patch implements [client.Writer]. Core's repair of Nodes notes when a Node has to be gone before
// it deletes its NodeClaim. The note would stay: whenever the NodeClaim is deleted later, no pod
// would be given time to end.
func (h *holding) Patch(ctx context.Context, object client.Object, patch client.Patch, options ...client.PatchOption) error {
	if nodeClaim, is := object.(*karpv1.NodeClaim); is && injection.GetControllerName(ctx) == repairing {
		if err := h.refusal(ctx, nodeClaim); err != nil {
			return err
		}
	}
	return h.Client.Patch(ctx, object, patch, options...)
}

// Delete implements [client.Writer].
func (h *holding) Delete(ctx context.Context, object client.Object, options ...client.DeleteOption) error {
	controller := injection.GetControllerName(ctx)
	if nodeClaim, is := object.(*karpv1.NodeClaim); is && (controller == expiring || controller == repairing) {
		if err := h.refusal(ctx, nodeClaim); err != nil {
			return err
		}
	}
	return h.Client.Delete(ctx, object, options...)
}

// refusal returns an error if the Node of a NodeClaim could not be replaced or removed now.
func (h *holding) refusal(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	ref := nodeClaim.Spec.NodeClassRef
	if ref == nil || ref.Group != v1alpha1.Group {
		return nil
	}
	nodes, err := nodeclaimutils.AllNodesForNodeClaim(ctx, h.Client, nodeClaim)
	if err != nil {
		return err
	}
	message, away := h.away(ctx, ref)
	state := h.connection.State()
	unsettled := !state.Connected || h.clock.Since(state.Since) < settled
	switch {
	case away:
		return kept(nodeClaim, "the agent has been reachable for %s, because its Node could not be replaced. ClusterAPINodeClass %s reports: %s",
			settled, ref.Name, message)
	case unsettled && state.LastError != nil:
		return kept(nodeClaim, "the agent has been reachable for %s, because its Node could not be replaced. The last connection ended: %s",
			settled, agenterrors.Describe(state.LastError))
	case unsettled:
		return kept(nodeClaim, "the agent has been reachable for %s, because its Node could not be replaced", settled)
	case lo.SomeBy(nodes, func(node *corev1.Node) bool { return v1alpha1.IsKept(node) }):
		return kept(nodeClaim, "the agent reports its machine, which could not be removed")
	}
	return nil
}

func kept(nodeClaim *karpv1.NodeClaim, until string, values ...any) error {
	return apierrors.NewTooManyRequests(fmt.Sprintf("NodeClaim %s is kept until ", nodeClaim.Name)+fmt.Sprintf(until, values...), retrySeconds)
}

// away reports whether a NodeClass says that the agent is not reachable, and with which message.
func (h *holding) away(ctx context.Context, ref *karpv1.NodeClassReference) (message string, is bool) {
	if ref == nil || ref.Group != v1alpha1.Group {
		return "", false
	}
	class := &v1alpha1.ClusterAPINodeClass{}
	if err := h.Get(ctx, client.ObjectKey{Name: ref.Name}, class); err != nil {
		if !apierrors.IsNotFound(err) {
			log.FromContext(ctx).Error(err, "getting a NodeClass, to see whether the agent is reachable", "ClusterAPINodeClass", ref.Name)
		}
		return "", false
	}
	if reachable := class.StatusConditions().Get(v1alpha1.ConditionAgentReachable); reachable.IsFalse() {
		return reachable.Message, true
	}
	return "", false
}
