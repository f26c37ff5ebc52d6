package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/pki"
)

// DefaultName is the name of a sandbox that was given none.
const DefaultName = "default"

// Options say what to bring up. The zero value is a full sandbox of the default name in the repository around the working
// directory.
type Options struct {
	// Name tells sandboxes apart that run at the same time: a DNS label. Empty means [DefaultName].
	Name string
	// Root is the repository's folder, where bin, deploy/charts and .sandbox are. Empty means the closest one around the
	// working directory.
	Root string
	// StateDir is the folder of this sandbox. Empty means .sandbox/<name> in the repository. What it holds is replaced.
	StateDir string

	// Topology says where agent and shim run. Empty means [HubAndSpoke].
	Topology Topology
	// HubOf, if set, is the name of a sandbox of the same repository that is ready: this one has a spoke and a shim only, and the Cluster is added to
	// that one's hub, whose agents serve it. Without, there is a hub of its own.
	HubOf string
	// Cluster is the name of the spoke's Cluster in the namespace [ClusterNamespace]. Empty means [ClusterName], and [Options].Name with HubOf.
	Cluster string
	// HubOnly leaves out the spoke, the hub's Cluster and the shim: a hub that the Clusters of another one can be moved to.
	HubOnly bool
	// WithoutAgent leaves out the agent, and with it the shim.
	WithoutAgent bool
	// WithoutShim leaves out the shim.
	WithoutShim bool

	// Authority signs the certificates of the agents and of who calls them. Nil means one of the sandbox's own.
	Authority *Authority
	// Agents is how many agents run, all of them active: the first is [Agent], the others are named by [AgentName]. Zero means
	// one. The shim calls the first.
	Agents int
	// AgentBinary is the agent's executable. Empty means bin/capi-agent.
	AgentBinary string
	// ShimBinary is the shim's executable. Empty means bin/karpenter.
	ShimBinary string
	// AgentArgs are added to the agents' command lines; of two equal flags the later one counts.
	AgentArgs []string
	// AgentHub, if set, says where an agent finds the hub's API server: it is given the real one and may put itself between.
	AgentHub func(agent string, hub Endpoint) (Endpoint, error)
	// RestartAfter is how long after its death an agent or the shim is started again. Zero means a delay that grows.
	RestartAfter time.Duration
	// FeatureGates are those of Karpenter's that are on besides its own choice, such as NodeOverlay, with the permissions that the
	// chart gives the shim for them.
	FeatureGates []string
	// DynamicResources has Karpenter plan for pods with resource claims, with the permissions that the chart gives the shim for that.
	DynamicResources bool
	// ShimEnv is added to the shim's environment, as NAME=value.
	ShimEnv []string
	// ClusterAPIArgs are added to the command line of the Cluster API manager.
	ClusterAPIArgs []string
	// TopologyVersion, if set, is the Kubernetes version of a Cluster that is made from the ClusterClass [ClusterClass], without workers at first,
	// for example v1.36.2. The control plane's API server is of its own version, which must not be an older one.
	TopologyVersion string
	// SeparateWebhooks serves Cluster API's webhooks from a process of their own, [ClusterAPIWebhooks], so that they answer
	// while the controllers are suspended.
	SeparateWebhooks bool

	// AuditHub makes the hub's API server log every request before it is answered, in [Paths].HubAudit.
	AuditHub bool

	// OnChange, if set, is called with the state after it changed, one call at a time. Changes that follow each other
	// quickly may be told together.
	OnChange func(State)
}

// Topology is one of the ways to install agent and shim that docs/install.md describes.
type Topology string

// The topologies.
const (
	// HubAndSpoke has the agents in the hub, and the shim in the spoke.
	HubAndSpoke Topology = "hub-spoke"
	// Joined has one cluster, which is its own workload cluster.
	Joined Topology = "joined"
	// Sidecar is [Joined] with one agent, which has the shim's service account, as a container of its pod, and which the shim calls over a unix socket.
	Sidecar Topology = "sidecar"
	// HubHosted has the shim in the hub, where it reads a kubeconfig of the spoke that may be replaced: [Sandbox.RenewShimKubeconfig].
	HubHosted Topology = "hub-hosted"
)

// Topologies are all of them.
func Topologies() []Topology { return []Topology{HubAndSpoke, Joined, Sidecar, HubHosted} }

// oneCluster reports whether hub and spoke are the same cluster.
func (o *Options) oneCluster() bool { return o.Topology == Joined || o.Topology == Sidecar }

