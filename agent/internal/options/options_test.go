package options_test

import (
	"math"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

func valid() *options.Options {
	o := options.New()
	o.TLSCertFile, o.TLSKeyFile, o.ClientCAFile = "tls.crt", "tls.key", "ca.crt"
	return o
}

func TestDefaultsWithCertificatesAreValid(t *testing.T) {
	require.NoError(t, valid().Validate())
}

func TestEveryMistakeNamesItsFlag(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*options.Options)
		want   string
	}{
		"no certificate":                 {func(o *options.Options) { o.TLSCertFile = "" }, "--tls-cert-file: is needed"},
		"no key":                         {func(o *options.Options) { o.TLSKeyFile = "" }, "--tls-key-file: is needed"},
		"no client CA":                   {func(o *options.Options) { o.ClientCAFile = "" }, "--client-ca-file: is needed"},
		"no listener":                    {func(o *options.Options) { o.ListenAddress = "" }, "--listen-address: nothing would be served"},
		"no port":                        {func(o *options.Options) { o.ListenAddress = "localhost" }, "--listen-address: \"localhost\" is not host:port"},
		"plaintext for everyone":         {func(o *options.Options) { o.PlaintextLoopback = true }, "--listen-address \":8443\" is not a loopback"},
		"plaintext on another host":      {func(o *options.Options) { o.PlaintextLoopback, o.ListenAddress = true, "10.0.0.1:1" }, "--plaintext-loopback"},
		"plaintext with certificates":    {func(o *options.Options) { o.PlaintextLoopback, o.ListenAddress = true, "[::1]:1" }, "--tls-cert-file: has no"},
		"trust domain":                   {func(o *options.Options) { o.TrustDomain = "Not A Domain" }, "--trust-domain"},
		"namespace":                      {func(o *options.Options) { o.Namespaces = []string{"a/b"} }, "--namespaces"},
		"cluster":                        {func(o *options.Options) { o.Clusters = []string{"spoke"} }, "--clusters: \"spoke\" is not <namespace>/<name>"},
		"no architecture":                {func(o *options.Options) { o.DefaultArchitecture = "" }, "--default-architecture"},
		"another name of arm64":          {func(o *options.Options) { o.DefaultArchitecture = "aarch64" }, "not one of amd64, arm64"},
		"label pattern":                  {func(o *options.Options) { o.AdditionalSyncMachineLabels = []string{"("} }, "--additional-sync-machine-labels"},
		"qps":                            {func(o *options.Options) { o.KubeAPIQPS = 0 }, "--kube-api-qps"},
		"burst":                          {func(o *options.Options) { o.KubeAPIBurst = 0 }, "--kube-api-burst"},
		"memory limit":                   {func(o *options.Options) { o.MemoryLimit = -1 }, "--memory-limit"},
		"metrics address":                {func(o *options.Options) { o.MetricsBindAddress = "no" }, "--metrics-bind-address"},
		"probe address":                  {func(o *options.Options) { o.HealthProbeBindAddress = "no" }, "--health-probe-bind-address"},
		"log level":                      {func(o *options.Options) { o.LogLevel = "loud" }, "--log-level"},
		"log format":                     {func(o *options.Options) { o.LogFormat = "xml" }, "--log-format"},
		"negative grace":                 {func(o *options.Options) { o.SpareGracePeriod = -1 }, "--spare-grace-period"},
		"no retention":                   {func(o *options.Options) { o.TombstoneRetention = 0 }, "--tombstone-retention"},
		"fewer claims than none":         {func(o *options.Options) { o.MaxClaimsPerCluster = -1 }, "--max-claims-per-cluster"},
		"less storage than none":         {func(o *options.Options) { o.MaxClaimBytesPerCluster.Neg() }, "--max-claim-bytes-per-cluster"},
		"fewer ended claims":             {func(o *options.Options) { o.MaxEndedClaimsPerCluster = -1 }, "--max-ended-claims-per-cluster"},
		"fewer ended claims of all":      {func(o *options.Options) { o.MaxAllEndedClaims = -1 }, "--max-all-ended-claims"},
		"less storage of all than none":  {func(o *options.Options) { o.MaxAllClaimBytes.Neg() }, "--max-all-claim-bytes"},
		"no heartbeat":                   {func(o *options.Options) { o.HeartbeatInterval = 0 }, "--heartbeat-interval"},
		"rare heartbeats":                {func(o *options.Options) { o.HeartbeatInterval = 30 * time.Second }, "--heartbeat-interval"},
		"no buffer":                      {func(o *options.Options) { o.WatchBuffer = 0 }, "--watch-buffer"},
		"policy":                         {func(o *options.Options) { o.Policy = "policy" }, "--policy: \"policy\" is not <namespace>/<name>"},
		"two policies":                   {func(o *options.Options) { o.Policy, o.PolicyFile = "hub/p", "file" }, "--policy: excludes --policy-file"},
		"price list":                     {func(o *options.Options) { o.PriceList = "prices" }, "--price-list: \"prices\" is not <namespace>/<name>"},
		"currency":                       {func(o *options.Options) { o.PriceCurrency = "euro" }, "--price-currency"},
		"negative price of a CPU":        {func(o *options.Options) { o.PricePerCPU = -1 }, "--price-per-cpu"},
		"price of memory":                {func(o *options.Options) { o.PricePerGiB = math.NaN() }, "--price-per-gib"},
		"price of a GPU":                 {func(o *options.Options) { o.PricePerGPU = math.Inf(1) }, "--price-per-gpu"},
		"free spot machines":             {func(o *options.Options) { o.PriceSpotShare = 0 }, "--price-spot-share"},
		"spot dearer than on demand":     {func(o *options.Options) { o.PriceSpotShare = 1.1 }, "--price-spot-share"},
		"spot share that is none":        {func(o *options.Options) { o.PriceSpotShare = math.NaN() }, "--price-spot-share"},
		"socket's role without a socket": {func(o *options.Options) { o.UnixSocketRole = "reader" }, "--unix-socket-role"},
		"socket without a role":          {func(o *options.Options) { o.ListenUnixSocket = "/s" }, "--unix-socket-role: must be set"},
		"socket with an unknown role":    {func(o *options.Options) { o.ListenUnixSocket, o.UnixSocketRole = "/s", "root" }, "not one of cluster, reader"},
		"socket of readers of nothing":   {func(o *options.Options) { o.ListenUnixSocket, o.UnixSocketRole = "/s", "reader" }, "*/* for all"},
		"socket of every Cluster's shim": {func(o *options.Options) { o.ListenUnixSocket, o.UnixSocketRole = "/s", "cluster" }, "that of one Cluster"},
		"socket of some Cluster's shim": {func(o *options.Options) {
			o.ListenUnixSocket, o.UnixSocketRole, o.UnixSocketClusters = "/s", "cluster", []string{"fleet/*"}
		}, "that of one Cluster"},
		"socket for a Cluster without a namespace": {func(o *options.Options) {
			o.ListenUnixSocket, o.UnixSocketRole, o.UnixSocketClusters = "/s", "reader", []string{"a"}
		}, "is not <namespace>/<name>"},
		"metrics' certificate without a key": {func(o *options.Options) { o.MetricsTLSCertFile = "tls.crt" }, "--metrics-tls-key-file"},
		"certificate of open metrics": {func(o *options.Options) {
			o.MetricsSecure, o.MetricsTLSCertFile, o.MetricsTLSKeyFile = false, "tls.crt", "tls.key"
		}, "--metrics-secure=false"},
		"connections that end at once": {func(o *options.Options) { o.MaxConnectionAge = time.Second }, "--max-connection-age: 1s is below 1m"},
		"connections of all, for less than two": {
			func(o *options.Options) { o.Limits.AllConnections = 31 }, "--limit-all-connections: 31 is below twice the 16",
		},
		"calls of all, for less than two": {
			func(o *options.Options) { o.Limits.CallsAtOnce = 2001 }, "--limit-all-calls-at-once: 4000 is below twice the 2001",
		},
		"streams of all, for less than two": {
			func(o *options.Options) { o.Limits.AllWatchesAtOnce = 199 }, "--limit-all-watches-at-once: 199 is below twice the 100",
		},
		"no time to shut down": {func(o *options.Options) { o.ShutdownGracePeriod = 0 }, "--shutdown-grace-period"},
	} {
		t.Run(name, func(t *testing.T) {
			o := valid()
			c.change(o)
			require.ErrorContains(t, o.Validate(), c.want)
		})
	}
}

