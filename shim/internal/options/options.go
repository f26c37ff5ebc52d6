// Package options defines the shim's own flags. Each can also be set by an environment variable:
// upper case, underscores for dashes (`--agent-address`, `AGENT_ADDRESS`).
//
// Importing the package adds them to Karpenter core's flags, which core parses from the command
// line. Read them with [FromContext] in any context that core created.
package options

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/operator/options"
)

func init() { //nolint:gochecknoinits // Karpenter core's registry of flags demands it
	options.Injectables = append(options.Injectables, &Options{})
}

const unixScheme = "unix://"

// DefaultBootstrapSecret is the default name of the secret that `capi-agent onboard` writes.
const DefaultBootstrapSecret = "karpenter-agent-bootstrap"

// Options holds the values of the shim's flags.
type Options struct {
	// AgentAddress is the agent's address: host:port, or unix:///path.
	AgentAddress string
	// AgentTLSCertFile and AgentTLSKeyFile hold the client certificate and its key, PEM. Re-read
	// when they change.
	AgentTLSCertFile string
	AgentTLSKeyFile  string
	// AgentCAFile holds the authorities of the agent's certificate, PEM. Re-read when it changes.
	AgentCAFile string
	// AgentIdentitySecret is the secret in the spoke in which the shim stores its own key and the
	// certificate that the agent issues for it. Its name is empty if the certificate is in files.
	AgentIdentitySecret types.NamespacedName
	// AgentBootstrapSecret is the secret in the spoke with the certificate that requests the first
	// one. Empty without AgentIdentitySecret.
	AgentBootstrapSecret types.NamespacedName
	// AgentServerName is the name expected in the agent's certificate. Empty means the host of
	// AgentAddress.
	AgentServerName string
	// AgentPlaintextLoopback allows a connection without TLS, but only to a loopback address.
	AgentPlaintextLoopback bool
	// AgentTimeout bounds each call to the agent.
	AgentTimeout time.Duration

	// ClusterNamespace and ClusterName identify this workload cluster's Cluster object in the hub.
	ClusterNamespace string
	ClusterName      string

	// LaunchTimeout is how long a NodeClaim may stay without a claim in the hub before core gives
	// it up.
	LaunchTimeout time.Duration
	// ClaimSyncInterval is how often the shim reports the complete set of NodeClaims to the agent.
	ClaimSyncInterval time.Duration
	// HubUnreachableGracePeriod is how long the agent may be unreachable before NodeClasses stop
	// being Ready.
	HubUnreachableGracePeriod time.Duration
	// NodeRepairAfter is how long a Node may be unhealthy before core repairs it, with the feature
	// gate NodeRepair.
	NodeRepairAfter time.Duration
	// NodeRepairSkipRemediation keeps MachineHealthChecks from remediating the machines of this
	// shim's NodeClaims, with the feature gate NodeRepair.
	NodeRepairSkipRemediation bool
	// UnavailableOfferingTTL is how long an offering stays unavailable after the agent had no room
	// for it.
	UnavailableOfferingTTL time.Duration

	// PublishedNodePools applies what the hub publishes, and reports the status of NodePools.
	PublishedNodePools bool

	// MetricsBindAddress and HealthProbeBindAddress are host:port. Empty means all addresses and
	// the port of core's flags.
	MetricsBindAddress     string
	HealthProbeBindAddress string
	// MetricsSecure serves metrics and profiles over HTTPS, only to callers that the spoke's API
	// server authorizes for their paths.
	MetricsSecure bool
	// MetricsTLSCertFile and MetricsTLSKeyFile hold the metrics endpoint's certificate and key,
	// PEM. Without them a certificate is generated.
	MetricsTLSCertFile, MetricsTLSKeyFile string

	nodeLabelKeys string
	// The names as given on the command line.
	agentIdentitySecret, agentBootstrapSecret string
	// Deprecated flags, accepted with any value and without effect.
	machineFailureReasons, machineProgressDeadline string
	// names are the flags of this package, which can also be set by environment variables.
	names []string
}

// NodeLabelKeys returns the keys of node labels that pods and NodePools may select on although no
// NodePool names them.
func (o *Options) NodeLabelKeys() []string {
	return slices.DeleteFunc(strings.Split(o.nodeLabelKeys, ","), func(key string) bool { return key == "" })
}

