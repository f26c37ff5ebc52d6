package nodepools

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/awslabs/operatorpkg/status"
	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// status returns the state of the spoke's NodePools.
func (c *Controller) status(ctx context.Context) (*agentv1alpha1.ReportNodePoolsRequest, error) {
	nodePools, nodeClaims := &karpv1.NodePoolList{}, &karpv1.NodeClaimList{}
	if err := c.Kube.List(ctx, nodePools); err != nil {
		return nil, fmt.Errorf("listing NodePools: %w", err)
	}
	if err := c.Kube.List(ctx, nodeClaims); err != nil {
		return nil, fmt.Errorf("listing NodeClaims: %w", err)
	}
	claims := map[string][]*karpv1.NodeClaim{}
	for i := range nodeClaims.Items {
		pool := nodeClaims.Items[i].Labels[karpv1.NodePoolLabelKey]
		claims[pool] = append(claims[pool], &nodeClaims.Items[i])
	}
	slices.SortFunc(nodePools.Items, func(a, b karpv1.NodePool) int { return cmp.Compare(a.Name, b.Name) })
	report := &agentv1alpha1.ReportNodePoolsRequest{Cluster: c.Cluster, MoreNodePools: int32(max(0, len(nodePools.Items)-maxReported))}
	for i := range nodePools.Items[:min(len(nodePools.Items), maxReported)] {
		report.NodePools = append(report.NodePools, c.statusOf(ctx, &nodePools.Items[i], claims[nodePools.Items[i].Name]))
	}
	return report, nil
}

func (c *Controller) statusOf(ctx context.Context, nodePool *karpv1.NodePool, claims []*karpv1.NodeClaim) *agentv1alpha1.NodePoolStatus {
	s := &agentv1alpha1.NodePoolStatus{Name: nodePool.Name, Set: nodePool.Labels[v1alpha1.PublishedByLabel]}
	switch ready := nodePool.StatusConditions().Get(status.ConditionReady); {
	case ready.IsTrue():
		s.Ready = true
	case ready == nil:
		s.Message = "Karpenter has not evaluated it yet"
	default:
		s.Message = truncated(cmp.Or(ready.Message, ready.Reason))
	}
	for _, claim := range claims {
		if claim.StatusConditions().Get(karpv1.ConditionTypeRegistered).IsTrue() {
			s.Nodes++
		} else {
			s.PendingNodeClaims++
		}
	}
	s.PricePerHour = c.price(ctx, nodePool, claims)
	return s
}

// price returns the price of the NodeClaims that were launched, per hour. It is empty if one of
// their prices is not known.
func (c *Controller) price(ctx context.Context, nodePool *karpv1.NodePool, claims []*karpv1.NodeClaim) string {
	launched := slices.DeleteFunc(slices.Clone(claims), func(claim *karpv1.NodeClaim) bool { return claim.Labels[corev1.LabelInstanceTypeStable] == "" })
	if len(launched) == 0 {
		return "0"
	}
	instanceTypes, err := c.InstanceTypes.GetInstanceTypes(ctx, nodePool)
	if err != nil {
		return "" // its NodeClass does not exist or selects nothing, or the agent has not been reached
	}
	byName := map[string]*cloudprovider.InstanceType{}
	for _, instanceType := range instanceTypes {
		byName[instanceType.Name] = instanceType
	}
	sum := 0.0
	for _, claim := range launched {
		instanceType := byName[claim.Labels[corev1.LabelInstanceTypeStable]]
		if instanceType == nil {
			return ""
		}
		offerings := instanceType.Offerings.Compatible(scheduling.NewLabelRequirements(claim.Labels))
		if len(offerings) == 0 {
			return ""
		}
		sum += offerings.Cheapest().Price
	}
	return decimal(sum)
}

// decimal formats a price with at most four decimal places.
func decimal(price float64) string {
	text := strconv.FormatFloat(price, 'f', 4, 64)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
}
