package limits

import (
	"context"
	"net/http"
)

type callKey struct{}

// NewContext returns a context of the call.
func NewContext(ctx context.Context, c *Call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// FromContext returns the call of the context, nil when it has none.
func FromContext(ctx context.Context) *Call {
	c, _ := ctx.Value(callKey{}).(*Call)
	return c
}

// Transport returns a transport to the hub's API server on which the requests of a caller's calls wait for one another, so that they leave
// the rest of what the agent may ask to others. Requests whose context is of no call pass.
func Transport(next http.RoundTripper) http.RoundTripper { return transport{next} }

type transport struct{ next http.RoundTripper }

func (t transport) RoundTrip(request *http.Request) (*http.Response, error) {
	if call := FromContext(request.Context()); call != nil {
		if err := call.request(request.Context()); err != nil {
			return nil, err
		}
	}
	return t.next.RoundTrip(request)
}

// request waits until a request to the hub's API server may be made, which may be several of the call's at once. Errors: the context's.
func (c *Call) request(ctx context.Context) error {
	if c.caller.hubRate.Wait(ctx) == nil {
		return nil
	}
	// The turn would come after the deadline, which is at most as many requests away as the caller may have under way.
	<-ctx.Done()
	return ctx.Err()
}
