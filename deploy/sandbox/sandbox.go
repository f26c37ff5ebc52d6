package sandbox

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/manifests"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/pki"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/ports"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/process"
)

const (
	trustDomain = "karpenter-capi"
	// The namespaces of the ServiceAccounts of agent and shim, where they would be installed.
	agentNamespace = "karpenter-capi-system"
	// marker is an environment variable of every process of a sandbox. Its value is the sandbox's
	// folder.
	marker = "KARPENTER_CAPI_SANDBOX"
	// simVersion is the version of the simulated provider in clusterctl's inventory.
	simVersion = "v0.1.0"
	// linesOfLog is how many lines of a component's log an error quotes.
	linesOfLog = 15
	// adminQPS and adminBurst are the rate limits of an administrator's clients.
	adminQPS, adminBurst = 100, 200
)

//go:embed stages.yaml
var stages []byte

//go:embed audit-policy.yaml
var auditPolicy []byte

// ErrRunning means that a sandbox with the same name is running.
var ErrRunning = errors.New("is running already")

// Sandbox is a running hub and spoke, a hub only, or a spoke of another sandbox's hub. Its methods
// are safe for concurrent use.
type Sandbox struct {
	options Options
	lock    *flock.Flock

	mu         sync.Mutex
	state      State // without the components' status, which they hold themselves
	components []*process.Process
	ports      ports.Pool
	agentCA    *pki.CA

	hub   *controlPlane
	spoke *controlPlane // nil if there is only a hub; the hub itself if that is its own workload cluster
	// shimAccount is the shim's ServiceAccount in the spoke.
	shimAccount client.ObjectKey

	touched   chan struct{} // signals a change
	publisher sync.WaitGroup
	stop      sync.Once
	stopped   chan struct{}
}

// Start starts a sandbox and returns once everything is ready. If that fails or the context ends
// first, everything has been stopped when it returns; the logs are kept. The context only bounds
// the start.
//
// The error is [ErrNotBuilt] if binaries are missing, and [ErrRunning] if a sandbox with the same
// name is running.
func Start(ctx context.Context, options Options) (*Sandbox, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if err := options.checkBuilt(); err != nil {
		return nil, err
	}
	lock, err := acquire(options)
	if err != nil {
		return nil, err
	}
	s := &Sandbox{
		options: options,
		lock:    lock,
		state: State{
			Name: options.Name, Phase: Starting, PID: os.Getpid(), StartedAt: time.Now(), Paths: pathsIn(options.StateDir),
			Cluster: lo.Ternary(options.HubOnly, "", options.Cluster),
		},
		touched: make(chan struct{}, 1),
		stopped: make(chan struct{}),
	}
	if err := s.prepare(); err != nil {
		_ = lock.Unlock()
		return nil, err
	}
	s.publisher.Go(s.publish)
	if err := s.start(ctx); err != nil {
		// Report the cause of a failure, not its consequences.
		switch cause := context.Cause(ctx); {
		case errors.Is(cause, context.DeadlineExceeded):
			err = fmt.Errorf("not up in time: %w%s", cause, s.unfinished())
		case cause != nil:
			err = fmt.Errorf("interrupted: %w", cause)
		}
		s.end(Failed, err)
		return nil, err
	}
	s.update(func(state *State) { state.Phase, state.ReadyAt = Ready, time.Now() })
	return s, nil
}

// lockFile returns a path beside the sandbox's folder, because that is replaced while the lock is
// held.
func lockFile(options Options) string { return options.StateDir + ".lock" }

// acquire locks the sandbox for this process.
func acquire(options Options) (*flock.Flock, error) {
	if err := os.MkdirAll(filepath.Dir(options.StateDir), 0o750); err != nil {
		return nil, err
	}
	lock := flock.New(lockFile(options))
	locked, err := lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", lock.Path(), err)
	}
	if !locked {
		return nil, fmt.Errorf("sandbox %q %w", options.Name, ErrRunning)
	}
	return lock, nil
}

// Running reports whether a process holds the sandbox that the options name, ready or not.
func Running(options Options) (bool, error) {
	if err := options.complete(); err != nil {
		return false, err
	}
	if _, err := os.Stat(lockFile(options)); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	lock, err := acquire(options)
	if errors.Is(err, ErrRunning) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return false, lock.Unlock()
}

// Remnants returns the processes of the sandbox that the options name, without its holder. On
// systems other than Linux it returns [errors.ErrUnsupported].
func Remnants(options Options) ([]int, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	return process.WithEnvironment(marker + "=" + options.StateDir)
}

