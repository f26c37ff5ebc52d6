package limits_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
)

type roundTrips func(*http.Request) (*http.Response, error)

func (f roundTrips) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestACallersRequestsToTheHubLeaveTheRestToOthers(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.HubRequestsPerSecond, o.HubRequestBurst = 1e-6, 2 })
	asked := 0
	transport := limits.Transport(roundTrips(func(*http.Request) (*http.Response, error) {
		asked++
		return nil, http.ErrServerClosed
	}))
	ask := func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://hub", nil)
		require.NoError(t, err)
		response, err := transport.RoundTrip(request)
		if err == nil {
			require.NoError(t, response.Body.Close())
		}
		return err
	}
	as := func(identity string) context.Context {
		return limits.NewContext(t.Context(), begin(t, l, identity, false))
	}
	for range 2 {
		require.ErrorIs(t, ask(as("a")), http.ErrServerClosed)
	}
	over, cancel := context.WithCancel(as("a"))
	cancel()
	require.ErrorIs(t, ask(over), context.Canceled, "a third waits, whichever call it is of")
	require.Equal(t, 2, asked)
	require.ErrorIs(t, ask(as("b")), http.ErrServerClosed)
	require.ErrorIs(t, ask(t.Context()), http.ErrServerClosed, "the agent's own")
}

func TestACallKnowsWhatItCostTheHub(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	transport := limits.Transport(roundTrips(func(*http.Request) (*http.Response, error) { return nil, http.ErrServerClosed }))
	call, other := begin(t, l, "a", false), begin(t, l, "a", false)
	for range 3 {
		request, err := http.NewRequestWithContext(limits.NewContext(t.Context(), call), http.MethodGet, "https://hub", nil)
		require.NoError(t, err)
		_, err = transport.RoundTrip(request) //nolint:bodyclose // there is no response
		require.ErrorIs(t, err, http.ErrServerClosed)
	}
	require.Equal(t, int64(3), call.HubRequests())
	require.Zero(t, other.HubRequests())
}
