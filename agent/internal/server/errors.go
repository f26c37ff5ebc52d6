package server

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strings"

	"github.com/samber/lo"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// answer converts an error of the agent's own packages into an API error. The key identifies the
// requested object; its ID may be empty.
func (s *Server) answer(ctx context.Context, err error, key claims.Key) error {
	var (
		ended   *claims.EndedError
		noRoom  *claims.NoRoomError
		refused *claims.RefusedError
		unknown *claims.UnknownGroupError
		foreign *claims.ForeignSpokeError
		unseen  *claims.UnseenError
		tooMany *claims.TooManyError
		keeps   *claims.NotReturnableError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ended):
		return s.answerEnded(ctx, key, ended)
	case errors.As(err, &noRoom):
		return s.rejected(key.Namespace, noRoom.Candidates)
	case errors.As(err, &refused):
		return s.rejected(key.Namespace, refused.Candidates)
	case errors.As(err, &unknown):
		return s.rejected(key.Namespace, lo.Map(unknown.Candidates, func(name string, _ int) eligibility.Refusal {
			return eligibility.Refusal{NodeGroup: name, Reason: eligibility.Gone, Message: "no such node group in this Cluster"}
		}))
	case errors.As(err, &foreign):
		return agenterrors.SpokeMismatch(err.Error())
	case errors.As(err, &tooMany):
		return agenterrors.TooManyClaims(tooMany.Error(), tooMany.RetryAfter)
	case errors.As(err, &keeps):
		return agenterrors.NotReturnable(keeps.Error())
	case errors.As(err, &unseen):
		return agenterrors.NotSynced(unseen.Error())
	case errors.Is(err, claims.ErrClusterPaused):
		return agenterrors.ClusterPaused(err.Error())
	case errors.Is(err, claims.ErrRestoring):
		return agenterrors.NotSynced(err.Error())
	case errors.Is(err, claims.ErrUnknownCluster):
		return agenterrors.ClusterNotFound(protoconv.Cluster(types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}))
	case errors.Is(err, claims.ErrNotFound):
		return agenterrors.ClaimNotFound(key.ID)
	case errors.Is(err, claims.ErrForeignHolder):
		return agenterrors.PermissionDenied(err.Error())
	case errors.Is(err, claims.ErrConflict):
		// The cause may be the text of a webhook.
		log.FromContext(ctx).V(1).Info("a call lost a race", "cause", err.Error())
		return agenterrors.Conflict(claims.ErrConflict.Error() + "; repeat the call")
	case errors.Is(err, claims.ErrStaleToken):
		return agenterrors.StaleToken(err.Error())
	case errors.Is(err, claims.ErrInvalidToken):
		return agenterrors.InvalidToken(err.Error())
	}
	return answerOther(ctx, err)
}

// answerOther is [Server.answer] for errors that do not come from the claim engine.
func answerOther(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, watchcache.ErrClosed):
		return agenterrors.ShuttingDown()
	case errors.Is(err, watchcache.ErrNotReady):
		return agenterrors.NotSynced("the agent's view of the hub is not complete yet")
	case ctx.Err() != nil:
		return grpcstatus.FromContextError(ctx.Err()).Err()
	case errors.Is(err, protocol.ErrNewerLedger):
		log.FromContext(ctx).Info("a call failed: a newer agent has written the ledger of the node group", "cause", err.Error())
		return agenterrors.HubUnreachable("a newer agent has written the ledger of this node group: " + protocol.ErrNewerLedger.Error())
	case errors.Is(err, claims.ErrWriteRefused):
		// The cause is the text of the API server, a webhook or a policy.
		log.FromContext(ctx).Error(err, "a call failed: the hub refuses a write")
		return grpcstatus.Error(codes.Internal, "the hub refuses a write of the agent; the agent's log has details under this request id")
	case outOfTurn(err):
		log.FromContext(ctx).Info("a call failed: --kube-api-qps left no request to the hub for it before its deadline")
		return grpcstatus.Error(codes.DeadlineExceeded, "the agent sends too many requests to the hub to serve this call before its deadline")
	case unreachable(err):
		// The cause contains the hub's address, which callers must not see.
		log.FromContext(ctx).Info("a call failed: the hub's API server did not answer", "cause", err.Error())
		return agenterrors.HubUnreachable("the hub's API server did not answer; the agent's log has details under this request id")
	}
	// The cause is for the agent's operator: it may name objects that the caller must not see.
	log.FromContext(ctx).Error(err, "a call failed")
	return grpcstatus.Error(codes.Internal, "internal error; the agent's log has details under this request id")
}

// outOfTurn reports whether a request was not sent because the agent's own rate would have allowed
// it only after the call's deadline. The limiter says so before the deadline, in an error that has
// no type. The API server's answer may quote such an error of a webhook's own client.
func outOfTurn(err error) bool {
	status := apierrors.APIStatus(nil)
	return !errors.As(err, &status) && strings.Contains(err.Error(), "would exceed context deadline")
}

// unreachable reports whether an error means that the API server could not be reached or could not
// respond.
func unreachable(err error) bool {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		code := status.Status().Code
		return code >= 500 || code == 429 || apierrors.IsTimeout(err)
	}
	var (
		network net.Error
		request *url.Error
	)
	return errors.As(err, &network) || errors.As(err, &request) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// answerEnded reports how a claim ended, from the current state of the claim.
func (s *Server) answerEnded(ctx context.Context, key claims.Key, ended *claims.EndedError) error {
	claim, err := s.config.Engine.Get(ctx, key)
	if err != nil {
		return s.answerAfter(ctx, err, key, ended)
	}
	shown, err := s.config.Show(ctx, claim)
	if err != nil {
		return s.answerAfter(ctx, err, key, ended)
	}
	return agenterrors.ClaimEnded(shown)
}

// answerAfter is the response if the details of an ended claim could not be read.
func (s *Server) answerAfter(ctx context.Context, err error, key claims.Key, ended *claims.EndedError) error {
	if errors.Is(err, claims.ErrNotFound) {
		return agenterrors.ClaimEnded(protoconv.EndedClaim(key.Namespace, key.Cluster, key.ID, ended.Reason, ended.Message))
	}
	return answerOther(ctx, err)
}

func (s *Server) rejected(namespace string, refusals []eligibility.Refusal) error {
	return agenterrors.Rejected(s.config.Clock.Now(), lo.Map(refusals, func(r eligibility.Refusal, _ int) agenterrors.Rejection {
		reason := agenterrors.ReasonNotOpen
		switch {
		case r.Reason.NoRoom():
			reason = agenterrors.ReasonNoRoom
		case r.Reason == eligibility.Gone, r.Reason == eligibility.NotMember:
			reason = agenterrors.ReasonNodeGroupNotFound
		}
		return agenterrors.Rejection{
			NodeGroup:   nodegroup.ID(types.NamespacedName{Namespace: namespace, Name: r.NodeGroup}),
			Reason:      reason,
			Unavailable: protoconv.UnavailableReason(r.Reason),
			Message:     r.Message,
			RetryAt:     r.RetryAt,
		}
	})...)
}
