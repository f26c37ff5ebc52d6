package sandbox

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/pki"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/process"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/simprovider"
)

// Names of the components, for [Sandbox.Kill] and similar methods.
const (
	HubEtcd                = "hub-etcd"
	HubAPIServer           = "hub-apiserver"
	HubControllerManager   = "hub-controller-manager"
	ClusterAPI             = "cluster-api"
	ClusterAPIWebhooks     = "cluster-api-webhooks"
	SimProvider            = "sim-provider"
	Agent                  = "agent"
	SpokeEtcd              = "spoke-etcd"
	SpokeAPIServer         = "spoke-apiserver"
	SpokeControllerManager = "spoke-controller-manager"
	SpokeScheduler         = "spoke-scheduler"
	SpokeKwok              = "spoke-kwok"
	Shim                   = "shim"
)

const (
	// graceOfControlPlanes is short, because their data is discarded. graceOfOurs is long enough
	// for ours to shut down cleanly.
	graceOfControlPlanes = 2 * time.Second
	graceOfOurs          = 15 * time.Second
)

// AgentName returns the component name of the i-th agent, counted from 0.
func AgentName(i int) string {
	if i == 0 {
		return Agent
	}
	return Agent + "-" + strconv.Itoa(i+1)
}

// address returns a loopback host:port.
func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// healthy returns a probe that expects status 200 from a URL.
func healthy(client *http.Client, url string) func(context.Context) error {
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer func() { _ = response.Body.Close() }()
		_, _ = io.Copy(io.Discard, response.Body) // so that the connection is reused
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s answers %s", url, response.Status)
		}
		return nil
	}
}

// trusting returns an HTTP client that trusts the authority.
func trusting(ca []byte) *http.Client {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}}
}

// component starts a supervised process and waits until it is ready. It replaces the component with
// the same name, which must have ended.
func (s *Sandbox) component(ctx context.Context, spec process.Spec) error {
	spec.Log = filepath.Join(s.state.Paths.Logs, spec.Name+".log")
	spec.Dir = s.options.StateDir
	spec.Changed = s.touch
	// HOME keeps programs from reading the user's own configuration.
	spec.Env = append(spec.Env, s.mark(), "HOME="+s.options.StateDir, "PATH=/usr/bin:/bin", "TMPDIR="+s.options.StateDir)
	p := process.New(spec)
	s.mu.Lock()
	if i := slices.IndexFunc(s.components, func(c *process.Process) bool { return c.Status().Name == spec.Name }); i >= 0 {
		s.components[i] = p
	} else {
		s.components = append(s.components, p)
	}
	s.mu.Unlock()
	if err := p.Start(); err != nil {
		return err
	}
	return p.WaitReady(ctx)
}

// controlPlane is an etcd with an API server.
type controlPlane struct {
	name   string // hub or spoke
	dir    string
	ca     *pki.CA
	port   int          // of the API server
	server string       // its URL
	admin  *rest.Config // as system:masters
	etcd   member
	// The administrator's kubeconfig: its path and its content.
	kubeconfigFile string
	kubeconfigData []byte
	// auditLog is the file to which every request is logged. Empty disables the log.
	auditLog string
	// Files for signing and verifying ServiceAccount tokens, and for serving on loopback.
	serviceAccountKey, caFile, certFile, keyFile string
}

// member is the single member of an etcd.
type member struct{ name, dir, url, peerURL string }

// identity returns the flags that identify a member when its data directory is created.
func (m member) identity() []string {
	return []string{
		"--name=" + m.name,
		"--data-dir=" + m.dir,
		"--initial-advertise-peer-urls=" + m.peerURL,
		"--initial-cluster=" + m.name + "=" + m.peerURL,
	}
}

func (s *Sandbox) newMember(name, dir string) (member, error) {
	clients, err := s.port()
	if err != nil {
		return member{}, err
	}
	peers, err := s.port()
	if err != nil {
		return member{}, err
	}
	return member{name: name, dir: dir, url: "http://" + address(clients), peerURL: "http://" + address(peers)}, nil
}

