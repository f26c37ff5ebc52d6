package fakeagent

import (
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// machine is one replica of a group.
type machine struct {
	group                           *group
	name, uid                       string
	owned                           bool // the user's own: never claimed, never removed by the agent
	appeared                        bool // the Machine object exists
	claim                           *claim
	providerID                      string
	nodeName                        string
	failureReason                   string
	deletingReason, deletingMessage string
	failureMessage                  string
	outdated                        string // why it is not up to date; empty if it is
	createdAt                       time.Time
	deletedAt                       time.Time
	spareSince                      time.Time
	gone                            bool
	fails                           *MachineFailure // its planned failure; nil if none
}

// usable reports whether a claim may be bound to the machine now.
func (m *machine) usable() bool {
	return m.appeared && !m.owned && m.claim == nil && m.nodeName == "" && m.deletedAt.IsZero() && !m.gone
}

// awaited reports whether the Machine object does not exist yet, and will be claimable.
func (m *machine) awaited() bool { return !m.appeared && !m.owned && !m.gone }

// Appear makes all missing Machine objects of the node group appear. It panics if there is no such
// group.
func (a *Agent) Appear(groupID string) {
	a.edit(func() {
		g := a.mustGroup(groupID)
		for _, m := range slices.Clone(g.machines) {
			a.appear(m)
		}
	})
}

// Provision gives the claim's machine the provider ID. An empty one is derived from the machine's
// name. If needed, the Machine object appears first. Provision panics if the claim has no machine
// then.
func (a *Agent) Provision(cluster *agentv1alpha1.ClusterRef, claimID, providerID string) *agentv1alpha1.Machine {
	var m *machine
	a.edit(func() {
		m = a.machineOf(cluster, claimID)
		a.provision(m, providerID)
	})
	return a.Machine(cluster, m.name)
}

// Join makes the machine's Node join with the given name. Empty means the machine's name. It panics
// if there is no such machine.
func (a *Agent) Join(cluster *agentv1alpha1.ClusterRef, machineName, nodeName string) *agentv1alpha1.Machine {
	a.edit(func() { a.join(a.mustMachine(cluster, machineName), nodeName) })
	return a.Machine(cluster, machineName)
}

// FailMachine makes the machine's infrastructure report why it is not ready. The fake agent does
// not evaluate the report: see [Agent.GiveUp]. FailMachine panics if there is no such machine.
func (a *Agent) FailMachine(cluster *agentv1alpha1.ClusterRef, machineName, reason, message string) {
	a.edit(func() {
		m := a.mustMachine(cluster, machineName)
		m.failureReason, m.failureMessage = reason, message
		a.touchMachine(m)
	})
}

// OutdateMachines makes the existing machines of the node group differ from its template, for the
// given reason, as after a change of the template. An empty reason makes them up to date again. It
// panics if the group does not exist.
func (a *Agent) OutdateMachines(groupID, why string) {
	a.edit(func() {
		for _, m := range a.mustGroup(groupID).machines {
			m.outdated = why
			a.touchMachine(m)
		}
	})
}

// HoldDeletion sets what the Machine reports as blocking its deletion, until [Agent.Terminate]. It
// starts the deletion if needed. It panics if there is no such machine.
func (a *Agent) HoldDeletion(cluster *agentv1alpha1.ClusterRef, machineName, reason, message string) {
	a.edit(func() {
		m := a.mustMachine(cluster, machineName)
		if m.deletedAt.IsZero() {
			m.deletedAt = a.now()
		}
		m.deletingReason, m.deletingMessage = reason, message
		a.touchMachine(m)
	})
}

// LoseMachine removes the machine without the agent, as a user or remediation does: its claim ends,
// and the group creates a replacement. It panics if there is no such machine.
func (a *Agent) LoseMachine(cluster *agentv1alpha1.ClusterRef, machineName string) {
	a.edit(func() { a.lose(a.mustMachine(cluster, machineName)) })
}

func (a *Agent) lose(m *machine) {
	g := m.group
	a.remove(m)
	if m.owned {
		a.addOwned(g)
	} else {
		a.addMachine(g)
	}
	a.reconcile(g)
}

// Terminate completes the deletion of the machine. It panics if there is no such machine, or it is
// not being deleted.
func (a *Agent) Terminate(cluster *agentv1alpha1.ClusterRef, machineName string) {
	a.edit(func() {
		m := a.mustMachine(cluster, machineName)
		if m.deletedAt.IsZero() {
			panic(fmt.Sprintf("fakeagent: machine %s is not being deleted", machineName))
		}
		a.terminated(m)
	})
}

// SetInfrastructure changes how machines progress by themselves. Steps that have already begun keep
// their delay.
func (a *Agent) SetInfrastructure(infrastructure Infrastructure) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.steps = infrastructure
}

