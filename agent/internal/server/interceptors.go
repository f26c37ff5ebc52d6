package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/uuid"
	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// before runs before the request of a unary call is read. Metrics and logs cover everything that
// follows. The inner recovery makes the log line of a call that panicked possible; the outer one
// covers what precedes it.
func (s *Server) before() grpc.UnaryServerInterceptor {
	return chain(
		s.metrics.UnaryServerInterceptor(),
		recovery.UnaryServerInterceptor(recovery.WithRecoveryHandlerContext(s.recovered)),
		s.identifyUnary,
		s.countUnary,
		logging.UnaryServerInterceptor(s.logger(), loggingOptions()...),
		recovery.UnaryServerInterceptor(recovery.WithRecoveryHandlerContext(s.recovered)),
		s.admitUnary,
		s.limitUnary,
	)
}

// after runs once the request has been decoded. The request's Cluster is only known once the
// request is valid. The caller's rights are checked again after the call has waited for its turns,
// which can take minutes.
func (s *Server) after(validator *validation.Validator) grpc.UnaryServerInterceptor {
	return chain(s.endWhenShutOut, inTurn(validator.Unary()), s.authorizeUnary, limitAtHub, s.limitLists, s.authorizeUnary)
}

func (s *Server) stream(validator *validation.Validator) []grpc.StreamServerInterceptor {
	return []grpc.StreamServerInterceptor{
		boundMessages,
		s.metrics.StreamServerInterceptor(),
		recovery.StreamServerInterceptor(recovery.WithRecoveryHandlerContext(s.recovered)),
		s.identifyStream,
		s.countStream,
		logging.StreamServerInterceptor(s.logger(), loggingOptions()...),
		recovery.StreamServerInterceptor(recovery.WithRecoveryHandlerContext(s.recovered)),
		s.admitStream,
		s.limitStream,
		s.receiver.stream,
		validator.Stream(),
		s.authorizeStream,
	}
}

// requestIDKey is the metadata key of the request ID. The caller chooses it, or else the agent
// generates it.
const requestIDKey = "x-request-id"

// maxRequestID is the maximum length of a caller's request ID, which is part of every log line of
// the call.
const maxRequestID = 128

type callerKey struct{}

// caller is the identified caller, or the reason why it could not be identified.
type caller struct {
	authz.Caller

	problem string
	// unnamed means that the problem is that the client certificate names no identity.
	unnamed bool
	// limitedAs is the key under which the caller is limited.
	limitedAs string
	// requestID is the request ID of the call.
	requestID string
	// decided records that the call has been admitted or refused. It may be called several times.
	decided func()
}

func callerOf(ctx context.Context) caller {
	c, ok := ctx.Value(callerKey{}).(caller)
	if !ok {
		return caller{problem: "the call has no identity", decided: func() {}}
	}
	return c
}

// identify adds the request ID, the caller and a logger to the context.
func (s *Server) identify(ctx context.Context, method string) (context.Context, string) {
	id := ""
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		if values := md.Get(requestIDKey); len(values) > 0 && printable(values[0]) {
			id = values[0]
		}
	}
	if id == "" {
		id = uuid.NewString()
	}
	c, decided := caller{problem: "the connection has no identity"}, func() {}
	if p, ok := peer.FromContext(ctx); ok {
		c = s.callerOn(p.AuthInfo)
		if of, ok := p.AuthInfo.(connectionInfo); ok {
			as := c.limitedAs
			of.connection.limitedAs.Store(&as)
			decided = sync.OnceFunc(of.connection.undecided.decide)
		}
	}
	c.decided = decided
	fields := logging.Fields{"requestID", id, "identity", c.Identity}
	if traceID := tracing.ID(ctx); traceID != "" {
		fields = append(fields, "traceID", traceID)
		annotate(ctx, "request_id", id)
		annotate(ctx, "identity", c.Identity)
	}
	ctx = log.IntoContext(ctx, s.config.Log.WithValues(append(slices.Clip(fields), "method", method)...))
	ctx = logging.InjectFields(ctx, fields)
	c.requestID = id
	return context.WithValue(ctx, callerKey{}, c), id
}

func printable(id string) bool {
	return id != "" && len(id) <= maxRequestID && !slices.ContainsFunc([]byte(id), func(b byte) bool { return b <= ' ' || b > '~' })
}

// callerOn returns the caller of a connection, from its handshake. It is the caller of a new
// connection with the same certificate.
func (s *Server) callerOn(handshake credentials.AuthInfo) caller {
	c := s.identified(handshake)
	c.limitedAs = limitedAs(c, handshake)
	return c
}

func (s *Server) identified(handshake credentials.AuthInfo) caller {
	var by *verified
	if of, ok := handshake.(connectionInfo); ok {
		handshake, by = of.AuthInfo, of.verified
	}
	switch info := handshake.(type) {
	case credentials.TLSInfo:
		// The handshake has verified the certificate, or there would be no connection.
		if len(info.State.VerifiedChains) == 0 || len(info.State.VerifiedChains[0]) == 0 {
			return caller{problem: "the connection has no verified client certificate"}
		}
		chains := info.State.VerifiedChains
		if by != nil {
			if chains = by.now(); chains == nil {
				return caller{problem: "no authority of this agent signs the client certificate any more"}
			}
		}
		identified, err := s.config.Authorizer.FromChains(chains)
		if err != nil {
			_, unnamed := errors.AsType[*authz.UnnamedError](err)
			return caller{problem: err.Error(), unnamed: unnamed}
		}
		return caller{Caller: identified}
	case localInfo:
		return caller{Caller: info.caller}
	default:
		return caller{problem: "the connection has no identity"}
	}
}