// Dir returns the folder of the sandbox that the options name, whether or not it exists.
func Dir(options Options) (string, error) {
	err := options.complete()
	return options.StateDir, err
}

// Listeners returns the TCP addresses on which a process listens. On systems other than Linux it
// returns [errors.ErrUnsupported].
func Listeners(pid int) ([]netip.AddrPort, error) { return process.Listeners(pid) }

func (s *Sandbox) mark() string { return marker + "=" + s.options.StateDir }

// prepare creates the folder.
func (s *Sandbox) prepare() error {
	if err := os.RemoveAll(s.options.StateDir); err != nil {
		return err
	}
	for _, dir := range []string{s.state.Paths.Logs, filepath.Dir(s.state.Paths.AgentCA)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	return s.state.write(s.options.StateDir)
}

// start starts everything, as concurrently as the dependencies allow.
func (s *Sandbox) start(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	if s.options.HubOf != "" {
		if err := s.step(ctx, "hub of "+s.options.HubOf, s.joinHub); err != nil {
			return err
		}
	}
	if err := s.step(ctx, "certificates", s.makeCertificates); err != nil {
		return err
	}
	group, groupContext := errgroup.WithContext(ctx)
	if s.options.HubOf == "" {
		group.Go(func() error { return s.startHub(groupContext) })
	}
	if s.spoke != nil && !s.options.oneCluster() {
		group.Go(func() error { return s.startSpoke(groupContext) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	hub, err := s.HubClient()
	if err != nil {
		return err
	}
	group, groupContext = errgroup.WithContext(ctx)
	if s.spoke != nil {
		// Onboarding does not depend on Cluster API's connection to the spoke.
		if err := createFleet(ctx, hub, s.spoke, s.options.Cluster, s.options.TopologyVersion); err != nil {
			return err
		}
		group.Go(func() error {
			return s.step(groupContext, "Cluster "+s.Cluster().String(), func(ctx context.Context) error { return awaitFleet(ctx, hub, s.Cluster()) })
		})
	}
	if !s.options.WithoutAgent {
		group.Go(func() error { return s.startAgentAndShim(groupContext) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return s.writeEnv()
}

// makeCertificates creates what must exist before any process runs.
func (s *Sandbox) makeCertificates(context.Context) error {
	var err error
	if s.options.HubOf == "" {
		if s.hub, err = s.newControlPlane("hub", s.state.Paths.HubKubeconfig); err != nil {
			return err
		}
	}
	if s.options.AuditHub {
		s.hub.auditLog = s.state.Paths.HubAudit
	}
	switch {
	case s.options.HubOnly:
	case s.options.oneCluster():
		s.spoke = s.hub
		s.update(func(state *State) { state.Paths.SpokeKubeconfig = state.Paths.HubKubeconfig })
	default:
		if s.spoke, err = s.newControlPlane("spoke", s.state.Paths.SpokeKubeconfig); err != nil {
			return err
		}
	}
	if s.options.Authority == nil {
		if s.options.Authority, err = NewAuthority(); err != nil {
			return err
		}
	}
	s.agentCA = s.options.Authority.ca
	return os.WriteFile(s.state.Paths.AgentCA, s.agentCA.PEM, 0o600)
}

// newControlPlane creates the certificates and the administrator's kubeconfig of a control plane.
func (s *Sandbox) newControlPlane(name, kubeconfigFile string) (*controlPlane, error) {
	c := &controlPlane{name: name, dir: filepath.Join(s.options.StateDir, name), kubeconfigFile: kubeconfigFile}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	if c.ca, err = pki.NewCA(name); err != nil {
		return nil, err
	}
	c.caFile = filepath.Join(c.dir, "ca.crt")
	if err := os.WriteFile(c.caFile, c.ca.PEM, 0o600); err != nil {
		return nil, err
	}
	serving, err := c.ca.Server(name)
	if err != nil {
		return nil, err
	}
	if c.certFile, c.keyFile, err = serving.Write(c.dir, "serving"); err != nil {
		return nil, err
	}
	key, err := pki.ServiceAccountKey()
	if err != nil {
		return nil, err
	}
	c.serviceAccountKey = filepath.Join(c.dir, "service-account.key")
	if err := os.WriteFile(c.serviceAccountKey, key, 0o600); err != nil {
		return nil, err
	}
	admin, err := c.ca.User("admin", "system:masters")
	if err != nil {
		return nil, err
	}
	if c.port, err = s.port(); err != nil {
		return nil, err
	}
	c.server = "https://" + address(c.port)
	if c.kubeconfigData, err = kubeconfig(name, c.server, c.ca.PEM, certificateUser(admin)); err != nil {
		return nil, err
	}
	if err := os.WriteFile(c.kubeconfigFile, c.kubeconfigData, 0o600); err != nil {
		return nil, err
	}
	if c.admin, err = clientcmd.RESTConfigFromKubeConfig(c.kubeconfigData); err != nil {
		return nil, err
	}
	c.admin.QPS, c.admin.Burst = adminQPS, adminBurst
	return c, nil
}

// startAPI starts etcd and the API server of a control plane.
func (s *Sandbox) startAPI(ctx context.Context, c *controlPlane) error {
	return s.step(ctx, c.name+" API server", func(ctx context.Context) error {
		var err error
		if c.etcd, err = s.newMember(c.name+"-etcd", filepath.Join(c.dir, "etcd")); err != nil {
			return err
		}
		if err := s.startEtcd(ctx, c.etcd); err != nil {
			return err
		}
		return s.apiServer(ctx, c)
	})
}

func (s *Sandbox) startHub(ctx context.Context) error {
	if err := s.startAPI(ctx, s.hub); err != nil {
		return err
	}
	s.update(func(state *State) { state.HubEtcdMetrics = s.hub.etcd.url + "/metrics" })
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return s.step(ctx, "hub controllers", func(ctx context.Context) error {
			if s.options.oneCluster() {
				return s.controllerManager(ctx, s.hub)
			}
			// The hub only needs the garbage collection of Cluster API's objects.
			return s.controllerManager(ctx, s.hub, "--controllers=garbage-collector-controller,namespace-controller,serviceaccount-controller")
		})
	})
	if s.options.oneCluster() {
		group.Go(func() error { return s.startNodes(ctx, s.hub) })
	}
	group.Go(func() error {
		return s.step(ctx, "Cluster API", s.startClusterAPI)
	})
	return group.Wait()
}

// startClusterAPI installs and starts Cluster API and the infrastructure provider.
func (s *Sandbox) startClusterAPI(ctx context.Context) error {
	ca, err := pki.NewCA("webhooks")
	if err != nil {
		return err
	}
	serving, err := ca.Server("webhooks")
	if err != nil {
		return err
	}
	certs := filepath.Join(s.hub.dir, "webhooks")
	if err := os.MkdirAll(certs, 0o700); err != nil {
		return err
	}
	if _, _, err := serving.Write(certs, "tls"); err != nil {
		return err
	}
	port, err := s.port()
	if err != nil {
		return err
	}
	if err := s.installClusterAPI(ctx, manifests.Webhooks{Address: address(port), CA: ca.PEM}); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	controllers := port
	if s.options.SeparateWebhooks {
		if controllers, err = s.port(); err != nil {
			return err
		}
		group.Go(func() error {
			return s.clusterAPI(ctx, ClusterAPIWebhooks, s.hub, port, certs, "--watch-filter="+noObject)
		})
	}
	group.Go(func() error { return s.clusterAPI(ctx, ClusterAPI, s.hub, controllers, certs) })
	group.Go(func() error { return s.simProvider(ctx, s.hub) })
	return group.Wait()
}

// installClusterAPI creates what `clusterctl init` would create for Cluster API and the
// infrastructure provider, except for processes, and records both in clusterctl's inventory.
func (s *Sandbox) installClusterAPI(ctx context.Context, webhooks manifests.Webhooks) error {
	objects, err := manifests.ClusterAPI(s.options.clusterAPIManifests(), webhooks)
	if err != nil {
		return fmt.Errorf("reading Cluster API's manifests: %w", err)
	}
	inventory, version, err := manifests.Inventory(s.options.clusterAPIManifests())
	if err != nil {
		return fmt.Errorf("reading the manifests of clusterctl's inventory: %w", err)
	}
	simulated, err := manifests.CRDs(simv1.CRDs)
	if err != nil {
		return fmt.Errorf("reading the provider's CRDs: %w", err)
	}
	core := manifests.Provider{
		Name: "cluster-api", Type: "CoreProvider", Label: "cluster-api", Namespace: "capi-system", Version: version,
	}
	infrastructure := manifests.Provider{
		Name: "sim", Type: "InfrastructureProvider", Label: "infrastructure-sim", Namespace: "sim-system", Version: simVersion,
	}
	core.Mark(objects)
	provider := manifests.Objects(simulated)
	infrastructure.Mark(provider)
	c, err := client.New(s.hub.admin, client.Options{Scheme: manifests.Scheme()})
	if err != nil {
		return err
	}
	if err := manifests.Create(ctx, c, slices.Concat(objects, provider, inventory)...); err != nil {
		return err
	}
	return manifests.Create(ctx, c, core.Entry(), infrastructure.Entry())
}

func (s *Sandbox) startSpoke(ctx context.Context) error {
	if err := s.startAPI(ctx, s.spoke); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return s.step(ctx, "spoke controllers", func(ctx context.Context) error { return s.controllerManager(ctx, s.spoke) })
	})
	group.Go(func() error { return s.startNodes(ctx, s.spoke) })
	return group.Wait()
}

// startNodes starts the components that schedule pods and run them on Nodes.
func (s *Sandbox) startNodes(ctx context.Context, c *controlPlane) error {
	file := filepath.Join(c.dir, "stages.yaml")
	if err := os.WriteFile(file, stages, 0o600); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return s.step(ctx, c.name+" scheduler", func(ctx context.Context) error { return s.scheduler(ctx, c) })
	})
	group.Go(func() error {
		return s.step(ctx, c.name+" kubelets", func(ctx context.Context) error { return s.kwok(ctx, c, file) })
	})
	return group.Wait()
}

func (s *Sandbox) startAgentAndShim(ctx context.Context) error {
	if s.options.Topology == Sidecar { // the agent has the shim's service account
		if err := s.step(ctx, "shim's rights", s.installShim); err != nil {
			return err
		}
	}
	if s.options.HubOf != "" {
		if err := s.issueCallers(); err != nil {
			return err
		}
	} else if err := s.step(ctx, "agent", s.startAgents); err != nil {
		return err
	}
	if s.options.WithoutShim {
		return nil
	}
	if s.options.Topology != Sidecar { // its callers have no certificates
		if err := s.step(ctx, "onboarding", s.onboardSpoke); err != nil {
			return err
		}
	}
	return s.step(ctx, "shim", func(ctx context.Context) error { return s.shim(ctx, s.agentOfShim()) })
}

// agentOfShim returns the address at which the shim calls the first agent.
func (s *Sandbox) agentOfShim() string {
	if s.options.Topology == Sidecar {
		return "unix://" + s.agentSocket()
	}
	return s.State().AgentAddress
}

func (s *Sandbox) agentSocket() string { return filepath.Join(s.options.StateDir, "agent.sock") }

func (s *Sandbox) startAgents(ctx context.Context) error {
	chart := manifests.Chart{
		Helm: s.options.binary("helm"), Dir: s.options.chart("agent"), Release: "capi-agent", Namespace: agentNamespace,
		Values: []string{
			"pricing.list=" + PriceList, "rbac.infrastructureResources={simmachinetemplates}",
			// Tests and the demo act as administrators, and make changes that the policies refuse
			// to others.
			"admission.exempt.groups={system:masters}",
		},
	}
	if s.options.NodePools {
		chart.Values = append(chart.Values, "nodePools.publish=true")
	}
	if s.options.Topology == Sidecar {
		chart.Account = s.shimAccount
		chart.Values = append(chart.Values, "clusters={"+s.Cluster().String()+"}", "replicas=0", "tls.certManager.enabled=false",
			"serviceAccount.create=false", "serviceAccount.name="+s.shimAccount.Name)
		chart.Namespace = s.shimAccount.Namespace
	} else {
		chart.Values = append(chart.Values, "namespaces={"+ClusterNamespace+"}")
	}
	account, err := s.install(ctx, s.hub, chart)
	if err != nil {
		return err
	}
	user, err := serviceAccountUser(ctx, s.hub.admin, account, nil)
	if err != nil {
		return err
	}
	serving, err := s.agentCA.Server("agent")
	if err != nil {
		return err
	}
	certFile, keyFile, err := serving.Write(filepath.Dir(s.state.Paths.AgentCA), "agent")
	if err != nil {
		return err
	}
	if err := s.issueCallers(); err != nil {
		return err
	}
	if s.options.Topology != Sidecar {
		if err := s.publishIssuer(ctx); err != nil {
			return err
		}
	}
	policyFile := filepath.Join(s.options.StateDir, "agent-policy.yaml")
	if err := os.WriteFile(policyFile, []byte(agentPolicy), 0o600); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for i := range s.options.Agents {
		name := AgentName(i)
		port, err := s.port()
		if err != nil {
			return err
		}
		s.update(func(state *State) {
			state.AgentAddresses = append(state.AgentAddresses, address(port))
			state.AgentAddress = state.AgentAddresses[0]
		})
		hub := Endpoint{URL: s.hub.server, CA: s.hub.ca.PEM}
		if s.options.AgentHub != nil {
			if hub, err = s.options.AgentHub(name, hub); err != nil {
				return err
			}
		}
		kubeconfigFile := filepath.Join(s.options.StateDir, name+".kubeconfig")
		if err := writeKubeconfig(kubeconfigFile, name, hub, user); err != nil {
			return err
		}
		group.Go(func() error { return s.agent(ctx, name, port, kubeconfigFile, certFile, keyFile, policyFile) })
	}
	return group.Wait()
}

// issueCallers issues the certificates of users and tools that call the agents.
func (s *Sandbox) issueCallers() error {
	for name, id := range map[string]string{
		clientCertificate: ClusterIdentity(s.Cluster().Namespace, s.Cluster().Name, ""), "admin": AdminIdentity, "reader": ReaderIdentity,
	} {
		if _, _, err := s.AgentCertificate(name, id); err != nil {
			return err
		}
	}
	return nil
}

const (
	// issuerSecret is the hub's secret with the authority with which the agents issue certificates.
	issuerSecret = "capi-agent-ca" //nolint:gosec // its name
	// onboardingLabel is the agent's label with the id of a Cluster's onboarding.
	onboardingLabel = "agent.karpenter.cluster.x-k8s.io/onboarding"
)

// publishIssuer writes the authority with which the agents issue certificates: to files for the
// agents, and to a secret for onboarding.
func (s *Sandbox) publishIssuer(ctx context.Context) error {
	pair, err := s.agentCA.Pair()
	if err != nil {
		return err
	}
	if _, _, err := pair.Write(s.options.StateDir, issuerFile); err != nil {
		return err
	}
	hub, err := s.HubClient()
	if err != nil {
		return err
	}
	return hub.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: issuerSecret}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: pair.Certificate, corev1.TLSPrivateKeyKey: pair.Key, "ca.crt": s.agentCA.PEM},
	})
}