func (s *Sandbox) startEtcd(ctx context.Context, m member) error {
	return s.component(ctx, process.Spec{
		Name: m.name,
		Path: s.options.binary("etcd"),
		Args: append(m.identity(),
			"--listen-client-urls="+m.url,
			"--advertise-client-urls="+m.url,
			"--listen-peer-urls="+m.peerURL,
			// The data must survive the process, but not the machine.
			"--unsafe-no-fsync",
			"--log-level=warn",
		),
		Grace: graceOfControlPlanes,
		Ready: healthy(http.DefaultClient, m.url+"/readyz"),
	})
}

// apiServer starts an API server whose certificates and kubeconfig c already has.
func (s *Sandbox) apiServer(ctx context.Context, c *controlPlane) error {
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	var audit []string
	if c.auditLog != "" {
		policy := filepath.Join(c.dir, "audit-policy.yaml")
		if err := os.WriteFile(policy, auditPolicy, 0o600); err != nil {
			return err
		}
		audit = []string{"--audit-policy-file=" + policy, "--audit-log-path=" + c.auditLog, "--audit-log-mode=blocking-strict"}
	}
	return s.component(ctx, process.Spec{
		Name: c.name + "-apiserver",
		Path: s.options.binary("kube-apiserver"),
		Args: append([]string{
			"--etcd-servers=" + c.etcd.url,
			"--bind-address=127.0.0.1",
			"--advertise-address=127.0.0.1",
			"--secure-port=" + strconv.Itoa(c.port),
			// Endpoints of the service "kubernetes" may not be on loopback, and nothing uses them.
			"--endpoint-reconciler-type=none",
			"--service-cluster-ip-range=10.96.0.0/16",
			"--tls-cert-file=" + c.certFile,
			"--tls-private-key-file=" + c.keyFile,
			"--client-ca-file=" + c.caFile,
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + c.serviceAccountKey,
			"--service-account-signing-key-file=" + c.serviceAccountKey,
			"--authorization-mode=RBAC",
			"--allow-privileged=true",
			"--profiling=false",
		}, audit...),
		Grace: graceOfControlPlanes,
		Ready: healthy(client, c.server+"/readyz"),
	})
}

func (s *Sandbox) controllerManager(ctx context.Context, c *controlPlane, args ...string) error {
	port, err := s.port()
	if err != nil {
		return err
	}
	return s.component(ctx, process.Spec{
		Name: c.name + "-controller-manager",
		Path: s.options.binary("kube-controller-manager"),
		Args: append([]string{
			"--kubeconfig=" + c.kubeconfigFile,
			"--bind-address=127.0.0.1",
			"--secure-port=" + strconv.Itoa(port),
			"--tls-cert-file=" + c.certFile,
			"--tls-private-key-file=" + c.keyFile,
			"--root-ca-file=" + c.caFile,
			"--service-account-private-key-file=" + c.serviceAccountKey,
			"--leader-elect=false",
			"--profiling=false",
			"--kube-api-qps=200",
			"--kube-api-burst=400",
		}, args...),
		Grace: graceOfControlPlanes,
		Ready: healthy(trusting(c.ca.PEM), "https://"+address(port)+"/healthz"),
	})
}

func (s *Sandbox) scheduler(ctx context.Context, c *controlPlane) error {
	port, err := s.port()
	if err != nil {
		return err
	}
	return s.component(ctx, process.Spec{
		Name: c.name + "-scheduler",
		Path: s.options.binary("kube-scheduler"),
		Args: []string{
			"--kubeconfig=" + c.kubeconfigFile,
			"--bind-address=127.0.0.1",
			"--secure-port=" + strconv.Itoa(port),
			"--tls-cert-file=" + c.certFile,
			"--tls-private-key-file=" + c.keyFile,
			"--leader-elect=false",
			"--profiling=false",
			"--kube-api-qps=200",
			"--kube-api-burst=400",
		},
		Grace: graceOfControlPlanes,
		Ready: healthy(trusting(c.ca.PEM), "https://"+address(port)+"/healthz"),
	})
}

