package charts_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// component is a binary of this tree that runs in place of the pods of a release.
type component struct {
	release

	chart  chart
	binary string
	// settings are the values of its release.
	settings []string
	// files replaces the names of mounted files in its arguments.
	files *strings.Replacer
	// resource is the value of the kubelet's variables.
	resource string
	// work returns when the component has done what it is for once more.
	work func(t *testing.T, name string)
}

// pod is a process that runs in place of a pod.
type pod struct {
	// stop ends it, and fails the test if it was refused anything.
	stop func()
	// log returns what it has logged.
	log func() string
}

// The agent works with the rights of its chart as it was before its last change, goes on with those of
// the present one, and is removed as docs/uninstall.md has it.
func TestTheAgentRunsThroughAnUpgradeWithTheRightsOfItsChart(t *testing.T) {
	fromEarlier(t, charts[0], testAgentThroughAnUpgrade)
}

func testAgentThroughAnUpgrade(t *testing.T, earlier string, flags ...string) {
	t.Helper()
	h := theHub(t)
	h.deleteCRDs(t, charts[0])
	h.namespaces(t, "fleet")
	cluster := &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "production"},
		Spec:       clusterv1.ClusterSpec{ClusterNetwork: clusterv1.ClusterNetwork{ServiceDomain: "cluster.local"}},
	}
	group := newGroup("fleet", "workers", 0, "absent")
	group.Labels = map[string]string{agentv1.MemberLabel: ""}
	group.Annotations = map[string]string{
		clusterv1.AutoscalerMinSizeAnnotation: "0", clusterv1.AutoscalerMaxSizeAnnotation: "5",
		"capacity.cluster-autoscaler.kubernetes.io/cpu": "4", "capacity.cluster-autoscaler.kubernetes.io/memory": "16Gi",
	}
	require.NoError(t, h.admin.Create(t.Context(), cluster))
	require.NoError(t, h.admin.Create(t.Context(), group))

	socket := filepath.Join(shortDir(t), "agent.sock")
	agent, err := agentclient.New(agentclient.Options{Address: "unix://" + socket})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, agent.Close()) })
	of := &agentv1alpha1.ClusterRef{Namespace: cluster.Namespace, Name: cluster.Name}
	var claims []string
	c := component{
		release: release{charts[0].release, charts[0].namespace}, chart: charts[0], binary: "capi-agent",
		settings: []string{
			"--set", fmt.Sprintf("tls.certManager.enabled=false,namespaces={fleet},metrics.port=%d,healthProbe.port=%d", freePort(t), freePort(t)),
			"--set-json", fmt.Sprintf(`extraArgs=["--listen-address=127.0.0.1:%d","--listen-unix-socket=%s","--unix-socket-role=cluster",`+
				`"--unix-socket-clusters=fleet/production"]`, freePort(t), socket),
		},
		files: strings.NewReplacer("/etc/capi-agent/tls", certificate(t)), resource: "1000000000",
		work: func(t *testing.T, name string) {
			t.Helper()
			claims = append(claims, name)
			h.claim(t, agent, group, of, claims)
			h.synchronize(t, agent, of, claims)
		},
	}
	h.install(t, c.release, earlier, c.settings...)
	running := h.runThroughAnUpgrade(t, c, flags...)
	_, err = agent.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: of, ClaimId: claims[0], Drained: true})
	require.NoError(t, err)

	// The first denial reaches the running agent.
	h.helm(t, append(h.command("upgrade", c.release, chartPath(t, charts[0]), c.settings...),
		"--set-json", `policy={"deny":[{"id":"spiffe://karpenter-capi/cluster/fleet/production","issuedBefore":"2100-01-01T00:00:00Z"}]}`)...)
	eventually(t, func(c *assert.CollectT) { require.Contains(c, running.log(), "denials: 1") })
	running.stop()

	for _, policy := range []string{"node-groups", "scale"} {
		binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: policy + "." + c.hubName()}}
		require.NoError(t, h.admin.Delete(t.Context(), binding))
	}
	// The API server needs a few seconds to apply that.
	eventually(t, func(c *assert.CollectT) {
		removal := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin/capi-agent"), "uninstall",
			"--kubeconfig", h.kubeconfig, "--namespaces", "fleet")
		out, err := removal.CombinedOutput()
		require.NoError(c, err, string(out))
		require.Contains(c, string(out), "nothing of the agent is left")
	})
	md := &clusterv1.MachineDeployment{}
	require.NoError(t, h.admin.Get(t.Context(), client.ObjectKeyFromObject(group), md))
	require.NotContains(t, md.Annotations, agentv1.LedgerAnnotation)
	h.requireUninstalls(t, c.release)
}

