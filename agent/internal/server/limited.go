package server

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// askingHub are the methods that ask the hub's API server.
var askingHub = []string{
	agentv1alpha1.ClaimService_CreateClaim_FullMethodName, agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName,
	agentv1alpha1.ClaimService_GetClaim_FullMethodName, agentv1alpha1.ClaimService_ListClaims_FullMethodName,
	agentv1alpha1.ClaimService_SyncClaims_FullMethodName,
}

type (
	cutKey  struct{}
	callKey struct{}
)

// cuttable gives each call a way to be cut off: what a handler's own context ends neither the reading of a request nor the sending
// of an answer, which depend on the context that this returns.
func cuttable(ctx context.Context, _ *tap.Info) (context.Context, error) {
	ctx, cut := context.WithCancel(ctx)
	return context.WithValue(ctx, cutKey{}, cut), nil
}

// cut cuts the call off.
func cut(ctx context.Context) {
	if cancel, ok := ctx.Value(cutKey{}).(context.CancelFunc); ok {
		cancel()
	}
}

func callOf(ctx context.Context) *limits.Call {
	call, _ := ctx.Value(callKey{}).(*limits.Call)
	return call
}

// limitedAs names the caller whose limits hold. Certificates without a usable identity are told apart by their content.
func limitedAs(ctx context.Context) string {
	if c := callerOf(ctx); c.problem == "" {
		return c.Identity
	}
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.PeerCertificates) > 0 {
			return fmt.Sprintf("certificate %x", sha256.Sum256(info.State.PeerCertificates[0].Raw))
		}
	}
	return ""
}

// throttled is the answer to a call that is refused by a limit.
func throttled(err error) error {
	if refused, ok := errors.AsType[*limits.RefusedError](err); ok {
		return agenterrors.Throttled(refused.Message, refused.RetryAfter)
	}
	return grpcstatus.FromContextError(err).Err()
}

func (s *Server) limitUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	call, err := s.limits.Begin(limitedAs(ctx), info.FullMethod, false)
	if err != nil {
		return nil, throttled(err)
	}
	defer call.End()
	longest := s.limits.MaxCallTimeout
	if _, bounded := ctx.Deadline(); !bounded {
		longest = s.limits.CallTimeout
	}
	bounded, cancel := context.WithTimeout(context.WithValue(ctx, callKey{}, call), longest)
	defer cancel()
	stop := context.AfterFunc(bounded, func() { cut(ctx) })
	defer stop()
	return handler(bounded, request)
}

// limitAtHub runs once the request is known to be valid and allowed.
func limitAtHub(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if call := callOf(ctx); call != nil && slices.Contains(askingHub, info.FullMethod) {
		if err := call.AskHub(ctx); err != nil {
			return nil, throttled(err)
		}
	}
	return handler(ctx, request)
}

func (s *Server) limitStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := stream.Context()
	call, err := s.limits.Begin(limitedAs(ctx), info.FullMethod, true)
	if err != nil {
		return throttled(err)
	}
	defer call.End()
	return handler(service, &limitedStream{
		WrappedServerStream: &middleware.WrappedServerStream{ServerStream: stream, WrappedContext: context.WithValue(ctx, callKey{}, call)},
		sendTimeout:         s.limits.SendTimeout,
	})
}

// limitedStream is cut off when what it sends is not taken.
type limitedStream struct {
	*middleware.WrappedServerStream

	sendTimeout time.Duration
}

func (s *limitedStream) SendMsg(message any) error {
	timer := time.AfterFunc(s.sendTimeout, func() { cut(s.Context()) })
	defer timer.Stop()
	return s.WrappedServerStream.SendMsg(message)
}
