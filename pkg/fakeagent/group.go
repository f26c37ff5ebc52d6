package fakeagent

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// plainPrice is the price of a node group that was added without one.
const plainPrice = 1

// group is a node group and its replicas. Each replica is a machine, whether or not its Machine
// object exists yet.
type group struct {
	id        string
	cluster   clusterKey
	described *agentv1alpha1.NodeGroup // as the test described it
	machines  []*machine               // oldest first; their number is the replicas
	pending   int                      // claims that wait for a machine
	blocked   *agentv1alpha1.Availability
	steps     *Infrastructure // nil for the agent's
	failures  []MachineFailure
	made      int // machines created for claims, including removed ones
}

// AddNodeGroup adds a node group as the API shows it, and returns its ID. Only Name is REQUIRED.
// Cluster defaults to [DefaultCluster]. The replicas are running machines of the user's own, which
// cannot be claimed. Capacity, instance type, architecture, operating system, capacity type and
// rollout strategy have defaults. A group without a price gets an estimate, because the agent shows
// no group without a price. AddNodeGroup panics if the group exists.
func (a *Agent) AddNodeGroup(described *agentv1alpha1.NodeGroup) string {
	described = proto.CloneOf(described)
	if described.GetName() == "" {
		panic("fakeagent: a node group needs a name")
	}
	if described.GetCluster() == nil {
		described.Cluster = DefaultCluster()
	}
	cluster := keyOf(described.GetCluster())
	described.Id = cluster.namespace + "/" + described.GetName()
	if described.GetInstanceType() == "" {
		described.InstanceType = described.GetName()
	}
	if described.GetCapacity() == nil {
		described.Capacity = map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"}
	}
	if described.GetArchitecture() == "" {
		described.Architecture = "amd64"
	}
	if described.GetOperatingSystem() == "" {
		described.OperatingSystem = "linux"
	}
	if described.GetCapacityType() == agentv1alpha1.CapacityType_CAPACITY_TYPE_UNSPECIFIED {
		described.CapacityType = agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND
	}
	if described.GetPrice() == nil {
		estimatePrice(described)
	}
	if described.GetRolloutStrategy() == agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_UNSPECIFIED {
		described.RolloutStrategy = agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ROLLING_UPDATE
	}
	a.edit(func() {
		if _, ok := a.groups[described.GetId()]; ok {
			panic(fmt.Sprintf("fakeagent: node group %s exists", described.GetId()))
		}
		if described.GetCreatedAt() == nil {
			described.CreatedAt = timestamppb.New(a.now())
		}
		a.ensureCluster(cluster)
		g := &group{id: described.GetId(), cluster: cluster}
		g.describe(described)
		a.groups[g.id] = g
		for range described.GetReplicas() {
			a.addOwned(g)
		}
		a.touch(g)
	})
	return described.GetId()
}

func estimatePrice(group *agentv1alpha1.NodeGroup) {
	group.Price = &agentv1alpha1.Price{PerHour: plainPrice}
	if group.GetSources() == nil {
		group.Sources = map[string]*agentv1alpha1.ValueSource{}
	}
	group.Sources["price"] = &agentv1alpha1.ValueSource{Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE}
}

// UpdateNodeGroup changes a node group. f receives a copy with the current replicas. If f changes
// the replicas, machines of the user's own are added or removed. The availability is nil unless the
// group is blocked. ID, name and Cluster cannot be changed. UpdateNodeGroup panics if there is no
// such group.
func (a *Agent) UpdateNodeGroup(id string, f func(*agentv1alpha1.NodeGroup)) {
	a.edit(func() {
		g := a.mustGroup(id)
		next := proto.CloneOf(g.described)
		next.Replicas, next.Availability = g.replicas(), g.blocked
		f(next)
		next.Id, next.Name, next.Cluster = g.described.GetId(), g.described.GetName(), g.described.GetCluster()
		g.describe(next)
		for range next.GetReplicas() - g.replicas() {
			a.addOwned(g)
		}
		for range g.replicas() - next.GetReplicas() {
			owned := slices.IndexFunc(g.machines, func(m *machine) bool { return m.owned && m.deletedAt.IsZero() })
			if owned < 0 {
				break
			}
			a.remove(g.machines[owned])
		}
		a.touch(g)
		a.reconcile(g)
	})
}

// RemoveNodeGroup removes a node group and its machines, and ends their claims. It panics if there
// is no such group.
func (a *Agent) RemoveNodeGroup(id string) {
	a.edit(func() {
		g := a.mustGroup(id)
		delete(a.groups, id)
		for _, m := range slices.Clone(g.machines) {
			if c := m.claim; c != nil {
				a.end(c, claimreasons.NodeGroupGone, "the node group was deleted, and its machine with it")
			}
			a.remove(m)
		}
		for _, c := range a.claimsOf(g) {
			if c.live() {
				a.end(c, claimreasons.NodeGroupGone, "the node group was deleted")
			}
		}
		a.touch(g)
	})
}