// claim adds the last of the claims, and waits until the node group has all of them.
func (h *hub) claim(t *testing.T, agent *agentclient.Client, group client.Object, of *agentv1alpha1.ClusterRef, claims []string) {
	t.Helper()
	eventually(t, func(c *assert.CollectT) {
		_, err := agent.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: of, ClaimId: claims[len(claims)-1], Holder: "karpenter", Candidates: []string{"fleet/workers"},
		})
		require.NoError(c, err)
	})
	eventually(t, func(c *assert.CollectT) {
		md := &clusterv1.MachineDeployment{}
		require.NoError(c, h.admin.Get(t.Context(), client.ObjectKeyFromObject(group), md))
		require.EqualValues(c, len(claims), *md.Spec.Replicas)
		require.Equal(c, strconv.Itoa(len(claims)), md.Annotations[agentv1.ClaimedAnnotation])
	})
}

// synchronize checks that the agent has exactly these claims, and that it records a synchronization.
func (h *hub) synchronize(t *testing.T, agent *agentclient.Client, of *agentv1alpha1.ClusterRef, claims []string) {
	t.Helper()
	listed, err := agent.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: of, Holder: "karpenter"})
	require.NoError(t, err)
	require.ElementsMatch(t, claims, lo.Map(listed.GetClaims(), func(c *agentv1alpha1.Claim, _ int) string { return c.GetClaimId() }))
	_, err = agent.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
		Cluster: of, Holder: "karpenter", Token: listed.GetToken(), LiveClaimIds: claims, SpokeId: "8b9c1b8e-6d9d-4e6f-9c56-0f9e2a3c1d10",
	})
	require.NoError(t, err)
	spoke := &unstructured.Unstructured{}
	spoke.SetAPIVersion(agentv1.GroupVersion.String())
	spoke.SetKind("Spoke")
	eventually(t, func(c *assert.CollectT) {
		require.NoError(c, h.admin.Get(t.Context(), client.ObjectKey{Namespace: of.GetNamespace(), Name: of.GetName()}, spoke))
		synchronized, _, _ := unstructured.NestedString(spoke.Object, "status", "lastSyncTime")
		require.NotEmpty(c, synchronized)
	})
}

// The shim works with the rights of its chart as it was before its last change, and goes on with those
// of the present one. The uninstallation leaves Karpenter's objects.
func TestTheShimRunsThroughAnUpgradeWithTheRightsOfItsChart(t *testing.T) {
	fromEarlier(t, charts[1], testShimThroughAnUpgrade)
}

func testShimThroughAnUpgrade(t *testing.T, earlier string, flags ...string) {
	t.Helper()
	h := theHub(t)
	h.deleteCRDs(t, charts[1])
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
	var names []string
	launched := map[string]types.UID{}
	c := component{
		release: release{charts[1].release, charts[1].namespace}, chart: charts[1], binary: "karpenter",
		settings: []string{
			"--set", fmt.Sprintf("agent.address=%s,agent.plaintextLoopback=true,cluster.namespace=%s,cluster.name=%s",
				listener.Addr(), cluster.GetNamespace(), cluster.GetName()),
			"--set", fmt.Sprintf("metrics.port=%d,healthProbe.port=%d,settings.batchIdleDuration=100ms", freePort(t), freePort(t)),
		},
		files: strings.NewReplacer(), resource: "1000",
		work: func(t *testing.T, name string) {
			t.Helper()
			h.pendingPod(t, name)
			all := h.launched(t, len(launched)+1)
			require.Subset(t, all, launched, "the same NodeClaims, with the same UIDs")
			names = append(names, lo.Without(lo.Keys(all), names...)...)
			launched = all
		},
	}
	h.install(t, c.release, earlier, c.settings...)
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
	running := h.runThroughAnUpgrade(t, c, flags...)
	// It also goes on with what it launched before.
	agent.Provision(cluster, string(launched[names[0]]), "")
	eventually(t, func(c *assert.CollectT) {
		claim := h.one(c, "karpenter.sh/v1", "NodeClaim", names[0])
		id, _, _ := unstructured.NestedString(claim.Object, "status", "providerID")
		require.NotEmpty(c, id)
		require.NotContains(c, id, "capi-claim:", "the machine's")
	})
	running.stop()

	h.requireUninstalls(t, c.release)
	require.Equal(t, launched, h.launched(t, len(launched)), "without a shim, the NodeClaims stay")
	h.one(t, "karpenter.sh/v1", "NodePool", "default")
	h.one(t, "karpenter.cluster.x-k8s.io/v1alpha1", "ClusterAPINodeClass", "default")
}

// runThroughAnUpgrade has a component work with the rights of the release that is installed, upgrades
// that to the present chart while the component runs, as in a rolling update, and has it work on. It
// returns the component that runs then.
//
// The component of this tree may need a right that the present chart is the first to grant. Helm
// grants it before it changes the Deployment, so the component does not work without it: its work
// before the upgrade is reported as a skipped test.
func (h *hub) runThroughAnUpgrade(t *testing.T, c component, flags ...string) pod {
	t.Helper()
	installed := h.manifest(t, c.release)
	h.awaitRights(t, c.release, lo.Values(installed))
	stdout, stderr, err := helm(t, append([]string{"template", c.name, chartPath(t, c.chart), "--namespace", c.namespace}, c.settings...)...)
	require.NoError(t, err, stderr)
	running := pod{stop: func() {}}
	gained := h.gains(t, c.release, lo.Values(installed), decoded(t, stdout))
	if len(gained) > 0 {
		t.Run("before the upgrade", func(t *testing.T) {
			t.Skipf("the last change of the chart permits its component more: %s", strings.Join(gained, ", "))
		})
	} else {
		running = h.run(t, c)
		c.work(t, "before")
	}
	h.helm(t, h.command("upgrade", c.release, chartPath(t, c.chart), append(flags, "--reset-then-reuse-values")...)...)
	upgraded := h.manifest(t, c.release)
	h.requireUpgraded(t, installed, upgraded)
	h.awaitRights(t, c.release, lo.Values(upgraded))
	running.stop()
	running = h.run(t, c)
	c.work(t, "after")
	return running
}

