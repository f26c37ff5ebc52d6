package pages_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// image is that of the examples. The chart's own tag, devel, is the same for every build: a node that has an
// older one would keep it.
const image = "registry.example.com/karpenter-capi:v0.1.0"

// Each example is valid for its tool, and renders the shim's chart for the Cluster that the tool
// inserts.
func TestFleetExamples(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	hub := start(t, "testdata/fleet/applicationsets.yaml", "testdata/fleet/helmchartproxies.yaml", "testdata/fleet/helmreleases.yaml",
		"testdata/fleet/kustomizations.yaml", "testdata/fleet/ocirepositories.yaml", clusterAPI(t, "addons.cluster.x-k8s.io_clusterresourcesets.yaml"),
		clusterAPI(t, "cluster.x-k8s.io_clusters.yaml"))
	for _, namespace := range []string{"team-a", "argocd", "flux-system"} {
		err := hub.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
		require.NoError(t, client.IgnoreAlreadyExists(err))
	}
	spoke := start(t)

	t.Run("HelmChartProxy", func(t *testing.T) {
		proxy := example(ctx, t, hub, "helm-chart-proxy.yaml", "")[0]
		text, _, err := unstructured.NestedString(proxy.Object, "spec", "valuesTemplate")
		require.NoError(t, err)
		cluster := map[string]any{"metadata": map[string]any{"namespace": "team-a", "name": "production"}}
		rendersTheShim(t, inserted(t, text, map[string]any{"Cluster": cluster}))
	})
	t.Run("Argo CD", func(t *testing.T) {
		set := example(ctx, t, hub, "argocd-applicationset.yaml", "")[0]
		of, _, err := unstructured.NestedMap(set.Object, "spec", "template")
		require.NoError(t, err)
		text, err := yaml.Marshal(of)
		require.NoError(t, err)
		parameters := map[string]any{
			"name": "prod", "nameNormalized": "prod", "server": "https://prod.example.com",
			"metadata": map[string]any{"annotations": map[string]any{
				"karpenter-capi/cluster-namespace": "team-a", "karpenter-capi/cluster-name": "production",
			}},
		}
		var application map[string]any
		require.NoError(t, yaml.Unmarshal([]byte(inserted(t, string(text), parameters)), &application))
		name, _, _ := unstructured.NestedString(application, "metadata", "name")
		require.Equal(t, "karpenter-prod", name)
		values, _, err := unstructured.NestedMap(application, "spec", "source", "helm", "valuesObject")
		require.NoError(t, err)
		text, err = yaml.Marshal(values)
		require.NoError(t, err)
		rendersTheShim(t, string(text))
	})
	t.Run("Flux", func(t *testing.T) {
		example(ctx, t, hub, "flux/chart.yaml", "")
		kustomization := example(ctx, t, hub, "flux/production.yaml", "")[0]
		variables, _, err := unstructured.NestedStringMap(kustomization.Object, "spec", "postBuild", "substitute")
		require.NoError(t, err)
		release := example(ctx, t, hub, "flux/shim/release.yaml", os.Expand(read(t, "flux/shim/release.yaml"), func(name string) string {
			require.Contains(t, variables, name)
			return variables[name]
		}))[0]
		require.Equal(t, "team-a", release.GetNamespace())
		secret, _, _ := unstructured.NestedString(release.Object, "spec", "kubeConfig", "secretRef", "name")
		require.Equal(t, "production-kubeconfig", secret)
		values, _, err := unstructured.NestedMap(release.Object, "spec", "values")
		require.NoError(t, err)
		text, err := yaml.Marshal(values)
		require.NoError(t, err)
		rendersTheShim(t, string(text))
	})
	t.Run("ClusterResourceSet", func(t *testing.T) {
		page, err := pages.Read(root(t), "docs/fleet.md")
		require.NoError(t, err)
		require.NotEmpty(t, page.Script("ClusterResourceSet"))
		servers := map[string]*server{"hub": hub, "spoke": spoke}
		cluster := &unstructured.Unstructured{}
		cluster.SetAPIVersion("cluster.x-k8s.io/v1beta2")
		cluster.SetKind("Cluster")
		cluster.SetNamespace("team-a")
		cluster.SetName("production")
		require.NoError(t, unstructured.SetNestedField(cluster.Object, "cluster.local", "spec", "clusterNetwork", "serviceDomain"))
		require.NoError(t, hub.client.Create(ctx, cluster))
		run(ctx, t, servers, page.Script("ClusterResourceSet"))

		sets := &unstructured.UnstructuredList{}
		sets.SetAPIVersion("addons.cluster.x-k8s.io/v1beta2")
		sets.SetKind("ClusterResourceSetList")
		require.NoError(t, hub.client.List(ctx, sets, client.InNamespace("team-a")))
		require.Len(t, sets.Items, 4)
		for _, set := range sets.Items {
			resources, _, err := unstructured.NestedSlice(set.Object, "spec", "resources")
			require.NoError(t, err)
			strategy, _, _ := unstructured.NestedString(set.Object, "spec", "strategy")
			for _, resource := range resources {
				fields, ok := resource.(map[string]any)
				require.True(t, ok)
				name, _, _ := unstructured.NestedString(fields, "name")
				deliver(ctx, t, hub, spoke, name, strategy)
			}
		}
		shim := &appsv1.Deployment{}
		require.NoError(t, spoke.client.Get(ctx, client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, shim))
		require.Equal(t, image, shim.Spec.Template.Spec.Containers[0].Image)
		require.Subset(t, shim.Spec.Template.Spec.Containers[0].Args, []string{"--cluster-namespace=team-a", "--cluster-name=production"})
		pool := &unstructured.Unstructured{}
		pool.SetAPIVersion("karpenter.sh/v1")
		pool.SetKind("NodePool")
		require.NoError(t, spoke.client.Get(ctx, client.ObjectKey{Name: "default"}, pool))
	})
}

