package pages_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

const (
	// soon bounds the waits of these tests, for a machine that is busy with others.
	soon = 3 * time.Minute
	// onboardedWithin is what the page promises for the onboarding of a spoke.
	onboardedWithin = time.Minute
)

var (
	spokeKind       = schema.GroupVersionKind{Group: "agent.karpenter.cluster.x-k8s.io", Version: "v1alpha1", Kind: "Spoke"}
	resourceSetKind = schema.GroupVersionKind{Group: "addons.cluster.x-k8s.io", Version: "v1beta2", Kind: "ClusterResourceSet"}
)

// The commands that onboard a spoke, show it, onboard it again and shut it out are followed in the
// page's order. Agent and shim run as the charts' Deployments say, with the rights of their accounts.
func TestASpokeCanBeOnboardedAsThePageSays(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/operations.md")
	require.NoError(t, err)
	installation, err := pages.Read(root(t), "docs/install.md")
	require.NoError(t, err)
	steps := func(section string, count int) []string {
		steps := page.Steps(section)
		require.Len(t, steps, count, "the commands below %q", section)
		return steps
	}

	hub, spoke := start(t, "testdata/cert-manager.yaml", filepath.Join(root(t), "bin/capi-core-manifests/crds")), start(t)
	home := t.TempDir()
	do := func(commands string) string {
		t.Helper()
		values := strings.Replace(installation.Script("Before you begin"), "AGENT_HOST=agent.example.com", "AGENT_HOST=localhost", 1)
		require.Contains(t, values, "AGENT_HOST=localhost")
		return runAt(ctx, t, home, map[string]*server{"hub": hub, "spoke": spoke}, values+commands)
	}
	require.NoError(t, hub.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}}))
	for _, name := range []string{"production", "staging"} {
		create(ctx, t, hub.client, "{apiVersion: cluster.x-k8s.io/v1beta2, kind: Cluster, metadata: {namespace: team-a, name: "+name+"}, "+
			"spec: {controlPlaneRef: {apiGroup: controlplane.cluster.x-k8s.io, kind: KamajiControlPlane, name: "+name+"}}}")
	}
	authority := newAuthority(t)
	playCertManager(ctx, t, hub.client, authority.issue)

	do(installation.Steps("The agent")[0])
	onboard := steps("Onboard a spoke", 5)
	do(onboard[0])
	runAgent := func() (agent *process, address string) {
		agent = runPod(ctx, t, hub, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent"}, "capi-agent", nil,
			"--listen-address=localhost:0", "--metrics-bind-address=0", "--health-probe-bind-address=0")
		return agent, servedAddress(ctx, t, agent)
	}
	runShim := func(agentAddress string) *process {
		return runPod(ctx, t, spoke, client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, "karpenter",
			[]string{"DISABLE_LEADER_ELECTION=true", "METRICS_BIND_ADDRESS=127.0.0.1:0", "HEALTH_PROBE_BIND_ADDRESS=127.0.0.1:0"},
			"--agent-address="+agentAddress)
	}
	agent, agentAddress := runAgent()

	require.Contains(t, do(onboard[1]), "would onboard team-a/production")
	require.Contains(t, do(onboard[2]), "team-a/production is onboarded")
	do(onboard[3])
	shim := runShim(agentAddress)
	key := client.ObjectKey{Namespace: "team-a", Name: "production"}
	first := awaitConnected(ctx, t, hub.client, key, "", agent, shim)

	require.Contains(t, do(onboard[4]), "team-a/staging is onboarded")
	require.Len(t, list(ctx, t, hub.client, resourceSetKind), 2)

	see := steps("See the spokes", 2)
	shown := strings.Split(do(see[0]), "\n")
	header, row := table(t, page, "See the spokes")
	require.Equal(t, header, strings.Fields(shown[0]), "the columns of the page")
	require.Equal(t, row[:3], strings.Fields(shown[1])[:3])
	require.Contains(t, do(strings.TrimSpace(see[0])+" --output=wide"), "SPOKE ID")
	require.Contains(t, do(see[1]), "CertificateIssued")

	shimsOwn := shimsIdentity(ctx, t, spoke.client)
	require.NoError(t, shimsOwn.call(ctx, t, agentAddress))
	began := time.Now()
	do(steps("Renewal", 1)[0])
	awaitConnected(ctx, t, hub.client, key, first, agent, shim)
	took := time.Since(began)
	t.Logf("connected %.1f s after the command began", took.Seconds())
	require.Less(t, took, onboardedWithin, "from the start of the command until the spoke is shown as connected")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.True(c, agenterrors.IsUnauthenticated(shimsOwn.call(ctx, t, agentAddress)), "the certificate of before")
	}, soon, 100*time.Millisecond)
	// The hub shows the shim as connected as soon as its key is signed, which is before the shim has stored the certificate.
	var renewed identity
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		renewed = shimsIdentity(ctx, t, spoke.client)
		require.NoError(c, renewed.call(ctx, t, agentAddress))
	}, soon, 100*time.Millisecond)

	// Both are restarted, as the Deployments' controllers would.
	publishing, err := pages.Read(root(t), "docs/nodepools-from-the-hub.md")
	require.NoError(t, err)
	do(publishing.Script("Turn it on"))
	shim.stop()
	agent.stop()
	agent, agentAddress = runAgent()
	shim = runShim(agentAddress)
	publishNodePools(ctx, t, publishing, hub, spoke, do, agent, shim)

	// docs/uninstall.md, from here to the end of the shim.
	karpenterRemovesItsNodes(ctx, t, installation, hub, spoke, do, agent, shim)

	require.Contains(t, do(steps("Shut a spoke out", 1)[0]), "team-a/production is offboarded")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.True(c, agenterrors.IsUnauthenticated(renewed.call(ctx, t, agentAddress)))
	}, soon, 100*time.Millisecond)
}