func (s *Server) identifyUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, id := s.identify(ctx, info.FullMethod)
	defer callerOf(ctx).decided()
	// This only fails if the headers have already been sent.
	_ = grpc.SetHeader(ctx, metadata.Pairs(requestIDKey, id))
	return handler(ctx, request)
}

func (s *Server) identifyStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, id := s.identify(stream.Context(), info.FullMethod)
	defer callerOf(ctx).decided()
	_ = stream.SetHeader(metadata.Pairs(requestIDKey, id))
	if authz.Methods[info.FullMethod].Anyone {
		// A health watch lasts as long as its connection. Other streams end when their caches are
		// closed.
		bounded, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			select {
			case <-s.stopped:
				cancel()
			case <-bounded.Done():
			}
		}()
		ctx = bounded
	}
	return handler(service, &middleware.WrappedServerStream{ServerStream: stream, WrappedContext: ctx})
}

// compressed reports whether the call's messages may be compressed. An answer would be, too, and
// the transport would keep it in buffers of its own, which [Server.outgoing] can neither count nor
// bound in time. And a request of a few bytes may expand to the largest one before it is counted.
func compressed(ctx context.Context) bool {
	stream, ok := grpc.ServerTransportStreamFromContext(ctx).(interface{ RecvCompress() string })
	return !ok || stream.RecvCompress() != "" && stream.RecvCompress() != encoding.Identity
}

var errCompressed = grpcstatus.Error(codes.Unimplemented, "this agent serves calls without compression only (grpc-encoding: identity)")

// admit rejects calls with compression, callers that are shut out or may not call the method for
// any Cluster, and, during shutdown, all callers.
func (s *Server) admit(ctx context.Context, method string) error {
	c := callerOf(ctx)
	if compressed(ctx) {
		s.limits.Denied(c.limitedAs)
		return errCompressed
	}
	rule, known := authz.Methods[method]
	if !known {
		return agenterrors.PermissionDenied("no role may call this method")
	}
	if err := s.mayCall(ctx, rule, c); err != nil {
		s.limits.Denied(c.limitedAs)
		return err
	}
	if s.stopping() && !rule.Anyone {
		return agenterrors.ShuttingDown()
	}
	return nil
}

// mayCall returns an error if the caller is shut out or may not call a method for any Cluster, and
// nil otherwise.
func (s *Server) mayCall(ctx context.Context, rule authz.Rule, c caller) error {
	err := s.shutOut(ctx, c)
	if of, ok := handshakeOf(ctx).(connectionInfo); ok {
		if err != nil {
			of.connection.shutOut(s.config.Clock.Now())
		} else {
			of.connection.readmit()
		}
	}
	switch {
	case c.problem != "" && !rule.Anyone:
		return agenterrors.Unauthenticated(c.problem)
	case !c.MayCall(rule):
		return agenterrors.PermissionDenied("this identity may not call this method")
	case rule.AsksOnboarding:
		return nil
	}
	return err
}

