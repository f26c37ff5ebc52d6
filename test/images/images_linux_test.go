// Package images_test starts what the images of a release contain, in their own files and as their
// own user, without a container engine.
package images_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"
)

const (
	patience = time.Minute
	// version is in the labels of images of what is in bin. These binaries have a version of their own.
	version = "v0.0.1"
)

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// Each command of each image starts and tells its version; agent, shim and fake agent become ready.
func TestImagesRun(t *testing.T) {
	images := build(t)

	t.Run("versions", func(t *testing.T) {
		for name, commands := range map[string][]string{
			"capi-agent": {"capi-agent"}, "karpenter-capi": {"karpenter"}, "fake-agent": {"fake-agent", "capi-agent-conformance"},
		} {
			image := images.unpack(t, name)
			for _, command := range commands {
				output := image.output(t, "/usr/local/bin/"+command, "--version")
				require.Regexp(t, `^(devel|v[0-9])`, output)
				if images.version != version {
					require.Contains(t, output, images.version)
				}
			}
		}
	})

	t.Run("agent and shim", func(t *testing.T) {
		server := startServer(t)
		agent := images.unpack(t, "capi-agent")
		agent.mount(t, "/etc/hub/kubeconfig", server.KubeConfig)
		address, health := freeAddress(t), freeAddress(t)
		agent.start(t, "--kubeconfig=/etc/hub/kubeconfig", "--namespaces=fleet", "--plaintext-loopback", "--listen-address="+address,
			"--metrics-bind-address=0", "--health-probe-bind-address="+health)
		ready(t, "the agent", health)

		shim, health := images.unpack(t, "karpenter-capi"), freeAddress(t)
		shim.mount(t, "/etc/spoke/kubeconfig", server.KubeConfig)
		shim.environment = append(shim.environment, "KUBECONFIG=/etc/spoke/kubeconfig")
		shim.start(t, "--agent-address="+address, "--agent-plaintext-loopback", "--cluster-namespace=fleet", "--cluster-name=spoke",
			"--leader-election-namespace=fleet", "--metrics-bind-address=0", "--health-probe-bind-address="+health)
		ready(t, "the shim", health)
	})

	t.Run("the fake agent conforms, by the command of its image", func(t *testing.T) {
		image := images.unpack(t, "fake-agent")
		image.mount(t, "/etc/fake-agent/scenario.yaml", []byte("clusters: [{name: fleet/spoke}]\nnodeGroups: [{name: a, cluster: fleet/spoke}]\n"))
		log := image.start(t, "--plaintext-loopback", "--listen-address=127.0.0.1:0", "--scenario=/etc/fake-agent/scenario.yaml")
		var address string
		require.Eventually(t, func() bool {
			found := regexp.MustCompile(`"serving" "address"="([^"]+)"`).FindStringSubmatch(log.String())
			if found != nil {
				address = found[1]
			}
			return found != nil
		}, patience, 10*time.Millisecond, "the fake agent serves")
		output := image.output(t, "/usr/local/bin/capi-agent-conformance", "--plaintext-loopback", "--address="+address, "--cluster=fleet/spoke",
			"--node-group=fleet/a", "--profiles=reader")
		require.Contains(t, output, "conformance: PASS")
	})
}

// layouts are the images of this machine's platform, as OCI layouts, and the version of their labels.
type layouts struct{ root, dir, version string }

// build makes the images of what is in bin. `make release` names the images of the release instead.
func build(t *testing.T) layouts {
	t.Helper()
	_ = os.Getenv("TESTED_BINARIES") // declares the sources of the binaries as inputs of the test cache
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	if released := os.Getenv("RELEASE_IMAGES"); released != "" {
		return layouts{root: root, dir: released, version: os.Getenv("RELEASE_VERSION")}
	}
	binaries, l := t.TempDir(), layouts{root: root, dir: t.TempDir(), version: version}
	folder := filepath.Join(binaries, "linux-"+runtime.GOARCH)
	require.NoError(t, os.Mkdir(folder, 0o755))
	for _, command := range []string{"capi-agent", "karpenter", "fake-agent", "capi-agent-conformance"} {
		require.NoError(t, os.Symlink(filepath.Join(root, "bin", command), filepath.Join(folder, command)))
	}
	l.releaser(t, "images", "--version", version, "--created", "1700000000", "--registry", "example.com",
		"--binaries", binaries, "--platforms", "linux/"+runtime.GOARCH, "--out", l.dir)
	return l
}