// A wait for what a process does ends with the process.
func TestAWaitEndsWithItsProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), soon/2)
	defer cancel()
	broken := launch(t, exec.CommandContext(ctx, "bash", "-c", "echo no route to the hub; exit 3"))
	err := await(ctx, func() error { return errors.New("the Spoke is not connected") }, broken)
	require.ErrorContains(t, err, "bash has ended: exit status 3 while this was awaited: the Spoke is not connected")
	require.ErrorContains(t, err, "no route to the hub")
	require.NoError(t, ctx.Err(), "it ends before its bound")
}

// table returns the fields of the header and of the first row that a section shows.
func table(t *testing.T, page pages.Page, section string) (header, row []string) {
	t.Helper()
	for _, block := range page.Blocks() {
		if block.Section == section && block.Language == "" {
			lines := strings.Split(block.Code, "\n")
			require.Greater(t, len(lines), 1)
			return strings.Fields(lines[0]), strings.Fields(lines[1])
		}
	}
	require.Fail(t, "the section shows no output")
	return nil, nil
}

// awaitConnected waits until a Spoke is connected with a certificate of another onboarding than the
// given one, and returns that onboarding. It fails at once if one of the processes has ended.
func awaitConnected(ctx context.Context, t *testing.T, hub client.Client, key client.ObjectKey, before string, processes ...*process) string {
	t.Helper()
	onboarding := ""
	require.NoError(t, await(ctx, func() error {
		spoke := &unstructured.Unstructured{}
		spoke.SetGroupVersionKind(spokeKind)
		if err := hub.Get(ctx, key, spoke); err != nil {
			return err
		}
		enrolled, _, err := unstructured.NestedString(spoke.Object, "spec", "enrollment", "onboarding")
		if err != nil {
			return err
		}
		conditions, _, err := unstructured.NestedSlice(spoke.Object, "status", "conditions")
		if err != nil {
			return err
		}
		onboarding = spoke.GetLabels()["agent.karpenter.cluster.x-k8s.io/onboarding"]
		switch {
		case onboarding == before:
			return fmt.Errorf("the onboarding is still %q", before)
		case enrolled != onboarding:
			return fmt.Errorf("the shim has not used its bootstrap certificate: %v", spoke.Object)
		case !strings.Contains(fmt.Sprint(conditions), "status:True type:Connected"):
			return fmt.Errorf("the Spoke is not connected: %v", spoke.Object)
		}
		return nil
	}, processes...))
	return onboarding
}

func list(ctx context.Context, t *testing.T, of client.Client, kind schema.GroupVersionKind) []unstructured.Unstructured {
	t.Helper()
	objects := &unstructured.UnstructuredList{}
	objects.SetGroupVersionKind(kind)
	require.NoError(t, of.List(ctx, objects))
	return objects.Items
}

// identity is a certificate of a shim, in files.
type identity struct{ files agentclient.TLS }

