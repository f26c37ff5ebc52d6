package authz

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// HolderSet is a set of holders of claims.
type HolderSet struct {
	// Any holds every holder.
	Any bool
	// Names are members, and so is every holder that begins with one of Prefixes.
	Names, Prefixes []string
}

// Has reports whether the holder is a member.
func (s HolderSet) Has(holder string) bool {
	return s.Any || slices.Contains(s.Names, holder) ||
		slices.ContainsFunc(s.Prefixes, func(prefix string) bool { return strings.HasPrefix(holder, prefix) })
}

// String lists the members for people.
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

// Holders are the holders that a role may act as: it makes claims under their names, collects and releases their claims. A role
// that is not here may act as none.
//
// Claims whose holder was lost have the holder `unknown`, under which no claim can be made or collected. The Cluster's own shim
// may release them.
var Holders = map[Role]HolderSet{
	RoleCluster:    {Names: []string{"karpenter", "unknown"}},
	RoleAutoscaler: {Names: []string{"cluster-autoscaler"}, Prefixes: []string{"cluster-autoscaler-"}},
	RoleAdmin:      {Any: true},
}

// ReportsNodes reports whether the holder's SyncClaims also report what the Cluster's Nodes look like: those of the Cluster's own
// shim do, and no others, so that one holder's report does not replace another's.
func ReportsNodes(holder string) bool { return Holders[RoleCluster].Has(holder) }

// Holders returns the holders that the caller may act as by calling a method for a Cluster.
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
