package charts_test

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/util/cert"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Releases of the charts as they were before their last change, with the values that they were tested with
// then, are upgraded by the command of docs/install.md.
func TestChartsAreUpgradedFromTheCommitBefore(t *testing.T) {
	earlier, missing := earlierCharts(t)
	if missing != "" {
		t.Skip(missing)
	}
	h := ownHub(t)
	h.namespaces(t, "team-a", "team-b", "billing", "monitoring")
	for _, u := range []struct {
		chart    chart
		values   []string
		settings string
	}{
		{
			charts[0],
			[]string{"defaults", "confined", "everything"},
			"tls.certManager.enabled=false,onboarding.issuerSecretName=issuer,metrics.serviceMonitor.enabled=false,metrics.prometheusRule.enabled=false",
		},
		{
			charts[1], []string{"defaults", "enrollment", "everything"}, "metrics.serviceMonitor.enabled=false,metrics.prometheusRule.enabled=false",
		},
	} {
		for _, values := range u.values {
			t.Run(u.chart.name+"/"+values, func(t *testing.T) {
				r := release{u.chart.release, u.chart.namespace}
				before := filepath.Join(earlier, u.chart.name)
				file := filepath.Join(before, "ci", values+"-values.yaml")
				h.install(t, r, before, "--values", file, "--set", u.settings)
				old := h.manifest(t, r)
				h.helm(t, h.command("upgrade", r, chartPath(t, u.chart), "--reset-then-reuse-values")...)
				upgraded := h.manifest(t, r)
				require.NotEmpty(t, old)
				for key, object := range upgraded {
					require.NoError(t, h.admin.Get(t.Context(), client.ObjectKeyFromObject(object), object), key)
				}
				for key, object := range old {
					if _, kept := upgraded[key]; kept {
						continue
					}
					eventually(t, func(c *assert.CollectT) {
						err := h.admin.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopy())
						require.True(c, apierrors.IsNotFound(err), "%s: %v", key, err)
					})
				}
			})
		}
	}
}

// manifest returns the objects of a release.
func (h *hub) manifest(t *testing.T, r release) map[string]*unstructured.Unstructured {
	t.Helper()
	manifest, stderr, err := helm(t, "get", "manifest", r.name, "--namespace", r.namespace, "--kubeconfig", h.kubeconfig)
	require.NoError(t, err, stderr)
	return lo.KeyBy(decoded(t, manifest), func(o *unstructured.Unstructured) string {
		return fmt.Sprintf("%s %s/%s", o.GroupVersionKind().GroupKind(), o.GetNamespace(), o.GetName())
	})
}

// earlierCharts returns a folder with the charts as they were before the last change: at HEAD if something is
// not committed, else before the last commit that changed them, or at the revision that the environment names.
// missing says why there are none.
func earlierCharts(t *testing.T) (folder, missing string) {
	t.Helper()
	git := func(args ...string) (string, error) {
		command := exec.CommandContext(t.Context(), "git", args...)
		command.Dir = root(t)
		out, err := command.Output()
		return strings.TrimSpace(string(out)), err
	}
	if _, err := git("rev-parse", "--git-dir"); err != nil {
		return "", fmt.Sprintf("there is no history here: %v", err)
	}
	name := "HEAD"
	if _, err := git("diff", "--quiet", "HEAD", "--", "deploy/charts"); err == nil {
		last, err := git("log", "-1", "--format=%H", "--", "deploy/charts")
		require.NoError(t, err)
		name = last + "~1"
	}
	name = cmp.Or(os.Getenv("SKEW_FROM"), name)
	revision, err := git("rev-parse", "--verify", name+"^{commit}")
	if err != nil {
		return "", fmt.Sprintf("the revision %s is not in this history, which may be shallow: %v", name, err)
	}
	dir := t.TempDir()
	_, err = git("archive", "--format=tar", "--output="+filepath.Join(dir, "charts.tar"), revision, "deploy/charts")
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-xf", filepath.Join(dir, "charts.tar")).CombinedOutput()
	require.NoError(t, err, string(out))
	return filepath.Join(dir, "deploy", "charts"), ""
}

