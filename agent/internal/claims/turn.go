package claims

import "context"

// Turn is a call's turn to send requests to the hub's API server. The engine leaves it while
// the call only waits, for the write that enters its claim or for room in a ledger. That may take
// until the call's deadline.
type Turn interface {
	// LeaveHub ends the turn.
	LeaveHub()
	// AskHub waits until it is the call's turn again. It returns the context's error.
	AskHub(ctx context.Context) error
}

type turnKey struct{}

// WithTurn returns the context of a call that has a turn.
func WithTurn(ctx context.Context, t Turn) context.Context {
	return context.WithValue(ctx, turnKey{}, t)
}

// always is the turn of calls without a limit.
type always struct{}

func (always) LeaveHub()                    {}
func (always) AskHub(context.Context) error { return nil }

func turnOf(ctx context.Context) Turn {
	if t, ok := ctx.Value(turnKey{}).(Turn); ok {
		return t
	}
	return always{}
}
