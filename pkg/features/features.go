// Package features names what an agent can do, as GetStatus lists it, so that a caller can find out
// before it relies on something that an older agent lacks.
//
// Names are append-only: a name never changes its meaning, and the name of a feature that is gone
// is never used again.
package features

import "slices"

// These are the names. [All] lists them, in the order in which they were added.
const (
	// AdoptMachines means that a claim can take over a machine that exists
	// (CreateClaimRequest.adopt_machine and adopt_above_min_size).
	AdoptMachines = "adopt-machines"
	// ReturnMachines means that ClaimService.ReturnMachine is served.
	ReturnMachines = "return-machines"
	// SpokeIDs means that claims remember the cluster that they were made from
	// (CreateClaimRequest.spoke_id), and that SyncClaims of another one releases none of them.
	SpokeIDs = "spoke-ids"
	// HeldNodeGroups means that a node group can be for the claims of one holder alone
	// (NodeGroup.holder).
	HeldNodeGroups = "held-node-groups"
	// Certificates means that CertificateService issues certificates: the agent has an issuer.
	Certificates = "certificates"
	// ClusterAutoscaler means that the protocol of a stock cluster-autoscaler is served.
	ClusterAutoscaler = "cluster-autoscaler"
	// Clusters means that ClusterService is served.
	Clusters = "clusters"
	// NodePools means that NodePoolService is served: NodePools and NodeClasses are published from
	// the hub.
	NodePools = "node-pools"
)

// All returns every name, in the order in which they were added.
func All() []string {
	return []string{AdoptMachines, ReturnMachines, SpokeIDs, HeldNodeGroups, Certificates, ClusterAutoscaler, Clusters, NodePools}
}

// Baseline returns what every agent can do that does not list its features.
func Baseline() []string { return []string{AdoptMachines, ReturnMachines, SpokeIDs, HeldNodeGroups} }

// Configured says of features that depend on an agent's configuration whether it has them.
type Configured map[string]bool

// Served returns the names of the features of an agent that has all of them, but for those that
// configured excludes.
func Served(configured Configured) []string {
	return slices.DeleteFunc(All(), func(name string) bool {
		has, depends := configured[name]
		return depends && !has
	})
}

// Missing returns which of the wanted features an agent lacks, in the order of wanted. The listed
// features are those of its GetStatus.
func Missing(listed, wanted []string) []string {
	if len(listed) == 0 {
		listed = Baseline()
	}
	return slices.DeleteFunc(slices.Clone(wanted), func(name string) bool { return slices.Contains(listed, name) })
}