// Deprecated returns a warning for each flag that was set and no longer has an effect.
func (o *Options) Deprecated() []string {
	var warnings []string
	if o.machineFailureReasons != "" {
		warnings = append(warnings, "--machine-failure-reasons (MACHINE_FAILURE_REASONS) has no effect any more and will be removed: "+
			"set --failure-reasons of the agent instead")
	}
	if o.machineProgressDeadline != "" {
		warnings = append(warnings, "--machine-progress-deadline (MACHINE_PROGRESS_DEADLINE) has no effect any more and will be removed: "+
			"set spec.maxNodeProvisionTime of the ClusterAPINodeClass instead, or --machine-provider-id-deadline and "+
			"--machine-node-deadline of the agent")
	}
	return warnings
}

// AddFlags registers the flags.
func (o *Options) AddFlags(fs *options.FlagSet) {
	others := map[string]bool{}
	fs.VisitAll(func(f *flag.Flag) { others[f.Name] = true })
	fs.StringVar(&o.AgentAddress, "agent-address", "",
		"Address of the agent in the hub (the management cluster): host:port, or unix:///path. Required.")
	fs.StringVar(&o.AgentTLSCertFile, "agent-tls-cert-file", "",
		"PEM file with the client certificate that identifies this spoke to the agent. Reloaded when it changes. Required, except "+
			"with --agent-identity-secret, over a unix socket or with --agent-plaintext-loopback.")
	fs.StringVar(&o.AgentTLSKeyFile, "agent-tls-key-file", "", "PEM file with the private key of --agent-tls-cert-file.")
	fs.StringVar(&o.AgentCAFile, "agent-ca-file", "",
		"PEM file with the certificate authorities of the agent's certificate. Reloaded when it changes.")
	fs.StringVar(&o.agentIdentitySecret, "agent-identity-secret", "",
		"Secret in the spoke, as namespace/name, in which the shim keeps its own key and the client certificate that the agent issues for it. "+
			"Replaces --agent-tls-cert-file, --agent-tls-key-file and --agent-ca-file.")
	fs.StringVar(&o.agentBootstrapSecret, "agent-bootstrap-secret", "",
		"Secret in the spoke, as namespace/name, that capi-agent onboard writes. The shim requests its first certificate with it. "+
			"Defaults to "+DefaultBootstrapSecret+" in the namespace of --agent-identity-secret.")
	fs.StringVar(&o.AgentServerName, "agent-server-name", "",
		"Name expected in the agent's certificate. Defaults to the host of --agent-address.")
	fs.BoolVar(&o.AgentPlaintextLoopback, "agent-plaintext-loopback", false,
		"Connect to the agent without TLS. Only allowed with a loopback address.")
	fs.DurationVar(&o.AgentTimeout, "agent-timeout", 10*time.Second,
		"Deadline of a call to the agent. A call that adopts a machine has six times as long.")
	fs.StringVar(&o.ClusterNamespace, "cluster-namespace", "",
		"Namespace of this spoke's Cluster object in the hub. Required.")
	fs.StringVar(&o.ClusterName, "cluster-name", "",
		"Name of this spoke's Cluster object in the hub. Required.")
	fs.DurationVar(&o.LaunchTimeout, "launch-timeout", 5*time.Minute,
		"How long a NodeClaim may exist without a claim in the hub before it is deleted.")
	fs.DurationVar(&o.ClaimSyncInterval, "claim-sync-interval", time.Minute,
		"How often the shim sends its complete set of NodeClaims to the agent. The agent releases claims that have no NodeClaim, "+
			"unless their Node was registered.")
	fs.DurationVar(&o.HubUnreachableGracePeriod, "hub-unreachable-grace-period", 2*time.Minute,
		"How long the agent may be unreachable before ClusterAPINodeClasses stop being Ready and nothing new is launched.")
	fs.StringVar(&o.machineProgressDeadline, "machine-progress-deadline", "",
		"Deprecated: has no effect. How long a NodeClaim waits for its machine is spec.maxNodeProvisionTime of its ClusterAPINodeClass, "+
			"else the agent's --machine-provider-id-deadline and --machine-node-deadline.")
	fs.StringVar(&o.machineFailureReasons, "machine-failure-reasons", "",
		"Deprecated: has no effect. The agent alone decides whether a machine failed: see its --failure-reasons.")
	fs.DurationVar(&o.NodeRepairAfter, "node-repair-after", 30*time.Minute,
		"How long a Node may be unhealthy before Karpenter replaces it, with the feature gate NodeRepair.")
	fs.BoolVar(&o.NodeRepairSkipRemediation, "node-repair-skip-remediation", true,
		"With the feature gate NodeRepair, the agent annotates the machines of NodeClaims with cluster.x-k8s.io/skip-remediation, so that "+
			"no MachineHealthCheck remediates them as well. Set it to false if both are to repair them.")
	fs.DurationVar(&o.UnavailableOfferingTTL, "unavailable-offering-ttl", 30*time.Second,
		"How long the offerings of a node group are unavailable after the agent refused a claim there without naming a retry time, and those of a "+
			"NodePool after every node group refused its NodeClaim.")
	fs.BoolVar(&o.PublishedNodePools, "published-node-pools", false,
		"Create and update the NodePools and ClusterAPINodeClasses that NodePoolSets in the hub publish, and report the status of all "+
			"NodePools there. Needs an agent with --publish-node-pools. NodePools of others are never changed.")
	fs.StringVar(&o.MetricsBindAddress, "metrics-bind-address", "",
		"host:port of the metrics endpoint, or 0 for none. Defaults to --metrics-port on all addresses.")
	fs.BoolVar(&o.MetricsSecure, "metrics-secure", true,
		"Serve metrics and profiles over HTTPS, to callers whom the spoke's RBAC allows to get their paths. If false, they are served over HTTP "+
			"without authentication.")
	fs.StringVar(&o.MetricsTLSCertFile, "metrics-tls-cert-file", "",
		"PEM file with the certificate chain of the metrics endpoint. Reloaded when it changes. If empty, the shim "+
			"generates a self-signed certificate.")
	fs.StringVar(&o.MetricsTLSKeyFile, "metrics-tls-key-file", "",
		"PEM file with the private key of --metrics-tls-cert-file. Reloaded when it changes.")
	fs.StringVar(&o.HealthProbeBindAddress, "health-probe-bind-address", "",
		"host:port of the health endpoint, or 0 for none. Defaults to --health-probe-port on all addresses.")
	fs.StringVar(&o.nodeLabelKeys, "node-label-keys", "",
		"Comma-separated keys of node labels that distinguish node groups and that pods may select on, although the "+
			"NodePool does not name them.")
	o.names = nil
	fs.VisitAll(func(f *flag.Flag) {
		if !others[f.Name] {
			o.names = append(o.names, f.Name)
		}
	})
}

