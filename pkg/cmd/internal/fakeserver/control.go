package fakeserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/control"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// controlled is the control of a fake agent. Its Clusters are separate from those of the scenario.
type controlled struct {
	agent     *fakeagent.Agent
	authority *fakeagent.Authority
	domain    string

	mu     sync.Mutex
	made   int
	grants map[string][]fakeagent.Grant
}

var (
	_ control.Control      = &controlled{}
	_ control.NodePoolSets = &controlled{}
)

func newControlled(agent *fakeagent.Agent, authority *fakeagent.Authority, domain string) *controlled {
	return &controlled{agent: agent, authority: authority, domain: domain, grants: map[string][]fakeagent.Grant{}}
}

// Grants returns the grants of an identity that the control has created.
func (c *controlled) Grants(id string) []fakeagent.Grant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.grants[id]
}

// NewEnvironment creates a Cluster in its own namespace, because IDs of node groups are unique
// within a namespace.
func (c *controlled) NewEnvironment(context.Context) (*control.Environment, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made++
	cluster := control.Cluster{Namespace: fmt.Sprintf("conformance-%d", c.made), Name: "spoke"}
	name := cluster.Namespace + "/" + cluster.Name
	ids := c.ids(cluster)
	c.grants[ids[conformance.CallerAutoscaler]] = []fakeagent.Grant{{Role: fakeagent.RoleAutoscaler, Clusters: []string{name}}}
	c.grants[ids[conformance.CallerAdmin]] = []fakeagent.Grant{{Role: fakeagent.RoleAdmin, Clusters: []string{name}}}
	environment := &control.Environment{
		Cluster: cluster, Authorities: string(c.authority.PEM()), Callers: map[conformance.Caller]control.KeyPair{},
	}
	for caller, id := range ids {
		certificate, key, err := c.authority.IssueClient(id)
		if err != nil {
			return nil, err
		}
		environment.Callers[caller] = control.KeyPair{Certificate: string(certificate), Key: string(key)}
	}
	c.agent.AddCluster(refOf(cluster))
	return environment, nil
}

// ids are the SPIFFE IDs of an environment's callers.
func (c *controlled) ids(cluster control.Cluster) map[conformance.Caller]string {
	domain := "spiffe://" + c.domain
	return map[conformance.Caller]string{
		conformance.CallerCluster:    domain + "/cluster/" + cluster.Namespace + "/" + cluster.Name,
		conformance.CallerStranger:   domain + "/cluster/" + cluster.Namespace + "/stranger",
		conformance.CallerAutoscaler: domain + "/conformance/autoscaler/" + cluster.Namespace,
		conformance.CallerAdmin:      domain + "/conformance/admin/" + cluster.Namespace,
	}
}

// EndEnvironment removes the Cluster.
func (c *controlled) EndEnvironment(_ context.Context, cluster control.Cluster) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range c.ids(cluster) {
		delete(c.grants, id)
	}
	return recovered(func() { c.agent.RemoveCluster(refOf(cluster)) })
}

// CreateNodeGroup adds the node group. Its machines wait to be provisioned and joined.
func (c *controlled) CreateNodeGroup(_ context.Context, cluster control.Cluster, d conformance.MachineDeployment) (id string, err error) {
	err = recovered(func() {
		id = c.agent.AddMachineDeployment(deploymentOf(cluster, d))
		c.agent.SetGroupInfrastructure(id, waiting(false))
	})
	return id, err
}

// UpdateNodeGroup replaces the node group's description.
func (c *controlled) UpdateNodeGroup(_ context.Context, cluster control.Cluster, d conformance.MachineDeployment) error {
	return recovered(func() { c.agent.UpdateMachineDeployment(deploymentOf(cluster, d)) })
}

// DeleteNodeGroup removes the node group.
func (c *controlled) DeleteNodeGroup(_ context.Context, cluster control.Cluster, name string) error {
	return recovered(func() { c.agent.RemoveNodeGroup(cluster.Namespace + "/" + name) })
}

