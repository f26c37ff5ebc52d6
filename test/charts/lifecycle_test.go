package charts_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

const (
	ownerAnnotation     = "meta.helm.sh/release-name"
	namespaceAnnotation = "meta.helm.sh/release-namespace"
	policyAnnotation    = "helm.sh/resource-policy"
	// column is what [next] adds to the printed columns of each CRD.
	column = "Added"
	// secretLimit is half of what Kubernetes allows a secret, in which Helm stores a release.
	secretLimit = corev1.MaxSecretSize / 2
)

// lifecycle is a release of a chart whose CRDs are upgraded, with an object of each of their kinds.
type lifecycle struct {
	chart    chart
	settings []string
	objects  string
	// annotated makes the first release the owner of the CRDs by their annotations, as with Helm
	// before 3.17, instead of by --take-ownership.
	annotated bool
}

var lifecycles = []lifecycle{
	{
		chart: charts[0], settings: []string{"--set", "tls.certManager.enabled=false"},
		objects: `
apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1
kind: MachineClaim
metadata: {name: kept, namespace: default}
spec: {clusterName: production, claimID: kept, holder: karpenter, candidates: [workers]}
---
apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1
kind: Spoke
metadata: {name: kept, namespace: default}
---
apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1
kind: NodePoolSet
metadata: {name: kept, namespace: default}
spec: {clusterSelector: {}, nodeClasses: [{name: default, spec: {}}]}
`,
	},
	{
		chart: charts[1], annotated: true,
		settings: []string{"--set", "agent.address=agent:8443,cluster.namespace=team-a,cluster.name=production,settings.featureGates.CapacityBuffer=true"},
		objects: `
apiVersion: karpenter.cluster.x-k8s.io/v1alpha1
kind: ClusterAPINodeClass
metadata: {name: kept}
spec: {}
---
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: kept}
spec: {template: {spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: kept}}}}
---
apiVersion: karpenter.sh/v1
kind: NodeClaim
metadata: {name: kept}
spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: kept}}
---
apiVersion: karpenter.sh/v1alpha1
kind: NodeOverlay
metadata: {name: kept}
spec: {requirements: [], weight: 1, priceAdjustment: "+10%"}
---
apiVersion: autoscaling.x-k8s.io/v1beta1
kind: CapacityBuffer
metadata: {name: kept, namespace: default}
spec: {replicas: 1, podTemplateRef: {name: kept}}
`,
	},
}

// A release of the last chart whose CRDs had no owner is upgraded to charts that own them, and
// uninstalled. Every object of their kinds stays.
func TestCRDsAreUpgradedWithTheirChart(t *testing.T) {
	for _, l := range lifecycles {
		t.Run(l.chart.name, func(t *testing.T) {
			h := theHub(t)
			h.deleteCRDs(t, l.chart)
			r := release{l.chart.release, l.chart.namespace}
			other := release{r.name, "another"}
			for _, r := range []release{r, other} {
				t.Cleanup(func() { h.uninstall(t, r, "--ignore-not-found") })
			}
			current, next := chartPath(t, l.chart), next(t, l.chart)
			run := func(command, chart string, settings ...string) {
				t.Helper()
				h.helm(t, h.command(command, r, chart, append(settings, l.settings...)...)...)
			}

			run("install", unownedChart(t, l.chart))
			names := crdNames(t, l.chart)
			require.ElementsMatch(t, names, lo.Keys(h.crds(t, l.chart)))
			for name, crd := range h.crds(t, l.chart) {
				require.NotContains(t, crd.Annotations, ownerAnnotation, name)
			}
			kept := h.createObjects(t, l.objects)
			require.Len(t, kept, len(names), "one of each kind")

			// Helm refuses what it does not own, before it changes anything.
			_, refusal, err := helm(t, append(h.command("upgrade", r, next, l.settings...), "--kubeconfig", h.kubeconfig)...)
			require.Error(t, err)
			require.Contains(t, refusal, "cannot be imported into the current release: invalid ownership metadata")
			h.requireColumn(t, l.chart, false)

			if l.annotated {
				h.annotateOwner(t, r, l.chart)
				run("upgrade", next)
			} else {
				run("upgrade", next, "--take-ownership")
			}
			h.requireColumn(t, l.chart, true)
			h.requireOwner(t, r, l.chart)
			h.requireSmallReleases(t, r)

			// They stay if the release no longer has them, and are its own again later.
			run("upgrade", current, "--set", "crds.install=false")
			h.requireColumn(t, l.chart, true)
			run("upgrade", current)
			h.requireColumn(t, l.chart, false)

			h.uninstall(t, r)
			h.requireOwner(t, r, l.chart)
			h.requireKept(t, kept)

			// The next release is in another namespace.
			h.helm(t, h.command("install", other, next, append([]string{"--take-ownership"}, l.settings...)...)...)
			h.requireColumn(t, l.chart, true)
			h.requireOwner(t, other, l.chart)
			h.requireKept(t, kept)

			// Only who asks for it loses them.
			h.helm(t, h.command("upgrade", other, current, append([]string{"--set", "crds.keep=false"}, l.settings...)...)...)
			h.requireKept(t, kept)
			h.uninstall(t, other)
			eventually(t, func(c *assert.CollectT) { require.Empty(c, h.crds(t, l.chart)) })
		})
	}
}