// checkTopology completes what depends on the topology.
func (o *Options) checkTopology() error {
	if o.Topology == "" {
		o.Topology = HubAndSpoke
	}
	switch {
	case !slices.Contains(Topologies(), o.Topology):
		return fmt.Errorf("the topology %q is none of %v", o.Topology, Topologies())
	case o.HubOnly && o.Topology != HubAndSpoke:
		return fmt.Errorf("a hub without a spoke has no topology; leave %s out", o.Topology)
	case o.Topology == Sidecar && o.Agents > 1:
		return errors.New("a sidecar is one agent")
	case o.HubOf == "":
	case o.HubOf == o.Name:
		return fmt.Errorf("the sandbox %q cannot use its own hub as another's", o.Name)
	case o.Topology != HubAndSpoke || o.HubOnly || o.AuditHub || o.TopologyVersion != "":
		return fmt.Errorf("the hub of the sandbox %q is as it is: no topology, hub only, audit or ClusterClass can be chosen", o.HubOf)
	case o.WithoutAgent || o.Agents > 0 || len(o.AgentArgs) > 0 || o.AgentHub != nil:
		return fmt.Errorf("the agents of the sandbox %q are as they are: none can be left out, added or changed", o.HubOf)
	}
	return nil
}

// Authority signs the certificates of agents and of who calls them. Sandboxes that share one accept each other's shim.
type Authority struct{ ca *pki.CA }

// NewAuthority makes an authority.
func NewAuthority() (*Authority, error) {
	ca, err := pki.NewCA("agent")
	return &Authority{ca}, err
}

// Endpoint is an API server as a client sees it.
type Endpoint struct {
	// URL of the server.
	URL string
	// CA is the authority of its certificate, PEM.
	CA []byte
}

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$`)

// testedFiles names the environment variable that identifies the files that tests use from outside their module. The go command
// repeats a test's result while its inputs are the same, and counts the variables that it reads among these, but not such files.
const testedFiles = "TESTED_FILES"

// complete fills in what is empty.
func (o *Options) complete() error {
	_ = os.Getenv(testedFiles)
	if o.Name == "" {
		o.Name = DefaultName
	}
	if !validName.MatchString(o.Name) {
		return fmt.Errorf("the name %q is not a DNS label of at most 40 characters", o.Name)
	}
	if o.Root == "" {
		root, err := findRoot()
		if err != nil {
			return err
		}
		o.Root = root
	}
	if o.StateDir == "" {
		o.StateDir = filepath.Join(o.Root, ".sandbox", o.Name)
	}
	for _, path := range []*string{&o.Root, &o.StateDir, &o.AgentBinary, &o.ShimBinary} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = absolute
	}
	if err := o.checkTopology(); err != nil {
		return err
	}
	o.WithoutShim = o.WithoutShim || o.WithoutAgent || o.HubOnly
	if o.HubOf == "" {
		o.Agents = max(o.Agents, 1)
	}
	if o.Cluster == "" {
		o.Cluster = cmp.Or(lo.Ternary(o.HubOf == "", "", o.Name), ClusterName)
	}
	if o.AgentBinary == "" {
		o.AgentBinary = o.binary("capi-agent")
	}
	if o.ShimBinary == "" {
		o.ShimBinary = o.binary("karpenter")
	}
	return nil
}

// findRoot walks up from the working directory to the repository.
func findRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "deploy", "sandbox", "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("not inside the karpenter-capi repository: name its folder")
		}
		dir = parent
	}
}

func (o *Options) binary(name string) string { return filepath.Join(o.Root, "bin", name) }

func (o *Options) clusterAPIManifests() string { return o.binary("capi-core-manifests") }

func (o *Options) chart(name string) string { return filepath.Join(o.Root, "deploy", "charts", name) }

// ErrNotBuilt says that binaries are missing.
var ErrNotBuilt = errors.New("not built")

// checkBuilt names everything that is missing at once.
func (o *Options) checkBuilt() error {
	files := []string{"etcd", "kube-apiserver", "kube-controller-manager"}
	if o.HubOf == "" {
		files = append(files, "capi-core-manager", "capi-core-manifests/webhooks.yaml", "capi-core-manifests/version", "sim-provider")
	}
	if !o.HubOnly {
		files = append(files, "kube-scheduler", "kwok")
	}
	if !o.WithoutAgent {
		files = append(files, "helm", o.AgentBinary)
	}
	if !o.WithoutShim {
		files = append(files, o.ShimBinary)
	}
	missing := lo.Filter(files, func(file string, _ int) bool {
		if !filepath.IsAbs(file) {
			file = o.binary(file)
		}
		_, err := os.Stat(file)
		return errors.Is(err, fs.ErrNotExist)
	})
	if len(missing) > 0 {
		return fmt.Errorf("%w: %s in %s; run `make tools build`", ErrNotBuilt, strings.Join(missing, ", "), filepath.Join(o.Root, "bin"))
	}
	return nil
}
