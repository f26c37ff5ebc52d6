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

// DefaultName is the name of a sandbox without a given name.
const DefaultName = "default"

// Options configures a sandbox. The zero value is a full sandbox with the default name in the
// repository around the working directory.
type Options struct {
	// Name distinguishes sandboxes that run at the same time: a DNS label. Empty means
	// [DefaultName].
	Name string
	// Root is the repository's folder, which contains bin, deploy/charts and .sandbox. Empty means
	// the closest one around the working directory.
	Root string
	// StateDir is the folder of this sandbox. Empty means .sandbox/<name> in the repository. Its
	// content is replaced.
	StateDir string

	// Topology determines where agent and shim run. Empty means [HubAndSpoke].
	Topology Topology
	// HubOf is the name of another, ready sandbox of the same repository. If set, this sandbox has
	// only a spoke and a shim, and its Cluster is added to the other sandbox's hub, whose agents
	// serve it. If empty, the sandbox has its own hub.
	HubOf string
	// Cluster is the name of the spoke's Cluster in the namespace [ClusterNamespace]. Empty means
	// [ClusterName], or [Options].Name with HubOf.
	Cluster string
	// HubOnly omits the spoke, the Cluster and the shim. Clusters of another hub can be moved to
	// this one.
	HubOnly bool
	// WithoutAgent omits the agent, and therefore the shim.
	WithoutAgent bool
	// WithoutShim omits the shim.
	WithoutShim bool

	// Authority signs the certificates of the agents and their callers. Nil means an authority of
	// the sandbox's own.
	Authority *Authority
	// Agents is the number of agents, all of them active. The first is [Agent], the others are
	// named by [AgentName]. The shim calls the first. Zero means one.
	Agents int
	// AgentBinary is the agent's executable. Empty means bin/capi-agent.
	AgentBinary string
	// ShimBinary is the shim's executable. Empty means bin/karpenter.
	ShimBinary string
	// AgentArgs are appended to the agents' command lines. Of two equal flags the later one counts.
	AgentArgs []string
	// AgentHub, if set, returns the endpoint at which an agent reaches the hub's API server. It
	// receives the real endpoint and may insert a proxy.
	AgentHub func(agent string, hub Endpoint) (Endpoint, error)
	// RestartAfter is the delay between the death of an agent or the shim and its restart. Zero
	// means a growing delay.
	RestartAfter time.Duration
	// FeatureGates are Karpenter feature gates to enable in addition to the defaults, such as
	// NodeOverlay. The shim also gets the permissions that the chart grants for them.
	FeatureGates []string
	// DynamicResources makes Karpenter plan for pods with resource claims. The shim also gets the
	// permissions that the chart grants for that.
	DynamicResources bool
	// NodePools publishes NodePoolSets to the spoke. Agents and shim also get the permissions that
	// the charts grant for that.
	NodePools bool
	// ShimEnv is appended to the shim's environment, as NAME=value.
	ShimEnv []string
	// ClusterAPIArgs are appended to the command line of the Cluster API manager.
	ClusterAPIArgs []string
	// TopologyVersion, if set, creates the Cluster from the ClusterClass [ClusterClass], initially
	// without workers, with this Kubernetes version, for example v1.36.2. The control plane's API
	// server keeps its own version, which must not be older.
	TopologyVersion string
	// SeparateWebhooks serves Cluster API's webhooks from a separate process, [ClusterAPIWebhooks],
	// so that they answer while the controllers are suspended.
	SeparateWebhooks bool

	// AuditHub makes the hub's API server log every request to [Paths].HubAudit before it is
	// answered.
	AuditHub bool

	// OnChange, if set, is called with the state after each change, one call at a time. Changes in
	// quick succession may be combined.
	OnChange func(State)
}

// Topology is one of the ways to install agent and shim described in docs/install.md.
type Topology string

// The topologies.
const (
	// HubAndSpoke runs the agents in the hub and the shim in the spoke.
	HubAndSpoke Topology = "hub-spoke"
	// Joined has a single cluster, which is its own workload cluster.
	Joined Topology = "joined"
	// Sidecar is [Joined] with one agent, which runs as a container of the shim's pod with the
	// shim's service account, and which the shim calls over a unix socket.
	Sidecar Topology = "sidecar"
	// HubHosted runs the shim in the hub, with a kubeconfig of the spoke that may be replaced:
	// [Sandbox.RenewShimKubeconfig].
	HubHosted Topology = "hub-hosted"
)

// Topologies returns all topologies.
func Topologies() []Topology { return []Topology{HubAndSpoke, Joined, Sidecar, HubHosted} }

// oneCluster reports whether hub and spoke are the same cluster.
func (o *Options) oneCluster() bool { return o.Topology == Joined || o.Topology == Sidecar }

// checkTopology sets the default topology and validates the options that depend on it.
func (o *Options) checkTopology() error {
	if o.Topology == "" {
		o.Topology = HubAndSpoke
	}
	switch {
	case !slices.Contains(Topologies(), o.Topology):
		return fmt.Errorf("the topology %q is not one of %v", o.Topology, Topologies())
	case o.HubOnly && o.Topology != HubAndSpoke:
		return fmt.Errorf("a hub without a spoke has no topology; leave %s out", o.Topology)
	case o.Topology == Sidecar && o.Agents > 1:
		return errors.New("a sidecar is one agent")
	case o.HubOf == "":
	case o.HubOf == o.Name:
		return fmt.Errorf("the sandbox %q cannot use its own hub as another's", o.Name)
	case o.Topology != HubAndSpoke || o.HubOnly || o.AuditHub || o.TopologyVersion != "" || o.SeparateWebhooks || len(o.ClusterAPIArgs) > 0:
		return fmt.Errorf("the hub of the sandbox %q cannot be changed: no topology, hub only, audit, ClusterClass or options of Cluster API can be chosen",
			o.HubOf)
	case o.WithoutAgent || o.Agents > 0 || len(o.AgentArgs) > 0 || o.AgentHub != nil || o.Authority != nil:
		return fmt.Errorf("the agents of the sandbox %q cannot be changed: none can be left out, added or configured", o.HubOf)
	}
	return nil
}

// Authority signs the certificates of agents and their callers. Sandboxes that share an authority
// accept each other's shims.
type Authority struct{ ca *pki.CA }

// NewAuthority creates an authority.
func NewAuthority() (*Authority, error) {
	ca, err := pki.NewCA("agent")
	return &Authority{ca}, err
}

// Endpoint is an API server as seen by a client.
type Endpoint struct {
	// URL is the server's URL.
	URL string
	// CA is the authority of its certificate, PEM.
	CA []byte
}

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$`)

// testedBinaries is the environment variable that identifies the sources of the binaries that a
// sandbox runs. The go command reuses a test's result while its inputs are unchanged. The variables
// that the test reads count as inputs, but files from outside of its module do not.
const testedBinaries = "TESTED_BINARIES"

// complete sets the defaults and validates.
func (o *Options) complete() error {
	_ = os.Getenv(testedBinaries)
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

// findRoot finds the repository around the working directory.
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

// ErrNotBuilt means that binaries are missing.
var ErrNotBuilt = errors.New("not built")

// checkBuilt reports all missing files at once.
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
