package v1alpha1

// DriftAction is what happens to a Node that no longer matches its specification.
//
// +kubebuilder:validation:Enum=Replace;Ignore
type DriftAction string

const (
	// DriftReplace lets Karpenter replace the Node, within the NodePool's disruption budgets.
	DriftReplace DriftAction = "Replace"
	// DriftIgnore leaves the Node alone.
	DriftIgnore DriftAction = "Ignore"
)

// DriftPolicy selects the reasons for which Karpenter replaces Nodes. It does not affect
// Karpenter's own reasons, such as a changed NodePool, nor Machines that Cluster API replaces in a
// rolling update.
type DriftPolicy struct {
	// nodeGroupNotSelected is what happens to Nodes of node groups that scalableResourceSelector no
	// longer matches: Replace, the default, or Ignore. If the selector matches no node group at
	// all, no Node is replaced.
	// +optional
	NodeGroupNotSelected DriftAction `json:"nodeGroupNotSelected,omitempty"`
	// machineNotUpToDate is what happens to Nodes whose machine template changed while their
	// MachineDeployment has the strategy OnDelete, with which Cluster API does not replace them
	// itself: Replace, the default, or Ignore.
	// +optional
	MachineNotUpToDate DriftAction `json:"machineNotUpToDate,omitempty"`
}

// UnknownPriceAction is what happens to a node group without a configured price.
//
// +kubebuilder:validation:Enum=Estimate;Unavailable
type UnknownPriceAction string

const (
	// UnknownPriceEstimate uses the agent's estimate.
	UnknownPriceEstimate UnknownPriceAction = "Estimate"
	// UnknownPriceUnavailable launches nothing from the node group.
	UnknownPriceUnavailable UnknownPriceAction = "Unavailable"
)

// PricePolicy selects the prices that Karpenter may use.
type PricePolicy struct {
	// whenUnknown is what happens to a node group that has neither an annotation with its price nor
	// an entry in a price list: Estimate, the default, uses the agent's estimate, which is
	// calculated from the machines' resources; Unavailable launches nothing from it. Existing Nodes
	// are not affected.
	// +optional
	WhenUnknown UnknownPriceAction `json:"whenUnknown,omitempty"`
}

// AdoptionMode selects the machines without a NodeClaim that Karpenter adopts.
//
// +kubebuilder:validation:Enum=Never;OnRequest;All
type AdoptionMode string

const (
	// AdoptNever adopts none: they stay the user's.
	AdoptNever AdoptionMode = "Never"
	// AdoptOnRequest adopts those whose Node has the annotation
	// karpenter.cluster.x-k8s.io/adopt=true.
	AdoptOnRequest AdoptionMode = "OnRequest"
	// AdoptAll adopts all machines of a floor beyond the min size.
	AdoptAll AdoptionMode = "All"
)

// AdoptedDisruption is whether Karpenter disrupts adopted Nodes.
//
// +kubebuilder:validation:Enum=AfterApproval;Allowed
type AdoptedDisruption string

const (
	// DisruptAfterApproval sets the annotation karpenter.sh/do-not-disrupt=true once on each
	// adopted Node. Removing it is the approval.
	DisruptAfterApproval AdoptedDisruption = "AfterApproval"
	// DisruptAllowed treats adopted Nodes like any others.
	DisruptAllowed AdoptedDisruption = "Allowed"
)

// AdoptionPolicy selects the existing machines that Karpenter adopts. The machines of NodeClaims
// that have no claim, such as those of another provider for Cluster API, are always adopted.
type AdoptionPolicy struct {
	// machines selects which machines of the selected node groups are adopted that have no
	// NodeClaim: Never, the default; OnRequest, those whose Node has the annotation
	// karpenter.cluster.x-k8s.io/adopt=true; or All. A floor is not adopted below the node group's
	// min size, so that replicas stay the same. A machine is adopted only by a NodePool whose
	// requirements its Node meets and whose taints its Node has.
	// +optional
	Machines AdoptionMode `json:"machines,omitempty"`
	// disruption is whether Karpenter may disrupt adopted Nodes: AfterApproval, the default, or
	// Allowed.
	// +optional
	Disruption AdoptedDisruption `json:"disruption,omitempty"`
	// nodesPerMinute is the maximum number of machines without a NodeClaim that are adopted per
	// minute. Default 60.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=6000
	// +optional
	NodesPerMinute *int32 `json:"nodesPerMinute,omitempty"`
}
