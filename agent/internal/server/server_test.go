package server_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const patience = 20 * time.Second

var (
	spoke    = types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	spokeRef = protoconv.Cluster(spoke)
)

// engine returns a fixed error or a claim.
type engine struct {
	err   atomic.Pointer[error]
	claim *v1alpha1.MachineClaim
	block chan struct{} // if set, Create and Sync wait for it
	panic bool
	// creating and syncing count the calls of Create and Sync that have not returned.
	creating, syncing atomic.Int64

	mu       sync.Mutex
	released claims.ReleaseOptions // of the last call
	synced   claims.SyncRequest
}

func (e *engine) fail(err error) { e.err.Store(&err) }

func (e *engine) error() error {
	if err := e.err.Load(); err != nil {
		return *err
	}
	return nil
}

func (e *engine) Create(ctx context.Context, r claims.Request) (*v1alpha1.MachineClaim, error) {
	if e.panic {
		panic("a bug")
	}
	e.creating.Add(1)
	defer e.creating.Add(-1)
	if e.block != nil {
		select {
		case <-e.block:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if err := e.error(); err != nil {
		return nil, err
	}
	c := &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClusterName: r.Cluster, ClaimID: r.ID, Holder: r.Holder, NodeGroup: r.Candidates[0]}}
	c.Namespace = r.Namespace
	return c, nil
}

func (e *engine) Release(_ context.Context, _ claims.Key, o claims.ReleaseOptions) (*v1alpha1.MachineClaim, error) {
	e.released = o
	if e.claim == nil {
		return &v1alpha1.MachineClaim{}, e.error() // a tombstone
	}
	return e.claim, e.error()
}

func (e *engine) Return(context.Context, claims.Key, claims.Holders, string) (*v1alpha1.MachineClaim, error) {
	return e.claim, e.error()
}

func (e *engine) Get(context.Context, claims.Key) (*v1alpha1.MachineClaim, error) {
	if e.claim == nil {
		return nil, claims.ErrNotFound
	}
	return e.claim, nil
}

func (e *engine) List(context.Context, claims.ListOptions) ([]v1alpha1.MachineClaim, string, error) {
	return nil, "token", e.error()
}

func (e *engine) UnpausedCluster(context.Context, types.NamespacedName) (*clusterv1.Cluster, error) {
	return &clusterv1.Cluster{}, e.error()
}

func (e *engine) Sync(ctx context.Context, r claims.SyncRequest) (claims.SyncResult, error) {
	e.syncing.Add(1)
	defer e.syncing.Add(-1)
	if e.block != nil {
		select {
		case <-e.block:
		case <-ctx.Done():
			return claims.SyncResult{}, ctx.Err()
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.synced = r
	return claims.SyncResult{}, e.error()
}

// fixture is a server with complete but empty views.
type fixture struct {
	*testing.T

	engine     *engine
	server     *server.Server
	nodeGroups *watchcache.Cache[*agentv1alpha1.NodeGroup]
	machines   *watchcache.Cache[*agentv1alpha1.Machine]
	claims     *watchcache.Cache[*agentv1alpha1.Claim]
	clusters   *watchcache.Cache[*agentv1alpha1.Cluster]
	registry   *prometheus.Registry
	authority  *testpki.Authority
	serverPKI  string
	address    string
	socket     string
	loopback   string
	stop       func()
	log        *lines

	mu       sync.Mutex
	observed []learned.Node // by all calls
}

// scraped returns the metrics as the agent serves them.
func (f *fixture) scraped() scrapes.Scrape {
	f.Helper()
	return scrapes.Take(f.T, promhttp.HandlerFor(f.registry, promhttp.HandlerOpts{}), time.Now())
}

// observations returns the Nodes that calls have reported so far.
func (f *fixture) observations() []learned.Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.observed)
}

