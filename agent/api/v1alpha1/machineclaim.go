package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// MachineClaim anchors one claim: the right of one (Cluster, claim id) to exactly one Machine of one MachineDeployment. Its
// creation is the compare-and-swap that decides which node group a claim belongs to. The agent makes, changes and removes
// it; people read it. `clusterctl move` takes it along with its Cluster.
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

	// spec is what was asked for.
	// +required
	Spec MachineClaimSpec `json:"spec,omitzero"`
	// status is how far it is.
	// +optional
	Status MachineClaimStatus `json:"status,omitzero"`
}

// MachineClaimSpec is what was asked for.
type MachineClaimSpec struct {
	// clusterName names the Cluster, in the MachineClaim's namespace. Immutable.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="clusterName is immutable"
	ClusterName string `json:"clusterName"`
	// clusterUID is the UID of the Cluster that the claim was made for. A claim without a status whose Cluster has another UID was moved
	// or restored together with it, and lost its status on the way: what it had is found from its Machine and the ledger. Empty in claims
	// of older agents. Immutable.
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
	// spoke is the UID of the namespace kube-system of the cluster that the claim was made from, or that listed it as live: only a live
	// set that was read there may collect it. Empty means that it is not known.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Spoke string `json:"spoke,omitempty"`
	// displayName is what the caller calls the claim: the NodeClaim's name.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	DisplayName string `json:"displayName,omitempty"`
	// candidates are the names of the MachineDeployments that would do, best first: nodeGroup, and the next best ones.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=253
	Candidates []string `json:"candidates,omitempty"`
	// nodeGroup is the name of the MachineDeployment that the claim belongs to now. It moves to the next candidate only while
	// the claim has never been entered in a ledger. Empty means that the claim was released before it was made: the object
	// is a tombstone from its creation on, so that a call to make it that comes late is refused.
	// +optional
	NodeGroup string `json:"nodeGroup,omitempty"`
	// adopt is the name of an existing Machine of nodeGroup that the claim takes over, instead of a new one. Immutable.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="adopt is immutable"
	Adopt string `json:"adopt,omitempty"`
	// adoptAboveMinSize has the claim refused where replicas would have to be raised for the user to keep the min size, and for a Machine that
	// is marked to be removed next. Immutable.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="adoptAboveMinSize is immutable"
	AdoptAboveMinSize bool `json:"adoptAboveMinSize,omitempty"`
	// maxNodeProvisionTimeSeconds is how long the claim waits for its Machine's provider ID and Node before it is released as late, unless
	// the MachineDeployment has the annotation cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime. Absent means as long as the agent's
	// options say. Immutable.
	// +optional
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=604800
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="maxNodeProvisionTimeSeconds is immutable"
	MaxNodeProvisionTimeSeconds *int32 `json:"maxNodeProvisionTimeSeconds,omitempty"`
}

// Phase is how far a claim is. The empty phase of a new MachineClaim means Pending.
// +kubebuilder:validation:Enum="";Pending;Bound;Releasing;Ended
type Phase string

const (
	// PhasePending means that the claim is durable and its Machine is not known yet.
	PhasePending Phase = "Pending"
	// PhaseBound means that the claim has its Machine.
	PhaseBound Phase = "Bound"
	// PhaseReleasing means that the release was asked for and is not complete. It keeps its Machine if it has one.
	PhaseReleasing Phase = "Releasing"
	// PhaseEnded is terminal: the claim has no Machine any more, and its id is never used again.
	PhaseEnded Phase = "Ended"
)

const (
	// ConditionAssigned is True while the claim has a Machine.
	ConditionAssigned = "Assigned"
	// ConditionReady is True while the claim has a Machine whose Node has joined, and is neither being released nor returned.
	ConditionReady = "Ready"
	// ConditionEnded is True once the claim has ended. While it is False, its reason says whether the claim is being released.
	ConditionEnded = "Ended"
	// ConditionStalled is True on a claim whose Machine the agent has given up, and absent from others. Tools that wait for objects, such as
	// kstatus, regard such an object as failed.
	ConditionStalled = "Stalled"
)

