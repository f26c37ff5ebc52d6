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
)

// Scenario is the file. Times are durations as Go writes them, for example `90s`.
type Scenario struct {
	// TrustDomain is the SPIFFE trust domain of the callers. Default karpenter-capi.
	TrustDomain string `json:"trustDomain,omitempty"`
	// HeartbeatInterval is how long a stream may be quiet before a heartbeat is sent. Default 10s.
	HeartbeatInterval string `json:"heartbeatInterval,omitempty"`
	// SpareGracePeriod is how long a machine without a claim is kept for the next one. Default 0s.
	SpareGracePeriod string `json:"spareGracePeriod,omitempty"`
	// FailureCoolDown is how long a node group refuses claims after a failure. Default 3m.
	FailureCoolDown string `json:"failureCoolDown,omitempty"`
	// Machines is the pace of machines whose node group has none of its own.
	Machines Pace `json:"machines,omitzero"`
	// Clusters are those that exist. Default: default/workload alone.
	Clusters []Cluster `json:"clusters,omitempty"`
	// NodeGroups are those that can be claimed from.
	NodeGroups []NodeGroup `json:"nodeGroups,omitempty"`
	// Identities are callers that are not a Cluster's own.
	Identities []Identity `json:"identities,omitempty"`
	// Calls are methods that are slow or fail.
	Calls []Call `json:"calls,omitempty"`
	// Outages are times at which the agent does not answer.
	Outages []Outage `json:"outages,omitempty"`
}

// Pace is how long each step of a machine's life takes after the step before it. `never` is how long a step takes that does not happen.
type Pace struct {
	// Object is from the claim to the Machine object, ProviderID from there to its provider ID, Node from there to its Node. Default 0s.
	Object     string `json:"object,omitempty"`
	ProviderID string `json:"providerID,omitempty"`
	Node       string `json:"node,omitempty"`
	// Deletion is from the release until the machine is gone. Default 0s.
	Deletion string `json:"deletion,omitempty"`
}

// Cluster is a Cluster.
type Cluster struct {
	// Name is <namespace>/<name>. REQUIRED.
	Name string `json:"name"`
	// Paused pauses it.
	Paused bool `json:"paused,omitempty"`
	// Onboarding is the id of its onboarding. Certificates are issued for it then, and its own identity needs one of that onboarding.
	Onboarding string `json:"onboarding,omitempty"`
}

// NodeGroup is a node group. What is unset of capacity, instance type, architecture, operating system, capacity type and price is a plain value.
type NodeGroup struct {
	// Name of the MachineDeployment. REQUIRED.
	Name string `json:"name"`
	// Cluster is <namespace>/<name> of one of the Clusters. It may be left out where there is one Cluster alone.
	Cluster string `json:"cluster,omitempty"`
	// Labels of the MachineDeployment itself.
	Labels map[string]string `json:"labels,omitempty"`
	// InstanceType is the instance type of its machines. Default: its name.
	InstanceType string `json:"instanceType,omitempty"`
	// Capacity and Overhead are quantities by resource.
	Capacity map[string]Quantity `json:"capacity,omitempty"`
	Overhead map[string]Quantity `json:"overhead,omitempty"`
	// NodeLabels and Taints are those of its Nodes.
	NodeLabels map[string]string `json:"nodeLabels,omitempty"`
	Taints     []Taint           `json:"taints,omitempty"`
	// Architecture and OperatingSystem are as Kubernetes calls them. Default amd64 and linux.
	Architecture    string `json:"architecture,omitempty"`
	OperatingSystem string `json:"operatingSystem,omitempty"`
	// Zone and Region are where its machines are. May be empty.
	Zone   string `json:"zone,omitempty"`
	Region string `json:"region,omitempty"`
	// CapacityType is on-demand, spot or reserved. Default on-demand.
	CapacityType string `json:"capacityType,omitempty"`
	// PricePerHour is what a machine costs. Default: an estimate of 1.
	PricePerHour *float64 `json:"pricePerHour,omitempty"`
	// Currency is the ISO 4217 code of the price. May be empty.
	Currency string `json:"currency,omitempty"`
	// MinSize is how many machines its user keeps, and MaxSize how many machines there may be. No MaxSize is no limit.
	MinSize int32  `json:"minSize,omitempty"`
	MaxSize *int32 `json:"maxSize,omitempty"`
	// Replicas are machines of the user's own, which run from the beginning.
	Replicas int32 `json:"replicas,omitempty"`
	// KubernetesVersion is that of its machines.
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`
	// Unavailable is the reason why it takes no claims, of the API's UnavailableReason, for example PAUSED. Empty if it does.
	Unavailable string `json:"unavailable,omitempty"`
	// Machines is the pace of its machines, in place of the scenario's.
	Machines *Pace `json:"machines,omitempty"`
	// Failures are those of its machines. Of several that meet one machine the first counts.
	Failures []Failure `json:"failures,omitempty"`
}

// Quantity is an amount in Kubernetes notation, for example `4`, `500m` or `16Gi`. A number needs no quotes.
type Quantity string

// UnmarshalJSON is [encoding/json.Unmarshaler]'s.
func (q *Quantity) UnmarshalJSON(text []byte) error {
	*q = Quantity(bytes.Trim(text, `"`)) // What it says is checked with its field's name.
	return nil
}