type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) add(prefix, arguments string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintln(&l.text, prefix, arguments)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func newCache[M proto.Message](buffer int) *watchcache.Cache[M] {
	return watchcache.New(watchcache.Options[M]{Equal: func(a, b M) bool { return proto.Equal(a, b) }, Buffer: buffer, Heartbeat: time.Minute})
}

func start(t *testing.T, changes ...func(*fixture, *server.Config)) *fixture {
	t.Helper()
	f := &fixture{
		T: t, engine: &engine{}, registry: prometheus.NewRegistry(), authority: testpki.New(t), serverPKI: t.TempDir(), log: &lines{},
		nodeGroups: newCache[*agentv1alpha1.NodeGroup](4), machines: newCache[*agentv1alpha1.Machine](4), claims: newCache[*agentv1alpha1.Claim](4),
		clusters: newCache[*agentv1alpha1.Cluster](4),
	}
	policy, err := authz.ParsePolicy(
		[]byte("identities:\n- id: spiffe://karpenter-capi/reader\n  roles: [reader]\n  allClusters: true\n"), "karpenter-capi")
	require.NoError(t, err)
	authorizer, err := authz.New("karpenter-capi", func() *authz.Policy { return policy }, clock.RealClock{})
	require.NoError(t, err)
	config := server.Config{
		Engine: f.engine, NodeGroups: f.nodeGroups, Machines: f.machines, Claims: f.claims, Clusters: f.clusters,
		Show: func(_ context.Context, claim *v1alpha1.MachineClaim) (*agentv1alpha1.Claim, error) {
			return protoconv.Claim(claim, nil), nil
		},
		Observe: func(_ context.Context, _ types.NamespacedName, nodes []learned.Node) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.observed = append(f.observed, nodes...)
		},
		Onboarded: func(_ context.Context, name types.NamespacedName) (id string, exists bool, err error) {
			return "", name == spoke, nil
		},
		Scope:         hub.NewScope(nil, nil),
		Authorizer:    authorizer,
		ShutdownGrace: patience,
		Version:       "v1.2.3", Commit: "abc",
		Log:        funcr.New(f.log.add, funcr.Options{Verbosity: 1}),
		Registerer: f.registry,
	}
	f.SetReady()
	for _, change := range changes {
		change(f, &config)
	}
	f.server, err = server.New(config)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	files := f.authority.Issue(t, f.serverPKI, f.authority)
	secure, release, err := server.ListenTLS(ctx, "127.0.0.1:0", server.TLSFiles{
		CertFile: files.CertFile, KeyFile: files.KeyFile, ClientCAFile: files.CAFile, Refresh: 10 * time.Millisecond,
		Log: config.Log, Registerer: f.registry,
	})
	require.NoError(t, err)
	loopback, err := server.ListenLoopback(ctx, "127.0.0.1:0")
	require.NoError(t, err)
	f.socket = filepath.Join(t.TempDir(), "agent.sock")
	unix, err := server.ListenUnix(ctx, f.socket, authz.Everything())
	require.NoError(t, err)
	f.address, f.loopback = secure.Addr().String(), loopback.Addr().String()
	ended := make(chan error, 1)
	go func() { ended <- f.server.Serve(ctx, secure, loopback, unix) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-ended)
		release()
	})
	t.Cleanup(f.stop)
	return f
}

func (f *fixture) SetReady() {
	f.nodeGroups.SetReady()
	f.machines.SetReady()
	f.claims.SetReady()
	f.clusters.SetReady()
}

// as connects with a certificate for the URI names.
func (f *fixture) as(uris ...string) *client.Client { return f.signedBy(f.authority, uris...) }

func (f *fixture) signedBy(authority *testpki.Authority, uris ...string) *client.Client {
	f.Helper()
	files := authority.Issue(f, f.TempDir(), f.authority, uris...)
	return f.connect(client.Options{Address: f.address, TLS: &client.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile}})
}

func (f *fixture) connect(options client.Options) *client.Client {
	f.Helper()
	c, err := client.New(options)
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, c.Close()) })
	return c
}

func (f *fixture) cluster() *client.Client {
	return f.as("spiffe://karpenter-capi/cluster/fleet/spoke")
}

func (f *fixture) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	f.Cleanup(cancel)
	return ctx
}

func (f *fixture) list(c *client.Client) error {
	_, err := c.NodeGroups.ListNodeGroups(f.ctx(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: spokeRef})
	return err
}

func (f *fixture) create(c *client.Client) error {
	_, err := c.Claims.CreateClaim(f.ctx(), &agentv1alpha1.CreateClaimRequest{
		Cluster: spokeRef, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small"},
	})
	return err
}

func TestIdentitiesAndWhatTheyMayDo(t *testing.T) {
	f := start(t)
	f.nodeGroups.Set(spoke, "fleet/small", &agentv1alpha1.NodeGroup{Id: "fleet/small"})
	cluster, other := f.cluster(), f.as("spiffe://karpenter-capi/cluster/fleet/other")
	reader, nobody := f.as("spiffe://karpenter-capi/reader"), f.as("spiffe://karpenter-capi/nobody")
	socket := f.connect(client.Options{Address: "unix://" + f.socket})
	loopback := f.connect(client.Options{Address: f.loopback, PlaintextLoopback: true})
	for _, c := range []struct {
		name          string
		client        *client.Client
		list, create  codes.Code
		identity      string
		roles         []string
		allClusters   bool
		statusRefused codes.Code
		reads         bool
	}{
		{
			name: "the Cluster itself", client: cluster, identity: "spiffe://karpenter-capi/cluster/fleet/spoke", roles: []string{"cluster"}, reads: true,
		},
		{
			name: "another Cluster", client: other, list: codes.PermissionDenied, create: codes.PermissionDenied,
			identity: "spiffe://karpenter-capi/cluster/fleet/other", roles: []string{"cluster"},
		},
		{
			name: "a reader", client: reader, create: codes.PermissionDenied,
			identity: "spiffe://karpenter-capi/reader", roles: []string{"reader"}, allClusters: true, reads: true,
		},
		{
			name: "an identity without grants", client: nobody, list: codes.PermissionDenied, create: codes.PermissionDenied,
			identity: "spiffe://karpenter-capi/nobody",
		},
		{name: "the unix socket", client: socket, identity: "unix", roles: []string{"admin"}, allClusters: true, reads: true},
		{name: "loopback", client: loopback, identity: "loopback", roles: []string{"admin"}, allClusters: true, reads: true},
		{
			name: "two URIs", client: f.as("spiffe://karpenter-capi/reader", "spiffe://karpenter-capi/cluster/fleet/spoke"),
			list: codes.Unauthenticated, create: codes.Unauthenticated, statusRefused: codes.Unauthenticated,
		},
		{
			name: "another trust domain", client: f.as("spiffe://elsewhere/cluster/fleet/spoke"),
			list: codes.Unauthenticated, create: codes.Unauthenticated, statusRefused: codes.Unauthenticated,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.list, grpcstatus.Code(f.list(c.client)))
			require.Equal(t, c.create, grpcstatus.Code(f.create(c.client)))
			response, err := c.client.Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{})
			require.Equal(t, c.statusRefused, grpcstatus.Code(err))
			require.Equal(t, c.identity, response.GetIdentity())
			require.Equal(t, c.roles, response.GetRoles())
			require.Equal(t, c.allClusters, response.GetAllClusters())
			require.Equal(t, len(c.roles) > 0, response.GetVersion() != "" && response.GetCommit() != "", "what the agent is, is for those who work with it")
			require.Equal(t, c.reads, response.GetCatalogueGeneration() > 0, "when a Cluster's node groups change is for those who may read them")
			health, err := grpc_health_v1.NewHealthClient(c.client.Conn()).Check(f.ctx(), &grpc_health_v1.HealthCheckRequest{})
			require.NoError(t, err, "health needs no identity")
			require.Equal(t, grpc_health_v1.HealthCheckResponse_SERVING, health.GetStatus())
		})
	}
}

