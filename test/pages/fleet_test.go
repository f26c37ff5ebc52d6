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

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// Each example is valid for its tool, and renders the shim's chart for the Cluster that the tool
// inserts.
func TestFleetExamples(t *testing.T) {
	g := NewWithT(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	hub := start(t, "testdata/fleet/applicationsets.yaml", "testdata/fleet/helmchartproxies.yaml", "testdata/fleet/helmreleases.yaml",
		"testdata/fleet/kustomizations.yaml", "testdata/fleet/ocirepositories.yaml", clusterAPI(t, "addons.cluster.x-k8s.io_clusterresourcesets.yaml"),
		clusterAPI(t, "cluster.x-k8s.io_clusters.yaml"))
	for _, namespace := range []string{"team-a", "argocd", "flux-system"} {
		err := hub.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
		g.Expect(client.IgnoreAlreadyExists(err)).To(Succeed())
	}
	spoke := start(t)

	t.Run("HelmChartProxy", func(t *testing.T) {
		g := NewWithT(t)
		proxy := example(ctx, t, hub, "helm-chart-proxy.yaml", "")[0]
		text, _, err := unstructured.NestedString(proxy.Object, "spec", "valuesTemplate")
		g.Expect(err).NotTo(HaveOccurred())
		cluster := map[string]any{"metadata": map[string]any{"namespace": "team-a", "name": "production"}}
		rendersTheShim(t, inserted(t, text, map[string]any{"Cluster": cluster}))
	})
	t.Run("Argo CD", func(t *testing.T) {
		g := NewWithT(t)
		set := example(ctx, t, hub, "argocd-applicationset.yaml", "")[0]
		of, _, err := unstructured.NestedMap(set.Object, "spec", "template")
		g.Expect(err).NotTo(HaveOccurred())
		text, err := yaml.Marshal(of)
		g.Expect(err).NotTo(HaveOccurred())
		parameters := map[string]any{
			"name": "prod", "nameNormalized": "prod", "server": "https://prod.example.com",
			"metadata": map[string]any{"annotations": map[string]any{
				"karpenter-capi/cluster-namespace": "team-a", "karpenter-capi/cluster-name": "production",
			}},
		}
		var application map[string]any
		g.Expect(yaml.Unmarshal([]byte(inserted(t, string(text), parameters)), &application)).To(Succeed())
		name, _, _ := unstructured.NestedString(application, "metadata", "name")
		g.Expect(name).To(Equal("karpenter-prod"))
		values, _, err := unstructured.NestedMap(application, "spec", "source", "helm", "valuesObject")
		g.Expect(err).NotTo(HaveOccurred())
		text, err = yaml.Marshal(values)
		g.Expect(err).NotTo(HaveOccurred())
		rendersTheShim(t, string(text))
	})
	t.Run("Flux", func(t *testing.T) {
		g := NewWithT(t)
		example(ctx, t, hub, "flux/chart.yaml", "")
		kustomization := example(ctx, t, hub, "flux/production.yaml", "")[0]
		variables, _, err := unstructured.NestedStringMap(kustomization.Object, "spec", "postBuild", "substitute")
		g.Expect(err).NotTo(HaveOccurred())
		release := example(ctx, t, hub, "flux/shim/release.yaml", os.Expand(read(t, "flux/shim/release.yaml"), func(name string) string {
			g.Expect(variables).To(HaveKey(name))
			return variables[name]
		}))[0]
		g.Expect(release.GetNamespace()).To(Equal("team-a"))
		secret, _, _ := unstructured.NestedString(release.Object, "spec", "kubeConfig", "secretRef", "name")
		g.Expect(secret).To(Equal("production-kubeconfig"))
		values, _, err := unstructured.NestedMap(release.Object, "spec", "values")
		g.Expect(err).NotTo(HaveOccurred())
		text, err := yaml.Marshal(values)
		g.Expect(err).NotTo(HaveOccurred())
		rendersTheShim(t, string(text))
	})
	t.Run("ClusterResourceSet", func(t *testing.T) {
		g := NewWithT(t)
		page, err := pages.Read(root(t), "docs/fleet.md")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(page.Script("ClusterResourceSet")).NotTo(BeEmpty())
		servers := map[string]*server{"hub": hub, "spoke": spoke}
		cluster := &unstructured.Unstructured{}
		cluster.SetAPIVersion("cluster.x-k8s.io/v1beta2")
		cluster.SetKind("Cluster")
		cluster.SetNamespace("team-a")
		cluster.SetName("production")
		g.Expect(unstructured.SetNestedField(cluster.Object, "cluster.local", "spec", "clusterNetwork", "serviceDomain")).To(Succeed())
		g.Expect(hub.client.Create(ctx, cluster)).To(Succeed())
		run(ctx, t, servers, page.Script("ClusterResourceSet"))

		sets := &unstructured.UnstructuredList{}
		sets.SetAPIVersion("addons.cluster.x-k8s.io/v1beta2")
		sets.SetKind("ClusterResourceSetList")
		g.Expect(hub.client.List(ctx, sets, client.InNamespace("team-a"))).To(Succeed())
		g.Expect(sets.Items).To(HaveLen(3))
		for _, set := range sets.Items {
			resources, _, err := unstructured.NestedSlice(set.Object, "spec", "resources")
			g.Expect(err).NotTo(HaveOccurred())
			strategy, _, _ := unstructured.NestedString(set.Object, "spec", "strategy")
			for _, resource := range resources {
				fields, ok := resource.(map[string]any)
				g.Expect(ok).To(BeTrue())
				name, _, _ := unstructured.NestedString(fields, "name")
				deliver(ctx, t, hub, spoke, name, strategy)
			}
		}
		shim := &appsv1.Deployment{}
		g.Expect(spoke.client.Get(ctx, client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, shim)).To(Succeed())
		g.Expect(shim.Spec.Template.Spec.Containers[0].Args).To(ContainElements("--cluster-namespace=team-a", "--cluster-name=production"))
		pool := &unstructured.Unstructured{}
		pool.SetAPIVersion("karpenter.sh/v1")
		pool.SetKind("NodePool")
		g.Expect(spoke.client.Get(ctx, client.ObjectKey{Name: "default"}, pool)).To(Succeed())
	})
}

// clusterAPI returns the path of one of Cluster API's CustomResourceDefinitions.
func clusterAPI(t *testing.T, file string) string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/cluster-api")
	list.Dir = filepath.Join(root(t), "test")
	out, err := list.Output()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return filepath.Join(strings.TrimSpace(string(out)), "core/config/crd/bases", file)
}

