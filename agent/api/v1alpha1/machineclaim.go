package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// MachineClaim stores one claim: the right of one (Cluster, claim id) to exactly one Machine of one
// MachineDeployment. Its creation is the compare-and-swap that decides which node group a claim
// belongs to. Only the agent creates, changes and deletes it. `clusterctl move` moves it with its
// Cluster.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
// +kubebuilder:resource:categories=cluster-api,shortName=mcl
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.clusterName`
// +kubebuilder:printcolumn:name="Claimed By",type=string,JSONPath=`.spec.displayName`
// +kubebuilder:printcolumn:name="Group",type=string,JSONPath=`.spec.nodeGroup`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Machine",type=string,JSONPath=`.status.machine.name`
// +kubebuilder:printcolumn:name="Provider ID",type=string,JSONPath=`.status.machine.providerID`,priority=1
// +kubebuilder:printcolumn:name="Holder",type=string,JSONPath=`.spec.holder`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`
type MachineClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what was requested.
	// +required
	Spec MachineClaimSpec `json:"spec,omitzero"`
	// status is the claim's state.
	// +optional
	Status MachineClaimStatus `json:"status,omitzero"`
}

// MachineClaimSpec is what was requested.
type MachineClaimSpec struct {
	// clusterName names the Cluster, in the MachineClaim's namespace. Immutable.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="clusterName is immutable"
	ClusterName string `json:"clusterName"`
	// clusterUID is the UID of the Cluster for which the claim was created. If a claim has no
	// status and its Cluster has another UID, both were moved or restored and the claim lost its
	// status. The agent then reconstructs the claim's state from its Machine and the ledger. Empty
	// in claims of older agents. Immutable.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="clusterUID is immutable"
	ClusterUID types.UID `json:"clusterUID,omitempty"`
	// claimID is the caller's id, unique in the Cluster. Immutable.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="claimID is immutable"
	ClaimID string `json:"claimID"`
	// holder keeps the claim alive and may collect it. Immutable.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="holder is immutable"
	Holder string `json:"holder"`
	// spoke is the UID of the namespace kube-system of the cluster from which the claim was
	// created, or that listed it as live. Only a live set that was read in this cluster may collect
	// the claim. Empty means that the cluster is not known.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Spoke string `json:"spoke,omitempty"`
	// displayName is the caller's name for the claim, such as the NodeClaim's name.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	DisplayName string `json:"displayName,omitempty"`
	// candidates are the names of the candidate MachineDeployments in order of preference:
	// nodeGroup, and the next best ones.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=253
	Candidates []string `json:"candidates,omitempty"`
	// nodeGroup is the name of the MachineDeployment that the claim belongs to now. It changes to
	// the next candidate only while the claim has never been admitted. Empty means that the claim
	// was released before it was created: the object is a tombstone from the start, so that a
	// delayed CreateClaim is refused.
	// +optional
	NodeGroup string `json:"nodeGroup,omitempty"`
	// adopt is the name of an existing Machine of nodeGroup that the claim adopts, instead of a new
	// one. Immutable.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="adopt is immutable"
	Adopt string `json:"adopt,omitempty"`
	// adoptAboveMinSize refuses the claim if replicas would have to be raised to keep the floor at
	// the min size, or if the Machine is marked to be removed next. Immutable.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="adoptAboveMinSize is immutable"
	AdoptAboveMinSize bool `json:"adoptAboveMinSize,omitempty"`
	// maxNodeProvisionTimeSeconds is how long the claim waits for its Machine's provider ID and
	// Node before it is released as late, unless the MachineDeployment has the annotation
	// cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime. If absent, the agent's options
	// apply. Immutable.
	// +optional
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=604800
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="maxNodeProvisionTimeSeconds is immutable"
	MaxNodeProvisionTimeSeconds *int32 `json:"maxNodeProvisionTimeSeconds,omitempty"`
	// holderRepairs means that the holder replaces the Node while it is unhealthy. The agent then
	// annotates the claim's Machine with cluster.x-k8s.io/skip-remediation, so that no
	// MachineHealthCheck remediates it as well.
	// +optional
	HolderRepairs bool `json:"holderRepairs,omitempty"`
}

// Phase is the phase of a claim. The empty phase of a new MachineClaim means Pending.
// +kubebuilder:validation:Enum="";Pending;Bound;Releasing;Ended
type Phase string

const (
	// PhasePending means that the claim is durable and has no Machine yet.
	PhasePending Phase = "Pending"
	// PhaseBound means that the claim has its Machine.
	PhaseBound Phase = "Bound"
	// PhaseReleasing means that the release was requested and is not complete. The claim keeps its
	// Machine if it has one.
	PhaseReleasing Phase = "Releasing"
	// PhaseEnded is terminal: the claim no longer has a Machine, and its id is never reused.
	PhaseEnded Phase = "Ended"
)

const (
	// ConditionAssigned is True while the claim has a Machine.
	ConditionAssigned = "Assigned"
	// ConditionReady is True while the claim has a Machine whose Node has joined, and is neither
	// being released nor returned.
	ConditionReady = "Ready"
	// ConditionEnded is True once the claim has ended. While it is False, its reason shows whether
	// the claim is being released.
	ConditionEnded = "Ended"
	// ConditionStalled is True on a claim whose Machine the agent has given up, and absent from
	// others. Tools that wait for objects, such as kstatus, regard such an object as failed.
	ConditionStalled = "Stalled"
)

