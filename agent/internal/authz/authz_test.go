package authz_test

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

var (
	spoke = types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	other = types.NamespacedName{Namespace: "fleet", Name: "other"}
	read  = authz.Methods[agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName]
	claim = authz.Methods[agentv1alpha1.ClaimService_CreateClaim_FullMethodName]

	now = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
)

func chain(t *testing.T, uris ...string) [][]*x509.Certificate {
	t.Helper()
	c := &x509.Certificate{NotAfter: now.Add(time.Hour)}
	for _, text := range uris {
		uri, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		c.URIs = append(c.URIs, uri)
	}
	return [][]*x509.Certificate{{c}}
}

func authorizer(t *testing.T, policy string) *authz.Authorizer {
	t.Helper()
	parsed, err := authz.ParsePolicy([]byte(policy), "karpenter-capi")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authz.New("karpenter-capi", func() *authz.Policy { return parsed }, clocktesting.NewFakePassiveClock(now))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestClusterIdentityMayActForItsClusterAlone(t *testing.T) {
	caller, err := authorizer(t, "identities: []").FromChains(chain(t, "spiffe://karpenter-capi/cluster/fleet/spoke"))
	require.NoError(t, err)
	require.Equal(t, "spiffe://karpenter-capi/cluster/fleet/spoke", caller.Identity)
	require.Equal(t, []string{"cluster"}, caller.Roles())
	for _, rule := range []authz.Rule{read, claim} {
		require.True(t, caller.MayCallFor(rule, spoke))
		require.False(t, caller.MayCallFor(rule, other))
		require.False(t, caller.MaySeeAll(rule))
	}
	clusters, all := caller.Clusters()
	require.False(t, all)
	require.Equal(t, []types.NamespacedName{spoke}, clusters)
}

// The chart passes an empty policy to agents that no policy was written for.
func TestAnEmptyPolicyIsTheSameAsNone(t *testing.T) {
	without, err := authz.New("karpenter-capi", nil, clocktesting.NewFakePassiveClock(now))
	require.NoError(t, err)
	for _, empty := range []string{"identities: []", "{}"} {
		with := authorizer(t, empty)
		for _, uri := range []string{
			"spiffe://karpenter-capi/cluster/fleet/spoke", "spiffe://karpenter-capi/cluster/fleet/spoke/onboarding",
			"spiffe://karpenter-capi/bootstrap/fleet/spoke/onboarding", "spiffe://karpenter-capi/team/observability",
			"spiffe://karpenter-capi/cluster/fleet/spoke/" + v1alpha1.Offboarded, "spiffe://elsewhere/cluster/fleet/spoke",
		} {
			t.Run(empty+" "+uri, func(t *testing.T) {
				chains := chain(t, uri)
				chains[0] = append(chains[0], &x509.Certificate{Raw: []byte("authority"), NotAfter: now.Add(time.Hour)})
				caller, err := with.FromChains(chains)
				expected, expectedErr := without.FromChains(chains)
				require.Equal(t, expected, caller)
				require.Equal(t, expectedErr, err)
			})
		}
	}
}

func TestRolesActAsTheirHoldersAlone(t *testing.T) {
	a := authorizer(t, `
identities:
- id: spiffe://karpenter-capi/cluster-autoscaler/a
  roles: [reader, autoscaler]
  clusters: [fleet/spoke]
- id: spiffe://karpenter-capi/cluster/fleet/other
  roles: [autoscaler]
  clusters: [fleet/spoke]
- id: spiffe://karpenter-capi/admin
  roles: [admin]
  clusters: [fleet/spoke]
`)
	for id, want := range map[string]map[string]bool{
		"cluster/fleet/spoke": {
			"karpenter": true, "unknown": true, "cluster-autoscaler": false, "karpenter-a": false, "a-person": false, "": false,
		},
		"cluster-autoscaler/a": {
			"cluster-autoscaler": true, "cluster-autoscaler-a": true, "cluster-autoscalers": false, "karpenter": false, "unknown": false,
		},
		"cluster/fleet/other": {"cluster-autoscaler": true, "karpenter": false}, // its own role is for another Cluster
		"admin":               {"karpenter": true, "cluster-autoscaler": true, "unknown": true, "a-person": true},
		"nobody":              {"karpenter": false, "cluster-autoscaler": false},
	} {
		caller, err := a.FromChains(chain(t, "spiffe://karpenter-capi/"+id))
		require.NoError(t, err)
		for holder, may := range want {
			t.Run(id+" as "+holder, func(t *testing.T) {
				require.Equal(t, may, caller.Holders(claim, spoke).Has(holder))
				require.False(t, caller.Holders(claim, types.NamespacedName{Namespace: "fleet", Name: "third"}).Has(holder))
			})
		}
	}
}

func TestUnusableIdentities(t *testing.T) {
	for name, uris := range map[string][]string{
		"none":                 {},
		"two":                  {"spiffe://karpenter-capi/cluster/fleet/spoke", "spiffe://karpenter-capi/cluster/fleet/other"},
		"not SPIFFE":           {"https://karpenter-capi/cluster/fleet/spoke"},
		"another trust domain": {"spiffe://elsewhere/cluster/fleet/spoke"},
		"with a query":         {"spiffe://karpenter-capi/cluster/fleet/spoke?x=y"},
		"with dots":            {"spiffe://karpenter-capi/cluster/../spoke"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := authorizer(t, "identities: []").FromChains(chain(t, uris...))
			require.ErrorAs(t, err, new(*authz.UnnamedError))

			leaf := chain(t, uris...)[0][0]
			leaf.SerialNumber = big.NewInt(0x4f001c)
			_, err = authorizer(t, "deny:\n- serial: 4f001c\n").FromChains([][]*x509.Certificate{{leaf}})
			require.ErrorContains(t, err, "the policy denies the client certificate")
			require.NotErrorAs(t, err, new(*authz.UnnamedError))
		})
	}
}

