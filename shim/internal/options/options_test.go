package options_test

import (
	"flag"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/options"
)

func parse(t *testing.T, args ...string) (*options.Options, error) {
	t.Helper()
	fs := &coreoptions.FlagSet{FlagSet: flag.NewFlagSet("karpenter", flag.ContinueOnError)}
	fs.SetOutput(io.Discard)
	core, shim := &coreoptions.Options{}, &options.Options{}
	core.AddFlags(fs)
	shim.AddFlags(fs)
	return shim, shim.Parse(fs, args...)
}

var minimal = []string{"--agent-address=127.0.0.1:8443", "--agent-plaintext-loopback", "--cluster-namespace=fleet", "--cluster-name=berlin"}

func TestMinimalFlagsGiveTheDefaults(t *testing.T) {
	o, err := parse(t, minimal...)
	require.NoError(t, err)
	assert.Equal(t, 10*time.Second, o.AgentTimeout)
	assert.Equal(t, 5*time.Minute, o.LaunchTimeout)
	assert.Equal(t, time.Minute, o.ClaimSyncInterval)
	assert.Equal(t, 2*time.Minute, o.HubUnreachableGracePeriod)
	assert.Equal(t, 30*time.Minute, o.NodeRepairAfter)
	assert.Empty(t, o.NodeLabelKeys())
}

var overTLS = []string{"--agent-address=agent:8443", "--cluster-namespace=fleet", "--cluster-name=berlin"}

func TestTheIdentityIsInASecretWithItsBootstrapBesideIt(t *testing.T) {
	o, err := parse(t, append(overTLS[:3:3], "--agent-identity-secret=karpenter/identity")...)
	require.NoError(t, err)
	assert.Equal(t, types.NamespacedName{Namespace: "karpenter", Name: "identity"}, o.AgentIdentitySecret)
	assert.Equal(t, types.NamespacedName{Namespace: "karpenter", Name: "karpenter-agent-bootstrap"}, o.AgentBootstrapSecret)

	t.Setenv("AGENT_IDENTITY_SECRET", "karpenter/identity")
	t.Setenv("AGENT_BOOTSTRAP_SECRET", "onboarding/berlin")
	o, err = parse(t, overTLS...)
	require.NoError(t, err)
	assert.Equal(t, types.NamespacedName{Namespace: "karpenter", Name: "identity"}, o.AgentIdentitySecret)
	assert.Equal(t, types.NamespacedName{Namespace: "onboarding", Name: "berlin"}, o.AgentBootstrapSecret)
}

func TestFilesNeedNoIdentity(t *testing.T) {
	o, err := parse(t, append(overTLS[:3:3], "--agent-tls-cert-file=c", "--agent-tls-key-file=k", "--agent-ca-file=ca")...)
	require.NoError(t, err)
	assert.Empty(t, o.AgentIdentitySecret)
	assert.Empty(t, o.AgentBootstrapSecret)
}

func TestEnvironmentStandsInForFlagsAndFlagsWin(t *testing.T) {
	t.Setenv("AGENT_ADDRESS", "unix:///run/agent.sock")
	t.Setenv("CLUSTER_NAMESPACE", "fleet")
	t.Setenv("CLUSTER_NAME", "berlin")
	t.Setenv("AGENT_TIMEOUT", "3s")
	t.Setenv("NODE_LABEL_KEYS", "team,example.com/rack,topology.ebs.csi.aws.com/zone")
	o, err := parse(t, "--cluster-name=paris")
	require.NoError(t, err)
	assert.Equal(t, "unix:///run/agent.sock", o.AgentAddress)
	assert.Equal(t, "paris", o.ClusterName)
	assert.Equal(t, 3*time.Second, o.AgentTimeout)
	assert.Equal(t, []string{"team", "example.com/rack", "topology.ebs.csi.aws.com/zone"}, o.NodeLabelKeys())
}

func TestUnusableEnvironmentIsAnErrorThatNamesIt(t *testing.T) {
	t.Setenv("AGENT_TIMEOUT", "soon")
	_, err := parse(t, minimal...)
	assert.ErrorContains(t, err, `AGENT_TIMEOUT="soon" (--agent-timeout)`)
}