func (s *Sandbox) kwok(ctx context.Context, c *controlPlane, stages string) error {
	port, err := s.port()
	if err != nil {
		return err
	}
	return s.component(ctx, process.Spec{
		Name: c.name + "-kwok",
		Path: s.options.binary("kwok"),
		Args: []string{
			"--kubeconfig=" + c.kubeconfigFile,
			"--config=" + stages,
			"--manage-nodes-with-label-selector=" + simprovider.KubeletLabel + "=" + simprovider.KubeletLabelValue,
			"--node-lease-duration-seconds=40",
			"--server-address=" + address(port),
			"--node-ip=127.0.0.1",
			"--cidr=10.200.0.0/16",
		},
		Grace: graceOfControlPlanes,
		Ready: healthy(http.DefaultClient, "http://"+address(port)+"/healthz"),
	})
}

// noObject is a filter label value that no object has. A manager that watches for it only serves
// webhooks.
const noObject = "none"

// clusterAPI starts a manager whose webhook server listens on the given port.
func (s *Sandbox) clusterAPI(ctx context.Context, name string, hub *controlPlane, webhookPort int, webhookCerts string, args ...string) error {
	health, err := s.port()
	if err != nil {
		return err
	}
	diagnostics, err := s.port()
	if err != nil {
		return err
	}
	return s.component(ctx, process.Spec{
		Name: name,
		Path: s.options.binary("capi-core-manager"),
		Args: slices.Concat([]string{
			"--kubeconfig=" + hub.kubeconfigFile,
			"--webhook-port=" + strconv.Itoa(webhookPort),
			"--webhook-cert-dir=" + webhookCerts,
			"--health-addr=" + address(health),
			"--diagnostics-address=" + address(diagnostics),
			"--insecure-diagnostics",
			"--feature-gates=ClusterTopology=true",
			// The default of 100 is for larger machines: on two cores, 100 Machines at once take
			// twice the time and more than twice the CPU seconds, mostly in status patches that
			// conflict with the manager's own.
			"--machine-concurrency=10",
		}, s.options.ClusterAPIArgs, args),
		Grace: graceOfControlPlanes,
		Ready: healthy(http.DefaultClient, "http://"+address(health)+"/readyz"),
	})
}

func (s *Sandbox) simProvider(ctx context.Context, hub *controlPlane) error {
	health, err := s.port()
	if err != nil {
		return err
	}
	return s.component(ctx, process.Spec{
		Name: SimProvider,
		Path: s.options.binary("sim-provider"),
		Args: []string{
			"--kubeconfig=" + hub.kubeconfigFile,
			"--health-probe-bind-address=" + address(health),
		},
		Grace: graceOfControlPlanes,
		Ready: healthy(http.DefaultClient, "http://"+address(health)+"/readyz"),
	})
}

