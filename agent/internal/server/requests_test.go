package server_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const mebibyte = 1 << 20

// encoded is a message that is sent unchanged.
type encoded []byte

// asItIs is a codec that sends [encoded], and accepts any response.
type asItIs struct{}

func (asItIs) Name() string { return "proto" }

func (asItIs) Marshal(message any) (mem.BufferSlice, error) {
	bytes, _ := message.(encoded)
	return mem.BufferSlice{mem.SliceBuffer(bytes)}, nil
}

func (asItIs) Unmarshal(mem.BufferSlice, any) error { return nil }

// raw connects with certificates for the URI names, without the features of [client.Client].
func (f *fixture) raw(uris ...string) *grpc.ClientConn {
	f.Helper()
	files := f.authority.Issue(f, f.TempDir(), f.authority, uris...)
	pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(f, err)
	conn, err := grpc.NewClient(f.address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: f.authority.Pool(),
	})))
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, conn.Close()) })
	return conn
}

func (f *fixture) send(conn *grpc.ClientConn, method string, request encoded) error {
	f.Helper()
	return conn.Invoke(f.ctx(), method, request, &struct{}{}, grpc.ForceCodecV2(asItIs{}))
}

// allocated returns how many bytes f allocates in total, which is an upper bound of its memory use.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// syncOf returns the encoded beginning of a SyncClaims request of the spoke.
func syncOf(t *testing.T) encoded {
	t.Helper()
	request, err := proto.Marshal(&agentv1alpha1.SyncClaimsRequest{Cluster: spokeRef, Holder: "karpenter", Token: "token"})
	require.NoError(t, err)
	return request
}

// emptyReports returns size bytes of empty NodeReports. Each has two bytes on the wire, and a
// hundred in memory.
func emptyReports(size int) encoded {
	return bytes.Repeat(protowire.AppendBytes(protowire.AppendTag(nil, 5, protowire.BytesType), nil), size/2)
}

func TestARequestOfMillionsOfElementsCostsNoMoreThanItsBytes(t *testing.T) {
	f := start(t)
	conn := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke")
	require.Error(t, f.send(conn, agentv1alpha1.ClaimService_GetClaim_FullMethodName, nil), "connected, and all is warm")
	request := append(syncOf(t), emptyReports(3*mebibyte)...)
	var err error
	took := allocated(func() { err = f.send(conn, agentv1alpha1.ClaimService_SyncClaims_FullMethodName, request) })
	require.Equal(t, codes.InvalidArgument, grpcstatus.Code(err), "%v", err)
	require.Len(t, agenterrors.FieldViolations(err), 1)
	require.Equal(t, "nodes", agenterrors.FieldViolations(err)[0].Field)
	require.Less(t, proto.Size(grpcstatus.Convert(err).Proto()), 4096)
	t.Logf("%d bytes on the wire took %.1f MiB on both sides", len(request), float64(took)/mebibyte)
	require.Less(t, took, uint64(8*len(request)), "on both sides")
	require.NoError(t, f.list(f.cluster()), "the agent serves on")
}

func TestMessagesAreBoundedByMethod(t *testing.T) {
	f := start(t)
	conn := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke")
	for _, c := range []struct {
		method string
		size   int
		code   codes.Code
	}{
		{agentv1alpha1.ClaimService_SyncClaims_FullMethodName, 4*mebibyte + 1, codes.ResourceExhausted},
		{agentv1alpha1.ClaimService_SyncClaims_FullMethodName, 4 * mebibyte, codes.InvalidArgument},
		{agentv1alpha1.ClaimService_CreateClaim_FullMethodName, mebibyte/4 + 1, codes.ResourceExhausted},
		{agentv1alpha1.ClaimService_CreateClaim_FullMethodName, mebibyte / 4, codes.InvalidArgument},
		{agentv1alpha1.StatusService_GetStatus_FullMethodName, 4<<10 + 1, codes.ResourceExhausted},
		{agentv1alpha1.StatusService_GetStatus_FullMethodName, 4 << 10, codes.OK},
		{"/grpc.health.v1.Health/Check", 4<<10 + 1, codes.ResourceExhausted},
		{"/grpc.health.v1.Health/Check", 4 << 10, codes.OK},
	} {
		require.Equal(t, c.code, grpcstatus.Code(f.send(conn, c.method, padded(nil, c.size))), "%s with %d bytes", c.method, c.size)
	}
}

