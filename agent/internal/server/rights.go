package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"reflect"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// defaultRightsInterval is how often the rights of watchers are checked again. Those of other
// callers are checked when the call begins, and again when it has waited for its turns. A call in
// progress ends if its caller is shut out altogether.
const defaultRightsInterval = 5 * time.Second

// endedRightsError is the cause that ends a watch stream, or a call of a caller that was shut out.
// It wraps the error that the caller receives.
type endedRightsError struct{ error }

func (e *endedRightsError) Unwrap() error { return e.error }

// whileEntitled returns a context that is cancelled with an [*endedRightsError] once the caller of
// a stream is no longer entitled to it: because the policy has changed, or its certificate has
// expired, or belongs to a past onboarding or a withdrawn authority. entitled is called from
// another goroutine, with the context that whileEntitled returns. If it panics, the stream ends.
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

// presently identifies the caller of a call again: its rights may have changed.
func (s *Server) presently(ctx context.Context) caller {
	was, is := callerOf(ctx), caller{problem: "the connection has no identity"}
	if p, ok := peer.FromContext(ctx); ok {
		is = s.callerOn(p.AuthInfo)
	}
	is.requestID, is.decided = was.requestID, was.decided
	return is
}

// entitledToMany is like [Server.entitled] for a stream of all Clusters that the caller may read.
// It ends when the caller may read others, so that the next stream shows them.
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

// endWhenShutOut ends a unary call in progress when its caller is found to be shut out: what it has
// not done yet, it may not do any more.
func (s *Server) endWhenShutOut(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	p, _ := peer.FromContext(ctx)
	of, accepted := p.AuthInfo.(connectionInfo)
	// A method that asks about the onboarding itself may know of one that the caches do not show
	// yet.
	if !accepted || authz.Methods[info.FullMethod].AsksOnboarding {
		return handler(ctx, request)
	}
	ctx, done := of.connection.call(ctx)
	defer done()
	response, err := handler(ctx, request)
	if ended, shutOut := errors.AsType[*endedRightsError](context.Cause(ctx)); shutOut && err != nil {
		return nil, ended.error
	}
	return response, err
}

// shutOutGrace is how long a connection stays open whose caller is shut out. Meanwhile its calls
// and streams end, and further ones are refused, with the reason. Then its client has to connect
// again, with a new certificate if it has one.
const shutOutGrace = 10 * time.Second

// shutOut returns an error, with the reason, if a caller may not use the agent at all, and nil
// otherwise: its certificate is denied or has expired, its authority was withdrawn or may not sign
// it, or its onboarding has ended.
func (s *Server) shutOut(ctx context.Context, c caller) error {
	if c.problem != "" && !c.unnamed {
		return agenterrors.Unauthenticated(c.problem)
	}
	// Any other error means that this cannot be told now.
	if err := s.onboarded(ctx, c); grpcstatus.Code(err) == codes.Unauthenticated {
		return err
	}
	return nil
}

// partWithShutOut closes the connections whose callers have been shut out for the grace period,
// until the context ends.
func (s *Server) partWithShutOut(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		for c, info := range s.remote.current() {
			_ = panics.Confined(s.config.Log, panics.Connections, "a connection stays open because of a bug in the agent", func() error {
				s.closeIfShutOut(ctx, c, info)
				return nil
			}, "address", c.RemoteAddr().String())
		}
	}, s.config.RightsInterval)
}

func (s *Server) closeIfShutOut(ctx context.Context, c *connection, info connectionInfo) {
	by := s.callerOn(info)
	err := s.shutOut(ctx, by)
	if err == nil {
		c.readmit()
		return
	}
	c.endCalls(&endedRightsError{err})
	if now := s.config.Clock.Now(); now.Sub(c.shutOut(now)) >= shutOutGrace {
		s.config.Log.Info("a connection is closed: its caller may not use the agent any more",
			"identity", by.limitedAs, "address", c.RemoteAddr().String(), "cause", grpcstatus.Convert(err).Message())
		_ = c.Close() // Any unsent data is lost in either case.
	}
}

// verified is the client certificate of a connection, as verified by the authorities that the
// listener has now: those of the handshake may have been withdrawn since. It is safe for concurrent
// use.
type verified struct {
	authorities func() *x509.CertPool
	// handshake is the result of the handshake.
	handshake tls.ConnectionState

	mu sync.Mutex
	// chains is what pool verified. It is nil if there is no chain to pool.
	pool   *x509.CertPool
	chains [][]*x509.Certificate
}

// now returns the chains from the certificate to the present authorities, or nil if there are none.
// They may have expired.
func (v *verified) now() [][]*x509.Certificate {
	pool := v.authorities()
	v.mu.Lock()
	defer v.mu.Unlock()
	if pool != v.pool {
		v.pool, v.chains = pool, v.verify(pool)
	}
	return v.chains
}

// verify does what a handshake does.
func (v *verified) verify(pool *x509.CertPool) [][]*x509.Certificate {
	if pool == nil {
		return nil // Verify would use the system's.
	}
	at := time.Now() // as crypto/tls
	// An expired certificate is not one of a withdrawn authority. The authorizer refuses it.
	if until := authz.ValidUntil(v.handshake.VerifiedChains); at.After(until) {
		at = until
	}
	intermediates := x509.NewCertPool()
	for _, certificate := range v.handshake.PeerCertificates[1:] {
		intermediates.AddCert(certificate)
	}
	chains, err := v.handshake.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: pool, Intermediates: intermediates, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return nil
	}
	return chains
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