func TestCertificatesOfAnotherAuthorityDoNotConnect(t *testing.T) {
	f := start(t)
	err := f.list(f.signedBy(testpki.New(t), "spiffe://karpenter-capi/cluster/fleet/spoke"))
	require.Equal(t, codes.Unavailable, grpcstatus.Code(err))
}

func TestPlaintextIsRefusedWhereTLSIsServed(t *testing.T) {
	f := start(t)
	require.Equal(t, codes.Unavailable, grpcstatus.Code(f.list(f.connect(client.Options{Address: f.address, PlaintextLoopback: true}))))
}

func TestOnlyWhoMaySeeAllClustersLearnsThatOneDoesNotExist(t *testing.T) {
	f := start(t)
	missing := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "missing"}
	request := &agentv1alpha1.ListNodeGroupsRequest{Cluster: missing}
	_, err := f.as("spiffe://karpenter-capi/reader").NodeGroups.ListNodeGroups(f.ctx(), request)
	require.Equal(t, agenterrors.ReasonClusterNotFound, agenterrors.ReasonOf(err))
	_, own := f.as("spiffe://karpenter-capi/cluster/fleet/missing").NodeGroups.ListNodeGroups(f.ctx(), request)
	_, foreign := f.cluster().NodeGroups.ListNodeGroups(f.ctx(), request)
	require.True(t, agenterrors.IsPermissionDenied(own))
	require.Equal(t, grpcstatus.Convert(foreign).Message(), grpcstatus.Convert(own).Message())
}

func TestCertificatesRotateWithoutARestart(t *testing.T) {
	f := start(t)
	require.NoError(t, f.list(f.cluster()))
	old, next := f.authority, testpki.New(t)
	// The server now trusts and presents the new authority, and no longer accepts clients of the
	// old one.
	next.Issue(t, f.serverPKI, next)
	f.authority = next
	err := wait.PollUntilContextTimeout(f.ctx(), 20*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		return f.list(f.cluster()) == nil, nil
	})
	require.NoError(t, err)
	require.Equal(t, codes.Unavailable, grpcstatus.Code(f.list(f.signedBy(old, "spiffe://karpenter-capi/cluster/fleet/spoke"))))
}

// A renewed authority that keeps its key verifies what the earlier one has signed, on both sides,
// so that the sides may learn of it at different times.
func TestARenewedAuthorityWithTheSameKeyKeepsAllCallers(t *testing.T) {
	f := start(t)
	earlier := f.cluster()
	require.NoError(t, f.list(earlier))
	renewed := f.authority.Renewed(t)
	fresh := certificateIn(t, renewed.Issue(t, f.serverPKI, renewed).CertFile) // with ca.crt
	require.Eventually(t, func() bool {
		files := f.authority.Issue(t, t.TempDir(), f.authority)
		pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
		require.NoError(t, err)
		conn, err := tls.Dial("tcp", f.address, &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: f.authority.Pool(), NextProtos: []string{"h2"},
		})
		if err != nil {
			return false
		}
		defer conn.Close() //nolint:errcheck // only its handshake matters
		return conn.ConnectionState().PeerCertificates[0].Equal(fresh)
	}, patience, 10*time.Millisecond, "the agent has the files")
	id := "spiffe://karpenter-capi/cluster/fleet/spoke"
	for _, signedBy := range []*testpki.Authority{f.authority, renewed} {
		for _, trusted := range []*testpki.Authority{f.authority, renewed} {
			require.Eventually(t, func() bool {
				files := signedBy.Issue(t, t.TempDir(), trusted, id)
				c := f.connect(client.Options{Address: f.address, TLS: &client.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile}})
				return f.list(c) == nil
			}, patience, 20*time.Millisecond)
		}
	}
	require.NoError(t, f.list(earlier))
}