// awaitRights waits until the API server grants what the objects of a release do.
func (h *hub) awaitRights(t *testing.T, r release, objects []*unstructured.Unstructured) {
	t.Helper()
	granted := rights(t, r, objects)
	eventually(t, func(c *assert.CollectT) { require.Empty(c, h.lacks(c, r, granted)) })
}

// requireUninstalls uninstalls a release, and checks that nothing of it is left but its CRDs.
func (h *hub) requireUninstalls(t *testing.T, r release) {
	t.Helper()
	installed := h.manifest(t, r)
	h.uninstall(t, r)
	for key, object := range installed {
		err := h.admin.Get(t.Context(), client.ObjectKeyFromObject(object), object)
		if object.GetKind() == "CustomResourceDefinition" {
			require.NoError(t, err, key)
			continue
		}
		if err == nil { // a finalizer, or the garbage collector, which does not run here
			require.NotNil(t, object.GetDeletionTimestamp(), key)
			continue
		}
		require.True(t, apierrors.IsNotFound(err), "%s: %v", key, err)
	}
	require.Empty(t, h.guards(t, r), "outside the namespace")
	secrets := &corev1.SecretList{}
	require.NoError(t, h.admin.List(t.Context(), secrets, client.InNamespace(r.namespace)))
	require.Empty(t, secrets.Items)
}

// run starts a component as the pod of its release's Deployment: as the chart's service account, with
// the arguments and the environment of its container. It waits until the component is ready.
func (h *hub) run(t *testing.T, c component) pod {
	t.Helper()
	deployment := &appsv1.Deployment{}
	require.NoError(t, h.admin.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: c.name}, deployment))
	spec := deployment.Spec.Template.Spec
	container := spec.Containers[0]
	kubeconfig := h.accountsKubeconfig(t, c.namespace, spec.ServiceAccountName)
	args := lo.Map(container.Args, func(arg string, _ int) string { return c.files.Replace(arg) })

	_ = os.Getenv("TESTED_BINARIES") // declares the binary's sources as inputs of the test cache
	log, err := os.Create(filepath.Join(t.TempDir(), c.binary+".log"))
	require.NoError(t, err)
	process := exec.Command(filepath.Join(root(t), "bin", c.binary), args...)
	process.Stdout, process.Stderr = log, log
	process.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	for _, variable := range container.Env {
		value := variable.Value
		if variable.ValueFrom != nil { // the kubelet's
			value = c.resource
		}
		process.Env = append(process.Env, variable.Name+"="+value)
	}
	health, found := lo.Find(container.Ports, func(p corev1.ContainerPort) bool { return p.Name == container.ReadinessProbe.HTTPGet.Port.StrVal })
	require.True(t, found)
	require.NoError(t, process.Start(), "run make bin/"+c.binary)
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
		refused := lo.Filter(strings.Split(output(), "\n"), func(line string, _ int) bool {
			return strings.Contains(strings.ToLower(line), "forbidden")
		})
		assert.Empty(t, refused, "what the API server has refused %s", c.binary)
		if t.Failed() {
			t.Logf("%s's log:\n%s", c.binary, lo.Substring(output(), -20000, 20000))
		}
	}
	t.Cleanup(stop)
	eventually(t, func(collect *assert.CollectT) {
		response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", health.ContainerPort, container.ReadinessProbe.HTTPGet.Path))
		require.NoError(collect, err)
		require.NoError(collect, response.Body.Close())
		require.Equal(collect, http.StatusOK, response.StatusCode)
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

// certificate returns a folder with a certificate, its key and its authority.
func certificate(t *testing.T) string {
	t.Helper()
	chain, key, err := cert.GenerateSelfSignedCertKey("localhost", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	require.NoError(t, err)
	dir := t.TempDir()
	for name, content := range map[string][]byte{"tls.crt": chain, "tls.key": key, "ca.crt": chain} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
	}
	return dir
}

// shortDir returns a folder whose path leaves room for the name of a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "charts") //nolint:usetesting // That of the test is too long.
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(dir)) })
	return dir
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
	t.Cleanup(func() { assert.NoError(t, h.admin.Delete(context.Background(), pod)) })
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.Now(),
	}}
	require.NoError(t, h.admin.Status().Update(t.Context(), pod))
}