func (l layouts) releaser(t *testing.T, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(l.root, "bin", "releaser"), args...)
	cmd.Dir = l.root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	require.NoError(t, err, "%s", stderr.String())
	return output
}

// container is an image's files and what its configuration says of a process.
type container struct {
	files       string
	user        uint32
	entrypoint  []string
	environment []string
}

func (l layouts) unpack(t *testing.T, name string) *container {
	t.Helper()
	files := filepath.Join(t.TempDir(), name)
	var image struct {
		Config struct {
			User       string            `json:"User"`
			Env        []string          `json:"Env"`
			Entrypoint []string          `json:"Entrypoint"`
			Labels     map[string]string `json:"Labels"`
		} `json:"config"`
	}
	require.NoError(t, json.Unmarshal(l.releaser(t, "unpack", "--layout", filepath.Join(l.dir, name), "--into", files), &image))
	require.Equal(t, l.version, image.Config.Labels["org.opencontainers.image.version"])
	user, group, found := strings.Cut(image.Config.User, ":")
	require.True(t, found && user == group, image.Config.User)
	id, err := strconv.ParseUint(user, 10, 32)
	require.NoError(t, err)
	require.NotZero(t, id, "an image must not run as root")
	return &container{files: files, user: uint32(id), entrypoint: image.Config.Entrypoint, environment: image.Config.Env}
}

// mount writes a file as if it were mounted: read-only for the image's user.
func (c *container) mount(t *testing.T, path string, content []byte) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Join(c.files, filepath.Dir(path)), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(c.files, path), content, 0o644))
}

// command returns a command in the image's files and as its user. A test that does not run as root
// uses a user namespace, in which the image's user is the test's own.
func (c *container) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir, cmd.Env = "/", c.environment
	attributes := &syscall.SysProcAttr{Chroot: c.files, Credential: &syscall.Credential{Uid: c.user, Gid: c.user}, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		attributes.Cloneflags = syscall.CLONE_NEWUSER
		attributes.UidMappings = []syscall.SysProcIDMap{{ContainerID: int(c.user), HostID: os.Getuid(), Size: 1}}
		attributes.GidMappings = []syscall.SysProcIDMap{{ContainerID: int(c.user), HostID: os.Getgid(), Size: 1}}
		attributes.Credential.NoSetGroups = true
	} else {
		require.NoError(t, os.Chmod(filepath.Dir(c.files), 0o755)) // the image's user must reach its files
	}
	cmd.SysProcAttr = attributes
	return cmd
}

func (c *container) output(t *testing.T, args ...string) string {
	t.Helper()
	output, err := c.command(t, args...).CombinedOutput()
	require.NoError(t, err, "%s", output)
	return string(output)
}

// start runs the image's entrypoint until the test ends, and returns what it writes.
func (c *container) start(t *testing.T, args ...string) *buffer {
	t.Helper()
	cmd, log := c.command(t, append(append([]string{}, c.entrypoint...), args...)...), &buffer{}
	cmd.Stdout, cmd.Stderr = log, log
	// A stop by the kubelet is a SIGTERM to the entrypoint.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = patience
	require.NoError(t, cmd.Start())
	process := fmt.Sprint("/proc/", cmd.Process.Pid)
	sees, err := os.Readlink(process + "/root")
	require.NoError(t, err)
	require.Equal(t, c.files, sees, "the process sees the image's files alone")
	status, err := os.ReadFile(process + "/status")
	require.NoError(t, err)
	if os.Getuid() == 0 {
		require.Contains(t, string(status), fmt.Sprintf("\nUid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", c.user))
	}
	t.Cleanup(func() {
		// The test's context has ended. Only its own signal ends the process without an error.
		err := cmd.Wait()
		if cmd.ProcessState != nil && !cmd.ProcessState.Success() {
			assert.NoError(t, err, "%s does not end when it is asked to", c.entrypoint)
		}
		if t.Failed() {
			t.Logf("%s: %s", c.entrypoint, log.String())
		}
	})
	return log
}

