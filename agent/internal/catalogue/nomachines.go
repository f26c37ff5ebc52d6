package catalogue

import (
	"context"
	"fmt"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// NoMachines says why no Machine can be added to a node group now: because of a ResourceQuota, or because Cluster API makes none. It is nil
// when one can be, or nobody knows.
func (c *Catalogue) NoMachines(ctx context.Context, group types.NamespacedName) (*eligibility.Refusal, error) {
	if quota, err := c.quotas.refusal(ctx, group); quota != nil || err != nil {
		return quota, err
	}
	var sets clusterv1.MachineSetList
	if err := c.client.List(ctx, &sets, client.InNamespace(group.Namespace), client.MatchingFields{hub.ByDeployment: group.Name}); err != nil {
		return nil, fmt.Errorf("listing MachineSets: %w", err)
	}
	if why := protocol.BlockedBy(lo.ToSlicePtr(sets.Items)); why != "" {
		return &eligibility.Refusal{NodeGroup: group.Name, Reason: eligibility.MachinesBlocked, Message: why}, nil
	}
	return nil, nil
}

func deploymentOfSet(_ context.Context, set client.Object) []reconcile.Request {
	deployment := set.GetLabels()[clusterv1.MachineDeploymentNameLabel]
	if deployment == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: set.GetNamespace(), Name: deployment}}}
}

// blockedChanges leaves out what says nothing new about whether MachineSets make Machines.
func blockedChanges() predicate.Predicate {
	blocked := func(object client.Object) string {
		set, ok := object.(*clusterv1.MachineSet)
		if !ok {
			return ""
		}
		return protocol.BlockedBy([]*clusterv1.MachineSet{set})
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return blocked(e.Object) != "" },
		UpdateFunc: func(e event.UpdateEvent) bool { return blocked(e.ObjectOld) != blocked(e.ObjectNew) },
		DeleteFunc: func(e event.DeleteEvent) bool { return blocked(e.Object) != "" },
	}
}