// A chart has the CRDs of its files, unchanged. The values choose.
func TestCRDsAreThoseOfTheFiles(t *testing.T) {
	for _, l := range lifecycles {
		t.Run(l.chart.name, func(t *testing.T) {
			defaults := filepath.Join(chartPath(t, l.chart), "ci", "defaults-values.yaml")
			rendered := func(settings ...string) map[string]apiextensionsv1.CustomResourceDefinition {
				objects := render(t, l.chart, defaults, append(append([]string{}, l.settings...), settings...)...)
				return lo.KeyBy(of[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition"),
					func(crd apiextensionsv1.CustomResourceDefinition) string { return crd.Name })
			}
			files := map[string]apiextensionsv1.CustomResourceDefinition{}
			for _, file := range crdFiles(t, l.chart) {
				var crd apiextensionsv1.CustomResourceDefinition
				content, err := os.ReadFile(file)
				require.NoError(t, err)
				require.NoError(t, yaml.UnmarshalStrict(content, &crd))
				files[crd.Name] = crd
			}

			all := rendered("--set", "commonLabels.team=platform,crds.annotations.example\\.com/a=b")
			require.ElementsMatch(t, lo.Keys(files), lo.Keys(all))
			for name, crd := range all {
				require.Equal(t, files[name].Spec, crd.Spec, name)
				if l.chart == charts[0] {
					require.Contains(t, crd.Labels, clusterctlv1.ClusterctlLabel, "%s: clusterctl moves only kinds that have it", name)
				}
				for key, value := range files[name].Labels {
					require.Equal(t, value, crd.Labels[key], "%s, for clusterctl", name)
				}
				for key, value := range files[name].Annotations {
					require.Equal(t, value, crd.Annotations[key], name)
				}
				require.Equal(t, "platform", crd.Labels["team"])
				require.Equal(t, "b", crd.Annotations["example.com/a"])
				require.Equal(t, "keep", crd.Annotations[policyAnnotation], name)
			}
			for _, crd := range rendered("--set", "crds.keep=false") {
				require.NotContains(t, crd.Annotations, policyAnnotation)
			}
			require.Empty(t, rendered("--set", "crds.install=false"))
			for name := range files {
				require.ElementsMatch(t, lo.Without(lo.Keys(files), name), lo.Keys(rendered("--set", "crds.exclude={"+name+"}")))
			}
			// As helm upgrade --reuse-values has the values of an older release.
			for _, crd := range rendered("--set", "crds=null") {
				require.Equal(t, "keep", crd.Annotations[policyAnnotation])
			}
			require.Len(t, rendered("--set", "crds=null"), len(files))
		})
	}
}

func TestTheShimsCRDsAreWhereItsObjectsAre(t *testing.T) {
	names := func(values string) []string {
		return names(render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci", values)), "CustomResourceDefinition", "")
	}
	require.Empty(t, names("hub-hosted-values.yaml"), "the objects are in another cluster")
	const buffers = "capacitybuffers.autoscaling.x-k8s.io"
	require.Contains(t, names("everything-values.yaml"), buffers)
	require.NotEmpty(t, names("defaults-values.yaml"))
	require.NotContains(t, names("defaults-values.yaml"), buffers, "it may be the cluster-autoscaler's")
}

// next returns a copy of a chart with another column in each CRD, which stands for the change of a
// later version.
func next(t *testing.T, c chart) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), c.name)
	require.NoError(t, os.CopyFS(dir, os.DirFS(chartPath(t, c))))
	first := regexp.MustCompile(`additionalPrinterColumns:\n( +)- `)
	for _, file := range crdFiles(t, c) {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Regexp(t, first, string(content))
		changed := first.ReplaceAllString(string(content),
			"additionalPrinterColumns:\n${1}- name: "+column+"\n${1}  type: string\n${1}  jsonPath: .metadata.uid\n${1}- ")
		require.NoError(t, os.WriteFile(filepath.Join(dir, "files", "crds", filepath.Base(file)), []byte(changed), 0o600))
	}
	return dir
}

