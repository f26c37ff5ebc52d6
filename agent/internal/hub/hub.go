// Package hub defines the agent's view of the hub: types, served Clusters, and the content and
// indexes of the caches.
package hub

import (
	"context"
	"fmt"
	"maps"
	"slices"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Scheme returns a scheme with the types that the agent uses.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		authorizationv1.AddToScheme, corev1.AddToScheme, eventsv1.AddToScheme, metav1.AddMetaToScheme, clusterv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering types: %w", err)
		}
	}
	return scheme, nil
}

// Scope determines which Clusters the agent serves.
type Scope struct {
	namespaces map[string]bool
	clusters   map[string][]string // names by namespace
}

// NewScope returns the scope of the given namespaces and individual Clusters. With neither, it
// contains everything.
func NewScope(namespaces []string, clusters []types.NamespacedName) Scope {
	s := Scope{namespaces: map[string]bool{}, clusters: map[string][]string{}}
	for _, namespace := range namespaces {
		s.namespaces[namespace] = true
	}
	for _, cluster := range clusters {
		if !s.namespaces[cluster.Namespace] && !slices.Contains(s.clusters[cluster.Namespace], cluster.Name) {
			s.clusters[cluster.Namespace] = append(s.clusters[cluster.Namespace], cluster.Name)
		}
	}
	for namespace := range s.clusters {
		slices.Sort(s.clusters[namespace])
	}
	return s
}

// Contains reports whether a Cluster is served.
func (s Scope) Contains(cluster types.NamespacedName) bool {
	if len(s.namespaces) == 0 && len(s.clusters) == 0 {
		return true
	}
	return s.namespaces[cluster.Namespace] || slices.Contains(s.clusters[cluster.Namespace], cluster.Name)
}

// Namespaces returns the sorted namespaces of the served Clusters. An empty result means all.
func (s Scope) Namespaces() []string {
	namespaces := slices.AppendSeq(slices.Collect(maps.Keys(s.namespaces)), maps.Keys(s.clusters))
	slices.Sort(namespaces)
	return slices.Compact(namespaces)
}

// CacheOptions limits the caches to the scope: by namespace and, where individual Clusters are
// named, by the label with an object's Cluster. [Slim] determines what the caches keep.
func (s Scope) CacheOptions() (cache.Options, error) {
	options := cache.Options{
		DefaultTransform: Slim,
		ByObject:         map[client.Object]cache.ByObject{},
	}
	if len(s.namespaces) == 0 && len(s.clusters) == 0 {
		return options, nil
	}
	options.DefaultNamespaces = map[string]cache.Config{}
	for namespace := range s.namespaces {
		options.DefaultNamespaces[namespace] = cache.Config{}
	}
	for namespace := range s.clusters {
		options.DefaultNamespaces[namespace] = cache.Config{}
	}
	for object, label := range map[client.Object]string{
		&clusterv1.MachineDeployment{}: clusterv1.ClusterNameLabel,
		&clusterv1.MachineSet{}:        clusterv1.ClusterNameLabel,
		&clusterv1.Machine{}:           clusterv1.ClusterNameLabel,
		&v1alpha1.MachineClaim{}:       v1alpha1.ClusterLabel,
		&clusterv1.Cluster{}:           "",
	} {
		byNamespace := map[string]cache.Config{}
		for namespace := range s.namespaces {
			byNamespace[namespace] = cache.Config{}
		}
		for namespace, names := range s.clusters {
			config := cache.Config{}
			switch {
			case label != "":
				requirement, err := labels.NewRequirement(label, selection.In, names)
				if err != nil {
					return cache.Options{}, fmt.Errorf("selecting the Clusters %v: %w", names, err)
				}
				config.LabelSelector = labels.NewSelector().Add(*requirement)
			// A Cluster does not carry the label with its own name.
			case len(names) == 1:
				config.FieldSelector = fields.OneTermEqualSelector("metadata.name", names[0])
			}
			byNamespace[namespace] = config
		}
		options.ByObject[object] = cache.ByObject{Namespaces: byNamespace}
	}
	return options, nil
}

