package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// MachineFinalizer keeps a SimMachine until its instance has stopped.
const MachineFinalizer = "simmachine.infrastructure.cluster.x-k8s.io"

// Reasons of a SimMachine's Ready condition. A [MachineFailure] adds its own.
const (
	ReasonWaitingForMachine       = "WaitingForMachine"
	ReasonWaitingForBootstrapData = "WaitingForBootstrapData"
	ReasonBooting                 = "InstanceBooting"
	ReasonRunning                 = "InstanceRunning"
	ReasonTerminating             = "InstanceTerminating"
	ReasonPaused                  = "Paused"
)

// Stage is a point of an instance's life at which it can hang.
//
// +kubebuilder:validation:Enum=Boot;Join;Termination
type Stage string

const (
	// StageBoot is before the instance exists: no providerID ever appears.
	StageBoot Stage = "Boot"
	// StageJoin is after the instance exists, before its kubelet registers: no Node ever appears.
	StageJoin Stage = "Join"
	// StageTermination is after the instance's deletion was requested: its SimMachine stays.
	StageTermination Stage = "Termination"
)

// MachineFailure is why an instance cannot be had.
type MachineFailure struct {
	// reason of the Ready condition, in CamelCase, such as InsufficientCapacity.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`
	Reason string `json:"reason"`
	// message of the Ready condition.
	//
	// +optional
	Message string `json:"message,omitempty"`
}

// NodeInfo is what an instance reports of its platform.
type NodeInfo struct {
	// architecture of the processor, as in the label kubernetes.io/arch.
	//
	// +optional
	// +kubebuilder:default=amd64
	Architecture string `json:"architecture,omitempty"`
	// operatingSystem, as in the label kubernetes.io/os.
	//
	// +optional
	// +kubebuilder:default=linux
	OperatingSystem string `json:"operatingSystem,omitempty"`
}

// SimMachineSpec describes an instance and its behaviour.
type SimMachineSpec struct {
	// providerID of the instance, sim://<cluster>/<machine>; written by the provider when the
	// instance exists.
	//
	// +optional
	ProviderID string `json:"providerID,omitempty"`

	// instanceType becomes the Node label node.kubernetes.io/instance-type.
	//
	// +optional
	InstanceType string `json:"instanceType,omitempty"`
	// zone becomes the Node label topology.kubernetes.io/zone. The failure domain of the Machine
	// takes precedence.
	//
	// +optional
	Zone string `json:"zone,omitempty"`
	// region becomes the Node label topology.kubernetes.io/region.
	//
	// +optional
	Region string `json:"region,omitempty"`

	// capacity that the provider announces in the template's status, and that the Node reports
	// unless nodeCapacity differs. Absent: the template announces nothing, like those of many
	// providers.
	//
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`
	// nodeInfo that the provider announces in the template's status, and that the Node reports.
	//
	// +optional
	// +kubebuilder:default={}
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`

	// nodeCapacity is what the Node reports, if that differs from what was announced.
	//
	// +optional
	NodeCapacity corev1.ResourceList `json:"nodeCapacity,omitempty"`
	// kubeReserved is subtracted from the Node's capacity, besides the kubelet's default eviction
	// thresholds (100Mi of memory, a tenth of the ephemeral storage), to give what is allocatable.
	//
	// +optional
	KubeReserved corev1.ResourceList `json:"kubeReserved,omitempty"`
	// nodeLabels the kubelet registers with, besides those that every kubelet sets.
	//
	// +optional
	NodeLabels map[string]string `json:"nodeLabels,omitempty"`
	// nodeTaints the kubelet registers with. Absent: karpenter.sh/unregistered:NoExecute, which
	// Karpenter expects of every machine it may claim and removes, and
	// node.cluster.x-k8s.io/uninitialized:NoSchedule, with which kubeadm's machines join and which
	// Cluster API's Machine controller removes. An empty list registers without.
	//
	// +optional
	// +kubebuilder:default={{key: "karpenter.sh/unregistered", effect: "NoExecute"}, {key: "node.cluster.x-k8s.io/uninitialized", effect: "NoSchedule"}}
	NodeTaints []corev1.Taint `json:"nodeTaints"`

	// bootDelay is how long the instance takes from the order to its providerID.
	//
	// +optional
	// +kubebuilder:default="1s"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]+([.][0-9]+)?(ms|s|m|h))+$`
	BootDelay metav1.Duration `json:"bootDelay,omitempty,omitzero"`
	// joinDelay is how long the kubelet takes from then on to register its Node.
	//
	// +optional
	// +kubebuilder:default="1s"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]+([.][0-9]+)?(ms|s|m|h))+$`
	JoinDelay metav1.Duration `json:"joinDelay,omitempty,omitzero"`
	// terminationDelay is how long the instance takes to stop after its deletion was requested.
	//
	// +optional
	// +kubebuilder:default="1s"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]+([.][0-9]+)?(ms|s|m|h))+$`
	TerminationDelay metav1.Duration `json:"terminationDelay,omitempty,omitzero"`
	// failure prevents an instance that does not exist yet from being created, as long as it is
	// set. Ignored once the instance exists.
	//
	// +optional
	Failure *MachineFailure `json:"failure,omitempty"`
	// stuckAt is where the instance hangs, without an error, for as long as it is set.
	//
	// +optional
	StuckAt Stage `json:"stuckAt,omitempty"`
}

