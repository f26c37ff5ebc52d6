package conformance

import (
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Env is an agent and the hub behind it. Its methods fail the test themselves if they cannot do
// what they are asked to.
//
// The hub's infrastructure is driven by the test. Machine objects follow the replicas automatically
// unless held, but get a provider ID and a Node only through the methods. The deletion of a machine
// completes automatically. A node group's spare machines are removed after a grace period much
// shorter than Patience. Claims can be collected as soon as a token has been issued after their
// creation.
type Env interface {
	// Cluster returns a Cluster that exists, and that no other Env uses.
	Cluster() *agentv1alpha1.ClusterRef
	// Client has the identity of Cluster. Its only role is the role cluster for Cluster.
	Client() *client.Client
	// Autoscaler has the role autoscaler for Cluster.
	Autoscaler() *client.Client
	// Admin has the role admin for Cluster.
	Admin() *client.Client
	// Stranger has the identity of a Cluster that does not exist, and may act for no other.
	Stranger() *client.Client

	// CreateNodeGroup creates a MachineDeployment of Cluster that has opted in. It returns the ID
	// of its node group once the agent shows it. By then, the Nodes of its initial replicas have
	// joined. Those machines are the user's own.
	CreateNodeGroup(tb testing.TB, deployment MachineDeployment) string
	// UpdateNodeGroup applies the MachineDeployment again, as a user would.
	UpdateNodeGroup(tb testing.TB, deployment MachineDeployment)
	// DeleteNodeGroup deletes the MachineDeployment. It is called once no claim needs its machines.
	DeleteNodeGroup(tb testing.TB, name string)

	// HoldMachines prevents the MachineDeployment's Machine objects from appearing, until it is
	// called with false.
	HoldMachines(tb testing.TB, name string, hold bool)
	// ProvisionMachine makes the infrastructure of the claim's machine ready, so that it gets its
	// provider ID. The claim may still be waiting for its Machine object, which must not be held.
	ProvisionMachine(tb testing.TB, claimID string)
	// JoinNode makes the Node of a provisioned machine join.
	JoinNode(tb testing.TB, machineName string)
	// LoseMachine deletes the Machine object, as a user would.
	LoseMachine(tb testing.TB, machineName string)

	// Patience is the maximum time to wait for what must eventually happen, including heartbeats.
	Patience() time.Duration
}

// Standing is an Env whose Cluster and node groups are shared with other users. Cases neither
// change nor count what they did not create.
type Standing interface {
	// Prefix is the prefix of the IDs of the case's claims. No claim of the Cluster has ever had an
	// ID with this prefix. It is not empty, and has at most 16 characters.
	Prefix() string
}

// Ageing is an Env that can provide a token that is too old.
type Ageing interface {
	// StaleToken returns a token for the holder's claims in Cluster that was valid and is too old
	// now.
	StaleToken(tb testing.TB, holder string) string
}

// Publishing is an Env that can publish NodePools and NodeClasses to Cluster.
type Publishing interface {
	// ApplyNodePoolSet creates the NodePoolSet, or replaces the one of that name. It selects
	// Cluster. A NodePoolSet that is created is newer than every other one: no two have the same
	// age.
	ApplyNodePoolSet(tb testing.TB, set NodePoolSet)
	// DeleteNodePoolSet deletes the NodePoolSet of that name.
	DeleteNodePoolSet(tb testing.TB, name string)
}

// MachineDeployment is a MachineDeployment as a user writes it.
type MachineDeployment struct {
	// Name is the name of the object, in the Cluster's namespace.
	Name string `json:"name"`
	// Labels are the labels of the object, in addition to those that assign it to Cluster and opt
	// it in.
	Labels map[string]string `json:"labels,omitempty"`
	// Annotations are the annotations of the object, verbatim: sizes, capacity, and the holder
	// whose claims alone are accepted.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Replicas is the number of replicas. Nil means none for a new object, and no change for an
	// existing one.
	Replicas *int32 `json:"replicas,omitempty"`
	// FailureDomain is that of the machine template. It may be empty.
	FailureDomain string `json:"failureDomain,omitempty"`
	// Version is the Kubernetes version in the machine template. It may be empty.
	Version string `json:"version,omitempty"`
}

// NodePoolSet is a NodePoolSet as a user writes it, without what it selects.
type NodePoolSet struct {
	// Name is the name of the object, in the Cluster's namespace.
	Name string `json:"name"`
	// DeletionPolicy is Retain or Delete. It may be empty.
	DeletionPolicy string `json:"deletionPolicy,omitempty"`
	// NodePools and NodeClasses are what is published. There is at least one of them.
	NodePools   []nodepoolset.Template `json:"nodePools,omitempty"`
	NodeClasses []nodepoolset.Template `json:"nodeClasses,omitempty"`
}
