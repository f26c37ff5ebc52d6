package charts_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
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
	unowned  string // the archive of the last chart with CRDs in Helm's own folder
	settings []string
	objects  string
	// annotated makes the first release the owner of the CRDs by their annotations, as with Helm
	// before 3.17, instead of by --take-ownership.
	annotated bool
}

var lifecycles = []lifecycle{
	{
		chart: charts[0], unowned: "capi-agent-0.1.0.tgz", settings: []string{"--set", "tls.certManager.enabled=false"},
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
		chart: charts[1], unowned: "karpenter-0.1.0.tgz", annotated: true,
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
			h := ownHub(t)
			r := release{l.chart.release, l.chart.namespace}
			current, next := chartPath(t, l.chart), next(t, l.chart)
			run := func(command, chart string, settings ...string) {
				t.Helper()
				h.helm(t, h.command(command, r, chart, append(settings, l.settings...)...)...)
			}

			run("install", filepath.Join(root(t), "test/charts/testdata/unowned", l.unowned))
			names := lo.Keys(h.crds(t))
			require.Len(t, names, len(crdFiles(t, l.chart)))
			for name, crd := range h.crds(t) {
				require.NotContains(t, crd.Annotations, ownerAnnotation, name)
			}
			kept := h.createObjects(t, l.objects)
			require.Len(t, kept, len(names), "one of each kind")

			// Helm refuses what it does not own, before it changes anything.
			_, refusal, err := helm(t, append(h.command("upgrade", r, next, l.settings...), "--kubeconfig", h.kubeconfig)...)
			require.Error(t, err)
			require.Contains(t, refusal, "cannot be imported into the current release: invalid ownership metadata")
			h.requireColumn(t, false, names)

			if l.annotated {
				h.annotateOwner(t, r)
				run("upgrade", next)
			} else {
				run("upgrade", next, "--take-ownership")
			}
			h.requireColumn(t, true, names)
			h.requireOwner(t, r, names)
			h.requireSmallReleases(t, r)

			// They stay if the release no longer has them, and are its own again later.
			run("upgrade", current, "--set", "crds.install=false")
			h.requireColumn(t, true, names)
			run("upgrade", current)
			h.requireColumn(t, false, names)

			h.uninstall(t, r)
			h.requireOwner(t, r, names)
			h.requireKept(t, kept)

			// The next release has another name.
			other := release{r.name, "another"}
			h.helm(t, h.command("install", other, next, append([]string{"--take-ownership"}, l.settings...)...)...)
			h.requireColumn(t, true, names)
			h.requireOwner(t, other, names)
			h.requireKept(t, kept)

			// Only who asks for it loses them.
			h.helm(t, h.command("upgrade", other, current, append([]string{"--set", "crds.keep=false"}, l.settings...)...)...)
			h.requireKept(t, kept)
			h.uninstall(t, other)
			eventually(t, func(c *assert.CollectT) {
				for _, name := range names {
					err := h.admin.Get(t.Context(), client.ObjectKey{Name: name}, &apiextensionsv1.CustomResourceDefinition{})
					require.True(c, apierrors.IsNotFound(err), "%s: %v", name, err)
				}
			})
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

// The shim runs as the chart's service account, with the arguments and the environment of the
// chart's Deployment: it needs no right that its chart does not grant, in the release that is
// installed and in the one that it is upgraded to. The uninstallation leaves the objects.
func TestTheShimRunsThroughUpgradesWithTheRightsOfItsChart(t *testing.T) {
	h := ownHub(t)
	r := release{charts[1].release, charts[1].namespace}
	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{
		Name: "workers", InstanceType: "m.large", Zone: "a", Price: &agentv1alpha1.Price{PerHour: 1},
		Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"},
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	agent.Serve(listener)
	cluster := fakeagent.DefaultCluster()
	settings := []string{
		"--set", fmt.Sprintf("agent.address=%s,agent.plaintextLoopback=true,cluster.namespace=%s,cluster.name=%s",
			listener.Addr(), cluster.GetNamespace(), cluster.GetName()),
		"--set", fmt.Sprintf("metrics.port=%d,healthProbe.port=%d,settings.batchIdleDuration=100ms", freePort(t), freePort(t)),
	}

	h.helm(t, h.command("install", r, filepath.Join(root(t), "test/charts/testdata/unowned", lifecycles[1].unowned), settings...)...)
	h.createObjects(t, `
apiVersion: karpenter.cluster.x-k8s.io/v1alpha1
kind: ClusterAPINodeClass
metadata: {name: default}
spec: {}
---
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: default}
spec:
  disruption: {consolidateAfter: Never}
  template:
    spec:
      expireAfter: Never
      requirements: [{key: kubernetes.io/os, operator: In, values: [linux]}]
      nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}
`)
	stop := h.runShim(t, r)
	h.pendingPod(t, "first")
	first := h.launched(t, 1)
	stop()

	h.helm(t, h.command("upgrade", r, next(t, charts[1]), append([]string{"--take-ownership"}, settings...)...)...)
	stop = h.runShim(t, r)
	require.Subset(t, h.launched(t, 1), first, "the same NodeClaims, with the same UIDs")
	agent.Provision(cluster, string(lo.Values(first)[0]), "")
	eventually(t, func(c *assert.CollectT) {
		claim := h.one(c, "karpenter.sh/v1", "NodeClaim", lo.Keys(first)[0])
		id, _, _ := unstructured.NestedString(claim.Object, "status", "providerID")
		require.NotEmpty(c, id)
		require.NotContains(c, id, "capi-claim:", "the machine's")
	})
	h.pendingPod(t, "second")
	both := h.launched(t, 2)
	require.Subset(t, both, first)
	stop()

	h.uninstall(t, r)
	require.Equal(t, both, h.launched(t, 2), "without a shim, the NodeClaims stay")
	h.one(t, "karpenter.sh/v1", "NodePool", "default")
	h.one(t, "karpenter.cluster.x-k8s.io/v1alpha1", "ClusterAPINodeClass", "default")
}

// ownHub returns an API server of the test's own.
func ownHub(t *testing.T) *hub {
	t.Helper()
	h, err := startHub()
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, h.stop()) })
	return h
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

func (h *hub) command(verb string, r release, chart string, settings ...string) []string {
	args := []string{verb, r.name, chart, "--namespace", r.namespace}
	if verb == "install" {
		args = append(args, "--create-namespace")
	}
	return append(args, settings...)
}

func (h *hub) crds(t *testing.T) map[string]apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	list := &apiextensionsv1.CustomResourceDefinitionList{}
	require.NoError(t, h.admin.List(t.Context(), list))
	return lo.KeyBy(list.Items, func(crd apiextensionsv1.CustomResourceDefinition) string { return crd.Name })
}

