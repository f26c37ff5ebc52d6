package pages_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// If a user keeps such an example in Git, every sync writes the number back, and Cluster API
// deletes machines because of it.
func TestNoExampleSetsTheReplicasOfANodeGroup(t *testing.T) {
	documents := 0
	for source, text := range examples(t) {
		objects, err := decode(text)
		require.NoError(t, err, source)
		for _, object := range objects {
			documents++
			require.Empty(t, setsReplicas(object), "%s: %s", source, object.GetKind())
		}
	}
	require.Greater(t, documents, 10, "manifests were found")
}

func TestReplicasOfANodeGroupAreFoundWhereverTheyAre(t *testing.T) {
	for name, tc := range map[string]struct {
		manifest string
		found    []string
	}{
		"MachineDeployment":         {"{kind: MachineDeployment, spec: {replicas: 0}}", []string{"spec.replicas"}},
		"MachineDeployment without": {"{kind: MachineDeployment, spec: {clusterName: a}}", nil},
		"topology": {
			"{kind: Cluster, spec: {topology: {workers: {machineDeployments: [{replicas: 1}]}}}}",
			[]string{"spec.topology.workers.machineDeployments"},
		},
		"topology without":                 {"{kind: Cluster, spec: {topology: {workers: {machineDeployments: [{class: a}]}}}}", nil},
		"a Deployment's are its own":       {"{kind: Deployment, spec: {replicas: 2}}", nil},
		"the control plane of the cluster": {"{kind: Cluster, spec: {topology: {controlPlane: {replicas: 3}}}}", nil},
	} {
		t.Run(name, func(t *testing.T) {
			objects, err := decode(tc.manifest)
			require.NoError(t, err)
			require.Len(t, objects, 1)
			require.Equal(t, tc.found, setsReplicas(objects[0]))
		})
	}
}

// setsReplicas returns the fields of a manifest that set the replicas of a node group.
func setsReplicas(object *unstructured.Unstructured) []string {
	var found []string
	switch object.GetKind() {
	case "MachineDeployment":
		if _, set, _ := unstructured.NestedFieldNoCopy(object.Object, "spec", "replicas"); set {
			found = append(found, "spec.replicas")
		}
	case "Cluster":
		path := []string{"spec", "topology", "workers", "machineDeployments"}
		groups, _, _ := unstructured.NestedSlice(object.Object, path...)
		for _, group := range groups {
			if group, ok := group.(map[string]any); ok && group["replicas"] != nil {
				found = append(found, strings.Join(path, "."))
			}
		}
	}
	return found
}

// heredoc matches a manifest in a command, such as `kubectl apply -f - <<'YAML'`.
var heredoc = regexp.MustCompile("(?s)<<-?'?YAML'?\n(.*?)\nYAML\n")

// examples returns all manifests that a reader may copy, by location.
func examples(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}

	all, err := pages.All(root(t))
	require.NoError(t, err)
	for _, page := range all {
		for _, block := range page.Blocks() {
			if block.Language == "yaml" {
				found[at(page, block)] = block.Code
			}
			for _, match := range heredoc.FindAllStringSubmatch(block.Code, -1) {
				found[at(page, block)+" <<YAML"] = match[1]
			}
		}
	}
	// Exclude what the charts render, their CRDs, and the list of images, which are not users' manifests.
	err = filepath.WalkDir(filepath.Join(root(t), "deploy"), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && slices.Contains([]string{"templates", "crds", "images"}, entry.Name()) {
			return fs.SkipDir
		}
		if err != nil || entry.IsDir() || !slices.Contains([]string{".yaml", ".yml"}, filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		found[path] = string(text)
		return err
	})
	require.NoError(t, err)
	return found
}

// decode parses YAML documents. Those that are not Kubernetes objects, such as Helm values, have no
// kind.
func decode(text string) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		var object map[string]any
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			return objects, nil
		} else if err != nil {
			return nil, err
		}
		objects = append(objects, &unstructured.Unstructured{Object: object})
	}
}