// onboardSpoke grants the shim its rights in the spoke and provides its bootstrap certificate, as a
// user does.
func (s *Sandbox) onboardSpoke(ctx context.Context) error {
	if err := s.installShim(ctx); err != nil {
		return err
	}
	_, err := s.Onboard(ctx, "--spoke-kubeconfig="+s.State().Paths.SpokeKubeconfig)
	return err
}

// installShim grants the shim its rights in the spoke.
func (s *Sandbox) installShim(ctx context.Context) error {
	values := []string{
		"agent.address=" + s.agentOfShim(), "cluster.namespace=" + s.Cluster().Namespace, "cluster.name=" + s.Cluster().Name,
		fmt.Sprintf("agent.enrollment.enabled=%t", s.options.Topology != Sidecar),
		fmt.Sprintf("settings.ignoreDRARequests=%t", !s.options.DynamicResources),
	}
	if s.options.NodePools {
		values = append(values, "publishedNodePools=true")
	}
	if s.options.Topology == HubHosted {
		values = append(values, "leaderElection.namespace=kube-system") // of the spoke, which has no namespace for the shim
	}
	var err error
	s.shimAccount, err = s.install(ctx, s.spoke, manifests.Chart{
		Helm: s.options.binary("helm"), Dir: s.options.chart("shim"), Release: "karpenter", Namespace: ShimNamespace,
		Values: append(values, lo.Map(s.options.FeatureGates, func(gate string, _ int) string { return "settings.featureGates." + gate + "=true" })...),
	})
	if err != nil {
		return err
	}
	return s.writeShimKubeconfig(ctx, nil)
}

