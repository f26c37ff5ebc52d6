// Package catalogue holds what Karpenter core may schedule on: for each ClusterAPINodeClass, the
// node groups that its selector matches, as instance types.
//
// One goroutine ([Catalogue.Start]) builds an immutable snapshot whenever one of its inputs
// changes: a node group streamed by the agent, a NodeClass, a group that turned out to be full, or
// a zone in which a machine was found. Readers only load the newest snapshot from an atomic
// pointer, because core reads it several times a second, sequentially, and once under a lock of its
// own. While the agent is unreachable the last snapshot stays in use.
package catalogue

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/patrickmn/go-cache"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/sets"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/panics"
)

// ErrNotSynced means that the agent has not been reached since the process started, so nothing is
// known.
var ErrNotSynced = errors.New("the agent's node groups are not known yet")

// NodeGroups is a mirror of the agent's node groups.
type NodeGroups interface {
	Get(id string) (*agentv1alpha1.NodeGroup, bool)
	List() ([]*agentv1alpha1.NodeGroup, uint64)
	State() agentclient.State
	Synced() <-chan struct{}
	Subscribe() *agentclient.Subscription
}

// Catalogue holds what can be scheduled on. It is safe for concurrent use.
type Catalogue struct {
	// OfferFullReservations offers full reservations as available with nothing left, which core's
	// feature gates TerminateFirstDrift and TerminateFirstRepair require. Without these gates it
	// does harm: pods that prefer a reservation, or whose first NodePool has only reservations,
	// would wait for a full one instead of running elsewhere. Set it before [Catalogue.Start].
	OfferFullReservations bool

	clock       clock.PassiveClock
	nodeGroups  NodeGroups
	kube        client.Reader
	unavailable *cache.Cache // core brings the library, for its providers' offerings
	snapshot    atomic.Pointer[Snapshot]
	wake        chan struct{}
	newGroup    func(*agentv1alpha1.NodeGroup) (*instancetype.Group, error)

	mu        sync.Mutex
	zones     map[string]sets.Set[string]
	untainted sets.Set[string] // node groups whose last Node joined without the taint karpenter.sh/unregistered
	listeners []chan struct{}

	// Used only by the building goroutine.
	groups            map[*agentv1alpha1.NodeGroup]prepared
	unavailableBefore sets.Set[string] // node groups that the agent reported as unavailable at the last build
	views             map[string]view
	built             instancetype.Built
	gone              map[string]time.Time
	prices            map[string]float64

	memories *memories
}

// view is how a NodeClass sees groups, with a cache of its result for each group.
type view struct {
	kubelet *v1alpha1.Kubelet
	price   v1alpha1.PricePolicy
	sees    *instancetype.View
	err     error
	groups  map[*instancetype.Group]*instancetype.Group
}

type prepared struct {
	group *instancetype.Group
	err   error
}

// New returns a catalogue of the node groups in the mirror. kube reads ClusterAPINodeClasses and
// NodeClaims from a cache. unavailableTTL is how long [Catalogue.MarkUnavailable] and
// [Catalogue.MarkRefused] apply.
func New(clk clock.PassiveClock, nodeGroups NodeGroups, kube client.Reader, unavailableTTL time.Duration) *Catalogue {
	c := &Catalogue{
		clock:      clk,
		nodeGroups: nodeGroups,
		kube:       kube,
		// The cache that core and its providers use for such offerings.
		unavailable:       cache.New(unavailableTTL, min(unavailableTTL, time.Second)),
		wake:              make(chan struct{}, 1),
		newGroup:          instancetype.NewGroup,
		zones:             map[string]sets.Set[string]{},
		groups:            map[*agentv1alpha1.NodeGroup]prepared{},
		unavailableBefore: sets.New[string](),
		views:             map[string]view{},
		built:             instancetype.Built{},
		gone:              map[string]time.Time{},
		prices:            map[string]float64{},
		memories:          newMemories(),
		untainted:         sets.New[string](),
	}
	c.unavailable.OnEvicted(func(string, any) { c.Refresh() })
	return c
}

// Snapshot returns the newest snapshot, or nil before the first one.
func (c *Catalogue) Snapshot() *Snapshot { return c.snapshot.Load() }

