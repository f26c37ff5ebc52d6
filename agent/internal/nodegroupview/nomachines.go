package nodegroupview

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

// NoMachines reports why no Machine can currently be created for a MachineDeployment: a
// ResourceQuota is exhausted, or Cluster API creates no Machines for the newest MachineSet, which
// receives additional replicas. Nil means that no such reason is known.
func (c *View) NoMachines(ctx context.Context, md *clusterv1.MachineDeployment) (*eligibility.Refusal, error) {
	if quota, err := c.quotas.refusal(ctx, client.ObjectKeyFromObject(md)); quota != nil || err != nil {
		return quota, err
	}
	var list clusterv1.MachineSetList
	if err := c.client.List(ctx, &list, client.InNamespace(md.Namespace), client.MatchingFields{hub.ByDeployment: md.Name},
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing MachineSets: %w", err)
	}
	newest := protocol.Newest(lo.Filter(lo.ToSlicePtr(list.Items), func(set *clusterv1.MachineSet, _ int) bool {
		// A MachineSet of another Cluster belonged to an earlier MachineDeployment of the same
		// name.
		return set.DeletionTimestamp.IsZero() && set.Spec.ClusterName == md.Spec.ClusterName
	}))
	if newest == nil {
		return nil, nil
	}
	why := protocol.Blocked(newest)
	if why == "" {
		return nil, nil
	}
	return &eligibility.Refusal{NodeGroup: md.Name, Reason: eligibility.MachinesBlocked, Message: "Cluster API creates no Machines: " + why}, nil
}

func deploymentOfSet(_ context.Context, set client.Object) []reconcile.Request {
	deployment := set.GetLabels()[clusterv1.MachineDeploymentNameLabel]
	if deployment == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: set.GetNamespace(), Name: deployment}}}
}

// blockedChanges drops updates that do not change whether a MachineSet creates Machines.
func blockedChanges() predicate.Predicate {
	blocked := func(object client.Object) string {
		set, ok := object.(*clusterv1.MachineSet)
		if !ok {
			return ""
		}
		return protocol.Blocked(set)
	}
	// Creations and deletions pass, because they may change which MachineSet is the newest.
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool { return blocked(e.ObjectOld) != blocked(e.ObjectNew) },
	}
}