func (s *Sandbox) writeShimKubeconfig(ctx context.Context, bound *authenticationv1.BoundObjectReference) error {
	user, err := serviceAccountUser(ctx, s.spoke.admin, s.shimAccount, bound)
	if err != nil {
		return err
	}
	return writeKubeconfig(s.shimKubeconfig(), "karpenter", Endpoint{URL: s.spoke.server, CA: s.spoke.ca.PEM}, user)
}

// RenewShimKubeconfig replaces the shim's kubeconfig with one that has another token, as a control
// plane renews the copy in the hub. It creates a Secret of the given name in the spoke's namespace
// [ShimNamespace]. The token is valid while that Secret exists.
func (s *Sandbox) RenewShimKubeconfig(ctx context.Context, secret string) error {
	spoke, err := s.SpokeClient()
	if err != nil {
		return err
	}
	object := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.shimAccount.Namespace, Name: secret}}
	if err := spoke.Create(ctx, object); err != nil {
		return err
	}
	return s.writeShimKubeconfig(ctx, &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret, UID: object.UID})
}

// ShimNamespace is the spoke's namespace with the shim's secrets and service account.
const ShimNamespace = "karpenter"

// shimIdentitySecret and shimBootstrapSecret are the spoke's secrets with the shim's certificate
// and its bootstrap certificate, as namespace/name.
const (
	shimIdentitySecret  = ShimNamespace + "/karpenter-agent-identity"
	shimBootstrapSecret = ShimNamespace + "/karpenter-agent-bootstrap"
)