// requireColumn checks whether each of the CRDs is that of [next].
func (h *hub) requireColumn(t *testing.T, added bool, names []string) {
	t.Helper()
	crds := h.crds(t)
	for _, name := range names {
		require.Contains(t, crds, name)
		for _, version := range crds[name].Spec.Versions {
			found := lo.ContainsBy(version.AdditionalPrinterColumns, func(c apiextensionsv1.CustomResourceColumnDefinition) bool { return c.Name == column })
			require.Equal(t, added, found, "%s %s", name, version.Name)
		}
	}
}

func (h *hub) requireOwner(t *testing.T, r release, names []string) {
	t.Helper()
	crds := h.crds(t)
	for _, name := range names {
		require.Contains(t, crds, name)
		require.Equal(t, r.name, crds[name].Annotations[ownerAnnotation], name)
		require.Equal(t, r.namespace, crds[name].Annotations[namespaceAnnotation], name)
		require.Equal(t, "keep", crds[name].Annotations[policyAnnotation], name)
	}
}

// annotateOwner writes the owner of every CRD onto it.
func (h *hub) annotateOwner(t *testing.T, r release) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"Helm"},"annotations":{%q:%q,%q:%q}}}`,
		ownerAnnotation, r.name, namespaceAnnotation, r.namespace)
	for _, crd := range h.crds(t) {
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

func (h *hub) one(t require.TestingT, version, kind, name string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetAPIVersion(version)
	object.SetKind(kind)
	require.NoError(t, h.admin.Get(context.Background(), client.ObjectKey{Name: name}, object))
	return object
}

// launched waits for a number of NodeClaims with a claim in the agent, and returns their UIDs.
func (h *hub) launched(t *testing.T, number int) map[string]types.UID {
	t.Helper()
	found := map[string]types.UID{}
	eventually(t, func(c *assert.CollectT) {
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion("karpenter.sh/v1")
		list.SetKind("NodeClaimList")
		require.NoError(c, h.admin.List(t.Context(), list))
		require.Len(c, list.Items, number)
		for _, claim := range list.Items {
			id, _, _ := unstructured.NestedString(claim.Object, "status", "providerID")
			require.NotEmpty(c, id, claim.GetName())
			found[claim.GetName()] = claim.GetUID()
		}
	})
	return found
}

// pendingPod creates a pod that kube-scheduler has marked unschedulable.
func (h *hub) pendingPod(t *testing.T, name string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("3")},
		}}}},
	}
	require.NoError(t, h.admin.Create(t.Context(), pod))
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.Now(),
	}}
	require.NoError(t, h.admin.Status().Update(t.Context(), pod))
}

// runShim starts bin/karpenter as the pod of a release's Deployment, and waits until it is ready.
// stop ends it, and fails the test if it was refused anything.
func (h *hub) runShim(t *testing.T, r release) (stop func()) {
	t.Helper()
	return h.runPod(t, r, "karpenter", strings.NewReplacer(), "1000").stop
}

// pod is a process that runs in place of a pod.
type pod struct {
	// stop ends it, and fails the test if it was refused anything.
	stop func()
	// log returns what it has logged.
	log func() string
}

// runPod starts a binary as the pod of a release's Deployment, and waits until it is ready. files replaces
// the names of mounted files in its arguments, and resource is the value of the kubelet's variables.
func (h *hub) runPod(t *testing.T, r release, binary string, files *strings.Replacer, resource string) pod {
	t.Helper()
	deployment := &appsv1.Deployment{}
	require.NoError(t, h.admin.Get(t.Context(), client.ObjectKey{Namespace: r.namespace, Name: r.name}, deployment))
	spec := deployment.Spec.Template.Spec
	container := spec.Containers[0]
	kubeconfig := h.accountsKubeconfig(t, r.namespace, spec.ServiceAccountName)
	args := lo.Map(container.Args, func(arg string, _ int) string { return files.Replace(arg) })

	_ = os.Getenv("TESTED_BINARIES") // declares the binary's sources as inputs of the test cache
	log, err := os.Create(filepath.Join(t.TempDir(), binary+".log"))
	require.NoError(t, err)
	process := exec.Command(filepath.Join(root(t), "bin", binary), args...)
	process.Stdout, process.Stderr = log, log
	process.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	for _, variable := range container.Env {
		value := variable.Value
		if variable.ValueFrom != nil { // the kubelet's
			value = resource
		}
		process.Env = append(process.Env, variable.Name+"="+value)
	}
	health, found := lo.Find(container.Ports, func(p corev1.ContainerPort) bool { return p.Name == container.ReadinessProbe.HTTPGet.Port.StrVal })
	require.True(t, found)
	require.NoError(t, process.Start(), "run make bin/"+binary)
	ended := make(chan error, 1)
	go func() { ended <- process.Wait() }()
	output := func() string {
		content, err := os.ReadFile(log.Name())
		require.NoError(t, err)
		return string(content)
	}
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		require.NoError(t, process.Process.Signal(syscall.SIGTERM))
		assert.NoError(t, <-ended)
		require.NoError(t, log.Close())
		for line := range strings.SplitSeq(output(), "\n") {
			assert.NotContains(t, strings.ToLower(line), "forbidden")
		}
		if t.Failed() {
			t.Logf("%s's log:\n%s", binary, lo.Substring(output(), -20000, 20000))
		}
	}
	t.Cleanup(stop)
	eventually(t, func(c *assert.CollectT) {
		response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", health.ContainerPort, container.ReadinessProbe.HTTPGet.Path))
		require.NoError(c, err)
		require.NoError(c, response.Body.Close())
		require.Equal(c, http.StatusOK, response.StatusCode)
	})
	return pod{stop, output}
}

// accountsKubeconfig writes a kubeconfig with a token of a service account.
func (h *hub) accountsKubeconfig(t *testing.T, namespace, name string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	request := &authenticationv1.TokenRequest{}
	require.NoError(t, h.admin.SubResource("token").Create(t.Context(), account, request))
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"": {Server: h.config.Host, CertificateAuthorityData: h.config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"": {Token: request.Status.Token}},
		Contexts:       map[string]*clientcmdapi.Context{"": {}},
		CurrentContext: "",
	}, file))
	return file
}

func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	address, ok := listener.Addr().(*net.TCPAddr)
	require.True(t, ok)
	return address.Port
}
