package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// ReleaseOptions qualify a release.
type ReleaseOptions struct {
	// Drained means that the caller has drained the Node.
	Drained bool
	// Failed means that the Machine did not come or is unusable: it is not handed over, and its
	// group cools down.
	Failed bool
	// Reason is for the claim's history; may be empty.
	Reason string
	// Holders are the holders that the caller may act as. Another holder's claim is not released.
	Holders Holders

	unless func(*v1alpha1.MachineClaim) bool // leaves the claim as it is; nil for never
}

// restoreFromLabel recreates a claim's object if it was lost while a Machine carries the claim's
// label, and returns it. Such a claim must neither be made again on another node group nor be
// reported as gone. It returns [ErrNotFound] if there is no such Machine. A label that the caches
// do not show yet is too recent for its claim to be lost.
func (e *Engine) restoreFromLabel(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	if paused, err := e.paused(ctx, types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}); err != nil || paused {
		return nil, cmp.Or(err, ErrNotFound)
	}
	var labelled clusterv1.MachineList
	err := e.Client.List(ctx, &labelled, client.InNamespace(key.Namespace), selecting(e.Indexes.Cluster, clusterv1.ClusterNameLabel, key.Cluster),
		client.MatchingLabels{v1alpha1.ClaimLabel: key.ID}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the claim's Machines: %w", err)
	}
	for i := range labelled.Items {
		m := &labelled.Items[i]
		if !protocol.Alive(m) || m.Spec.ClusterName != key.Cluster {
			continue
		}
		switch err := e.recreate(ctx, m); {
		case apierrors.IsNotFound(err): // only the cache still shows it
			continue
		case err != nil && !apierrors.IsAlreadyExists(err):
			return nil, conflictOr(err, "recreating the claim from its Machine")
		}
		return e.getUncached(ctx, key)
	}
	return nil, ErrNotFound
}

// Release requests the end of a claim and returns the claim. For an unknown claim it makes a
// tombstone, so that a late call to create the claim is refused. Errors: [ErrForeignHolder],
// [*TooManyError], [ErrConflict], [ErrClusterPaused], for an unknown claim [ErrUnknownCluster], or
// the API server's.
func (e *Engine) Release(ctx context.Context, key Key, o ReleaseOptions) (*v1alpha1.MachineClaim, error) {
	reason := v1alpha1.Event{Reason: protocol.ReasonReleaseRequested, Message: o.Reason}
	if reason.Message == "" {
		reason.Message = "the holder released it"
	}
	return e.release(ctx, key, o, reason)
}

func (e *Engine) release(ctx context.Context, key Key, o ReleaseOptions, why v1alpha1.Event) (*v1alpha1.MachineClaim, error) {
	for attempt := 0; ; attempt++ {
		var c *v1alpha1.MachineClaim
		var err error
		if attempt == 0 && o.unless == nil { // unless may depend on more than the claim
			c, err = e.asCached(ctx, key)
		}
		if c == nil && err == nil {
			c, err = e.find(ctx, key)
		}
		if errors.Is(err, ErrNotFound) {
			c, err := e.createTombstone(ctx, key, why.Message)
			if errors.Is(err, ErrConflict) && attempt < 5 {
				continue // it was made just now
			}
			return c, err
		}
		if err != nil {
			return nil, err
		}
		if c.CurrentPhase() == v1alpha1.PhaseEnded {
			return c, nil
		}
		if err := o.Holders.check(c); err != nil {
			return nil, err
		}
		if o.unless != nil && o.unless(c) {
			return c, nil
		}
		if c.Status.Returned {
			e.group(c.Namespace, c.Spec.NodeGroup).kick(ctx)
			return c, nil // its Machine is the user's, or about to be
		}
		if c.Status.Phase == v1alpha1.PhaseReleasing && (c.Status.Drained || !o.Drained) {
			e.group(c.Namespace, c.Spec.NodeGroup).kick(ctx)
			return c, nil
		}
		if err := e.beginRelease(ctx, c, o, why); err != nil {
			return nil, err
		}
		switch err := e.writeRequest(ctx, c); {
		case err == nil:
			return c, nil
		case lostRace(err) && attempt < 5:
			continue
		default:
			e.unreserve(c, true)
			return nil, conflictOr(err, "releasing the claim")
		}
	}
}

