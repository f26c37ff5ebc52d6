// Package autoscaler shows the node groups of a Cluster in the terms of the cluster-autoscaler, and
// scales them by claims. It knows nothing of how the cluster-autoscaler calls.
//
// # Sizes
//
// The size of a node group is the number of claims that the cluster-autoscaler holds on it. The
// user's own machines and the claims of other holders are invisible: they only lower the max size.
// The min size is 0.
//
// # Groups
//
// The groups are those whose MachineDeployment names the holder [Holder] in the annotation
// [v1alpha1.HolderAnnotation]. No other holder may claim from them. All other groups do not exist
// here.
//
// # State
//
// Claims hold all persistent state. Memory holds only claims created moments ago, which the views
// do not show yet, and which failures the cluster-autoscaler has acknowledged; without them it
// acknowledges again.
package autoscaler

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Holder is the holder of the cluster-autoscaler's claims.
const Holder = v1alpha1.ClusterAutoscaler

const (
	// unlimited is the max size of a group that has none.
	unlimited = math.MaxInt32
	// failureLife is how long a failed claim is shown as an instance that could not be created,
	// unless it is deleted before.
	failureLife = 10 * time.Minute
	// recentLife is how long the views may take to show a claim that was made or released here.
	recentLife = time.Minute
	// atOnce is how many claims of one call are made or released at the same time.
	atOnce = 8
	// undoTimeout bounds the release of the claims of a call that failed.
	undoTimeout = 15 * time.Second
)

// Engine creates and releases claims. [claims.Engine] implements it.
type Engine interface {
	Create(ctx context.Context, request claims.Request) (*v1alpha1.MachineClaim, error)
	Release(ctx context.Context, key claims.Key, options claims.ReleaseOptions) (*v1alpha1.MachineClaim, error)
	UnpausedCluster(ctx context.Context, cluster types.NamespacedName) (*clusterv1.Cluster, error)
}

// Config configures a [Scaler].
type Config struct {
	// Engine is the claim engine. REQUIRED.
	Engine Engine
	// Groups are the node groups of the holder [Holder]. REQUIRED.
	Groups *watchcache.Cache[nodegroup.NodeGroup]
	// Claims are the claims of every holder. REQUIRED.
	Claims *watchcache.Cache[*agentv1alpha1.Claim]
	// Clock provides the time. Nil means the system clock.
	Clock clock.PassiveClock
}

// Scaler shows and scales node groups. It is safe for concurrent use.
type Scaler struct {
	config Config

	// mu protects the map alone. Each Cluster has a lock of its own: what is done under that takes
	// longer, the more claims the Cluster has, and no other Cluster waits for it.
	mu       sync.Mutex
	clusters map[types.NamespacedName]*cluster
}

// cluster is what is kept in memory of a Cluster. mu protects the rest.
type cluster struct {
	mu   sync.Mutex
	view *view
	// recent are the claims that were made or released here and that the view may not show yet, by
	// ID.
	recent map[string]recent
	// dismissed are the failed claims that the cluster-autoscaler has deleted, with the time from
	// which they are not shown any more in any case.
	dismissed map[string]time.Time
}

type recent struct {
	group    string
	released bool
	at       time.Time
}

// New returns a scaler.
func New(c Config) *Scaler {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	return &Scaler{config: c, clusters: map[types.NamespacedName]*cluster{}}
}

// UnknownGroupError means that the Cluster has no such group that the cluster-autoscaler may use.
type UnknownGroupError struct{ ID string }

func (e *UnknownGroupError) Error() string {
	return fmt.Sprintf("%q is not a node group of the cluster-autoscaler in this Cluster; "+
		"its MachineDeployment needs the label %s and the annotation %s: %s", short(e.ID), v1alpha1.MemberLabel, v1alpha1.HolderAnnotation, Holder)
}

// maxQuoted is how many bytes of a caller's text an error quotes.
const maxQuoted = 256