// buffer is a [bytes.Buffer] that may be read while it is written.
type buffer struct {
	mu      sync.Mutex
	written bytes.Buffer
}

var _ io.Writer = &buffer{}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.written.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.written.String()
}

func ready(t *testing.T, who, health string) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		response, err := http.Get("http://" + health + "/readyz?verbose")
		require.NoError(c, err)
		body, err := io.ReadAll(response.Body)
		require.NoError(c, err)
		require.NoError(c, response.Body.Close())
		require.Equal(c, http.StatusOK, response.StatusCode, "%s", body)
	}, patience, 50*time.Millisecond, "%s is ready", who)
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	return listener.Addr().String()
}

// startServer runs an API server that is hub and spoke: it has the kinds of both, a Cluster, and
// the namespace kube-system, by which a spoke is known.
func startServer(t *testing.T) *envtest.Environment {
	t.Helper()
	environment := &envtest.Environment{
		BinaryAssetsDirectory: "../../bin",
		CRDInstallOptions: envtest.CRDInstallOptions{
			CRDs: clusterAPI(t), Paths: []string{"../../deploy/charts/agent/files/crds", "../../deploy/charts/shim/files/crds"}, ErrorIfPathMissing: true,
			MaxTime: patience,
		},
	}
	config, err := environment.Start()
	t.Cleanup(func() { assert.NoError(t, environment.Stop()) })
	require.NoError(t, err)
	scheme := clientgoscheme.Scheme
	require.NoError(t, clusterv1.AddToScheme(scheme))
	admin, err := client.New(config, client.Options{Scheme: scheme})
	require.NoError(t, err)
	require.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "fleet"}}))
	require.NoError(t, admin.Create(t.Context(), &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"},
		Spec: clusterv1.ClusterSpec{
			ControlPlaneEndpoint: clusterv1.APIEndpoint{Host: "127.0.0.1", Port: 6443},
			InfrastructureRef:    clusterv1.ContractVersionedObjectReference{APIGroup: "example.com", Kind: "ExampleCluster", Name: "spoke"},
		},
	}))
	require.Eventually(t, func() bool {
		return admin.Get(t.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, &corev1.Namespace{}) == nil
	}, patience, 50*time.Millisecond, "the namespace %s", metav1.NamespaceSystem)
	return environment
}

// clusterAPI returns the kinds that the agent reads, in the version that is stored: without Cluster
// API's webhooks nothing is converted.
func clusterAPI(t *testing.T) []*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	var crds []*apiextensionsv1.CustomResourceDefinition
	for _, kind := range []string{
		"cluster.x-k8s.io_clusters", "cluster.x-k8s.io_machinedeployments", "cluster.x-k8s.io_machinesets", "cluster.x-k8s.io_machines",
		"cluster.x-k8s.io_machinehealthchecks", "addons.cluster.x-k8s.io_clusterresourcesets",
	} {
		content, err := os.ReadFile(filepath.Join("../../bin/capi-core-manifests/crds", kind+".yaml"))
		require.NoError(t, err, "run make tools")
		crd := &apiextensionsv1.CustomResourceDefinition{}
		require.NoError(t, yaml.Unmarshal(content, crd))
		crd.Spec.Conversion = nil
		crd.Status = apiextensionsv1.CustomResourceDefinitionStatus{}
		require.NotEmpty(t, crd.Spec.Versions, fmt.Sprint("versions of ", kind))
		crds = append(crds, crd)
	}
	return crds
}
