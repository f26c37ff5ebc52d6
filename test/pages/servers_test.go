package pages_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// server is a kube-apiserver without anything else.
type server struct {
	config *rest.Config
	client client.Client
}

// start runs a server for the duration of the test.
func start(t *testing.T, crds ...string) *server {
	t.Helper()
	environment := &envtest.Environment{CRDInstallOptions: envtest.CRDInstallOptions{
		Paths: crds, ErrorIfPathMissing: true, MaxTime: time.Minute, // the machine may be busy with other tests
	}}
	config, err := environment.Start()
	t.Cleanup(func() {
		if err := environment.Stop(); err != nil {
			t.Errorf("stopping the API server: %v", err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	config.WarningHandler = rest.NoWarnings{} // about placeholders for certificates
	c, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return &server{config: config, client: c}
}

// run runs commands like a user with an administrator's kubeconfig, in the root of the repository,
// until one of them fails. The servers are the contexts of the kubeconfig; the one named spoke is
// the current context.
func run(ctx context.Context, t *testing.T, servers map[string]*server, commands string) string {
	t.Helper()
	return runAt(ctx, t, t.TempDir(), servers, commands)
}

// runAt is [run] with a home directory that keeps files from one run to the next.
func runAt(ctx context.Context, t *testing.T, home string, servers map[string]*server, commands string) string {
	t.Helper()
	var output bytes.Buffer
	bash := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	bash.Dir, bash.Stdout, bash.Stderr = root(t), &output, &output
	bash.WaitDelay = 10 * time.Second
	bash.Env = append(os.Environ(),
		"KUBECONFIG="+kubeconfig(t, servers),
		"PATH="+filepath.Join(root(t), "bin")+":"+os.Getenv("PATH"),
		"HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home,
	)
	if err := bash.Run(); err != nil {
		t.Fatalf("%v\n%s", err, output.String())
	}
	return output.String()
}

func kubeconfig(t *testing.T, servers map[string]*server) string {
	t.Helper()
	var clusters, users, contexts strings.Builder
	for name, s := range servers {
		encode := base64.StdEncoding.EncodeToString
		fmt.Fprintf(&clusters, "- {name: %s, cluster: {server: %q, certificate-authority-data: %s}}\n",
			name, s.config.Host, encode(s.config.CAData))
		fmt.Fprintf(&users, "- {name: %s, user: {client-certificate-data: %s, client-key-data: %s}}\n",
			name, encode(s.config.CertData), encode(s.config.KeyData))
		fmt.Fprintf(&contexts, "- {name: %[1]s, context: {cluster: %[1]s, user: %[1]s}}\n", name)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	content := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: spoke\nclusters:\n%susers:\n%scontexts:\n%s", &clusters, &users, &contexts)
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