func TestIdentityThatIsNoClusterHasWhatThePolicyGrants(t *testing.T) {
	a := authorizer(t, `
identities:
- id: spiffe://karpenter-capi/team/observability
  roles: [reader]
  allClusters: true
- id: spiffe://karpenter-capi/cluster-autoscaler/a
  roles: [autoscaler]
  clusters: [fleet/spoke]
- id: spiffe://karpenter-capi/cluster/fleet/other
  roles: [reader]
  clusters: [fleet/spoke]
`)
	get := func(id string) authz.Caller {
		caller, err := a.FromChains(chain(t, id))
		require.NoError(t, err)
		return caller
	}
	reader := get("spiffe://karpenter-capi/team/observability")
	require.True(t, reader.MayCallFor(read, other))
	require.True(t, reader.MaySeeAll(read))
	require.False(t, reader.MayCall(claim))
	autoscaler := get("spiffe://karpenter-capi/cluster-autoscaler/a")
	require.True(t, autoscaler.MayCallFor(claim, spoke))
	require.False(t, autoscaler.MayCallFor(claim, other))
	both := get("spiffe://karpenter-capi/cluster/fleet/other")
	require.True(t, both.MayCallFor(read, spoke))
	require.False(t, both.MayCallFor(claim, spoke), "a role holds only for the Clusters it was granted for")
	require.True(t, both.MayCallFor(claim, other))
	nobody := get("spiffe://karpenter-capi/team/unknown")
	require.False(t, nobody.MayCall(read))
	require.True(t, nobody.MayCall(authz.Rule{Everyone: true}))
}

