package agenterrors_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var now = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// overTheWire returns err as the other side of a connection reads it.
func overTheWire(t *testing.T, err error) error {
	t.Helper()
	wire, marshalErr := proto.Marshal(status.Convert(err).Proto())
	require.NoError(t, marshalErr)
	received := status.New(codes.OK, "").Proto()
	require.NoError(t, proto.Unmarshal(wire, received))
	return status.FromProto(received).Err()
}

func TestEachErrorIsReadAsItWasMade(t *testing.T) {
	cluster := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "one"}
	for name, c := range map[string]struct {
		err    error
		code   codes.Code
		reason agenterrors.Reason
		is     func(error) bool
	}{
		"invalid argument": {agenterrors.InvalidArgument(), codes.InvalidArgument, agenterrors.ReasonInvalidField, agenterrors.IsInvalidArgument},
		"invalid token":    {agenterrors.InvalidToken("no"), codes.InvalidArgument, agenterrors.ReasonInvalidToken, agenterrors.IsInvalidArgument},
		"stale token":      {agenterrors.StaleToken("old"), codes.FailedPrecondition, agenterrors.ReasonStaleToken, agenterrors.IsStaleToken},
		"unauthenticated": {
			agenterrors.Unauthenticated("who"), codes.Unauthenticated, agenterrors.ReasonUnauthenticated, agenterrors.IsUnauthenticated,
		},
		"permission denied": {
			agenterrors.PermissionDenied("no"), codes.PermissionDenied, agenterrors.ReasonPermissionDenied, agenterrors.IsPermissionDenied,
		},
		"cluster not found":    {agenterrors.ClusterNotFound(cluster), codes.NotFound, agenterrors.ReasonClusterNotFound, agenterrors.IsNotFound},
		"node group not found": {agenterrors.NodeGroupNotFound("fleet/a"), codes.NotFound, agenterrors.ReasonNodeGroupNotFound, agenterrors.IsNotFound},
		"claim not found":      {agenterrors.ClaimNotFound("a"), codes.NotFound, agenterrors.ReasonClaimNotFound, agenterrors.IsNotFound},
		"machine not found":    {agenterrors.MachineNotFound("a"), codes.NotFound, agenterrors.ReasonMachineNotFound, agenterrors.IsNotFound},
		"ended":                {agenterrors.ClaimEnded(&agentv1alpha1.Claim{}), codes.Aborted, agenterrors.ReasonClaimEnded, agenterrors.IsEnded},
		"conflict":             {agenterrors.Conflict("lost"), codes.Aborted, agenterrors.ReasonConflict, agenterrors.IsConflict},
		"too many claims": {
			agenterrors.TooManyClaims("full", time.Minute), codes.ResourceExhausted, agenterrors.ReasonTooManyClaims, agenterrors.IsTooMany,
		},
		"certificates not issued": {
			agenterrors.CertificatesNotIssued("no issuer"), codes.FailedPrecondition, agenterrors.ReasonCertificatesNotIssued,
			agenterrors.IsCertificatesNotIssued,
		},
		"not synced":      {agenterrors.NotSynced("wait"), codes.Unavailable, agenterrors.ReasonNotSynced, agenterrors.IsUnavailable},
		"shutting down":   {agenterrors.ShuttingDown(), codes.Unavailable, agenterrors.ReasonShuttingDown, agenterrors.IsUnavailable},
		"hub unreachable": {agenterrors.HubUnreachable("silence"), codes.Unavailable, agenterrors.ReasonHubUnreachable, agenterrors.IsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			err := fmt.Errorf("calling the agent: %w", overTheWire(t, c.err))
			require.Equal(t, c.code, status.Code(err))
			require.Equal(t, c.reason, agenterrors.ReasonOf(err))
			require.True(t, c.is(err))
			require.NotEmpty(t, status.Convert(c.err).Message())

			matching := 0
			for _, is := range []func(error) bool{
				agenterrors.IsNoRoom, agenterrors.IsTooMany, agenterrors.IsEnded, agenterrors.IsConflict, agenterrors.IsNotFound, agenterrors.IsRefused,
				agenterrors.IsUnauthenticated, agenterrors.IsPermissionDenied, agenterrors.IsInvalidArgument, agenterrors.IsUnavailable,
			} {
				if is(err) {
					matching++
				}
			}
			require.Equal(t, 1, matching, "exactly one recovery applies")
		})
	}
}