// SetGroupInfrastructure sets the infrastructure of the machines of one node group. It takes
// precedence over [Agent.SetInfrastructure]. Nil resets it. It panics if the group does not exist.
func (a *Agent) SetGroupInfrastructure(groupID string, infrastructure *Infrastructure) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mustGroup(groupID).steps = infrastructure
}

func (a *Agent) stepsOf(g *group) Infrastructure {
	if g.steps != nil {
		return *g.steps
	}
	return a.steps
}

// Machine returns the machine as callers see it, or nil.
func (a *Agent) Machine(cluster *agentv1alpha1.ClusterRef, name string) *agentv1alpha1.Machine {
	a.mu.Lock()
	defer a.mu.Unlock()
	object, ok := a.machineView.get(keyOf(cluster), name)
	if !ok {
		return nil
	}
	return object
}

func (a *Agent) mustMachine(cluster *agentv1alpha1.ClusterRef, name string) *machine {
	for _, g := range a.groups {
		if g.cluster != keyOf(cluster) {
			continue
		}
		for _, m := range g.machines {
			if m.name == name && m.appeared {
				return m
			}
		}
	}
	panic(fmt.Sprintf("fakeagent: no machine %s in cluster %s/%s", name, cluster.GetNamespace(), cluster.GetName()))
}

// machineOf returns the claim's machine. It makes Machine objects appear until the claim has one.
func (a *Agent) machineOf(cluster *agentv1alpha1.ClusterRef, claimID string) *machine {
	c, ok := a.claims[keyOf(cluster)][claimID]
	if !ok {
		panic(fmt.Sprintf("fakeagent: no claim %s", claimID))
	}
	if g := a.groups[c.groupID]; g != nil && c.machine == nil {
		for _, m := range slices.Clone(g.machines) {
			if c.machine == nil && m.awaited() {
				a.appear(m)
			}
		}
	}
	if c.machine == nil || c.machine.gone {
		panic(fmt.Sprintf("fakeagent: claim %s has no machine", claimID))
	}
	return c.machine
}

// addMachine raises the group's replicas by one.
func (a *Agent) addMachine(g *group) {
	m := a.newMachine(g)
	g.made++
	m.fails = g.failureOf(g.made)
	a.step(m, StageObject, a.stepsOf(g).Appear, func() { a.appear(m) })
}

// addOwned adds a running machine of the user's own.
func (a *Agent) addOwned(g *group) {
	m := a.newMachine(g)
	m.owned, m.appeared = true, true
	m.providerID, m.nodeName = providerIDOf(m), m.name
	a.touchMachine(m)
}

func (a *Agent) newMachine(g *group) *machine {
	a.names++
	m := &machine{
		group: g,
		name:  fmt.Sprintf("%s-%05d", g.described.GetName(), a.names),
		uid:   uuid.NewString(),
	}
	m.createdAt = a.now()
	g.machines = append(g.machines, m)
	a.touch(g)
	return m
}