// MarkUnavailable marks the groups as unavailable for a while, because core has no memory of failed
// launches and would request them again at once. The agent soon reports the same in its node
// groups' availability; the mark covers the time until then.
//
// The mark is removed once the agent has reported the group as unavailable and then as available.
// An older report that arrives after the refusal may remove the mark too early, at the cost of one
// more refused claim.
func (c *Catalogue) MarkUnavailable(groupIDs ...string) {
	for _, id := range groupIDs {
		c.unavailable.SetDefault(id, struct{}{})
	}
	c.Refresh()
}

// MarkRefused records requirements that no node group could serve. For a while, the offerings that
// match them are unavailable to NodeClaims of this NodePool. Core has no memory of this either, and
// would plan the same Node again ten seconds later.
func (c *Catalogue) MarkRefused(nodePool string, requirements scheduling.Requirements) {
	if nodePool == "" {
		return // created by a user: core does not plan it again
	}
	c.unavailable.SetDefault("refused "+nodePool+" "+instancetype.RequirementsKey(requirements), refusal{nodePool, requirements})
	c.Refresh()
}

type refusal struct {
	nodePool     string
	requirements scheduling.Requirements
}

// refusals returns the refused requirements by NodePool.
func (c *Catalogue) refusals() map[string][]scheduling.Requirements {
	refused := map[string][]scheduling.Requirements{}
	for _, item := range c.unavailable.Items() {
		if r, ok := item.Object.(refusal); ok {
			refused[r.nodePool] = append(refused[r.nodePool], r.requirements)
		}
	}
	return refused
}

// Available reports whether a claim on the group may succeed now.
func (c *Catalogue) Available(group *instancetype.Group) bool {
	if !group.Available {
		return false
	}
	_, marked := c.unavailable.Get(group.ID)
	return !marked
}

// ObserveZone records the zone of a machine whose group has no zone.
func (c *Catalogue) ObserveZone(groupID, zone string) {
	if zone == instancetype.ZoneNone {
		return
	}
	c.mu.Lock()
	known, ok := c.zones[groupID]
	if !ok {
		known = sets.New[string]()
		c.zones[groupID] = known
	}
	isNew := !known.Has(zone)
	known.Insert(zone)
	c.mu.Unlock()
	if isNew {
		c.Refresh()
	}
}

// ObserveTaint records whether a Node of the group joined with the taint that keeps pods away until
// it is registered. It only serves to report a problem. The record is not kept when another process
// becomes active: the problem is reported again once the next Node of the group has joined without
// the taint.
func (c *Catalogue) ObserveTaint(groupID string, tainted bool) {
	c.mu.Lock()
	known := c.untainted.Has(groupID)
	if tainted {
		c.untainted.Delete(groupID)
	} else {
		c.untainted.Insert(groupID)
	}
	c.mu.Unlock()
	if known == tainted {
		c.Refresh()
	}
}

// NodePool returns the NodePool with the name, from the cache.
func (c *Catalogue) NodePool(ctx context.Context, name string) (*karpv1.NodePool, error) {
	nodePool := &karpv1.NodePool{}
	if err := c.kube.Get(ctx, client.ObjectKey{Name: name}, nodePool); err != nil {
		return nil, fmt.Errorf("reading NodePool %s: %w", name, err)
	}
	return nodePool, nil
}

// GroupLabels returns the labels of a node group's Nodes, or nil if the group is not known. Callers
// must not modify them.
func (c *Catalogue) GroupLabels(groupID string) map[string]string {
	if snapshot := c.Snapshot(); snapshot != nil {
		if group, ok := snapshot.Group(groupID); ok {
			return group.Labels
		}
	}
	return nil
}

// IsGone reports whether the agent does not have the node group now. It is false while the agent is
// unreachable. Unlike a [Snapshot], it never lags behind the agent's newest view.
func (c *Catalogue) IsGone(groupID string) bool {
	connected := c.nodeGroups.State().Connected // read first: the view may be the one before an outage
	_, exists := c.nodeGroups.Get(groupID)
	return connected && !exists
}

// Refresh requests a new snapshot, which is built asynchronously.
func (c *Catalogue) Refresh() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Changes returns a channel that receives a value after a snapshot that differs from the previous
// one. It is never closed.
func (c *Catalogue) Changes() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	listener := make(chan struct{}, 1)
	c.listeners = append(c.listeners, listener)
	return listener
}

