// Package control lets the conformance suite create what it needs on an agent in another process:
// Clusters, node groups, and machines that wait, fail and vanish on command. It uses HTTP with
// JSON, so that an agent in any language can offer it.
//
// Each operation is a POST of a [Request] to /v1/<operation>. The response is a [Response] with
// status 200, or an error with another status. The package implements both sides: [Handler] serves
// a [Control], and [Dial] returns an [Env] for each case of the suite.
//
// It is for tests only. A control has no authentication and allows everything, so it is served on
// loopback.
package control

import (
	"context"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
)

// The operations. They are the last segment of the path.
const (
	// NewEnvironment creates a Cluster that nothing else uses. It returns the Cluster with its
	// callers.
	NewEnvironment = "new-environment"
	// EndEnvironment removes the Cluster and everything in it.
	EndEnvironment = "end-environment"
	// CreateNodeGroup creates the deployment. It returns the ID of its node group once the agent
	// shows it and its replicas have Nodes. Its machines for claims appear automatically, and wait
	// for ProvisionMachine and JoinNode. Their deletion completes automatically.
	CreateNodeGroup = "create-node-group"
	// UpdateNodeGroup replaces the deployment of that name.
	UpdateNodeGroup = "update-node-group"
	// DeleteNodeGroup deletes the deployment of that name.
	DeleteNodeGroup = "delete-node-group"
	// HoldMachines prevents Machine objects of the deployment from appearing while hold is true.
	HoldMachines = "hold-machines"
	// ProvisionMachine assigns the claim's machine its provider ID. The claim may still be waiting
	// for its Machine object, which must not be held.
	ProvisionMachine = "provision-machine"
	// JoinNode makes the Node of the machine join.
	JoinNode = "join-node"
	// LoseMachine deletes the Machine object, as a user would.
	LoseMachine = "lose-machine"
	// ExpireTokens makes every token that ListClaims has returned for the Cluster too old.
	ExpireTokens = "expire-tokens"
)

// These operations are OPTIONAL; see [NodePoolSets]. An environment lists those that its control
// has.
const (
	// ApplyNodePoolSet creates the NodePoolSet, or replaces the one of that name. It publishes to
	// the Cluster. One that is created is newer than every other one: no two have the same age.
	ApplyNodePoolSet = "apply-node-pool-set"
	// DeleteNodePoolSet deletes the NodePoolSet of that name.
	DeleteNodePoolSet = "delete-node-pool-set"
)

// Cluster is the name of a Cluster.
type Cluster struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Request is the request of every operation. Cluster is that of the environment.
type Request struct {
	Cluster     Cluster                        `json:"cluster,omitzero"`
	Deployment  *conformance.MachineDeployment `json:"deployment,omitempty"`
	NodePoolSet *conformance.NodePoolSet       `json:"nodePoolSet,omitempty"`
	Name        string                         `json:"name,omitempty"`
	Hold        bool                           `json:"hold,omitempty"`
	ClaimID     string                         `json:"claimID,omitempty"`
	Machine     string                         `json:"machine,omitempty"`
}

// Response is the response of every operation.
type Response struct {
	// Error is why the operation failed.
	Error string `json:"error,omitempty"`
	// Environment is set by NewEnvironment.
	Environment *Environment `json:"environment,omitempty"`
	// NodeGroupID is set by CreateNodeGroup.
	NodeGroupID string `json:"nodeGroupID,omitempty"`
}

// Environment is a Cluster and its callers.
type Environment struct {
	Cluster Cluster `json:"cluster"`
	// Authorities are the certificate authorities of the agent, in PEM.
	Authorities string `json:"authorities"`
	// Callers are the certificates by caller, for example [conformance.CallerCluster]: of the
	// Cluster's own identity, of an autoscaler and an administrator of the Cluster, and of the own
	// identity of a Cluster that does not exist.
	Callers map[conformance.Caller]KeyPair `json:"callers"`
	// Operations are the optional operations that the control has. Behaviours that need another one
	// are skipped. [Handler] sets it.
	Operations []string `json:"operations,omitempty"`
}

// KeyPair is a certificate and its private key, in PEM.
type KeyPair struct {
	Certificate string `json:"certificate"`
	Key         string `json:"key"`
}

// Control implements the operations; see the constants. Its methods may be called concurrently.
type Control interface {
	NewEnvironment(ctx context.Context) (*Environment, error)
	EndEnvironment(ctx context.Context, cluster Cluster) error
	CreateNodeGroup(ctx context.Context, cluster Cluster, deployment conformance.MachineDeployment) (id string, err error)
	UpdateNodeGroup(ctx context.Context, cluster Cluster, deployment conformance.MachineDeployment) error
	DeleteNodeGroup(ctx context.Context, cluster Cluster, name string) error
	HoldMachines(ctx context.Context, cluster Cluster, name string, hold bool) error
	ProvisionMachine(ctx context.Context, cluster Cluster, claimID string) error
	JoinNode(ctx context.Context, cluster Cluster, machine string) error
	LoseMachine(ctx context.Context, cluster Cluster, machine string) error
	ExpireTokens(ctx context.Context, cluster Cluster) error
}

// NodePoolSets is a [Control] that can publish NodePools. It is OPTIONAL.
type NodePoolSets interface {
	ApplyNodePoolSet(ctx context.Context, cluster Cluster, set conformance.NodePoolSet) error
	DeleteNodePoolSet(ctx context.Context, cluster Cluster, name string) error
}
