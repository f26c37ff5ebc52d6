// Package catalogue keeps what Karpenter core may schedule on: for each ClusterAPINodeClass, the node groups that its selector
// matches, as instance types.
//
// One goroutine ([Catalogue.Start]) makes an immutable snapshot whenever something it depends on changes: a node group as the
// agent streams it, a node class, a group that turned out to be full, a zone that a machine turned out to be in. Readers load
// the newest snapshot from an atomic pointer and do nothing else, as core asks several times a second, sequentially, and once
// under a lock of its own. While the agent is away the last snapshot stays.
package catalogue

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/patrickmn/go-cache"
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
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// ErrNotSynced says that the agent has not been heard of since the process started, so nothing is known.
var ErrNotSynced = errors.New("the agent's node groups are not known yet")

// NodeGroups is a mirror of the agent's node groups.
type NodeGroups interface {
	List() ([]*agentv1alpha1.NodeGroup, uint64)
	Synced() <-chan struct{}
	Subscribe() *agentclient.Subscription
}

// Catalogue answers what can be scheduled on. It is safe for concurrent use.
type Catalogue struct {
	// OfferFullReservations has full reservations offered as available with nothing left, as core's feature gates TerminateFirstDrift and
	// TerminateFirstRepair need it. Without them it does harm: pods that prefer a reservation, or that a NodePool of nothing else would
	// take first, wait for it when it is full instead of running elsewhere. To be set before [Catalogue.Start].
	OfferFullReservations bool

	clock       clock.PassiveClock
	nodeGroups  NodeGroups
	kube        client.Reader
	unavailable *cache.Cache
	snapshot    atomic.Pointer[Snapshot]
	wake        chan struct{}

	mu        sync.Mutex
	zones     map[string]sets.Set[string]
	untainted sets.Set[string] // node groups whose last Node joined without the taint for unregistered Nodes
	listeners []chan struct{}

	// Used by the building goroutine alone.
	groups            map[*agentv1alpha1.NodeGroup]prepared
	unavailableBefore sets.Set[string] // node groups that the agent said were unavailable when the catalogue was last built
	views             map[string]view
	built             instancetype.Built
	gone              map[string]time.Time
	prices            map[string]float64

	memories *memories
}

// view is how a node class sees groups, and what it made of each so far.
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

// New returns a catalogue of the node groups in the mirror. kube reads ClusterAPINodeClasses and NodeClaims, from a cache.
// unavailableTTL is how long a group is left alone after [Catalogue.MarkUnavailable].
func New(clk clock.PassiveClock, nodeGroups NodeGroups, kube client.Reader, unavailableTTL time.Duration) *Catalogue {
	c := &Catalogue{
		clock:             clk,
		nodeGroups:        nodeGroups,
		kube:              kube,
		unavailable:       cache.New(unavailableTTL, min(unavailableTTL, time.Second)),
		wake:              make(chan struct{}, 1),
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

// Snapshot returns the newest snapshot, and nil before the first one.
func (c *Catalogue) Snapshot() *Snapshot { return c.snapshot.Load() }

// MarkUnavailable leaves the groups alone for a while, so that core, which has no memory of failed launches, does not ask for
// them again at once. The agent says the same soon after, through its node groups' availability; this covers the time until
// then. Once the agent has said so and then that a group is available again, the mark is removed. What it said shortly before it refused may
// come later, and remove a mark too early: that costs one more refused claim.
func (c *Catalogue) MarkUnavailable(groupIDs ...string) {
	for _, id := range groupIDs {
		c.unavailable.SetDefault(id, struct{}{})
	}
	c.Refresh()
}

// MarkRefused leaves alone for a while what no node group served: for NodeClaims of this NodePool, offerings that meet the
// requirements. Core has no memory of it either, and would plan the same Node again ten seconds later.
func (c *Catalogue) MarkRefused(nodePool string, requirements scheduling.Requirements) {
	if nodePool == "" {
		return // a NodeClaim that a person made: nothing plans it again
	}
	c.unavailable.SetDefault("refused "+nodePool+" "+requirements.String(), refusal{nodePool, requirements})
	c.Refresh()
}

type refusal struct {
	nodePool     string
	requirements scheduling.Requirements
}

// refusals returns what was refused, by NodePool.
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

// ObserveZone records the zone that a machine of a group which names none turned out to be in.
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

// ObserveTaint records whether a Node of a group joined with the taint that keeps pods away until it is registered.
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

// GroupLabels returns the labels that Nodes of a node group have, nil when the group is not known. They may not be changed.
func (c *Catalogue) GroupLabels(groupID string) map[string]string {
	if snapshot := c.Snapshot(); snapshot != nil {
		if group, ok := snapshot.Group(groupID); ok {
			return group.Labels
		}
	}
	return nil
}

// Refresh asks for a new snapshot, soon.
func (c *Catalogue) Refresh() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Changes returns a channel that receives a value after a snapshot that differs from the one before. It is never closed.
func (c *Catalogue) Changes() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	listener := make(chan struct{}, 1)
	c.listeners = append(c.listeners, listener)
	return listener
}

// Watch makes changes of node classes refresh the catalogue, and NodeClaims that remember what none has remembered before.
func (c *Catalogue) Watch(ctx context.Context, informers ctrlcache.Informers) error {
	if err := c.memories.watch(ctx, informers, c.Refresh); err != nil {
		return fmt.Errorf("watching node claims: %w", err)
	}
	informer, err := informers.GetInformer(ctx, &v1alpha1.ClusterAPINodeClass{}, ctrlcache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watching node classes: %w", err)
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { c.Refresh() },
		UpdateFunc: func(before, after any) {
			// The shim itself writes the status, which says nothing new here.
			was, wasOne := before.(client.Object)
			is, isOne := after.(client.Object)
			if !wasOne || !isOne || was.GetGeneration() != is.GetGeneration() {
				c.Refresh()
			}
		},
		DeleteFunc: func(any) { c.Refresh() },
	})
	return err
}

