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