func TestLoopbackPlaintextAndUnixSocketNeedNoCertificates(t *testing.T) {
	o := options.New()
	o.PlaintextLoopback, o.ListenAddress = true, "127.0.0.1:8443"
	require.NoError(t, o.Validate())
	o = options.New()
	o.ListenAddress, o.ListenUnixSocket, o.UnixSocketRole = "", "/run/agent.sock", "admin"
	require.NoError(t, o.Validate())
}

func TestTheSettingsOfMachinesAreThoseOfTheFlags(t *testing.T) {
	o := valid()
	require.Equal(t, "amd64", o.MachineSettings().Architecture)
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(flags)
	require.NoError(t, flags.Parse([]string{"--default-architecture=arm64", "--additional-sync-machine-labels=^a/,^b/"}))
	require.NoError(t, o.Validate())
	settings := o.MachineSettings()
	require.Equal(t, "arm64", settings.Architecture)
	require.Len(t, settings.SyncedLabels, 2)
	require.Equal(t, "^b/", settings.SyncedLabels[1].String())
}

func TestTheUnixSocketsGrantIsAsTheFlagsSay(t *testing.T) {
	o := valid()
	o.ListenUnixSocket, o.UnixSocketRole = "/run/agent.sock", "admin"
	require.NoError(t, o.Validate())
	require.Equal(t, authz.Everything(), o.UnixSocketGrant())
	o.UnixSocketRole, o.UnixSocketClusters = "cluster", []string{"fleet/a"}
	require.NoError(t, o.Validate())
	require.Equal(t, authz.Grant{
		Role: authz.RoleCluster, Clusters: []types.NamespacedName{{Namespace: "fleet", Name: "a"}},
	}, o.UnixSocketGrant())
}

