package client

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// lines are connections to a server. The first one is outdated.
type lines struct {
	*connection

	t       *testing.T
	refused atomic.Bool // no further connection can be made
	answer  atomic.Pointer[error]
	checks  atomic.Int32
	clock   *clocktesting.FakePassiveClock
	// replacements is how many lines, the first among them, have been made with a certificate that
	// has been replaced.
	replacements atomic.Int32

	mu    sync.Mutex
	conns []net.Conn
}

func newLines(t *testing.T, more ...grpc.DialOption) *lines {
	t.Helper()
	l := &lines{t: t, clock: clocktesting.NewFakePassiveClock(time.Unix(1_800_000_000, 0))}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-served })
	options := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			if l.refused.Load() {
				return nil, errors.New("refused")
			}
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err != nil {
				return nil, err
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.conns = append(l.conns, conn)
			return conn, nil
		}),
	}, more...)
	var dialed int32
	l.replacements.Store(1)
	l.connection, err = newConnection(func() (*line, error) {
		dialed++
		number := dialed
		conn, err := grpc.NewClient(listener.Addr().String(), options...)
		return &line{ClientConn: conn, outdated: func() bool { return number <= l.replacements.Load() }, accepted: func() {}}, err
	}, func(context.Context, *grpc.ClientConn) error {
		l.checks.Add(1)
		if answer := l.answer.Load(); answer != nil {
			return *answer
		}
		return nil
	}, l.clock)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

// call begins and ends a call.
func (l *lines) call() { l.release(l.acquire()) }

// becomes waits until a line has the given state.
func (l *lines) becomes(line *line, state connectivity.State) {
	l.t.Helper()
	require.Eventually(l.t, func() bool { return line.GetState() == state }, patience, time.Millisecond)
}

// replaced makes calls until they use the given line.
func (l *lines) replaced(by *line) {
	l.t.Helper()
	require.Eventually(l.t, func() bool {
		l.call()
		return l.current == by
	}, patience, time.Millisecond)
}

// gRPC sends calls on a new connection before the line's state is Ready.
func TestStreamsMoveThatBeginBeforeTheLineIsReady(t *testing.T) {
	connect, connected := make(chan struct{}), make(chan net.Conn, 1)
	l := newLines(t, grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		<-connect
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		connected <- conn
		return conn, err
	}))
	l.current.Connect()
	l.becomes(l.current, connectivity.Connecting)
	moves := l.moves()
	l.moveWhenLeft(t.Context(), l.current)
	close(connect)
	l.becomes(l.current, connectivity.Ready)
	require.NoError(t, (<-connected).Close())
	l.moved(moves)
}

func TestStreamsMoveWhoseConnectionHasAlreadyBeenLeft(t *testing.T) {
	l := newLines(t)
	moves := l.moves()
	require.Equal(t, connectivity.Idle, l.current.GetState(), "as after the agent has ended the connection")
	l.moveWhenLeft(t.Context(), l.current)
	l.moved(moves)
}

// moved waits until moves is closed, which makes streams move.
func (l *lines) moved(moves <-chan struct{}) {
	l.t.Helper()
	select {
	case <-moves:
	case <-time.After(patience):
		l.t.Fatal("the streams are not told to move")
	}
}

func TestALineThatIsLostBeforeItsFirstCallIsMadeAgain(t *testing.T) {
	l := newLines(t)
	l.call()
	next := l.next
	l.becomes(next, connectivity.Ready)
	l.mu.Lock()
	require.NoError(t, l.conns[len(l.conns)-1].Close())
	l.mu.Unlock()
	l.becomes(next, connectivity.Idle)
	l.replaced(next)
}

func TestALineThatWasRefusedForLongIsMadeAgain(t *testing.T) {
	l := newLines(t, grpc.WithIdleTimeout(time.Second))
	l.refused.Store(true)
	l.call()
	next := l.next
	l.becomes(next, connectivity.TransientFailure)
	l.becomes(next, connectivity.Idle)
	l.refused.Store(false)
	l.replaced(next)
}

// passes makes calls a minute later.
func (l *lines) passes() {
	l.clock.SetTime(l.clock.Now().Add(time.Minute))
	for range 10 {
		l.call()
	}
}