// A release is installed, upgraded and removed. In between, the agent runs as the chart's service account, with
// the arguments of the chart's Deployment: it needs no right that its chart does not grant, and its chart's
// admission policies let it work.
func TestTheAgentRunsWithTheRightsOfItsChart(t *testing.T) {
	h := ownHub(t)
	require.NoError(t, h.installClusterAPI(root(t)))
	h.namespaces(t, "fleet")
	socket := filepath.Join(shortDir(t), "agent.sock")
	r := release{charts[0].release, charts[0].namespace}
	settings := []string{
		"--set", fmt.Sprintf("tls.certManager.enabled=false,namespaces={fleet},metrics.port=%d,healthProbe.port=%d", freePort(t), freePort(t)),
		"--set-json", fmt.Sprintf(`extraArgs=["--listen-address=127.0.0.1:%d","--listen-unix-socket=%s","--unix-socket-role=cluster",`+
			`"--unix-socket-clusters=fleet/production"]`, freePort(t), socket),
	}
	first := chartPath(t, charts[0])
	if earlier, missing := earlierCharts(t); missing == "" {
		first = filepath.Join(earlier, charts[0].name)
	} else {
		t.Log("it begins with the present chart: " + missing)
	}
	h.install(t, r, first, settings...)
	h.helm(t, append(h.command("upgrade", r, chartPath(t, charts[0])), settings...)...)
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

	pod := h.runPod(t, r, "capi-agent", strings.NewReplacer("/etc/capi-agent/tls", certificate(t)), "1000000000")
	agent, err := agentclient.New(agentclient.Options{Address: "unix://" + socket})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, agent.Close()) })
	of := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "production"}
	eventually(t, func(c *assert.CollectT) {
		_, err := agent.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: of, ClaimId: "first", Holder: "karpenter", Candidates: []string{"fleet/workers"},
		})
		require.NoError(c, err)
	})
	eventually(t, func(c *assert.CollectT) {
		md := &clusterv1.MachineDeployment{}
		require.NoError(c, h.admin.Get(t.Context(), client.ObjectKeyFromObject(group), md))
		require.EqualValues(c, 1, *md.Spec.Replicas)
		require.Equal(c, "1", md.Annotations[agentv1.ClaimedAnnotation])
	})
	// It records the Spoke, and that the claim is released.
	spoke := &unstructured.Unstructured{}
	spoke.SetAPIVersion(agentv1.GroupVersion.String())
	spoke.SetKind("Spoke")
	listed, err := agent.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: of, Holder: "karpenter"})
	require.NoError(t, err)
	_, err = agent.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
		Cluster: of, Holder: "karpenter", Token: listed.GetToken(), LiveClaimIds: []string{"first"}, SpokeId: "8b9c1b8e-6d9d-4e6f-9c56-0f9e2a3c1d10",
	})
	require.NoError(t, err)
	eventually(t, func(c *assert.CollectT) {
		require.NoError(c, h.admin.Get(t.Context(), client.ObjectKeyFromObject(cluster), spoke))
		synchronized, _, _ := unstructured.NestedString(spoke.Object, "status", "lastSyncTime")
		require.NotEmpty(c, synchronized)
	})
	_, err = agent.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: of, ClaimId: "first", Drained: true})
	require.NoError(t, err)

	// The first denial reaches the running agent.
	h.helm(t, append(h.command("upgrade", r, chartPath(t, charts[0]), settings...),
		"--set-json", `policy={"deny":[{"id":"spiffe://karpenter-capi/cluster/fleet/production","issuedBefore":"2100-01-01T00:00:00Z"}]}`)...)
	eventually(t, func(c *assert.CollectT) { require.Contains(c, pod.log(), "denials: 1") })
	pod.stop()

	// As docs/uninstall.md has it.
	for _, policy := range []string{"node-groups", "scale"} {
		binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{
			ObjectMeta: metav1.ObjectMeta{Name: policy + "." + r.name + "." + r.namespace},
		}
		require.NoError(t, h.admin.Delete(t.Context(), binding))
	}
	// The API server needs a few seconds to apply that.
	eventually(t, func(c *assert.CollectT) {
		removal := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin/capi-agent"), "uninstall", "--kubeconfig", h.kubeconfig)
		out, err := removal.CombinedOutput()
		require.NoError(c, err, string(out))
		require.Contains(c, string(out), "nothing of the agent is left")
	})
	md := &clusterv1.MachineDeployment{}
	require.NoError(t, h.admin.Get(t.Context(), client.ObjectKeyFromObject(group), md))
	require.NotContains(t, md.Annotations, agentv1.LedgerAnnotation)
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