func TestTheOnlyClusterOfARole(t *testing.T) {
	rule := authz.Methods[externalgrpc.CloudProvider_NodeGroups_FullMethodName]
	for name, c := range map[string]struct{ identities, wrong string }{
		"one":                       {"{id: ID, roles: [autoscaler], clusters: [fleet/spoke]}", ""},
		"one, and others to read":   {"{id: ID, roles: [autoscaler, reader], clusters: [fleet/spoke]}", ""},
		"the same twice":            {"{id: ID, roles: [autoscaler], clusters: [fleet/spoke, fleet/spoke]}", ""},
		"two":                       {"{id: ID, roles: [autoscaler], clusters: [fleet/spoke, fleet/other]}", "including fleet/spoke and fleet/other"},
		"a pattern":                 {"{id: ID, roles: [autoscaler], clusters: [fleet/sp*]}", "any number"},
		"all":                       {"{id: ID, roles: [autoscaler], allClusters: true}", "any number"},
		"none, as an administrator": {"{id: ID, roles: [admin], clusters: [fleet/spoke]}", "may not call"},
	} {
		t.Run(name, func(t *testing.T) {
			policy := "identities:\n- " + strings.ReplaceAll(c.identities, "ID", "spiffe://karpenter-capi/x") + "\n"
			caller, err := authorizer(t, policy).FromChains(chain(t, "spiffe://karpenter-capi/x"))
			require.NoError(t, err)
			only, err := caller.OnlyCluster(rule)
			if c.wrong != "" {
				require.ErrorContains(t, err, c.wrong)
				return
			}
			require.NoError(t, err)
			require.Equal(t, spoke, only)
		})
	}
}

func authority(name string) *x509.Certificate {
	return &x509.Certificate{Raw: []byte(name), NotAfter: now.Add(time.Hour)}
}

func fingerprintOf(c *x509.Certificate) string { return fmt.Sprintf("%X", sha256.Sum256(c.Raw)) }

