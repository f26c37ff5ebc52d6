//nolint:lll // a marker cannot be broken into lines
package v1alpha1

// Kubelet describes how the kubelets of the selected node groups are configured. It is only a
// description: the machines' bootstrap configuration is what configures a kubelet, and a change
// here neither changes nor replaces a Node.
//
// Use the values of the kubelet's own configuration, in the same notation. The overhead of a
// resource that kubeReserved, systemReserved or evictionHard contains is calculated from these
// fields, unless real Nodes of the group had less left for pods. For other resources, the overhead
// is learned from real Nodes, and the kubelet's defaults apply until then.
type Kubelet struct {
	// maxPods is how many pods fit on a Node, as the kubelet's maxPods. It takes precedence over
	// the node groups' own number, unless their Nodes reported less. Absent means the node group's
	// number.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	MaxPods *int32 `json:"maxPods,omitempty"`
	// podsPerCore limits the pods on a Node to this many for each CPU, as the kubelet's
	// podsPerCore. The smaller of this limit and maxPods applies. Absent means no such limit.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	PodsPerCore *int32 `json:"podsPerCore,omitempty"`
	// kubeReserved is what is reserved for Kubernetes' own daemons, as the kubelet's kubeReserved:
	// cpu, memory and ephemeral-storage.
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(name, name in ['cpu','memory','ephemeral-storage'])",message="kubeReserved may contain only cpu, memory and ephemeral-storage: other resources are not subtracted from a Node's"
	// +optional
	KubeReserved map[string]ReservedQuantity `json:"kubeReserved,omitempty"`
	// systemReserved is what is reserved for the operating system, as the kubelet's systemReserved:
	// cpu, memory and ephemeral-storage.
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(name, name in ['cpu','memory','ephemeral-storage'])",message="systemReserved may contain only cpu, memory and ephemeral-storage: other resources are not subtracted from a Node's"
	// +optional
	SystemReserved map[string]ReservedQuantity `json:"systemReserved,omitempty"`
	// evictionHard are the thresholds below which the kubelet evicts pods, as the kubelet's
	// evictionHard: memory.available and nodefs.available, a quantity or a percentage of the
	// machine's capacity. This amount is not available to pods. Absent means the kubelet's
	// defaults, 100Mi of memory (500Mi on Windows) and 10% of the file system. As with the kubelet,
	// if the map is set, a missing threshold means no threshold, not the default.
	// +kubebuilder:validation:MinProperties=1
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(signal, signal in ['memory.available','nodefs.available'])",message="evictionHard may contain only memory.available and nodefs.available: other signals do not reduce the resources of pods"
	// +optional
	EvictionHard map[string]EvictionThreshold `json:"evictionHard,omitempty"`
}

// ReservedQuantity is an amount of a resource in Kubernetes notation.
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]{1,15}([.][0-9]{1,3})?([KMGTP]i|[kMGTPm])?$')",message="write a quantity, for example 100m or 1Gi"
type ReservedQuantity string

// EvictionThreshold is an amount of a resource in Kubernetes notation, or a percentage of the
// machine's capacity. 0% and 100% mean no threshold, as with the kubelet.
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]{1,15}([.][0-9]{1,3})?([KMGTP]i|[kMGTPm])?|(100([.]0{1,3})?|[0-9]{1,2}([.][0-9]{1,3})?)%)$')",message="write a quantity or a percentage up to 100%, for example 100Mi or 5%"
type EvictionThreshold string

// The signals of [Kubelet.EvictionHard].
const (
	SignalMemoryAvailable = "memory.available"
	SignalNodefsAvailable = "nodefs.available"
)