// Onboard runs the agent's onboard command for [Sandbox.Cluster], with additional arguments, as the
// hub's administrator, and returns its output. Earlier certificates of the Cluster are refused from
// then on; [Paths].ClientCertificate is reissued.
func (s *Sandbox) Onboard(ctx context.Context, args ...string) (string, error) {
	state := s.State()
	cmd := exec.CommandContext(ctx, s.options.AgentBinary, append([]string{ //nolint:gosec // the binary that the sandbox runs
		"onboard", "--kubeconfig=" + state.Paths.HubKubeconfig, "--issuer-secret=" + agentNamespace + "/" + issuerSecret, "--trust-domain=" + trustDomain,
		"--secret=" + shimBootstrapSecret, s.Cluster().String(),
	}, args...)...)
	output, err := cmd.CombinedOutput()
	if err != nil {
		return string(output), fmt.Errorf("onboarding the spoke: %w: %s", err, output)
	}
	hub, err := s.HubClient()
	if err != nil {
		return string(output), err
	}
	var cluster clusterv1.Cluster
	if err := hub.Get(ctx, s.Cluster(), &cluster); err != nil {
		return string(output), err
	}
	_, _, err = s.AgentCertificate(clientCertificate, ClusterIdentity(cluster.Namespace, cluster.Name, cluster.Labels[onboardingLabel]))
	return string(output), err
}

