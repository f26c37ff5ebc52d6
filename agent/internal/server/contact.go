package server

import (
	"context"
	"time"

	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// Contact knows whether the hub's API server answers.
type Contact interface {
	// State returns a channel that is closed at the next change, and an error while the hub does not answer. Callers are sent its text.
	State() (changed <-chan struct{}, lost error)
}

// lostContactError ends watch streams.
type lostContactError struct{ error }

func (e *lostContactError) Unwrap() error { return e.error }

// inContact returns what calls are answered while the hub's API server does not answer, nil while it does: a cache is no reason to answer
// as if it did.
func (s *Server) inContact() error {
	if s.config.Contact == nil {
		return nil
	}
	if _, lost := s.config.Contact.State(); lost != nil {
		return agenterrors.HubUnreachable(lost.Error())
	}
	return nil
}

// whileInContact returns a context that ends, with a [*lostContactError], when contact is lost.
func (s *Server) whileInContact(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	if s.config.Contact != nil {
		go func() {
			for ctx.Err() == nil {
				changed, lost := s.config.Contact.State()
				if lost != nil {
					cancel(&lostContactError{lost})
					return
				}
				select {
				case <-ctx.Done():
				case <-changed:
				}
			}
		}()
	}
	return ctx, func() { cancel(nil) }
}

// partInterval is how long a connection may stay without contact: long enough for what its streams end with to arrive, and about as long as
// an agent that is not ready is still given new connections.
const partInterval = 5 * time.Second

// partWithoutContact closes the connections of certificates while the hub's API server does not answer, until the context ends: callers come
// again, to an agent that is ready if there is one. Only calls that wait for the hub are under way then. Those of this machine stay: they
// have no other agent.
func (s *Server) partWithoutContact(ctx context.Context) {
	for ctx.Err() == nil && s.config.Contact != nil {
		var part <-chan time.Time
		changed, lost := s.config.Contact.State()
		if lost != nil {
			part = time.After(partInterval)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-part:
			if closed := s.remote.close(); closed > 0 {
				s.config.Log.Info("connections were closed: the hub's API server does not answer, and another agent may serve", "connections", closed)
			}
		}
	}
}

// followContact tells health clients whether the services can be used, from when the views are complete until the context ends.
func (s *Server) followContact(ctx context.Context) {
	for ctx.Err() == nil && s.config.Contact != nil {
		changed, lost := s.config.Contact.State()
		status := grpc_health_v1.HealthCheckResponse_SERVING
		if lost != nil {
			status = grpc_health_v1.HealthCheckResponse_NOT_SERVING
		}
		for _, service := range append(services(), "") {
			s.health.SetServingStatus(service, status)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}
