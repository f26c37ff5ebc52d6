// Package options holds the agent's settings: the flags, their environment variables and their
// validation.
package options

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// EnvironmentPrefix is the prefix of every environment variable.
const EnvironmentPrefix = "CAPI_AGENT_"

// Options are the agent's settings. Use [New] for the defaults.
type Options struct {
	// ListenAddress is the host:port to serve gRPC on. Empty means that only the unix socket is
	// served.
	ListenAddress string
	// ListenUnixSocket is the path of a unix socket. Empty means none.
	ListenUnixSocket string
	// UnixSocketRole is the role of callers on the unix socket, REQUIRED if there is one.
	// UnixSocketClusters are the Clusters that the role is granted for, as <namespace>/<name>,
	// where `*` matches any characters. Empty means all Clusters.
	UnixSocketRole     string
	UnixSocketClusters []string
	// TLSCertFile, TLSKeyFile and ClientCAFile are PEM files, which are reloaded when they change.
	TLSCertFile, TLSKeyFile, ClientCAFile string
	// IssuerCertFile and IssuerKeyFile are PEM files with the authority that signs Clusters'
	// certificates. They are reloaded when they change. Empty means that the agent signs none.
	IssuerCertFile, IssuerKeyFile string
	// ServerCAFile is a PEM file with the authorities of the agent's own certificate, which are
	// sent to shims as trusted authorities. Empty means ClientCAFile.
	ServerCAFile string
	// CertificateLifetime is how long certificates signed by the agent are valid.
	CertificateLifetime time.Duration
	// TrustDomain is the SPIFFE trust domain of callers.
	TrustDomain string
	// PlaintextLoopback serves ListenAddress, which must be a loopback address, without TLS. All
	// its callers have every right.
	PlaintextLoopback bool
	// Policy is the ConfigMap with the policy, as <namespace>/<name>. PolicyFile is a file with the
	// policy. At most one of the two is set. The policy grants roles to identities, and denies
	// certificates. Without a policy, only the identities of Clusters have a role, each for its own
	// Cluster.
	Policy     string
	PolicyFile string

	// Namespaces limits the agent to these namespaces. If Clusters is empty too, the agent serves
	// all.
	Namespaces []string
	// Clusters are served in addition to Namespaces, as <namespace>/<name>.
	Clusters []string
	// AdditionalSyncMachineLabels are the regular expressions passed to Cluster API's manager in
	// the flag of the same name.
	AdditionalSyncMachineLabels []string
	// DefaultArchitecture is the architecture of machines if no label, template or Node has one.
	DefaultArchitecture string

	// Kubeconfig is the kubeconfig file of the hub. Empty means the KUBECONFIG variable, else
	// ~/.kube/config, else the pod's service account.
	Kubeconfig string
	// MemoryLimit is the container's memory limit in bytes. 0 means that it has none.
	MemoryLimit int64
	// KubeAPIQPS and KubeAPIBurst limit the agent's requests to the hub for each kind of object,
	// per second and at once.
	KubeAPIQPS   float32
	KubeAPIBurst int

	// MetricsBindAddress and HealthProbeBindAddress are host:port. 0 disables the listener.
	MetricsBindAddress, HealthProbeBindAddress string
	// MetricsSecure serves metrics over HTTPS, to clients that the hub's API server allows to get
	// the path /metrics. Otherwise every client that can connect may read them.
	MetricsSecure bool
	// MetricsTLSCertFile and MetricsTLSKeyFile are PEM files with the certificate for metrics,
	// which are reloaded when they change. Empty means TLSCertFile and TLSKeyFile. If those are
	// empty too, the agent generates a self-signed certificate.
	MetricsTLSCertFile, MetricsTLSKeyFile string
	// LogLevel is error, info, debug or trace. LogFormat is json or console.
	LogLevel, LogFormat string

	// SpareGracePeriod is how long an unclaimed Machine is kept for the next claim.
	SpareGracePeriod time.Duration
	// TombstoneRetention is how long an ended claim is retained.
	TombstoneRetention time.Duration
	// MaxClaimsPerCluster and MaxEndedClaimsPerCluster are how many claims that have not ended, and
	// how many ended claims, a Cluster may store in the hub. 0 means no limit.
	MaxClaimsPerCluster, MaxEndedClaimsPerCluster int
	// MaxClaimBytesPerCluster is how many bytes of the hub's etcd the claims of a Cluster may take
	// up, including ended ones. 0 means no limit.
	MaxClaimBytesPerCluster resource.QuantityValue
	// MaxAllEndedClaims and MaxAllClaimBytes are how many ended claims, and how many bytes of
	// claims, all Clusters together may store in the hub. 0 means no limit.
	MaxAllEndedClaims int
	MaxAllClaimBytes  resource.QuantityValue
	// MaxCreationsPerMinute is how many claims may be created in a node group within a minute.
	// MaxReleasesPerWindow is how many claims with a Machine may be released in a Cluster within
	// ReleaseWindow. 0 means no limit.
	MaxCreationsPerMinute, MaxReleasesPerWindow int
	ReleaseWindow                               time.Duration
	// CollectGracePeriod is the minimum age a claim must have, relative to the holder's listing,
	// before SyncClaims may collect it.
	CollectGracePeriod time.Duration
	// SyncTokenLifetime is how long after a listing of claims a live set is accepted.
	SyncTokenLifetime time.Duration
	// KnownFailures gives up Machines for the known failures of their infrastructure provider.
	KnownFailures bool
	// FailureReasons are additional reasons of a Machine's InfrastructureReady condition for which
	// the Machine is given up. They apply to any infrastructure or, as <kind>/<reason>, to one
	// kind.
	FailureReasons []string
	// MachineObjectDeadline, MachineProviderIDDeadline and MachineNodeDeadline are how long a claim
	// waits for its Machine, for the Machine's provider ID, and for its Node. 0 means no deadline.
	MachineObjectDeadline, MachineProviderIDDeadline, MachineNodeDeadline time.Duration
	// FailureCoolDown is how long a node group refuses claims after a failure. 0 disables the
	// cool-down.
	FailureCoolDown time.Duration
	// PublishNodePools publishes NodePoolSets to the spokes.
	PublishNodePools bool
	// PriceList is the ConfigMap with the price list, as <namespace>/<name>. Empty means none.
	PriceList string
	// PriceCurrency is the ISO 4217 code for prices without a currency. It may be empty.
	PriceCurrency string
	// PricePerCPU, PricePerGiB, PricePerGPU and PriceSpotShare are the coefficients of price
	// estimates.
	PricePerCPU, PricePerGiB, PricePerGPU, PriceSpotShare float64
	// HeartbeatInterval is how long a watch stream may be idle before a heartbeat is sent.
	HeartbeatInterval time.Duration
	// WatchBuffer is how many changed objects are kept for a watcher that does not read.
	WatchBuffer int
	// InstanceName distinguishes this agent from the hub's other agents. Empty means the host name.
	InstanceName string
	// ShutdownGracePeriod is how long calls in flight may take to finish at shutdown.
	ShutdownGracePeriod time.Duration
	// MaxConnectionAge is after what time a connection ends.
	MaxConnectionAge time.Duration
	// GRPCReflection serves gRPC's reflection.
	GRPCReflection bool
	// Limits bound what a single caller may request at once.
	Limits limits.Options
}

