package hub_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

func TestTheClockFollowsTheAPIServer(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 400e6, time.UTC)
	for name, answer := range map[string]struct {
		behind, takes time.Duration // of the system's clock, and of the response
		offset        time.Duration
	}{
		"clocks agree":                    {0, 0, 0},
		"less than is certain":            {300 * time.Millisecond, 0, 0},
		"half a minute behind":            {30 * time.Second, 0, 30*time.Second - 400*time.Millisecond},
		"half an hour ahead":              {-30 * time.Minute, 0, -30*time.Minute + 600*time.Millisecond},
		"a slow response, clocks agree":   {0, 20 * time.Second, 0},
		"a slow response, a minute ahead": {-time.Minute, 20 * time.Second, -time.Minute + 600*time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			system := testingclock.NewFakeClock(now)
			c := hub.NewClock(system, logr.Discard())
			ask := c.Transport(transport(func(*http.Request) (*http.Response, error) {
				response := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody}
				response.Header.Set("Date", system.Now().Add(answer.behind).Format(http.TimeFormat))
				system.Step(answer.takes)
				return response, nil
			}))
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://hub/version", http.NoBody)
			require.NoError(t, err)
			response, err := ask.RoundTrip(request)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())

			require.Equal(t, answer.offset, c.Offset())
			require.Equal(t, system.Now().Add(answer.offset), c.Now())
			earlier := c.Now()
			system.Step(time.Minute)
			require.Equal(t, time.Minute, c.Since(earlier))
		})
	}
}

// The system's clock is set while the agent runs, and the offset makes up for it. The monotonic
// part of a time, which is not set, must not count then.
func TestAStepOfTheSystemsClockIsNoneOfTheCorrectedOne(t *testing.T) {
	c := hub.NewClock(clock.RealClock{}, logr.Discard())
	require.Contains(t, time.Now().String(), " m=")
	now := c.Now()
	require.NotContains(t, now.String(), " m=", "which String adds")
}

// A proxy, or a server that does not know the time, leaves the header out.
func TestAResponseWithoutADateChangesNothing(t *testing.T) {
	system := testingclock.NewFakeClock(time.Now())
	c := hub.NewClock(system, logr.Discard())
	date := system.Now().Add(time.Hour).UTC().Format(http.TimeFormat)
	for _, value := range []string{date, "", "yesterday"} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://hub/version", http.NoBody)
		require.NoError(t, err)
		response, err := c.Transport(transport(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Date": []string{value}}, Body: http.NoBody}, nil
		})).RoundTrip(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.InDelta(t, time.Hour, c.Offset(), float64(time.Second))
	}
}
