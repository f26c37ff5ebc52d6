package limits

import (
	"context"
	"net/http"
)

type callKey struct{}

// NewContext returns a context that carries the call.
func NewContext(ctx context.Context, c *Call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// FromContext returns the call that the context carries, or nil.
func FromContext(ctx context.Context) *Call {
	c, _ := ctx.Value(callKey{}).(*Call)
	return c
}

// Transport returns a transport to the hub's API server that limits the rate of requests per
// caller, so that one caller cannot use up the agent's own rate. Requests whose context carries no
// call are not limited.
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

// request waits until the call may send a request to the hub's API server. It may be called
// concurrently for one call. The error is that of the context.
func (c *Call) request(ctx context.Context) error {
	if c.caller.hubRate.Wait(ctx) == nil {
		c.hubRequests.Add(1)
		return nil
	}
	// The limiter fails at once if the request's turn would come after the deadline. The queue
	// ahead is at most the number of requests that the caller may have in flight.
	<-ctx.Done()
	return ctx.Err()
}

// HubRequests returns how many requests the call has sent to the hub's API server. It may be called
// concurrently.
func (c *Call) HubRequests() int64 { return c.hubRequests.Load() }
