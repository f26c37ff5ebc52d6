package e2e_test

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// TestARestoreOfAHubLosesNothing loses the hub while the spoke runs, and restores its objects in
// another one like Velero: in Velero's order, the Cluster last, without status, owners and fields
// that the API server sets.
func TestARestoreOfAHubLosesNothing(t *testing.T) {
	figure := shows(t, "a restore of the hub's objects in another hub loses no Node, no claim and no machine")
	if testing.Short() {
		t.Skip("not in the short run: a move also recreates every object")
	}
	const nodes = 50
	h := startHubs(t, "e2e-restore")
	before, bystander := h.fill(t, nodes)
	destroyed := providerLogs(t, h.target, "instance stops")
	made := providerLogs(t, h.target, "instance exists")

	backup := backUp(t, h.source.Sandbox.HubConfig())
	for _, component := range append(lo.Times(agents, sandbox.AgentName), sandbox.ClusterAPI, sandbox.SimProvider) {
		require.NoError(t, h.source.Sandbox.StopComponent(component))
	}
	began := time.Now()
	backup.restore(t, h.target.Sandbox.HubConfig())
	figure("%d objects were restored in %.0f s", len(backup), time.Since(began).Seconds())
	figure("and all was as before %.0f s later", h.takeOver(t, before, bystander).Seconds())

	h.grow(t, nodes, bystander)
	require.Len(t, made(), 2*more, "instances that the target made")
	require.Empty(t, destroyed(), "instances that the target destroyed")

	h.shrink(t, nodes)
	require.Equal(t, before.replicas, h.holdings(t, h.target).replicas)
	require.Empty(t, h.faults())
}

// backup is the content of the Cluster's namespace, in the order of its restore.
type backup []backedUp

type backedUp struct {
	resource schema.GroupVersionResource
	object   unstructured.Unstructured
}

// backUp reads every object of the Cluster's namespace that can be created again.
func backUp(t *testing.T, hub *rest.Config) backup {
	t.Helper()
	finder, err := discovery.NewDiscoveryClientForConfig(hub)
	require.NoError(t, err)
	client, err := dynamic.NewForConfig(hub)
	require.NoError(t, err)
	lists, err := discovery.ServerPreferredNamespacedResources(finder)
	require.NoError(t, err)
	var all backup
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		require.NoError(t, err)
		for _, r := range list.APIResources {
			// Omitted by Velero, or created by the hub itself.
			skipped := []string{"events", "endpoints", "endpointslices", "leases", "serviceaccounts", "roles", "rolebindings"}
			if slices.Contains(skipped, r.Name) || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "create") {
				continue
			}
			resource := version.WithResource(r.Name)
			items, err := client.Resource(resource).Namespace(sandbox.ClusterNamespace).List(within(t, soon), metav1.ListOptions{})
			require.NoError(t, err, "listing %s", resource)
			for _, item := range items.Items {
				all = append(all, backedUp{resource, item})
			}
		}
	}
	rank := func(b backedUp) int {
		name := b.resource.Resource
		return slices.Index([]string{"secrets", "configmaps", name}, name) + lo.Ternary(name == "clusters", 1, 0)
	}
	slices.SortStableFunc(all, func(a, b backedUp) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.resource.Resource, b.resource.Resource))
	})
	return all
}

// restore creates the objects again.
func (b backup) restore(t *testing.T, hub *rest.Config) {
	t.Helper()
	client, err := dynamic.NewForConfig(hub)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range b {
		object := o.object.DeepCopy()
		unstructured.RemoveNestedField(object.Object, "status")
		for _, field := range []string{
			"generateName", "selfLink", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
			"deletionGracePeriodSeconds", "ownerReferences", "managedFields",
		} {
			unstructured.RemoveNestedField(object.Object, "metadata", field)
		}
		_, err := client.Resource(o.resource).Namespace(object.GetNamespace()).Create(within(t, soon), object, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatalf("restoring %s %s: %v", o.resource.Resource, object.GetName(), err)
		}
	}
}