// New returns the default settings.
func New() *Options {
	return &Options{
		ListenAddress:          ":8443",
		TrustDomain:            "karpenter-capi",
		CertificateLifetime:    24 * time.Hour,
		DefaultArchitecture:    capacity.DefaultArchitecture,
		KubeAPIQPS:             500,
		KubeAPIBurst:           1000,
		MetricsBindAddress:     ":8080",
		MetricsSecure:          true,
		HealthProbeBindAddress: ":8081",
		LogLevel:               "info",
		LogFormat:              "json",
		SpareGracePeriod:       time.Minute,
		TombstoneRetention:     24 * time.Hour,

		MaxClaimsPerCluster:      20000,
		MaxEndedClaimsPerCluster: 10000,
		MaxClaimBytesPerCluster:  resource.QuantityValue{Quantity: resource.MustParse("256Mi")},
		MaxAllEndedClaims:        40000,
		MaxAllClaimBytes:         resource.QuantityValue{Quantity: resource.MustParse("512Mi")},
		ReleaseWindow:            10 * time.Minute,

		CollectGracePeriod:        30 * time.Second,
		SyncTokenLifetime:         10 * time.Minute,
		KnownFailures:             true,
		MachineObjectDeadline:     5 * time.Minute,
		MachineProviderIDDeadline: 20 * time.Minute,
		MachineNodeDeadline:       30 * time.Minute,
		FailureCoolDown:           3 * time.Minute,
		PricePerCPU:               pricing.DefaultCoefficients.PerCPU,
		PricePerGiB:               pricing.DefaultCoefficients.PerGiB,
		PricePerGPU:               pricing.DefaultCoefficients.PerAccelerator,
		PriceSpotShare:            pricing.DefaultCoefficients.SpotShare,
		HeartbeatInterval:         10 * time.Second,
		WatchBuffer:               1024,
		ShutdownGracePeriod:       10 * time.Second,
		MaxConnectionAge:          2 * time.Hour,
		GRPCReflection:            true,
		Limits:                    limits.Defaults(),
	}
}

