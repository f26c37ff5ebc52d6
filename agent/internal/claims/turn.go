package claims

import "context"

// Turn is a call's turn to ask the hub's API server, which the engine gives back while the call only waits: for the write that enters its
// claim, or for room in a ledger, which may take until the call's deadline.
type Turn interface {
	// LeaveHub gives the turn back.
	LeaveHub()
	// AskHub waits until it is the call's turn again. Errors: the context's.
	AskHub(ctx context.Context) error
}

type turnKey struct{}

// WithTurn returns a context of a call whose turn it is.
func WithTurn(ctx context.Context, t Turn) context.Context {
	return context.WithValue(ctx, turnKey{}, t)
}

// always is the turn of calls that nothing limits.
type always struct{}

func (always) LeaveHub()                    {}
func (always) AskHub(context.Context) error { return nil }

func turnOf(ctx context.Context) Turn {
	if t, ok := ctx.Value(turnKey{}).(Turn); ok {
		return t
	}
	return always{}
}