// EnvironmentVariable returns the name of the environment variable for a flag of this package.
func EnvironmentVariable(flagName string) string {
	return strings.ToUpper(strings.ReplaceAll(flagName, "-", "_"))
}

// Parse parses and validates the flags. The error names every invalid flag and the remedy.
func (o *Options) Parse(fs *options.FlagSet, args ...string) error {
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(0)
		}
		return fmt.Errorf("parsing flags, %w", err)
	}
	// flag would ignore it, and everything after it.
	if fs.NArg() > 0 {
		return fmt.Errorf("%q is not a flag: write the value of a flag as --name=value, and a command before all flags", fs.Arg(0))
	}
	if err := o.parseEnvironment(fs); err != nil {
		return fmt.Errorf("parsing the environment, %w", err)
	}
	if err := errors.Join(o.parseSecrets(), o.Validate()); err != nil {
		return fmt.Errorf("validating flags, %w", err)
	}
	return nil
}

// parseSecrets parses the names of the secrets.
func (o *Options) parseSecrets() error {
	o.AgentIdentitySecret, o.AgentBootstrapSecret = types.NamespacedName{}, types.NamespacedName{}
	if o.agentIdentitySecret == "" {
		if o.agentBootstrapSecret != "" {
			return errors.New("--agent-bootstrap-secret has no effect without --agent-identity-secret: set that one, too, or drop this one")
		}
		return nil
	}
	var errs []error
	parse := func(flag, value string) types.NamespacedName {
		namespace, name, both := strings.Cut(value, "/")
		var problems []string
		if both {
			problems = append(validation.IsDNS1123Label(namespace), validation.IsDNS1123Subdomain(name)...)
		}
		if !both || len(problems) > 0 {
			errs = append(errs, fmt.Errorf("--%s %q: write namespace/name of a secret in the spoke, as in karpenter/%[1]s: %[3]s", flag, value,
				cmp.Or(strings.Join(problems, "; "), "there is no slash")))
		}
		return types.NamespacedName{Namespace: namespace, Name: name}
	}
	o.AgentIdentitySecret = parse("agent-identity-secret", o.agentIdentitySecret)
	o.AgentBootstrapSecret = types.NamespacedName{Namespace: o.AgentIdentitySecret.Namespace, Name: DefaultBootstrapSecret}
	if o.agentBootstrapSecret != "" {
		o.AgentBootstrapSecret = parse("agent-bootstrap-secret", o.agentBootstrapSecret)
	}
	if o.AgentIdentitySecret == o.AgentBootstrapSecret {
		errs = append(errs, fmt.Errorf("--agent-identity-secret and --agent-bootstrap-secret are both %s: use a separate secret for the shim's own key",
			o.AgentIdentitySecret))
	}
	return errors.Join(errs...)
}