func TestACertificateIsDeniedThatHasAllOfWhatADenialNames(t *testing.T) {
	root, team := authority("root"), authority("team")
	const id = "spiffe://karpenter-capi/cluster/fleet/spoke"
	issued := now.Add(-time.Hour)
	for name, c := range map[string]struct {
		denial string
		want   bool
	}{
		"none":                               {"", false},
		"its id":                             {"id: " + id, true},
		"another id":                         {"id: " + id + "2", false},
		"its serial number":                  {`serial: "4f:00:1c"`, true},
		"its serial number, in other digits": {`serial: "4F001C"`, true},
		"another serial number":              {`serial: "4f:00:1d"`, false},
		"its issuer":                         {"issuer: " + fingerprintOf(team), true},
		"an issuer further up":               {"issuer: " + fingerprintOf(root), true},
		"another issuer":                     {"issuer: " + fingerprintOf(authority("other")), false},
		"all that was issued before":         {"issuedBefore: " + issued.Add(time.Second).Format(time.RFC3339), true},
		"what was issued before it":          {"issuedBefore: " + issued.Format(time.RFC3339), false},
		"its id, and a time before it":       {"id: " + id + ", issuedBefore: " + issued.Format(time.RFC3339), false},
		"its id, and a time after it":        {"id: " + id + ", issuedBefore: " + now.Format(time.RFC3339), true},
		"its serial number of another":       {`serial: "4f001c", issuer: ` + fingerprintOf(authority("other")), false},
	} {
		t.Run(name, func(t *testing.T) {
			policy := "identities: []\n"
			if c.denial != "" {
				policy += "deny:\n- {" + c.denial + "}\n"
			}
			leaf := chain(t, id)[0][0]
			leaf.SerialNumber, leaf.NotBefore = big.NewInt(0x4f001c), issued
			_, err := authorizer(t, policy).FromChains([][]*x509.Certificate{{leaf, team, root}})
			if c.want {
				require.ErrorContains(t, err, "the policy denies the client certificate")
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func TestOnlyListedClustersHaveTheirRole(t *testing.T) {
	for policy, want := range map[string]bool{
		"identities: []": true, "clusters: []": false, "clusters: [fleet/spoke]": true, "clusters: [fleet/sp*]": true, "clusters: [f*/*]": true,
		"clusters: [fleet/s]": false, "clusters: [other/*]": false, "clusters: [fleet/other, fleet/*oke]": true,
	} {
		t.Run(policy, func(t *testing.T) {
			caller, err := authorizer(t, policy).FromChains(chain(t, "spiffe://karpenter-capi/cluster/fleet/spoke"))
			require.NoError(t, err)
			require.Equal(t, want, caller.MayCallFor(claim, spoke))
			require.False(t, caller.MayCallFor(claim, other))
		})
	}
}

func TestPatternsAreOfNamespaceAndName(t *testing.T) {
	caller, err := authorizer(t, "identities:\n- id: spiffe://karpenter-capi/x\n  roles: [reader]\n  clusters: [team-*/prod, fleet/*]\n").
		FromChains(chain(t, "spiffe://karpenter-capi/x"))
	require.NoError(t, err)
	for name, want := range map[types.NamespacedName]bool{
		spoke: true, other: true, {Namespace: "team-a", Name: "prod"}: true, {Namespace: "team-a", Name: "test"}: false,
		{Namespace: "fleets", Name: "a"}: false, {Namespace: "team-a", Name: "prod-2"}: false,
	} {
		require.Equal(t, want, caller.MayCallFor(read, name), name.String())
	}
	require.False(t, caller.MaySeeAll(read))
}

// The handshake of a connection may be long past.
func TestAnExpiredCertificateIdentifiesNoCaller(t *testing.T) {
	leaf, root, short := chain(t, "spiffe://karpenter-capi/cluster/fleet/spoke")[0][0], authority("root"), authority("short")
	short.NotAfter = now.Add(-time.Second)
	for name, c := range map[string]struct {
		chains [][]*x509.Certificate
		want   bool
	}{
		"valid":                             {[][]*x509.Certificate{{leaf, root}}, true},
		"its issuer has expired":            {[][]*x509.Certificate{{leaf, short}}, false},
		"another chain has not yet":         {[][]*x509.Certificate{{leaf, short}, {leaf, root}}, true},
		"its own end has passed":            {[][]*x509.Certificate{{{URIs: leaf.URIs, NotAfter: now.Add(-time.Second)}, root}}, false},
		"in the second in which it expires": {[][]*x509.Certificate{{{URIs: leaf.URIs, NotAfter: now}, root}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := authorizer(t, "identities: []").FromChains(c.chains)
			if c.want {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "has expired at 2026-11-20T11:59:59Z")
			}
		})
	}
}

// With issuers in the policy, an authority can only sign what the policy allows.
func TestIssuersSignTheirIdentitiesAlone(t *testing.T) {
	root, team, unnamed := authority("root"), authority("team"), authority("unnamed")
	a := authorizer(t, `
identities:
- id: spiffe://karpenter-capi/admin
  roles: [admin]
  allClusters: true
- id: spiffe://karpenter-capi/cluster-autoscaler/a
  roles: [autoscaler]
  clusters: [fleet/spoke]
issuers:
- fingerprints: [`+fingerprintOf(root)+`]
  allIdentities: true
- fingerprints: [`+fingerprintOf(team)+`]
  clusters: [fleet/spoke]
  identities: [spiffe://karpenter-capi/cluster-autoscaler/a]
`)
	signed := func(id string, issuers ...[]*x509.Certificate) error {
		leaf := chain(t, "spiffe://karpenter-capi/"+id)[0][0]
		var chains [][]*x509.Certificate
		for _, path := range issuers {
			chains = append(chains, append([]*x509.Certificate{leaf}, path...))
		}
		_, err := a.FromChains(chains)
		return err
	}
	type path = []*x509.Certificate
	for name, c := range map[string]struct {
		id   string
		by   []path
		want bool
	}{
		"the root signs a Cluster":                   {"cluster/fleet/other", []path{{root}}, true},
		"the root signs the administrator":           {"admin", []path{{root}}, true},
		"a team signs its Cluster":                   {"cluster/fleet/spoke", []path{{team}}, true},
		"and the identity that it may":               {"cluster-autoscaler/a", []path{{team}}, true},
		"it signs no other Cluster":                  {"cluster/fleet/other", []path{{team}}, false},
		"nor the administrator":                      {"admin", []path{{team}}, false},
		"nor below the root":                         {"admin", []path{{team, root}}, false},
		"nor where a second chain goes around it":    {"admin", []path{{root}, {team}}, false},
		"its Cluster below the root":                 {"cluster/fleet/spoke", []path{{team, root}}, true},
		"an authority that is not named signs none":  {"cluster/fleet/spoke", []path{{unnamed}}, false},
		"but an intermediate one of a named one may": {"admin", []path{{unnamed, root}}, true},
		"who signs itself has no issuer":             {"cluster/fleet/spoke", []path{{}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			err := signed(c.id, c.by...)
			if c.want {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "does not let the issuer")
			}
		})
	}
}

func TestPolicyMistakesAreNamed(t *testing.T) {
	sum := strings.TrimSuffix(strings.Repeat("AB:", 32), ":")
	for name, c := range map[string]struct{ text, want string }{
		"nothing":       {" \n", "it is empty"},
		"no YAML":       {"identities: [", "not a policy"},
		"unknown field": {"identities:\n- id: spiffe://d/x\n  role: reader\n", "unknown field"},
		"no id":         {"identities:\n- roles: [reader]\n  allClusters: true\n", "id is not a SPIFFE id"},
		"no roles":      {"identities:\n- id: spiffe://d/x\n  allClusters: true\n", "no roles"},
		"unknown role":  {"identities:\n- id: spiffe://d/x\n  roles: [root]\n  allClusters: true\n", `role "root" is not one of`},
		"cluster role":  {"identities:\n- id: spiffe://d/x\n  roles: [cluster]\n  allClusters: true\n", `role "cluster" is not one of`},
		"no clusters":   {"identities:\n- id: spiffe://d/x\n  roles: [reader]\n", "neither clusters nor allClusters"},
		"both":          {"identities:\n- id: spiffe://d/x\n  roles: [reader]\n  allClusters: true\n  clusters: [a/b]\n", "exclude each other"},
		"bad cluster":   {"identities:\n- id: spiffe://d/x\n  roles: [reader]\n  clusters: [a]\n", "is not <namespace>/<name>"},
		"another trust domain": {
			"identities:\n- id: spiffe://e/x\n  roles: [reader]\n  allClusters: true\n", `is of the trust domain "e", and the agent's is "d"`,
		},
		"no fingerprint":    {"issuers:\n- allIdentities: true\n", "issuers[0]: it has no fingerprints"},
		"a bad fingerprint": {"issuers:\n- fingerprints: [AB:CD]\n  allIdentities: true\n", `issuers[0]: fingerprint "AB:CD" is not the SHA-256`},
		"a fingerprint twice": {
			"issuers:\n- fingerprints: [" + sum + "]\n  allIdentities: true\n- fingerprints: [" + strings.ToLower(sum) + "]\n  clusters: [a/b]\n",
			"appears twice",
		},
		"nothing to sign":  {"issuers:\n- fingerprints: [" + sum + "]\n", "neither clusters nor identities nor allIdentities"},
		"all, and some":    {"issuers:\n- fingerprints: [" + sum + "]\n  allIdentities: true\n  clusters: [a/b]\n", "excludes"},
		"issuer's cluster": {"issuers:\n- fingerprints: [" + sum + "]\n  clusters: [a]\n", `issuers[0]: cluster "a" is not <namespace>/<name>`},
		"issuer's identity": {
			"issuers:\n- fingerprints: [" + sum + "]\n  identities: [spiffe://e/x]\n", `issuers[0]: identity "spiffe://e/x" is of the trust domain`,
		},
		"a pattern of another kind": {"clusters: [\"fleet/a?\"]\n", `clusters: cluster "fleet/a?" is not <namespace>/<name>`},
		"an onboarding":             {"deny:\n- id: spiffe://d/cluster/fleet/a/abc\n", "names an onboarding, but policies"},
		"clusters without a value":  {"clusters:\n#- fleet/a\n", "clusters: it has no value"},
		"the same, capitalised":     {"Clusters:\n#- fleet/a\n", "Clusters: it has no value"},
		"denies nothing":            {"deny:\n- {}\n", "deny[0]: it names nothing"},
		"denies a bad id":           {"deny:\n- id: spiffe://e/x\n", `deny[0]: id "spiffe://e/x" is of the trust domain`},
		"denies a bad serial":       {"deny:\n- serial: xyz\n", `deny[0]: serial "xyz" is not a hexadecimal number`},
		"denies a bad issuer":       {"deny:\n- issuer: AB\n", `deny[0]: issuer: fingerprint "AB"`},
		"denies by a bad time":      {"deny:\n- issuedBefore: yesterday\n", "not a policy"},
		"twice": {"identities:\n- id: spiffe://d/x\n  roles: [reader]\n  allClusters: true\n" +
			"- id: spiffe://d/x\n  roles: [admin]\n  allClusters: true\n", "appears twice"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := authz.ParsePolicy([]byte(c.text), "d")
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestPolicyFileIsFollowedAndMistakesLeaveTheLastValidOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(role string) {
		text := "identities:\n- id: spiffe://karpenter-capi/x\n  roles: [" + role + "]\n  allClusters: true\n"
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	write("reader")
	file, err := authz.LoadPolicyFile(path, "karpenter-capi", logr.Discard())
	require.NoError(t, err)
	file.Interval = time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		file.Follow(ctx)
	}()
	defer func() { cancel(); <-done }()
	a, err := authz.New("karpenter-capi", file.Current, clocktesting.NewFakePassiveClock(now))
	require.NoError(t, err)
	chains := chain(t, "spiffe://karpenter-capi/x")
	roles := func() []string {
		caller, err := a.FromChains(chains)
		if err != nil {
			return []string{err.Error()}
		}
		return caller.Roles()
	}
	require.Equal(t, []string{"reader"}, roles())
	usable := func(want float64) {
		t.Helper()
		require.Eventually(t, func() bool { return testutil.ToFloat64(file.Collector()) == want }, 20*time.Second, time.Millisecond)
	}
	usable(1)
	write("nonsense")
	usable(0)
	require.Never(t, func() bool { return !slices.Equal(roles(), []string{"reader"}) }, 50*time.Millisecond, 10*time.Millisecond)
	write("admin")
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, []string{"admin"}, roles()) }, 20*time.Second, 10*time.Millisecond)
	usable(1)
}

// Every served method has a rule, and every rule for a Cluster belongs to a request that names one.
func TestEveryMethodHasARule(t *testing.T) {
	methods := map[string]protoreflect.MethodDescriptor{}
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		switch file.Package() {
		case "capi.agent.v1alpha1", "clusterautoscaler.cloudprovider.v1.externalgrpc", "grpc.health.v1", "grpc.reflection.v1", "grpc.reflection.v1alpha":
		default:
			return true
		}
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				method := service.Methods().Get(j)
				methods["/"+string(service.FullName())+"/"+string(method.Name())] = method
			}
		}
		return true
	})
	require.GreaterOrEqual(t, len(methods), 13)
	for name, method := range methods {
		rule, ok := authz.Methods[name]
		require.True(t, ok, "%s has no rule", name)
		field := method.Input().Fields().ByName("cluster")
		namesCluster := field != nil && field.Message() != nil && field.Message().FullName() == proto.MessageName(&agentv1alpha1.ClusterRef{})
		require.Equal(t, namesCluster, rule.OfCluster, "%s", name)
		require.Equal(t, strings.HasPrefix(name, "/clusterautoscaler."), rule.OneCluster, "%s", name)
		require.Equal(t, strings.HasPrefix(name, "/capi.agent.v1alpha1.ClusterService/"), rule.OfAnyCluster, "%s", name)
		if rule.OfCluster {
			require.False(t, rule.Anyone || rule.Everyone, "%s", name)
			// A Cluster's certificate is for the Cluster's own callers only: it would outlive an
			// administrator's grant. And only the spoke knows its NodePools.
			own := name == agentv1alpha1.CertificateService_IssueCertificate_FullMethodName ||
				name == agentv1alpha1.NodePoolService_ReportNodePools_FullMethodName
			require.Equal(t, !own, slices.Contains(rule.Roles, authz.RoleAdmin), "%s", name)
		}
		// Methods that a reader may not call act on claims. If the request names a holder, the
		// caller acts as that holder.
		acts := rule.OfCluster && !slices.Contains(rule.Roles, authz.RoleReader)
		namesHolder := method.Input().Fields().ByName("holder") != nil
		require.Equal(t, acts && namesHolder, rule.AsHolder, "%s", name)
		for _, role := range rule.Roles {
			if acts && !slices.Contains(rule.Roles, authz.RoleBootstrap) {
				require.Contains(t, authz.Holders, role, "%s may call %s and act as no holder", role, name)
			}
		}
	}
	for name := range authz.Methods {
		require.Contains(t, methods, name, "a rule for a method that does not exist")
	}
}