// PointShim stops the shim, starts it again with the agent at the given host:port, and waits until
// it is ready. The agent may belong to another sandbox with the same [Options].Authority. PointShim
// must not be called concurrently, nor while the shim is started or stopped.
func (s *Sandbox) PointShim(ctx context.Context, agent string) error {
	if err := s.StopComponent(Shim); err != nil {
		return err
	}
	return s.shim(ctx, agent)
}

func (s *Sandbox) shimKubeconfig() string {
	return filepath.Join(s.options.StateDir, "karpenter.kubeconfig")
}

// install creates a chart's CRDs and permissions, and returns its ServiceAccount.
func (s *Sandbox) install(ctx context.Context, c *controlPlane, chart manifests.Chart) (account client.ObjectKey, err error) {
	crds, err := manifests.CRDs(os.DirFS(filepath.Join(chart.Dir, "files", "crds")))
	if err != nil {
		return account, fmt.Errorf("reading the CRDs of the chart %s: %w", chart.Dir, err)
	}
	account, objects, err := chart.Permissions(ctx)
	if err != nil {
		return account, err
	}
	admin, err := client.New(c.admin, client.Options{Scheme: manifests.Scheme()})
	if err != nil {
		return account, err
	}
	return account, manifests.Create(ctx, admin, append(manifests.Objects(crds), objects...)...)
}

// ClusterIdentity returns the SPIFFE ID that may act for a Cluster by an onboarding. With an empty
// onboarding it returns the ID for a Cluster that was not onboarded.
func ClusterIdentity(namespace, name, onboarding string) string {
	id := "spiffe://" + trustDomain + "/cluster/" + namespace + "/" + name
	if onboarding == "" {
		return id
	}
	return id + "/" + onboarding
}

// AgentCertificate issues a client certificate that the agent trusts, for the given SPIFFE ID, and
// returns the paths of its files, which are named after name. The agent's policy determines the
// rights of that identity.
func (s *Sandbox) AgentCertificate(name, id string) (certFile, keyFile string, err error) {
	pair, err := s.agentCA.Workload(id)
	if err != nil {
		return "", "", err
	}
	return pair.Write(filepath.Dir(s.state.Paths.AgentCA), name)
}

// Cluster returns the key of the spoke's Cluster in the hub.
func (s *Sandbox) Cluster() client.ObjectKey {
	return client.ObjectKey{Namespace: ClusterNamespace, Name: s.options.Cluster}
}

// HubConfig returns an administrator's configuration of the hub.
func (s *Sandbox) HubConfig() *rest.Config { return rest.CopyConfig(s.hub.admin) }

// SpokeConfig returns an administrator's configuration of the spoke, or nil if there is no spoke.
func (s *Sandbox) SpokeConfig() *rest.Config {
	if s.spoke == nil {
		return nil
	}
	return rest.CopyConfig(s.spoke.admin)
}

