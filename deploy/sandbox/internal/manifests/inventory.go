package manifests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// clusterctlLabel marks what `clusterctl init` installs. `clusterctl move` looks for objects only of kinds whose CRD has it.
	clusterctlLabel = "clusterctl.cluster.x-k8s.io"
	// MoveLabel marks an object that `clusterctl move` takes along although nothing that it moves owns it.
	MoveLabel = clusterctlLabel + "/move"
)

// Provider is a provider of Cluster API as clusterctl's inventory has it: what `clusterctl init` notes of what it installs, and
// `clusterctl move` compares between hubs.
type Provider struct {
	// Name of the provider, such as cluster-api, and Type as the inventory calls it, such as CoreProvider.
	Name, Type string
	// Label tells the provider from those of other types: its name, with a prefix for every type but the core.
	Label string
	// Namespace it is installed in. Its Secrets are looked at in a move, too.
	Namespace string
	// Version is a semantic version. A hub takes nothing from a hub whose provider is newer.
	Version string
}

// Mark labels what belongs to the provider as `clusterctl init` does.
func (p Provider) Mark(objects []client.Object) {
	for _, o := range objects {
		o.SetLabels(lo.Assign(o.GetLabels(), map[string]string{clusterctlLabel: "", clusterv1.ProviderNameLabel: p.Label}))
	}
}

// Entry returns the provider's entry in the inventory.
func (p Provider) Entry() client.Object {
	entry := &unstructured.Unstructured{Object: map[string]any{"providerName": p.Name, "type": p.Type, "version": p.Version}}
	entry.SetGroupVersionKind(schema.GroupVersionKind{Group: clusterctlLabel, Version: "v1alpha3", Kind: "Provider"})
	entry.SetNamespace(p.Namespace)
	entry.SetName(p.Label)
	p.Mark([]client.Object{entry})
	return entry
}

// Inventory reads, from the folder that [ClusterAPI] reads, the CRDs of clusterctl's inventory and the version of Cluster API.
func Inventory(dir string) (crds []client.Object, version string, err error) {
	definitions, err := CRDs(os.DirFS(filepath.Join(dir, "inventory")))
	if err != nil {
		return nil, "", err
	}
	data, err := os.ReadFile(filepath.Join(dir, "version")) //nolint:gosec // the caller's to choose
	if err != nil {
		return nil, "", fmt.Errorf("reading the version: %w", err)
	}
	return Objects(definitions), strings.TrimSpace(string(data)), nil
}