// A unary call, and one that is answered by a stream, has exactly one request.
func TestACallHasExactlyOneRequest(t *testing.T) {
	f := start(t)
	conn := f.raw(spokeURI)
	request, err := proto.Marshal(&agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	for _, method := range []string{agentv1alpha1.ClaimService_ListClaims_FullMethodName, agentv1alpha1.ClaimService_WatchClaims_FullMethodName} {
		for n, wanted := range []codes.Code{codes.Internal, codes.OK, codes.Internal} {
			stream, err := conn.NewStream(f.ctx(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, grpc.ForceCodecV2(asItIs{}))
			require.NoError(t, err)
			for range n {
				require.NoError(t, stream.SendMsg(encoded(request)))
			}
			require.NoError(t, stream.CloseSend())
			require.Equal(t, wanted, grpcstatus.Code(stream.RecvMsg(&struct{}{})), "%s with %d requests", method, n)
		}
	}
}

// padded fills a request up to the size, with a single unknown field.
func padded(request encoded, size int) encoded {
	filled := protowire.AppendTag(slices.Clip(request), 1000, protowire.BytesType)
	return protowire.AppendBytes(filled, make([]byte, size-len(filled)-protowire.SizeVarint(uint64(size))))
}

// The agent has forgotten all but a few bytes of it by then.
func TestTheRequestOfAnOpenStreamDoesNotCount(t *testing.T) {
	f := start(t, func(_ *fixture, c *server.Config) {
		c.Onboarded = func(context.Context, types.NamespacedName) (string, bool, error) { return "", true, nil }
	})
	large := func(n int) {
		ref, uri := tenant(n)
		request, err := proto.Marshal(&agentv1alpha1.SyncClaimsRequest{Cluster: ref, Holder: "karpenter", Token: "token"})
		require.NoError(t, err)
		require.NoError(t, f.send(f.raw(uri), agentv1alpha1.ClaimService_SyncClaims_FullMethodName, padded(request, mebibyte)), "tenant %d", n)
	}
	const tenants, watches = 4, 64
	for n := range tenants {
		ref, uri := tenant(n)
		request, err := proto.Marshal(&agentv1alpha1.WatchClaimsRequest{Cluster: ref})
		require.NoError(t, err)
		conn := f.raw(uri)
		for range watches {
			stream, err := conn.NewStream(f.ctx(), &grpc.StreamDesc{ServerStreams: true}, agentv1alpha1.ClaimService_WatchClaims_FullMethodName,
				grpc.ForceCodecV2(asItIs{}))
			require.NoError(t, err)
			require.NoError(t, stream.SendMsg(padded(request, mebibyte/4)))
			require.NoError(t, stream.CloseSend())
			require.NoError(t, stream.RecvMsg(&struct{}{}))
		}
	}
	for n := range tenants + 1 {
		large(n)
	}
}

// What a call announces is all that the agent has to see of a request that is too large.
func TestARequestIsRefusedByTheSizeThatItAnnounces(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.RequestTimeout = time.Hour }))
	p := f.rawPeer()
	for method, most := range map[string]int{
		agentv1alpha1.ClaimService_SyncClaims_FullMethodName:                    4 * mebibyte,
		agentv1alpha1.ClaimService_CreateClaim_FullMethodName:                   mebibyte / 4,
		agentv1alpha1.ClaimService_WatchClaims_FullMethodName:                   mebibyte / 4,
		agentv1alpha1.StatusService_GetStatus_FullMethodName:                    4 << 10,
		grpc_health_v1.Health_Check_FullMethodName:                              4 << 10,
		grpc_health_v1.Health_Watch_FullMethodName:                              4 << 10,
		grpc_reflection_v1.ServerReflection_ServerReflectionInfo_FullMethodName: 4 << 10,
	} {
		p.announce(method, most+1)
		require.Equal(t, "8", p.status(), "RESOURCE_EXHAUSTED: %s", method)
	}
}

