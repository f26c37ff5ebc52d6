package limits_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
)

type roundTrips func(*http.Request) (*http.Response, error)

func (f roundTrips) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// hubOf returns a function that requests a path of a hub, which answers with an error at once.
func hubOf(perSecond float64, burst int, requested func(context.Context)) (ask func(ctx context.Context, kind string) error) {
	hub := limits.NewHub(perSecond, burst, func(path string) string { return strings.TrimPrefix(path, "/") })
	transport := hub.Transport(roundTrips(func(r *http.Request) (*http.Response, error) {
		requested(r.Context())
		return nil, http.ErrServerClosed
	}))
	return func(ctx context.Context, kind string) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://hub/"+kind, nil)
		if err != nil {
			return err
		}
		_, err = transport.RoundTrip(request) //nolint:bodyclose // there is no response
		return err
	}
}

func TestACallersRequestsToTheHubLeaveTheRestToOthers(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.HubRequestsPerSecond, o.HubRequestBurst = 1e-6, 2 })
	asked := 0
	ask := hubOf(1000, 1000, func(context.Context) { asked++ })
	as := func(identity string) context.Context {
		return limits.NewContext(t.Context(), begin(t, l, identity, false))
	}
	for range 2 {
		require.ErrorIs(t, ask(as("a"), "machines"), http.ErrServerClosed)
	}
	over, cancel := context.WithCancel(as("a"))
	cancel()
	require.ErrorIs(t, ask(over, "machines"), context.Canceled, "a third waits, whichever call it is of")
	require.Equal(t, 2, asked)
	require.ErrorIs(t, ask(as("b"), "machines"), http.ErrServerClosed)
	require.ErrorIs(t, ask(t.Context(), "machines"), http.ErrServerClosed, "the agent's own")
}

// crowd is callers that request as much of the hub as they may.
type crowd struct {
	limiter *limits.Limiter
	ask     func(ctx context.Context, kind string) error

	mu     sync.Mutex
	served []string // whose requests the hub got, in order; those of the agent itself are empty
}

type identityKey struct{}

// newCrowd returns so many callers of a hub, each with 16 calls that request Machines until the
// test ends. They wait for their turns when it returns. No caller's own rate keeps it from its
// turns, even if it got the burst of all callers alone. It must be called in a bubble.
func newCrowd(t *testing.T, callers int, perSecond float64, burst int) *crowd {
	t.Helper()
	l, _, _ := limiter(t, func(o *limits.Options) { o.HubRequestsPerSecond, o.HubRequestBurst = perSecond, 16+burst })
	c := &crowd{limiter: l}
	c.ask = hubOf(perSecond, burst, func(ctx context.Context) {
		identity, _ := ctx.Value(identityKey{}).(string)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.served = append(c.served, identity)
	})
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	for i := range callers {
		for range l.HubCallsAtOnce {
			as := c.as(t, ctx, strconv.Itoa(i))
			go func() {
				for as.Err() == nil {
					_ = c.ask(as, "machines") // it ends with the context
				}
			}()
		}
	}
	synctest.Wait()
	return c
}

func (c *crowd) as(t *testing.T, ctx context.Context, identity string) context.Context { //nolint:revive // t is first in this repository
	t.Helper()
	return limits.NewContext(context.WithValue(ctx, identityKey{}, identity), begin(t, c.limiter, identity, false))
}

func (c *crowd) order() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.served)
}

// Whatever 16 callers request, a request of another one waits for one of each at most.
func TestCallersTakeTurnsWithTheirRequestsToTheHub(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers = 16
		c := newCrowd(t, callers, 20, 20)
		burst := len(c.order())
		for range 3 {
			time.Sleep(5 * time.Second) //nolint:forbidigo // the time of the bubble
			synctest.Wait()
			before := len(c.order())
			require.ErrorIs(t, c.ask(c.as(t, t.Context(), "quiet"), "machines"), http.ErrServerClosed)
			ahead := c.order()[before:]
			require.LessOrEqual(t, slices.Index(ahead, "quiet"), callers, ahead)
		}
		each := map[string]int{}
		for _, identity := range c.order()[burst:] {
			each[identity]++
		}
		for i := range callers {
			assert.InDelta(t, each["0"], each[strconv.Itoa(i)], 1, "each gets as much as the others")
		}
	})
}