// MachineClaimStatus is how far a claim is. The phase changes only by compare-and-swap on the whole object.
type MachineClaimStatus struct {
	// phase is Pending, Bound, Releasing or Ended; empty means Pending.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// reason is why, in one CamelCase word.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Reason string `json:"reason,omitempty"`
	// message is the reason in a sentence.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
	// conditions are Assigned, Ready, Ended and, on a claim whose Machine was given up, Stalled. They follow from the other fields, and are
	// written together with them. Absent until an agent that knows them writes the status.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// machine is the Machine that the claim is bound to. Set once; stays, as last seen, after the end.
	// +optional
	Machine *MachineReference `json:"machine,omitempty"`
	// nodeGroupUID is the UID of the MachineDeployment in whose ledger the claim was entered. A MachineDeployment that has the
	// name of nodeGroup and another UID was made again, and has no replica for the claim.
	// +optional
	NodeGroupUID types.UID `json:"nodeGroupUID,omitempty"`
	// waitingSince is from when on the claim's wait for a Machine counts: about when it was entered, or since an agent found that none had
	// looked when the deadline passed. While it is unset, the claim's creation counts.
	// +optional
	WaitingSince *metav1.Time `json:"waitingSince,omitempty"`
	// drained says that whoever asked for the release has drained the Node.
	// +optional
	Drained bool `json:"drained,omitempty"`
	// returned says that the claim's holder has returned the Machine to the user: the claim ends, and the Machine stays as it is. It is false
	// for a claim that ended otherwise, as its Machine was lost before.
	// +optional
	Returned bool `json:"returned,omitempty"`
	// nodeRegisteredAt is when the holder first reported the Machine's Node as registered, or when the claim adopted a Machine that had its
	// Node: pods may run on it, whatever Cluster API has seen. Set once.
	// +optional
	NodeRegisteredAt *metav1.Time `json:"nodeRegisteredAt,omitempty"`
	// nodeAbsentAt is when the holder last read a complete list of its Nodes that lacked the Machine's, noted only once the
	// Machine is past its node deadline. Unset while there is no such statement.
	// +optional
	NodeAbsentAt *metav1.Time `json:"nodeAbsentAt,omitempty"`
	// boundAt is when the claim was bound to its Machine: from then on it waits for the Machine's Node.
	// +optional
	BoundAt *metav1.Time `json:"boundAt,omitempty"`
	// failedAt is when the agent gave the Machine up: its infrastructure failed, or it took several times the time for it. The
	// claim is then released by the agent itself, and its node group cools down. Unset for one that is merely late.
	// +optional
	FailedAt *metav1.Time `json:"failedAt,omitempty"`
	// releasedAt is when the release was asked for.
	// +optional
	ReleasedAt *metav1.Time `json:"releasedAt,omitempty"`
	// endedAt is when the claim ended.
	// +optional
	EndedAt *metav1.Time `json:"endedAt,omitempty"`
	// history is what happened, oldest first; the last 32 entries are kept, and the last 8 once the claim has ended.
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
	// providerID of the Machine, once known. For people: the Machine itself is what counts.
	// +optional
	ProviderID string `json:"providerID,omitempty"`
	// nodeName of the Machine, once known. For people.
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

// MaxNodeProvisionTime returns how long the claim's caller has it wait for its Machine; zero if that was not said.
func (c *MachineClaim) MaxNodeProvisionTime() time.Duration {
	if c.Spec.MaxNodeProvisionTimeSeconds == nil {
		return 0
	}
	return time.Duration(*c.Spec.MaxNodeProvisionTimeSeconds) * time.Second
}

// CurrentPhase returns the claim's phase: Pending for a new object, Ended for one that belongs to no node group.
func (c *MachineClaim) CurrentPhase() Phase {
	switch {
	case c.Spec.NodeGroup == "":
		return PhaseEnded
	case c.Status.Phase == "":
		return PhasePending
	}
	return c.Status.Phase
}

// Returns reports whether the claim is about to end without its Machine, which its holder has returned to the user.
func (c *MachineClaim) Returns() bool { return c.Status.Phase == PhaseBound && c.Status.Returned }

// ObjectName returns the name of the MachineClaim object of a claim. Claim ids contain no dots, so the name is unambiguous.
func ObjectName(clusterName, claimID string) string {
	return clusterName + "." + claimID
}
