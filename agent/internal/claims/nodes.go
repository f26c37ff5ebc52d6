package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	// notesPerSync bounds the writes with which one [Engine.Sync] records its report of Nodes. The
	// rest follows with the next report.
	notesPerSync = 200
	// absenceRenewed is how much newer a report of absence must be than the one recorded on the
	// claim to replace it.
	absenceRenewed = time.Minute
)

// nodesOf returns, by provider ID, whether the reported Node is registered: false if nothing runs
// on it yet. A Node that is not in the map is absent if the report is complete, else unknown.
func nodesOf(reports []NodeReport) map[string]bool {
	registered := make(map[string]bool, len(reports))
	for _, r := range reports {
		// If two Nodes share a provider ID, the one that pods may run on counts.
		registered[r.ProviderID] = registered[r.ProviderID] || !r.Unregistered
	}
	return registered
}

// noteNodes records what the holder reports of its Nodes, so that every agent can read it, also one
// that was not running then. It records this on the claims, and on Machines that none of these
// claims has. It changes the claims in place as it writes them. A write that fails is left to the
// next report. nodes and before are what the holder reports now and reported before; see [nodesOf].
// running are the ids of the claims whose Nodes are registered.
func (e *Engine) noteNodes(
	ctx context.Context, r *liveSet, taken time.Time, claims []v1alpha1.MachineClaim, nodes, before map[string]bool,
) (running map[string]bool, err error) {
	var machines clusterv1.MachineList
	err = e.Client.List(ctx, &machines, client.InNamespace(r.Namespace),
		selecting(e.Indexes.Cluster, clusterv1.ClusterNameLabel, r.Cluster), client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the Cluster's Machines: %w", err)
	}
	byID := make(map[string]*v1alpha1.MachineClaim, len(claims))
	noted := map[*v1alpha1.MachineClaim]bool{}
	running = map[string]bool{}
	woken := map[string]bool{} // node groups for which the report may matter that no object of the hub shows
	for i := range claims {
		byID[claims[i].Spec.ClaimID] = &claims[i]
	}
	// Records that protect a Machine are written first.
	var registered, absent, renewed []note
	for i := range machines.Items {
		m := &machines.Items[i]
		if m.Spec.ProviderID == "" || m.Spec.ClusterName != r.Cluster {
			continue
		}
		runs, reported := nodes[m.Spec.ProviderID]
		c := byID[protocol.ClaimOf(m)]
		if c != nil && runs {
			running[c.Spec.ClaimID] = true
		}
		unclaimed := c == nil && protocol.Alive(m) && protocol.ClaimOf(m) == "" && m.Annotations[v1alpha1.FloorAnnotation] == ""
		if unclaimed && (reported && !runs || runs && !before[m.Spec.ProviderID] && protocol.HasNode(m)) {
			// It may be the floor's, or a waiting claim may or may not have it.
			woken[m.Labels[clusterv1.MachineDeploymentNameLabel]] = true
		}
		switch {
		case c == nil && runs:
			if wanted, err := e.wantsNote(ctx, m); err != nil {
				return nil, err
			} else if wanted {
				registered = append(registered, e.noteOnMachine(m))
			}
		case c == nil, noted[c], !r.covers(c):
		case runs && c.Status.NodeRegisteredAt == nil:
			noted[c] = true
			registered = append(registered, e.noteRegistered(c))
		case reported && c.Status.NodeAbsentAt != nil:
			noted[c] = true
			registered = append(registered, e.noteOnClaim(c, func(s *v1alpha1.MachineClaimStatus) { s.NodeAbsentAt = nil }))
		case !reported && r.NodesComplete && mayMissNode(c, m):
			news, err := e.missesNode(ctx, c, m, taken)
			if err != nil {
				return nil, err
			}
			if !news {
				continue
			}
			noted[c] = true
			n := e.noteOnClaim(c, func(s *v1alpha1.MachineClaimStatus) { at := metav1.NewTime(taken); s.NodeAbsentAt = &at })
			if c.Status.NodeAbsentAt == nil {
				absent = append(absent, n)
			} else {
				renewed = append(renewed, n)
			}
		}
	}
	e.writeNotes(ctx, slices.Concat(registered, absent, renewed))
	delete(woken, "") // of Machines without a node group
	for group := range woken {
		e.wake(types.NamespacedName{Namespace: r.Namespace, Name: group}, 0)
	}
	return running, nil
}

// mayMissNode reports whether neither Cluster API nor the holder has seen the Machine's Node yet.
func mayMissNode(c *v1alpha1.MachineClaim, m *clusterv1.Machine) bool {
	return !protocol.HasNode(m) && c.Status.NodeRegisteredAt == nil
}

