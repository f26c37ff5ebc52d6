package client_test

import (
	"bytes"
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const patience = 20 * time.Second

// grpcLog is the log of gRPC, at every severity.
var grpcLog logged

type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestMain(m *testing.M) {
	grpclog.SetLoggerV2(grpclog.NewLoggerV2WithVerbosity(&grpcLog, &grpcLog, &grpcLog, 99))
	goleak.VerifyTestMain(m)
}

// onSocket serves a fake agent on a unix socket and returns options to connect to it.
func onSocket(t *testing.T) (*fakeagent.Agent, client.Options) {
	t.Helper()
	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	socket := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	agent.Serve(listener)
	return agent, client.Options{Address: "unix://" + socket}
}

func connect(t *testing.T, options client.Options) *client.Client {
	t.Helper()
	c, err := client.New(options)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func getStatus(ctx context.Context, c *client.Client) error {
	_, err := c.Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	return err
}

func TestUnixSocket(t *testing.T) {
	_, options := onSocket(t)
	require.NoError(t, getStatus(t.Context(), connect(t, options)))
}

func TestAgentThatComesLaterIsFound(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().String()
	require.NoError(t, listener.Close())

	c := connect(t, client.Options{Address: address, PlaintextLoopback: true})
	err = getStatus(t.Context(), c)
	require.True(t, agenterrors.IsUnavailable(err), "%v", err)

	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	listener, err = net.Listen("tcp", address)
	require.NoError(t, err)
	agent.Serve(listener)
	require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, 10*time.Millisecond)
}

func TestCloseEndsMirrors(t *testing.T) {
	agent, options := onSocket(t)
	mine, err := client.New(options)
	require.NoError(t, err)
	conn, err := grpc.NewClient(options.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "a"})
	for name, c := range map[string]*client.Client{"own connection": mine, "another's connection": client.FromConn(conn, options)} {
		mirror := c.MirrorNodeGroups(fakeagent.DefaultCluster())
		ended := make(chan error, 1)
		go func() { ended <- mirror.Run(context.Background()) }()
		bounded, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		require.NoError(t, mirror.WaitForSync(bounded), name)
		require.NoError(t, c.Close())
		select {
		case err := <-ended:
			require.NoError(t, err, name)
		case <-bounded.Done():
			require.FailNow(t, "the mirror goes on", name)
		}
		require.NoError(t, c.MirrorNodeGroups(fakeagent.DefaultCluster()).Run(context.Background()), "one that is started afterwards ends at once")
	}
}

func TestUnavailableIsRepeatedAFewTimes(t *testing.T) {
	agent, options := onSocket(t)
	c := connect(t, options)
	agent.Fail("GetStatus", 2, status.Error(codes.Unavailable, "starting"))
	require.NoError(t, getStatus(t.Context(), c))
	require.Equal(t, 3, agent.Calls("GetStatus"))

	agent.Fail("GetStatus", fakeagent.Always, status.Error(codes.Unavailable, "starting"))
	require.True(t, agenterrors.IsUnavailable(getStatus(t.Context(), c)))
	require.Equal(t, 7, agent.Calls("GetStatus"), "the number of attempts is bounded")
}

func TestOtherErrorsAreNotRepeated(t *testing.T) {
	agent, options := onSocket(t)
	c := connect(t, options)
	agent.Fail("GetStatus", fakeagent.Always, agenterrors.PermissionDenied("no"))
	require.True(t, agenterrors.IsPermissionDenied(getStatus(t.Context(), c)))
	require.Equal(t, 1, agent.Calls("GetStatus"))
}

func TestSyncClaimsIsNotRepeated(t *testing.T) {
	agent, options := onSocket(t)
	c := connect(t, options)
	agent.Fail("SyncClaims", fakeagent.Always, agenterrors.HubUnreachable("no answer"))
	_, err := c.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
		Cluster: fakeagent.DefaultCluster(), Holder: "karpenter", Token: "token",
	})
	require.True(t, agenterrors.IsUnavailable(err))
	require.Equal(t, 1, agent.Calls("SyncClaims"))
}

func TestCallWithoutDeadlineGetsOne(t *testing.T) {
	agent, options := onSocket(t)
	options.Timeout = 30 * time.Millisecond
	c := connect(t, options)
	agent.Delay("GetStatus", time.Hour)
	err := getStatus(t.Context(), c)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	require.True(t, agenterrors.IsUnavailable(err), "nothing may be concluded from it")
}

func TestCallersOwnDeadlineStays(t *testing.T) {
	agent, options := onSocket(t)
	options.Timeout = time.Nanosecond
	c := connect(t, options)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, getStatus(ctx, c))
	require.Equal(t, 1, agent.Calls("GetStatus"))
}

// recorder is a connection that records the request IDs of its calls.
type recorder struct {
	grpc.ClientConnInterface

	ids []string
}

func (r *recorder) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	outgoing, _ := metadata.FromOutgoingContext(ctx)
	r.ids = append(r.ids, outgoing.Get(client.RequestIDKey)...)
	return r.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

func (r *recorder) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	outgoing, _ := metadata.FromOutgoingContext(ctx)
	r.ids = append(r.ids, outgoing.Get(client.RequestIDKey)...)
	return r.ClientConnInterface.NewStream(ctx, desc, method, opts...)
}