// AddFlags adds a flag for each setting; the current values are the defaults.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.ListenAddress, "listen-address", o.ListenAddress,
		"`host:port` on which gRPC is served with mutual TLS. If empty, gRPC is served on --listen-unix-socket only.")
	flags.StringVar(&o.ListenUnixSocket, "listen-unix-socket", o.ListenUnixSocket,
		"Unix socket `path` on which gRPC is also served, without TLS, for the agent's user and group. If empty, there is no socket.")
	flags.StringVar(&o.UnixSocketRole, "unix-socket-role", o.UnixSocketRole,
		"Role of every process that can open the unix socket: cluster, reader, autoscaler or admin. Required with --listen-unix-socket. A shim needs "+
			"cluster.")
	flags.StringSliceVar(&o.UnixSocketClusters, "unix-socket-clusters", o.UnixSocketClusters,
		"Clusters to which --unix-socket-role applies, as `namespace/name`; * matches any characters. If empty, it applies to all, which only the "+
			"role admin may. The role cluster needs exactly one.")
	flags.StringVar(&o.TLSCertFile, "tls-cert-file", o.TLSCertFile,
		"PEM `file` with the server's certificate chain. Reloaded when it changes.")
	flags.StringVar(&o.TLSKeyFile, "tls-key-file", o.TLSKeyFile,
		"PEM `file` with the server's private key. Reloaded when it changes.")
	flags.StringVar(&o.ClientCAFile, "client-ca-file", o.ClientCAFile,
		"PEM `file` with the certificate authorities that sign client certificates. Reloaded when it changes.")
	flags.StringVar(&o.IssuerCertFile, "issuer-cert-file", o.IssuerCertFile,
		"PEM `file` with the certificate of the authority with which the agent signs the certificates of onboarded Clusters. --client-ca-file must "+
			"contain it. Reloaded when it changes. If empty, the agent issues no certificates.")
	flags.StringVar(&o.IssuerKeyFile, "issuer-key-file", o.IssuerKeyFile,
		"PEM `file` with the private key of --issuer-cert-file. Reloaded when it changes.")
	flags.StringVar(&o.ServerCAFile, "server-ca-file", o.ServerCAFile,
		"PEM `file` with the authorities that onboarded shims trust to sign the agent's own certificate. Defaults to --client-ca-file.")
	flags.DurationVar(&o.CertificateLifetime, "certificate-lifetime", o.CertificateLifetime,
		"Validity period of the certificates that the agent issues. Shims renew them after half of it.")
	flags.StringVar(&o.TrustDomain, "trust-domain", o.TrustDomain,
		"SPIFFE trust domain of client certificates. spiffe://<trust domain>/cluster/<namespace>/<name> may act for that Cluster.")
	flags.BoolVar(&o.PlaintextLoopback, "plaintext-loopback", o.PlaintextLoopback,
		"Serve --listen-address without TLS. It must be a loopback address, and every process that can connect to it has the role admin.")
	flags.StringVar(&o.Policy, "policy", o.Policy,
		"ConfigMap with the policy under the key policy.yaml, as `namespace/name`. The policy grants roles (reader, autoscaler, admin) to further "+
			"identities, and denies certificates. It is watched, and changes take effect within seconds. Nothing is served until it is valid.")
	flags.StringVar(&o.PolicyFile, "policy-file", o.PolicyFile,
		"YAML `file` with the policy, instead of --policy. Reloaded every five seconds. The kubelet may update a mounted ConfigMap more than a "+
			"minute late.")
	o.AddScopeFlags(flags)
	flags.StringSliceVar(&o.AdditionalSyncMachineLabels, "additional-sync-machine-labels", o.AdditionalSyncMachineLabels,
		"Regular expressions of additional labels that Cluster API copies from Machines to Nodes. Set it to the value of the same flag of "+
			"Cluster API's manager.")
	flags.StringVar(&o.DefaultArchitecture, "default-architecture", o.DefaultArchitecture,
		"Default `architecture` of machines, a value of the label kubernetes.io/arch, if no label, infrastructure template or Node has one.")
	flags.Float32Var(&o.KubeAPIQPS, "kube-api-qps", o.KubeAPIQPS,
		"Average number of requests per second to the hub's API server, for each kind of object.")
	flags.Int64Var(&o.MemoryLimit, "memory-limit", o.MemoryLimit,
		"The container's memory limit in bytes. Go's own limit is set to 90 % of it, which leaves room for memory that Go does not count, such as "+
			"socket buffers. 0 means no limit. The environment variable GOMEMLIMIT takes precedence.")
	flags.IntVar(&o.KubeAPIBurst, "kube-api-burst", o.KubeAPIBurst,
		"Number of requests to the hub's API server that may exceed --kube-api-qps at once, for each kind of object.")
	flags.StringVar(&o.MetricsBindAddress, "metrics-bind-address", o.MetricsBindAddress,
		"`host:port` on which Prometheus metrics are served under /metrics. 0 disables them.")
	flags.BoolVar(&o.MetricsSecure, "metrics-secure", o.MetricsSecure,
		"Serve metrics over HTTPS, to callers whom the hub's RBAC allows to get the path /metrics. If false, metrics are served over HTTP "+
			"without authentication.")
	flags.StringVar(&o.MetricsTLSCertFile, "metrics-tls-cert-file", o.MetricsTLSCertFile,
		"PEM `file` with the certificate chain of the metrics endpoint. Reloaded when it changes. Defaults to --tls-cert-file; if that is empty "+
			"too, the agent generates a self-signed certificate.")
	flags.StringVar(&o.MetricsTLSKeyFile, "metrics-tls-key-file", o.MetricsTLSKeyFile,
		"PEM `file` with the private key of --metrics-tls-cert-file. Reloaded when it changes.")
	flags.StringVar(&o.HealthProbeBindAddress, "health-probe-bind-address", o.HealthProbeBindAddress,
		"`host:port` on which /healthz and /readyz are served. 0 disables them.")
	flags.StringVar(&o.LogLevel, "log-level", o.LogLevel, "Log level: error, info, debug or trace.")
	flags.StringVar(&o.LogFormat, "log-format", o.LogFormat, "Log format: json or console.")
	flags.DurationVar(&o.SpareGracePeriod, "spare-grace-period", o.SpareGracePeriod,
		"How long a spare Machine is kept for the next claim before it is deleted.")
	flags.DurationVar(&o.TombstoneRetention, "tombstone-retention", o.TombstoneRetention,
		"How long an ended claim is kept as a tombstone. It must exceed the time for which any caller retries.")
	flags.IntVar(&o.MaxClaimsPerCluster, "max-claims-per-cluster", o.MaxClaimsPerCluster,
		"Maximum number of claims of one Cluster that have not ended. Further claims are refused. 0 disables the limit.")
	flags.IntVar(&o.MaxEndedClaimsPerCluster, "max-ended-claims-per-cluster", o.MaxEndedClaimsPerCluster,
		"Maximum number of tombstones of one Cluster. Close to it, tombstones older than an hour are deleted early; at it, further claims and "+
			"releases of unknown claims are refused. 0 disables the limit.")
	flags.Var(&o.MaxClaimBytesPerCluster, "max-claim-bytes-per-cluster",
		"Maximum number of bytes, for example 256Mi, that the claims of one Cluster take up in the hub's etcd, including ended ones. Beyond it, further "+
			"claims and releases of unknown claims are refused. 0 disables the limit.")
	flags.IntVar(&o.MaxAllEndedClaims, "max-all-ended-claims", o.MaxAllEndedClaims,
		"Maximum number of tombstones of all Clusters together. Close to it, tombstones older than an hour of the Clusters with the most are deleted "+
			"early. A Cluster that already has as many as remain free gets no more, apart from its first 500. 0 disables the limit.")
	flags.Var(&o.MaxAllClaimBytes, "max-all-claim-bytes",
		"Maximum number of bytes, for example 512Mi, that the claims of all Clusters together take up in the hub's etcd, including ended ones. A Cluster "+
			"that already has as many as remain free gets no more, apart from its first 4Mi. 0 disables the limit.")
	flags.IntVar(&o.MaxCreationsPerMinute, "max-creations-per-minute", o.MaxCreationsPerMinute,
		"Maximum number of claims that may be created in one node group within a minute. Further claims are refused until the minute has "+
			"passed. 0 disables the limit.")
	flags.IntVar(&o.MaxReleasesPerWindow, "max-releases-per-window", o.MaxReleasesPerWindow,
		"Maximum number of claims with a Machine that may be released in one Cluster within --release-window. It limits how many Machines a mistake "+
			"can remove. Further releases are refused until the window has room again. 0 disables the limit.")
	flags.DurationVar(&o.ReleaseWindow, "release-window", o.ReleaseWindow,
		"Length of the window of --max-releases-per-window.")
	flags.DurationVar(&o.CollectGracePeriod, "collect-grace-period", o.CollectGracePeriod,
		"Minimum age a claim must have, relative to the holder's listing, before SyncClaims may collect it.")
	flags.DurationVar(&o.SyncTokenLifetime, "sync-token-lifetime", o.SyncTokenLifetime,
		"Maximum time between a holder's listing of its claims and the SyncClaims call with its live set.")
	flags.BoolVar(&o.KnownFailures, "known-failures", o.KnownFailures,
		"Fail a claim when the infrastructure of its Machine reports a failure that its provider is known not to recover from: no capacity, an "+
			"exhausted quota, an invalid configuration. If false, only --failure-reasons do.")
	flags.StringSliceVar(&o.FailureReasons, "failure-reasons", o.FailureReasons,
		"Additional reasons of a Machine's InfrastructureReady condition that fail its claim, as the infrastructure provider writes them. "+
			"An entry with a kind, such as AWSMachine/InstanceProvisionFailed, applies only to Machines with that kind of infrastructure.")
	flags.StringVar(&o.InstanceName, "instance-name", o.InstanceName,
		"Name that distinguishes this agent from others in the hub. An agent that restarts under the same name resumes its unfinished work at "+
			"once. Defaults to the host name, which in a pod is the pod's name.")
	flags.DurationVar(&o.MachineObjectDeadline, "machine-object-deadline", o.MachineObjectDeadline,
		"How long a claim waits for its Machine object before it fails. 0 disables the deadline.")
	flags.DurationVar(&o.MachineProviderIDDeadline, "machine-provider-id-deadline", o.MachineProviderIDDeadline,
		"How long a claim waits for its Machine's provider ID before it is released as late, and its Machine handed over to the next claim. After "+
			"three times as long, the Machine fails. 0 disables the deadline.")
	flags.DurationVar(&o.MachineNodeDeadline, "machine-node-deadline", o.MachineNodeDeadline,
		"How long a claim waits for its Machine's Node before it is released as late, and its Machine handed over to the next claim. After three "+
			"times as long, the Machine fails. 0 disables the deadline.")
	flags.DurationVar(&o.FailureCoolDown, "failure-cool-down", o.FailureCoolDown,
		"How long a node group refuses claims after a failure, at most --tombstone-retention. 0 disables the cool-down.")
	flags.BoolVar(&o.PublishNodePools, "publish-node-pools", o.PublishNodePools,
		"Publish the NodePools and NodeClasses of NodePoolSets to the spokes, and show the status of the spokes' NodePools. Requires "+
			"the CustomResourceDefinition of NodePoolSets, and shims with --published-node-pools.")
	flags.StringVar(&o.PriceList, "price-list", o.PriceList,
		"ConfigMap with the price list under the key prices.yaml, as `namespace/name`. Reloaded when it changes. If empty, there is no price list.")
	flags.StringVar(&o.PriceCurrency, "price-currency", o.PriceCurrency,
		"ISO 4217 code of the currency of prices in annotations, and in a price list without a currency. If empty, prices have no currency.")
	flags.Float64Var(&o.PricePerCPU, "price-per-cpu", o.PricePerCPU, "Price of a CPU core per hour, for price estimates.")
	flags.Float64Var(&o.PricePerGiB, "price-per-gib", o.PricePerGiB, "Price of a GiB of memory per hour, for price estimates.")
	flags.Float64Var(&o.PricePerGPU, "price-per-gpu", o.PricePerGPU,
		"Price per hour of one unit of an extended resource or of one device, for price estimates.")
	flags.Float64Var(&o.PriceSpotShare, "price-spot-share", o.PriceSpotShare,
		"Ratio of a spot machine's price to that of the same machine on demand, for price estimates: above 0, at most 1.")
	flags.DurationVar(&o.HeartbeatInterval, "heartbeat-interval", o.HeartbeatInterval,
		"How long a watch stream may be idle before a heartbeat is sent, at most 20s. Clients end a stream that has been silent for 30s.")
	flags.IntVar(&o.WatchBuffer, "watch-buffer", o.WatchBuffer,
		"Number of changed objects that are buffered for a watcher that reads slowly. Beyond it, the watcher gets a new snapshot.")
	flags.DurationVar(&o.ShutdownGracePeriod, "shutdown-grace-period", o.ShutdownGracePeriod,
		"How long calls in flight may take to finish at shutdown.")
	flags.DurationVar(&o.MaxConnectionAge, "max-connection-age", o.MaxConnectionAge,
		"Maximum age of a connection, plus or minus 10 %. Its client then chooses an agent anew, so clients are spread over all agents "+
			"again this long after a rollout. At least 1m.")
	flags.BoolVar(&o.GRPCReflection, "grpc-reflection", o.GRPCReflection,
		"Serve gRPC reflection, with which grpcurl and other tools learn the API from the agent, to every caller with a valid certificate.")
	o.addLimitFlags(flags)
}