// HubClient returns an administrator's client without a cache. It supports Cluster API's core
// kinds, those of the simulated provider, and CustomResourceDefinitions.
func (s *Sandbox) HubClient() (client.Client, error) {
	scheme := manifests.Scheme()
	lo.Must0(clusterv1.AddToScheme(scheme))
	lo.Must0(simv1.AddToScheme(scheme))
	return client.New(s.hub.admin, client.Options{Scheme: scheme})
}

// SpokeClient returns an administrator's client without a cache. It supports the built-in kinds and
// CustomResourceDefinitions. It returns an error if there is no spoke.
func (s *Sandbox) SpokeClient() (client.Client, error) {
	if s.spoke == nil {
		return nil, fmt.Errorf("sandbox %q has no spoke", s.options.Name)
	}
	return client.New(s.spoke.admin, client.Options{Scheme: manifests.Scheme()})
}

// State returns the current state of the sandbox.
func (s *Sandbox) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := s.state
	state.Steps = slices.Clone(state.Steps)
	state.Components = lo.Map(s.components, func(p *process.Process, _ int) ComponentStatus { return p.Status() })
	return state
}

// Kill kills a component as kill -9 does. It is restarted automatically.
func (s *Sandbox) Kill(component string) error {
	p, err := s.find(component)
	if err != nil {
		return err
	}
	return p.Kill()
}

// Suspend suspends a component as kill -STOP does. Its connections stay open, but it does not
// answer.
func (s *Sandbox) Suspend(component string) error {
	p, err := s.find(component)
	if err != nil {
		return err
	}
	return p.Suspend()
}

// Resume resumes a suspended component.
func (s *Sandbox) Resume(component string) error {
	p, err := s.find(component)
	if err != nil {
		return err
	}
	return p.Resume()
}

// StopComponent terminates a component and keeps it stopped. It returns once the component is gone,
// or at once if it was stopped already.
func (s *Sandbox) StopComponent(component string) error {
	p, err := s.find(component)
	if err != nil {
		return err
	}
	p.Stop()
	return nil
}

// StartComponent starts a stopped component and waits until it is ready.
func (s *Sandbox) StartComponent(ctx context.Context, component string) error {
	p, err := s.find(component)
	if err != nil {
		return err
	}
	if err := p.Start(); err != nil {
		return err
	}
	return p.WaitReady(ctx)
}

// WaitReady waits until a component is ready.
func (s *Sandbox) WaitReady(ctx context.Context, component string) error {
	p, err := s.find(component)
	if err != nil {
		return err
	}
	return p.WaitReady(ctx)
}

func (s *Sandbox) find(component string) (*process.Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.components {
		if p.Status().Name == component {
			return p, nil
		}
	}
	return nil, fmt.Errorf("there is no component %q", component)
}

// Stop ends all processes and removes all files but the logs. When it returns, nothing is left
// running. It is idempotent.
func (s *Sandbox) Stop() { s.end(Stopping, nil) }

// end stops everything. Of a sandbox that failed, it records the phase and the cause.
func (s *Sandbox) end(phase Phase, cause error) {
	s.stop.Do(func() {
		s.update(func(state *State) { state.Phase = Stopping })
		s.mu.Lock()
		components := slices.Clone(s.components)
		s.mu.Unlock()
		// Agent and shim first, while their peers are still running; the databases last.
		ours, databases := []string{Shim}, []string{HubEtcd, SpokeEtcd}
		for i := range s.options.Agents {
			ours = append(ours, AgentName(i))
		}
		for _, inWave := range []func(name string) bool{
			func(name string) bool { return slices.Contains(ours, name) },
			func(name string) bool { return !slices.Contains(databases, name) },
			func(string) bool { return true },
		} {
			var stopping sync.WaitGroup
			for _, p := range components {
				if inWave(p.Status().Name) {
					stopping.Go(p.Stop)
				}
			}
			stopping.Wait()
		}
		if cause != nil {
			s.update(func(state *State) { state.Phase, state.Error = phase, cause.Error() })
		}
		close(s.stopped)
		s.publisher.Wait()
		s.ports.Release()
		s.clean(cause != nil)
		// Keep the lock file: a process that has opened it must not lock a file that others do not
		// see.
		_ = s.lock.Unlock()
	})
}