func FuzzParsePolicy(f *testing.F) {
	f.Add("identities:\n- id: spiffe://d/x\n  roles: [reader]\n  clusters: [a/b]\n")
	f.Add("identities: [{}]")
	f.Fuzz(func(_ *testing.T, text string) {
		_, _ = authz.ParsePolicy([]byte(text), "d")
	})
}

func TestGrantsOfListeners(t *testing.T) {
	for text, wanted := range map[string]struct {
		role     string
		clusters []string
		says     string // empty for a valid grant
	}{
		"everything":               {"admin", nil, ""},
		"an administrator of some": {"admin", []string{"fleet/*"}, ""},
		"a reader of all":          {"reader", []string{"*/*"}, ""},
		"a Cluster":                {"cluster", []string{"fleet/a"}, ""},
		"two Clusters":             {"cluster", []string{"fleet/a", "fleet/b"}, "that of one Cluster"},
		"a pattern of Clusters":    {"cluster", []string{"fleet/*"}, "that of one Cluster"},
		"no Cluster":               {"cluster", nil, "that of one Cluster"},
		"a reader of nothing":      {"reader", nil, "*/* for all"},
		"an autoscaler of nothing": {"autoscaler", []string{}, "*/* for all"},
		"no role":                  {"", []string{"fleet/a"}, "is not one of"},
		"two mistakes":             {"root", []string{"a"}, "is not <namespace>/<name>"},
	} {
		grant, err := authz.ParseGrant(wanted.role, wanted.clusters)
		if wanted.says != "" {
			require.ErrorContains(t, err, wanted.says, text)
			continue
		}
		require.NoError(t, err, text)
		require.Equal(t, authz.Role(wanted.role), grant.Role, text)
		require.Equal(t, len(wanted.clusters) == 0, grant.AllClusters, text)
		require.Len(t, grant.Clusters, len(wanted.clusters), text)
	}
}