func TestRejectedSaysWhyForEachCandidate(t *testing.T) {
	rejections := []agenterrors.Rejection{
		{
			NodeGroup: "fleet/cooling", Reason: agenterrors.ReasonNoRoom, Message: "failed twice",
			Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, RetryAt: now.Add(3 * time.Minute),
		},
		{
			NodeGroup: "fleet/sooner", Reason: agenterrors.ReasonNoRoom,
			Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, RetryAt: now.Add(time.Minute + time.Millisecond),
		},
		{
			NodeGroup: "fleet/paused", Reason: agenterrors.ReasonNotOpen, Message: "paused by hand",
			Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED,
		},
		{NodeGroup: "fleet/missing", Reason: agenterrors.ReasonNodeGroupNotFound, Message: "does not exist"},
	}
	err := overTheWire(t, agenterrors.Rejected(now, rejections...))
	require.True(t, agenterrors.IsNoRoom(err))
	require.Equal(t, rejections, agenterrors.Rejections(err))
	delay, ok := agenterrors.RetryDelay(err)
	require.True(t, ok)
	require.Equal(t, time.Minute+time.Millisecond, delay, "the soonest candidate")
	require.ErrorContains(t, err, "failed twice")
}

func TestRejectedPicksTheCodeOfTheBestRecovery(t *testing.T) {
	full := agenterrors.Rejection{NodeGroup: "a/full", Reason: agenterrors.ReasonNoRoom}
	paused := agenterrors.Rejection{NodeGroup: "a/paused", Reason: agenterrors.ReasonNotOpen}
	missing := agenterrors.Rejection{NodeGroup: "a/missing", Reason: agenterrors.ReasonNodeGroupNotFound}
	for name, c := range map[string]struct {
		rejections []agenterrors.Rejection
		code       codes.Code
	}{
		"full":                     {[]agenterrors.Rejection{full}, codes.ResourceExhausted},
		"paused, then full":        {[]agenterrors.Rejection{paused, full}, codes.ResourceExhausted},
		"full, then paused":        {[]agenterrors.Rejection{full, paused}, codes.ResourceExhausted},
		"missing, paused, missing": {[]agenterrors.Rejection{missing, paused, missing}, codes.FailedPrecondition},
		"missing":                  {[]agenterrors.Rejection{missing, missing}, codes.NotFound},
		"none":                     {nil, codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			err := agenterrors.Rejected(now, c.rejections...)
			require.Equal(t, c.code, status.Code(err))
			_, ok := agenterrors.RetryDelay(err)
			require.False(t, ok, "no time is known")
		})
	}
}

func TestRetryDelayIsNeverNegative(t *testing.T) {
	err := agenterrors.Rejected(now, agenterrors.Rejection{Reason: agenterrors.ReasonNoRoom, RetryAt: now.Add(-time.Hour)})
	delay, ok := agenterrors.RetryDelay(err)
	require.True(t, ok)
	require.Zero(t, delay)
}

func TestMessagesStayShortAndNameTheFirstCandidates(t *testing.T) {
	var rejections []agenterrors.Rejection
	for i := range 1000 {
		rejections = append(rejections, agenterrors.Rejection{
			NodeGroup: fmt.Sprintf("fleet/group-%d", i), Reason: agenterrors.ReasonNoRoom, Message: "full",
			Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE,
		})
	}
	rejections[999].RetryAt = now.Add(time.Minute)
	err := agenterrors.Rejected(now, rejections...)
	require.Less(t, len(status.Convert(err).Message()), 500)
	named := agenterrors.Rejections(err)
	require.GreaterOrEqual(t, len(named), 15)
	for i, rejection := range named {
		require.Equal(t, rejections[i].NodeGroup, rejection.NodeGroup)
		require.Equal(t, rejections[i].Unavailable, rejection.Unavailable)
	}
	delay, ok := agenterrors.RetryDelay(err)
	require.True(t, ok)
	require.Equal(t, time.Minute, delay, "the soonest of all, also of those that are not named")

	few := agenterrors.Rejected(now, rejections[:10]...)
	require.Equal(t, rejections[:10], agenterrors.Rejections(few), "a few are named in full")
}

