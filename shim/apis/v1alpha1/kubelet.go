//nolint:lll // a marker cannot be broken into lines
package v1alpha1

// Kubelet describes how the kubelets of the selected node groups are configured. It only describes: what makes it so is the
// machines' bootstrap configuration, and changing it here neither changes nor replaces a Node.
//
// Write what the kubelet's own configuration says, in the same notation. A resource that kubeReserved, systemReserved or
// evictionHard speaks of is calculated from here, unless real Nodes of the group showed that less is left for pods; for one that
// none of them speaks of, what real Nodes showed is used, and the kubelet's defaults until then.
type Kubelet struct {
	// maxPods is how many pods fit on a Node, as the kubelet's maxPods. It wins over the node groups' own number, unless
	// their Nodes showed less than that. Absent means the node group's number.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	MaxPods *int32 `json:"maxPods,omitempty"`
	// podsPerCore limits the pods on a Node to this many for each CPU, as the kubelet's podsPerCore. The smaller of it and
	// maxPods counts. Absent means no such limit.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	PodsPerCore *int32 `json:"podsPerCore,omitempty"`
	// kubeReserved is what is kept back for Kubernetes' own daemons, as the kubelet's kubeReserved: cpu, memory and
	// ephemeral-storage.
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(name, name in ['cpu','memory','ephemeral-storage'])",message="kubeReserved may name cpu, memory and ephemeral-storage; nothing else takes room from pods, leave it out"
	// +optional
	KubeReserved map[string]ReservedQuantity `json:"kubeReserved,omitempty"`
	// systemReserved is what is kept back for the operating system, as the kubelet's systemReserved: cpu, memory and
	// ephemeral-storage.
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(name, name in ['cpu','memory','ephemeral-storage'])",message="systemReserved may name cpu, memory and ephemeral-storage; nothing else takes room from pods, leave it out"
	// +optional
	SystemReserved map[string]ReservedQuantity `json:"systemReserved,omitempty"`
	// evictionHard are the thresholds below which the kubelet evicts pods, and which it therefore does not give out, as the
	// kubelet's evictionHard: memory.available and nodefs.available, a quantity or a percentage of the machine's. Absent means
	// the kubelet's defaults, 100Mi of memory (500Mi on Windows) and 10% of the file system. As with the kubelet, a threshold
	// that is missing from a map that is given is none, not the default.
	// +kubebuilder:validation:MinProperties=1
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(signal, signal in ['memory.available','nodefs.available'])",message="evictionHard may name memory.available and nodefs.available; no other signal takes room from pods, leave it out"
	// +optional
	EvictionHard map[string]EvictionThreshold `json:"evictionHard,omitempty"`
}

// ReservedQuantity is an amount of a resource in Kubernetes notation.
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]{1,15}([.][0-9]{1,3})?([KMGTP]i|[kMGTPm])?$')",message="write a quantity, for example 100m or 1Gi"
type ReservedQuantity string

// EvictionThreshold is an amount of a resource in Kubernetes notation, or a percentage of what the machine has. 0% and 100% are
// no threshold, as with the kubelet.
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]{1,15}([.][0-9]{1,3})?([KMGTP]i|[kMGTPm])?|(100([.]0{1,3})?|[0-9]{1,2}([.][0-9]{1,3})?)%)$')",message="write a quantity or a percentage up to 100%, for example 100Mi or 5%"
type EvictionThreshold string

// The signals of [Kubelet.EvictionHard].
const (
	SignalMemoryAvailable = "memory.available"
	SignalNodefsAvailable = "nodefs.available"
)
