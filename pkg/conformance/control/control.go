// Package control is how the conformance suite makes what it needs on an agent in another process: Clusters, node groups, and machines that wait,
// fail and vanish when it says so. It is HTTP with JSON, so that an agent in any language can offer it.
//
// Each operation is a POST of a [Request] to /v1/<operation>, answered with 200 and a [Response], or with another status and an error in it. Package
// control has both sides: [Handler] serves a [Control], and [Dial] returns an [Env] for each case of the suite.
//
// It is for tests alone. Whoever reaches it can do everything: it is served on loopback.
package control

import (
	"context"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
)

// Operations, the last segment of the path.
const (
	// NewEnvironment makes a Cluster that nothing else uses, and returns it with its callers.
	NewEnvironment = "new-environment"
	// EndEnvironment removes the Cluster with everything in it.
	EndEnvironment = "end-environment"
	// CreateNodeGroup makes the deployment, and answers with its node group's id once the agent shows it and its replicas have Nodes. Its machines
	// for claims appear by themselves, and wait for ProvisionMachine and JoinNode. Their deletion completes by itself.
	CreateNodeGroup = "create-node-group"
	// UpdateNodeGroup makes the deployment with that name look like this.
	UpdateNodeGroup = "update-node-group"
	// DeleteNodeGroup deletes the deployment with the name.
	DeleteNodeGroup = "delete-node-group"
	// HoldMachines keeps Machine objects of the deployment with the name from appearing while hold is true.
	HoldMachines = "hold-machines"
	// ProvisionMachine gives the machine of the claim its provider ID. The claim may still be waiting for the Machine object, which is not held.
	ProvisionMachine = "provision-machine"
	// JoinNode makes the Node of the machine join.
	JoinNode = "join-node"
	// LoseMachine deletes the Machine object as a person does.
	LoseMachine = "lose-machine"
	// ExpireTokens makes every token that ListClaims has returned for the Cluster too old.
	ExpireTokens = "expire-tokens"
)

// Cluster names a Cluster.
type Cluster struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Request is what every operation takes. Cluster is that of the environment.
type Request struct {
	Cluster    Cluster                        `json:"cluster,omitzero"`
	Deployment *conformance.MachineDeployment `json:"deployment,omitempty"`
	Name       string                         `json:"name,omitempty"`
	Hold       bool                           `json:"hold,omitempty"`
	ClaimID    string                         `json:"claimID,omitempty"`
	Machine    string                         `json:"machine,omitempty"`
}

// Response is what every operation answers.
type Response struct {
	// Error is why the operation was not done.
	Error string `json:"error,omitempty"`
	// Environment is that of NewEnvironment.
	Environment *Environment `json:"environment,omitempty"`
	// NodeGroupID is that of CreateNodeGroup.
	NodeGroupID string `json:"nodeGroupID,omitempty"`
}

// Environment is a Cluster and those who call for it.
type Environment struct {
	Cluster Cluster `json:"cluster"`
	// Authorities are the certificate authorities of the agent, PEM.
	Authorities string `json:"authorities"`
	// Callers are the certificates of the Cluster's own identity, of an autoscaler and an administrator of the Cluster, and of the own identity of a
	// Cluster that does not exist: [conformance.CallerCluster] and so on.
	Callers map[conformance.Caller]KeyPair `json:"callers"`
}

// KeyPair is a certificate and its private key, PEM.
type KeyPair struct {
	Certificate string `json:"certificate"`
	Key         string `json:"key"`
}

// Control is what operations do; see the constants. Its methods may be called concurrently.
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