// TestAReasonOfANewerAgentIsReadByItsCode covers an agent with a reason that this client does not
// know.
func TestAReasonOfANewerAgentIsReadByItsCode(t *testing.T) {
	full := agenterrors.Rejection{NodeGroup: "fleet/small", Reason: "ONLY_AT_NIGHT"}
	newer, err := status.New(codes.ResourceExhausted, "no candidate has room").WithDetails(protoadapt.MessageV1Of(&errdetails.ErrorInfo{
		Domain: agenterrors.Domain, Reason: string(full.Reason), Metadata: map[string]string{agenterrors.MetadataNodeGroup: full.NodeGroup},
	}))
	require.NoError(t, err)
	require.True(t, agenterrors.IsNoRoom(overTheWire(t, newer.Err())))
	require.Equal(t, []agenterrors.Rejection{full}, agenterrors.Rejections(newer.Err()))
	require.False(t, agenterrors.IsNoRoom(agenterrors.TooLarge("5 MiB")))
	require.False(t, agenterrors.IsNoRoom(agenterrors.Throttled("too often", time.Second)))
	require.False(t, agenterrors.IsNoRoom(agenterrors.TooManyClaims("1,000", time.Second)))
}

func TestClaimEndedSaysHow(t *testing.T) {
	err := overTheWire(t, agenterrors.ClaimEnded(&agentv1alpha1.Claim{
		ClaimId: "a-claim", Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, Reason: "MachineLost", Message: "another actor deleted it",
	}))
	end, ok := agenterrors.EndedAs(err)
	require.True(t, ok)
	require.Equal(t, agenterrors.End{ClaimID: "a-claim", Reason: "MachineLost", Message: "another actor deleted it"}, end)

	err = agenterrors.ClaimEnded(&agentv1alpha1.Claim{ClaimId: "a-claim", Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING})
	end, ok = agenterrors.EndedAs(err)
	require.True(t, ok)
	require.True(t, end.Releasing)

	_, ok = agenterrors.EndedAs(agenterrors.Conflict("lost"))
	require.False(t, ok)
}

func TestFieldViolationsAreNamed(t *testing.T) {
	violations := []agenterrors.FieldViolation{
		{Field: "cluster.name", Description: "must match"}, {Field: "candidates[2]", Description: "is elsewhere"},
	}
	require.Equal(t, violations, agenterrors.FieldViolations(overTheWire(t, agenterrors.InvalidArgument(violations...))))
	require.Equal(t, []agenterrors.FieldViolation{{Field: "token", Description: "made up"}},
		agenterrors.FieldViolations(agenterrors.InvalidToken("made up")))
	require.Empty(t, agenterrors.FieldViolations(agenterrors.Conflict("lost")))
}

func TestTextThatIsNoUTF8IsSent(t *testing.T) {
	broken := "name \xff\xfe"
	for _, err := range []error{
		agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: broken, Description: broken}),
		agenterrors.NodeGroupNotFound(broken),
		agenterrors.Rejected(now, agenterrors.Rejection{NodeGroup: broken, Reason: agenterrors.ReasonNoRoom, Message: broken}),
		agenterrors.ClaimEnded(&agentv1alpha1.Claim{ClaimId: broken, Reason: broken}),
	} {
		received := overTheWire(t, err)
		require.NotEmpty(t, agenterrors.ReasonOf(received), "%v lost its details", err)
	}
}

func TestOtherErrorsAreNotTheAgents(t *testing.T) {
	foreign, err := status.New(codes.NotFound, "no such page").WithDetails(protoadapt.MessageV1Of(
		&errdetails.ErrorInfo{Domain: "example.com", Reason: string(agenterrors.ReasonClaimNotFound)}))
	require.NoError(t, err)
	for name, err := range map[string]error{
		"nil":                      nil,
		"an ordinary error":        errors.New("boom"),
		"a cancelled context":      context.Canceled,
		"a proxy's NOT_FOUND":      foreign.Err(),
		"a bare NOT_FOUND":         status.Error(codes.NotFound, "unknown service"),
		"a bare exhaustion":        status.Error(codes.ResourceExhausted, "message too large"),
		"a status without details": status.Error(codes.Internal, strings.Repeat("x", 10)),
	} {
		t.Run(name, func(t *testing.T) {
			require.Empty(t, agenterrors.ReasonOf(err))
			require.False(t, agenterrors.IsNotFound(err), "nothing is certain")
			require.False(t, agenterrors.IsNoRoom(err))
			require.False(t, agenterrors.IsEnded(err))
			require.Empty(t, agenterrors.Rejections(err))
		})
	}
}