func TestBrokenFilesLeaveTheLastUsableOnes(t *testing.T) {
	f := start(t)
	require.NoError(t, f.list(f.cluster())) // the last usable files are in force
	require.NoError(t, os.WriteFile(filepath.Join(f.serverPKI, "tls.crt"), []byte("nonsense"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(f.serverPKI, "ca.crt"), []byte("nonsense"), 0o600))
	for _, certificate := range []string{"server", "client-ca"} {
		require.Eventually(t, func() bool {
			return sum(t, f.registry, "capi_agent_certificate_reload_errors_total", "certificate", certificate) > 0
		}, patience, time.Millisecond)
	}
	require.NoError(t, f.list(f.cluster()))
}

func TestUnusableFilesAreNamedAtStart(t *testing.T) {
	authority := testpki.New(t)
	folder := t.TempDir()
	files := authority.Issue(t, folder, authority)
	broken := filepath.Join(folder, "broken")
	require.NoError(t, os.WriteFile(broken, []byte("nonsense"), 0o600))
	for _, c := range []server.TLSFiles{
		{CertFile: broken, KeyFile: files.KeyFile, ClientCAFile: files.CAFile},
		{CertFile: files.CertFile, KeyFile: broken, ClientCAFile: files.CAFile},
		{CertFile: files.CertFile, KeyFile: files.KeyFile, ClientCAFile: broken},
	} {
		_, _, err := server.ListenTLS(t.Context(), "127.0.0.1:0", c)
		require.ErrorContains(t, err, broken)
	}
}

func TestSocketsAreReplacedOnlyWhenUnserved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	first, err := server.ListenUnix(t.Context(), path, authz.Everything())
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o660), info.Mode().Perm())
	_, err = server.ListenUnix(t.Context(), path, authz.Everything())
	require.ErrorContains(t, err, "another process serves")
	// A killed process leaves its socket behind.
	unix, ok := first.Listener.(*net.UnixListener)
	require.True(t, ok)
	unix.SetUnlinkOnClose(false)
	require.NoError(t, unix.Close())
	second, err := server.ListenUnix(t.Context(), path, authz.Everything())
	require.NoError(t, err)
	require.NoError(t, second.Close())

	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = server.ListenUnix(t.Context(), path, authz.Everything())
	require.ErrorContains(t, err, "is not a socket")
}

func TestASocketThatEveryUserCouldReplaceIsNotServed(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, os.Chmod(folder, 0o777))
	_, err := server.ListenUnix(t.Context(), filepath.Join(folder, "agent.sock"), authz.Everything())
	require.ErrorContains(t, err, "every user could replace the socket")
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestReflectionIsServedUnlessItIsSwitchedOff(t *testing.T) {
	for off, want := range map[bool]codes.Code{false: codes.OK, true: codes.Unimplemented} {
		f := start(t, func(_ *fixture, c *server.Config) { c.NoReflection = off })
		cluster := f.cluster()
		stream, err := grpc_reflection_v1.NewServerReflectionClient(cluster.Conn()).ServerReflectionInfo(f.ctx())
		require.NoError(t, err)
		err = stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
			MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
		})
		if !errors.Is(err, io.EOF) { // the stream may have ended already, and Recv tells why
			require.NoError(t, err)
		}
		_, err = stream.Recv()
		require.Equal(t, want, grpcstatus.Code(err), "%v", err)
		require.NoError(t, f.list(cluster), "it is no part of the API")
	}
}

// Without an end, all clients would stay with the agent that survived a roll.
func TestAConnectionEndsAtItsAge(t *testing.T) {
	f := start(t, func(_ *fixture, c *server.Config) { c.MaxConnectionAge = 50 * time.Millisecond })
	cluster := f.cluster()
	connection := func() string {
		var other peer.Peer
		_, err := cluster.Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{}, grpc.Peer(&other))
		require.NoError(t, err, "no call fails by that")
		return other.LocalAddr.String()
	}
	first := connection()
	for until := time.Now().Add(patience); connection() == first; {
		require.True(t, time.Now().Before(until))
	}
}

func TestLoopbackListenerRefusesOtherAddresses(t *testing.T) {
	_, err := server.ListenLoopback(t.Context(), "0.0.0.0:0")
	require.ErrorContains(t, err, "is not a loopback address")
}