func crdFiles(t *testing.T, c chart) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(chartPath(t, c), "files", "crds", "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files
}

// unownedChart returns the archive of the last chart with CRDs in Helm's own folder.
func unownedChart(t *testing.T, c chart) string {
	t.Helper()
	return filepath.Join(root(t), "test/charts/testdata/unowned", c.release+"-0.1.0.tgz")
}

func crdNames(t *testing.T, c chart) []string {
	t.Helper()
	return lo.Map(crdFiles(t, c), func(file string, _ int) string {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		var crd metav1.PartialObjectMetadata
		require.NoError(t, yaml.Unmarshal(content, &crd))
		require.NotEmpty(t, crd.Name, file)
		return crd.Name
	})
}

func (h *hub) command(verb string, r release, chart string, settings ...string) []string {
	args := []string{verb, r.name, chart, "--namespace", r.namespace}
	if verb == "install" {
		args = append(args, "--create-namespace")
	}
	return append(args, settings...)
}

// requireColumn checks whether each of the CRDs is that of [next].
func (h *hub) requireColumn(t *testing.T, c chart, added bool) {
	t.Helper()
	crds := h.crds(t, c)
	for _, name := range crdNames(t, c) {
		require.Contains(t, crds, name)
		for _, version := range crds[name].Spec.Versions {
			found := lo.ContainsBy(version.AdditionalPrinterColumns, func(c apiextensionsv1.CustomResourceColumnDefinition) bool { return c.Name == column })
			require.Equal(t, added, found, "%s %s", name, version.Name)
		}
	}
}

func (h *hub) requireOwner(t *testing.T, r release, c chart) {
	t.Helper()
	crds := h.crds(t, c)
	for _, name := range crdNames(t, c) {
		require.Contains(t, crds, name)
		require.Equal(t, r.name, crds[name].Annotations[ownerAnnotation], name)
		require.Equal(t, r.namespace, crds[name].Annotations[namespaceAnnotation], name)
		require.Equal(t, "keep", crds[name].Annotations[policyAnnotation], name)
	}
}

// annotateOwner writes the owner of every CRD of a chart onto it.
func (h *hub) annotateOwner(t *testing.T, r release, c chart) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"Helm"},"annotations":{%q:%q,%q:%q}}}`,
		ownerAnnotation, r.name, namespaceAnnotation, r.namespace)
	for _, crd := range h.crds(t, c) {
		require.NoError(t, h.admin.Patch(t.Context(), &crd, client.RawPatch(types.MergePatchType, patch)))
	}
}

// requireSmallReleases checks the secrets in which Helm stores the release.
func (h *hub) requireSmallReleases(t *testing.T, r release) {
	t.Helper()
	secrets := &corev1.SecretList{}
	require.NoError(t, h.admin.List(t.Context(), secrets, client.InNamespace(r.namespace), client.MatchingLabels{"owner": "helm"}))
	require.NotEmpty(t, secrets.Items)
	for _, secret := range secrets.Items {
		require.Less(t, len(secret.Data["release"]), secretLimit, secret.Name)
	}
}

func (h *hub) createObjects(t *testing.T, text string) []*unstructured.Unstructured {
	t.Helper()
	var created []*unstructured.Unstructured
	for part := range strings.SplitSeq(text, "\n---\n") {
		object := &unstructured.Unstructured{}
		require.NoError(t, yaml.Unmarshal([]byte(part), &object.Object))
		var err error
		eventually(t, func(c *assert.CollectT) { // a CRD is served a moment after its creation
			err = h.admin.Create(t.Context(), object)
			require.False(c, meta.IsNoMatchError(err) || apierrors.IsNotFound(err), "%v", err)
		})
		require.NoError(t, err)
		created = append(created, object)
	}
	return created
}

func (h *hub) requireKept(t *testing.T, objects []*unstructured.Unstructured) {
	t.Helper()
	for _, object := range objects {
		live := object.DeepCopy()
		require.NoError(t, h.admin.Get(t.Context(), client.ObjectKeyFromObject(object), live))
		require.Equal(t, object.GetUID(), live.GetUID(), "%s is the same object", object.GetKind())
	}
}
