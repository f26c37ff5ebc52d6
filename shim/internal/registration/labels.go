// Package registration completes NodeClaims from their Nodes, after the Node has joined and before
// core copies the NodeClaim's labels to the Node.
package registration

import (
	"context"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// again is the interval for a Node that its cloud controller manager has not labelled yet.
const again = time.Second

// Groups provides the labels of node groups' Nodes, and records what Nodes reveal about their
// groups.
type Groups interface {
	// GroupLabels returns the labels of a node group's Nodes, or nil if the group is not known.
	// Callers must not modify them.
	GroupLabels(groupID string) map[string]string
	ObserveZone(groupID, zone string)
	// ObserveTaint records whether a Node of the group joined with the taint that keeps pods away
	// until it is registered.
	ObserveTaint(groupID string, tainted bool)
}

// Labels is a registration hook that corrects a NodeClaim's labels before core copies them to the
// Node. It is a single hook for all labels, because core runs hooks concurrently on the same
// NodeClaim.
//
// If a node group names no zone, its NodeClaims have [instancetype.ZoneNone]. The cloud controller
// manager may still label the Node with a zone, which pods need for their volumes. The NodeClaim
// then takes over the Node's zone.
//
// Values that core chose at random for the NodeClaim are corrected when the machine is claimed.
// Core forgets that correction if it cannot store it at once, and does not call again; the hook
// then repeats it. The NodeClaim of an adopted machine already has its Node's values, which are
// kept.
type Labels struct {
	kube   client.Client
	groups Groups
}

var _ cloudprovider.NodeLifecycleHook = (*Labels)(nil)

// NewLabels returns the hook. kube reads from a cache with an index on Nodes' spec.providerID.
func NewLabels(kube client.Client, groups Groups) *Labels {
	return &Labels{kube: kube, groups: groups}
}

// Name returns the hook's name, which core reports while the hook delays a registration.
func (*Labels) Name() string { return "labels" }

// Registered completes once the NodeClaim's labels are correct. It modifies them.
func (l *Labels) Registered(ctx context.Context, nodeClaim *karpv1.NodeClaim) (cloudprovider.NodeLifecycleHookResult, error) {
	groupID, ours := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
	_, adopted := nodeClaim.Labels[v1alpha1.AdoptedLabel]
	if !adopted {
		instancetype.CorrectChosenLabels(nodeClaim, l.groups.GroupLabels(groupID))
	}
	if !ours {
		return cloudprovider.NodeLifecycleHookResult{}, nil
	}
	node, err := nodeclaimutils.NodeForNodeClaim(ctx, l.kube, nodeClaim)
	if err != nil {
		return cloudprovider.NodeLifecycleHookResult{}, err
	}
	if _, registered := node.Labels[karpv1.NodeRegisteredLabelKey]; !registered && !adopted { // an adopted Node joined long ago
		l.groups.ObserveTaint(groupID, IsUnregistered(node))
	}
	if zone, ok := nodeClaim.Labels[corev1.LabelTopologyZone]; !ok || zone != instancetype.ZoneNone {
		return cloudprovider.NodeLifecycleHookResult{}, nil
	}
	if zone := node.Labels[corev1.LabelTopologyZone]; zone != instancetype.ZoneNone {
		l.groups.ObserveZone(groupID, zone)
		nodeClaim.Labels[corev1.LabelTopologyZone] = zone
		return cloudprovider.NodeLifecycleHookResult{}, nil
	}
	if lo.ContainsBy(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == cloudproviderapi.TaintExternalCloudProvider }) {
		return cloudprovider.NodeLifecycleHookResult{RequeueAfter: again}, nil
	}
	return cloudprovider.NodeLifecycleHookResult{}, nil
}
