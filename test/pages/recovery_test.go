package pages_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// After a restore, one side is older than the other. The page's commands find what only one of them
// has.
func TestTheRecoveryFindsWhatOnlyOneSideHas(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/disaster-recovery.md")
	require.NoError(t, err)
	charts := filepath.Join(root(t), "deploy/charts")
	servers := map[string]*server{
		"hub":   start(t, "testdata/machines.yaml", filepath.Join(charts, "agent/files/crds")),
		"spoke": start(t, filepath.Join(charts, "shim/files/crds")),
	}
	create(ctx, t, servers["hub"].client, "{apiVersion: v1, kind: Namespace, metadata: {name: team-a}}")

	for name, id := range map[string]string{"both": "sim://both", "new": "sim://only-a-node", "joining": ""} {
		create(ctx, t, servers["spoke"].client, "{apiVersion: v1, kind: Node, metadata: {name: "+name+"}, spec: {providerID: '"+id+"'}}")
	}
	for name, id := range map[string]string{"both": "sim://both", "gone": "sim://only-a-machine", "booting": ""} {
		create(ctx, t, servers["hub"].client, "{apiVersion: cluster.x-k8s.io/v1beta2, kind: Machine, "+
			"metadata: {name: "+name+", namespace: team-a}, spec: {providerID: '"+id+"'}}")
	}
	known := create(ctx, t, servers["spoke"].client, "{apiVersion: karpenter.sh/v1, kind: NodeClaim, metadata: {name: a}, "+
		"spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}}}")
	for _, claim := range []struct{ cluster, id, phase string }{
		{"production", string(known.GetUID()), "Bound"},
		{"production", "lost", "Bound"},
		{"production", "over", "Ended"},
		{"production", "waiting", "Pending"},
		{"staging", "another-cluster", "Bound"},
	} {
		made := create(ctx, t, servers["hub"].client, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: MachineClaim, "+
			"metadata: {name: "+claim.cluster+"."+claim.id+", namespace: team-a}, "+
			"spec: {clusterName: "+claim.cluster+", claimID: "+claim.id+", holder: karpenter}}")
		made.Object["status"] = map[string]any{"phase": claim.phase, "machine": map[string]any{"name": "machine-of-" + claim.id, "uid": "u"}}
		require.NoError(t, servers["hub"].client.Status().Update(ctx, made))
	}

	require.Equal(t, []string{"sim://only-a-node"}, strings.Fields(run(ctx, t, servers, page.Script("Restoring the hub"))))
	require.Equal(t, []string{"lost", "machine-of-lost"}, strings.Fields(run(ctx, t, servers, page.Script("Restoring a spoke"))))
}

// create creates the object of a manifest.
func create(ctx context.Context, t *testing.T, server client.Client, manifest string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096).Decode(object); err != nil {
		t.Fatal(err)
	}
	if err := server.Create(ctx, object); err != nil {
		t.Fatal(err)
	}
	return object
}
