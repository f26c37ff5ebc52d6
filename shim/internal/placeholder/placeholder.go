// Package placeholder formats and parses the provider ID that a NodeClaim carries until its machine
// has a real one.
//
// Karpenter core stops provisioning and disrupting while any NodeClaim has no provider ID, and the
// infrastructure may take minutes to assign one. A placeholder is available at once, unique, and
// identifies its claim.
package placeholder

import (
	"strings"
)

const scheme = "capi-claim://"

// ProviderID returns the placeholder of a Cluster's claim.
func ProviderID(clusterNamespace, clusterName, claimID string) string {
	return scheme + clusterNamespace + "/" + clusterName + "/" + claimID
}

// Is reports whether the provider ID is a placeholder, of any Cluster.
func Is(providerID string) bool {
	return strings.HasPrefix(providerID, scheme)
}

// Parse returns the claim that a placeholder identifies, and false for any other provider ID.
func Parse(providerID string) (clusterNamespace, clusterName, claimID string, ok bool) {
	rest, found := strings.CutPrefix(providerID, scheme)
	if !found {
		return "", "", "", false
	}
	parts := strings.Split(rest, "/")
	if len(parts) != 3 || parts[0] == "" || parts[1] == "" || parts[2] == "" {
		return "", "", "", false
	}
	return parts[0], parts[1], parts[2], true
}