// received returns the error as a client receives it that accepts 8 KiB of headers.
func received(t *testing.T, err error) error {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return err }))
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	connection, dialErr := grpc.NewClient("passthrough:///agent",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithMaxHeaderListSize(8<<10))
	require.NoError(t, dialErr)
	defer func() { require.NoError(t, connection.Close()) }()
	return connection.Invoke(t.Context(), "/an.agent/Call", &emptypb.Empty{}, &emptypb.Empty{})
}

// TestErrorsAreReadByClientsThatAcceptLittle receives each error with a client that accepts 8 KiB
// of headers, like most implementations of gRPC.
func TestErrorsAreReadByClientsThatAcceptLittle(t *testing.T) {
	for name, long := range map[string]string{
		"ASCII": strings.Repeat("a", 1<<20), "two bytes each": strings.Repeat("ä", 1<<20), "not UTF-8": strings.Repeat("\xff", 1<<20),
	} {
		t.Run(name, func(t *testing.T) {
			var violations []agenterrors.FieldViolation
			var rejections []agenterrors.Rejection
			for range 1000 {
				violations = append(violations, agenterrors.FieldViolation{Field: long, Description: long})
				rejections = append(rejections, agenterrors.Rejection{
					NodeGroup: "fleet/" + strings.Repeat("a", 253), Reason: agenterrors.ReasonNoRoom, Message: long, RetryAt: time.Unix(1, 0),
					Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN,
				})
			}
			invalid := received(t, agenterrors.InvalidArgument(violations...))
			require.NotEmpty(t, agenterrors.FieldViolations(invalid))
			require.ErrorContains(t, invalid, " more")
			rejected := received(t, agenterrors.Rejected(time.Unix(0, 0), rejections...))
			require.True(t, agenterrors.IsNoRoom(rejected))
			require.GreaterOrEqual(t, len(agenterrors.Rejections(rejected)), 5)
			_, ok := agenterrors.RetryDelay(rejected)
			require.True(t, ok)
			ended := received(t, agenterrors.ClaimEnded(&agentv1alpha1.Claim{ClaimId: long, Reason: long, Message: long}))
			require.True(t, agenterrors.IsEnded(ended))
			require.True(t, agenterrors.IsConflict(received(t, agenterrors.Conflict(long))))
			require.True(t, utf8.ValidString(status.Convert(rejected).Message()))
		})
	}
}

// A condition with the text would be written with each attempt to connect.
func TestADescriptionOmitsTheCallersOwnPort(t *testing.T) {
	failed := func(port int) string {
		return agenterrors.Describe(fmt.Errorf("calling: %w", status.Errorf(codes.Unavailable,
			`connection error: desc = "transport: authentication handshake failed: read tcp 10.1.2.3:%d->10.0.0.1:8443: `+
				`read: connection reset by peer"`, port)))
	}
	require.Equal(t, failed(51234), failed(51235))
	require.Contains(t, failed(51234), "read tcp 10.0.0.1:8443: read: connection reset by peer")
}

func TestADescriptionOmitsTheTime(t *testing.T) {
	failed := func(now string) string {
		return agenterrors.Describe(status.Error(codes.Unavailable, "x509: certificate has expired or is not yet valid: current time "+
			now+" is after 2026-01-01T00:00:00Z"))
	}
	require.Equal(t, "Unavailable: x509: certificate has expired or is not yet valid: now is after 2026-01-01T00:00:00Z", failed("2026-02-02T00:00:01Z"))
	require.Equal(t, failed("2026-02-02T00:00:01Z"), failed("2026-02-02T00:00:02Z"))
}