// MachineInitialization is the part of the contract that Cluster API waits for.
type MachineInitialization struct {
	// provisioned is true once the instance exists.
	//
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// SimMachineStatus is what has become of an instance. The times are what the provider continues
// from after a restart.
type SimMachineStatus struct {
	// initialization of the instance.
	//
	// +optional
	Initialization MachineInitialization `json:"initialization,omitempty,omitzero"`
	// conditions of the instance: Ready, with the reason why it is not.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// addresses of the instance.
	//
	// +optional
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`
	// failureDomain the instance runs in.
	//
	// +optional
	FailureDomain string `json:"failureDomain,omitempty"`
	// bootStartedAt is when the instance was ordered.
	//
	// +optional
	BootStartedAt *metav1.MicroTime `json:"bootStartedAt,omitempty"`
	// bootedAt is when the instance came into being.
	//
	// +optional
	BootedAt *metav1.MicroTime `json:"bootedAt,omitempty"`
	// joinedAt is when the kubelet registered its Node.
	//
	// +optional
	JoinedAt *metav1.MicroTime `json:"joinedAt,omitempty"`
	// stoppedAt is when the instance's deletion was requested; its kubelet is silent from then on.
	//
	// +optional
	StoppedAt *metav1.MicroTime `json:"stoppedAt,omitempty"`
}

// SimMachine is one simulated instance.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.instanceType`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="ProviderID",type=string,JSONPath=`.spec.providerID`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SimMachine struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SimMachineSpec   `json:"spec,omitempty,omitzero"`
	Status SimMachineStatus `json:"status,omitempty,omitzero"`
}

// SimMachineList is a list of SimMachines.
//
// +kubebuilder:object:root=true
type SimMachineList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimMachine `json:"items"`
}

// SimMachineTemplateResource is what each SimMachine of a template is made from.
type SimMachineTemplateResource struct {
	// metadata for the SimMachines.
	//
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// spec of the SimMachines.
	//
	// +required
	Spec SimMachineSpec `json:"spec"`
}

// SimMachineTemplateSpec holds the template.
type SimMachineTemplateSpec struct {
	// template of the SimMachines. Changing it in place changes the machines created from then on.
	//
	// +required
	Template SimMachineTemplateResource `json:"template"`
}

// SimMachineTemplateStatus is what autoscalers read to scale from zero.
type SimMachineTemplateStatus struct {
	// capacity of a machine of this template.
	//
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`
	// nodeInfo of a machine of this template.
	//
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`
}

// SimMachineTemplate is the template of simulated instances of one kind.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1alpha1"
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.template.spec.instanceType`
// +kubebuilder:printcolumn:name="CPU",type=string,JSONPath=`.status.capacity.cpu`
// +kubebuilder:printcolumn:name="Memory",type=string,JSONPath=`.status.capacity.memory`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SimMachineTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SimMachineTemplateSpec   `json:"spec,omitempty,omitzero"`
	Status SimMachineTemplateStatus `json:"status,omitempty,omitzero"`
}

// SimMachineTemplateList is a list of SimMachineTemplates.
//
// +kubebuilder:object:root=true
type SimMachineTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SimMachineTemplate `json:"items"`
}