func TestNothingIsAnsweredBeforeTheViewIsComplete(t *testing.T) {
	f := start(t, func(f *fixture, c *server.Config) {
		f.nodeGroups, f.machines, f.claims = newCache[*agentv1alpha1.NodeGroup](4), newCache[*agentv1alpha1.Machine](4), newCache[*agentv1alpha1.Claim](4)
		c.NodeGroups, c.Machines, c.Claims = f.nodeGroups, f.machines, f.claims
	})
	c := f.cluster()
	response, err := c.Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{})
	require.NoError(t, err)
	require.False(t, response.GetCachesSynced())
	require.ErrorContains(t, f.server.Check(), "not complete")
	require.NoError(t, testutil.GatherAndCompare(f.registry, strings.NewReader(`
# HELP capi_agent_synced 1 if the agent's views of the hub are complete, 0 otherwise.
# TYPE capi_agent_synced gauge
capi_agent_synced 0
`), "capi_agent_synced"))
	incomplete := f.scraped()
	health := grpc_health_v1.NewHealthClient(c.Conn())
	serving := func(service string) grpc_health_v1.HealthCheckResponse_ServingStatus {
		response, err := health.Check(f.ctx(), &grpc_health_v1.HealthCheckRequest{Service: service})
		require.NoError(t, err)
		return response.GetStatus()
	}
	require.Equal(t, grpc_health_v1.HealthCheckResponse_NOT_SERVING, serving(""))
	require.Equal(t, grpc_health_v1.HealthCheckResponse_SERVING, serving(agentv1alpha1.StatusService_ServiceDesc.ServiceName))
	for name, err := range map[string]error{
		"ListNodeGroups": f.list(c),
		"CreateClaim":    f.create(c),
		"ListMachines": func() error {
			_, err := c.Machines.ListMachines(f.ctx(), &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef})
			return err
		}(),
		"ReleaseClaim": func() error {
			_, err := c.Claims.ReleaseClaim(f.ctx(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "x"})
			return err
		}(),
		"WatchClaims": func() error {
			stream, err := c.Claims.WatchClaims(f.ctx(), &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef})
			require.NoError(t, err)
			_, err = stream.Recv()
			return err
		}(),
	} {
		require.Equal(t, agenterrors.ReasonNotSynced, agenterrors.ReasonOf(err), "%s: %v", name, err)
	}
	f.SetReady()
	require.Eventually(t, func() bool { return serving("") == grpc_health_v1.HealthCheckResponse_SERVING }, patience, 5*time.Millisecond)
	require.NoError(t, f.server.Check())
	require.NoError(t, f.list(c))
	scrapes.Record(t, "CapiAgentNotSynced", f.scraped(), incomplete)
}

func TestEnginesErrorsBecomeTheAPIs(t *testing.T) {
	f := start(t)
	cluster := f.cluster() // one connection, because their number is limited
	retryAt := time.Now().Add(time.Minute)
	gvr := schema.GroupResource{Group: "g", Resource: "r"}
	for name, c := range map[string]struct {
		err    error
		code   codes.Code
		reason agenterrors.Reason
	}{
		"no room": {&claims.NoRoomError{Candidates: []eligibility.Refusal{
			{NodeGroup: "small", Reason: eligibility.CoolingDown, Message: "failed", RetryAt: retryAt},
			{NodeGroup: "large", Reason: eligibility.Paused, Message: "paused"},
		}}, codes.ResourceExhausted, agenterrors.ReasonNoRoom},
		"no Machines are made": {&claims.NoRoomError{Candidates: []eligibility.Refusal{
			{NodeGroup: "small", Reason: eligibility.MachinesBlocked, Message: "the control plane is upgrading"},
		}}, codes.ResourceExhausted, agenterrors.ReasonNoRoom},
		"refused": {&claims.RefusedError{Candidates: []eligibility.Refusal{
			{NodeGroup: "small", Reason: eligibility.Paused, Message: "paused"},
		}}, codes.FailedPrecondition, agenterrors.ReasonNotOpen},
		"unknown groups":  {&claims.UnknownGroupError{Candidates: []string{"small"}}, codes.NotFound, agenterrors.ReasonNodeGroupNotFound},
		"unknown cluster": {claims.ErrUnknownCluster, codes.NotFound, agenterrors.ReasonClusterNotFound},
		"cluster paused":  {claims.ErrClusterPaused, codes.Unavailable, agenterrors.ReasonClusterPaused},
		"restoring":       {claims.ErrRestoring, codes.Unavailable, agenterrors.ReasonNotSynced},
		"ended":           {&claims.EndedError{Reason: "Released", Message: "gone"}, codes.Aborted, agenterrors.ReasonClaimEnded},
		"conflict": {
			fmt.Errorf("binding: %w: %w", claims.ErrConflict, apierrors.NewConflict(gvr, "secret-name", errors.New("no"))),
			codes.Aborted, agenterrors.ReasonConflict,
		},
		"refused by a policy": {
			fmt.Errorf("making the claim: %w: %w", claims.ErrWriteRefused, apierrors.NewForbidden(gvr, "secret-name", errors.New("no"))),
			codes.FailedPrecondition, agenterrors.ReasonWriteRefused,
		},
		"API server away": {
			&url.Error{Op: "Get", URL: "https://hub", Err: errors.New("connection refused")},
			codes.Unavailable, agenterrors.ReasonHubUnreachable,
		},
		"API server busy":     {apierrors.NewTooManyRequests("slow down", 1), codes.Unavailable, agenterrors.ReasonHubUnreachable},
		"API server ill":      {apierrors.NewInternalError(errors.New("etcd")), codes.Unavailable, agenterrors.ReasonHubUnreachable},
		"rate used up":        {rateUsedUp(t), codes.DeadlineExceeded, ""},
		"webhook out of turn": {apierrors.NewInternalError(rateUsedUp(t)), codes.Unavailable, agenterrors.ReasonHubUnreachable},
		"newer ledger": {
			fmt.Errorf("MachineDeployment secret-name: %w", protocol.ErrNewerLedger), codes.Unavailable, agenterrors.ReasonHubUnreachable,
		},
		"no right": {apierrors.NewForbidden(gvr, "secret-name", errors.New("no")), codes.Internal, ""},
		"a bug":    {errors.New("secret-name"), codes.Internal, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f.engine.fail(c.err)
			err := f.create(cluster)
			require.Equal(t, c.code, grpcstatus.Code(err), "%v", err)
			require.Equal(t, c.reason, agenterrors.ReasonOf(err), "%v", err)
			require.NotContains(t, err.Error(), "secret-name")
			require.NotContains(t, err.Error(), "https://hub", "where the hub is, is not the caller's business")
		})
	}
	f.engine.fail(&claims.NoRoomError{Candidates: []eligibility.Refusal{{NodeGroup: "small", Reason: eligibility.CoolingDown, RetryAt: retryAt}}})
	err := f.create(cluster)
	require.Equal(t, "fleet/small", agenterrors.Rejections(err)[0].NodeGroup)
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, agenterrors.Rejections(err)[0].Unavailable)
	delay, ok := agenterrors.RetryDelay(err)
	require.True(t, ok)
	require.Greater(t, delay, 30*time.Second)

	f.engine.fail(claims.ErrStaleToken)
	_, err = cluster.Claims.SyncClaims(f.ctx(), &agentv1alpha1.SyncClaimsRequest{Cluster: spokeRef, Holder: "karpenter", Token: "t"})
	require.True(t, agenterrors.IsStaleToken(err), "%v", err)
}

