package server_test

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const readerPolicy = "identities:\n- id: spiffe://karpenter-capi/reader\n  roles: [reader]\n  clusters: [fleet/spoke]\n"

// withRights makes the server's rights depend on a policy and a clock.
func withRights(t *testing.T, policy func() *authz.Policy, now clock.PassiveClock) func(*fixture, *server.Config) {
	t.Helper()
	return func(_ *fixture, config *server.Config) {
		authorizer, err := authz.New("karpenter-capi", policy, now)
		require.NoError(t, err)
		config.Authorizer, config.RightsInterval = authorizer, 5*time.Millisecond
	}
}

// Each of the streams ends soon after its caller loses its right.
func TestAStreamEndsWithItsCallersRight(t *testing.T) {
	for name, c := range map[string]struct {
		identity string
		policy   string
		expires  bool
		// withdrawn removes the authority from the agent's file.
		withdrawn bool
		want      func(error) bool
	}{
		"the role is taken back": {"reader", "identities: []", false, false, agenterrors.IsPermissionDenied},
		"it is for another Cluster": {
			"reader", "identities:\n- {id: spiffe://karpenter-capi/reader, roles: [reader], clusters: [fleet/b]}", false, false,
			agenterrors.IsPermissionDenied,
		},
		"the certificate is denied": {
			"cluster/fleet/spoke", "deny:\n- id: spiffe://karpenter-capi/cluster/fleet/spoke", false, false, agenterrors.IsUnauthenticated,
		},
		"the serial number is denied": {
			"cluster/fleet/spoke", "deny:\n- serial: $SERIAL", false, false, agenterrors.IsUnauthenticated,
		},
		"what was issued before is denied": {
			"cluster/fleet/spoke", "deny:\n- {id: spiffe://karpenter-capi/cluster/fleet/spoke, issuedBefore: $LATER}", false, false,
			agenterrors.IsUnauthenticated,
		},
		"the authority is denied": {
			"cluster/fleet/spoke", "deny:\n- issuer: $AUTHORITY", false, false, agenterrors.IsUnauthenticated,
		},
		"the authority may not sign it any more": {
			"cluster/fleet/spoke", "issuers:\n- {fingerprints: [$AUTHORITY], clusters: [fleet/other]}", false, false, agenterrors.IsUnauthenticated,
		},
		"the Cluster is not listed":   {"cluster/fleet/spoke", "clusters: [fleet/other]", false, false, agenterrors.IsPermissionDenied},
		"the certificate has expired": {"cluster/fleet/spoke", readerPolicy, true, false, agenterrors.IsUnauthenticated},
		"the authority is withdrawn":  {"cluster/fleet/spoke", readerPolicy, false, true, agenterrors.IsUnauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			policies, now := &atomic.Pointer[authz.Policy]{}, clocktesting.NewFakePassiveClock(time.Now())
			set := func(text string) {
				policies.Store(policyOf(t, text))
			}
			set(readerPolicy)
			f := start(t, withRights(t, policies.Load, now))
			files := f.authority.Issue(t, t.TempDir(), f.authority, "spiffe://karpenter-capi/"+c.identity)
			of := f.connect(client.Options{Address: f.address, TLS: &client.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile}})
			certificate := certificateIn(t, files.CertFile)
			groups, err := of.NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
			require.NoError(t, err)
			claims, err := of.Claims.WatchClaims(f.ctx(), &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef})
			require.NoError(t, err)
			machines, err := of.Machines.WatchMachines(f.ctx(), &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef})
			require.NoError(t, err)
			clusters, err := of.Clusters.WatchClusters(f.ctx(), &agentv1alpha1.WatchClustersRequest{})
			require.NoError(t, err)
			receive := map[string]func() error{
				"node groups": func() error { _, err := groups.Recv(); return err },
				"claims":      func() error { _, err := claims.Recv(); return err },
				"machines":    func() error { _, err := machines.Recv(); return err },
				"clusters":    func() error { _, err := clusters.Recv(); return err },
			}
			for _, next := range receive {
				require.NoError(t, next(), "the snapshot's end")
			}
			set(strings.NewReplacer("$SERIAL", certificate.SerialNumber.Text(16), "$LATER", certificate.NotBefore.Add(time.Second).Format(time.RFC3339),
				"$AUTHORITY", fmt.Sprintf("%x", sha256.Sum256(certificateIn(t, files.CAFile).Raw))).Replace(c.policy))
			if c.expires {
				now.SetTime(time.Now().Add(2 * time.Hour))
			}
			if c.withdrawn {
				f.trusts(testpki.New(t))
			}
			for of, next := range receive {
				err := next()
				require.Error(t, err)
				// A watch of Clusters does not end for good while its caller may read others.
				readsOthers := of == "clusters" && agenterrors.ReasonOf(err) == agenterrors.ReasonRightsChanged
				require.True(t, readsOthers || c.want(err), "%s: %v", of, err)
			}
			require.True(t, c.want(f.list(of)), "and so is the next call")
		})
	}
}