// deliver creates what a ConfigMap has in the spoke, as a ClusterResourceSet does. The secret that
// the shim writes must not be in a set that Cluster API applies again.
func deliver(ctx context.Context, t *testing.T, hub, spoke *server, name, strategy string) {
	t.Helper()
	g := NewWithT(t)
	content := &corev1.ConfigMap{}
	g.Expect(hub.client.Get(ctx, client.ObjectKey{Namespace: "team-a", Name: name}, content)).To(Succeed(), name)
	var objects []*unstructured.Unstructured
	for key, text := range content.Data {
		decoded, err := decode(text)
		g.Expect(err).NotTo(HaveOccurred(), key)
		objects = append(objects, decoded...)
	}
	g.Expect(objects).NotTo(BeEmpty(), name)
	// Cluster API retries a set until each of its objects has been created.
	g.Eventually(func() error {
		for _, object := range objects {
			if strategy == "Reconcile" {
				g.Expect(object.GetKind()).NotTo(Equal("Secret"), name)
			}
			if err := spoke.client.Create(ctx, object.DeepCopy()); err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
		return nil
	}).WithTimeout(30*time.Second).WithPolling(50*time.Millisecond).Should(Succeed(), name)
}

// example creates the objects of an example in the hub, with strict validation, and returns them.
// Text replaces the content of the file.
func example(ctx context.Context, t *testing.T, hub *server, file, text string) []*unstructured.Unstructured {
	t.Helper()
	g := NewWithT(t)
	if text == "" {
		text = read(t, file)
	}
	objects, err := decode(text)
	g.Expect(err).NotTo(HaveOccurred(), file)
	for _, object := range objects {
		g.Expect(hub.client.Create(ctx, object.DeepCopy(), client.FieldValidation("Strict"))).To(Succeed(), file)
	}
	return objects
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), "deploy/examples/fleet", file))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return string(text)
}

// inserted executes a Go template, as the tools do.
func inserted(t *testing.T, text string, data any) string {
	t.Helper()
	g := NewWithT(t)
	parsed, err := template.New("").Option("missingkey=error").Parse(text)
	g.Expect(err).NotTo(HaveOccurred())
	var out strings.Builder
	g.Expect(parsed.Execute(&out, data)).To(Succeed())
	return out.String()
}

// rendersTheShim renders the shim's chart, and expects the Cluster team-a/production in its flags.
func rendersTheShim(t *testing.T, values string) {
	t.Helper()
	g := NewWithT(t)
	file := filepath.Join(t.TempDir(), "values.yaml")
	g.Expect(os.WriteFile(file, []byte(values), 0o600)).To(Succeed())
	helm := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin", "helm"),
		"template", "karpenter", filepath.Join(root(t), "deploy/charts/shim"), "--namespace", "karpenter", "--values", file)
	var problems strings.Builder
	helm.Stderr = &problems
	rendered, err := helm.Output()
	g.Expect(err).NotTo(HaveOccurred(), problems.String())
	objects, err := decode(string(rendered))
	g.Expect(err).NotTo(HaveOccurred())
	for _, object := range objects {
		if object.GetKind() != "Deployment" {
			continue
		}
		var shim appsv1.Deployment
		g.Expect(runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &shim)).To(Succeed())
		container := shim.Spec.Template.Spec.Containers[0]
		g.Expect(container.Image).To(Equal("registry.example.com/karpenter-capi:devel"))
		g.Expect(container.Args).To(ContainElements(
			"--cluster-namespace=team-a", "--cluster-name=production", "--agent-address=agent.example.com:8443"))
		return
	}
	t.Fatal("the chart has no Deployment")
}
