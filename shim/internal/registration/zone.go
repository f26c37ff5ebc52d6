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

// ZoneObserver is told where machines of groups without a zone turned out to be.
type ZoneObserver interface {
	ObserveZone(groupID, zone string)
}

// Zone is a registration hook for machines of node groups that name no zone. Their NodeClaims say "no zone", and core would
// write that over the zone that a cloud controller manager found out, with which pods find their volumes. So the NodeClaim
// takes the Node's.
type Zone struct {
	kube     client.Client
	observer ZoneObserver
}

var _ cloudprovider.NodeLifecycleHook = (*Zone)(nil)

// NewZone returns the hook. kube reads from a cache with an index on Nodes' spec.providerID.
func NewZone(kube client.Client, observer ZoneObserver) *Zone {
	return &Zone{kube: kube, observer: observer}
}

// Name returns the hook's name, shown while it holds a registration up.
func (*Zone) Name() string { return "zone" }

// Registered lets the registration pass once the NodeClaim's zone is right. It changes the NodeClaim's labels.
func (z *Zone) Registered(ctx context.Context, nodeClaim *karpv1.NodeClaim) (cloudprovider.NodeLifecycleHookResult, error) {
	groupID, ours := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
	if zone, ok := nodeClaim.Labels[corev1.LabelTopologyZone]; !ours || !ok || zone != instancetype.ZoneNone {
		return cloudprovider.NodeLifecycleHookResult{}, nil
	}
	node, err := nodeclaimutils.NodeForNodeClaim(ctx, z.kube, nodeClaim)
	if err != nil {
		return cloudprovider.NodeLifecycleHookResult{}, err
	}
	if zone := node.Labels[corev1.LabelTopologyZone]; zone != instancetype.ZoneNone {
		z.observer.ObserveZone(groupID, zone)
		nodeClaim.Labels[corev1.LabelTopologyZone] = zone
		return cloudprovider.NodeLifecycleHookResult{}, nil
	}
	if lo.ContainsBy(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == cloudproviderapi.TaintExternalCloudProvider }) {
		return cloudprovider.NodeLifecycleHookResult{RequeueAfter: again}, nil
	}
	return cloudprovider.NodeLifecycleHookResult{}, nil
}