// A call that waits for its turn, for minutes if need be, is not carried out with rights that have
// ended meanwhile.
func TestACallThatWaitsLosesItsCallersRight(t *testing.T) {
	policy := &atomic.Pointer[authz.Policy]{}
	now := clocktesting.NewFakePassiveClock(time.Now())
	f := start(t, withRights(t, policy.Load, now), limited(func(o *limits.Options) { o.HubCallsAtOnce = 1 }), func(f *fixture, c *server.Config) {
		c.RightsInterval = time.Hour // the connection stays open
		f.engine.block = make(chan struct{})
	})
	c := f.cluster()
	create := &agentv1alpha1.CreateClaimRequest{Cluster: spokeRef, ClaimId: "first", Holder: "karpenter", Candidates: []string{"fleet/small"}}
	ended := make(chan error, 1)
	go func() {
		_, err := c.Claims.CreateClaim(f.ctx(), create)
		ended <- err
	}()
	require.Eventually(t, func() bool { return f.engine.creating.Load() == 1 }, patience, time.Millisecond)
	waiting := map[string]func() error{
		"CreateClaim": func() error {
			second := proto.CloneOf(create)
			second.ClaimId = "second"
			_, err := c.Claims.CreateClaim(f.ctx(), second)
			return err
		},
		"ReleaseClaim": func() error {
			_, err := c.Claims.ReleaseClaim(f.ctx(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "first"})
			return err
		},
		"ListClaims": func() error {
			_, err := c.Claims.ListClaims(f.ctx(), &agentv1alpha1.ListClaimsRequest{Cluster: spokeRef, Holder: "karpenter"})
			return err
		},
		"SyncClaims": func() error {
			_, err := c.Claims.SyncClaims(f.ctx(), &agentv1alpha1.SyncClaimsRequest{Cluster: spokeRef, Holder: "karpenter", Token: "token", SpokeId: "spoke"})
			return err
		},
	}
	refused := make(chan error, len(waiting))
	for _, call := range waiting {
		go func() { refused <- call() }()
	}
	for method := range waiting {
		f.awaitSum(lo.Ternary(method == "CreateClaim", 2.0, 1.0), "grpc_server_started_total", "grpc_method", method)
	}
	denied := policyOf(t, "deny:\n- id: "+spokeURI+"\n")
	policy.Store(denied)
	close(f.engine.block)
	require.NoError(t, <-ended, "what has begun is carried out")
	for range waiting {
		require.True(t, agenterrors.IsUnauthenticated(<-refused))
	}
}