// shimsIdentity returns the certificate that the shim has now.
func shimsIdentity(ctx context.Context, t *testing.T, spoke client.Client) identity {
	t.Helper()
	return identityIn(ctx, t, spoke, client.ObjectKey{Namespace: "karpenter", Name: "karpenter-agent-identity"})
}

// identityIn returns the certificate of a secret.
func identityIn(ctx context.Context, t *testing.T, cluster client.Client, name client.ObjectKey) identity {
	t.Helper()
	secret := &corev1.Secret{}
	require.NoError(t, cluster.Get(ctx, name, secret))
	folder := t.TempDir()
	for name, content := range secret.Data {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), content, 0o600))
	}
	file := func(name string) string { return filepath.Join(folder, name) }
	_, err := tls.LoadX509KeyPair(file("tls.crt"), file("tls.key"))
	require.NoError(t, err)
	return identity{agentclient.TLS{CertFile: file("tls.crt"), KeyFile: file("tls.key"), CAFile: file("ca.crt")}}
}

// connect returns a client of the agent, which is closed when the test ends.
func (i identity) connect(t *testing.T, address string) *agentclient.Client {
	t.Helper()
	c, err := agentclient.New(agentclient.Options{Address: address, TLS: &i.files})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// call lists the node groups of the Cluster on a connection of its own.
func (i identity) call(ctx context.Context, t *testing.T, address string) error {
	t.Helper()
	_, err := i.connect(t, address).NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"},
	})
	return err
}

// process is a binary that runs as a pod would.
type process struct {
	name  string
	ended chan struct{} // closed when it has ended
	err   error         // how; set before ended is closed
	stop  func()        // ends it, and waits until it has ended; may be called again

	mu     sync.Mutex
	output bytes.Buffer
}

// launch starts a process, which is stopped when the test ends.
func launch(t *testing.T, command *exec.Cmd) *process {
	t.Helper()
	p := &process{name: filepath.Base(command.Path), ended: make(chan struct{})}
	command.Stdout, command.Stderr = p, p
	require.NoError(t, command.Start())
	go func() {
		p.err = command.Wait()
		close(p.ended)
	}()
	p.stop = func() {
		_ = command.Process.Signal(os.Interrupt) // unless it has ended
		select {
		case <-p.ended:
		case <-time.After(soon):
			_ = command.Process.Kill()
			<-p.ended
			t.Errorf("%s does not end: %v", p.name, p.err)
		}
	}
	t.Cleanup(p.stop)
	return p
}

func (p *process) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.Write(text)
}

// log returns everything that it has logged.
func (p *process) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.String()
}

// String returns the last of what it has logged.
func (p *process) String() string {
	text := p.log()
	return text[max(0, len(text)-4000):]
}

// await waits until the condition returns nil, at most for [soon] or until one of the processes ends.
// The error has the condition's last answer and the processes' logs.
func await(ctx context.Context, condition func() error, processes ...*process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, soon, errors.New("the time is over"))
	defer cancel()
	ctx, over := context.WithCancelCause(ctx)
	defer over(nil)
	for _, p := range processes {
		go func() {
			select {
			case <-p.ended:
				over(fmt.Errorf("%s has ended: %w", p.name, cmp.Or(p.err, errors.New("exit status 0"))))
			case <-ctx.Done():
			}
		}()
	}
	ticks := time.NewTicker(100 * time.Millisecond)
	defer ticks.Stop()
	for {
		missing := condition()
		if missing == nil {
			return nil
		}
		select {
		case <-ticks.C:
		case <-ctx.Done():
			err := fmt.Errorf("%w while this was awaited: %w", context.Cause(ctx), missing)
			for _, p := range processes {
				err = fmt.Errorf("%w\n--- %s\n%s", err, p.name, p)
			}
			return err
		}
	}
}

// served is the line with which an agent logs where it serves.
var served = regexp.MustCompile(`"msg":"serving","address":"[^"]*:(\d+)"`)

// servedAddress waits until the agent serves at a port that it has chosen itself, and returns the
// address.
func servedAddress(ctx context.Context, t *testing.T, agent *process) string {
	t.Helper()
	var port []string
	require.NoError(t, await(ctx, func() error {
		if port = served.FindStringSubmatch(agent.log()); port == nil {
			return errors.New("the agent does not serve yet")
		}
		return nil
	}, agent))
	return "localhost:" + port[1]
}

