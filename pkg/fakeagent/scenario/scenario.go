package scenario

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"

	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
)

// Scenario is the content of the file. Times are durations in Go's notation, for example `90s`.
type Scenario struct {
	// TrustDomain is the SPIFFE trust domain of the callers. Default karpenter-capi.
	TrustDomain string `json:"trustDomain,omitempty"`
	// HeartbeatInterval is how long a stream may be quiet before a heartbeat is sent. Default 10s.
	HeartbeatInterval string `json:"heartbeatInterval,omitempty"`
	// SpareGracePeriod is how long a machine without a claim is kept for the next one. Default 0s.
	SpareGracePeriod string `json:"spareGracePeriod,omitempty"`
	// FailureCoolDown is how long a node group refuses claims after a failure. Default 3m.
	FailureCoolDown string `json:"failureCoolDown,omitempty"`
	// Machines is the pace of machines whose node group does not set one.
	Machines Pace `json:"machines,omitzero"`
	// Clusters are the Clusters that exist. Default: only default/workload.
	Clusters []Cluster `json:"clusters,omitempty"`
	// NodeGroups are the node groups that can be claimed from.
	NodeGroups []NodeGroup `json:"nodeGroups,omitempty"`
	// NodePoolSets are what is published to the Clusters. Of two sets of a Cluster that have an
	// entry of the same kind and name, the first publishes it.
	NodePoolSets []NodePoolSet `json:"nodePoolSets,omitempty"`
	// Identities are callers other than the Clusters' own identities.
	Identities []Identity `json:"identities,omitempty"`
	// Calls are methods that are slow or fail.
	Calls []Call `json:"calls,omitempty"`
	// Outages are times at which the agent does not answer.
	Outages []Outage `json:"outages,omitempty"`
}

// Pace is how long each step of a machine's life takes after the previous one. `never` means that
// the step does not happen.
type Pace struct {
	// Object is the time from the claim to the Machine object, ProviderID from there to its
	// provider ID, and Node from there to its Node. Default 0s.
	Object     string `json:"object,omitempty"`
	ProviderID string `json:"providerID,omitempty"`
	Node       string `json:"node,omitempty"`
	// Deletion is the time from the release until the machine is gone. Default 0s.
	Deletion string `json:"deletion,omitempty"`
}

// Cluster is a Cluster.
type Cluster struct {
	// Name is <namespace>/<name>. REQUIRED.
	Name string `json:"name"`
	// Paused pauses the Cluster.
	Paused bool `json:"paused,omitempty"`
	// Onboarding is the ID of the Cluster's onboarding. If it is set, certificates are issued for
	// the Cluster, and its own identity must have one of that onboarding.
	Onboarding string `json:"onboarding,omitempty"`
}