// clean removes everything but the logs, and the state file if keepState is set.
func (s *Sandbox) clean(keepState bool) {
	keep := []string{filepath.Base(s.state.Paths.Logs)}
	if keepState {
		keep = append(keep, filepath.Base(stateFile(s.options.StateDir)))
	}
	entries, err := os.ReadDir(s.options.StateDir)
	if err != nil {
		return
	}
	for _, entry := range entries {
		if !slices.Contains(keep, entry.Name()) {
			_ = os.RemoveAll(filepath.Join(s.options.StateDir, entry.Name()))
		}
	}
}

// step runs one step of the start and records its duration.
func (s *Sandbox) step(ctx context.Context, name string, run func(context.Context) error) error {
	var i int
	s.update(func(state *State) {
		i = len(state.Steps)
		state.Steps = append(state.Steps, Step{Name: name, StartedAt: time.Now()})
	})
	err := run(ctx)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	s.update(func(state *State) {
		state.Steps[i].DoneAt = time.Now()
		if err != nil {
			state.Steps[i].Error = err.Error()
		}
	})
	return err
}

// unfinished lists the steps that a start was still waiting for, with the last log lines of the
// components concerned.
func (s *Sandbox) unfinished() string {
	var b strings.Builder
	state := s.State()
	for _, step := range state.Steps {
		if step.Error != "" {
			fmt.Fprintf(&b, "\n%s (%s)", step.Error, step.DoneAt.Sub(step.StartedAt).Round(time.Second))
		}
	}
	for _, component := range state.Components {
		if !component.Ready {
			fmt.Fprintf(&b, "\n%s was not ready (%d restarts, last exit %q), its log ends with:\n%s",
				component.Name, component.Restarts, component.LastExit, process.Tail(component.Log, linesOfLog))
		}
	}
	return b.String()
}

func (s *Sandbox) update(change func(*State)) {
	s.mu.Lock()
	change(&s.state)
	s.mu.Unlock()
	s.touch()
}

// touch wakes the publisher.
func (s *Sandbox) touch() {
	select {
	case s.touched <- struct{}{}:
	default:
	}
}

// publish writes the state to its file and calls OnChange, whenever the state has changed.
func (s *Sandbox) publish() {
	tell := func() {
		state := s.State()
		// A full disk must not end the sandbox.
		_ = state.write(s.options.StateDir)
		if s.options.OnChange != nil {
			s.options.OnChange(state)
		}
	}
	for {
		select {
		case <-s.touched:
			tell()
		case <-s.stopped:
			tell()
			return
		}
	}
}

// port reserves a port for the lifetime of the sandbox.
func (s *Sandbox) port() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ports.Reserve()
}

// pluginsCertificates returns a folder in which kubectl-capi finds the user's certificate under the
// names that a secret has. The files are links, so they follow a certificate that is issued again.
func (s *Sandbox) pluginsCertificates(paths Paths) (string, error) {
	folder := filepath.Join(filepath.Dir(paths.ClientCertificate), "kubectl-capi")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", err
	}
	for name, file := range map[string]string{"tls.crt": paths.ClientCertificate, "tls.key": paths.ClientKey, "ca.crt": paths.AgentCA} {
		if err := os.Symlink(file, filepath.Join(folder, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", err
		}
	}
	return folder, nil
}

// writeEnv writes the file that a shell sources.
func (s *Sandbox) writeEnv() error {
	var b strings.Builder
	set := func(name, value string) {
		fmt.Fprintf(&b, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	state := s.State()
	set("HUB_KUBECONFIG", state.Paths.HubKubeconfig)
	if s.spoke != nil {
		set("SPOKE_KUBECONFIG", state.Paths.SpokeKubeconfig)
	}
	set("SANDBOX_LOGS", state.Paths.Logs)
	if state.AgentAddress != "" {
		set("AGENT_ADDRESS", state.AgentAddress)
		set("AGENT_CA", state.Paths.AgentCA)
		set("AGENT_CERT", state.Paths.ClientCertificate)
		set("AGENT_KEY", state.Paths.ClientKey)
		set("AGENT_ADMIN_CERT", state.Paths.AdminCertificate)
		set("AGENT_ADMIN_KEY", state.Paths.AdminKey)
		if s.spoke != nil {
			folder, err := s.pluginsCertificates(state.Paths)
			if err != nil {
				return err
			}
			set("KUBECTL_CAPI_KUBECONFIG", state.Paths.SpokeKubeconfig)
			set("KUBECTL_CAPI_HUB_KUBECONFIG", state.Paths.HubKubeconfig)
			set("KUBECTL_CAPI_AGENT_ADDRESS", state.AgentAddress)
			set("KUBECTL_CAPI_TLS_DIR", folder)
		}
	}
	return os.WriteFile(state.Paths.Env, []byte(b.String()), 0o600)
}
