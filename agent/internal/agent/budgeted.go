package agent

import (
	"context"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/storage"
)

// budgetedEngine is the claim engine for callers. It refuses what would make a further object of a
// Cluster that has used up its budget. The engine's own work is not concerned.
type budgetedEngine struct {
	*claims.Engine

	budget *storage.Budget
}

// Create is [claims.Engine.Create] within the budget.
func (e *budgetedEngine) Create(ctx context.Context, r claims.Request) (*v1alpha1.MachineClaim, error) {
	if err := e.budget.Room(ctx, claims.Key{Namespace: r.Namespace, Cluster: r.Cluster, ID: r.ID}, e.Get); err != nil {
		return nil, err
	}
	return e.Engine.Create(ctx, r)
}

// Release is [claims.Engine.Release] within the budget: a tombstone is an object as well.
func (e *budgetedEngine) Release(ctx context.Context, key claims.Key, o claims.ReleaseOptions) (*v1alpha1.MachineClaim, error) {
	if err := e.budget.Room(ctx, key, e.Get); err != nil {
		return nil, err
	}
	return e.Engine.Release(ctx, key, o)
}