func TestEveryCallHasARequestID(t *testing.T) {
	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	recorded := &recorder{ClientConnInterface: agent.Client().Conn()}
	var lines []string
	c := client.FromConn(recorded, client.Options{Logger: funcr.New(func(_, line string) { lines = append(lines, line) },
		funcr.Options{Verbosity: 4})})

	require.NoError(t, getStatus(t.Context(), c))
	require.NoError(t, getStatus(t.Context(), c))
	require.Len(t, recorded.ids, 2)
	require.NotEqual(t, recorded.ids[0], recorded.ids[1])

	require.NoError(t, getStatus(metadata.AppendToOutgoingContext(t.Context(), client.RequestIDKey, "mine"), c))
	require.Equal(t, []string{"mine"}, recorded.ids[2:], "a request id that is there stays the only one")

	_, err := c.Claims.GetClaim(t.Context(), &agentv1alpha1.GetClaimRequest{Cluster: fakeagent.DefaultCluster(), ClaimId: "none"})
	require.True(t, agenterrors.IsNotFound(err), "%v", err)
	id := client.RequestID(err)
	require.Equal(t, recorded.ids[3], id)
	require.ErrorContains(t, err, id)
	require.ErrorContains(t, err, "GetClaim")

	stream, err := c.Claims.WatchClaims(t.Context(), &agentv1alpha1.WatchClaimsRequest{})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
	require.Equal(t, recorded.ids[4], client.RequestID(err))

	for _, id := range recorded.ids {
		require.Contains(t, strings.Join(lines, "\n"), id, "the caller logs every request id")
	}
	require.Empty(t, client.RequestID(context.Canceled))
}

func TestLogLinesAndErrorsHaveTheTraceID(t *testing.T) {
	_, options := onSocket(t)
	var lines []string
	options.Logger = funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{Verbosity: 4})
	type traceKey struct{}
	options.TraceID = func(ctx context.Context) string {
		id, _ := ctx.Value(traceKey{}).(string)
		return id
	}
	c := connect(t, options)
	traced := context.WithValue(t.Context(), traceKey{}, "abc")

	require.NoError(t, getStatus(traced, c))
	_, err := c.Claims.GetClaim(traced, &agentv1alpha1.GetClaimRequest{Cluster: fakeagent.DefaultCluster(), ClaimId: "none"})
	require.ErrorContains(t, err, "(request "+client.RequestID(err)+", trace abc)")
	require.Len(t, lines, 2)
	for _, line := range lines {
		require.Contains(t, line, `"traceID"="abc"`)
	}

	_, err = c.Claims.GetClaim(t.Context(), &agentv1alpha1.GetClaimRequest{Cluster: fakeagent.DefaultCluster(), ClaimId: "none"})
	require.ErrorContains(t, err, "(request "+client.RequestID(err)+")")
	require.Len(t, lines, 3)
	require.NotContains(t, lines[2], "traceID")
}

func TestDialOptionsAreAddedAndTheClientsOwnWin(t *testing.T) {
	agent, options := onSocket(t)
	options.UserAgent = "mine/v1"
	intercepted := 0
	options.DialOptions = []grpc.DialOption{
		grpc.WithUserAgent("other/v1"),
		grpc.WithDefaultServiceConfig(`{}`), // without the client's retries
		grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			intercepted++
			return invoke(ctx, method, request, reply, conn, opts...)
		}),
	}
	c := connect(t, options)
	agent.Fail("GetStatus", 1, status.Error(codes.Unavailable, "starting"))
	require.NoError(t, getStatus(t.Context(), c), "the call is repeated")
	require.Equal(t, 1, intercepted)
	for _, sent := range agent.Metadata("GetStatus") {
		require.Contains(t, sent.Get("user-agent")[0], "mine/v1")
		require.NotContains(t, sent.Get("user-agent")[0], "other")
	}
}

func TestACallThatWasRefusedForItsNumberIsRepeatedWhenTheAgentAsksFor(t *testing.T) {
	agent, options := onSocket(t)
	c := connect(t, options)
	// The rejected call had no effect, so this method may be retried as well.
	agent.Fail("SyncClaims", 2, agenterrors.Throttled("too often", time.Millisecond))
	token, err := c.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: fakeagent.DefaultCluster(), Holder: "karpenter"})
	require.NoError(t, err)
	_, err = c.Claims.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
		Cluster: fakeagent.DefaultCluster(), Holder: "karpenter", Token: token.GetToken(),
	})
	require.NoError(t, err)
	require.Equal(t, 3, agent.Calls("SyncClaims"))

	agent.Fail("GetStatus", fakeagent.Always, agenterrors.Throttled("too often", time.Hour))
	err = getStatus(t.Context(), c)
	require.True(t, agenterrors.IsThrottled(err), "%v", err)
	require.True(t, agenterrors.IsUnavailable(err), "callers repeat it with backoff")
	require.Equal(t, 1, agent.Calls("GetStatus"), "the call does not last until then")
}

// A client waits longer than it was told, so that not all return together.
func TestAThrottledCallIsNotKeptUntilItsDeadline(t *testing.T) {
	agent, options := onSocket(t)
	c := connect(t, options)
	agent.Fail("GetStatus", 1, agenterrors.Throttled("too often", 55*time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := getStatus(ctx, c)
	require.True(t, agenterrors.IsThrottled(err), "%v", err)
	require.NoError(t, ctx.Err(), "the error comes at once")
	require.Equal(t, 1, agent.Calls("GetStatus"))
}