// missesNode reports whether the Machine's absence from a complete list of Nodes, read after taken,
// is worth recording: the Machine should have joined by then, and the claim has no record of the
// absence that is recent enough.
func (e *Engine) missesNode(ctx context.Context, c *v1alpha1.MachineClaim, m *clusterv1.Machine, taken time.Time) (bool, error) {
	var md clusterv1.MachineDeployment
	err := e.Client.Get(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.NodeGroup}, &md)
	if apierrors.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("reading MachineDeployment %s: %w", c.Spec.NodeGroup, err)
	}
	deadline := e.Failure.NodeDeadlineOf(&md, c)
	if deadline == 0 {
		return false, nil
	}
	read := taken.Truncate(time.Second) // with the precision that is written
	return read.After(m.CreationTimestamp.Add(deadline)) &&
		(c.Status.NodeAbsentAt == nil || read.Sub(c.Status.NodeAbsentAt.Time) >= absenceRenewed), nil
}

// wantsNote reports whether the registration of its Node must be recorded on a Machine that none of
// the holder's claims has: the Machine does not show it, and its node group is one that the agent
// acts on.
func (e *Engine) wantsNote(ctx context.Context, m *clusterv1.Machine) (bool, error) {
	if _, has := m.Annotations[v1alpha1.NodeRegisteredAtAnnotation]; has || protocol.HasNode(m) || !protocol.Alive(m) {
		return false, nil
	}
	name := m.Labels[clusterv1.MachineDeploymentNameLabel]
	if name == "" {
		return false, nil
	}
	var md clusterv1.MachineDeployment
	if err := e.Client.Get(ctx, types.NamespacedName{Namespace: m.Namespace, Name: name}, &md); apierrors.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("reading MachineDeployment %s: %w", name, err)
	}
	_, member := md.Labels[v1alpha1.MemberLabel]
	_, ledger := md.Annotations[v1alpha1.LedgerAnnotation]
	return member || ledger, nil
}

// note is one write of [Engine.noteNodes].
type note struct {
	of    client.Object
	write func(context.Context) error
}

func (e *Engine) noteOnClaim(c *v1alpha1.MachineClaim, change func(*v1alpha1.MachineClaimStatus)) note {
	return note{of: c, write: func(ctx context.Context) error {
		after := c.DeepCopy()
		change(&after.Status)
		if err := e.updateStatus(ctx, after); err != nil {
			return err
		}
		*c = *after
		return nil
	}}
}

// noteRegistered records on the claim that its Machine's Node is registered. If the write loses a
// race it is repeated and not left to the next report: that one may come from a cluster that was
// restored, and then the claim would be collected for lack of this record.
func (e *Engine) noteRegistered(c *v1alpha1.MachineClaim) note {
	write := e.noteOnClaim(c, func(s *v1alpha1.MachineClaimStatus) {
		now := metav1.NewTime(e.Clock.Now())
		s.NodeRegisteredAt, s.NodeAbsentAt = &now, nil
	}).write
	return note{of: c, write: func(ctx context.Context) error {
		return retry.RetryOnConflict(retry.DefaultRetry, func() error {
			err := write(ctx)
			if err == nil {
				observeJoined(e.Clock, c)
			}
			if !apierrors.IsConflict(err) {
				return err
			}
			var now v1alpha1.MachineClaim
			if failed := e.Reader.Get(ctx, client.ObjectKeyFromObject(c), &now); failed != nil {
				return failed
			}
			if ref := now.Status.Machine; ref == nil || c.Status.Machine == nil || ref.UID != c.Status.Machine.UID {
				return nil // it has another Machine, which the report does not cover
			}
			*c = now
			return err
		})
	}}
}

func (e *Engine) noteOnMachine(m *clusterv1.Machine) note {
	return note{of: m, write: func(ctx context.Context) error {
		after := m.DeepCopy()
		metav1.SetMetaDataAnnotation(&after.ObjectMeta, v1alpha1.NodeRegisteredAtAnnotation, e.Clock.Now().UTC().Format(time.RFC3339))
		return e.patchMachine(ctx, m, after)
	}}
}

// writeNotes does the writes, at most [notesPerSync] of them.
func (e *Engine) writeNotes(ctx context.Context, notes []note) {
	var work errgroup.Group
	work.SetLimit(e.parallel)
	for _, n := range notes[:min(len(notes), notesPerSync)] {
		write := func() error {
			err := recovered(ctx, func() error { return n.write(ctx) })
			actionsTotal.WithLabelValues("note-node", result(err)).Inc()
			lost := apierrors.IsConflict(err) || apierrors.IsNotFound(err)
			if err != nil && !lost && !errors.Is(err, context.Canceled) {
				log.FromContext(ctx).Error(err, "keeping what the holder reports of a Node; the next report repeats it", "name", n.of.GetName())
			}
			return nil
		}
		if e.parallel == 1 {
			_ = write() // in place
		} else {
			work.Go(write)
		}
	}
	_ = work.Wait() // no write returns an error
}
