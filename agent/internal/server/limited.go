package server

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/samber/lo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// askingHub lists the methods that query the hub's API server, except for GetMachine: it asks only
// for a Machine that is not in the view ([machines.whole]).
var askingHub = []string{
	agentv1alpha1.ClaimService_CreateClaim_FullMethodName, agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName,
	agentv1alpha1.ClaimService_ReturnMachine_FullMethodName, agentv1alpha1.ClaimService_GetClaim_FullMethodName,
	agentv1alpha1.ClaimService_ListClaims_FullMethodName, agentv1alpha1.ClaimService_SyncClaims_FullMethodName,
	agentv1alpha1.MachineService_ListMachines_FullMethodName,
	agentv1alpha1.CertificateService_IssueCertificate_FullMethodName,
	agentv1alpha1.NodePoolService_ListPublishedObjects_FullMethodName, agentv1alpha1.NodePoolService_ReportNodePools_FullMethodName,
	externalgrpc.CloudProvider_Refresh_FullMethodName, externalgrpc.CloudProvider_NodeGroupIncreaseSize_FullMethodName,
	externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName, externalgrpc.CloudProvider_NodeGroupDecreaseTargetSize_FullMethodName,
}

// severalAtOnce lists those of them that send several requests at once, and keep their turn until
// they end.
var severalAtOnce = []string{
	externalgrpc.CloudProvider_NodeGroupIncreaseSize_FullMethodName, externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName,
	externalgrpc.CloudProvider_NodeGroupDecreaseTargetSize_FullMethodName,
}

// lightMethods lists the methods that the cluster-autoscaler calls several times for each node and
// each group in every loop, one after the other, and that are answered from memory.
var lightMethods = []string{
	externalgrpc.CloudProvider_NodeGroupForNode_FullMethodName, externalgrpc.CloudProvider_NodeGroupTargetSize_FullMethodName,
	externalgrpc.CloudProvider_NodeGroupNodes_FullMethodName, externalgrpc.CloudProvider_NodeGroupGetOptions_FullMethodName,
	externalgrpc.CloudProvider_NodeGroupTemplateNodeInfo_FullMethodName, externalgrpc.CloudProvider_PricingNodePrice_FullMethodName,
	externalgrpc.CloudProvider_PricingPodPrice_FullMethodName,
}

// lists names the methods whose responses grow with the size of a Cluster, or of the fleet.
var lists = []string{
	agentv1alpha1.ClaimService_ListClaims_FullMethodName, agentv1alpha1.MachineService_ListMachines_FullMethodName,
	agentv1alpha1.NodeGroupService_ListNodeGroups_FullMethodName, agentv1alpha1.ClusterService_ListClusters_FullMethodName,
	agentv1alpha1.NodePoolService_ListPublishedObjects_FullMethodName, externalgrpc.CloudProvider_NodeGroups_FullMethodName,
}

type cutKey struct{}

// cuttable gives each call a cancel function for cut. Reading a request depends on the context
// returned here, and does not stop when a handler's own context is cancelled.
func cuttable(ctx context.Context, _ *tap.Info) (context.Context, error) {
	ctx, cut := context.WithCancel(ctx)
	return context.WithValue(ctx, cutKey{}, cut), nil
}

// cut aborts the call.
func cut(ctx context.Context) {
	if cancel, ok := ctx.Value(cutKey{}).(context.CancelFunc); ok {
		cancel()
	}
}

// limitedAs returns the key under which a caller is limited. A Cluster's certificates are
// distinguished by onboarding. All certificates with a SPIFFE ID that cannot be used, because they
// are denied for example, are limited together: the same caller may have thousands of them. They
// use up no limits of those that can be used. Certificates without a SPIFFE ID are distinguished by
// content.
func limitedAs(c caller, handshake credentials.AuthInfo) string {
	switch {
	case c.problem != "":
	case c.Onboarding != nil && c.Onboarding.ID != "":
		// A certificate of a past onboarding does not use up the limits of the current one.
		return c.Identity + "/" + c.Onboarding.ID
	default:
		return c.Identity
	}
	if of, ok := handshake.(connectionInfo); ok {
		handshake = of.AuthInfo
	}
	info, ok := handshake.(credentials.TLSInfo)
	if !ok {
		return ""
	}
	if name := authz.NameIn(info.State.VerifiedChains); name != "" {
		return "rejected " + name
	}
	if len(info.State.PeerCertificates) > 0 {
		return fmt.Sprintf("certificate %x", sha256.Sum256(info.State.PeerCertificates[0].Raw))
	}
	return ""
}

// handshakeOf returns the handshake result of the call's connection, or nil if it is not known.
func handshakeOf(ctx context.Context) credentials.AuthInfo {
	if p, ok := peer.FromContext(ctx); ok {
		return p.AuthInfo
	}
	return nil
}

// begin admits a call, and adds it to the context.
func (s *Server) begin(ctx context.Context, method string, watch bool) (context.Context, *limits.Call, error) {
	by := callerOf(ctx)
	call, err := s.limits.Begin(by.limitedAs, method, watch)
	by.decided()
	if err != nil {
		return nil, nil, throttled(ctx, err)
	}
	return limits.NewContext(ctx, call), call, nil
}