// NodeGroup is a node group. Capacity, instance type, architecture, operating system, capacity type
// and price have plain defaults.
type NodeGroup struct {
	// Name is the name of the MachineDeployment. REQUIRED.
	Name string `json:"name"`
	// Cluster is one of the Clusters, as <namespace>/<name>. It is optional if there is only one
	// Cluster.
	Cluster string `json:"cluster,omitempty"`
	// Labels are the labels of the MachineDeployment itself.
	Labels map[string]string `json:"labels,omitempty"`
	// InstanceType is the instance type of the machines. Default: the name of the node group.
	InstanceType string `json:"instanceType,omitempty"`
	// Capacity and Overhead are quantities by resource.
	Capacity map[string]Quantity `json:"capacity,omitempty"`
	Overhead map[string]Quantity `json:"overhead,omitempty"`
	// NodeLabels and Taints are those of the Nodes.
	NodeLabels map[string]string `json:"nodeLabels,omitempty"`
	Taints     []Taint           `json:"taints,omitempty"`
	// Architecture and OperatingSystem use the names of Kubernetes. Default amd64 and linux.
	Architecture    string `json:"architecture,omitempty"`
	OperatingSystem string `json:"operatingSystem,omitempty"`
	// Zone and Region are the location of the machines. They may be empty.
	Zone   string `json:"zone,omitempty"`
	Region string `json:"region,omitempty"`
	// CapacityType is on-demand, spot or reserved. Default on-demand.
	CapacityType string `json:"capacityType,omitempty"`
	// PricePerHour is the price of a machine. Default: an estimate of 1.
	PricePerHour *float64 `json:"pricePerHour,omitempty"`
	// Currency is the ISO 4217 code of the price. It may be empty.
	Currency string `json:"currency,omitempty"`
	// MinSize is the number of machines that the user keeps. MaxSize is the maximum number of
	// machines. Without a MaxSize, there is no limit.
	MinSize int32  `json:"minSize,omitempty"`
	MaxSize *int32 `json:"maxSize,omitempty"`
	// Replicas is the number of the user's own machines, which run from the start.
	Replicas int32 `json:"replicas,omitempty"`
	// KubernetesVersion is the Kubernetes version of the machines.
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`
	// Unavailable is why the node group takes no claims: an UnavailableReason of the API, for
	// example PAUSED. It is empty if the node group takes claims.
	Unavailable string `json:"unavailable,omitempty"`
	// Machines is the pace of the node group's machines. It replaces the scenario's.
	Machines *Pace `json:"machines,omitempty"`
	// Failures are the failures of the node group's machines. If several match a machine, the first
	// applies.
	Failures []Failure `json:"failures,omitempty"`
}

// Quantity is an amount in Kubernetes notation, for example `4`, `500m` or `16Gi`. A number needs
// no quotes.
type Quantity string

// UnmarshalJSON implements [encoding/json.Unmarshaler].
func (q *Quantity) UnmarshalJSON(text []byte) error {
	*q = Quantity(bytes.Trim(text, `"`)) // The value is validated later, with the name of its field.
	return nil
}

// Taint is a taint of Nodes.
type Taint struct {
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	// Effect is NoSchedule, PreferNoSchedule or NoExecute.
	Effect string `json:"effect"`
}

// Failure is a failure of machines created for claims. It affects the oldest claim that is waiting
// when the machine appears.
type Failure struct {
	// Machine is the number of the failing machine, counted from 1 in order of creation. Every
	// makes every n-th machine fail. Exactly one of the two is set.
	Machine int `json:"machine,omitempty"`
	Every   int `json:"every,omitempty"`
	// Stage is the stage that the machine does not reach: object, providerID or node. REQUIRED.
	Stage string `json:"stage"`
	// After is how long after the previous stage the failure is reported. Default 1s.
	After string `json:"after,omitempty"`
	// Reason and Message are reported by the machine's infrastructure.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Outcome is stuck, failed, late or lost. stuck leaves the machine as it is. With failed or
	// late, the agent ends the claim with that outcome. With lost, another actor deletes the
	// Machine. Default stuck.
	Outcome string `json:"outcome,omitempty"`
}

// NodePoolSet is a NodePoolSet that selects a Cluster.
type NodePoolSet struct {
	// Name is the name of the NodePoolSet. REQUIRED.
	Name string `json:"name"`
	// Cluster is one of the Clusters, as <namespace>/<name>. It is optional if there is only one
	// Cluster.
	Cluster string `json:"cluster,omitempty"`
	// DeletionPolicy is Retain or Delete. Default Retain.
	DeletionPolicy string `json:"deletionPolicy,omitempty"`
	// NodePools and NodeClasses are the entries.
	NodePools   []nodepoolset.Template `json:"nodePools,omitempty"`
	NodeClasses []nodepoolset.Template `json:"nodeClasses,omitempty"`
}