func (o *Options) addLimitFlags(flags *pflag.FlagSet) {
	flags.Float64Var(&o.Limits.CallsPerSecond, "limit-calls-per-second", o.Limits.CallsPerSecond,
		"Average number of calls per second of one identity. Each 16 KiB of a request count as one more call.")
	flags.IntVar(&o.Limits.CallBurst, "limit-call-burst", o.Limits.CallBurst,
		"Number of calls of one identity that may exceed --limit-calls-per-second at once.")
	flags.IntVar(&o.Limits.CallsAtOnce, "limit-calls-at-once", o.Limits.CallsAtOnce, "Maximum number of open calls of one identity.")
	flags.IntVar(&o.Limits.WatchesAtOnce, "limit-watches-at-once", o.Limits.WatchesAtOnce, "Maximum number of open watch streams of one identity.")
	flags.IntVar(&o.Limits.AllConnections, "limit-all-connections", o.Limits.AllConnections,
		"Maximum number of connections of all identities together. An identity that already has as many as "+
			"remain free gets no more, apart from its first 4. At least 32, twice what one identity may have.")
	flags.IntVar(&o.Limits.AllCallsAtOnce, "limit-all-calls-at-once", o.Limits.AllCallsAtOnce,
		"Maximum number of open calls of all identities together. An identity that already has as many as "+
			"remain free gets no more, apart from its first 8. At least twice --limit-calls-at-once.")
	flags.IntVar(&o.Limits.AllWatchesAtOnce, "limit-all-watches-at-once", o.Limits.AllWatchesAtOnce,
		"Maximum number of open watch streams of all identities together. An identity that already has as many as "+
			"remain free gets no more, apart from its first 8. At least twice --limit-watches-at-once.")
	flags.IntVar(&o.Limits.HubCallsAtOnce, "limit-hub-calls-at-once", o.Limits.HubCallsAtOnce,
		"Maximum number of calls of one identity that send requests to the hub's API server at the same time. Its other calls wait.")
	flags.DurationVar(&o.Limits.RequestTimeout, "limit-request-timeout", o.Limits.RequestTimeout, "Time within which a request must arrive.")
	flags.DurationVar(&o.Limits.CallTimeout, "limit-call-timeout", o.Limits.CallTimeout,
		"Deadline of calls that have none, except for watches. A SyncClaims is cut off this long after it may be decoded, "+
			"whatever its deadline.")
	flags.DurationVar(&o.Limits.MaxCallTimeout, "limit-max-call-timeout", o.Limits.MaxCallTimeout, "Maximum deadline of a call.")
	flags.DurationVar(&o.Limits.SendTimeout, "limit-send-timeout", o.Limits.SendTimeout,
		"How long a caller may leave a response or an event unread before its connection is closed.")
}

