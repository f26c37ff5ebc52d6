package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// maxIncrease is the maximum number of nodes that one call adds. By default, the cluster-autoscaler
// adds at most 1,000 in each loop. A group without a max size would take two billion.
const maxIncrease = 10000

// Origin identifies a call in the records of the claims that it makes. It may be empty.
type Origin struct{ RequestID, TraceID string }

// Increase makes delta claims on a group, and returns when all of them are durable. The request has
// no ID, so a repeated call adds as many again: a caller that got no answer must read the target
// size first. If the engine refuses claims after it has made others, because a limit or a quota is
// used up, Increase makes no further ones, and returns nil: the target size says how many there
// are. After any other error, those that were made are released, and the target size is as before;
// only an agent that ends meanwhile leaves some of them. Errors: [*InvalidError],
// [*UnknownGroupError], [*NoRoomError], and those of [claims.Engine.Create].
func (s *Scaler) Increase(ctx context.Context, name types.NamespacedName, id string, delta int32, origin Origin) error {
	if delta <= 0 {
		return &InvalidError{Field: "delta", Message: "must be 1 or more"}
	}
	if delta > maxIncrease {
		return &InvalidError{Field: "delta", Message: fmt.Sprintf("must be at most %d; call again for more", maxIncrease)}
	}
	var deployment string
	err := s.inGroup(name, id, func(c *cluster, g *group) error {
		deployment = g.Key.Name
		if err := refused(g); err != nil {
			return err
		}
		if size := c.size(id); int64(size)+int64(delta) > int64(g.max()) {
			return &NoRoomError{Message: fmt.Sprintf("node group %s has room for %d nodes of the cluster-autoscaler and has %d; %d more were requested",
				id, g.max(), size, delta)}
		}
		return nil
	})
	if err != nil {
		return err
	}

	ids := make([]string, 0, delta)
	for range delta {
		ids = append(ids, uuid.NewString())
	}
	var (
		mu      sync.Mutex
		made    []string // or maybe made
		refusal error
	)
	work, running := errgroup.WithContext(ctx)
	work.SetLimit(atOnce)
	for _, claim := range ids {
		work.Go(func() error {
			mu.Lock()
			over := refusal != nil
			mu.Unlock()
			if over || running.Err() != nil {
				return running.Err()
			}
			err := confined(running, func() error {
				return s.create(running, claims.Request{
					Namespace: name.Namespace, Cluster: name.Name, ID: claim, Holder: Holder, DisplayName: "cluster-autoscaler",
					Candidates: []string{deployment}, Holders: own, RequestID: origin.RequestID, TraceID: origin.TraceID,
				})
			})
			mu.Lock()
			defer mu.Unlock()
			if isRefusal(err) {
				refusal = err
				return nil
			}
			made = append(made, claim)
			return err
		})
	}
	err = work.Wait()
	switch {
	case err != nil:
		s.undo(ctx, name, id, made)
		return err
	case len(made) == 0:
		return refusal
	case refusal != nil:
		log.FromContext(ctx).Info("made fewer claims than requested", "nodeGroup", id, "made", len(made), "requested", delta, "why", refusal.Error())
	}
	s.note(name, id, made, false)
	return nil
}

// create makes a claim. A call that lost a race is repeated at once.
func (s *Scaler) create(ctx context.Context, r claims.Request) error {
	return retry.OnError(retry.DefaultBackoff, func(err error) bool { return errors.Is(err, claims.ErrConflict) && ctx.Err() == nil }, func() error {
		_, err := s.config.Engine.Create(ctx, r)
		return err
	})
}

// confined turns a panic into an error of the call: its claims are made and released in other
// goroutines, whose panics an errgroup does not recover.
func confined(ctx context.Context, do func() error) error {
	return panics.Confined(log.FromContext(ctx), panics.Calls, "a call failed because of a bug in the agent", do)
}

// isRefusal reports whether an error means that the claim was not created.
func isRefusal(err error) bool {
	var (
		noRoom  *claims.NoRoomError
		refused *claims.RefusedError
		unknown *claims.UnknownGroupError
		tooMany *claims.TooManyError
	)
	return errors.As(err, &noRoom) || errors.As(err, &refused) || errors.As(err, &unknown) || errors.As(err, &tooMany)
}

// undo releases the claims of a call that failed. The call's context may have ended.
func (s *Scaler) undo(ctx context.Context, name types.NamespacedName, group string, ids []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := s.release(ctx, name, group, ids, "the call that made it failed as a whole"); err != nil {
		log.FromContext(ctx).Error(err, "releasing the claims of a call that failed; they count for the target size", "nodeGroup", group)
	}
}

