package conformance

import (
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Env is an agent and the hub behind it. Its hooks fail the test themselves when they cannot do what they are asked.
//
// The hub's infrastructure waits for the test: Machine objects follow the replicas by themselves, unless held, but get a
// provider ID and a Node only through the hooks. The deletion of a machine completes by itself. A node group's spare machines
// are given back after a grace period much shorter than Patience, and claims can be collected as soon as a token was taken
// after them.
type Env interface {
	// Cluster is a Cluster that exists and that no other Env uses.
	Cluster() *agentv1alpha1.ClusterRef
	// Client has the identity of Cluster: the role cluster, for no other.
	Client() *client.Client
	// Autoscaler has the role autoscaler for Cluster.
	Autoscaler() *client.Client
	// Admin has the role admin for Cluster.
	Admin() *client.Client
	// Stranger has the identity of a Cluster that does not exist, and may act for no other.
	Stranger() *client.Client

	// CreateNodeGroup makes a MachineDeployment of Cluster that opted in, and returns its node group's id once the agent shows
	// it. Machines of its initial replicas have joined with their Nodes by then: they are the user's own.
	CreateNodeGroup(tb testing.TB, deployment MachineDeployment) string
	// UpdateNodeGroup makes the MachineDeployment with that name look like this, as a user who applies it again does.
	UpdateNodeGroup(tb testing.TB, deployment MachineDeployment)
	// DeleteNodeGroup deletes the MachineDeployment; no claim needs its machines any more.
	DeleteNodeGroup(tb testing.TB, name string)

	// HoldMachines keeps Machine objects of the MachineDeployment from appearing, until it is called with false.
	HoldMachines(tb testing.TB, name string, hold bool)
	// ProvisionMachine makes the infrastructure of the claim's machine ready, so that its provider ID appears. The claim may
	// still be waiting for the Machine object, which is not held.
	ProvisionMachine(tb testing.TB, claimID string)
	// JoinNode makes the Node of a provisioned machine join.
	JoinNode(tb testing.TB, machineName string)
	// LoseMachine deletes the Machine object as a person does.
	LoseMachine(tb testing.TB, machineName string)

	// Patience is how long to wait at most for what must happen sooner or later, heartbeats included.
	Patience() time.Duration
}

// Standing is an Env whose Cluster and node groups others made, and others use. Cases leave alone, and leave out, what they did not make.
type Standing interface {
	// Prefix is what the ids of the case's claims begin with. No claim of the Cluster has ever had an id that begins with it. It is not empty, and of at
	// most 16 characters.
	Prefix() string
}

// Ageing is an Env that can show a token that has become too old.
type Ageing interface {
	// StaleToken returns a token for the holder's claims in Cluster that was valid and is too old now.
	StaleToken(tb testing.TB, holder string) string
}

// MachineDeployment is what a user writes.
type MachineDeployment struct {
	// Name of the object, in the Cluster's namespace.
	Name string `json:"name"`
	// Labels of the object, besides those that make it a member of Cluster and opt it in.
	Labels map[string]string `json:"labels,omitempty"`
	// Annotations of the object, verbatim: sizes and capacity.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Replicas asked for. Nil means none for a new object, and leaves them alone in an existing one.
	Replicas *int32 `json:"replicas,omitempty"`
	// FailureDomain of the machine template. May be empty.
	FailureDomain string `json:"failureDomain,omitempty"`
	// Version of Kubernetes in the machine template. May be empty.
	Version string `json:"version,omitempty"`
}
