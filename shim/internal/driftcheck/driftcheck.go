// Package driftcheck decides when core looks for drift. By itself, core reconciles all NodeClaims
// of a NodeClass whenever the status of the NodeClass is written, which follows prices and
// availability of its node groups, and otherwise every five minutes. The wrapper drops the writes
// that cannot affect drift, and reconciles a NodeClaim as soon as the mirror of claims reports that
// its Machine is not up to date.
package driftcheck

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runtimecontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	utilscontroller "sigs.k8s.io/karpenter/pkg/utils/controller"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/claimsource"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
)

// disruption is the name of core's controller of the conditions Drifted and Consolidatable.
const disruption = "nodeclaim.disruption"

// Wrap returns core's controllers, with the one of the conditions Drifted and Consolidatable
// wrapped so that it passes over writes of a NodeClass that cannot concern a NodeClaim, see
// [Concerns], and follows whether the Machines of claims are up to date. It fails if core has no
// such controller.
func Wrap(core []controller.Controller, cloudProvider cloudprovider.CloudProvider, claims claimsource.Claims) ([]controller.Controller, error) {
	wrapped, found := operator.Wrap(core, disruption, func(c ofNodeClaims) controller.Controller { return wrapper{c, cloudProvider, claims} })
	if !found {
		return nil, fmt.Errorf("core has no controller %q of NodeClaims", disruption)
	}
	return wrapped, nil
}

// catalogueLag is how far the catalogue may be behind the claims. Whether a Machine that is not up
// to date has drifted also depends on its node group's strategy, which a user may change in the
// same write.
const catalogueLag = 15 * time.Second

type ofNodeClaims interface {
	Name() string
	reconcile.ObjectReconciler[*karpv1.NodeClaim]
}

type wrapper struct {
	ofNodeClaims

	cloudProvider cloudprovider.CloudProvider
	claims        claimsource.Claims
}

// Register adds the controller to the manager, as core's own does apart from the predicates of
// NodePools and NodeClasses, and the source of claims. TestCoreStillWatchesTheSame fails if core's
// does anything else.
func (w wrapper) Register(ctx context.Context, m manager.Manager) error {
	b := controllerruntime.NewControllerManagedBy(m).
		Named(w.Name()).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(w.cloudProvider))).
		WithOptions(runtimecontroller.Options{
			MaxConcurrentReconciles: utilscontroller.LinearScaleReconciles(utilscontroller.CPUCount(ctx), 10, 1000),
		}).
		Watches(&karpv1.NodePool{}, nodeclaimutils.NodePoolEventHandler(m.GetClient(), w.cloudProvider),
			builder.WithPredicates(NodePoolChanged)).
		Watches(&corev1.Pod{}, nodeclaimutils.PodEventHandler(m.GetClient(), w.cloudProvider))
	for _, nodeClass := range w.cloudProvider.GetSupportedNodeClasses() {
		b.Watches(nodeClass, nodeclaimutils.NodeClassEventHandler(m.GetClient()),
			builder.WithPredicates(predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return Concerns(e.ObjectOld, e.ObjectNew) }}))
	}
	b.WatchesRawSource(claimsource.Outdated(w.claims, catalogueLag))
	return b.Complete(reconcile.AsReconciler(m.GetClient(), w))
}

// NodePoolChanged drops updates of a NodePool's status, which cannot affect drift or consolidation.
// Core updates it every five seconds while Nodes come or go. The annotations include the hash of
// the NodePool's template.
var NodePoolChanged = predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{})

// Concerns reports whether a NodeClass changed in what may decide about drift: its spec, its
// annotations, which node groups it selects and how they roll out, or a condition in anything but
// its message. What core plans with, such as prices, it reads elsewhere.
func Concerns(before, after any) bool {
	was, isClass := before.(*v1alpha1.ClusterAPINodeClass)
	is, still := after.(*v1alpha1.ClusterAPINodeClass)
	if !isClass || !still {
		return true
	}
	// If the status may not list all, it lists those that are unavailable first, which may change
	// many times a second. Core finds their drift when it next looks by itself, within five
	// minutes.
	selected := func(c *v1alpha1.ClusterAPINodeClass) []v1alpha1.SelectedNodeGroup {
		if c.Status.NodeGroups > v1alpha1.MaxSelectedNodeGroups || len(c.Status.Selected) >= v1alpha1.MaxSelectedNodeGroups {
			return nil
		}
		return lo.Map(c.Status.Selected, func(g v1alpha1.SelectedNodeGroup, _ int) v1alpha1.SelectedNodeGroup {
			return v1alpha1.SelectedNodeGroup{Name: g.Name, RolloutStrategy: g.RolloutStrategy}
		})
	}
	return was.Generation != is.Generation || !maps.Equal(was.Annotations, is.Annotations) ||
		was.Status.NodeGroups != is.Status.NodeGroups || !slices.Equal(selected(was), selected(is)) ||
		was.DeletionTimestamp.IsZero() != is.DeletionTimestamp.IsZero() || ConditionTurned(was, is)
}

// ConditionTurned reports whether a condition of a NodeClass changed in anything but its message.
func ConditionTurned(before, after *v1alpha1.ClusterAPINodeClass) bool {
	return !slices.EqualFunc(before.Status.Conditions, after.Status.Conditions, func(a, b status.Condition) bool {
		return a.Type == b.Type && a.Status == b.Status && a.Reason == b.Reason && a.ObservedGeneration == b.ObservedGeneration
	})
}