// beginRelease changes the claim, without writing it, to one that is being released. Errors:
// [*TooManyError] if the release has to wait, or the API server's.
func (e *Engine) beginRelease(ctx context.Context, c *v1alpha1.MachineClaim, o ReleaseOptions, why v1alpha1.Event) error {
	if c.Status.Phase != v1alpha1.PhaseReleasing {
		if err := e.mayRelease(ctx, c); err != nil {
			return err
		}
		now := metav1.NewTime(e.Clock.Now())
		c.Status.Phase, c.Status.ReleasedAt = v1alpha1.PhaseReleasing, &now
		if o.Failed {
			c.Status.FailedAt, c.Status.FailureClass = &now, string(failures.Reported)
		}
		e.note(c, why)
	}
	c.Status.Drained = o.Drained
	return nil
}

// writeRequest writes what a caller requests for its claim, and starts a run of the claim's node
// group. Errors: [ErrClusterPaused], because a move that is in progress would lose what only the
// status has until the ledger has it, or the API server's.
func (e *Engine) writeRequest(ctx context.Context, c *v1alpha1.MachineClaim) error {
	switch paused, err := e.paused(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}); {
	case err != nil:
		return err
	case paused:
		return ErrClusterPaused
	}
	if err := e.writeStatus(ctx, c); err != nil {
		return err
	}
	e.group(c.Namespace, c.Spec.NodeGroup).kick(ctx)
	return nil
}

// lostRace reports whether a write failed because the claim has changed or been replaced since it
// was read.
func lostRace(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// Return requests the end of a claim and leaves its Machine to the user. It returns the claim, also
// one that has ended. Errors: [ErrNotFound], [ErrForeignHolder], [*NotReturnableError],
// [ErrConflict], [ErrUnknownCluster], [ErrClusterPaused], [ErrRestoring], or the API server's.
func (e *Engine) Return(ctx context.Context, key Key, may Holders, why string) (*v1alpha1.MachineClaim, error) {
	for attempt := 0; ; attempt++ {
		c, err := e.Get(ctx, key)
		if err != nil {
			return nil, err
		}
		if c.CurrentPhase() == v1alpha1.PhaseEnded {
			return c, nil
		}
		if err := may.check(c); err != nil {
			return nil, err
		}
		switch {
		case c.Status.Returned:
			e.group(c.Namespace, c.Spec.NodeGroup).kick(ctx)
			return c, nil
		case c.CurrentPhase() == v1alpha1.PhaseReleasing:
			return nil, &NotReturnableError{Message: "the claim is being released; its Machine is already being removed, which cannot be undone"}
		case c.CurrentPhase() == v1alpha1.PhasePending:
			return nil, &NotReturnableError{Message: "the claim has no Machine yet; release it instead"}
		}
		if dying, err := e.machineDies(ctx, c); err != nil {
			return nil, err
		} else if dying {
			return nil, &NotReturnableError{Message: "its Machine is being deleted by another actor"}
		}
		c.Status.Returned = true
		e.note(c, v1alpha1.Event{
			Reason: protocol.ReasonReturnRequested, Message: cmp.Or(why, "the holder returns its Machine to the user"),
		})
		switch err := e.writeRequest(ctx, c); {
		case err == nil:
			return c, nil
		case lostRace(err) && attempt < 5:
			continue
		default:
			return nil, conflictOr(err, "returning the claim's Machine")
		}
	}
}

// machineDies reports whether the claim's Machine is being deleted or is gone. It reads from the
// cache, and from the API server if the cache lacks the Machine.
func (e *Engine) machineDies(ctx context.Context, c *v1alpha1.MachineClaim) (bool, error) {
	if c.Status.Machine == nil {
		return false, nil
	}
	var m clusterv1.Machine
	found, err := e.get(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Status.Machine.Name}, &m)
	return err == nil && (!found || m.UID != c.Status.Machine.UID || !protocol.Alive(&m)), err
}