// agent starts an agent that serves gRPC on the given port.
func (s *Sandbox) agent(ctx context.Context, name string, port int, kubeconfigFile, certFile, keyFile, policyFile string) error {
	health, err := s.port()
	if err != nil {
		return err
	}
	metrics, err := s.port()
	if err != nil {
		return err
	}
	s.update(func(state *State) {
		url := "http://" + address(metrics) + "/metrics"
		if name == Agent {
			state.AgentMetrics = url
		}
		// The former state has been given away.
		if state.MetricsOfAgents = maps.Clone(state.MetricsOfAgents); state.MetricsOfAgents == nil {
			state.MetricsOfAgents = map[string]string{}
		}
		state.MetricsOfAgents[name] = url
	})
	serves := []string{
		"--namespaces=" + ClusterNamespace,
		"--issuer-cert-file=" + filepath.Join(s.options.StateDir, issuerFile+".crt"),
		"--issuer-key-file=" + filepath.Join(s.options.StateDir, issuerFile+".key"),
	}
	if s.options.Topology == Sidecar {
		cluster := s.Cluster().String()
		serves = []string{
			"--clusters=" + cluster, "--listen-unix-socket=" + s.agentSocket(), "--unix-socket-role=cluster", "--unix-socket-clusters=" + cluster,
		}
	}
	if s.options.NodePools {
		serves = append(serves, "--publish-node-pools")
	}
	return s.component(ctx, process.Spec{
		Name: name,
		Path: s.options.AgentBinary,
		Args: slices.Concat(serves, []string{
			"--kubeconfig=" + kubeconfigFile,
			"--listen-address=" + address(port),
			"--tls-cert-file=" + certFile,
			"--tls-key-file=" + keyFile,
			"--client-ca-file=" + s.state.Paths.AgentCA,
			"--trust-domain=" + trustDomain,
			"--policy-file=" + policyFile,
			"--price-list=" + PriceList,
			"--instance-name=" + name,
			"--metrics-bind-address=" + address(metrics),
			"--health-probe-bind-address=" + address(health),
		}, s.options.AgentArgs),
		// Metrics are on loopback only.
		Env:          []string{"CAPI_AGENT_METRICS_SECURE=false"},
		Grace:        graceOfOurs,
		RestartAfter: s.options.RestartAfter,
		Ready:        healthy(http.DefaultClient, "http://"+address(health)+"/readyz"),
	})
}

// shimAccess returns the environment variables with which a shim reaches the spoke and the agent.
func (s *Sandbox) shimAccess(agent string) []string {
	access := []string{
		"KUBECONFIG=" + s.shimKubeconfig(),
		"AGENT_ADDRESS=" + agent,
		"CLUSTER_NAMESPACE=" + s.Cluster().Namespace,
		"CLUSTER_NAME=" + s.Cluster().Name,
	}
	if s.options.Topology == Sidecar {
		return access
	}
	return append(access, "AGENT_IDENTITY_SECRET="+shimIdentitySecret, "AGENT_BOOTSTRAP_SECRET="+shimBootstrapSecret)
}

// issuerFile is the base name of the files with the authority with which the agents issue
// certificates.
const issuerFile = "issuer"

// ShimCommand returns a command that runs the shim's binary with the shim's rights in the spoke,
// against the sandbox's first agent.
func (s *Sandbox) ShimCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, s.options.ShimBinary, args...) //nolint:gosec // the binary that the sandbox runs
	cmd.Env = append(os.Environ(), s.shimAccess(s.agentOfShim())...)
	return cmd
}

// shim starts a shim that calls the agent at the given address.
func (s *Sandbox) shim(ctx context.Context, agent string) error {
	health, err := s.port()
	if err != nil {
		return err
	}
	metrics, err := s.port()
	if err != nil {
		return err
	}
	s.update(func(state *State) { state.ShimMetrics = "http://" + address(metrics) + "/metrics" })
	var gates []string
	if len(s.options.FeatureGates) > 0 {
		gates = append(gates, "FEATURE_GATES="+strings.Join(s.options.FeatureGates, "=true,")+"=true")
	}
	if s.options.NodePools {
		gates = append(gates, "PUBLISHED_NODE_POOLS=true")
	}
	return s.component(ctx, process.Spec{
		Name: Shim,
		Path: s.options.ShimBinary,
		Env: append(s.shimAccess(agent), slices.Concat([]string{
			"METRICS_BIND_ADDRESS=" + address(metrics),
			"METRICS_SECURE=false",
			"HEALTH_PROBE_BIND_ADDRESS=" + address(health),
			// There is only one replica.
			"DISABLE_LEADER_ELECTION=true",
			fmt.Sprintf("IGNORE_DRA_REQUESTS=%t", !s.options.DynamicResources),
		}, gates, s.options.ShimEnv)...),
		Grace:        graceOfOurs,
		RestartAfter: s.options.RestartAfter,
		Ready:        healthy(http.DefaultClient, "http://"+address(health)+"/readyz"),
	})
}
