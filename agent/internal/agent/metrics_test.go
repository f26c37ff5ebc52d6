package agent_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// Metrics contain the node groups of every tenant. Only clients that the hub allows to get /metrics
// may read them.
func TestMetricsAreForThoseWhoMayReadThem(t *testing.T) {
	namespace := plane.Namespace(t)
	reader, other := serviceAccount(t, namespace, "reader"), serviceAccount(t, namespace, "other")
	plane.Create(t,
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader." + namespace},
			Rules:      []rbacv1.PolicyRule{{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}}},
		},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader." + namespace},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "metrics-reader." + namespace},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "reader"}},
		})
	authority := testpki.New(t)
	files := authority.Issue(t, t.TempDir(), authority)
	o := testOptions(namespace)
	o.MetricsBindAddress = freeAddress(t)
	o.MetricsTLSCertFile, o.MetricsTLSKeyFile = files.CertFile, files.KeyFile
	start(t, agent.Config{Options: o})

	https := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: authority.Pool(), MinVersion: tls.VersionTLS13}, DisableKeepAlives: true,
	}}
	get := func(token string) (int, string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+o.MetricsBindAddress+"/metrics", http.NoBody)
		require.NoError(t, err)
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		response, err := https.Do(request)
		require.NoError(t, err)
		defer func() { assert.NoError(t, response.Body.Close()) }()
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(body)
	}
	// The API server caches RBAC.
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		code, body := get(reader)
		assert.Equal(c, http.StatusOK, code)
		assert.Contains(c, body, "\ncontroller_runtime_")
	}, patience, 100*time.Millisecond)
	for of, attempt := range map[string]struct {
		token string
		code  int
	}{
		"no token":         {"", http.StatusUnauthorized},
		"an invalid token": {"nonsense", http.StatusInternalServerError}, // controller-runtime's response
		"another account":  {other, http.StatusForbidden},
	} {
		code, body := get(attempt.token)
		require.Equal(t, attempt.code, code, of)
		require.NotContains(t, body, "controller_runtime_", of)
	}
}

// The alert is that Prometheus has no metrics of the agent.
func TestAnAgentThatWasKilledServesNoMetrics(t *testing.T) {
	namespace, folder, kubeconfig := plane.Namespace(t), t.TempDir(), filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, plane.KubeConfig(), 0o600))
	authority := testpki.New(t)
	authority.Issue(t, folder, authority)
	s := &site{t: t, address: freeAddress(t), metrics: freeAddress(t), namespace: namespace, kubeconfig: kubeconfig, files: folder}
	s.start()
	t.Cleanup(s.kill)
	var running scrapes.Scrape
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var err error
		running, err = scrapes.Get(t, "http://"+s.metrics+"/metrics")
		assert.NoError(c, err)
	}, patience, 100*time.Millisecond)
	s.kill()
	killed, err := scrapes.Get(t, "http://"+s.metrics+"/metrics")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	scrapes.Record(t, "CapiAgentDown", running, killed)
}

func TestMetricsWithoutTheirCertificateAreAnError(t *testing.T) {
	o := testOptions(plane.Namespace(t))
	o.MetricsBindAddress = "127.0.0.1:0"
	o.MetricsTLSCertFile, o.MetricsTLSKeyFile = t.TempDir()+"/tls.crt", t.TempDir()+"/tls.key"
	_, err := agent.New(t.Context(), agent.Config{Options: o, Hub: hub})
	require.ErrorContains(t, err, "the certificate of the metrics")
}

// controller-runtime looks for a name without a directory in a temporary directory, and generates a
// certificate if it finds none.
func TestTheMetricsCertificateMayHaveARelativePath(t *testing.T) {
	authority := testpki.New(t)
	files := authority.Issue(t, t.TempDir(), authority)
	t.Chdir(filepath.Dir(files.CertFile))
	o := testOptions(plane.Namespace(t))
	o.MetricsBindAddress = freeAddress(t)
	o.TLSCertFile, o.TLSKeyFile = filepath.Base(files.CertFile), files.KeyFile // the agent's own
	start(t, agent.Config{Options: o})
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		dialer := tls.Dialer{Config: &tls.Config{RootCAs: authority.Pool(), MinVersion: tls.VersionTLS13}}
		conn, err := dialer.DialContext(t.Context(), "tcp", o.MetricsBindAddress)
		if assert.NoError(c, err) {
			assert.NoError(c, conn.Close())
		}
	}, patience, 100*time.Millisecond)
}

func TestMetricsThatAreNotServedNeedNoCertificate(t *testing.T) {
	o := testOptions(plane.Namespace(t))
	o.MetricsTLSCertFile, o.MetricsTLSKeyFile = t.TempDir()+"/tls.crt", t.TempDir()+"/tls.key"
	_, err := agent.New(t.Context(), agent.Config{Options: o, Hub: hub})
	require.NoError(t, err)
}

// serviceAccount returns a token of a new service account.
func serviceAccount(t *testing.T, namespace, name string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	plane.Create(t, account)
	request := &authenticationv1.TokenRequest{}
	require.NoError(t, plane.Client.SubResource("token").Create(t.Context(), account, request))
	return request.Status.Token
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	return listener.Addr().String()
}