func (a *Agent) appear(m *machine) {
	if m.appeared || m.gone {
		return
	}
	m.appeared, m.createdAt = true, a.now()
	a.touchMachine(m)
	a.reconcile(m.group) // before it can have a Node: a machine with a Node cannot be claimed
	a.step(m, StageProviderID, a.stepsOf(m.group).Provision, func() { a.provision(m, "") })
}

func (a *Agent) provision(m *machine, providerID string) {
	if m.gone || !m.deletedAt.IsZero() || m.providerID != "" {
		return
	}
	if providerID == "" {
		providerID = providerIDOf(m)
	}
	m.providerID = providerID
	m.failureReason, m.failureMessage = "", ""
	a.touchMachine(m)
	a.step(m, StageNode, a.stepsOf(m.group).Join, func() { a.join(m, "") })
}

func (a *Agent) join(m *machine, nodeName string) {
	if m.gone || !m.deletedAt.IsZero() || m.nodeName != "" {
		return
	}
	a.provision(m, "")
	if nodeName == "" {
		nodeName = m.name
	}
	m.nodeName = nodeName
	if m.claim != nil {
		m.claim.happened(a.now(), claimreasons.NodeJoined, "Node "+nodeName+" joined")
	}
	a.touchMachine(m)
	a.touch(m.group)
}

// terminate starts the deletion of the machine.
func (a *Agent) terminate(m *machine) {
	if m.gone || !m.deletedAt.IsZero() {
		return
	}
	if !m.appeared {
		a.remove(m)
		return
	}
	m.deletedAt = a.now()
	a.touchMachine(m)
	a.after(a.stepsOf(m.group).Terminate, func() { a.terminated(m) })
}

func (a *Agent) terminated(m *machine) {
	a.remove(m)
	a.reconcile(m.group)
}

// remove removes the machine and its replica.
func (a *Agent) remove(m *machine) {
	if m.gone {
		return
	}
	if m.deletedAt.IsZero() {
		m.deletedAt = a.now()
	}
	m.gone = true
	m.group.machines = slices.DeleteFunc(m.group.machines, func(other *machine) bool { return other == m })
	if c := m.claim; c != nil && c.phase != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		if c.phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING {
			a.end(c, claimreasons.Released, "the instance and its Node are gone")
		} else {
			a.end(c, claimreasons.MachineLost, fmt.Sprintf("machine %s was deleted by another actor", m.name))
		}
	}
	a.touchMachine(m)
	a.touch(m.group)
}

func providerIDOf(m *machine) string {
	return fmt.Sprintf("fake:///%s/%s/%s", m.group.cluster.namespace, m.group.cluster.name, m.name)
}

func (m *machine) phase() string {
	switch {
	case !m.deletedAt.IsZero():
		return "Deleting"
	case m.nodeName != "":
		return "Running"
	case m.providerID != "":
		return "Provisioned"
	}
	return "Provisioning"
}

func (m *machine) render() *agentv1alpha1.Machine {
	object := &agentv1alpha1.Machine{
		Cluster:               m.group.cluster.ref(),
		Name:                  m.name,
		Uid:                   m.uid,
		NodeGroupId:           m.group.id,
		ProviderId:            m.providerID,
		NodeName:              m.nodeName,
		Zone:                  m.group.described.GetZone(),
		KubernetesVersion:     m.group.described.GetKubernetesVersion(),
		Phase:                 m.phase(),
		CreatedAt:             timestamppb.New(m.createdAt),
		UpToDate:              m.outdated == "",
		NotUpToDateMessage:    m.outdated,
		InfrastructureReason:  m.failureReason,
		InfrastructureMessage: m.failureMessage,
		DeletingReason:        m.deletingReason,
		DeletingMessage:       m.deletingMessage,
	}
	switch {
	case m.claim != nil:
		object.ClaimId, object.Owner = m.claim.id, agentv1alpha1.MachineOwner_MACHINE_OWNER_CLAIM
	case m.owned:
		object.Owner = agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR
	}
	if !m.deletedAt.IsZero() {
		object.DeletedAt = timestamppb.New(m.deletedAt)
	}
	return object
}
