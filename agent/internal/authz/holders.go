package authz

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// HolderSet is a set of holders of claims.
type HolderSet struct {
	// Any includes every holder.
	Any bool
	// Names lists members. A holder that begins with one of the Prefixes is a member too.
	Names, Prefixes []string
}

// Has reports whether the holder is a member.
func (s HolderSet) Has(holder string) bool {
	return s.Any || slices.Contains(s.Names, holder) ||
		slices.ContainsFunc(s.Prefixes, func(prefix string) bool { return strings.HasPrefix(holder, prefix) })
}

// String lists the members, for messages.
func (s HolderSet) String() string {
	if s.Any {
		return "any"
	}
	members := slices.Clone(s.Names)
	for _, prefix := range s.Prefixes {
		members = append(members, prefix+"*")
	}
	return strings.Join(members, ", ")
}

// Holders lists the holders that each role may act as: it may create claims under their names, and
// collect and release their claims. A role that is missing here may act as none.
//
// Claims whose holder was lost have the holder `unknown`. No claim can be created or collected
// under that name. The Cluster's own shim may release these claims.
var Holders = map[Role]HolderSet{
	RoleCluster:    {Names: []string{"karpenter", "unknown"}},
	RoleAutoscaler: {Names: []string{"cluster-autoscaler"}, Prefixes: []string{"cluster-autoscaler-"}},
	RoleAdmin:      {Any: true},
}

// ReportsNodes reports whether the holder's SyncClaims calls also report the Cluster's Nodes. Only
// the Cluster's own shim does so, so that one holder's report does not replace another's.
func ReportsNodes(holder string) bool { return Holders[RoleCluster].Has(holder) }

// Holders returns the holders that the caller may act as when it calls a method for a Cluster.
func (c Caller) Holders(rule Rule, cluster types.NamespacedName) HolderSet {
	var all HolderSet
	for _, g := range c.Grants {
		if !slices.Contains(rule.Roles, g.Role) || !g.covers(cluster) {
			continue
		}
		of := Holders[g.Role]
		all.Any = all.Any || of.Any
		all.Names = append(all.Names, of.Names...)
		all.Prefixes = append(all.Prefixes, of.Prefixes...)
	}
	return all
}