// These are the names of the caches' indexes, for client.MatchingFields combined with
// client.InNamespace.
const (
	// DeploymentsByCluster indexes MachineDeployments by spec.clusterName.
	DeploymentsByCluster = "spec.clusterName"
	// DeploymentsByTemplate indexes MachineDeployments by their infrastructure template; see
	// [TemplateIndex].
	DeploymentsByTemplate = "spec.template.spec.infrastructureRef"
	// ByDeployment indexes Machines and MachineSets by the name of their MachineDeployment, and
	// MachineClaims that have not ended by spec.nodeGroup.
	ByDeployment = "machineDeployment"
	// ByCluster indexes Machines and MachineClaims, including ended ones, by the name of their
	// Cluster.
	ByCluster = "cluster"
	// FailedByDeployment indexes failed MachineClaims, including ended ones, by spec.nodeGroup.
	FailedByDeployment = "failed.machineDeployment"
	// JoiningByMachine indexes bound MachineClaims by the name of their Machine, until the claim's
	// status names its Node. It does not index all claims: an index by a value that is unique to
	// each object uses more than half as much memory as a slim object.
	JoiningByMachine = "joining.machine"
)

// NotEndedClaims excludes ended MachineClaims from a list request to the API server.
func NotEndedClaims() client.ListOption {
	return client.MatchingFieldsSelector{Selector: fields.OneTermNotEqualSelector("status.phase", string(v1alpha1.PhaseEnded))}
}

// TemplateIndex returns the [DeploymentsByTemplate] value of a template.
func TemplateIndex(apiGroup, kind, name string) string { return kind + "." + apiGroup + "/" + name }

// Index adds the indexes. It must be called before the caches start.
func Index(ctx context.Context, indexer client.FieldIndexer) error {
	for _, index := range []struct {
		object client.Object
		name   string
		value  func(client.Object) string
	}{
		{&clusterv1.MachineDeployment{}, DeploymentsByCluster, func(object client.Object) string {
			md, ok := object.(*clusterv1.MachineDeployment)
			if !ok {
				return ""
			}
			return md.Spec.ClusterName
		}},
		{&clusterv1.MachineDeployment{}, DeploymentsByTemplate, func(object client.Object) string {
			md, ok := object.(*clusterv1.MachineDeployment)
			if !ok {
				return ""
			}
			ref := md.Spec.Template.Spec.InfrastructureRef
			return TemplateIndex(ref.APIGroup, ref.Kind, ref.Name)
		}},
		{&clusterv1.Machine{}, ByDeployment, func(object client.Object) string {
			return object.GetLabels()[clusterv1.MachineDeploymentNameLabel]
		}},
		{&clusterv1.Machine{}, ByCluster, func(object client.Object) string {
			machine, ok := object.(*clusterv1.Machine)
			if !ok {
				return ""
			}
			return machine.Spec.ClusterName
		}},
		{&clusterv1.MachineSet{}, ByDeployment, func(object client.Object) string {
			return object.GetLabels()[clusterv1.MachineDeploymentNameLabel]
		}},
		{&v1alpha1.MachineClaim{}, ByDeployment, func(object client.Object) string {
			claim, ok := object.(*v1alpha1.MachineClaim)
			if !ok || claim.CurrentPhase() == v1alpha1.PhaseEnded {
				return ""
			}
			return claim.Spec.NodeGroup
		}},
		{&v1alpha1.MachineClaim{}, ByCluster, func(object client.Object) string {
			claim, ok := object.(*v1alpha1.MachineClaim)
			if !ok {
				return ""
			}
			return claim.Spec.ClusterName
		}},
		{&v1alpha1.MachineClaim{}, FailedByDeployment, func(object client.Object) string {
			claim, ok := object.(*v1alpha1.MachineClaim)
			if !ok || claim.Status.FailedAt == nil {
				return ""
			}
			return claim.Spec.NodeGroup
		}},
		{&v1alpha1.MachineClaim{}, JoiningByMachine, func(object client.Object) string {
			claim, ok := object.(*v1alpha1.MachineClaim)
			if !ok || claim.CurrentPhase() != v1alpha1.PhaseBound || claim.Status.Machine == nil || claim.Status.Machine.NodeName != "" {
				return ""
			}
			return claim.Status.Machine.Name
		}},
	} {
		err := indexer.IndexField(ctx, index.object, index.name, func(object client.Object) []string {
			if value := index.value(object); value != "" {
				return []string{value}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("adding index %s: %w", index.name, err)
		}
	}
	return nil
}