// An answer would be compressed as its request is, and what the transport keeps of it could not be
// counted; a small request could be the largest one once it is expanded.
func TestCompressedCallsAreRefused(t *testing.T) {
	f := start(t)
	conn := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke")
	compressed := grpc.UseCompressor(gzip.Name)
	for _, method := range []string{
		agentv1alpha1.ClaimService_ListClaims_FullMethodName, agentv1alpha1.ClaimService_SyncClaims_FullMethodName,
		"/grpc.health.v1.Health/Check",
	} {
		err := conn.Invoke(f.ctx(), method, encoded{}, &struct{}{}, grpc.ForceCodecV2(asItIs{}), compressed)
		require.Equal(t, codes.Unimplemented, grpcstatus.Code(err), "%s: %v", method, err)
		require.ErrorContains(t, err, "without compression")
	}
	for _, method := range []string{agentv1alpha1.ClaimService_WatchClaims_FullMethodName, "/grpc.health.v1.Health/Watch"} {
		stream, err := conn.NewStream(f.ctx(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, compressed)
		require.NoError(t, err)
		err = stream.RecvMsg(&struct{}{})
		require.Equal(t, codes.Unimplemented, grpcstatus.Code(err), "%s: %v", method, err)
	}
	require.NoError(t, f.list(f.cluster()), "others are served")
}

// TestNothingIsReadOfACallerWithoutARight sends only headers. The server responds although the body
// never arrives.
func TestNothingIsReadOfACallerWithoutARight(t *testing.T) {
	f := start(t)
	for _, c := range []struct {
		name, identity string
		code           codes.Code
	}{
		{name: "no right", identity: "spiffe://karpenter-capi/nobody", code: codes.PermissionDenied},
		{name: "no usable identity", identity: "spiffe://elsewhere/cluster/fleet/spoke", code: codes.Unauthenticated},
	} {
		for _, method := range []string{
			agentv1alpha1.ClaimService_SyncClaims_FullMethodName, agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName,
		} {
			t.Run(c.name+method, func(t *testing.T) {
				stream, err := f.raw(c.identity).NewStream(f.ctx(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
				require.NoError(t, err)
				require.Equal(t, c.code, grpcstatus.Code(stream.RecvMsg(&struct{}{})))
			})
		}
	}
}

// A caller that is denied or offboarded could starve others otherwise, with calls that need no
// right.
func TestNothingIsReadOfACallerThatIsShutOut(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.RequestTimeout = time.Hour }), func(_ *fixture, c *server.Config) {
		policy := policyOf(t, "deny:\n- id: spiffe://karpenter-capi/cluster/fleet/denied\n")
		var err error
		c.Authorizer, err = authz.New("karpenter-capi", func() *authz.Policy { return policy }, clock.RealClock{})
		require.NoError(t, err)
		c.Onboarded = func(context.Context, types.NamespacedName) (string, bool, error) {
			return v1alpha1.Offboarded, true, nil
		}
		c.RightsInterval = time.Hour // its connections are not closed meanwhile
		c.Clock = clocktesting.NewFakePassiveClock(time.Now())
	})
	for name, path := range map[string]string{"denied": "denied", "offboarded": "spoke/first", "offboarded, with another certificate": "spoke"} {
		t.Run(name, func(t *testing.T) {
			p := f.rawPeerOf("spiffe://karpenter-capi/cluster/fleet/" + path)
			p.T = t
			for method, size := range map[string]int{
				agentv1alpha1.ClaimService_SyncClaims_FullMethodName:                    4 * mebibyte,
				agentv1alpha1.ClaimService_WatchClaims_FullMethodName:                   mebibyte / 4,
				agentv1alpha1.ClusterService_ListClusters_FullMethodName:                mebibyte / 4,
				grpc_health_v1.Health_Check_FullMethodName:                              4 << 10,
				grpc_health_v1.Health_Watch_FullMethodName:                              mebibyte / 4,
				grpc_reflection_v1.ServerReflection_ServerReflectionInfo_FullMethodName: 4 << 10,
			} {
				p.announce(method, size)
				require.Equal(t, "16", p.status(), "UNAUTHENTICATED: %s", method)
			}
		})
	}
	// Each is a refusal that slows the caller's connections down.
	p := f.rawPeerOf(spokeURI)
	f.requireSlowed(p, func() {
		p.announce(grpc_health_v1.Health_Watch_FullMethodName, mebibyte/4)
		require.Equal(t, "16", p.status())
	})
}

// worstSync returns the valid SyncClaims request that uses the most memory: it has as many map
// entries as fit into 4 MiB.
func worstSync(t *testing.T) *agentv1alpha1.SyncClaimsRequest {
	t.Helper()
	entries := map[string]string{}
	for i := range 128 {
		entries[strconv.FormatInt(int64(i), 36)] = "1"
	}
	labels := map[string]string{}
	for i := range 64 {
		labels[strconv.FormatInt(int64(i), 36)] = ""
	}
	node := &agentv1alpha1.NodeReport{ProviderId: "a", Capacity: entries, Allocatable: entries, Labels: labels}
	request := &agentv1alpha1.SyncClaimsRequest{Cluster: spokeRef, Holder: "karpenter", Token: "token"}
	for size := proto.Size(request); size+proto.Size(node)+4 <= 4*mebibyte; size += proto.Size(node) + 4 {
		request.Nodes = append(request.Nodes, node)
	}
	return request
}