func (s *Server) admitUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := s.admit(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

func (s *Server) admitStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := s.admit(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return handler(service, stream)
}

// authorize rejects requests for Clusters that the caller may not call the method for. The Cluster
// has not been looked up yet, so the response cannot reveal whether it exists.
func (s *Server) authorize(ctx context.Context, method string, request any) error {
	rule := authz.Methods[method]
	if rule.OneCluster {
		return s.authorizeOnly(ctx, rule)
	}
	if rule.OfAnyCluster {
		return s.onboarded(ctx, callerOf(ctx))
	}
	if !rule.OfCluster {
		return nil
	}
	describe(ctx, request)
	scoped, ok := request.(interface {
		GetCluster() *agentv1alpha1.ClusterRef
	})
	if !ok || scoped.GetCluster() == nil {
		return agenterrors.PermissionDenied("the request names no Cluster")
	}
	cluster := clusterName(scoped.GetCluster())
	if !callerOf(ctx).MayCallFor(rule, cluster) {
		return agenterrors.PermissionDenied("this identity may not call this method for this Cluster")
	}
	if !rule.AsksOnboarding {
		if err := s.onboarded(ctx, callerOf(ctx)); err != nil {
			return err
		}
	}
	if !rule.AsHolder {
		return nil
	}
	held, ok := request.(interface{ GetHolder() string })
	if !ok {
		return agenterrors.PermissionDenied("the request names no holder")
	}
	if may := callerOf(ctx).Holders(rule, cluster); !may.Has(held.GetHolder()) {
		return agenterrors.PermissionDenied(fmt.Sprintf("this identity may not act as the holder %q; it may act as: %s", held.GetHolder(), may))
	}
	return nil
}

// authorizeOnly rejects callers of methods whose requests name no Cluster, unless they are for
// exactly one.
func (s *Server) authorizeOnly(ctx context.Context, rule authz.Rule) error {
	cluster, err := callerOf(ctx).OnlyCluster(rule)
	if err != nil {
		return agenterrors.PermissionDenied(err.Error())
	}
	logging.AddFields(ctx, logging.Fields{"cluster", cluster.String()})
	annotate(ctx, "cluster", cluster.String())
	return s.onboarded(ctx, callerOf(ctx))
}

// holdersFor returns the holders whose claims the caller of a method may act on.
func holdersFor(ctx context.Context, method string, cluster *agentv1alpha1.ClusterRef) claims.Holders {
	return callerOf(ctx).Holders(authz.Methods[method], clusterName(cluster)).Has
}

// authorizeNow is like [Server.authorize], with the caller's current rights: they may have changed
// while the request arrived or waited. The returned context has the caller with these rights.
func (s *Server) authorizeNow(ctx context.Context, method string, request any) (context.Context, error) {
	c := s.presently(ctx)
	if err := s.mayCall(ctx, authz.Methods[method], c); err != nil {
		return nil, err
	}
	ctx = context.WithValue(ctx, callerKey{}, c)
	return ctx, s.authorize(ctx, method, request)
}

func (s *Server) authorizeUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, err := s.authorizeNow(ctx, info.FullMethod, request)
	if err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

func (s *Server) authorizeStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return handler(service, &authorizedStream{
		WrappedServerStream: &middleware.WrappedServerStream{ServerStream: stream, WrappedContext: stream.Context()}, server: s, method: info.FullMethod,
	})
}

// authorizedStream authorizes each received message. Its context has the caller with the rights
// that it had then.
type authorizedStream struct {
	*middleware.WrappedServerStream

	server *Server
	method string
}

func (a *authorizedStream) RecvMsg(message any) error {
	if err := a.WrappedServerStream.RecvMsg(message); err != nil {
		return err
	}
	ctx, err := a.server.authorizeNow(a.Context(), a.method, message)
	if err != nil {
		return err
	}
	a.WrappedContext = ctx
	return nil
}

// describe adds the subject of a valid request to the log line and the span of the call.
func describe(ctx context.Context, request any) {
	if r, ok := request.(interface {
		GetCluster() *agentv1alpha1.ClusterRef
	}); ok {
		cluster := clusterName(r.GetCluster()).String()
		logging.AddFields(ctx, logging.Fields{"cluster", cluster})
		annotate(ctx, "cluster", cluster)
	}
	if r, ok := request.(interface{ GetClaimId() string }); ok {
		logging.AddFields(ctx, logging.Fields{"claim", r.GetClaimId()})
		annotate(ctx, "claim", r.GetClaimId())
	}
}

func clusterName(ref *agentv1alpha1.ClusterRef) types.NamespacedName {
	return types.NamespacedName{Namespace: ref.GetNamespace(), Name: ref.GetName()}
}

// errInternal is the response to a call or a stream that panicked. Callers learn nothing of the
// cause.
var errInternal = grpcstatus.Error(codes.Internal, "internal error")

// recovered is the response to a call whose handler panicked.
func (s *Server) recovered(ctx context.Context, cause any) error {
	_ = panics.Note(log.FromContext(ctx), panics.Calls, "a call failed because of a bug in the agent", cause)
	return errInternal
}

func loggingOptions() []logging.Option {
	return []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithDisableLoggingFields(logging.SystemTag[0], logging.ComponentFieldKey, logging.MethodTypeFieldKey),
		logging.WithLevels(func(code codes.Code) logging.Level {
			switch code {
			case codes.OK, codes.Canceled:
				return logging.LevelDebug
			case codes.Internal, codes.Unknown, codes.DataLoss, codes.Unimplemented:
				return logging.LevelError
			default:
				return logging.LevelInfo
			}
		}),
	}
}

// changing lists the methods whose successful calls are logged at the default level.
var changing = []string{
	"CreateClaim", "ReleaseClaim", "ReturnMachine", "IssueCertificate",
	"NodeGroupIncreaseSize", "NodeGroupDeleteNodes", "NodeGroupDecreaseTargetSize",
}

// logger logs the end of a call. The messages differ, because the log has only a hundred lines a
// second with the same one: failed calls, which one caller can cause by the thousand, leave room
// for the changes of others.
func (s *Server) logger() logging.Logger {
	return logging.LoggerFunc(func(_ context.Context, level logging.Level, message string, fields ...any) {
		logger := s.config.Log
		switch {
		case level >= logging.LevelError:
			logger.Error(nil, message, fields...)
		case level >= logging.LevelInfo:
			logger.Info("call failed", fields...)
		case changes(fields):
			logger.Info(message, fields...)
		default:
			logger.V(1).Info(message, fields...)
		}
	})
}

func changes(fields []any) bool {
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i] == logging.MethodFieldKey {
			method, ok := fields[i+1].(string)
			return ok && slices.Contains(changing, method)
		}
	}
	return false
}
