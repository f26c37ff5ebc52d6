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
	// clusterctlLabel marks what `clusterctl init` installs. `clusterctl move` only considers kinds
	// whose CRD has it.
	clusterctlLabel = "clusterctl.cluster.x-k8s.io"
	// MoveLabel marks an object that `clusterctl move` includes although no moved object owns it.
	MoveLabel = clusterctlLabel + "/move"
)

// Provider is a Cluster API provider in clusterctl's inventory, which `clusterctl init` records and
// `clusterctl move` compares between hubs.
type Provider struct {
	// Name is the provider's name, such as cluster-api. Type is its type in the inventory, such as
	// CoreProvider.
	Name, Type string
	// Label identifies the provider among all types: its name, with a prefix for every type but the
	// core.
	Label string
	// Namespace is where it is installed. A move also considers the Secrets in it.
	Namespace string
	// Version is a semantic version. A hub accepts no move from a hub with a newer provider.
	Version string
}

// Mark labels objects as belonging to the provider, like `clusterctl init`.
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

// Inventory reads the CRDs of clusterctl's inventory and the version of Cluster API from the folder
// that [ClusterAPI] reads.
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