func TestALineThatCannotBeConnectedIsRefusedInTheEnd(t *testing.T) {
	l := newLines(t)
	answer := func(err error) { l.answer.Store(&err) }
	down := grpcstatus.Error(codes.Unavailable, "tls: unknown certificate authority")
	answer(down)
	l.current.Connect()
	l.becomes(l.current, connectivity.Ready)
	l.refused.Store(true)
	l.call()
	next := l.next
	l.becomes(next, connectivity.TransientFailure)
	for range 10 {
		l.call()
	}
	require.NoError(t, l.refusal(), "it may be a single attempt that fails")

	l.passes()
	require.Eventually(t, func() bool { return l.refusal() != nil }, patience, time.Millisecond)
	require.Equal(t, down, l.refusal())
	l.passes()
	require.EqualValues(t, 1, l.checks.Load(), "that is known")

	answer(nil)
	l.refused.Store(false)
	l.replaced(next)
	require.NoError(t, l.refusal())
}

func TestALineThatCannotBeConnectedWhileTheAgentIsAwayIsNotRefused(t *testing.T) {
	l := newLines(t)
	l.refused.Store(true)
	l.call()
	l.becomes(l.next, connectivity.TransientFailure)
	l.passes()
	l.passes()
	require.Zero(t, l.checks.Load())
	require.NoError(t, l.refusal())
}

// TLS accepts the new certificate, and the agent's policy refuses its identity.
func TestALineWhoseIdentityIsRefusedIsNotUsed(t *testing.T) {
	l := newLines(t)
	answer := func(err error) { l.answer.Store(&err) }
	answer(agenterrors.Unauthenticated("the policy denies this certificate"))
	l.call()
	first, next := l.current, l.next
	l.becomes(next, connectivity.Ready)
	checked := func(times int32) {
		t.Helper()
		require.Eventually(t, func() bool {
			l.call()
			return l.checks.Load() >= times
		}, patience, time.Millisecond)
	}
	checked(1)
	for range 100 {
		l.call()
	}
	require.EqualValues(t, 1, l.checks.Load(), "it is not checked with each call")
	require.Eventually(t, func() bool { return agenterrors.IsUnauthenticated(l.refusal()) }, patience, time.Millisecond)
	require.Same(t, first, l.current)

	l.clock.SetTime(l.clock.Now().Add(time.Minute))
	checked(2)
	require.Same(t, first, l.current)
	answer(agenterrors.NotSynced("the agent starts"))
	l.clock.SetTime(l.clock.Now().Add(time.Minute))
	checked(10) // until the agent answers
	require.Same(t, first, l.current)
	answer(agenterrors.PermissionDenied("the identity may not do this"))
	require.Eventually(t, func() bool {
		l.call()
		return agenterrors.IsPermissionDenied(l.refusal())
	}, patience, time.Millisecond)
	require.Same(t, first, l.current)
	answer(grpcstatus.Error(codes.Unimplemented, "an agent without this method does not decide who the caller is"))
	l.clock.SetTime(l.clock.Now().Add(time.Minute))
	l.replaced(next)
	require.NoError(t, l.refusal())
}

func TestTheNextCertificateAfterARefusedOneIsTried(t *testing.T) {
	l := newLines(t)
	answer := func(err error) { l.answer.Store(&err) }
	answer(agenterrors.Unauthenticated("the certificate has no role"))
	l.call()
	first, second := l.current, l.next
	l.becomes(second, connectivity.Ready)
	require.Eventually(t, func() bool {
		l.call()
		l.connection.mu.Lock()
		defer l.connection.mu.Unlock()
		return second.checked == refused
	}, patience, time.Millisecond)

	answer(nil)
	l.replacements.Store(2)
	require.Eventually(t, func() bool {
		l.call()
		return l.current != first
	}, patience, time.Millisecond, "without waiting for the next check of the refused line")
	require.NotSame(t, second, l.current)
}

// statusOnly is an agent that answers GetStatus.
type statusOnly struct {
	agentv1alpha1.UnimplementedStatusServiceServer

	status *agentv1alpha1.GetStatusResponse
}

func (s statusOnly) GetStatus(context.Context, *agentv1alpha1.GetStatusRequest) (*agentv1alpha1.GetStatusResponse, error) {
	return s.status, nil
}