// NeedLeaderElection makes the manager run the catalogue in every process, so that a new leader starts with a full one.
func (c *Catalogue) NeedLeaderElection() bool { return false }

// Start makes snapshots until ctx is done, from the time on when the NodeClaims are known that [Catalogue.Watch] was called for.
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
		if err := c.rebuild(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "making the catalogue of node groups")
			retry.Reset(retryDelay)
		}
	}
}

func (c *Catalogue) rebuild(ctx context.Context) error {
	start := time.Now()
	classes := &v1alpha1.ClusterAPINodeClassList{}
	if err := c.kube.List(ctx, classes); err != nil {
		return fmt.Errorf("listing node classes: %w", err)
	}
	remembered := c.memories.all()
	zones := c.observedZones(remembered)
	groups, unusable, invalid := c.prepare(ctx)
	snapshot := newSnapshot(groups, unusable, invalid, instancetype.Conditions{
		Available:     c.frozenAvailability(groups),
		OfferFull:     c.OfferFullReservations,
		ObservedZones: func(g *instancetype.Group) []string { return zones[g.ID] },
	})
	snapshot.refused = c.refusals()
	c.mu.Lock()
	snapshot.untainted = c.untainted.Clone()
	c.mu.Unlock()
	c.remember(snapshot, remembered)
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
	changed := len(built) != len(c.built) || c.snapshot.Load() == nil || !snapshot.equal(c.snapshot.Load())
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

// viewOf returns the view of a node class, without groups, and what it made of groups before, if it is still the same.
func (c *Catalogue) viewOf(class *v1alpha1.ClusterAPINodeClass) (before map[*instancetype.Group]*instancetype.Group, next view) {
	known, ok := c.views[class.Name]
	if !ok || known.price != class.Spec.Price || !equality.Semantic.DeepEqual(known.kubelet, class.Spec.Kubelet) {
		known = view{kubelet: class.Spec.Kubelet, price: class.Spec.Price}
		known.sees, known.err = instancetype.NewView(&class.Spec)
	}
	before, known.groups = known.groups, make(map[*instancetype.Group]*instancetype.Group, len(known.groups))
	return before, known
}

// prepare returns the usable groups and the unusable ones, each ordered by id, and by id what is wrong with groups of both
// kinds.
func (c *Catalogue) prepare(ctx context.Context) (
	groups []*instancetype.Group, unusable []*agentv1alpha1.NodeGroup, invalid map[string]error,
) {
	sources, _ := c.nodeGroups.List()
	known := make(map[*agentv1alpha1.NodeGroup]prepared, len(sources))
	groups = make([]*instancetype.Group, 0, len(sources))
	invalid = map[string]error{}
	unavailableNow := sets.New[string]()
	for _, source := range sources {
		if !source.GetAvailability().GetAvailable() {
			unavailableNow.Insert(source.GetId())
		} else if c.unavailableBefore.Has(source.GetId()) {
			c.unavailable.Delete(source.GetId())
		}
		p, ok := c.groups[source]
		if !ok {
			p.group, p.err = instancetype.NewGroup(source)
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

// frozenAvailability is what [Catalogue.Available] says now: a snapshot never changes its mind.
func (c *Catalogue) frozenAvailability(groups []*instancetype.Group) func(*instancetype.Group) bool {
	available := make(map[string]bool, len(groups))
	for _, g := range groups {
		available[g.ID] = c.Available(g)
	}
	// A node class may see the group as less available than it is, never as more.
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