// AddScopeFlags adds the flags that select the hub and the part of it to serve.
func (o *Options) AddScopeFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig,
		"Kubeconfig `file` of the hub. Defaults to the KUBECONFIG variable, else ~/.kube/config, else the pod's service account.")
	flags.StringSliceVar(&o.Namespaces, "namespaces", o.Namespaces,
		"Namespaces of the hub whose Clusters are served. If this and --clusters are empty, all are.")
	flags.StringSliceVar(&o.Clusters, "clusters", o.Clusters,
		"Clusters that are served in addition to those in --namespaces, as `namespace/name`.")
}

// EnvironmentVariable returns the name of the environment variable for a flag.
func EnvironmentVariable(flag string) string {
	return EnvironmentPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// FromEnvironment sets every flag that is missing on the command line from its environment
// variable, if that is set.
func FromEnvironment(flags *pflag.FlagSet) error {
	var errs []error
	flags.VisitAll(func(flag *pflag.Flag) {
		name := EnvironmentVariable(flag.Name)
		value, present := os.LookupEnv(name)
		if flag.Changed || !present {
			return
		}
		if err := flags.Set(flag.Name, value); err != nil {
			errs = append(errs, fmt.Errorf("%s=%q: %w", name, value, err))
		}
	})
	return errors.Join(errs...)
}

// These are the values of LogLevel.
const (
	LogError = "error"
	LogInfo  = "info"
	LogDebug = "debug"
	LogTrace = "trace"
)

// These are the values of LogFormat.
const (
	LogJSON    = "json"
	LogConsole = "console"
)

// Validate returns all mistakes. Each contains the flag's name and what to do.
func (o *Options) Validate() error {
	var errs []error
	wrong := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %s", flag, fmt.Sprintf(format, args...)))
	}
	o.validateListeners(wrong)
	o.validateIssuer(wrong)
	if !trustDomain.MatchString(o.TrustDomain) {
		wrong("trust-domain", "%q is not a SPIFFE trust domain; use lower-case letters, digits, dots, dashes and underscores", o.TrustDomain)
	}
	if _, err := ParseName(o.Policy); o.Policy != "" && err != nil {
		wrong("policy", "%q is not <namespace>/<name> of a ConfigMap", o.Policy)
	}
	if o.Policy != "" && o.PolicyFile != "" {
		wrong("policy", "excludes --policy-file; leave one of them out")
	}
	o.validateScope(wrong)
	for _, pattern := range o.AdditionalSyncMachineLabels {
		if _, err := regexp.Compile(pattern); err != nil {
			wrong("additional-sync-machine-labels", "%v", err)
		}
	}
	if !slices.Contains(architectures, o.DefaultArchitecture) {
		wrong("default-architecture", "%q is not one of %s", o.DefaultArchitecture, strings.Join(architectures, ", "))
	}
	if o.KubeAPIQPS <= 0 {
		wrong("kube-api-qps", "%v is not above 0", o.KubeAPIQPS)
	}
	if o.MemoryLimit < 0 {
		wrong("memory-limit", "%d is below 0", o.MemoryLimit)
	}
	if o.KubeAPIBurst < 1 {
		wrong("kube-api-burst", "%d is below 1", o.KubeAPIBurst)
	}
	for flag, address := range map[string]string{
		"metrics-bind-address": o.MetricsBindAddress, "health-probe-bind-address": o.HealthProbeBindAddress,
	} {
		if _, _, err := net.SplitHostPort(address); address != "0" && err != nil {
			wrong(flag, "%q is neither host:port nor 0", address)
		}
	}
	o.validateMetrics(wrong)
	if levels := []string{LogError, LogInfo, LogDebug, LogTrace}; !slices.Contains(levels, o.LogLevel) {
		wrong("log-level", "%q is not one of %s", o.LogLevel, strings.Join(levels, ", "))
	}
	if formats := []string{LogJSON, LogConsole}; !slices.Contains(formats, o.LogFormat) {
		wrong("log-format", "%q is not one of %s", o.LogFormat, strings.Join(formats, ", "))
	}
	for flag, d := range map[string]time.Duration{
		"spare-grace-period": o.SpareGracePeriod, "tombstone-retention": o.TombstoneRetention,
		"heartbeat-interval": o.HeartbeatInterval, "shutdown-grace-period": o.ShutdownGracePeriod,
		"collect-grace-period": o.CollectGracePeriod, "sync-token-lifetime": o.SyncTokenLifetime,
	} {
		if d <= 0 {
			wrong(flag, "%s is not above 0", d)
		}
	}
	if o.HeartbeatInterval > maxHeartbeatInterval {
		wrong("heartbeat-interval", "%s is above %s: clients end a stream that has been silent for 30s", o.HeartbeatInterval, maxHeartbeatInterval)
	}
	if o.MaxConnectionAge < minConnectionAge {
		wrong("max-connection-age", "%s is below %s", o.MaxConnectionAge, minConnectionAge)
	}
	for flag, d := range map[string]time.Duration{
		"machine-object-deadline": o.MachineObjectDeadline, "machine-provider-id-deadline": o.MachineProviderIDDeadline,
		"machine-node-deadline": o.MachineNodeDeadline, "failure-cool-down": o.FailureCoolDown,
	} {
		if d < 0 {
			wrong(flag, "%s is below 0", d)
		}
	}
	for _, reason := range o.FailureReasons {
		if !failureReason.MatchString(reason) {
			wrong("failure-reasons", "%q is neither a condition's reason nor <kind>/<reason>", reason)
		}
	}
	if o.FailureCoolDown > o.TombstoneRetention {
		wrong("failure-cool-down", "%s is above --tombstone-retention %s: the failed claims that it follows from are forgotten by then",
			o.FailureCoolDown, o.TombstoneRetention)
	}
	for flag, limit := range map[string]int{
		"max-claims-per-cluster": o.MaxClaimsPerCluster, "max-ended-claims-per-cluster": o.MaxEndedClaimsPerCluster,
		"max-creations-per-minute": o.MaxCreationsPerMinute, "max-releases-per-window": o.MaxReleasesPerWindow,
		"max-all-ended-claims": o.MaxAllEndedClaims,
	} {
		if limit < 0 {
			wrong(flag, "%d is below 0; write 0 for no limit", limit)
		}
	}
	for flag, limit := range map[string]*resource.QuantityValue{
		"max-claim-bytes-per-cluster": &o.MaxClaimBytesPerCluster, "max-all-claim-bytes": &o.MaxAllClaimBytes,
	} {
		if limit.Sign() < 0 {
			wrong(flag, "%s is below 0; write 0 for no limit", limit.String())
		}
	}
	if o.ReleaseWindow <= 0 || o.MaxReleasesPerWindow > 0 && o.ReleaseWindow > o.TombstoneRetention {
		wrong("release-window", "%s is not above 0 and at most --tombstone-retention %s: releases are counted by the claims that are remembered",
			o.ReleaseWindow, o.TombstoneRetention)
	}
	o.validatePrices(wrong)
	o.validateLimits(wrong)
	if o.WatchBuffer < 1 {
		wrong("watch-buffer", "%d is below 1", o.WatchBuffer)
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// ValidateScope returns all mistakes in the flags of [Options.AddScopeFlags].
func (o *Options) ValidateScope() error {
	var errs []error
	o.validateScope(func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %s", flag, fmt.Sprintf(format, args...)))
	})
	return errors.Join(errs...)
}

func (o *Options) validateMetrics(wrong func(flag, format string, args ...any)) {
	switch {
	case (o.MetricsTLSCertFile == "") != (o.MetricsTLSKeyFile == ""):
		wrong("metrics-tls-cert-file", "goes with --metrics-tls-key-file; set both or neither")
	case o.MetricsTLSCertFile != "" && !o.MetricsSecure:
		wrong("metrics-tls-cert-file", "has no effect with --metrics-secure=false; drop one of the two")
	}
}

// MetricsTLS returns the files with the certificate for metrics and its key. Both are empty if the
// agent must generate one.
func (o *Options) MetricsTLS() (certFile, keyFile string) {
	if o.MetricsTLSCertFile != "" {
		return o.MetricsTLSCertFile, o.MetricsTLSKeyFile
	}
	return o.TLSCertFile, o.TLSKeyFile
}

func (o *Options) validateScope(wrong func(flag, format string, args ...any)) {
	for _, namespace := range o.Namespaces {
		if faults := validation.IsDNS1123Label(namespace); len(faults) > 0 {
			wrong("namespaces", "%q is not a namespace: %s", namespace, strings.Join(faults, "; "))
		}
	}
	for _, cluster := range o.Clusters {
		if _, err := ParseName(cluster); err != nil {
			wrong("clusters", "%v of a Cluster", err)
		}
	}
}

func (o *Options) validatePrices(wrong func(flag, format string, args ...any)) {
	if _, err := ParseName(o.PriceList); o.PriceList != "" && err != nil {
		wrong("price-list", "%q is not <namespace>/<name> of a ConfigMap", o.PriceList)
	}
	if o.PriceCurrency != "" && !pricing.IsCurrency(o.PriceCurrency) {
		wrong("price-currency", "%q is not an ISO 4217 code; write for example EUR", o.PriceCurrency)
	}
	for flag, price := range map[string]float64{
		"price-per-cpu": o.PricePerCPU, "price-per-gib": o.PricePerGiB, "price-per-gpu": o.PricePerGPU,
	} {
		if math.IsNaN(price) || math.IsInf(price, 0) || price < 0 {
			wrong(flag, "%v is not a price; write a number, 0 or more", price)
		}
	}
	if share := o.PriceSpotShare; math.IsNaN(share) || share <= 0 || share > 1 {
		wrong("price-spot-share", "%v is not above 0 and at most 1", share)
	}
}

func (o *Options) validateLimits(wrong func(flag, format string, args ...any)) {
	if rate := o.Limits.CallsPerSecond; !(rate > 0) || math.IsInf(rate, 0) {
		wrong("limit-calls-per-second", "%v is not above 0", rate)
	}
	for flag, n := range map[string]int{
		"limit-call-burst": o.Limits.CallBurst, "limit-calls-at-once": o.Limits.CallsAtOnce,
		"limit-watches-at-once": o.Limits.WatchesAtOnce, "limit-hub-calls-at-once": o.Limits.HubCallsAtOnce,
		"limit-all-connections": o.Limits.AllConnections, "limit-all-calls-at-once": o.Limits.AllCallsAtOnce,
		"limit-all-watches-at-once": o.Limits.AllWatchesAtOnce,
	} {
		if n < 1 {
			wrong(flag, "%d is below 1", n)
		}
	}
	for flag, of := range map[string]struct{ all, one int }{
		"limit-all-connections":     {o.Limits.AllConnections, limits.ConnectionsOfCaller},
		"limit-all-calls-at-once":   {o.Limits.AllCallsAtOnce, o.Limits.CallsAtOnce},
		"limit-all-watches-at-once": {o.Limits.AllWatchesAtOnce, o.Limits.WatchesAtOnce},
	} {
		if of.all < 2*of.one {
			wrong(flag, "%d is below twice the %d of one identity, which could not have as many", of.all, of.one)
		}
	}
	for flag, d := range map[string]time.Duration{
		"limit-request-timeout": o.Limits.RequestTimeout, "limit-call-timeout": o.Limits.CallTimeout,
		"limit-max-call-timeout": o.Limits.MaxCallTimeout, "limit-send-timeout": o.Limits.SendTimeout,
	} {
		if d <= 0 {
			wrong(flag, "%s is not above 0", d)
		}
	}
}

// PolicyName returns the parsed Policy. Validate must have passed.
func (o *Options) PolicyName() types.NamespacedName {
	name, err := ParseName(o.Policy)
	if err != nil {
		return types.NamespacedName{}
	}
	return name
}

// PriceListName returns the parsed PriceList. Validate must have passed.
func (o *Options) PriceListName() types.NamespacedName {
	name, err := ParseName(o.PriceList)
	if err != nil {
		return types.NamespacedName{}
	}
	return name
}

// Pricing returns the pricing policy. It does not include the price list.
func (o *Options) Pricing() pricing.Policy {
	return pricing.Policy{Currency: o.PriceCurrency, Coefficients: pricing.Coefficients{
		PerCPU: o.PricePerCPU, PerGiB: o.PricePerGiB, PerAccelerator: o.PricePerGPU, SpotShare: o.PriceSpotShare,
	}}
}

// FailurePolicy returns the policy for giving up Machines.
func (o *Options) FailurePolicy() protocol.FailurePolicy {
	return protocol.FailurePolicy{
		Known:              o.KnownFailures,
		Reasons:            o.FailureReasons,
		ObjectDeadline:     o.MachineObjectDeadline,
		ProviderIDDeadline: o.MachineProviderIDDeadline,
		NodeDeadline:       o.MachineNodeDeadline,
		CoolDown:           o.FailureCoolDown,
	}
}

// failureReason matches a condition reason as Kubernetes defines it, optionally after the kind of
// an object.
var failureReason = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9]*/)?[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`)

var trustDomain = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)

// UnixSocketGrant returns the grant of callers on the unix socket. Validate must have passed.
func (o *Options) UnixSocketGrant() authz.Grant {
	grant, err := authz.ParseGrant(o.UnixSocketRole, o.UnixSocketClusters)
	if err != nil {
		return authz.Grant{}
	}
	return grant
}

func (o *Options) validateUnixSocket(wrong func(flag, format string, args ...any)) {
	if o.ListenUnixSocket == "" {
		if o.UnixSocketRole != "" || len(o.UnixSocketClusters) > 0 {
			wrong("unix-socket-role", "it and --unix-socket-clusters have no effect without --listen-unix-socket; set that, or drop them")
		}
		return
	}
	if o.UnixSocketRole == "" {
		wrong("unix-socket-role", "must be set with --listen-unix-socket, as every process that can open the socket has this role; a shim needs cluster")
		return
	}
	if _, err := authz.ParseGrant(o.UnixSocketRole, o.UnixSocketClusters); err != nil {
		wrong("unix-socket-role", "with --unix-socket-clusters: %v", err)
	}
}

func (o *Options) validateListeners(wrong func(flag, format string, args ...any)) {
	o.validateUnixSocket(wrong)
	if o.ListenAddress == "" {
		if o.ListenUnixSocket == "" {
			wrong("listen-address", "nothing would be served; set it, or --listen-unix-socket")
		}
		if o.PlaintextLoopback {
			wrong("plaintext-loopback", "needs --listen-address with a loopback address")
		}
		return
	}
	host, _, err := net.SplitHostPort(o.ListenAddress)
	if err != nil {
		wrong("listen-address", "%q is not host:port, for example :8443", o.ListenAddress)
	}
	if o.PlaintextLoopback {
		if ip := net.ParseIP(host); err == nil && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			wrong("plaintext-loopback", "--listen-address %q is not a loopback address; listen on 127.0.0.1, or use TLS", o.ListenAddress)
		}
		for flag, file := range map[string]string{
			"tls-cert-file": o.TLSCertFile, "tls-key-file": o.TLSKeyFile, "client-ca-file": o.ClientCAFile,
		} {
			if file != "" {
				wrong(flag, "has no effect with --plaintext-loopback; drop one of the two")
			}
		}
		return
	}
	for flag, file := range map[string]string{
		"tls-cert-file": o.TLSCertFile, "tls-key-file": o.TLSKeyFile, "client-ca-file": o.ClientCAFile,
	} {
		if file == "" {
			wrong(flag, "is needed to serve --listen-address with mutual TLS; set it, or --plaintext-loopback on a loopback address")
		}
	}
}

// maxHeartbeatInterval leaves a client time that ends a silent stream after three of pkg/client's
// heartbeat intervals.
const maxHeartbeatInterval = 20 * time.Second

// minConnectionAge leaves watches time for more than their first snapshot.
const minConnectionAge = time.Minute

// minCertificateLifetime leaves a shim enough time to renew while the agent or the hub restarts.
const minCertificateLifetime = 10 * time.Minute

func (o *Options) validateIssuer(wrong func(flag, format string, args ...any)) {
	switch {
	case (o.IssuerCertFile == "") != (o.IssuerKeyFile == ""):
		wrong("issuer-cert-file", "goes with --issuer-key-file; set both or neither")
	case o.IssuerCertFile != "" && o.ClientCAFile == "":
		wrong("issuer-cert-file", "needs --client-ca-file, without which no certificate is accepted")
	}
	if o.ServerCAFile != "" && o.IssuerCertFile == "" {
		wrong("server-ca-file", "has no effect without --issuer-cert-file; drop one of the two")
	}
	if o.CertificateLifetime < minCertificateLifetime {
		wrong("certificate-lifetime", "%s is below %s", o.CertificateLifetime, minCertificateLifetime)
	}
}

// ParseName parses <namespace>/<name>.
func ParseName(text string) (types.NamespacedName, error) {
	namespace, name, found := strings.Cut(text, "/")
	if !found || len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return types.NamespacedName{}, fmt.Errorf("%q is not <namespace>/<name>", text)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// ClusterNames returns the parsed Clusters. Validate must have passed.
func (o *Options) ClusterNames() []types.NamespacedName {
	clusters := make([]types.NamespacedName, 0, len(o.Clusters))
	for _, text := range o.Clusters {
		if cluster, err := ParseName(text); err == nil {
			clusters = append(clusters, cluster)
		}
	}
	return clusters
}

// architectures are those that Kubernetes is released for.
var architectures = []string{"amd64", "arm64", "ppc64le", "s390x"}

// MachineSettings returns the settings for the machines of all node groups. Validate must have
// passed.
func (o *Options) MachineSettings() capacity.Settings {
	patterns := make([]*regexp.Regexp, 0, len(o.AdditionalSyncMachineLabels))
	for _, text := range o.AdditionalSyncMachineLabels {
		if pattern, err := regexp.Compile(text); err == nil {
			patterns = append(patterns, pattern)
		}
	}
	return capacity.Settings{SyncedLabels: patterns, Architecture: o.DefaultArchitecture}
}