// parseEnvironment sets flags that are not on the command line from the environment. Unlike in
// core, an invalid value is an error: silently falling back to a default can hide a typo for
// months.
func (o *Options) parseEnvironment(fs *options.FlagSet) error {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var errs []error
	for _, name := range o.names {
		variable := EnvironmentVariable(name)
		value, ok := os.LookupEnv(variable)
		if !ok || given[name] {
			continue
		}
		if err := fs.Set(name, value); err != nil {
			errs = append(errs, fmt.Errorf("%s=%q (--%s): %w", variable, value, name, err))
		}
	}
	return errors.Join(errs...)
}

// Validate returns all problems, joined.
func (o *Options) Validate() error {
	return errors.Join(o.validateAgent(), o.validateCluster(), o.validateTimes(), o.validateAddresses(), o.validateMetrics(), o.validateKeys())
}

func (o *Options) validateAgent() error {
	if o.AgentAddress == "" {
		return errors.New("--agent-address is required: host:port or unix:///path of the agent in the hub")
	}
	if path, ok := strings.CutPrefix(o.AgentAddress, unixScheme); ok {
		if !strings.HasPrefix(path, "/") {
			return fmt.Errorf("--agent-address %q: a unix socket needs an absolute path, as in unix:///run/agent.sock", o.AgentAddress)
		}
		return o.validateNoIdentity("a unix socket")
	}
	host, _, err := net.SplitHostPort(o.AgentAddress)
	if err != nil {
		return fmt.Errorf("--agent-address %q: write host:port or unix:///path: %w", o.AgentAddress, err)
	}
	if o.AgentPlaintextLoopback {
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return fmt.Errorf("--agent-plaintext-loopback: %q is not a loopback address; use TLS, or 127.0.0.1", host)
		}
		return o.validateNoIdentity("--agent-plaintext-loopback")
	}
	var errs []error
	for _, file := range []struct{ flag, path string }{
		{"--agent-tls-cert-file", o.AgentTLSCertFile},
		{"--agent-tls-key-file", o.AgentTLSKeyFile},
		{"--agent-ca-file", o.AgentCAFile},
	} {
		switch {
		case o.AgentIdentitySecret.Name != "" && file.path != "":
			errs = append(errs, fmt.Errorf("%s excludes --agent-identity-secret: drop the flags of files, or that one", file.flag))
		case o.AgentIdentitySecret.Name == "" && file.path == "":
			errs = append(errs, fmt.Errorf("%s is required to reach the agent at %s over TLS, unless --agent-identity-secret is set",
				file.flag, o.AgentAddress))
		}
	}
	return errors.Join(errs...)
}

// validateNoIdentity rejects an identity secret for a connection without TLS.
func (o *Options) validateNoIdentity(with string) error {
	if o.AgentIdentitySecret.Name != "" {
		return fmt.Errorf("--agent-identity-secret has no effect with %s, which is used without certificates: drop one of the two", with)
	}
	return nil
}

func (o *Options) validateCluster() error {
	var errs []error
	for _, name := range []struct{ flag, value string }{
		{"--cluster-namespace", o.ClusterNamespace},
		{"--cluster-name", o.ClusterName},
	} {
		if name.value == "" {
			errs = append(errs, fmt.Errorf("%s is required: it names the Cluster object in the hub", name.flag))
			continue
		}
		problems := validation.IsDNS1123Subdomain(name.value)
		if name.flag == "--cluster-namespace" {
			problems = validation.IsDNS1123Label(name.value)
		}
		if len(name.value) > validation.DNS1123LabelMaxLength {
			problems = append(problems, fmt.Sprintf("must be no more than %d characters", validation.DNS1123LabelMaxLength))
		}
		if len(problems) > 0 {
			errs = append(errs, fmt.Errorf("%s %q: %s", name.flag, name.value, strings.Join(problems, "; ")))
		}
	}
	return errors.Join(errs...)
}