// throttled is the response to a call that a limit rejected. The log has the sums of all callers.
func throttled(ctx context.Context, err error) error {
	if refused, ok := errors.AsType[*limits.RefusedError](err); ok {
		if refused.Sums != "" {
			logging.AddFields(ctx, logging.Fields{"sums", refused.Sums})
		}
		return agenterrors.Throttled(refused.Message, refused.RetryAfter)
	}
	return grpcstatus.FromContextError(err).Err()
}

func (s *Server) limitUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	limited, call, err := s.begin(ctx, info.FullMethod, false)
	if err != nil {
		return nil, err
	}
	defer func() {
		call.End()
		s.countHubRequests(ctx, call)
	}()
	longest := s.limits.MaxCallTimeout
	if _, bounded := ctx.Deadline(); !bounded {
		longest = s.limits.CallTimeout
	}
	bounded, cancel := context.WithTimeout(limited, longest)
	defer cancel()
	stop := context.AfterFunc(bounded, func() { cut(ctx) })
	defer stop()
	response, err := handler(bounded, request)
	if err == nil && slices.Contains(lists, info.FullMethod) {
		err = ended(bounded) // encoding a list can take as long as building it
	}
	if err != nil {
		return nil, err
	}
	return s.outgoing(bounded, response)
}

// ended returns the error of a call whose caller has gone or whose deadline has passed, and nil for
// others.
func ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return grpcstatus.FromContextError(err).Err()
	}
	return nil
}

// inTurn makes an interceptor check requests in their turns. The rest of the call is not
// serialized. Large requests are exempt: they are handled one at a time anyway, and a SyncClaims
// has turns by now that other callers wait for.
func inTurn(check grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if slices.Contains(largeRequests, info.FullMethod) {
			return check(ctx, request, info, handler)
		}
		done, err := limits.FromContext(ctx).Check(ctx)
		if err != nil {
			return nil, throttled(ctx, err)
		}
		done = sync.OnceFunc(done)
		defer done()
		return check(ctx, request, info, func(ctx context.Context, request any) (any, error) {
			done()
			return handler(ctx, request)
		})
	}
}

// limitAtHub runs once the request is known to be valid and authorized. A list's turn at the hub is
// left to limitLists.
func limitAtHub(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if call := limits.FromContext(ctx); call != nil && slices.Contains(askingHub, info.FullMethod) {
		if !slices.Contains(lists, info.FullMethod) {
			if err := call.AskHub(ctx); err != nil {
				return nil, throttled(ctx, err)
			}
		}
		if !slices.Contains(severalAtOnce, info.FullMethod) {
			ctx = claims.WithTurn(ctx, call)
		}
	}
	return handler(ctx, request)
}

// limitLists runs when the call waits for nothing else of its caller, neither its request nor its
// other calls, because other callers wait for its turn.
func (s *Server) limitLists(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if call := limits.FromContext(ctx); call != nil && slices.Contains(lists, info.FullMethod) {
		if err := call.List(ctx, s.objects(request), slices.Contains(askingHub, info.FullMethod)); err != nil {
			return nil, throttled(ctx, err)
		}
	}
	return handler(ctx, request)
}

// objects returns how many objects the answer to a list has at most, by the views. It is zero for
// the lists of the fleet, which are small.
func (s *Server) objects(request any) int {
	switch of := request.(type) {
	case *agentv1alpha1.ListClaimsRequest:
		if of.GetIncludeEnded() {
			return s.config.Claims.Count(clusterName(of.GetCluster()))
		}
		open := 0
		s.config.Claims.Each(clusterName(of.GetCluster()), func(claim *agentv1alpha1.Claim) {
			open += lo.Ternary(claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, 0, 1)
		})
		return open
	case *agentv1alpha1.ListMachinesRequest:
		return s.config.Machines.Count(clusterName(of.GetCluster()))
	case *agentv1alpha1.ListNodeGroupsRequest:
		return s.config.NodeGroups.Count(clusterName(of.GetCluster()))
	}
	return 0
}

func (s *Server) limitStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	limited, call, err := s.begin(stream.Context(), info.FullMethod, true)
	if err != nil {
		return err
	}
	defer func() {
		call.End()
		s.countHubRequests(stream.Context(), call)
	}()
	return handler(service, &limitedStream{
		WrappedServerStream: &middleware.WrappedServerStream{ServerStream: stream, WrappedContext: limited}, server: s,
	})
}

// limitedStream counts the messages that it sends against the caller's limits.
type limitedStream struct {
	*middleware.WrappedServerStream

	server *Server
}

func (s *limitedStream) SendMsg(message any) error {
	if err := limits.FromContext(s.Context()).Next(); err != nil {
		return throttled(s.Context(), err)
	}
	sent, err := s.server.outgoing(s.Context(), message)
	if err != nil {
		return err
	}
	return s.WrappedServerStream.SendMsg(sent)
}