// zonal returns the names of the NodePools that require or assign a zone, by NodeClass.
func zonal(nodePools []karpv1.NodePool) map[string][]string {
	names := map[string][]string{}
	for i := range nodePools {
		template := &nodePools[i].Spec.Template
		ref := template.Spec.NodeClassRef
		if ref == nil || ref.Group != v1alpha1.Group {
			continue
		}
		required := slices.ContainsFunc(template.Spec.Requirements, func(r karpv1.NodeSelectorRequirementWithMinValues) bool { return isZone(r.Key) })
		if required || slices.ContainsFunc(slices.Collect(maps.Keys(template.Labels)), isZone) {
			names[ref.Name] = append(names[ref.Name], nodePools[i].Name)
		}
	}
	return names
}

// isZone reports whether the key of a label is that of the zone, by its present or an old name.
func isZone(key string) bool {
	return key == corev1.LabelTopologyZone || karpv1.NormalizedLabels[key] == corev1.LabelTopologyZone
}

// Watch refreshes the catalogue on changes of NodeClasses and NodePools, and on changes of
// NodeClaims that add or remove a memory.
func (c *Catalogue) Watch(ctx context.Context, informers ctrlcache.Informers) error {
	if err := c.memories.watch(ctx, informers, c.Refresh); err != nil {
		return fmt.Errorf("watching NodeClaims: %w", err)
	}
	for _, kind := range []client.Object{&v1alpha1.ClusterAPINodeClass{}, &karpv1.NodePool{}} {
		informer, err := informers.GetInformer(ctx, kind, ctrlcache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T: %w", kind, err)
		}
		_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { c.Refresh() },
			UpdateFunc: func(before, after any) {
				// The catalogue does not depend on any status.
				was, wasOne := before.(client.Object)
				is, isOne := after.(client.Object)
				if !wasOne || !isOne || was.GetGeneration() != is.GetGeneration() {
					c.Refresh()
				}
			},
			DeleteFunc: func(any) { c.Refresh() },
		})
		if err != nil {
			return fmt.Errorf("watching %T: %w", kind, err)
		}
	}
	return nil
}

// NeedLeaderElection returns false, so that the manager runs the catalogue in every replica and a
// new leader starts with a full one.
func (c *Catalogue) NeedLeaderElection() bool { return false }

// Start builds snapshots until ctx is done. It first waits for the node groups, and for the
// NodeClaims that [Catalogue.Watch] watches.
func (c *Catalogue) Start(ctx context.Context) error {
	if !toolscache.WaitForCacheSync(ctx.Done(), c.memories.synced) {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-c.nodeGroups.Synced():
	}
	subscription := c.nodeGroups.Subscribe()
	defer subscription.Close()
	const retryDelay = time.Second
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-subscription.Changed():
			subscription.Take()
		case <-c.wake:
		case <-retry.C:
		}
		if err := panics.Confined(func() error { return c.rebuild(ctx) }); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "making the catalogue of node groups")
			retry.Reset(retryDelay)
		}
	}
}

func (c *Catalogue) rebuild(ctx context.Context) error {
	start := time.Now()
	classes := &v1alpha1.ClusterAPINodeClassList{}
	if err := c.kube.List(ctx, classes); err != nil {
		return fmt.Errorf("listing NodeClasses: %w", err)
	}
	nodePools := &karpv1.NodePoolList{}
	if err := c.kube.List(ctx, nodePools, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("listing NodePools: %w", err)
	}
	remembered := c.memories.all()
	zones := c.observedZones(remembered)
	groups, unusable, invalid := c.prepare(ctx)
	snapshot := newSnapshot(groups, unusable, invalid, instancetype.Conditions{
		Available:     c.frozenAvailability(groups),
		OfferFull:     c.OfferFullReservations,
		ObservedZones: func(g *instancetype.Group) []string { return zones[g.ID] },
	})
	snapshot.refused, snapshot.zonal = c.refusals(), zonal(nodePools.Items)
	c.mu.Lock()
	snapshot.untainted = c.untainted.Clone()
	c.mu.Unlock()
	c.addRemembered(snapshot, remembered)
	built, views := instancetype.Built{}, make(map[string]view, len(classes.Items))
	for i := range classes.Items {
		class := &classes.Items[i]
		before, next := c.viewOf(class)
		snapshot.add(class, next.sees, next.err, func(g *instancetype.Group) *instancetype.Group {
			seen, ok := before[g]
			if !ok {
				seen = next.sees.Of(g)
			}
			next.groups[g] = seen
			return seen
		}, c.snapshot.Load(), c.built, built)
		views[class.Name] = next
	}
	// snapshot.equal compares only the instance types for NodePools without taints.
	changed := !maps.Equal(built, c.built) || c.snapshot.Load() == nil || !snapshot.equal(c.snapshot.Load())
	c.built, c.views = built, views
	c.snapshot.Store(snapshot)
	rebuildSeconds.Observe(time.Since(start).Seconds(), nil)
	nodeGroups.Set(float64(len(groups)), nil)
	nodeGroupsUnusable.Set(float64(len(unusable)), nil)
	if changed {
		c.notify()
	}
	return nil
}