// MachineClaimStatus is the state of a claim. The phase changes only by compare-and-swap on the
// whole object.
type MachineClaimStatus struct {
	// phase is Pending, Bound, Releasing or Ended; empty means Pending.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// reason is the cause of the phase, in one CamelCase word.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Reason string `json:"reason,omitempty"`
	// message is the reason in a sentence.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
	// conditions are Assigned, Ready, Ended and, on a claim whose Machine was given up, Stalled.
	// They follow from the other fields, and are written together with them. Absent until an agent
	// that knows them writes the status.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// machine is the Machine that the claim is bound to. Set once. After the claim has ended, it
	// stays as last seen.
	// +optional
	Machine *MachineReference `json:"machine,omitempty"`
	// nodeGroupUID is the UID of the MachineDeployment that admitted the claim. A MachineDeployment
	// with the name of nodeGroup and another UID was deleted and created again, and has no replica
	// for the claim.
	// +optional
	NodeGroupUID types.UID `json:"nodeGroupUID,omitempty"`
	// waitingSince is when the claim's deadline for a Machine starts: about when the claim was
	// admitted, or when an agent found that no agent was running as the deadline passed. If unset,
	// the deadline starts at the claim's creation.
	// +optional
	WaitingSince *metav1.Time `json:"waitingSince,omitempty"`
	// drained records that the caller that requested the release has drained the Node.
	// +optional
	Drained bool `json:"drained,omitempty"`
	// returned records that the claim's holder has returned the Machine to the user: the claim
	// ends, and the Machine stays as it is. It is false if the claim ended in another way because
	// its Machine was lost first.
	// +optional
	Returned bool `json:"returned,omitempty"`
	// nodeRegisteredAt is when the holder first reported the Machine's Node as registered, or when
	// the claim adopted a Machine that had its Node. Pods may run on the Node from then on,
	// whatever Cluster API reports. Set once.
	// +optional
	NodeRegisteredAt *metav1.Time `json:"nodeRegisteredAt,omitempty"`
	// nodeAbsentAt is when the holder last read a complete list of its Nodes that lacked the
	// Machine's Node. It is recorded only after the Machine's node deadline. Unset if there was no
	// such list.
	// +optional
	NodeAbsentAt *metav1.Time `json:"nodeAbsentAt,omitempty"`
	// boundAt is when the claim was bound to its Machine. The deadline for the Machine's Node
	// starts then.
	// +optional
	BoundAt *metav1.Time `json:"boundAt,omitempty"`
	// failedAt is when the agent gave the Machine up, because its infrastructure failed or it took
	// several times its deadline. The agent then releases the claim itself, and the node group
	// cools down. Unset for a Machine that is only late.
	// +optional
	FailedAt *metav1.Time `json:"failedAt,omitempty"`
	// failureClass is why the Machine was given up: Capacity, Quota, Configuration, GivenUp,
	// TimedOut, or Reported by the holder. Set once, together with failedAt. Empty if the agent
	// that wrote failedAt recorded no class. Further classes may be added.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	FailureClass string `json:"failureClass,omitempty"`
	// releasedAt is when the release was requested.
	// +optional
	ReleasedAt *metav1.Time `json:"releasedAt,omitempty"`
	// endedAt is when the claim ended.
	// +optional
	EndedAt *metav1.Time `json:"endedAt,omitempty"`
	// history is the claim's history, oldest first; the last 32 entries are kept, and the last 8
	// once the claim has ended.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	History []Event `json:"history,omitempty"`
}

// MachineReference names one Machine object, in the MachineClaim's namespace.
type MachineReference struct {
	// name of the Machine.
	// +required
	Name string `json:"name"`
	// uid of the Machine.
	// +required
	UID types.UID `json:"uid"`
	// providerID of the Machine, once known. The agent does not read it: the Machine is
	// authoritative.
	// +optional
	ProviderID string `json:"providerID,omitempty"`
	// nodeName of the Machine, once known. The agent does not read it.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
}

// Event is one thing that happened to a claim.
type Event struct {
	// time at which it happened.
	// +required
	Time metav1.Time `json:"time"`
	// reason is what happened, in one CamelCase word.
	// +required
	// +kubebuilder:validation:MaxLength=256
	Reason string `json:"reason"`
	// message is the same in a sentence.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// MachineClaimList is a list of MachineClaims.
//
// +kubebuilder:object:root=true
type MachineClaimList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MachineClaim `json:"items"`
}

// MaxNodeProvisionTime returns spec.maxNodeProvisionTimeSeconds; zero if it is unset.
func (c *MachineClaim) MaxNodeProvisionTime() time.Duration {
	if c.Spec.MaxNodeProvisionTimeSeconds == nil {
		return 0
	}
	return time.Duration(*c.Spec.MaxNodeProvisionTimeSeconds) * time.Second
}

// CurrentPhase returns the claim's phase: Pending for a new object, Ended for one that belongs to
// no node group.
func (c *MachineClaim) CurrentPhase() Phase {
	switch {
	case c.Spec.NodeGroup == "":
		return PhaseEnded
	case c.Status.Phase == "":
		return PhasePending
	}
	return c.Status.Phase
}

// Returns reports whether the claim is about to end without its Machine, which its holder has
// returned to the user.
func (c *MachineClaim) Returns() bool { return c.Status.Phase == PhaseBound && c.Status.Returned }

// ObjectName returns the name of the MachineClaim object of a claim. Claim ids contain no dots, so
// the name is unambiguous.
func ObjectName(clusterName, claimID string) string {
	return clusterName + "." + claimID
}