// runPod runs the first container of a Deployment's pods as a process until the test ends: with its
// arguments, its variables, the files of its secrets, and the rights of its account. Further variables
// and arguments replace addresses, which processes of one machine share.
func runPod(ctx context.Context, t *testing.T, in *server, name client.ObjectKey, binary string, env []string, arguments ...string) *process {
	t.Helper()
	deployment := &appsv1.Deployment{}
	require.NoError(t, in.client.Get(ctx, name, deployment))
	pod := deployment.Spec.Template.Spec
	container, folder := pod.Containers[0], t.TempDir()
	for _, volume := range pod.Volumes {
		if volume.Secret == nil {
			continue
		}
		secret := &corev1.Secret{}
		require.NoError(t, in.client.Get(ctx, client.ObjectKey{Namespace: name.Namespace, Name: volume.Secret.SecretName}, secret))
		for _, mount := range container.VolumeMounts {
			if mount.Name != volume.Name {
				continue
			}
			require.NoError(t, os.MkdirAll(filepath.Join(folder, mount.MountPath), 0o700))
			for file, content := range secret.Data {
				require.NoError(t, os.WriteFile(filepath.Join(folder, mount.MountPath, file), content, 0o600))
			}
		}
	}
	var all []string
	for _, argument := range container.Args {
		for _, mount := range container.VolumeMounts {
			argument = strings.Replace(argument, "="+mount.MountPath+"/", "="+filepath.Join(folder, mount.MountPath)+"/", 1)
		}
		all = append(all, argument)
	}

	command := exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(root(t), "bin", binary), append(all, arguments...)...)
	command.Dir = folder
	command.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + folder, "KUBECONFIG=" + accountsKubeconfig(ctx, t, in, name.Namespace, pod.ServiceAccountName),
	}
	for _, variable := range container.Env {
		if variable.ValueFrom == nil {
			command.Env = append(command.Env, variable.Name+"="+variable.Value)
		}
	}
	command.Env = append(command.Env, env...)
	var p *process
	t.Cleanup(func() { assert.NoError(t, p.err, "%s: %s", binary, p) }) // after it was stopped
	p = launch(t, command)
	return p
}

// accountsKubeconfig returns a kubeconfig with a token of a service account.
func accountsKubeconfig(ctx context.Context, t *testing.T, in *server, namespace, account string) string {
	t.Helper()
	token := &authenticationv1.TokenRequest{}
	require.NoError(t, in.client.SubResource("token").Create(ctx,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}, token))
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil,
		"apiVersion: v1\nkind: Config\ncurrent-context: pod\ncontexts: [{name: pod, context: {cluster: pod, user: pod}}]\n"+
			"clusters: [{name: pod, cluster: {server: %q, certificate-authority-data: %s}}]\nusers: [{name: pod, user: {token: %q}}]\n",
		in.config.Host, base64.StdEncoding.EncodeToString(in.config.CAData), token.Status.Token), 0o600))
	return file
}

// certAuthority is the authority that cert-manager makes for the agent's chart.
type certAuthority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *certAuthority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "capi-agent-ca"}, NotBefore: time.Now().Add(-time.Minute),
		NotAfter: time.Now().Add(72 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	certificate, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &certAuthority{certificate, key}
}

// issue returns the content of a Certificate's secret.
func (a *certAuthority) issue(certificate *unstructured.Unstructured) (map[string][]byte, error) {
	spec, _, err := unstructured.NestedMap(certificate.Object, "spec")
	if err != nil {
		return nil, err
	}
	der, key := a.certificate.Raw, a.key
	if spec["isCA"] != true {
		if key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return nil, err
		}
		template := &x509.Certificate{
			SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		}
		if template.DNSNames, _, err = unstructured.NestedStringSlice(spec, "dnsNames"); err != nil {
			return nil, err
		}
		uris, _, err := unstructured.NestedStringSlice(spec, "uris")
		if err != nil {
			return nil, err
		}
		for _, text := range uris {
			uri, err := url.Parse(text)
			if err != nil {
				return nil, err
			}
			template.URIs, template.ExtKeyUsage = append(template.URIs, uri), []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		}
		if der, err = x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key); err != nil {
			return nil, err
		}
	}
	encodedKey, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	encode := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	return map[string][]byte{
		"tls.crt": encode("CERTIFICATE", der), "tls.key": encode("EC PRIVATE KEY", encodedKey), "ca.crt": encode("CERTIFICATE", a.certificate.Raw),
	}, nil
}