// short returns the beginning of a caller's text, for messages.
func short(text string) string {
	if len(text) > maxQuoted {
		text = text[:maxQuoted] + "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// InvalidError means that a request makes no sense.
type InvalidError struct {
	// Field is the field of the request.
	Field, Message string
}

func (e *InvalidError) Error() string { return e.Field + ": " + e.Message }

// NoRoomError means that a group cannot grow by as much as requested.
type NoRoomError struct{ Message string }

func (e *NoRoomError) Error() string { return e.Message }

// ForeignNodeError means that a node is none of the cluster-autoscaler's claims on a group. Nothing
// has been deleted.
type ForeignNodeError struct{ Node, Group string }

func (e *ForeignNodeError) Error() string {
	return fmt.Sprintf("node %s belongs to no claim of the cluster-autoscaler on node group %s; nothing is deleted", e.Node, e.Group)
}

// ExistingNodesError means that the size could only be lowered by deleting nodes.
type ExistingNodesError struct {
	// Open is how many claims have no node.
	Open, Asked int
}

func (e *ExistingNodesError) Error() string {
	return fmt.Sprintf("only %d claims of the node group have no node, and the target size is to be lowered by %d; delete nodes instead",
		e.Open, e.Asked)
}

// Size are the bounds of a group.
type Size struct {
	// ID is the ID of the group.
	ID string
	// Max is up to how many nodes the cluster-autoscaler may have in the group. While the group
	// takes no claims it is the present number.
	Max int32
	// Debug describes the group, for people.
	Debug string
}

// Check returns nil if the Cluster exists and is not paused, and the views can be relied upon. It
// asks the API server. Errors: those of [claims.Engine.UnpausedCluster], [watchcache.ErrNotReady],
// [watchcache.ErrClosed].
func (s *Scaler) Check(ctx context.Context, name types.NamespacedName) error {
	if _, err := s.config.Engine.UnpausedCluster(ctx, name); err != nil {
		return err
	}
	return s.read(name, func(*cluster) error { return nil })
}

// Groups returns the bounds of all groups of a Cluster, ordered by ID. Errors:
// [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) Groups(name types.NamespacedName) (sizes []Size, err error) {
	err = s.read(name, func(c *cluster) error {
		sizes = make([]Size, 0, len(c.view.order))
		targets := c.targets(s.config.Clock.Now())
		for _, g := range c.view.order {
			sizes = append(sizes, g.size(targets[g.ID()]))
		}
		return nil
	})
	return sizes, err
}

func (g *group) size(target int32) Size {
	maximum := g.max()
	debug := fmt.Sprintf("MachineDeployment %s: %d of the user, %d of other holders, %d of the cluster-autoscaler", g.ID(), g.Floor, g.others, target)
	if g.leaving > 0 {
		debug += fmt.Sprintf(", %d leaving", g.leaving)
	}
	if refusal := g.Limits.Refusal(); refusal != nil {
		maximum = target
		debug += fmt.Sprintf("; it accepts no claims now (%s): %s", refusal.Reason, refusal.Message)
	}
	return Size{ID: g.ID(), Max: max(maximum, 0), Debug: strings.ToValidUTF8(debug, "?")}
}

// max is how many claims of the cluster-autoscaler the group has room for.
func (g *group) max() int32 {
	if g.Limits.Max == nil {
		return unlimited
	}
	return max(*g.Limits.Max-g.Floor-g.others-g.leaving, 0)
}

// TargetSize returns how many claims the cluster-autoscaler has on a group, with those that
// [Scaler.Instances] returns as failed. Errors: [*UnknownGroupError], [watchcache.ErrNotReady],
// [watchcache.ErrClosed].
func (s *Scaler) TargetSize(name types.NamespacedName, id string) (target int32, err error) {
	err = s.inGroup(name, id, func(c *cluster, _ *group) error {
		target = c.target(id, s.config.Clock.Now())
		return nil
	})
	return target, err
}

// State is how far an instance is.
type State int

// These are the states of an [Instance].
const (
	Running State = iota
	Creating
	Deleting
)

// Instance is a machine of a claim, or the claim itself if it has no machine yet.
type Instance struct {
	// ID is the provider ID of the Node, exactly, or [InstanceID] as long as there is none.
	ID    string
	State State
	// Failure is why the instance will not come. It is nil if it may come.
	Failure *Failure
}

// Failure is why an instance will not come.
type Failure struct {
	// OutOfResources means that capacity or a quota is used up, so that another group may have
	// more.
	OutOfResources bool
	// Code is one CamelCase word, and Message a sentence.
	Code, Message string
}

// Instances returns the instances of the cluster-autoscaler's claims on a group, oldest first:
// those of live claims, those being deleted, and those that failed and were neither deleted nor are
// ten minutes old. Errors: [*UnknownGroupError], [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) Instances(name types.NamespacedName, id string) (instances []Instance, err error) {
	err = s.inGroup(name, id, func(c *cluster, g *group) error {
		instances = make([]Instance, 0, len(g.claims))
		for _, claim := range g.claims {
			if instance, shown := c.instance(name, claim, s.config.Clock.Now()); shown {
				instances = append(instances, instance)
			}
		}
		for recentID, r := range c.recent {
			if r.group == id && !r.released {
				instances = append(instances, Instance{ID: InstanceID(name, recentID), State: Creating})
			}
		}
		return nil
	})
	return instances, err
}

