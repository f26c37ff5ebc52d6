// Package registration completes NodeClaims from their Nodes, in the moment between a Node's joining and core's writing the
// NodeClaim's labels over the Node's.
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

// again is how soon to look again at a Node that its cloud controller manager has not labelled yet.
const again = time.Second

// Groups knows the labels of node groups' Nodes, and is told where machines of groups without a zone turned out to be.
type Groups interface {
	// GroupLabels returns the labels that Nodes of a node group have, nil when the group is not known. They may not be changed.
	GroupLabels(groupID string) map[string]string
	ObserveZone(groupID, zone string)
	// ObserveTaint is told whether a Node of a group joined with the taint that keeps pods away until it is registered.
	ObserveTaint(groupID string, tainted bool)
}

// Labels is a registration hook that corrects a NodeClaim's labels before core writes them over the Node's. It is one hook, not
// one for each label: core runs hooks at the same time, on one NodeClaim.
//
// Machines of node groups that name no zone have NodeClaims that say "no zone", and a Node whose zone a cloud controller manager
// found out, with which pods find their volumes. The NodeClaim takes the Node's.
//
// Values that core chose at random for the NodeClaim are corrected when the machine is claimed; but core forgets that when it
// cannot store it at once, and does not ask again. The NodeClaim of an adopted machine has the values of its Node, which stay.
type Labels struct {
	kube   client.Client
	groups Groups
}

var _ cloudprovider.NodeLifecycleHook = (*Labels)(nil)

// NewLabels returns the hook. kube reads from a cache with an index on Nodes' spec.providerID.
func NewLabels(kube client.Client, groups Groups) *Labels {
	return &Labels{kube: kube, groups: groups}
}

// Name returns the hook's name, shown while it holds a registration up.
func (*Labels) Name() string { return "labels" }

// Registered lets the registration pass once the NodeClaim's labels are right. It changes them.
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