// A stream has its rights when its request arrives, which may be long after its headers.
func TestAStreamWhoseRequestArrivesLateHasItsCallersPresentRight(t *testing.T) {
	policy := &atomic.Pointer[authz.Policy]{}
	set := func(text string) {
		policy.Store(policyOf(t, text))
	}
	set(readerPolicy)
	f := start(t, withRights(t, policy.Load, clocktesting.NewFakePassiveClock(time.Now())), func(_ *fixture, c *server.Config) {
		c.RightsInterval = time.Hour
	})
	stream, err := f.raw("spiffe://karpenter-capi/reader").NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		agentv1alpha1.MachineService_WatchMachines_FullMethodName)
	require.NoError(t, err)
	f.awaitSum(1, "grpc_server_started_total", "grpc_method", "WatchMachines")
	// The caller may still call the method, but for another Cluster.
	set("identities:\n- {id: spiffe://karpenter-capi/reader, roles: [reader], clusters: [fleet/b]}")
	require.NoError(t, stream.SendMsg(&agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef}))
	require.NoError(t, stream.CloseSend())
	err = stream.RecvMsg(&agentv1alpha1.WatchMachinesResponse{})
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
}

// certificateIn returns the first certificate of a file.
func certificateIn(t *testing.T, file string) *x509.Certificate {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	block, _ := pem.Decode(content)
	require.NotNil(t, block)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	return certificate
}

// A policy change that leaves a caller its right does not affect its stream.
func TestAStreamOutlivesAPolicyThatLeavesItsCallersRight(t *testing.T) {
	policies, looks := &atomic.Pointer[authz.Policy]{}, &atomic.Int64{}
	f := start(t, withRights(t, func() *authz.Policy {
		looks.Add(1)
		return policies.Load()
	}, clocktesting.NewFakePassiveClock(time.Now())))
	stream, err := f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	policy := policyOf(t, "clusters: [fleet/*]")
	policies.Store(policy)
	for range 3 {
		before := looks.Load()
		require.Eventually(t, func() bool { return looks.Load() > before }, patience, time.Millisecond)
	}
	f.nodeGroups.Set(spoke, "fleet/a", &agentv1alpha1.NodeGroup{Id: "fleet/a"})
	event, err := stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "fleet/a", event.GetUpsert().GetId())
}

// trusts replaces the authorities that the agent accepts.
func (f *fixture) trusts(authorities ...*testpki.Authority) {
	f.Helper()
	testpki.WriteBundle(f, filepath.Join(f.serverPKI, "ca.crt"), authorities...)
}

// shutOut waits until the agent accepts no new connection with a certificate of the authority.
func (f *fixture) shutOut(authority *testpki.Authority) {
	f.Helper()
	require.Eventually(f, func() bool { return f.list(f.signedBy(authority, spokeURI)) != nil }, patience, 10*time.Millisecond)
}

// Streams continue, and calls succeed, for as long as one of the agent's authorities is that of the
// certificate, or has its key. A file without authorities withdraws none.
func TestAConnectionOutlivesOtherAuthoritiesThanItsOwn(t *testing.T) {
	f := start(t, func(_ *fixture, c *server.Config) { c.RightsInterval = 5 * time.Millisecond })
	c, other := f.cluster(), testpki.New(t)
	stream, err := c.NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	goesOn := func(id string) {
		t.Helper()
		require.NoError(t, f.list(c))
		f.nodeGroups.Set(spoke, id, &agentv1alpha1.NodeGroup{Id: id})
		event, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, id, event.GetUpsert().GetId())
	}
	f.trusts(f.authority, other)
	require.Eventually(t, func() bool { return f.list(f.signedBy(other, spokeURI)) == nil }, patience, 10*time.Millisecond)
	goesOn("fleet/a")
	f.trusts(f.authority)
	f.shutOut(other)
	goesOn("fleet/b")
	f.trusts(f.authority.Renewed(t), other)
	require.Eventually(t, func() bool { return f.list(f.signedBy(other, spokeURI)) == nil }, patience, 10*time.Millisecond)
	goesOn("fleet/c")
	f.trusts()
	require.Eventually(t, func() bool { return strings.Contains(f.log.String(), "files cannot be used") }, patience, time.Millisecond)
	goesOn("fleet/d")
}

