// Package fleet maintains the view of the served Clusters: how much each of them has, and what is
// known about its shim.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Interval is how often changes are shown. Everything that happens to a Cluster meanwhile is one
// change.
const Interval = time.Second

// All is where the cache has every Cluster. A cache keeps objects by Cluster otherwise, but this
// view is of all of them.
var All = types.NamespacedName{}

// Key is the key of a Cluster in the cache.
func Key(cluster types.NamespacedName) string { return cluster.String() }

// Name is the Cluster that a key of the cache belongs to.
func Name(key string) types.NamespacedName {
	namespace, name, err := toolscache.SplitMetaNamespaceKey(key)
	if err != nil {
		return types.NamespacedName{Name: key} // not a key of [Key]
	}
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// Equal reports whether two Clusters are the same to every caller.
func Equal(a, b *agentv1alpha1.Cluster) bool { return proto.Equal(a, b) }

// Spokes knows the shims. [spokes.Spokes] implements it.
type Spokes interface {
	// Read reads all Spokes from the hub.
	Read(ctx context.Context) error
	// Status returns what was last read or written of a Cluster's Spoke. It is false if there is
	// none.
	Status(cluster types.NamespacedName) (v1alpha1.SpokeStatus, bool)
}

// Config configures a [Fleet].
type Config struct {
	// Cache receives the Clusters. REQUIRED.
	Cache *watchcache.Cache[*agentv1alpha1.Cluster]
	// NodeGroups, Machines and Claims are what is counted. REQUIRED.
	NodeGroups *watchcache.Cache[*agentv1alpha1.NodeGroup]
	Machines   *watchcache.Cache[*agentv1alpha1.Machine]
	Claims     *watchcache.Cache[*agentv1alpha1.Claim]
	// Spokes knows the shims. Its owner calls [Fleet.Changed] when it knows something new.
	// REQUIRED.
	Spokes Spokes
	// Gone is called with each Cluster that is gone, or that is not served. It must not block. Nil
	// does nothing.
	Gone func(cluster types.NamespacedName)
	// Scope determines which Clusters are served.
	Scope hub.Scope
	// Clock provides the time. Nil means the system clock.
	Clock clock.WithTicker
}

// Fleet fills the cache. Use [New].
type Fleet struct {
	Config

	reader client.Reader

	mu      sync.Mutex
	changed map[types.NamespacedName]struct{}
}

// New returns a fleet. It fills its cache once it has been set up with a manager.
func New(c Config) *Fleet {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	f := &Fleet{Config: c, changed: map[types.NamespacedName]struct{}{}}
	c.NodeGroups.Observe(f.Changed)
	c.Machines.Observe(f.Changed)
	c.Claims.Observe(f.Changed)
	return f
}

// Changed records that the view of a Cluster has to be updated. It does not block.
func (f *Fleet) Changed(cluster types.NamespacedName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed[cluster] = struct{}{}
}

// SetupWithManager adds the fleet to the manager.
func (f *Fleet) SetupWithManager(mgr manager.Manager) error {
	f.reader = mgr.GetClient()
	err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		informer, err := mgr.GetCache().GetInformer(ctx, &clusterv1.Cluster{})
		if err != nil {
			return fmt.Errorf("following Clusters: %w", err)
		}
		// The handler lives as long as the cache.
		registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    f.event,
			UpdateFunc: func(_, object any) { f.event(object) },
			DeleteFunc: f.event,
		})
		if err != nil {
			return fmt.Errorf("following Clusters: %w", err)
		}
		return f.run(ctx, registration.HasSynced)
	}))
	if err != nil {
		return fmt.Errorf("adding the fleet: %w", err)
	}
	return nil
}

func (f *Fleet) event(object any) {
	key, err := toolscache.DeletionHandlingMetaNamespaceKeyFunc(object)
	if err != nil {
		return // the cache holds nothing without a key
	}
	f.Changed(Name(key))
}

// run shows the Clusters until the context ends.
func (f *Fleet) run(ctx context.Context, listed func() bool) error {
	if !toolscache.WaitForCacheSync(ctx.Done(), listed) {
		return nil // only because ctx ended
	}
	for _, ready := range []<-chan struct{}{f.NodeGroups.Ready(), f.Machines.Ready(), f.Claims.Ready()} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
		}
	}
	// Otherwise, a watcher would see every shim come back after each start of the agent. If the hub
	// has no Spokes, or does not answer, the Clusters are shown without their shims.
	if err := f.Spokes.Read(ctx); err != nil && ctx.Err() == nil {
		log.FromContext(ctx).Info("the Clusters are shown without their shims until the Spokes can be read", "cause", err.Error())
	}
	f.Show(ctx)
	f.Cache.SetReady()
	ticker := f.Clock.NewTicker(Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			f.Show(ctx)
		}
	}
}

// Show shows the Clusters that have changed.
func (f *Fleet) Show(ctx context.Context) {
	f.mu.Lock()
	changed := f.changed
	f.changed = map[types.NamespacedName]struct{}{}
	f.mu.Unlock()
	for cluster := range changed {
		err := panics.Confined(log.FromContext(ctx), panics.Objects, "the view of a Cluster is outdated because of a bug in the agent",
			func() error { return f.show(ctx, cluster) }, "cluster", cluster.String())
		if _, panicked := errors.AsType[*panics.Error](err); panicked {
			continue // it is tried again when the Cluster changes
		}
		if err != nil {
			log.FromContext(ctx).Error(err, "the view of a Cluster cannot be updated", "cluster", cluster.String())
			f.Changed(cluster)
		}
	}
}

func (f *Fleet) show(ctx context.Context, name types.NamespacedName) error {
	cluster := &clusterv1.Cluster{}
	err := f.reader.Get(ctx, name, cluster)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the Cluster: %w", err)
	}
	if apierrors.IsNotFound(err) || !f.Scope.Contains(name) {
		f.Cache.Remove(All, Key(name))
		if f.Gone != nil {
			f.Gone(name)
		}
		return nil
	}
	message := protoconv.FleetCluster(cluster)
	if status, known := f.Spokes.Status(name); known {
		message.Shim = protoconv.Shim(&status)
	}
	message.NodeGroups, message.Machines = int32(f.NodeGroups.Count(name)), int32(f.Machines.Count(name))
	f.Claims.Each(name, func(claim *agentv1alpha1.Claim) {
		switch claim.GetPhase() {
		case agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		case agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING:
			message.PendingClaims++
			message.Claims++
		default:
			message.Claims++
		}
	})
	f.Cache.Set(All, Key(name), message)
	return nil
}