// Block makes a node group refuse claims for the reason, until retryAt or, if that is zero, until
// [Agent.Unblock]. It panics if there is no such group.
func (a *Agent) Block(id string, reason agentv1alpha1.UnavailableReason, message string, retryAt time.Time) {
	a.edit(func() { a.block(a.mustGroup(id), reason, message, retryAt) })
}

// Unblock ends the effect of [Agent.Block]. It panics if there is no such group.
func (a *Agent) Unblock(id string) {
	a.edit(func() {
		g := a.mustGroup(id)
		g.blocked = nil
		a.touch(g)
	})
}

// NodeGroup returns the node group as callers see it, or nil.
func (a *Agent) NodeGroup(id string) *agentv1alpha1.NodeGroup {
	a.mu.Lock()
	defer a.mu.Unlock()
	g, ok := a.groups[id]
	if !ok {
		return nil
	}
	object, _ := a.groupView.get(g.cluster, id)
	return object
}

// describe replaces the description. Its availability is only used if it is false.
func (g *group) describe(described *agentv1alpha1.NodeGroup) {
	g.described, g.blocked = described, nil
	if availability := described.GetAvailability(); availability != nil && !availability.GetAvailable() {
		g.blocked = availability
	}
}

func (a *Agent) mustGroup(id string) *group {
	g, ok := a.groups[id]
	if !ok {
		panic(fmt.Sprintf("fakeagent: no node group %s", id))
	}
	return g
}

func (a *Agent) block(g *group, reason agentv1alpha1.UnavailableReason, message string, retryAt time.Time) {
	g.blocked = &agentv1alpha1.Availability{Reason: reason, Message: message}
	if !retryAt.IsZero() {
		g.blocked.RetryAt = timestamppb.New(retryAt)
		if wait := retryAt.Sub(a.now()); wait > 0 {
			a.after(wait, func() { a.touch(g) })
		}
	}
	a.touch(g)
}

func (g *group) replicas() int32 {
	return int32(len(g.machines))
}

// availability reports whether a claim of the holder would currently be accepted. The empty holder
// stands for every holder but the group's own.
func (a *Agent) availability(g *group, holder string) *agentv1alpha1.Availability {
	now := a.now()
	if only := g.described.GetHolder(); only != "" && only != holder {
		return &agentv1alpha1.Availability{
			Reason:  agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED,
			Message: fmt.Sprintf("the node group accepts only claims of the holder %q (annotation %s of the MachineDeployment)", only, annotationHolder),
		}
	}
	if _, paused := a.paused[g.cluster]; paused {
		return &agentv1alpha1.Availability{
			Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, Message: "the Cluster is paused",
		}
	}
	if g.blocked != nil && (g.blocked.GetRetryAt() == nil || now.Before(g.blocked.GetRetryAt().AsTime())) {
		return g.blocked
	}
	if g.described.MaxSize != nil && g.replicas() >= g.described.GetMaxSize() && g.spares() <= 0 {
		return &agentv1alpha1.Availability{
			Reason:  agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE,
			Message: fmt.Sprintf("%d of at most %d machines", g.replicas(), g.described.GetMaxSize()),
		}
	}
	return &agentv1alpha1.Availability{Available: true}
}

// spares returns how many machines the next claims get before replicas are raised.
func (g *group) spares() int {
	spares := 0
	for _, m := range g.machines {
		if m.usable() || m.awaited() {
			spares++
		}
	}
	return spares - g.pending
}

// owned counts the machines of the user's own that are not being deleted.
func (g *group) owned() int {
	owned := 0
	for _, m := range g.machines {
		if m.owned && m.deletedAt.IsZero() {
			owned++
		}
	}
	return owned
}

// rejection converts an availability that is false to the reason why a claim is rejected.
func (g *group) rejection(availability *agentv1alpha1.Availability) agenterrors.Rejection {
	r := agenterrors.Rejection{
		NodeGroup:   g.id,
		Reason:      agenterrors.ReasonNotOpen,
		Unavailable: availability.GetReason(),
		Message:     availability.GetMessage(),
	}
	switch availability.GetReason() {
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED,
		agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED:
		r.Reason = agenterrors.ReasonNoRoom
	default:
	}
	if availability.GetRetryAt() != nil {
		r.RetryAt = availability.GetRetryAt().AsTime()
	}
	return r
}

func (a *Agent) renderGroup(g *group) *agentv1alpha1.NodeGroup {
	object := proto.CloneOf(g.described)
	object.Replicas = g.replicas()
	object.FloorReplicas = int32(g.owned())
	object.Availability, object.HolderAvailability = a.availability(g, ""), nil
	if holder := g.described.GetHolder(); holder != "" {
		object.HolderAvailability = a.availability(g, holder)
	}
	return object
}