// Its client may have another certificate by then, and connects again with that. Otherwise it could
// keep what it has open for hours.
func TestAConnectionIsClosedSoonAfterItsCallerIsShutOut(t *testing.T) {
	for name, c := range map[string]struct {
		shutOut func(f *fixture, deny func(string), offboard func())
		cause   string
	}{
		"the authority is withdrawn": {
			func(f *fixture, _ func(string), _ func()) { f.trusts(testpki.New(f)) },
			"no authority of this agent signs the client certificate any more",
		},
		"the certificate is denied": {
			func(_ *fixture, deny func(string), _ func()) { deny("spiffe://karpenter-capi/cluster/fleet/spoke") }, "the policy denies the client certificate",
		},
		"the onboarding has ended": {
			func(_ *fixture, _ func(string), offboard func()) { offboard() }, "the client certificate does not belong to the Cluster's current onboarding",
		},
	} {
		t.Run(name, func(t *testing.T) {
			policy, offboarded, now := &atomic.Pointer[authz.Policy]{}, &atomic.Bool{}, clocktesting.NewFakePassiveClock(time.Now())
			f := start(t, withRights(t, policy.Load, now), func(_ *fixture, c *server.Config) {
				c.Clock = now
				c.Onboarded = func(context.Context, types.NamespacedName) (string, bool, error) {
					return lo.Ternary(offboarded.Load(), v1alpha1.Offboarded, "first"), true, nil
				}
			})
			other := f.rawPeerOf("spiffe://karpenter-capi/other")
			p := f.rawPeerOf(spokeURI + "/first")
			call := func() string {
				p.call(agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName, &agentv1alpha1.ListNodeGroupsRequest{Cluster: spokeRef})
				return p.status()
			}
			require.Equal(t, "0", call())
			c.shutOut(f, func(id string) {
				denied := policyOf(t, "deny:\n- id: "+id+"\n")
				policy.Store(denied)
			}, func() { offboarded.Store(true) })
			for call() != "16" { // UNAUTHENTICATED, once the agent has read its files
				continue
			}
			now.SetTime(now.Now().Add(9 * time.Second))
			require.Equal(t, "16", call(), "its client learns the reason")
			now.SetTime(now.Now().Add(2 * time.Second))
			p.requireEnded()
			require.Contains(t, f.log.String(), "a connection is closed: its caller may not use the agent any more")
			require.Contains(t, f.log.String(), c.cause)
			if name != "the authority is withdrawn" {
				other.call(agentv1alpha1.StatusService_GetStatus_FullMethodName, &agentv1alpha1.GetStatusRequest{})
				require.Equal(t, "0", other.status(), "others stay")
			}
		})
	}
}

// A call may take minutes. What it has not done when its caller is shut out is not done.
func TestACallInProgressEndsWhenItsCallerIsShutOut(t *testing.T) {
	policy := &atomic.Pointer[authz.Policy]{}
	f := start(t, withRights(t, policy.Load, clocktesting.NewFakePassiveClock(time.Now())), func(f *fixture, _ *server.Config) {
		f.engine.block = make(chan struct{})
	})
	create := func(c *client.Client, cluster *agentv1alpha1.ClusterRef) chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := c.Claims.CreateClaim(f.ctx(), &agentv1alpha1.CreateClaimRequest{
				Cluster: cluster, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small"},
			})
			ended <- err
		}()
		return ended
	}
	otherRef, otherURI := tenant(0)
	denied, other := create(f.cluster(), spokeRef), create(f.as(otherURI), otherRef)
	require.Eventually(t, func() bool { return f.engine.creating.Load() == 2 }, patience, time.Millisecond)
	policy.Store(policyOf(t, "deny:\n- id: "+spokeURI+"\n"))
	err := <-denied
	require.True(t, agenterrors.IsUnauthenticated(err), "%v", err)
	require.Contains(t, err.Error(), "the policy denies the client certificate")
	close(f.engine.block)
	require.NoError(t, <-other, "others are not concerned")
}

