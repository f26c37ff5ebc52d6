package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Spoke describes a workload cluster whose shim calls the agent. It has the name and the namespace
// of its Cluster. Only the agent creates and changes it. `clusterctl move` moves it with its
// Cluster.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Connected",type=string,JSONPath=`.status.conditions[?(@.type=="Connected")].status`
// +kubebuilder:printcolumn:name="Last Sync",type=date,JSONPath=`.status.lastSyncTime`
// +kubebuilder:printcolumn:name="Shim",type=string,JSONPath=`.status.shimVersion`
// +kubebuilder:printcolumn:name="Certificate Ends",type=string,JSONPath=`.status.certificate.notAfter`
// +kubebuilder:printcolumn:name="Onboarded",type=date,JSONPath=`.spec.enrollment.time`
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.agentVersion`,priority=1
// +kubebuilder:printcolumn:name="API",type=string,JSONPath=`.status.apiVersion`,priority=1
// +kubebuilder:printcolumn:name="Spoke ID",type=string,JSONPath=`.status.spokeID`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Spoke struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the agent must not lose.
	// +optional
	Spec SpokeSpec `json:"spec,omitzero"`
	// status is what the agent knows about the spoke.
	// +optional
	Status SpokeStatus `json:"status,omitzero"`
}

// SpokeSpec is what the agent must not lose. It is not in the status, because restoring a backup
// omits the status.
type SpokeSpec struct {
	// enrollment is the last use of a bootstrap certificate. Absent if none was used.
	// +optional
	Enrollment *Enrollment `json:"enrollment,omitempty"`
}

// Enrollment is the use of a bootstrap certificate.
type Enrollment struct {
	// onboarding is the id of the onboarding.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Onboarding string `json:"onboarding"`
	// publicKey is the SHA-256 of the certified public key, in hexadecimal digits. The bootstrap
	// certificate cannot be used with any other key.
	// +required
	// +kubebuilder:validation:MinLength=64
	// +kubebuilder:validation:MaxLength=64
	PublicKey string `json:"publicKey"`
	// time is when the bootstrap certificate was used.
	// +required
	Time metav1.Time `json:"time"`
}

// ConnectedCondition of a Spoke is True while its shim synchronizes its claims with an agent.
const ConnectedCondition = "Connected"

// Reasons of [ConnectedCondition].
const (
	// SynchronizedReason means that the shim has sent its claims lately.
	SynchronizedReason = "Synchronized"
	// SilentReason means that no agent has received the shim's claims for a while.
	SilentReason = "Silent"
)

// SpokeStatus is what the agent knows about a spoke.
type SpokeStatus struct {
	// conditions has one condition, Connected.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// lastSyncTime is when the shim last sent its claims, to within five minutes.
	// +optional
	LastSyncTime *metav1.Time `json:"lastSyncTime,omitempty"`
	// shimVersion is the version that the shim reports.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	ShimVersion string `json:"shimVersion,omitempty"`
	// agentVersion is the version of the agent to which the shim last sent its claims.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	AgentVersion string `json:"agentVersion,omitempty"`
	// apiVersion is the version of the API that this agent serves.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	APIVersion string `json:"apiVersion,omitempty"`
	// spokeID is the UID of the spoke's namespace kube-system, as the shim reports it.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	SpokeID string `json:"spokeID,omitempty"`
	// certificate is the shim's client certificate. Absent for a shim on a unix socket.
	// +optional
	Certificate *SpokeCertificate `json:"certificate,omitempty"`
	// nodePools are the spoke's NodePools, the first 64 by name, if the shim reports them.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	NodePools []SpokeNodePool `json:"nodePools,omitempty"`
	// moreNodePools is how many further NodePools the spoke has.
	// +optional
	MoreNodePools int32 `json:"moreNodePools,omitempty"`
	// published are the results of what NodePoolSets publish to the spoke.
	// +optional
	// +listType=map
	// +listMapKey=kind
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Published []SpokePublished `json:"published,omitempty"`
}

// SpokeNodePool is a NodePool in a spoke.
type SpokeNodePool struct {
	// name is the NodePool's name.
	// +required
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// set is the NodePoolSet that published it. Absent for a NodePool of the spoke's own.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Set string `json:"set,omitempty"`
	// ready is whether its condition Ready is True.
	// +required
	Ready bool `json:"ready"`
	// nodes is how many registered Nodes it has.
	// +required
	Nodes int32 `json:"nodes"`
	// pendingNodeClaims is how many of its NodeClaims have no registered Node yet.
	// +required
	PendingNodeClaims int32 `json:"pendingNodeClaims"`
	// pricePerHour is the price of its NodeClaims, a decimal number in the agent's currency. Absent
	// if the price of one of them is not known.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	PricePerHour string `json:"pricePerHour,omitempty"`
	// message is why it is not ready.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// SpokePublished is what became of a published object in a spoke.
type SpokePublished struct {
	// kind is NodePool or ClusterAPINodeClass.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind"`
	// name is the object's name.
	// +required
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// set is the NodePoolSet that publishes it.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Set string `json:"set"`
	// revision identifies the content that the result is about.
	// +required
	// +kubebuilder:validation:MaxLength=64
	Revision string `json:"revision"`
	// applied is whether the revision is in the spoke.
	// +required
	Applied bool `json:"applied"`
	// message is why it is not.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// SpokeCertificate is the client certificate of a shim.
type SpokeCertificate struct {
	// serial is its serial number, in hexadecimal digits, in the form that a policy's deny list
	// uses.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Serial string `json:"serial,omitempty"`
	// notBefore is when its validity begins.
	// +optional
	NotBefore *metav1.Time `json:"notBefore,omitempty"`
	// notAfter is when it expires.
	// +optional
	NotAfter *metav1.Time `json:"notAfter,omitempty"`
}

// SpokeList is a list of Spokes.
//
// +kubebuilder:object:root=true
type SpokeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []Spoke `json:"items"`
}