func TestCommandLineWinsOverEnvironment(t *testing.T) {
	t.Setenv("CAPI_AGENT_HEARTBEAT_INTERVAL", "3s")
	t.Setenv("CAPI_AGENT_WATCH_BUFFER", "7")
	t.Setenv("CAPI_AGENT_CLUSTERS", "fleet/a,fleet/b")
	o := options.New()
	flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	o.AddFlags(flags)
	require.NoError(t, flags.Parse([]string{"--watch-buffer=9"}))
	require.NoError(t, options.FromEnvironment(flags))
	require.Equal(t, 3*time.Second, o.HeartbeatInterval)
	require.Equal(t, 9, o.WatchBuffer)
	require.Equal(t, []types.NamespacedName{{Namespace: "fleet", Name: "a"}, {Namespace: "fleet", Name: "b"}}, o.ClusterNames())
}

func TestBadEnvironmentIsNamed(t *testing.T) {
	t.Setenv("CAPI_AGENT_WATCH_BUFFER", "many")
	o := options.New()
	flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	o.AddFlags(flags)
	require.ErrorContains(t, options.FromEnvironment(flags), "CAPI_AGENT_WATCH_BUFFER")
}

func TestPricesAreAsTheFlagsSay(t *testing.T) {
	o := valid()
	flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	o.AddFlags(flags)
	require.Equal(t, pricing.DefaultCoefficients, o.Pricing().Coefficients)
	require.NoError(t, flags.Parse([]string{
		"--price-list=hub/prices", "--price-currency=EUR", "--price-per-cpu=1", "--price-per-gib=2", "--price-per-gpu=3", "--price-spot-share=0.5",
	}))
	require.NoError(t, o.Validate())
	require.Equal(t, types.NamespacedName{Namespace: "hub", Name: "prices"}, o.PriceListName())
	require.Equal(t, pricing.Policy{
		Currency: "EUR", Coefficients: pricing.Coefficients{PerCPU: 1, PerGiB: 2, PerAccelerator: 3, SpotShare: 0.5},
	}, o.Pricing())
}
