// Package placeholder writes and reads the provider ID that a NodeClaim carries until its machine has a real one.
//
// Karpenter core stops provisioning and disrupting while any NodeClaim has no provider ID, and infrastructure may take
// minutes to give one out. A placeholder is known at once, unique, and says by itself which claim it stands for.
package placeholder

import (
	"strings"
)

const scheme = "capi-claim://"

// ProviderID returns the placeholder of one claim of one Cluster.
func ProviderID(clusterNamespace, clusterName, claimID string) string {
	return scheme + clusterNamespace + "/" + clusterName + "/" + claimID
}

// Is reports whether the provider ID is a placeholder, of whatever Cluster.
func Is(providerID string) bool {
	return strings.HasPrefix(providerID, scheme)
}

// Parse returns what a placeholder stands for, and false for any other provider ID.
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
