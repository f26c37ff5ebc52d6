package authz

import (
	"path"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// pattern matches each part of a Cluster's name in a policy. Of the special characters of package
// path it only allows `*`.
var pattern = regexp.MustCompile(`^[a-z0-9.*-]+$`)

// parseClusters returns the Clusters or patterns that the texts contain, and reports invalid texts.
// The result is never nil.
func parseClusters(texts []string, wrong func(format string, args ...any)) []types.NamespacedName {
	clusters := make([]types.NamespacedName, 0, len(texts))
	for _, text := range texts {
		namespace, name, found := strings.Cut(text, "/")
		if !found || !pattern.MatchString(namespace) || !pattern.MatchString(name) {
			wrong("cluster %q is not <namespace>/<name>, both in lower case; * stands for any characters of either", text)
			continue
		}
		clusters = append(clusters, types.NamespacedName{Namespace: namespace, Name: name})
	}
	return clusters
}

// join joins the names, for messages.
func join(clusters []types.NamespacedName) string {
	names := make([]string, 0, len(clusters))
	for _, cluster := range clusters {
		names = append(names, cluster.String())
	}
	return strings.Join(names, ", ")
}

// among reports whether one of the patterns matches the Cluster.
func among(patterns []types.NamespacedName, cluster types.NamespacedName) bool {
	return slices.ContainsFunc(patterns, func(p types.NamespacedName) bool {
		return like(p.Namespace, cluster.Namespace) && like(p.Name, cluster.Name)
	})
}

func like(pattern, name string) bool {
	matched, err := path.Match(pattern, name)
	return matched && err == nil
}
