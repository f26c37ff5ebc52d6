package server

import (
	"context"
	"errors"
	"reflect"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// defaultRightsInterval is how often the rights of watchers are checked again. Other calls are
// checked once, when they begin.
const defaultRightsInterval = 5 * time.Second

// endedRightsError is the cause that ends a watch stream. It wraps the error that the caller
// receives.
type endedRightsError struct{ error }

func (e *endedRightsError) Unwrap() error { return e.error }

// whileEntitled returns a context that is cancelled with an [*endedRightsError] once the caller of
// a stream is no longer entitled to it: because the policy has changed, or its certificate has
// expired or belongs to a past onboarding. entitled is called from another goroutine, with the context
// that whileEntitled returns. If it panics, the stream ends.
func (s *Server) whileEntitled(ctx context.Context, entitled func(context.Context) error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		ticker := time.NewTicker(s.config.RightsInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			err := panics.Confined(log.FromContext(ctx), panics.Calls, "a stream ends because of a bug in the agent", func() error { return entitled(ctx) })
			if _, panicked := errors.AsType[*panics.Error](err); panicked {
				err = errInternal
			}
			if err != nil {
				cancel(&endedRightsError{err})
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// entitled returns nil while the caller of a stream may continue it, and the reason as an error
// otherwise.
func (s *Server) entitled(ctx context.Context, cluster types.NamespacedName) error {
	method, _ := grpc.Method(ctx)
	c := s.presently(ctx)
	switch {
	case c.problem != "":
		return agenterrors.Unauthenticated(c.problem)
	case !c.MayCallFor(authz.Methods[method], cluster):
		return agenterrors.PermissionDenied("this identity may not call this method for this Cluster any more")
	}
	return s.onboarded(ctx, c)
}

// presently identifies the caller of a stream again: its rights may have changed.
func (s *Server) presently(ctx context.Context) caller {
	if p, ok := peer.FromContext(ctx); ok {
		return s.callerOn(p.AuthInfo)
	}
	return caller{problem: "the connection has no identity"}
}

// entitledToMany is like [Server.entitled] for a stream of all Clusters that the caller may read. It
// ends when the caller may read others, so that the next stream shows them.
func (s *Server) entitledToMany(ctx context.Context, rule authz.Rule, since caller) error {
	c := s.presently(ctx)
	switch {
	case c.problem != "":
		return agenterrors.Unauthenticated(c.problem)
	case !c.MayCall(rule):
		return agenterrors.PermissionDenied("this identity may not call this method any more")
	case !reflect.DeepEqual(c.Grants, since.Grants):
		return agenterrors.RightsChanged("the Clusters that this identity may read have changed; watch again")
	}
	return s.onboarded(ctx, c)
}

// closeWhenExpired closes a connection when its client certificate expires, so that a client that
// has a new certificate by then reconnects with it.
func (s *Server) closeWhenExpired(c *connection, info credentials.TLSInfo) {
	if len(info.State.VerifiedChains) == 0 {
		return
	}
	until := authz.ValidUntil(info.State.VerifiedChains)
	timer := time.AfterFunc(until.Sub(s.config.Clock.Now()), func() {
		s.config.Log.Info("a connection is closed: its client certificate has expired", "address", c.RemoteAddr().String())
		_ = c.Close() // Any unsent data is lost in either case.
	})
	c.until(func() { timer.Stop() })
}
