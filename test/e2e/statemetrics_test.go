package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// stateMetrics is deploy/examples/kube-state-metrics.yaml: values of the chart of
// kube-state-metrics.
type stateMetrics struct {
	RBAC struct {
		ExtraRules []rbacv1.PolicyRule `json:"extraRules"`
	} `json:"rbac"`
	CustomResourceState struct {
		Config map[string]any `json:"config"`
	} `json:"customResourceState"`
}

// names returns the names of all metrics of the configuration.
func (s stateMetrics) names(t *testing.T) []string {
	t.Helper()
	var config struct {
		Spec struct {
			Resources []struct {
				MetricNamePrefix string `json:"metricNamePrefix"`
				Metrics          []struct {
					Name string `json:"name"`
				} `json:"metrics"`
			} `json:"resources"`
		} `json:"spec"`
	}
	text, err := yaml.Marshal(s.CustomResourceState.Config)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, &config))
	var names []string
	for _, resource := range config.Spec.Resources {
		for _, metric := range resource.Metrics {
			names = append(names, resource.MetricNamePrefix+"_"+metric.Name)
		}
	}
	require.NotEmpty(t, names)
	return names
}

func TestKubeStateMetricsShowsTheHub(t *testing.T) {
	figure := shows(t, "kube-state-metrics, with the example's configuration and rights, shows the claims, the Spoke and the NodePoolSet of a hub")
	if testing.Short() {
		t.Skip("not in the short run: it needs kube-state-metrics, which takes minutes to build")
	}
	inSandbox(t, sandbox.Options{Name: "e2e-state-metrics", NodePools: true})
	useCrowd(t)
	selectCluster(t, w, "general")
	set := published(t)
	require.NoError(t, w.Hub.Create(within(t, soon), set))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		require.NoError(t, w.Hub.Delete(ctx, set))
	})
	scale(t, "crowd", 2)
	await(t, 3*time.Minute, crowdRuns(2))
	scale(t, "crowd", 1)
	await(t, 3*time.Minute, crowdRuns(1))

	text, err := os.ReadFile(filepath.Join(root(t), "deploy/examples/kube-state-metrics.yaml"))
	require.NoError(t, err)
	var example stateMetrics
	require.NoError(t, yaml.Unmarshal(text, &example))
	address := runStateMetrics(t, example)
	metrics := func(ctx context.Context) (string, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
		if err != nil {
			return "", err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return "", nil // it does not serve yet
		}
		defer func() { _ = response.Body.Close() }()
		content, err := io.ReadAll(response.Body)
		return string(content), err
	}
	const number = `[0-9.e+]+`
	cluster := w.Checker.Cluster
	object := fmt.Sprintf(`namespace="%s"`, cluster.Namespace)
	names := example.names(t)
	wanted := lo.Map(names, func(name string, _ int) string { return name + `\{.*` })
	wanted = append(wanted,
		`kube_machineclaim_info\{[^}]*cluster="`+cluster.Name+`"[^}]*holder="karpenter"[^}]*machine_deployment="crowd"[^}]*\} 1`,
		`kube_machineclaim_status_phase\{[^}]*phase="Bound"[^}]*\} 1`,
		`kube_machineclaim_status_phase\{[^}]*phase="Ended"[^}]*\} 1`,
		`kube_machineclaim_node_registered\{[^}]*\} `+number,
		`kube_machineclaim_ended\{[^}]*\} `+number,
		`kube_spoke_info\{[^}]*`+object+`[^}]*\} 1`,
		`kube_spoke_status_condition\{[^}]*type="Connected"[^}]*\} 1`,
		`kube_spoke_last_sync\{[^}]*\} `+number,
		`kube_spoke_nodepool_nodes\{[^}]*nodepool="crowd"[^}]*\} 1`,
		`kube_spoke_nodepool_price_per_hour\{[^}]*nodepool="crowd"[^}]*\} `+number,
		`kube_nodepoolset_clusters\{[^}]*name="general"[^}]*\} 1`,
	)
	patterns := lo.Map(wanted, func(want string, _ int) *regexp.Regexp { return regexp.MustCompile(`(?m)^` + want + `$`) })
	// The shim reports its NodePools some seconds after they have changed.
	poll(t, soon, func(ctx context.Context) (string, error) {
		shown, err := metrics(ctx)
		missing := lo.Reject(patterns, func(want *regexp.Regexp, _ int) bool { return want.MatchString(shown) })
		return lo.Ternary(len(missing) == 0, "", fmt.Sprintf("metrics to show: %v of %s", missing, shown)), err
	})
	figure("%d metrics have series", len(names))
}

// runStateMetrics runs kube-state-metrics until the test ends, as an account that has the example's
// rights, and that of finding CustomResourceDefinitions, which the chart adds. It returns the
// metrics' address.
func runStateMetrics(t *testing.T, example stateMetrics) string {
	t.Helper()
	const name = "kube-state-metrics"
	ctx := within(t, soon)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	require.NoError(t, w.Hub.Create(ctx, account))
	require.NoError(t, w.Hub.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: append(example.RBAC.ExtraRules,
		rbacv1.PolicyRule{
			APIGroups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions"}, Verbs: []string{"list", "watch"},
		})}))
	require.NoError(t, w.Hub.Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: account.Namespace, Name: name}},
	}))
	token := &authenticationv1.TokenRequest{}
	require.NoError(t, w.Hub.SubResource("token").Create(ctx, account, token))

	folder, hub := t.TempDir(), w.Sandbox.HubConfig()
	kubeconfig, config := filepath.Join(folder, "kubeconfig"), filepath.Join(folder, "config.yaml")
	require.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{name: {Server: hub.Host, CertificateAuthorityData: hub.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{name: {Token: token.Status.Token}},
		Contexts:  map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}}, CurrentContext: name,
	}, kubeconfig))
	text, err := yaml.Marshal(example.CustomResourceState.Config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(config, text, 0o600))

	free := func() (port string) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, port, err = net.SplitHostPort(listener.Addr().String())
		require.NoError(t, err)
		require.NoError(t, listener.Close())
		return port
	}
	port := free()
	var output bytes.Buffer
	command := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin", name),
		"--kubeconfig="+kubeconfig, "--custom-resource-state-config-file="+config, "--custom-resource-state-only",
		"--host=127.0.0.1", "--port="+port, "--telemetry-host=127.0.0.1", "--telemetry-port="+free())
	command.Stdout, command.Stderr = &output, &output
	require.NoError(t, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait() // killed, by this or by the end of the test's context
		if t.Failed() {
			t.Logf("%s: %s", name, output.String())
		}
	})
	return net.JoinHostPort("127.0.0.1", port)
}
