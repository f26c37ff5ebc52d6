package protoconv

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// NodePoolReport converts a report, sorted by name. If it has an object twice, repeated is the
// field with the second one, and the report cannot be used.
func NodePoolReport(request *agentv1alpha1.ReportNodePoolsRequest) (report spokes.Report, repeated string) {
	seen := map[string]bool{}
	for i, pool := range request.GetNodePools() {
		if seen[pool.GetName()] {
			return spokes.Report{}, fmt.Sprintf("node_pools[%d].name", i)
		}
		seen[pool.GetName()] = true
		report.NodePools = append(report.NodePools, v1alpha1.SpokeNodePool{
			Name: pool.GetName(), Set: pool.GetSet(), Ready: pool.GetReady(), Nodes: pool.GetNodes(), PendingNodeClaims: pool.GetPendingNodeClaims(),
			PricePerHour: pool.GetPricePerHour(), Message: pool.GetMessage(),
		})
	}
	clear(seen)
	for i, object := range request.GetObjects() {
		key := object.GetKind() + "/" + object.GetName()
		if seen[key] {
			return spokes.Report{}, fmt.Sprintf("objects[%d].name", i)
		}
		seen[key] = true
		report.Published = append(report.Published, v1alpha1.SpokePublished{
			Kind: object.GetKind(), Name: object.GetName(), Set: object.GetSet(), Revision: object.GetRevision(), Applied: object.GetApplied(),
			Message: object.GetMessage(),
		})
	}
	report.MoreNodePools = request.GetMoreNodePools()
	slices.SortFunc(report.NodePools, func(a, b v1alpha1.SpokeNodePool) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(report.Published, func(a, b v1alpha1.SpokePublished) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	return report, ""
}
