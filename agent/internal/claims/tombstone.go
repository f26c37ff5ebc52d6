package claims

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// neverMade is the message of a tombstone whose status was not written.
const neverMade = "it was released before it was made"

// createTombstone makes the tombstone of an unknown claim: a MachineClaim that belongs to no node
// group. Errors: [ErrUnknownCluster] means that the Cluster does not exist, [ErrConflict] that the
// claim exists after all, [*TooManyError] that there are too many tombstones. In the last case the
// release has not happened, because a late call to create the claim would not be refused.
func (e *Engine) createTombstone(ctx context.Context, key Key, why string) (*v1alpha1.MachineClaim, error) {
	cluster, err := e.cluster(ctx, key.Namespace, key.Cluster)
	if err != nil {
		return nil, err
	}
	if cluster == nil {
		return nil, ErrUnknownCluster
	}
	if err := e.roomForTombstone(ctx, client.ObjectKeyFromObject(cluster)); err != nil {
		return nil, err
	}
	c := e.newClaim(Request{Namespace: key.Namespace, Cluster: key.Cluster, ID: key.ID, Holder: unknownHolder}, cluster, "")
	if err := e.Client.Create(ctx, c); apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("making a tombstone: %w", ErrConflict)
	} else if full := overQuota(client.ObjectKeyFromObject(cluster), err); full != nil {
		return nil, full
	} else if refusedForGood(err) {
		e.warn(cluster, protocol.ReasonWriteRefused, "ReleaseClaim", "no MachineClaim can be made: "+err.Error())
		return nil, fmt.Errorf("making a tombstone: %w: %w", ErrWriteRefused, err)
	} else if err != nil {
		return nil, fmt.Errorf("making a tombstone: %w", err)
	}
	e.countEnded(client.ObjectKeyFromObject(cluster), 1)
	// The object alone is the tombstone. The status is for users and for the lists. If the agent
	// dies here, the tombstones' controller writes it.
	if why != "" {
		why = neverMade + ": " + why
	}
	return e.writeTombstoneStatus(ctx, c, why)
}

// writeTombstoneStatus writes the status of a tombstone that has none.
func (e *Engine) writeTombstoneStatus(ctx context.Context, c *v1alpha1.MachineClaim, why string) (*v1alpha1.MachineClaim, error) {
	if why == "" {
		why = neverMade
	}
	now := metav1.NewTime(e.Clock.Now())
	c = c.DeepCopy()
	c.Status.Phase = v1alpha1.PhaseEnded
	c.Status.ReleasedAt, c.Status.EndedAt = &now, &now
	e.note(c, v1alpha1.Event{Reason: protocol.ReasonNeverMade, Message: why})
	if err := e.updateStatus(ctx, c); err != nil && !apierrors.IsConflict(err) {
		return nil, fmt.Errorf("writing a tombstone's status: %w", err)
	}
	return c, nil
}

// concurrentTombstones is how many ended claims are checked at once.
const concurrentTombstones = 4

// tombstones deletes claims that ended long ago.
type tombstones struct{ *Engine }

func (t tombstones) setupWithManager(mgr ctrl.Manager) error {
	needLeaderElection := false
	err := ctrl.NewControllerManagedBy(mgr).
		Named("tombstones").
		For(&v1alpha1.MachineClaim{}, builder.WithPredicates(predicate.NewPredicateFuncs(func(object client.Object) bool {
			c, ok := object.(*v1alpha1.MachineClaim)
			return ok && c.CurrentPhase() == v1alpha1.PhaseEnded
		}))).
		WithOptions(controller.Options{
			NeedLeaderElection: &needLeaderElection, MaxConcurrentReconciles: concurrentTombstones, NewQueue: fairqueue.New(fairqueue.OwnerOfClaim),
		}).
		Complete(t)
	if err != nil {
		return fmt.Errorf("setting up the tombstones' controller: %w", err)
	}
	return nil
}

// Reconcile deletes the tombstone when its retention is over.
func (t tombstones) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	var c v1alpha1.MachineClaim
	if err := t.Client.Get(ctx, r.NamespacedName, &c); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	left, err := t.deleteExpired(ctx, &c)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{}, nil // it changed, so there will be an event
	}
	return reconcile.Result{RequeueAfter: left}, err
}

// deleteExpired deletes the claim if it ended long enough ago. It returns how long to wait before
// the next check; zero when it deleted the claim, or when the claim has not ended.
func (t tombstones) deleteExpired(ctx context.Context, c *v1alpha1.MachineClaim) (time.Duration, error) {
	if c.CurrentPhase() != v1alpha1.PhaseEnded {
		return 0, nil
	}
	if c.Status.EndedAt == nil {
		written, err := t.writeTombstoneStatus(ctx, c, c.Status.Message)
		if err != nil {
			return 0, err
		}
		c = written
	}
	cluster := types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}
	kept, err := t.remembered(ctx, cluster)
	if err != nil {
		return 0, err
	}
	// A move in progress stops half way if a claim that it has listed is deleted.
	if paused, err := t.paused(ctx, cluster); err != nil || paused {
		return time.Minute, err
	}
	if left := kept - t.Clock.Since(c.Status.EndedAt.Time); left > 0 {
		if t.Bounds.Ended > 0 || t.Crowded != nil {
			left = min(left, crowdedDelay) // there may be more by then
		}
		return left, nil
	}
	// A claim without an object counts as lost while a Machine carries its label, and would be
	// recreated.
	var labelled clusterv1.MachineList
	err = t.Reader.List(ctx, &labelled, client.InNamespace(c.Namespace), client.Limit(1),
		client.MatchingLabels{clusterv1.ClusterNameLabel: c.Spec.ClusterName, v1alpha1.ClaimLabel: c.Spec.ClaimID})
	if err != nil {
		return 0, fmt.Errorf("looking for a Machine of an ended claim: %w", err)
	}
	if len(labelled.Items) > 0 {
		return time.Minute, nil
	}
	if err := t.Client.Delete(ctx, c, preconditions(c.UID, c.ResourceVersion)); err != nil {
		return 0, fmt.Errorf("forgetting a claim that ended long ago: %w", err)
	}
	t.countEnded(clusterOf(c), -1)
	return 0, nil
}