// Identity is the identity of a caller.
type Identity struct {
	// ID is the SPIFFE ID, in the trust domain. REQUIRED.
	ID string `json:"id"`
	// Name is the folder in --certificates-dir with the caller's certificate. REQUIRED.
	Name string `json:"name"`
	// Roles are any of reader, autoscaler and admin.
	Roles []string `json:"roles"`
	// Clusters are listed as <namespace>/<name>, in which `*` matches any characters. AllClusters
	// means every Cluster.
	Clusters    []string `json:"clusters,omitempty"`
	AllClusters bool     `json:"allClusters,omitempty"`
}

// Call is a method that is slow or fails.
type Call struct {
	// Method is the name of the method without its service, for example CreateClaim. REQUIRED.
	Method string `json:"method"`
	// Delay is how long each call waits before it has an effect.
	Delay string `json:"delay,omitempty"`
	// Fail is the error that calls return.
	Fail *Fail `json:"fail,omitempty"`
}

// Fail is an error that calls return.
type Fail struct {
	// Reason is one of the agent's reasons, which implies a code. Code is a gRPC code, for an error
	// that does not come from the agent. Exactly one of the two is set.
	Reason string `json:"reason,omitempty"`
	Code   string `json:"code,omitempty"`
	// Message is the message of the error. Default: a message that refers to the scenario.
	Message string `json:"message,omitempty"`
	// Times is the number of calls that fail. 0 means all of them.
	Times int `json:"times,omitempty"`
	// LostReply lets the call take effect before it fails. It does not apply to streams.
	LostReply bool `json:"lostReply,omitempty"`
}

// Outage is a time at which the agent does not answer.
type Outage struct {
	// After is when the outage begins, counted from the start of the agent.
	After string `json:"after,omitempty"`
	// Lasts is the duration of the outage. REQUIRED.
	Lasts string `json:"lasts"`
	// Every is the time from one beginning of the outage to the next. Empty means that it does not
	// repeat.
	Every string `json:"every,omitempty"`
	// Kind is unavailable, silent or disconnected. With unavailable, calls fail with UNAVAILABLE,
	// NOT_SYNCED, and streams end. With silent, nothing is answered, and connections stay open.
	// With disconnected, connections are closed, including new ones. REQUIRED.
	Kind string `json:"kind"`
}

//go:embed example.yaml
var example []byte

// Example returns a scenario file, with comments, that uses every field.
func Example() []byte { return append([]byte(nil), example...) }

// Parse reads a scenario file. Unknown fields and duplicate keys are rejected. The error names
// every invalid field.
func Parse(content []byte) (*Scenario, error) {
	text, err := yaml.YAMLToJSONStrict(content)
	if err != nil {
		return nil, fmt.Errorf("not YAML: %w", err)
	}
	s := &Scenario{}
	unknown, err := json.UnmarshalStrict(text, s)
	if err != nil {
		return nil, fmt.Errorf("not a scenario: %w", err)
	}
	if err := errors.Join(unknown...); err != nil {
		return nil, err
	}
	if _, err := s.compile(); err != nil {
		return nil, err
	}
	return s, nil
}

// Callers returns the SPIFFE IDs of the scenario's callers by name. A name is a relative path:
// cluster/<namespace>/<name> for a Cluster's own identity, which includes its onboarding if it has
// one, and the configured name for every other.
func (s *Scenario) Callers() map[string]string {
	domain := cmp.Or(s.TrustDomain, fakeagent.TrustDomain)
	clusters := s.Clusters
	if len(clusters) == 0 {
		standard := fakeagent.DefaultCluster()
		clusters = []Cluster{{Name: standard.GetNamespace() + "/" + standard.GetName()}}
	}
	callers := map[string]string{}
	for _, cluster := range clusters {
		id := fmt.Sprintf("spiffe://%s/cluster/%s", domain, cluster.Name)
		if cluster.Onboarding != "" {
			id += "/" + cluster.Onboarding
		}
		callers["cluster/"+cluster.Name] = id
	}
	for _, identity := range s.Identities {
		callers[identity.Name] = identity.ID
	}
	return callers
}