// The onboarding is not part of the identity that policies and limits use, because it changes.
func TestCertificatesOfAnOnboarding(t *testing.T) {
	a := authorizer(t, `
identities:
- id: spiffe://karpenter-capi/cluster/fleet/spoke
  roles: [reader]
  clusters: [fleet/other]
clusters: [fleet/spoke]
`)
	for path, want := range map[string]struct {
		identity, onboarding string
		cluster, bootstraps  bool
	}{
		"cluster/fleet/spoke":            {"cluster/fleet/spoke", "", true, false},
		"cluster/fleet/spoke/abc":        {"cluster/fleet/spoke", "abc", true, false},
		"bootstrap/fleet/spoke/abc":      {"bootstrap/fleet/spoke", "abc", false, true},
		"bootstrap/fleet/spoke":          {"bootstrap/fleet/spoke", "", false, false},
		"bootstrap/fleet/unlisted/abc":   {"bootstrap/fleet/unlisted", "abc", false, false},
		"cluster/fleet/spoke/abc/def":    {"cluster/fleet/spoke/abc/def", "", false, false},
		"team/cluster/fleet/spoke":       {"team/cluster/fleet/spoke", "", false, false},
		"cluster/fleet":                  {"cluster/fleet", "", false, false},
		"clusters/fleet/spoke/abcdefabc": {"clusters/fleet/spoke/abcdefabc", "", false, false},
	} {
		t.Run(path, func(t *testing.T) {
			caller, err := a.FromChains(chain(t, "spiffe://karpenter-capi/"+path))
			require.NoError(t, err)
			require.Equal(t, "spiffe://karpenter-capi/"+want.identity, caller.Identity)
			issue := authz.Methods[agentv1alpha1.CertificateService_IssueCertificate_FullMethodName]
			require.Equal(t, want.cluster, caller.MayCallFor(claim, spoke))
			require.Equal(t, want.cluster, caller.MayCallFor(read, spoke))
			require.Equal(t, want.cluster || want.bootstraps, caller.MayCallFor(issue, spoke))
			require.False(t, caller.MayCallFor(issue, other))
			require.Equal(t, want.cluster, caller.MayCallFor(read, other), "what the policy grants the Cluster does not depend on its onboarding")
			if want.onboarding == "" && !want.cluster {
				require.True(t, caller.Onboarding == nil || caller.Onboarding.ID != "")
				return
			}
			require.Equal(t, want.onboarding, caller.Onboarding.ID)
		})
	}
}