func TestMemoryOfTheWorstLegalRequest(t *testing.T) {
	f := start(t)
	conn := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke")
	encodedRequest, err := proto.Marshal(worstSync(t))
	require.NoError(t, err)
	require.Greater(t, len(encodedRequest), 4*mebibyte-10000)
	require.Error(t, f.send(conn, agentv1alpha1.ClaimService_GetClaim_FullMethodName, nil))
	took := allocated(func() {
		require.NoError(t, f.send(conn, agentv1alpha1.ClaimService_SyncClaims_FullMethodName, encodedRequest))
	})
	t.Logf("%.1f MiB on the wire took %.0f MiB in all", float64(len(encodedRequest))/mebibyte, float64(took)/mebibyte)
	require.Less(t, took, uint64(100*len(encodedRequest)))
}

func TestHeadersAreBounded(t *testing.T) {
	f := start(t)
	ctx, cancel := context.WithCancel(f.ctx())
	defer cancel()
	stream, err := f.raw("spiffe://karpenter-capi/cluster/fleet/spoke").NewStream(
		withHeader(ctx, "x-filler", strings.Repeat("a", 32<<10)),
		&grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, agentv1alpha1.StatusService_GetStatus_FullMethodName)
	if err == nil {
		err = stream.RecvMsg(&struct{}{})
	}
	require.Equal(t, codes.Internal, grpcstatus.Code(err), "%v", err)
	require.ErrorContains(t, err, "header list size")
}

func withHeader(ctx context.Context, key, value string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, key, value)
}

func TestReplacedFilesShowInMetricsAndNotInLogs(t *testing.T) {
	f := start(t)
	metric := func(name, of string) float64 {
		families, err := f.registry.Gather()
		require.NoError(t, err)
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == name && m.GetLabel()[0].GetValue() == of {
					return m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
		return -1
	}
	for _, of := range []string{"server", "client-ca"} {
		require.InDelta(t, time.Now().Add(time.Hour).Unix(), metric("capi_agent_certificate_not_after_seconds", of), 120)
		require.InDelta(t, time.Now().Add(-time.Minute).Unix(), metric("capi_agent_certificate_not_before_seconds", of), 120)
	}
	require.NoError(t, f.list(f.cluster()))
	usable := f.scraped()
	key, err := os.ReadFile(f.authority.Issue(t, t.TempDir(), f.authority).KeyFile)
	require.NoError(t, err)
	// The key has already been replaced, but not its certificate.
	require.NoError(t, os.WriteFile(filepath.Join(f.serverPKI, "tls.key"), key, 0o600))
	require.Eventually(t, func() bool { return metric("capi_agent_certificate_reload_errors_total", "server") > 0 }, patience, time.Millisecond)
	scrapes.Record(t, "CapiAgentCertificateUnusable", usable, f.scraped(), scrapes.Once())
	require.NoError(t, f.list(f.cluster()), "the last usable ones stay in force")
	secret := strings.Split(string(key), "\n")[1]
	require.Contains(t, f.log.String(), "tls.key")
	for _, log := range []string{f.log.String(), grpcLog.String()} {
		require.NotContains(t, log, secret)
	}
}

func TestACertificateThatIsAboutToExpireIsShown(t *testing.T) {
	f := start(t)
	seconds := func(name string) float64 { return sum(t, f.registry, name, "certificate", "server") }
	expires := func() bool {
		from, until := seconds("capi_agent_certificate_not_before_seconds"), seconds("capi_agent_certificate_not_after_seconds")
		return until-float64(time.Now().Unix()) < min((until-from)/4, (7*24*time.Hour).Seconds())
	}
	require.False(t, expires(), "it was issued for an hour, and begins a minute ago")
	issued := f.scraped()
	f.authority.IssueFor(t, 10*time.Second, f.serverPKI, f.authority)
	require.Eventually(t, expires, patience, time.Millisecond)
	scrapes.Record(t, "CapiAgentCertificateExpiring", issued, f.scraped(), scrapes.Only("certificate", "server"))
}

// grpcLog is the log of gRPC, at every severity.
var grpcLog lines

func (l *lines) Write(text []byte) (int, error) {
	l.add("grpc", string(text))
	return len(text), nil
}

func TestMain(m *testing.M) {
	grpclog.SetLoggerV2(grpclog.NewLoggerV2WithVerbosity(&grpcLog, &grpcLog, &grpcLog, 99))
	os.Exit(m.Run())
}

func encodedCreate(t *testing.T) encoded {
	t.Helper()
	request, err := proto.Marshal(&agentv1alpha1.CreateClaimRequest{
		Cluster: spokeRef, ClaimId: "claim", Holder: "karpenter", Candidates: []string{"fleet/small"},
	})
	require.NoError(t, err)
	return request
}