// A caller that may come back has not been shut out for long.
func TestAConnectionOutlivesAShortDenial(t *testing.T) {
	policy, looks, now := &atomic.Pointer[authz.Policy]{}, &atomic.Int64{}, clocktesting.NewFakePassiveClock(time.Now())
	f := start(t, withRights(t, func() *authz.Policy {
		looks.Add(1)
		return policy.Load()
	}, now), func(_ *fixture, c *server.Config) { c.Clock = now })
	looked := func() {
		t.Helper()
		before := looks.Load()
		require.Eventually(t, func() bool { return looks.Load() > before+2 }, patience, time.Millisecond)
	}
	p := f.rawPeer()
	call := func() string {
		p.call(agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName, &agentv1alpha1.ListNodeGroupsRequest{Cluster: spokeRef})
		return p.status()
	}
	denied := policyOf(t, "deny:\n- id: "+spokeURI+"\n")
	for range 3 {
		policy.Store(denied)
		require.Equal(t, "16", call())
		looked()
		now.SetTime(now.Now().Add(9 * time.Second))
		policy.Store(nil)
		looked()
		require.Equal(t, "0", call())
	}
}

// A denied caller is limited together with all that are denied, on its open connections as well.
func TestACallerThatIsDeniedLaterIsReadSlowly(t *testing.T) {
	policy := &atomic.Pointer[authz.Policy]{}
	f := start(t, withRights(t, policy.Load, clocktesting.NewFakePassiveClock(time.Now())), func(_ *fixture, c *server.Config) {
		c.RightsInterval = time.Hour // it is not closed either
		c.Clock = clocktesting.NewFakePassiveClock(time.Now())
	})
	p := f.rawPeer()
	call := func() string {
		p.call(agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName, &agentv1alpha1.ListNodeGroupsRequest{Cluster: spokeRef})
		return p.status()
	}
	require.Equal(t, "0", call())
	denied := policyOf(t, "deny:\n- id: "+spokeURI+"\n")
	policy.Store(denied)
	f.requireSlowed(p, func() { require.Equal(t, "16", call()) })
}

// requireSlowed requires that a connection is read slowly by the time that it has been refused
// 2,000 calls. The agent's clock stands still, so it forgives none of them.
func (f *fixture) requireSlowed(p *rawPeer, refused func()) {
	f.Helper()
	slowed := func() bool { return sum(f.T, f.registry, "capi_agent_slow_reads_total", "reason", "refusals") > 0 }
	for n := 0; n < 2000 && (n < 1000 || !slowed()); n++ {
		require.NoError(f, p.conn.SetReadDeadline(time.Now().Add(patience)))
		refused()
	}
	require.True(f, slowed())
}

// A client whose certificate was rotated reconnects with the new one.
func TestAConnectionEndsWithItsCertificate(t *testing.T) {
	f := start(t)
	folder := t.TempDir()
	files := f.authority.IssueFor(t, 10*time.Second, folder, f.authority, "spiffe://karpenter-capi/cluster/fleet/spoke")
	c := f.connect(client.Options{Address: f.address, TLS: &client.TLS{
		CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile, Refresh: 10 * time.Millisecond,
	}})
	stream, err := c.NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	f.authority.Issue(t, folder, f.authority, "spiffe://karpenter-capi/cluster/fleet/spoke")
	_, err = stream.Recv()
	require.Equal(t, codes.Unavailable, grpcstatus.Code(err), "%v", err)
	require.NoError(t, f.list(c))
	require.Contains(t, f.log.String(), "its client certificate has expired")
}

func policyOf(t *testing.T, text string) *authz.Policy {
	t.Helper()
	policy, err := authz.ParsePolicy([]byte(text), "karpenter-capi")
	require.NoError(t, err)
	return policy
}