// An authority that a Cluster has of its own could sign an identity that equals the label of the
// offboarded Cluster.
func TestNoCertificateIsOfTheOnboardingOfClustersWithoutOne(t *testing.T) {
	for _, path := range []string{"cluster/fleet/spoke/", "bootstrap/fleet/spoke/"} {
		_, err := authorizer(t, "identities: []").FromChains(chain(t, "spiffe://karpenter-capi/"+path+v1alpha1.Offboarded))
		require.ErrorContains(t, err, "reserved for no onboarding", path)
		require.NotEmpty(t, authz.NameIn(chain(t, "spiffe://karpenter-capi/"+path+v1alpha1.Offboarded)), "by which its calls are limited")
	}
}

func TestIdentitiesOfAnOnboardingAreReadAsTheyAreMade(t *testing.T) {
	of := authz.Onboarding{Cluster: spoke, ID: "abc"}
	for identityOf, role := range map[*func(string, authz.Onboarding) (spiffeid.ID, error)]authz.Role{
		new(authz.ClusterIdentity): authz.RoleCluster, new(authz.BootstrapIdentity): authz.RoleBootstrap,
	} {
		id, err := (*identityOf)("karpenter-capi", of)
		require.NoError(t, err)
		caller, err := authorizer(t, "identities: []").FromChains(chain(t, id.String()))
		require.NoError(t, err)
		require.Equal(t, new(of), caller.Onboarding)
		require.Equal(t, []string{string(role)}, caller.Roles())
	}
	_, err := authz.ClusterIdentity("karpenter-capi", authz.Onboarding{Cluster: spoke, ID: "a/b"})
	require.Error(t, err)
}