// All callers together make half of the requests that the agent may make, on average and at once,
// so that the other half is left to the agent itself.
func TestTheAgentsOwnRequestsDoNotWaitForThoseOfCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const seconds = 30
		c := newCrowd(t, 16, 20, 20)
		require.Len(t, c.order(), 10, "the burst of all callers")
		start := time.Now()
		for range 10 {
			require.ErrorIs(t, c.ask(t.Context(), "machines"), http.ErrServerClosed)
		}
		require.Zero(t, time.Since(start), "the burst of the agent itself")
		for time.Since(start) < seconds*time.Second {
			time.Sleep(time.Second / 10) //nolint:forbidigo // the time of the bubble
			began := time.Now()
			require.ErrorIs(t, c.ask(t.Context(), "machines"), http.ErrServerClosed)
			require.Less(t, time.Since(began), time.Millisecond)
		}
		callers := len(slices.DeleteFunc(c.order(), func(identity string) bool { return identity == "" }))
		require.InDelta(t, 10+10*seconds, callers, 2)
	})
}

// Others wait for the end of a list or a SyncClaims.
func TestRequestsOfACallThatOthersWaitForComeBeforeItsCallersOtherOnes(t *testing.T) {
	for name, begin := range map[string]func(context.Context, *limits.Call) error{
		"a list":      func(ctx context.Context, c *limits.Call) error { return c.List(ctx, 0, true) },
		"a sync":      func(ctx context.Context, c *limits.Call) error { return c.Sync(ctx, 0, func() {}) },
		"a large one": func(ctx context.Context, c *limits.Call) error { return c.Sync(ctx, 1<<20, func() {}) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const callers = 4
				c := newCrowd(t, callers, 20, 20)
				ctx := c.as(t, t.Context(), "0")
				call := limits.FromContext(ctx)
				require.NoError(t, begin(ctx, call))
				defer call.End()
				for range 3 {
					before := len(c.order())
					require.ErrorIs(t, c.ask(ctx, "machines"), http.ErrServerClosed)
					require.LessOrEqual(t, len(c.order())-before, callers+1, "one of each caller, and its own")
				}
			})
		})
	}
}

// A caller's own rate holds up the requests of a list no longer than one of its others.
func TestRequestsOfACallThatOthersWaitForComeFirstInItsCallersOwnRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _, _ := limiter(t, func(o *limits.Options) { o.HubRequestsPerSecond, o.HubRequestBurst = 1, 1 })
		ask := hubOf(1000, 1000, func(context.Context) {})
		others, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		for range 8 {
			as := limits.NewContext(others, begin(t, l, "a", false))
			go func() { _ = ask(as, "machines") }() // it ends with the context
		}
		synctest.Wait()
		call := begin(t, l, "a", false)
		require.NoError(t, call.List(t.Context(), 0, true))
		defer call.End()
		start := time.Now()
		require.ErrorIs(t, ask(limits.NewContext(t.Context(), call), "machines"), http.ErrServerClosed)
		require.LessOrEqual(t, time.Since(start), time.Second)
	})
}

// The agent's own rate is that of the callers and of itself together.
func TestAllRequestsOfAKindKeepToTheAgentsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 16, 20, 20)
		start := time.Now()
		for range 310 {
			require.ErrorIs(t, c.ask(t.Context(), "machines"), http.ErrServerClosed)
		}
		require.InDelta(t, 30, time.Since(start).Seconds(), 1)
		require.InDelta(t, 20+20*30, len(c.order()), 20)

		require.ErrorIs(t, c.ask(c.as(t, t.Context(), "quiet"), "machinesets"), http.ErrServerClosed)
		start = time.Now()
		for range 10 {
			require.ErrorIs(t, c.ask(t.Context(), "machinesets"), http.ErrServerClosed)
		}
		require.Zero(t, time.Since(start), "requests for another kind do not wait")
	})
}

// Otherwise it would wait for its deadline, only to fail then.
func TestARequestThatCannotBeSentBeforeItsDeadlineFailsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ask := hubOf(1, 1, func(context.Context) {})
		require.ErrorIs(t, ask(t.Context(), "machines"), http.ErrServerClosed)
		within, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		require.ErrorContains(t, ask(within, "machines"), "would exceed context deadline")
		require.NoError(t, within.Err())
	})
}

