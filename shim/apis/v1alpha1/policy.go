package v1alpha1

// DriftAction is what happens to a Node that is not what it should be any more.
//
// +kubebuilder:validation:Enum=Replace;Ignore
type DriftAction string

const (
	// DriftReplace lets Karpenter replace the Node, within the NodePool's disruption budgets.
	DriftReplace DriftAction = "Replace"
	// DriftIgnore leaves the Node alone.
	DriftIgnore DriftAction = "Ignore"
)

// DriftPolicy says for which reasons Karpenter replaces Nodes. Reasons of Karpenter's own, such as a changed NodePool, are not
// affected; nor are Machines that Cluster API replaces by itself, in a rolling update.
type DriftPolicy struct {
	// nodeGroupNotSelected is what happens to Nodes of node groups that scalableResourceSelector does not match any more:
	// Replace, the default, or Ignore. A selector that matches nothing at all replaces nothing.
	// +optional
	NodeGroupNotSelected DriftAction `json:"nodeGroupNotSelected,omitempty"`
	// machineNotUpToDate is what happens to Nodes whose machine template changed while their MachineDeployment has the strategy
	// OnDelete, so that Cluster API waits for somebody to replace them: Replace, the default, or Ignore.
	// +optional
	MachineNotUpToDate DriftAction `json:"machineNotUpToDate,omitempty"`
}

// UnknownPriceAction is what happens to a node group of which nobody said what it costs.
//
// +kubebuilder:validation:Enum=Estimate;Unavailable
type UnknownPriceAction string

const (
	// UnknownPriceEstimate uses the agent's estimate.
	UnknownPriceEstimate UnknownPriceAction = "Estimate"
	// UnknownPriceUnavailable launches nothing from the node group.
	UnknownPriceUnavailable UnknownPriceAction = "Unavailable"
)

// PricePolicy says which prices Karpenter may decide by.
type PricePolicy struct {
	// whenUnknown is what happens to a node group that has neither an annotation with its price nor an entry in a price list:
	// Estimate, the default, uses the agent's estimate, which orders machines by what they have; Unavailable launches nothing
	// from it. Nodes that exist are not affected.
	// +optional
	WhenUnknown UnknownPriceAction `json:"whenUnknown,omitempty"`
}

// AdoptionMode says which machines become Karpenter's that have no NodeClaim.
//
// +kubebuilder:validation:Enum=Never;OnRequest;All
type AdoptionMode string

const (
	// AdoptNever leaves them to the user.
	AdoptNever AdoptionMode = "Never"
	// AdoptOnRequest takes those whose Node has the annotation karpenter.cluster.x-k8s.io/adopt=true.
	AdoptOnRequest AdoptionMode = "OnRequest"
	// AdoptAll takes all of them that the user has beyond the min size.
	AdoptAll AdoptionMode = "All"
)

// AdoptedDisruption says whether Karpenter disrupts adopted Nodes.
//
// +kubebuilder:validation:Enum=AfterApproval;Allowed
type AdoptedDisruption string

const (
	// DisruptAfterApproval gives each adopted Node the annotation karpenter.sh/do-not-disrupt=true, once: taking it off is the approval.
	DisruptAfterApproval AdoptedDisruption = "AfterApproval"
	// DisruptAllowed treats adopted Nodes like any others.
	DisruptAllowed AdoptedDisruption = "Allowed"
)

// AdoptionPolicy says which machines that were there before Karpenter become its own. The machines of NodeClaims that have no claim, such as
// those of another provider for Cluster API, are adopted in any case.
type AdoptionPolicy struct {
	// machines says which machines without a NodeClaim are adopted, of the selected node groups: Never, the default; OnRequest, those whose
	// Node has the annotation karpenter.cluster.x-k8s.io/adopt=true; or All. No more than the user has beyond the node group's min size, so
	// that replicas stay the same; and only by a NodePool whose requirements the Node meets and whose taints it has.
	// +optional
	Machines AdoptionMode `json:"machines,omitempty"`
	// disruption says whether Karpenter may disrupt adopted Nodes: AfterApproval, the default, or Allowed.
	// +optional
	Disruption AdoptedDisruption `json:"disruption,omitempty"`
	// nodesPerMinute is how many machines without a NodeClaim are adopted each minute at most. Default 60.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=6000
	// +optional
	NodesPerMinute *int32 `json:"nodesPerMinute,omitempty"`
}