// Delete releases the claims of the given nodes and no others. All nodes must belong to the group.
// Claims that are being released or have ended are left as they are. Cluster API drains the nodes.
// Errors: [*UnknownGroupError], [*ForeignNodeError], and those of [claims.Engine.Release]: some of
// the claims may have been released then, and the call can be repeated.
func (s *Scaler) Delete(ctx context.Context, name types.NamespacedName, id string, nodes []Node) error {
	var release []string
	err := s.inGroup(name, id, func(c *cluster, _ *group) error {
		for _, node := range nodes {
			claim := c.claimOf(name, node)
			if claim == "" || c.groupOf(claim) != id || c.view.claims[claim].GetReturned() {
				return &ForeignNodeError{Node: node.describe(), Group: id}
			}
			release = append(release, claim)
		}
		for _, claim := range release {
			c.dismiss(c.view.claims[claim])
		}
		release = slices.DeleteFunc(release, func(claim string) bool {
			known := c.view.claims[claim]
			return known != nil && !live(known) || c.recent[claim].released
		})
		return nil
	})
	if err != nil {
		return err
	}
	slices.Sort(release)
	return s.release(ctx, name, id, slices.Compact(release), "the cluster-autoscaler deleted the node")
}

func (n Node) describe() string {
	if n.ProviderID == "" || n.ProviderID == n.Name {
		return short(n.Name)
	}
	return fmt.Sprintf("%s (%s)", short(n.Name), short(n.ProviderID))
}

// Decrease lowers the target size of a group. Claims that have failed stop counting first. Then
// claims that have no node are released: those without a machine first, then those whose machine
// has no provider ID. Others come last, because the hub may not see a node that is there. Of each
// kind, the newest come first. delta is negative. Errors: [*InvalidError], [*UnknownGroupError],
// [*ExistingNodesError], and those of [claims.Engine.Release].
func (s *Scaler) Decrease(ctx context.Context, name types.NamespacedName, id string, delta int32) error {
	if delta >= 0 {
		return &InvalidError{Field: "delta", Message: "must be negative"}
	}
	var open []string
	left := -int(delta)
	err := s.inGroup(name, id, func(c *cluster, g *group) error {
		failures := c.failures(g, s.config.Clock.Now())
		failures = failures[:min(len(failures), left)]
		for claim, r := range c.recent {
			if r.group == id && c.correction(claim, r) > 0 {
				open = append(open, claim)
			}
		}
		for _, kind := range []func(*agentv1alpha1.Machine) bool{
			func(m *agentv1alpha1.Machine) bool { return m == nil },
			func(m *agentv1alpha1.Machine) bool { return m != nil && m.GetProviderId() == "" },
			func(m *agentv1alpha1.Machine) bool { return m.GetProviderId() != "" },
		} {
			for _, claim := range slices.Backward(g.claims) {
				machine := claim.GetMachine()
				if live(claim) && !c.recent[claim.GetClaimId()].released && machine.GetNodeName() == "" && kind(machine) {
					open = append(open, claim.GetClaimId())
				}
			}
		}
		if left -= len(failures); len(open) < left {
			return &ExistingNodesError{Open: len(open) + len(failures), Asked: -int(delta)}
		}
		for _, failed := range failures {
			c.dismiss(failed)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.release(ctx, name, id, open[:left], "the cluster-autoscaler lowered the target size")
}

// release releases claims of a group. Every one is tried, whatever happens to the others.
func (s *Scaler) release(ctx context.Context, name types.NamespacedName, group string, ids []string, why string) error {
	var (
		work     errgroup.Group
		mu       sync.Mutex
		failed   []error
		released []string
	)
	work.SetLimit(atOnce)
	for _, id := range ids {
		work.Go(func() error {
			err := confined(ctx, func() error {
				_, err := s.config.Engine.Release(ctx, claims.Key{Namespace: name.Namespace, Cluster: name.Name, ID: id},
					claims.ReleaseOptions{Reason: why, Holders: own})
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
			} else {
				released = append(released, id)
			}
			return nil
		})
	}
	_ = work.Wait()
	s.note(name, group, released, true)
	return errors.Join(failed...)
}

// note keeps what was done until the view shows it.
func (s *Scaler) note(name types.NamespacedName, group string, ids []string, released bool) {
	c := s.of(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		c.recent[id] = recent{group: group, released: released, at: s.config.Clock.Now()}
	}
}

// own lets the engine act on the cluster-autoscaler's own claims alone.
func own(holder string) bool { return holder == Holder }