// etcd keeps each revision of an object for minutes, so bytes count as well as requests.
func TestALargeWriteCountsAsSeveralRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const burst = 8
		l, _, _ := limiter(t, func(o *limits.Options) { o.HubRequestsPerSecond, o.HubRequestBurst = 1, burst })
		for bytes, requests := range map[int]int{0: 1, 4 << 10: 1, 4<<10 + 1: 2, 16 << 10: 4, 160 << 10: 4} {
			for of, ctx := range map[string]context.Context{
				"a caller":         limits.NewContext(t.Context(), begin(t, l, strconv.Itoa(bytes), false)),
				"the agent itself": t.Context(),
			} {
				hub := limits.NewHub(1, burst, func(string) string { return "machineclaims" })
				transport := hub.Transport(roundTrips(func(*http.Request) (*http.Response, error) { return nil, http.ErrServerClosed }))
				start, sent := time.Now(), 0
				for ; time.Since(start) < time.Second/2; sent++ {
					within, cancel := context.WithTimeout(ctx, time.Second/2)
					request, err := http.NewRequestWithContext(within, http.MethodPost, "https://hub/", strings.NewReader(strings.Repeat("x", bytes)))
					require.NoError(t, err)
					_, err = transport.RoundTrip(request) //nolint:bodyclose // there is no response
					cancel()
					if !errors.Is(err, http.ErrServerClosed) {
						break
					}
				}
				want := burst / requests
				if of == "a caller" {
					want = burst / 2 / requests
				}
				require.Equal(t, want, sent, "%d bytes of %s", bytes, of)
			}
		}
	})
}

// A caller with large writes takes a turn for each part, so that another's small request does not
// wait for a whole one of each.
func TestALargeWriteTakesATurnForEachPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const writers = 8
		l, _, _ := limiter(t, func(*limits.Options) {})
		hub := limits.NewHub(2, 2, func(string) string { return "machineclaims" })
		transport := hub.Transport(roundTrips(func(*http.Request) (*http.Response, error) { return nil, http.ErrServerClosed }))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		write := func(identity string, bytes int) error {
			as := limits.NewContext(ctx, begin(t, l, identity, false))
			request, err := http.NewRequestWithContext(as, http.MethodPost, "https://hub/", strings.NewReader(strings.Repeat("x", bytes)))
			if err != nil {
				return err
			}
			_, err = transport.RoundTrip(request) //nolint:bodyclose // there is no response
			return err
		}
		for i := range writers {
			go func() {
				for ctx.Err() == nil {
					_ = write(strconv.Itoa(i), 16<<10) // it ends with the context
				}
			}()
		}
		synctest.Wait()
		start := time.Now()
		require.ErrorIs(t, write("quiet", 0), http.ErrServerClosed)
		// All callers have one turn a second.
		require.LessOrEqual(t, time.Since(start), (writers+1)*time.Second)
		cancel()
		synctest.Wait()
	})
}

// A burst that is smaller than the cost of a write delays it, and does not keep it for ever.
func TestALargeWriteIsSentWhateverTheBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _, _ := limiter(t, func(o *limits.Options) { o.HubRequestsPerSecond, o.HubRequestBurst = 2, 1 })
		hub := limits.NewHub(2, 1, func(string) string { return "machineclaims" })
		transport := hub.Transport(roundTrips(func(*http.Request) (*http.Response, error) { return nil, http.ErrServerClosed }))
		ctx, cancel := context.WithTimeout(limits.NewContext(t.Context(), begin(t, l, "a", false)), time.Minute)
		defer cancel()
		for range 3 {
			request, err := http.NewRequestWithContext(ctx, http.MethodPut, "https://hub/", strings.NewReader(strings.Repeat("x", 16<<10)))
			require.NoError(t, err)
			_, err = transport.RoundTrip(request) //nolint:bodyclose // there is no response
			require.ErrorIs(t, err, http.ErrServerClosed)
		}
	})
}

func TestACallThatEndsTakesNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 1, 2, 2)
		ctx, cancel := context.WithTimeout(c.as(t, t.Context(), "hasty"), time.Second/2)
		defer cancel()
		require.ErrorIs(t, c.ask(ctx, "machines"), context.DeadlineExceeded)
		before := len(c.order())
		time.Sleep(10 * time.Second) //nolint:forbidigo // the time of the bubble
		synctest.Wait()
		require.Len(t, c.order(), before+10)
		require.NotContains(t, c.order(), "hasty")
	})
}

func TestACallKnowsWhatItCostTheHub(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	ask := hubOf(1000, 1000, func(context.Context) {})
	call, other := begin(t, l, "a", false), begin(t, l, "a", false)
	for range 3 {
		require.ErrorIs(t, ask(limits.NewContext(t.Context(), call), "machines"), http.ErrServerClosed)
	}
	require.Equal(t, int64(3), call.HubRequests())
	require.Zero(t, other.HubRequests())
}