func TestAnIdentityThatCannotCallForTheClusterIsNotAccepted(t *testing.T) {
	type status = agentv1alpha1.GetStatusResponse
	named := func(namespace, name string) []*agentv1alpha1.ClusterRef {
		return []*agentv1alpha1.ClusterRef{{Namespace: namespace, Name: name}}
	}
	own := named("team-a", "production")[0]
	bootstrap := &status{Roles: []string{"bootstrap"}, Clusters: []*agentv1alpha1.ClusterRef{own}}
	for name, c := range map[string]struct {
		status  *status
		cluster *agentv1alpha1.ClusterRef
		code    codes.Code
	}{
		"no role":                         {&status{}, nil, codes.Unauthenticated},
		"no role for the Cluster":         {&status{}, own, codes.Unauthenticated},
		"a role, if no Cluster is needed": {&status{Roles: []string{"cluster"}}, nil, codes.OK},
		"the Cluster's":                   {&status{Roles: []string{"cluster"}, Clusters: named("team-a", "production")}, own, codes.OK},
		"another Cluster's":               {&status{Roles: []string{"cluster"}, Clusters: named("team-a", "staging")}, own, codes.PermissionDenied},
		"another namespace's":             {&status{Roles: []string{"cluster"}, Clusters: named("team-b", "production")}, own, codes.PermissionDenied},
		"one of several Clusters":         {&status{Roles: []string{"reader"}, Clusters: append(named("team-a", "staging"), own)}, own, codes.OK},
		"a pattern":                       {&status{Roles: []string{"reader"}, Clusters: named("team-*", "*")}, own, codes.OK},
		"a pattern of other Clusters":     {&status{Roles: []string{"reader"}, Clusters: named("team-a", "stag*")}, own, codes.PermissionDenied},
		"every Cluster":                   {&status{Roles: []string{"admin"}, AllClusters: true}, own, codes.OK},
		"a bootstrap certificate's":       {bootstrap, own, codes.PermissionDenied},
		"the same, if that is enough":     {bootstrap, nil, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			listener := bufconn.Listen(1 << 10)
			server := grpc.NewServer()
			agentv1alpha1.RegisterStatusServiceServer(server, statusOnly{status: c.status})
			served := make(chan struct{})
			go func() { defer close(served); _ = server.Serve(listener) }()
			t.Cleanup(func() { server.Stop(); <-served })
			conn, err := grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
			require.NoError(t, err)
			err = checkIdentity(c.cluster)(t.Context(), conn)
			require.NoError(t, conn.Close())
			require.Equal(t, c.code, grpcstatus.Code(err), "%v", err)
		})
	}
}

// closedConn is a connection whose writes fail, and whose reads return what arrived before it was
// closed.
type closedConn struct {
	net.Conn

	reads []error // nil for a byte
}

func (c *closedConn) SetReadDeadline(time.Time) error { return nil }

func (c *closedConn) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func (c *closedConn) Read([]byte) (int, error) {
	err := c.reads[0]
	c.reads = c.reads[1:]
	if err != nil {
		return 0, err
	}
	return 1, nil
}

// A server that rejects a client certificate sends an alert and closes the connection, before the
// client has sent anything or after.
func TestAFirstWriteFailsWithTheAlertThatClosedTheConnection(t *testing.T) {
	alert := &net.OpError{Op: "remote error", Err: errors.New("tls: unknown certificate authority")}
	for name, tc := range map[string]struct {
		received bool
		reads    []error
		err      error
	}{
		"an alert":                  {false, []error{alert}, alert},
		"no alert":                  {false, []error{io.EOF}, syscall.EPIPE},
		"data":                      {false, []error{nil}, syscall.EPIPE},
		"an alert after other data": {true, []error{nil, alert}, syscall.EPIPE},
	} {
		t.Run(name, func(t *testing.T) {
			closed := &closedConn{reads: tc.reads}
			conn := &alertedConn{Conn: closed}
			if tc.received {
				_, err := conn.Read(make([]byte, 1))
				require.NoError(t, err)
			}
			left := len(closed.reads)
			_, err := conn.Write([]byte("preface"))
			require.Equal(t, tc.err, err)
			require.Equal(t, tc.received, len(closed.reads) == left, "after the first byte, only gRPC reads")
		})
	}
}