// Taint is a taint of Nodes.
type Taint struct {
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	// Effect is NoSchedule, PreferNoSchedule or NoExecute.
	Effect string `json:"effect"`
}

// Failure is the failure of machines that are made for claims. The claim that meets it is the oldest that waits when the machine appears.
type Failure struct {
	// Machine is which of them fails, counted from 1 in the order of their making. Every is that each so-manieth does. Exactly one of the two is set.
	Machine int `json:"machine,omitempty"`
	Every   int `json:"every,omitempty"`
	// Stage is what the machine does not get to: object, providerID or node. REQUIRED.
	Stage string `json:"stage"`
	// After is how long after the step before it the failure shows. Default 1s.
	After string `json:"after,omitempty"`
	// Reason and Message are what its infrastructure reports then.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Outcome is stuck: the machine stays as it is; failed or late: the agent ends the claim as that; lost: another actor deletes the Machine.
	// Default stuck.
	Outcome string `json:"outcome,omitempty"`
}

// Identity is a caller.
type Identity struct {
	// ID is its SPIFFE id, of the trust domain. REQUIRED.
	ID string `json:"id"`
	// Name is that of the folder in --certificates-dir with its certificate. REQUIRED.
	Name string `json:"name"`
	// Roles are reader, autoscaler or admin.
	Roles []string `json:"roles"`
	// Clusters are <namespace>/<name>, in which `*` stands for any characters. AllClusters stands for every Cluster.
	Clusters    []string `json:"clusters,omitempty"`
	AllClusters bool     `json:"allClusters,omitempty"`
}

// Call is a method that is slow or fails.
type Call struct {
	// Method is its name without its service, for example CreateClaim. REQUIRED.
	Method string `json:"method"`
	// Delay is how long each call waits before it has any effect.
	Delay string `json:"delay,omitempty"`
	// Fail is what calls are answered with.
	Fail *Fail `json:"fail,omitempty"`
}

// Fail is an error that calls are answered with.
type Fail struct {
	// Reason is one of the agent's reasons, which has a code of its own. Code is a gRPC code, for an error that does not come from the agent.
	// Exactly one of the two is set.
	Reason string `json:"reason,omitempty"`
	Code   string `json:"code,omitempty"`
	// Message is for people. Default: that the scenario says so.
	Message string `json:"message,omitempty"`
	// Times is how many calls fail. 0 stands for all of them.
	Times int `json:"times,omitempty"`
	// LostReply has the call take effect before it fails. It has no effect on streams.
	LostReply bool `json:"lostReply,omitempty"`
}

// Outage is a time at which the agent does not answer.
type Outage struct {
	// After is when it begins, counted from the start of the agent.
	After string `json:"after,omitempty"`
	// Lasts is how long it lasts. REQUIRED.
	Lasts string `json:"lasts"`
	// Every is how long after its beginning it begins again. Empty if it does not.
	Every string `json:"every,omitempty"`
	// Kind is unavailable: calls are answered with UNAVAILABLE, NOT_SYNCED, and streams end; silent: nothing is answered, and connections stay;
	// disconnected: connections are closed, as are new ones. REQUIRED.
	Kind string `json:"kind"`
}

//go:embed example.yaml
var example []byte

// Example returns a scenario, as a file with comments, that uses every field.
func Example() []byte { return append([]byte(nil), example...) }

// Parse reads a scenario file. Fields that are not known, and keys that are there twice, are refused. An error names every field that cannot be used.
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

// Callers are the SPIFFE ids of the callers that the scenario knows, by a name that is a relative path: cluster/<namespace>/<name> for a Cluster's
// own identity, with its onboarding if it has one, and the name of every other.
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