func TestErrorsNameTheFlagAtFault(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"nothing given": {nil, []string{"--agent-address is required", "--cluster-namespace is required", "--cluster-name is required"}},
		"no port":       {[]string{"--agent-address=agent"}, []string{`--agent-address "agent"`, "host:port"}},
		"relative unix": {[]string{"--agent-address=unix://agent.sock"}, []string{"absolute path"}},
		"no TLS files": {
			[]string{"--agent-address=agent:8443"},
			[]string{"--agent-tls-cert-file is required", "--agent-tls-key-file is required", "--agent-ca-file is required"},
		},
		"an identity and files": {
			append(overTLS[:3:3], "--agent-identity-secret=karpenter/identity", "--agent-ca-file=ca.crt"),
			[]string{"--agent-ca-file excludes --agent-identity-secret"},
		},
		"an identity without a namespace": {
			append(overTLS[:3:3], "--agent-identity-secret=identity"), []string{`--agent-identity-secret "identity"`, "namespace/name", "no slash"},
		},
		"a bootstrap secret that cannot be": {
			append(overTLS[:3:3], "--agent-identity-secret=a/b", "--agent-bootstrap-secret=a/B_"), []string{`--agent-bootstrap-secret "a/B_"`, "lower"},
		},
		"one secret for both": {
			append(overTLS[:3:3], "--agent-identity-secret=a/b", "--agent-bootstrap-secret=a/b"), []string{"are both a/b"},
		},
		"a bootstrap without an identity": {
			append(minimal[:4:4], "--agent-bootstrap-secret=a/b"), []string{"--agent-bootstrap-secret has no effect without --agent-identity-secret"},
		},
		"an identity without TLS": {
			append(minimal[:4:4], "--agent-identity-secret=a/b"), []string{"--agent-identity-secret has no effect with --agent-plaintext-loopback"},
		},
		"an identity on a socket": {
			[]string{"--agent-address=unix:///run/agent.sock", "--agent-identity-secret=a/b"}, []string{"has no effect with a unix socket"},
		},
		"plaintext to elsewhere": {
			[]string{"--agent-address=10.0.0.1:8443", "--agent-plaintext-loopback"},
			[]string{"--agent-plaintext-loopback", "not a loopback address"},
		},
		"bad cluster name": {
			append(minimal[:2:2], "--cluster-namespace=a.b", "--cluster-name=Berlin"),
			[]string{`--cluster-namespace "a.b"`, `--cluster-name "Berlin"`},
		},
		"time-out too short":                 {append(minimal[:4:4], "--agent-timeout=1ms"), []string{"--agent-timeout 1ms: must be at least"}},
		"negative grace":                     {append(minimal[:4:4], "--hub-unreachable-grace-period=-1s"), []string{"--hub-unreachable-grace-period"}},
		"bad bind address":                   {append(minimal[:4:4], "--metrics-bind-address=localhost"), []string{"--metrics-bind-address"}},
		"metrics' certificate without a key": {append(minimal[:4:4], "--metrics-tls-cert-file=tls.crt"), []string{"--metrics-tls-key-file"}},
		"certificate of open metrics": {
			append(minimal[:4:4], "--metrics-secure=false", "--metrics-tls-cert-file=tls.crt", "--metrics-tls-key-file=tls.key"),
			[]string{"--metrics-secure=false"},
		},
		"Karpenter's label": {
			append(minimal[:4:4], "--node-label-keys=karpenter.sh/registered"), []string{"--node-label-keys", "karpenter.sh/registered"},
		},
		"the host's name": {append(minimal[:4:4], "--node-label-keys=kubernetes.io/hostname"), []string{"--node-label-keys", "kubernetes.io/hostname"}},
		"an old name": {
			append(minimal[:4:4], "--node-label-keys=beta.kubernetes.io/arch"), []string{"--node-label-keys", "old name of kubernetes.io/arch"},
		},
		"a label that core's metrics have": {
			append(minimal[:4:4], "--node-label-keys=example.com/node-name"), []string{"--node-label-keys", "example.com/node-name", "node_name"},
		},
		"bad label key": {append(minimal[:4:4], "--node-label-keys=a b"), []string{"--node-label-keys", `"a b"`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(t, c.args...)
			require.Error(t, err)
			for _, want := range c.want {
				assert.ErrorContains(t, err, want)
			}
		})
	}
}

func TestWhatIsNoFlagIsNotIgnored(t *testing.T) {
	for _, args := range [][]string{{"--disable-leader-election", "false", "--feature-gates=NodeRepair=true"}, {"plan-adoption"}} {
		_, err := parse(t, append(minimal[:4:4], args...)...)
		require.ErrorContains(t, err, "is not a flag")
	}
}

func TestASettingWithoutEffectIsAcceptedWithAWarning(t *testing.T) {
	for name, c := range map[string]struct{ variable, value, flag, instead string }{
		"an expression":        {"MACHINE_FAILURE_REASONS", "failed$", "--machine-failure-reasons", "--failure-reasons of the agent"},
		"what never was one":   {"MACHINE_FAILURE_REASONS", "(", "--machine-failure-reasons", "--failure-reasons of the agent"},
		"a deadline":           {"MACHINE_PROGRESS_DEADLINE", "10m", "--machine-progress-deadline", "spec.maxNodeProvisionTime"},
		"what is not a number": {"MACHINE_PROGRESS_DEADLINE", "soon", "--machine-progress-deadline", "spec.maxNodeProvisionTime"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(c.variable, c.value)
			o, err := parse(t, minimal...)
			require.NoError(t, err)
			require.Len(t, o.Deprecated(), 1)
			assert.Contains(t, o.Deprecated()[0], c.flag)
			assert.Contains(t, o.Deprecated()[0], c.instead)
		})
	}
	o, err := parse(t, minimal...)
	require.NoError(t, err)
	assert.Empty(t, o.Deprecated())
}