// rateUsedUp returns the error of a request that client-go's limiter does not let through in time.
func rateUsedUp(t *testing.T) error {
	t.Helper()
	limiter := flowcontrol.NewTokenBucketRateLimiter(0.001, 1)
	require.True(t, limiter.TryAccept())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := limiter.Wait(ctx)
	require.Error(t, err)
	require.NoError(t, ctx.Err(), "it says so before the deadline")
	return fmt.Errorf("listing claims: %w", err)
}

// Such names cannot exist. A lookup would only find out after an effort, or fail in a client.
func TestImpossibleNamesAreInvalidArguments(t *testing.T) {
	f := start(t)
	cluster := f.cluster()
	invalid := func(field string, err error) {
		t.Helper()
		require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
		require.Equal(t, field, agenterrors.FieldViolations(err)[0].Field)
	}
	for _, name := range []string{"..", "a/b", "a%", "A", "a\nb", "ä", strings.Repeat("a", 254)} {
		_, err := cluster.Machines.GetMachine(f.ctx(), &agentv1alpha1.GetMachineRequest{Cluster: spokeRef, Name: name})
		invalid("name", err)
		_, err = cluster.NodeGroups.GetNodeGroup(f.ctx(), &agentv1alpha1.GetNodeGroupRequest{Cluster: spokeRef, Id: "fleet/" + name})
		invalid("id", err)
		_, err = cluster.Machines.ListMachines(f.ctx(), &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef, NodeGroupId: "fleet/" + name})
		invalid("node_group_id", err)
		_, err = cluster.Claims.ListClaims(f.ctx(), &agentv1alpha1.ListClaimsRequest{Cluster: spokeRef, Holder: name})
		invalid("holder", err)
		_, err = cluster.Claims.CreateClaim(f.ctx(), &agentv1alpha1.CreateClaimRequest{
			Cluster: spokeRef, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/" + name},
		})
		invalid("candidates[0]", err)
	}
	_, err := cluster.Machines.ListMachines(f.ctx(), &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef})
	require.NoError(t, err)
}

func TestReleasedClaimThatIsUnknownIsOK(t *testing.T) {
	f := start(t)
	response, err := f.cluster().Claims.ReleaseClaim(f.ctx(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "x"})
	require.NoError(t, err)
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, response.GetClaim().GetPhase())
}

// If a Cluster may be on its way to another hub, a Machine that is missing in its list may still
// exist.
func TestMachinesOfAClusterThatIsPausedAreNotListed(t *testing.T) {
	f := start(t)
	f.engine.fail(claims.ErrClusterPaused)
	_, err := f.cluster().Machines.ListMachines(f.ctx(), &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef})
	require.Equal(t, agenterrors.ReasonClusterPaused, agenterrors.ReasonOf(err), "%v", err)
	_, err = f.cluster().Machines.GetMachine(f.ctx(), &agentv1alpha1.GetMachineRequest{Cluster: spokeRef, Name: "m"})
	require.Equal(t, agenterrors.ReasonClusterPaused, agenterrors.ReasonOf(err), "%v", err)
}

func TestPanicFailsOnlyItsCall(t *testing.T) {
	f := start(t)
	f.engine.panic = true
	err := f.create(f.cluster())
	require.Equal(t, codes.Internal, grpcstatus.Code(err))
	require.NotContains(t, err.Error(), "a bug")
	require.NoError(t, f.list(f.cluster()))
	require.Contains(t, f.log.String(), "panic: a bug")
}

func TestRequestIDIsTheCallersOrNew(t *testing.T) {
	f := start(t)
	call := func(id string) string {
		var header metadata.MD
		ctx := f.ctx()
		if id != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, client.RequestIDKey, id)
		}
		conn, err := grpc.NewClient(f.loopback, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		_, err = agentv1alpha1.NewClaimServiceClient(conn).CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: spokeRef, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small"},
		}, grpc.Header(&header))
		require.NoError(t, err)
		return header.Get(client.RequestIDKey)[0]
	}
	require.Equal(t, "my-id", call("my-id"))
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(strings.Split(f.log.String(), "\n"), func(line string) bool {
			return strings.Contains(line, `"requestID"="my-id"`) && strings.Contains(line, `"cluster"="fleet/spoke"`) &&
				strings.Contains(line, `"claim"="claim"`) && strings.Contains(line, `"identity"="loopback"`)
		})
	}, patience, time.Millisecond, "it is logged, with what the call was about: %s", f.log)
	require.NotEmpty(t, call(""))
	require.NotEqual(t, strings.Repeat("x", 500), call(strings.Repeat("x", 500)))
	require.NotContains(t, call("two words"), " ")
}