func (o *Options) validateTimes() error {
	var errs []error
	for _, d := range []struct {
		flag  string
		value time.Duration
		least time.Duration
	}{
		{"--agent-timeout", o.AgentTimeout, 100 * time.Millisecond},
		{"--launch-timeout", o.LaunchTimeout, 30 * time.Second},
		{"--claim-sync-interval", o.ClaimSyncInterval, time.Second},
		{"--hub-unreachable-grace-period", o.HubUnreachableGracePeriod, 0},
		{"--node-repair-after", o.NodeRepairAfter, 10 * time.Second},
		{"--unavailable-offering-ttl", o.UnavailableOfferingTTL, time.Second},
	} {
		if d.value < d.least {
			errs = append(errs, fmt.Errorf("%s %s: must be at least %s", d.flag, d.value, d.least))
		}
	}
	return errors.Join(errs...)
}

func (o *Options) validateAddresses() error {
	var errs []error
	for _, address := range []struct{ flag, value string }{
		{"--metrics-bind-address", o.MetricsBindAddress},
		{"--health-probe-bind-address", o.HealthProbeBindAddress},
	} {
		if address.value == "" || address.value == "0" {
			continue
		}
		if _, _, err := net.SplitHostPort(address.value); err != nil {
			errs = append(errs, fmt.Errorf("%s %q: write host:port, as in 127.0.0.1:8080, or 0 for none: %w", address.flag, address.value, err))
		}
	}
	return errors.Join(errs...)
}

func (o *Options) validateMetrics() error {
	switch {
	case (o.MetricsTLSCertFile == "") != (o.MetricsTLSKeyFile == ""):
		return errors.New("--metrics-tls-cert-file goes with --metrics-tls-key-file: set both or neither")
	case o.MetricsTLSCertFile != "" && !o.MetricsSecure:
		return errors.New("--metrics-tls-cert-file has no effect with --metrics-secure=false: drop one of the two")
	}
	return nil
}

func (o *Options) validateKeys() error {
	var errs []error
	wrong := func(key, why string) { errs = append(errs, fmt.Errorf("--node-label-keys: %q %s", key, why)) }
	for _, key := range o.NodeLabelKeys() {
		current, old := karpv1.NormalizedLabels[key]
		switch problems := validation.IsQualifiedName(key); {
		case len(problems) > 0:
			wrong(key, "is not a label key: "+strings.Join(problems, "; "))
		case old:
			wrong(key, "is an old name of "+current+", which is always distinguished: leave it out")
		case karpv1.IsRestrictedLabel(key) != nil:
			wrong(key, "is set by Karpenter or the kubelet, and no node group offers a choice of it: leave it out")
		case slices.Contains(nodeDimensions, dimension(key)):
			wrong(key, fmt.Sprintf("would be the label %s of core's metrics about Nodes, which have one of that name: give the nodes a label with "+
				"another name after the slash", dimension(key)))
		}
	}
	return errors.Join(errs...)
}

// nodeDimensions are the labels that core's metrics about Nodes have in addition to the well-known
// labels; see core's package controllers/metrics/node. Core panics at startup if a well-known label
// has the same name.
var nodeDimensions = []string{"node_name", "phase", "managed", "resource_type"}

// dimension returns the label in core's metrics about Nodes that a node label's key becomes, or ""
// for a key without a slash.
func dimension(key string) string {
	_, name, _ := strings.Cut(key, "/")
	return strings.ReplaceAll(strings.ToLower(name), "-", "_")
}

// ToContext adds the options to a context.
func (o *Options) ToContext(ctx context.Context) context.Context {
	return ToContext(ctx, o)
}

type contextKey struct{}

// ToContext adds the options to a context.
func ToContext(ctx context.Context, o *Options) context.Context {
	return context.WithValue(ctx, contextKey{}, o)
}

// FromContext returns the options of a context, or nil.
func FromContext(ctx context.Context) *Options {
	o, _ := ctx.Value(contextKey{}).(*Options)
	return o
}
