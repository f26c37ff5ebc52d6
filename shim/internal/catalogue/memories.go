package catalogue

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	toolscache "k8s.io/client-go/tools/cache"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// memory is a NodeClaim's record of where its machine came from.
type memory struct {
	nodeClass, nodeGroup             string
	instanceType, zone, capacityType string
}

// memoryOf returns the NodeClaim's record, and false while it has no machine yet.
func memoryOf(nodeClaim *karpv1.NodeClaim) (memory, bool) {
	ref := nodeClaim.Spec.NodeClassRef
	if ref == nil || ref.Group != v1alpha1.Group || nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation] == "" {
		return memory{}, false
	}
	m := memory{
		nodeClass:    ref.Name,
		nodeGroup:    nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation],
		instanceType: nodeClaim.Labels[corev1.LabelInstanceTypeStable],
		zone:         nodeClaim.Labels[corev1.LabelTopologyZone],
		capacityType: nodeClaim.Labels[karpv1.CapacityTypeLabelKey],
	}
	return m, m.instanceType != "" && m.capacityType != ""
}

// memories counts the distinct records of all NodeClaims. There are few of them however many
// NodeClaims there are, so that a snapshot need not iterate over the NodeClaims.
type memories struct {
	synced func() bool // whether all NodeClaims that existed at the start have been seen

	mu    sync.Mutex
	of    map[string]memory // by NodeClaim name
	count map[memory]int
}

// newMemories returns the memories of a process that does not watch NodeClaims.
func newMemories() *memories {
	return &memories{synced: func() bool { return true }, of: map[string]memory{}, count: map[memory]int{}}
}

// watch keeps the memories up to date, and calls changed when one is added or removed.
func (m *memories) watch(ctx context.Context, informers ctrlcache.Informers, changed func()) error {
	informer, err := informers.GetInformer(ctx, &karpv1.NodeClaim{}, ctrlcache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	see := func(object any) {
		if nodeClaim, is := object.(*karpv1.NodeClaim); is && m.see(nodeClaim) {
			changed()
		}
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    see,
		UpdateFunc: func(_, now any) { see(now) },
		DeleteFunc: func(object any) {
			if last, unseen := object.(toolscache.DeletedFinalStateUnknown); unseen {
				object = last.Obj
			}
			if nodeClaim, is := object.(*karpv1.NodeClaim); is && m.forget(nodeClaim.Name) {
				changed()
			}
		},
	})
	if err != nil {
		return err
	}
	m.synced = registration.HasSynced
	return nil
}

// see records what a NodeClaim remembers, and reports whether that adds or removes a memory.
func (m *memories) see(nodeClaim *karpv1.NodeClaim) bool {
	now, some := memoryOf(nodeClaim)
	if !some {
		return m.forget(nodeClaim.Name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before, known := m.of[nodeClaim.Name]
	if known && before == now {
		return false
	}
	changed := known && m.drop(before)
	m.of[nodeClaim.Name] = now
	m.count[now]++
	return changed || m.count[now] == 1
}

func (m *memories) forget(nodeClaim string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	before, known := m.of[nodeClaim]
	delete(m.of, nodeClaim)
	return known && m.drop(before)
}

// drop decrements the count of a memory, and reports whether it was the last. mu must be held.
func (m *memories) drop(one memory) bool {
	if m.count[one]--; m.count[one] > 0 {
		return false
	}
	delete(m.count, one)
	return true
}

func (m *memories) all() []memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.count))
}

// addRemembered adds to the snapshot what NodeClaims remember, with the last known price of each
// node group, and when the agent stopped knowing the group.
//
// Both are only in memory, and each replica has its own. After a start, a group that is gone counts
// as gone since then, so that its Nodes drift later, but never earlier. Its price is unknown until
// it is back: core does not replace its Nodes with cheaper ones. A price that was stored at the
// launch could be too high by now, and make core replace a Node with a dearer one.
func (c *Catalogue) addRemembered(snapshot *Snapshot, memories []memory) {
	gone, prices := map[string]time.Time{}, map[string]float64{}
	for _, m := range memories {
		if price, ok := c.prices[m.nodeGroup]; ok {
			prices[m.nodeGroup] = price
		}
		if group, ok := snapshot.Group(m.nodeGroup); ok && group.PriceRefused == "" {
			prices[m.nodeGroup] = group.Offered
		}
		if _, ok := snapshot.Source(m.nodeGroup); !ok {
			since, before := c.gone[m.nodeGroup]
			gone[m.nodeGroup] = lo.Ternary(before, since, c.clock.Now())
		}
		price, known := prices[m.nodeGroup]
		snapshot.remembered[m.nodeClass] = append(snapshot.remembered[m.nodeClass], instancetype.Remembered{
			InstanceType: m.instanceType, Zone: m.zone, CapacityType: m.capacityType, Price: price, Known: known,
		})
	}
	for nodeClass, remembered := range snapshot.remembered {
		snapshot.remembered[nodeClass] = instancetype.Remember(remembered)
	}
	snapshot.gone = gone
	c.gone, c.prices = gone, prices
}

// observedZones returns the zones of each node group's machines: those observed since the process
// started, and those that NodeClaims remember.
func (c *Catalogue) observedZones(memories []memory) map[string][]string {
	zones := map[string]sets.Set[string]{}
	for _, m := range memories {
		if m.zone == instancetype.ZoneNone {
			continue
		}
		if zones[m.nodeGroup] == nil {
			zones[m.nodeGroup] = sets.New[string]()
		}
		zones[m.nodeGroup].Insert(m.zone)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for group, observed := range c.zones {
		zones[group] = zones[group].Union(observed)
	}
	return lo.MapValues(zones, func(z sets.Set[string], _ string) []string { return sets.List(z) })
}