// Node identifies a node of the Cluster.
type Node struct {
	// ProviderID may be empty.
	ProviderID string
	Name       string
}

// GroupOf returns the bounds of the group that a node belongs to. found is false if the
// cluster-autoscaler must leave the node alone: it is the user's, or another holder's. Errors:
// [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) GroupOf(name types.NamespacedName, node Node) (size Size, found bool, err error) {
	err = s.read(name, func(c *cluster) error {
		id := c.claimOf(name, node)
		if claim := c.view.claims[id]; claim != nil && !ours(claim) && node.ProviderID != InstanceID(name, id) {
			return nil // its machine is gone, or was returned to the user
		}
		var g *group
		if g, found = c.view.groups[c.groupOf(id)]; found {
			size = g.size(c.target(g.ID(), s.config.Clock.Now()))
		}
		return nil
	})
	return size, found, err
}

// inGroup calls use with a group while nothing changes.
func (s *Scaler) inGroup(name types.NamespacedName, id string, use func(*cluster, *group) error) error {
	return s.read(name, func(c *cluster) error {
		g, found := c.view.groups[id]
		if !found {
			return &UnknownGroupError{ID: id}
		}
		return use(c, g)
	})
}

// ForgetCluster drops what is kept of a Cluster that is gone.
func (s *Scaler) ForgetCluster(cluster types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.clusters, cluster)
}

// of returns what is kept of a Cluster.
func (s *Scaler) of(name types.NamespacedName) *cluster {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.clusters[name]
	if c == nil {
		c = &cluster{recent: map[string]recent{}, dismissed: map[string]time.Time{}}
		s.clusters[name] = c
	}
	return c
}

// read calls use with a Cluster's present view. use must be fast: other calls for the Cluster wait.
func (s *Scaler) read(name types.NamespacedName, use func(*cluster) error) error {
	c := s.of(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.view.current(s.config, name) {
		fresh, err := viewOf(s.config, name)
		if err != nil {
			return err
		}
		c.view = fresh
	}
	c.settle(s.config.Clock.Now())
	err := use(c)
	if len(c.view.groups)+len(c.view.claims)+len(c.recent)+len(c.dismissed) == 0 {
		s.ForgetCluster(name) // callers may name Clusters that do not exist
	}
	return err
}

// refused returns the error for a group that does not take claims.
func refused(g *group) error {
	refusal := g.Limits.Refusal()
	switch {
	case refusal == nil:
		return nil
	case refusal.Reason.NoRoom():
		return &claims.NoRoomError{Candidates: []eligibility.Refusal{named(g, *refusal)}}
	}
	return &claims.RefusedError{Candidates: []eligibility.Refusal{named(g, *refusal)}}
}

func named(g *group, refusal eligibility.Refusal) eligibility.Refusal {
	refusal.NodeGroup = g.Key.Name
	return refusal
}