func TestWatcherOfOneHolderSeesOnlyItsClaimsAndHeartbeatsBetweenTheOthers(t *testing.T) {
	fake := clocktesting.NewFakeClock(time.Unix(1000, 0))
	f := start(t, func(f *fixture, c *server.Config) {
		f.claims = watchcache.New(watchcache.Options[*agentv1alpha1.Claim]{
			Equal: func(a, b *agentv1alpha1.Claim) bool { return proto.Equal(a, b) }, Buffer: 4, Heartbeat: time.Minute, Clock: fake,
		})
		f.claims.SetReady()
		c.Claims = f.claims
	})
	set := func(id, holder, message string) {
		f.claims.Set(spoke, id, &agentv1alpha1.Claim{ClaimId: id, Holder: holder, Message: message})
	}
	set("foreign", "somebody", "")
	set("own", "karpenter", "")
	stream, err := f.cluster().Claims.WatchClaims(f.ctx(), &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef, Holder: "karpenter"})
	require.NoError(t, err)
	receive := func() *agentv1alpha1.WatchClaimsResponse {
		t.Helper()
		event, err := stream.Recv()
		require.NoError(t, err)
		return event
	}
	require.Equal(t, "own", receive().GetUpsert().GetClaimId())
	require.NotNil(t, receive().GetSynced())
	require.Eventually(t, fake.HasWaiters, patience, time.Millisecond)
	for i := range 6 {
		set("foreign", "somebody", fmt.Sprint("change ", i))
		fake.Step(10 * time.Second)
	}
	require.EqualValues(t, 1060, receive().GetHeartbeat().GetTime().GetSeconds())
	f.claims.Remove(spoke, "foreign")
	f.claims.Remove(spoke, "own")
	require.Equal(t, "own", receive().GetRemovedId())
}

func TestSlowWatcherIsResyncedAndEndsWithTheWholeView(t *testing.T) {
	f := start(t)
	stream, err := f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	first, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, first.GetSynced())
	// This is more than the connection's buffers hold, so the server has to wait.
	const groups = 400
	for i := range groups {
		id := fmt.Sprintf("fleet/%03d", i)
		f.nodeGroups.Set(spoke, id, &agentv1alpha1.NodeGroup{Id: id, Labels: map[string]string{"filler": strings.Repeat("x", 10_000)}})
	}
	view, resynced := map[string]bool{}, false
	for len(view) < groups {
		event, err := stream.Recv()
		require.NoError(t, err)
		switch {
		case event.GetUpsert() != nil:
			view[event.GetUpsert().GetId()] = true
		case event.GetResync() != nil:
			resynced = true
			clear(view)
		}
	}
	require.True(t, resynced)
	require.Positive(t, f.nodeGroups.Stats().Resyncs)
}

func TestShutdownEndsStreamsAndLetsCallsEnd(t *testing.T) {
	f := start(t, func(f *fixture, _ *server.Config) { f.engine.block = make(chan struct{}) })
	c := f.cluster()
	watch, err := c.Machines.WatchMachines(f.ctx(), &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)
	health, err := grpc_health_v1.NewHealthClient(c.Conn()).Watch(f.ctx(), &grpc_health_v1.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = health.Recv()
	require.NoError(t, err)
	created := make(chan error, 1)
	go func() { created <- f.create(c) }()
	require.Eventually(t, func() bool {
		return testutil.CollectAndCount(f.registry, "grpc_server_started_total") > 0 && strings.Contains(startedCalls(t, f.registry), "CreateClaim")
	}, patience, time.Millisecond)

	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		f.stop()
	}()
	_, err = watch.Recv()
	require.Equal(t, agenterrors.ReasonShuttingDown, agenterrors.ReasonOf(err), "%v", err)
	require.ErrorContains(t, f.server.Check(), "shutting down")
	select {
	case <-stopped:
		t.Fatal("the server ended before the call in flight")
	default:
	}
	close(f.engine.block)
	require.NoError(t, <-created)
	select {
	case <-stopped:
	case <-time.After(patience / 2):
		t.Fatal("the server did not end with its last call")
	}
}

// startedCalls returns the methods with started calls.
func startedCalls(t *testing.T, registry *prometheus.Registry) string {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	var methods strings.Builder
	for _, family := range families {
		if family.GetName() != "grpc_server_started_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetName() == "grpc_method" && metric.GetCounter().GetValue() > 0 {
					methods.WriteString(label.GetValue() + " ")
				}
			}
		}
	}
	return methods.String()
}

