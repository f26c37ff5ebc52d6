package server

import (
	"context"
	"time"

	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// Contact reports whether the hub's API server responds.
type Contact interface {
	// State returns a channel that is closed at the next change, and an error while the hub does
	// not respond. Callers receive the text of the error.
	State() (changed <-chan struct{}, lost error)
}

// lostContactError is the cause that ends watch streams when contact with the hub is lost.
type lostContactError struct{ error }

func (e *lostContactError) Unwrap() error { return e.error }

// inContact returns nil while the hub's API server responds, and otherwise the error for callers.
// The caches must not be served as if they were current.
func (s *Server) inContact() error {
	if s.config.Contact == nil {
		return nil
	}
	if _, lost := s.config.Contact.State(); lost != nil {
		return agenterrors.HubUnreachable(lost.Error())
	}
	return nil
}

// whileInContact returns a context that is cancelled with a [*lostContactError] when contact is
// lost.
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

// partInterval is how long a connection may stay open without contact. It leaves time for the final
// messages of its streams to arrive. An agent that is not ready receives new connections for about
// as long.
const partInterval = 5 * time.Second

// partWithoutContact closes the connections made with certificates while the hub's API server does
// not respond, until the context ends. Callers then reconnect, to an agent that is ready if there
// is one. The only calls in flight at that time are waiting for the hub. Local connections stay
// open: their callers have no other agent.
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

// followContact reports to health clients whether the services can be used. It is called once the
// views are complete, and returns when the context ends.
func (s *Server) followContact(ctx context.Context) {
	for ctx.Err() == nil && s.config.Contact != nil {
		changed, lost := s.config.Contact.State()
		status := grpc_health_v1.HealthCheckResponse_SERVING
		if lost != nil {
			status = grpc_health_v1.HealthCheckResponse_NOT_SERVING
		}
		for _, service := range append(s.services(), "") {
			s.health.SetServingStatus(service, status)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}