// clusterAPI returns the path of one of Cluster API's CustomResourceDefinitions.
func clusterAPI(t *testing.T, file string) string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/cluster-api")
	list.Dir = filepath.Join(root(t), "test")
	out, err := list.Output()
	require.NoError(t, err)
	return filepath.Join(strings.TrimSpace(string(out)), "core/config/crd/bases", file)
}

// deliver creates what a ConfigMap has in the spoke, as a ClusterResourceSet does. The secret that
// the shim writes must not be in a set that Cluster API applies again.
func deliver(ctx context.Context, t *testing.T, hub, spoke *server, name, strategy string) {
	t.Helper()
	content := &corev1.ConfigMap{}
	require.NoError(t, hub.client.Get(ctx, client.ObjectKey{Namespace: "team-a", Name: name}, content), name)
	var objects []*unstructured.Unstructured
	for key, text := range content.Data {
		decoded, err := decode(text)
		require.NoError(t, err, key)
		objects = append(objects, decoded...)
	}
	require.NotEmpty(t, objects, name)
	if strategy == "Reconcile" {
		for _, object := range objects {
			require.NotContains(t, []string{"Secret", "Namespace"}, object.GetKind(), name)
		}
	}
	// Cluster API retries a set until each of its objects has been created.
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		for _, object := range objects {
			require.NoError(c, client.IgnoreAlreadyExists(spoke.client.Create(ctx, object.DeepCopy())))
		}
	}, 30*time.Second, 50*time.Millisecond, name)
}

// example creates the objects of an example in the hub, with strict validation, and returns them.
// Text replaces the content of the file.
func example(ctx context.Context, t *testing.T, hub *server, file, text string) []*unstructured.Unstructured {
	t.Helper()
	if text == "" {
		text = read(t, file)
	}
	objects, err := decode(text)
	require.NoError(t, err, file)
	for _, object := range objects {
		require.NoError(t, hub.client.Create(ctx, object.DeepCopy(), client.FieldValidation("Strict")), file)
	}
	return objects
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), "deploy/examples/fleet", file))
	require.NoError(t, err)
	return string(text)
}

// inserted executes a Go template, as the tools do.
func inserted(t *testing.T, text string, data any) string {
	t.Helper()
	parsed, err := template.New("").Option("missingkey=error").Parse(text)
	require.NoError(t, err)
	var out strings.Builder
	require.NoError(t, parsed.Execute(&out, data))
	return out.String()
}

// rendersTheShim renders the shim's chart, and expects the Cluster team-a/production in its flags.
func rendersTheShim(t *testing.T, values string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(file, []byte(values), 0o600))
	helm := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin", "helm"),
		"template", "karpenter", filepath.Join(root(t), "deploy/charts/shim"), "--namespace", "karpenter", "--values", file)
	var problems strings.Builder
	helm.Stderr = &problems
	rendered, err := helm.Output()
	require.NoError(t, err, problems.String())
	objects, err := decode(string(rendered))
	require.NoError(t, err)
	for _, object := range objects {
		if object.GetKind() != "Deployment" {
			continue
		}
		var shim appsv1.Deployment
		require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &shim))
		container := shim.Spec.Template.Spec.Containers[0]
		require.Equal(t, image, container.Image)
		require.Subset(t, container.Args, []string{
			"--cluster-namespace=team-a", "--cluster-name=production", "--agent-address=agent.example.com:8443",
		})
		return
	}
	t.Fatal("the chart has no Deployment")
}