// viewOf returns the view of a NodeClass without groups, and the groups of its previous view if
// the view is unchanged.
func (c *Catalogue) viewOf(class *v1alpha1.ClusterAPINodeClass) (before map[*instancetype.Group]*instancetype.Group, next view) {
	known, ok := c.views[class.Name]
	if !ok || known.price != class.Spec.Price || !equality.Semantic.DeepEqual(known.kubelet, class.Spec.Kubelet) {
		known = view{kubelet: class.Spec.Kubelet, price: class.Spec.Price}
		known.sees, known.err = instancetype.NewView(&class.Spec)
	}
	before, known.groups = known.groups, make(map[*instancetype.Group]*instancetype.Group, len(known.groups))
	return before, known
}

// prepare returns the usable and the unusable groups, each ordered by id, and the problems of
// groups of both kinds by id.
func (c *Catalogue) prepare(ctx context.Context) (
	groups []*instancetype.Group, unusable []*agentv1alpha1.NodeGroup, invalid map[string]error,
) {
	sources, _ := c.nodeGroups.List()
	known := make(map[*agentv1alpha1.NodeGroup]prepared, len(sources))
	groups = make([]*instancetype.Group, 0, len(sources))
	invalid = map[string]error{}
	unavailableNow := sets.New[string]()
	for _, source := range sources {
		if !wire.AvailabilityFor(source, v1alpha1.Holder).GetAvailable() {
			unavailableNow.Insert(source.GetId())
		} else if c.unavailableBefore.Has(source.GetId()) {
			c.unavailable.Delete(source.GetId())
		}
		p, ok := c.groups[source]
		if !ok {
			p.group, p.err = c.group(ctx, source)
			if p.err != nil {
				log.FromContext(
					ctx,
				).Info(
					"part of a node group's description cannot be used",
					"node-group",
					source.GetId(),
					"usable",
					p.group != nil,
					"reason",
					p.err.Error(),
				)
			}
		}
		known[source] = p
		if p.group != nil {
			groups = append(groups, p.group)
		} else {
			unusable = append(unusable, source)
		}
		if p.err != nil {
			invalid[source.GetId()] = p.err
		}
	}
	c.groups, c.unavailableBefore = known, unavailableNow
	return groups, unusable, invalid
}

// group is [instancetype.NewGroup], but reports a node group on which it panics as unusable.
func (c *Catalogue) group(ctx context.Context, source *agentv1alpha1.NodeGroup) (group *instancetype.Group, err error) {
	bug := panics.Confined(func() error {
		group, err = c.newGroup(source)
		return nil
	})
	if bug != nil {
		log.FromContext(ctx).Error(bug, "a node group cannot be used because of a bug in the shim", "node-group", source.GetId())
		return nil, fmt.Errorf("node group %s: an internal error of the shim; its log has the cause", source.GetId())
	}
	return group, err
}

// frozenAvailability captures the current results of [Catalogue.Available], because a snapshot is
// immutable.
func (c *Catalogue) frozenAvailability(groups []*instancetype.Group) func(*instancetype.Group) bool {
	available := make(map[string]bool, len(groups))
	for _, g := range groups {
		available[g.ID] = c.Available(g)
	}
	// A NodeClass may see the group as less available than the agent reports, never as more.
	return func(g *instancetype.Group) bool { return g.Available && available[g.ID] }
}

func (c *Catalogue) notify() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, listener := range c.listeners {
		select {
		case listener <- struct{}{}:
		default:
		}
	}
}