// HoldMachines prevents Machine objects from appearing. If hold is false, held ones appear.
func (c *controlled) HoldMachines(_ context.Context, cluster control.Cluster, name string, hold bool) error {
	return recovered(func() {
		id := cluster.Namespace + "/" + name
		c.agent.SetGroupInfrastructure(id, waiting(hold))
		if !hold {
			c.agent.Appear(id)
		}
	})
}

// waiting is the infrastructure of machines that wait to be provisioned and joined. If they are
// held, they wait to appear too.
func waiting(held bool) *fakeagent.Infrastructure {
	infrastructure := &fakeagent.Infrastructure{Provision: fakeagent.Manual, Join: fakeagent.Manual}
	if held {
		infrastructure.Appear = fakeagent.Manual
	}
	return infrastructure
}

// ProvisionMachine assigns the claim's machine its provider ID.
func (c *controlled) ProvisionMachine(_ context.Context, cluster control.Cluster, claimID string) error {
	return recovered(func() { c.agent.Provision(refOf(cluster), claimID, "") })
}

// JoinNode makes the machine's Node join.
func (c *controlled) JoinNode(_ context.Context, cluster control.Cluster, machine string) error {
	return recovered(func() { c.agent.Join(refOf(cluster), machine, "node-of-"+machine) })
}

// LoseMachine removes the machine.
func (c *controlled) LoseMachine(_ context.Context, cluster control.Cluster, machine string) error {
	return recovered(func() { c.agent.LoseMachine(refOf(cluster), machine) })
}

// ExpireTokens makes the Cluster's tokens too old.
func (c *controlled) ExpireTokens(_ context.Context, cluster control.Cluster) error {
	return recovered(func() { c.agent.ExpireTokens(refOf(cluster)) })
}

// ApplyNodePoolSet applies the NodePoolSet.
func (c *controlled) ApplyNodePoolSet(_ context.Context, cluster control.Cluster, set conformance.NodePoolSet) error {
	return recovered(func() {
		c.agent.ApplyNodePoolSet(fakeagent.NodePoolSet{
			Name: set.Name, Cluster: refOf(cluster), DeletionPolicy: fakeagent.DeletionPolicy(set.DeletionPolicy),
			NodePools: set.NodePools, NodeClasses: set.NodeClasses,
		})
	})
}

// DeleteNodePoolSet deletes the NodePoolSet.
func (c *controlled) DeleteNodePoolSet(_ context.Context, cluster control.Cluster, name string) error {
	return recovered(func() { c.agent.DeleteNodePoolSet(refOf(cluster), name) })
}

// recovered applies a request to the fake agent. The fake panics if a test names an object that
// does not exist. Here, that is an error of the request.
func recovered(f func()) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			text, ok := cause.(string)
			if !ok {
				panic(cause)
			}
			err = errors.New(text)
		}
	}()
	f()
	return nil
}

func refOf(cluster control.Cluster) *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: cluster.Namespace, Name: cluster.Name}
}

func deploymentOf(cluster control.Cluster, d conformance.MachineDeployment) fakeagent.MachineDeployment {
	return fakeagent.MachineDeployment{
		Name: d.Name, Cluster: refOf(cluster), Labels: d.Labels, Annotations: d.Annotations, Replicas: d.Replicas, FailureDomain: d.FailureDomain,
		Version: d.Version,
	}
}

// controlTimeout limits how long a request to the control may take.
const controlTimeout = 30 * time.Second

// serveControl serves the control until it is stopped.
func serveControl(ctx context.Context, address string, c *controlled) (net.Addr, func(), error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("--control-address: %w", err)
	}
	server := &http.Server{Handler: control.Handler(c), ReadTimeout: controlTimeout, WriteTimeout: controlTimeout}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener) // It returns when it is closed.
	}()
	return listener.Addr(), func() {
		_ = server.Close() // Calls still in progress are cut off, as on any stop.
		<-done
	}, nil
}