func TestShutdownCutsOffCallsThatDoNotEnd(t *testing.T) {
	f := start(t, func(f *fixture, c *server.Config) {
		f.engine.block = make(chan struct{})
		c.ShutdownGrace = 10 * time.Millisecond
	})
	c := f.cluster()
	created := make(chan error, 1)
	go func() { created <- f.create(c) }()
	require.Eventually(t, func() bool { return strings.Contains(startedCalls(t, f.registry), "CreateClaim") }, patience, time.Millisecond)
	f.stop()
	require.Equal(t, codes.Unavailable, grpcstatus.Code(<-created))
}

func TestCreateClaimRefusesCandidatesThatAreNoNodeGroups(t *testing.T) {
	f := start(t)
	_, err := f.cluster().Claims.CreateClaim(f.ctx(), &agentv1alpha1.CreateClaimRequest{
		Cluster: spokeRef, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small", "other/small"},
	})
	require.Equal(t, "candidates[1]", agenterrors.FieldViolations(err)[0].Field)
}

func TestMetricsShowTheViews(t *testing.T) {
	f := start(t)
	f.nodeGroups.Set(spoke, "fleet/a", &agentv1alpha1.NodeGroup{Id: "fleet/a"})
	require.NoError(t, testutil.GatherAndCompare(f.registry, strings.NewReader(`
# HELP capi_agent_catalogue_generation Number of changes to node groups since the agent started.
# TYPE capi_agent_catalogue_generation gauge
capi_agent_catalogue_generation 1
# HELP capi_agent_synced 1 if the agent's views of the hub are complete, 0 otherwise.
# TYPE capi_agent_synced gauge
capi_agent_synced 1
`), "capi_agent_catalogue_generation", "capi_agent_synced"))
}

func TestAnIssuerSignsOnlyWhatThePolicyLetsItSign(t *testing.T) {
	f := start(t, func(f *fixture, config *server.Config) {
		text, err := os.ReadFile(f.authority.Issue(t, t.TempDir(), f.authority).CAFile)
		require.NoError(t, err)
		block, _ := pem.Decode(text)
		policy, err := authz.ParsePolicy(fmt.Appendf(nil, `
issuers:
- fingerprints: [%x]
  clusters: [fleet/spoke]
`, sha256.Sum256(block.Bytes)), "karpenter-capi")
		require.NoError(t, err)
		config.Authorizer, err = authz.New("karpenter-capi", func() *authz.Policy { return policy }, clock.RealClock{})
		require.NoError(t, err)
	})
	require.NoError(t, f.create(f.cluster()))
	err := f.create(f.as("spiffe://karpenter-capi/cluster/fleet/other"))
	require.True(t, agenterrors.IsUnauthenticated(err), "%v", err)
}

func TestCallersActAsTheHoldersOfTheirRole(t *testing.T) {
	f := start(t)
	sync := func(c *client.Client, holder string, nodes ...*agentv1alpha1.NodeReport) error {
		_, err := c.Claims.SyncClaims(f.ctx(), &agentv1alpha1.SyncClaimsRequest{Cluster: spokeRef, Holder: holder, Token: "t", Nodes: nodes})
		return err
	}
	cluster, socket := f.cluster(), f.connect(client.Options{Address: "unix://" + f.socket})
	require.NoError(t, sync(cluster, "karpenter"))
	require.NotNil(t, f.engine.synced.Nodes, "an empty report is a report")
	err := sync(cluster, "cluster-autoscaler")
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	require.ErrorContains(t, err, `"cluster-autoscaler"`)
	require.NoError(t, sync(socket, "cluster-autoscaler"))
	require.Nil(t, f.engine.synced.Nodes, "no report")
	err = sync(socket, "cluster-autoscaler", &agentv1alpha1.NodeReport{ProviderId: "test://a"})
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	require.Empty(t, f.observations())

	for c, may := range map[*client.Client]bool{cluster: false, socket: true} {
		_, err := c.Claims.ReleaseClaim(f.ctx(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "x"})
		require.NoError(t, err)
		require.True(t, f.engine.released.Holders("karpenter"))
		require.Equal(t, may, f.engine.released.Holders("cluster-autoscaler"))
	}
	f.engine.fail(claims.ErrForeignHolder)
	_, err = cluster.Claims.ReleaseClaim(f.ctx(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "x"})
	require.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
}

func TestNodesAreObservedWithoutWhatCannotBeRead(t *testing.T) {
	f := start(t)
	_, err := f.cluster().Claims.SyncClaims(f.ctx(), &agentv1alpha1.SyncClaimsRequest{
		Cluster: spokeRef, Holder: "karpenter", Token: "t", Nodes: []*agentv1alpha1.NodeReport{{
			ProviderId: "test://a", Capacity: map[string]string{"cpu": "4", "memory": "500mb"}, Allocatable: map[string]string{"cpu": "-1"},
			Labels: map[string]string{"kubernetes.io/arch": "arm64"}, Unregistered: true,
		}},
	})
	require.NoError(t, err)
	observed := f.observations()
	require.Len(t, observed, 1)
	node := observed[0]
	require.Equal(t, "test://a", node.ProviderID)
	require.Len(t, node.Capacity, 1)
	require.Equal(t, "4", node.Capacity.Cpu().String())
	require.Empty(t, node.Allocatable)
	require.Equal(t, map[string]string{"kubernetes.io/arch": "arm64"}, node.Labels)
	require.True(t, node.Unregistered)
	require.Equal(t, 2, node.Unusable)
}
