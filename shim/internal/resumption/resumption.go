// Package resumption makes core resume the work on NodeClaims that failed while nothing was known
// of the hub's node groups.
//
// While the agent has not been reached since the process started, core gets no instance types. Its
// controllers then fail for each NodeClaim, and try again after intervals that double up to 16
// minutes and 40 seconds, for ten NodeClaims a second. Nothing makes them try earlier when the
// agent is reached: the NodeClaims have not changed. Until then the drift of their Nodes is not
// noticed, and their costs are missing in metrics and in decisions about consolidation.
package resumption

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/panics"
)

const (
	// look is how often [Resumption.Start] checks whether core gets instance types.
	look = time.Second
	// concurrency is how many NodeClaims are reconciled at once.
	concurrency = 10
)

// Names of the controllers of core that need instance types for each NodeClaim.
const (
	stateController      = "state.nodeclaim"
	disruptionController = "nodeclaim.disruption"
)

// Resumption runs core's controllers once for each NodeClaim. It is a runnable for the leader.
type Resumption struct {
	kube          client.Client
	cloudProvider cloudprovider.CloudProvider
	ready         func() bool
	state         reconcile.Reconciler
	disruption    reconcile.ObjectReconciler[*karpv1.NodeClaim]
}

// New returns a resumption. core are core's controllers; it is an error if one that is needed is
// not among them. ready reports whether core gets instance types. kube reads NodeClaims from a
// cache.
func New(
	kube client.Client, cloudProvider cloudprovider.CloudProvider, ready func() bool, core []controller.Controller,
) (*Resumption, error) {
	r := &Resumption{kube: kube, cloudProvider: cloudProvider, ready: ready}
	var found bool
	if r.state, found = operator.Find[reconcile.Reconciler](core, stateController); !found {
		return nil, fmt.Errorf("core has no controller %q that reconciles requests", stateController)
	}
	if r.disruption, found = operator.Find[reconcile.ObjectReconciler[*karpv1.NodeClaim]](core, disruptionController); !found {
		return nil, fmt.Errorf("core has no controller %q that reconciles NodeClaims", disruptionController)
	}
	return r, nil
}

// Start waits until core gets instance types, resumes its work unless it got them at once, and
// returns.
func (r *Resumption) Start(ctx context.Context) error {
	if r.hasTypes(ctx) {
		return nil
	}
	if err := wait.PollUntilContextCancel(ctx, look, false, func(ctx context.Context) (bool, error) { return r.hasTypes(ctx), nil }); err != nil {
		return nil //nolint:nilerr // the process ends
	}
	nodeClaims, err := nodeclaimutils.ListManaged(ctx, r.kube, r.cloudProvider)
	if err != nil {
		log.FromContext(ctx).Error(err, "listing the NodeClaims on which core resumes its work")
		return nil
	}
	log.FromContext(ctx).V(1).Info("the node groups are known: core resumes its work on NodeClaims", "count", len(nodeClaims))
	workqueue.ParallelizeUntil(ctx, concurrency, len(nodeClaims), func(i int) { r.resume(ctx, nodeClaims[i]) })
	return nil
}

// hasTypes reports whether core gets instance types. With the feature gate NodeOverlay, it gets
// none until it has applied the overlays.
func (r *Resumption) hasTypes(ctx context.Context) bool {
	if !r.ready() {
		return false
	}
	nodePools := &karpv1.NodePoolList{}
	if err := r.kube.List(ctx, nodePools); err != nil {
		log.FromContext(ctx).Error(err, "listing the NodePools for which core gets instance types")
		return false
	}
	return !slices.ContainsFunc(nodePools.Items, func(nodePool karpv1.NodePool) bool {
		_, err := r.cloudProvider.GetInstanceTypes(ctx, &nodePool)
		return cloudprovider.IsUnevaluatedNodePoolError(err)
	})
}

// resume leaves NodeClaims that fail again to core, which tries again later.
func (r *Resumption) resume(ctx context.Context, nodeClaim *karpv1.NodeClaim) {
	err := panics.Confined(func() error {
		stateErr := r.updateState(ctx, client.ObjectKeyFromObject(nodeClaim))
		_, disruptionErr := r.disruption.Reconcile(ctx, nodeClaim)
		return errors.Join(stateErr, disruptionErr)
	})
	if err != nil {
		log.FromContext(ctx).V(1).Info("not resumed; core tries again later", "NodeClaim", nodeClaim.Name, "reason", err.Error())
	}
}

// updateState tells core's cluster state of a NodeClaim. Core's own worker may do so at the same
// time, with a newer version that this one would undo; for a NodeClaim that was deleted, nothing
// would take it back. So what was told must have been the newest version.
func (r *Resumption) updateState(ctx context.Context, key client.ObjectKey) error {
	for {
		before, err := r.version(ctx, key)
		if err != nil {
			return err
		}
		_, stateErr := r.state.Reconcile(ctx, reconcile.Request{NamespacedName: key})
		switch after, err := r.version(ctx, key); {
		case err != nil, ctx.Err() != nil, after == before:
			return errors.Join(stateErr, err)
		}
	}
}

// version returns the version of a NodeClaim, or "" if there is none.
func (r *Resumption) version(ctx context.Context, key client.ObjectKey) (string, error) {
	nodeClaim := &karpv1.NodeClaim{}
	if err := r.kube.Get(ctx, key, nodeClaim); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("getting NodeClaim %s: %w", key.Name, err)
	}
	return nodeClaim.ResourceVersion, nil
}
