package limits_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

func limiter(t *testing.T, change func(*limits.Options)) (*limits.Limiter, *clocktesting.FakeClock, *prometheus.Registry) {
	t.Helper()
	o := limits.Defaults()
	change(&o)
	clock, registry := clocktesting.NewFakeClock(time.Unix(1000, 0)), prometheus.NewRegistry()
	l, err := limits.New(o, clock, registry)
	require.NoError(t, err)
	return l, clock, registry
}

func begin(t *testing.T, l *limits.Limiter, identity string, watch bool) *limits.Call {
	t.Helper()
	call, err := l.Begin(identity, "/m", watch)
	require.NoError(t, err)
	return call
}

func requireRefusal(t *testing.T, err error) *limits.RefusedError {
	t.Helper()
	refused, ok := errors.AsType[*limits.RefusedError](err)
	require.True(t, ok, "%v", err)
	return refused
}

func requireReason(t *testing.T, err error, reason string) {
	t.Helper()
	require.Equal(t, reason, requireRefusal(t, err).Reason)
}

func requireRefused(t *testing.T, err error, reason string, after time.Duration) {
	t.Helper()
	requireReason(t, err, reason)
	require.Equal(t, after, requireRefusal(t, err).RetryAfter)
}

func TestACallerThatCallsTooOftenIsRefusedAndNoOther(t *testing.T) {
	l, clock, registry := limiter(t, func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 2, 3 })
	scraped := func() scrapes.Scrape {
		return scrapes.Take(t, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), clock.Now())
	}
	for range 3 {
		begin(t, l, "a", false).End()
	}
	none := scraped()
	_, err := l.Begin("a", "/m", false)
	requireRefused(t, err, limits.ReasonRate, 500*time.Millisecond)
	begin(t, l, "b", false).End()
	clock.Step(500 * time.Millisecond)
	begin(t, l, "a", false).End()
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP capi_agent_calls_refused_total Calls and connections that were refused because the caller exceeded a limit, by reason and method.
# TYPE capi_agent_calls_refused_total counter
capi_agent_calls_refused_total{method="/m",reason="rate"} 1
`), "capi_agent_calls_refused_total"))
	for range 1000 { // in less than 15 minutes
		_, err := l.Begin("a", "/m", false)
		requireRefused(t, err, limits.ReasonRate, 500*time.Millisecond)
	}
	scrapes.Record(t, "CapiAgentCallsRefused", none, scraped())
}

func TestLightCallsCostLess(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 1, 2 })
	l.Light("/light")
	lightly := func() error {
		call, err := l.Begin("a", "/light", false)
		if err == nil {
			call.End()
		}
		return err
	}
	for range 59 {
		require.NoError(t, lightly())
		l.Frames("a", 4)
	}
	pause, _ := l.Pause("a")
	require.Zero(t, pause, "the frames of light calls are not counted")
	requireRefused(t, lightly(), limits.ReasonRate, time.Second)
}

func TestACallerThatGoesOnWhileItIsRefusedIsReadSlowly(t *testing.T) {
	l, clock, _ := limiter(t, func(o *limits.Options) { o.CallsAtOnce = 1 })
	begin(t, l, "a", false)
	for range 1000 {
		_, err := l.Begin("a", "/m", false)
		require.Error(t, err)
	}
	requirePause := func(identity string, wanted time.Duration, wantedOver bool) {
		pause, over := l.Pause(identity)
		require.Equal(t, wanted, pause)
		require.Equal(t, wantedOver, over)
	}
	requirePause("a", 0, false)
	l.Denied("a")
	requirePause("a", 10*time.Millisecond, false)
	requirePause("b", 0, false)
	for range 198 {
		l.Denied("a")
	}
	requirePause("a", time.Second, false) // no longer than a client waits
	for range 10000 {
		l.Denied("a")
	}
	requirePause("a", time.Second, true)
	clock.Step(time.Second)
	requirePause("a", time.Second, false)
	clock.Step(time.Second)
	requirePause("a", 0, false) // it is over soon
}

// What all callers have together may be the doing of others. A caller that goes on for long still
// exceeds its rate.
func TestACallerIsNotBlamedForWhatAllHaveTogether(t *testing.T) {
	for reason, open := range opening {
		t.Run(reason, func(t *testing.T) {
			l, _, _ := limiter(t, func(o *limits.Options) { o.AllCallsAtOnce, o.AllWatchesAtOnce, o.AllConnections = 1, 1, 1 })
			refused := 0
			for refused < 2000 {
				if _, err := open(l)("victim"); err != nil {
					requireReason(t, err, reason)
					refused++
				}
			}
			pause, _ := l.Pause("victim")
			require.Zero(t, pause)
		})
	}
	t.Run("then its rate", func(t *testing.T) {
		l, _, _ := limiter(t, func(o *limits.Options) { o.AllCallsAtOnce, o.CallBurst = 1, 2000 })
		for range 4000 {
			_, _ = l.Begin("a", "/m", false)
		}
		_, err := l.Begin("a", "/m", false)
		requireReason(t, err, limits.ReasonRate)
		pause, _ := l.Pause("a")
		require.Positive(t, pause)
	})
	const mebibyte = 1 << 20
	t.Run(limits.ReasonAllInFlight, func(t *testing.T) {
		l, _, _ := limiter(t, func(o *limits.Options) { o.CallBurst = 1e6 })
		for _, identity := range []string{"a", "b", "c", "victim"} {
			for range 4 {
				_ = begin(t, l, identity, false).Hold(4 * mebibyte)
			}
		}
		call := begin(t, l, "victim", false)
		for range 2000 {
			requireReason(t, call.Hold(mebibyte), limits.ReasonAllInFlight)
		}
		pause, _ := l.Pause("victim")
		require.Zero(t, pause)
	})
	t.Run(limits.ReasonAllUnread, func(t *testing.T) {
		l, _, _ := limiter(t, func(*limits.Options) {})
		list, stream := begin(t, l, "victim", false), begin(t, l, "victim", true)
		for _, identity := range []string{"a", "b", "c", "d"} {
			begin(t, l, identity, false).Send(limits.UnreadOfCaller)
		}
		stream.Send(mebibyte)
		for range 1000 {
			requireReason(t, stream.Next(), limits.ReasonAllUnread)
			_, err := l.Begin("victim", "/m", false)
			requireReason(t, err, limits.ReasonAllUnread)
		}
		requireReason(t, list.List(t.Context(), 0, false), limits.ReasonAllUnread)
		pause, _ := l.Pause("victim")
		require.Zero(t, pause)
	})
}

// How much others have open is theirs to know.
func TestARefusalReportsNoSumsOfOthers(t *testing.T) {
	for reason, open := range opening {
		t.Run(reason, func(t *testing.T) {
			l, _, _ := limiter(t, func(o *limits.Options) { o.AllCallsAtOnce, o.AllWatchesAtOnce, o.AllConnections = 64, 64, 64 })
			for i := range 8 {
				for range 16 {
					_, _ = open(l)("other-" + strconv.Itoa(i))
				}
			}
			var err error
			for err == nil {
				_, err = open(l)("own")
			}
			refused := requireRefusal(t, err)
			require.Regexp(t, `^all identities together have too many [a-z ]+; this identity has [48]$`, refused.Message)
			require.Regexp(t, `^[0-9]+ of 64$`, refused.Sums, "for the log")
		})
	}
}

func TestACallerThatSendsManyFramesIsReadSlowly(t *testing.T) {
	l, clock, _ := limiter(t, func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 10, 100 })
	requirePause := func(identity string, wanted time.Duration) {
		t.Helper()
		pause, over := l.Pause(identity)
		require.Equal(t, wanted, pause)
		require.False(t, over, "it costs nothing while it is not read")
	}
	for range 10 {
		l.Frames("a", 100) // ten for each call of the burst
	}
	requirePause("a", 0)
	l.Frames("a", 50)
	requirePause("a", 500*time.Millisecond)
	requirePause("b", 0)
	for range 100 {
		l.Frames("a", 1000)
	}
	requirePause("a", time.Second)
	clock.Step(9 * time.Second)
	requirePause("a", time.Second)
	clock.Step(time.Second)
	requirePause("a", 0)
}

// Otherwise the unread data of a sender that has ended, which can be megabytes for each connection,
// would be read at this pace for hours, and every connection of its identity with it.
func TestACallerThatHasBeenReadSlowlyForLongLosesItsConnections(t *testing.T) {
	for reason, exceed := range map[string]func(*limits.Limiter){
		"frames":   func(l *limits.Limiter) { l.Frames("a", 1) },
		"refusals": func(l *limits.Limiter) { l.Denied("a") },
	} {
		t.Run(reason, func(t *testing.T) {
			l, clock, _ := limiter(t, func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 10, 100 })
			// Both limits are 100 a second, and 1,000 at once.
			isOver := func(n int) bool {
				for range n {
					exceed(l)
				}
				pause, over := l.Pause("a")
				require.Positive(t, pause)
				return over
			}
			require.False(t, isOver(1050))
			for range 99 {
				clock.Step(100 * time.Millisecond)
				require.False(t, isOver(10))
			}
			clock.Step(100 * time.Millisecond)
			require.True(t, isOver(10))

			clock.Step(time.Second)
			pause, over := l.Pause("a")
			require.Zero(t, pause, "it keeps its limits")
			require.False(t, over)
			require.False(t, isOver(100), "it has ten seconds again")
		})
	}
}

func TestWhatACallerHasOpenIsBounded(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.CallsAtOnce, o.WatchesAtOnce = 1, 1 })
	call, watch := begin(t, l, "a", false), begin(t, l, "a", true)
	_, err := l.Begin("a", "/m", false)
	requireRefused(t, err, limits.ReasonCalls, time.Second)
	_, err = l.Begin("a", "/m", true)
	requireRefused(t, err, limits.ReasonWatches, 5*time.Second)
	begin(t, l, "b", false).End()
	call.End()
	watch.End()
	begin(t, l, "a", false).End()
	begin(t, l, "a", true).End()
}

// opening has a function for each reason that opens a call, stream or connection, and returns a
// function that ends it.
var opening = map[string]func(*limits.Limiter) func(identity string) (end func(), err error){
	limits.ReasonAllCalls:       func(l *limits.Limiter) func(string) (func(), error) { return beginning(l, false) },
	limits.ReasonAllWatches:     func(l *limits.Limiter) func(string) (func(), error) { return beginning(l, true) },
	limits.ReasonAllConnections: func(l *limits.Limiter) func(string) (func(), error) { return l.Connect },
}

func beginning(l *limits.Limiter, watch bool) func(identity string) (end func(), err error) {
	return func(identity string) (func(), error) {
		call, err := l.Begin(identity, "/m", watch)
		if err != nil {
			return nil, err
		}
		return call.End, nil
	}
}

// Several callers that take as much as they can leave enough to every other one, and the one with
// the most is refused first.
func TestWhatAllCallersHaveOpenIsBounded(t *testing.T) {
	after := map[string]time.Duration{
		limits.ReasonAllCalls: time.Second, limits.ReasonAllWatches: 5 * time.Second, limits.ReasonAllConnections: time.Second,
	}
	assured := map[string]int{limits.ReasonAllCalls: 8, limits.ReasonAllWatches: 8, limits.ReasonAllConnections: 4}
	for reason := range after {
		t.Run(reason, func(t *testing.T) {
			const all = 64
			l, _, registry := limiter(t, func(o *limits.Options) { o.AllCallsAtOnce, o.AllWatchesAtOnce, o.AllConnections = all, all, all })
			open := opening[reason](l)
			// most opens as many as possible, at most some, and returns functions that end them.
			most := func(identity string, atMost int) (ends []func()) {
				for range atMost {
					end, err := open(identity)
					if err != nil {
						requireRefused(t, err, reason, after[reason])
						break
					}
					ends = append(ends, end)
				}
				return ends
			}
			const perCaller = limits.ConnectionsOfCaller // of connections, no caller may have more
			modest := most("modest", 5)
			require.Len(t, modest, 5)
			greedy := map[string][]func(){}
			sum := 5
			for i := range 20 {
				identity := "greedy-" + strconv.Itoa(i)
				greedy[identity] = most(identity, perCaller)
				require.GreaterOrEqual(t, len(greedy[identity]), assured[reason])
				sum += len(greedy[identity])
			}
			require.LessOrEqual(t, sum, all+20*assured[reason])
			require.Len(t, greedy["greedy-0"], perCaller)
			require.Len(t, greedy["greedy-19"], assured[reason])
			require.Len(t, most("newcomer", perCaller), assured[reason], "a newcomer gets a few")
			count, err := testutil.GatherAndCount(registry, "capi_agent_calls_refused_total")
			require.NoError(t, err)
			require.Equal(t, 1, count, "for this reason")

			for _, ends := range greedy {
				for _, end := range ends {
					end()
				}
			}
			require.Len(t, most("late", perCaller), perCaller, "what has ended does not count")
		})
	}
}

func TestTheCallerWithTheMostIsRefusedFirst(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.AllCallsAtOnce = 100 })
	opened := map[string]int{}
	for range 200 {
		for _, identity := range []string{"a", "b", "c"} {
			if _, err := l.Begin(identity, "/m", false); err == nil {
				opened[identity]++
			}
		}
	}
	require.Equal(t, map[string]int{"a": 25, "b": 25, "c": 25}, opened, "as much is left as each of them has")
	for range 12 {
		begin(t, l, "d", false)
	}
	_, err := l.Begin("a", "/m", false)
	requireRefused(t, err, limits.ReasonAllCalls, time.Second)
	begin(t, l, "d", false)
}

// Each shim has a connection, and a second one while its certificate is replaced, up to three
// streams and some calls at once. All of them may come to one of two agents, and leave enough to a
// tool: it is the sums that do, because every shim may have as many in any case.
func TestFifteenHundredShimsAreNeverRefusedAndLeaveEnoughToATool(t *testing.T) {
	for reason, c := range map[string]struct{ ofShim, ofTool int }{
		limits.ReasonAllConnections: {2, limits.ConnectionsOfCaller}, limits.ReasonAllWatches: {3, 100}, limits.ReasonAllCalls: {2, 500},
	} {
		t.Run(reason, func(t *testing.T) {
			l, _, _ := limiter(t, func(*limits.Options) {})
			for i := range 1500 {
				for range c.ofShim {
					_, err := opening[reason](l)(strconv.Itoa(i))
					require.NoError(t, err, "shim %d", i)
				}
			}
			for n := range c.ofTool {
				_, err := opening[reason](l)("tool")
				require.NoError(t, err, "the tool has %d", n)
			}
		})
	}
}

// Alone, a caller gets half of what all may have together.
func TestACallerCanReachItsOwnLimits(t *testing.T) {
	for reason, c := range map[string]struct {
		most int
		own  string
	}{
		limits.ReasonAllConnections: {limits.ConnectionsOfCaller, limits.ReasonConnections},
		limits.ReasonAllWatches:     {limits.Defaults().WatchesAtOnce, limits.ReasonWatches},
		limits.ReasonAllCalls:       {limits.Defaults().CallsAtOnce, limits.ReasonCalls},
	} {
		t.Run(reason, func(t *testing.T) {
			l, _, _ := limiter(t, func(*limits.Options) {})
			for range c.most {
				_, err := opening[reason](l)("a")
				require.NoError(t, err)
			}
			_, err := opening[reason](l)("a")
			requireReason(t, err, c.own)
		})
	}
}

func TestUnreadAnswersOfAllCallersAreBounded(t *testing.T) {
	const mebibyte = 1 << 20
	l, _, _ := limiter(t, func(*limits.Options) {})
	var gone []func()
	unread := 0
	for i := range 16 {
		for range limits.UnreadOfCaller / mebibyte {
			call, err := l.Begin(strconv.Itoa(i), "/m", false)
			if err != nil {
				require.Contains(t, []string{limits.ReasonUnread, limits.ReasonAllUnread}, requireRefusal(t, err).Reason)
				break
			}
			gone = append(gone, call.Send(mebibyte))
			unread++
			call.End()
		}
	}
	require.LessOrEqual(t, unread, 128+16)
	stream := begin(t, l, "other", true)
	require.NoError(t, stream.Next(), "others are not concerned")
	stream.Send(mebibyte)
	requireRefused(t, stream.Next(), limits.ReasonAllUnread, time.Second)
	for _, gone := range gone {
		gone()
	}
	require.NoError(t, stream.Next())
}

// Several callers that hold as much as they can leave enough to every other one.
func TestBytesInFlightAreBoundedForOneCallerAndForAll(t *testing.T) {
	const mebibyte = 1 << 20
	l, _, _ := limiter(t, func(*limits.Options) {})
	calls := map[string][]*limits.Call{}
	// most holds as many mebibytes as possible, and returns their number.
	most := func(identity string) int {
		for {
			call := begin(t, l, identity, false)
			if err := call.Hold(mebibyte); err != nil {
				require.Contains(t, []string{limits.ReasonInFlight, limits.ReasonAllInFlight}, requireRefusal(t, err).Reason)
				call.End()
				return len(calls[identity])
			}
			calls[identity] = append(calls[identity], call)
		}
	}
	for _, identity := range []string{"a", "b", "c"} {
		require.Equal(t, 16, most(identity), "the limit of each")
	}
	require.Equal(t, 8, most("d"), "as many as are left")
	for _, identity := range []string{"e", "f", "g"} {
		largest := begin(t, l, identity, false)
		require.NoError(t, largest.Hold(4*mebibyte), "what others have costs none its largest request")
		requireRefused(t, begin(t, l, identity, false).Hold(4097), limits.ReasonAllInFlight, time.Second)
		require.NoError(t, begin(t, l, identity, false).Hold(4096), "nor its claims")
		largest.End()
		require.NoError(t, begin(t, l, identity, false).Hold(4*mebibyte), "what has ended does not count, and what is small neither")
	}
	for _, identity := range []string{"a", "b"} {
		for _, call := range calls[identity] {
			call.End()
		}
	}
	require.Greater(t, most("d"), 8)
}

// The request of a stream has been decoded long before the stream ends.
func TestRequestsOfStreamsDoNotCountWhileTheStreamsAreOpen(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	for _, identity := range []string{"a", "b", "c", "d"} {
		for range 64 {
			watch := begin(t, l, identity, true)
			require.NoError(t, watch.Hold(256<<10))
			watch.Free()
			require.NoError(t, watch.Hold(256<<10), "of the next one")
			watch.Free()
			watch.Free()
		}
		require.NoError(t, begin(t, l, identity, false).Hold(12<<20), "of the 16 MiB of each")
	}
	require.NoError(t, begin(t, l, "e", false).Hold(1<<20))
}

func TestAnswersCountUntilTheyAreGone(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	call, stream := begin(t, l, "a", false), begin(t, l, "a", true)
	gone := call.Send(limits.UnreadOfCaller)
	call.End()
	_, err := l.Begin("a", "/m", false)
	requireRefused(t, err, limits.ReasonUnread, time.Second)
	requireRefused(t, stream.Next(), limits.ReasonUnread, time.Second)
	begin(t, l, "b", false).End()
	gone()
	begin(t, l, "a", false).End()
	require.NoError(t, stream.Next())
}

// Lists that were admitted before may use up the limits of those that are admitted later.
func TestUnreadAnswersKeepListsFromBeingMadeForThoseThatLeaveThem(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	waiting := begin(t, l, "e", false)
	var gone []func()
	for _, identity := range []string{"a", "b", "c", "d"} {
		list := begin(t, l, identity, false)
		gone = append(gone, list.Send(limits.UnreadOfCaller))
		requireRefused(t, list.List(t.Context(), 0, false), limits.ReasonUnread, time.Second)
		list.End()
	}
	reader := begin(t, l, "e", false)
	require.NoError(t, reader.List(t.Context(), 0, false), "one that has read its answers may list")
	reader.End()
	gone = append(gone, waiting.Send(1<<20))
	requireRefused(t, waiting.List(t.Context(), 0, false), limits.ReasonAllUnread, time.Second)
	gone[0]()
	require.NoError(t, waiting.List(t.Context(), 0, false))
}

func TestListsOfOneCallerAreMadeTwoAtATime(t *testing.T) {
	synctest.Test(t, testListsOfOneCaller)
}

func testListsOfOneCaller(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	first, second, third := begin(t, l, "a", false), begin(t, l, "a", false), begin(t, l, "a", false)
	require.NoError(t, first.List(t.Context(), 0, false))
	require.NoError(t, second.List(t.Context(), 0, false))
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.ErrorIs(t, third.List(soon, 0, false), context.DeadlineExceeded, "three lists of one caller")
	require.NoError(t, begin(t, l, "b", false).List(t.Context(), 0, false))
	first.End()
	require.NoError(t, third.List(t.Context(), 0, false))
}

// A caller that closes its connections and reads nothing is limited by nothing else.
func TestACallerListsNoMoreObjectsThanItMay(t *testing.T) { synctest.Test(t, testObjectsOfACaller) }

func testObjectsOfACaller(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	const objects = 10_000
	listed := func(identity string) int {
		call := begin(t, l, identity, false)
		defer call.End()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := call.List(ctx, objects, false); err != nil {
			requireReason(t, err, limits.ReasonObjects)
			return 0
		}
		return objects
	}
	sum := 0
	for range 100 {
		sum += listed("a")
	}
	require.Equal(t, 60_000, sum, "nothing is given back when the call ends")
	require.Equal(t, objects, listed("b"), "another caller may list")

	brief, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	late := begin(t, l, "a", false)
	requireRefused(t, late.List(brief, objects, false), limits.ReasonObjects, 2500*time.Millisecond)
	late.End()
	began := time.Now()
	patient := begin(t, l, "a", false)
	require.NoError(t, patient.List(t.Context(), objects, false), "it waits")
	require.InDelta(t, 2.5, time.Since(began).Seconds(), 0.1)
	patient.End()
	began = time.Now()
	require.NoError(t, begin(t, l, "a", false).List(t.Context(), 99, true))
	require.NoError(t, begin(t, l, "a", true).Watch(t.Context(), 3000))
	require.Zero(t, time.Since(began), "what is small does not wait behind what is large")
	require.NoError(t, begin(t, l, "a", true).Watch(t.Context(), 128_000))
	require.InDelta(t, 1, time.Since(began).Seconds(), 0.1, "an object of a snapshot costs a fraction")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, begin(t, l, "a", false).List(ctx, objects, false), context.Canceled)
}

// The agent keeps 20,000 claims of a Cluster. The deadline is that of the shim's calls.
func TestTheShimOfTheLargestClusterListsWithoutWaiting(t *testing.T) {
	synctest.Test(t, testTheLargestCluster)
}

func testTheLargestCluster(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	const objects = 20_000 // claims, and as many Machines
	list := func() time.Duration {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		call := begin(t, l, "large", false)
		defer call.End()
		began := time.Now()
		require.NoError(t, call.List(ctx, objects, true))
		return time.Since(began)
	}
	for range 3 {
		require.NoError(t, begin(t, l, "large", true).Watch(t.Context(), objects)) // of a start
	}
	every := time.NewTicker(time.Minute)
	for minute := range 60 {
		require.Zero(t, list(), "the claims of a round")
		if minute%2 == 0 { // core's collection of garbage, at the same time, lists both
			require.LessOrEqual(t, list()+list(), 2*time.Second)
		}
		<-every.C
	}
	for range 60 { // machines are looked for
		require.LessOrEqual(t, list(), 5*time.Second)
		<-time.After(5 * time.Second)
	}
}

// Each occupies a CPU for as long as a second.
func TestLargeListsLeaveRoomForOthers(t *testing.T) { synctest.Test(t, testLargeLists) }

func testLargeLists(t *testing.T) {
	l, _, registry := limiter(t, func(*limits.Options) {})
	var held []*limits.Call
	for i := range max(1, runtime.GOMAXPROCS(0)/2) {
		held = append(held, begin(t, l, strconv.Itoa(i), false))
		require.NoError(t, held[i].List(t.Context(), 3000, true))
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.ErrorIs(t, begin(t, l, "late", false).List(soon, 3000, true), context.DeadlineExceeded)
	require.NoError(t, begin(t, l, "small", false).List(t.Context(), 2000, true), "others do not wait")
	require.NoError(t, begin(t, l, "0", false).List(t.Context(), 2000, true), "nor do small ones of the same caller")
	got := make(chan error, 1)
	waits := begin(t, l, "waits", false)
	go func() { got <- waits.List(t.Context(), 3000, true) }()
	synctest.Wait()
	awaitWaiting(t, registry, "large-list", 1)
	held[0].End()
	require.NoError(t, <-got)
}

// awaitWaiting waits until so many calls wait for a turn, and none for any other.
func awaitWaiting(t *testing.T, registry *prometheus.Registry, turn string, calls int) {
	t.Helper()
	var want strings.Builder
	want.WriteString(`
# HELP capi_agent_calls_waiting Calls that wait for a slot shared by all callers, by what they wait for ` +
		`(list: to build a list; large-list: to build one of more than 2,000 objects; sync: to handle a SyncClaims; ` +
		`large: to decode and handle a large SyncClaims; check: to validate a request of more than 4 KiB).
# TYPE capi_agent_calls_waiting gauge
`)
	for _, of := range []string{"check", "large", "large-list", "list", "sync"} {
		fmt.Fprintf(&want, "capi_agent_calls_waiting{turn=%q} %d\n", of, lo.Ternary(of == turn, calls, 0))
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.NoError(c, testutil.GatherAndCompare(registry, strings.NewReader(want.String()), "capi_agent_calls_waiting"))
	}, time.Minute, time.Millisecond)
}

func TestSyncsOfAllCallersAreHandledInTheOrderOfTheirArrival(t *testing.T) {
	l, _, registry := limiter(t, func(*limits.Options) {})
	handled := make([]*limits.Call, 16)
	for i := range handled {
		handled[i] = begin(t, l, strconv.Itoa(i), false)
		require.NoError(t, handled[i].Sync(t.Context(), 0, func() {}))
	}
	waiting := func(calls int) {
		t.Helper()
		awaitWaiting(t, registry, "sync", calls)
	}
	over, cancel := context.WithCancel(t.Context())
	late := make(chan error, 1)
	call := begin(t, l, "late", false)
	go func() { late <- call.Sync(over, 0, func() {}) }()
	waiting(1)
	cancel()
	require.ErrorIs(t, <-late, context.Canceled)
	waiting(0)
	turns := make(chan string, 2)
	for i, identity := range []string{"a", "b"} {
		call := begin(t, l, identity, false)
		go func() {
			_ = call.Sync(t.Context(), 0, func() {})
			turns <- identity
		}()
		waiting(i + 1)
	}
	handled[7].End()
	require.Equal(t, "a", <-turns)
	waiting(1)
	handled[3].End()
	require.Equal(t, "b", <-turns)
	waiting(0)
	require.NoError(t, begin(t, l, "c", false).List(t.Context(), 0, false), "lists do not wait for them")
}

func TestListsLeaveTheHubToTheirCallersOtherCalls(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.HubCallsAtOnce = 3 })
	for range 2 {
		require.NoError(t, begin(t, l, "a", false).List(t.Context(), 0, true))
	}
	brief, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, begin(t, l, "a", false).List(brief, 0, true), context.DeadlineExceeded, "of one caller, two lists are built at once")
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, begin(t, l, "a", false).AskHub(soon), "and a third one keeps no turn at the hub while it waits")

	for range 3 {
		require.NoError(t, begin(t, l, "b", false).AskHub(soon))
	}
	for range 2 {
		brief, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, begin(t, l, "b", false).List(brief, 0, true), context.DeadlineExceeded)
	}
	require.NoError(t, begin(t, l, "b", false).List(soon, 0, false), "a list from memory does not wait for those that wait for the hub")
}

// A caller that keeps itself waiting has no turn that others wait for.
func TestASyncThatWaitsForItsCallersOtherCallsKeepsNoOtherWaiting(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.HubCallsAtOnce = 1 })
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for i := range 16 {
		identity := strconv.Itoa(i)
		require.NoError(t, begin(t, l, identity, false).AskHub(t.Context()))
		require.ErrorIs(t, begin(t, l, identity, false).Sync(over, 0, func() {}), context.Canceled)
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, begin(t, l, "other", false).Sync(soon, 0, func() {}))
}

func TestTheOldestConnectionWithoutAnIdentityGivesWay(t *testing.T) {
	l, _, registry := limiter(t, func(*limits.Options) {})
	var dropped []int
	known := make([]func(), 0, 600)
	accept := func(source string) {
		i := len(known)
		known = append(known, l.Accept(source, func() { dropped = append(dropped, i) }))
	}
	for range 512 {
		accept("a")
	}
	require.Empty(t, dropped)
	known[0]()
	accept("a")
	require.Empty(t, dropped, "one has become known")
	accept("a")
	require.Equal(t, []int{1}, dropped)
	known[1]() // called when the connection has been closed
	accept("b")
	require.Equal(t, []int{1, 2}, dropped)
	for range 256 {
		accept("a")
	}
	require.Len(t, dropped, 258)
	require.NotContains(t, dropped, 514, "who has one connection keeps it, whatever others open")
	known[514]()
	accept("b")
	require.Len(t, dropped, 258)
	count, err := testutil.GatherAndCount(registry, "capi_agent_calls_refused_total")
	require.NoError(t, err)
	require.Equal(t, 1, count)
}

func TestOfManySourcesTheOldestGivesWay(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	var dropped []int
	for i := range 600 {
		l.Accept(strconv.Itoa(i), func() { dropped = append(dropped, i) })
	}
	require.Len(t, dropped, 600-512)
	require.Equal(t, 0, dropped[0])
	require.Equal(t, 87, dropped[87])
}

func TestALargeRequestCountsAsManyCalls(t *testing.T) {
	l, _, _ := limiter(t, func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 1, 10 })
	call := begin(t, l, "a", false)
	require.NoError(t, call.Hold(9*limits.BytesPerCall))
	call.End()
	_, err := l.Begin("a", "/m", false)
	requireRefused(t, err, limits.ReasonRate, time.Second)
}

// A caller may choose a deadline of minutes, and keep the hub from answering in time.
func TestASyncIsCutWhenItKeepsOthersWaitingForLong(t *testing.T) {
	for name, bytes := range map[string]int{"a large one": 1 << 20, "a small one": 1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, _, _ := limiter(t, func(*limits.Options) {})
				ctx, cut := context.WithCancel(t.Context())
				call := begin(t, l, "a", false)
				require.NoError(t, call.Sync(t.Context(), bytes, cut))
				start := time.Now()
				<-ctx.Done()
				require.Equal(t, l.CallTimeout, time.Since(start))
				call.End()

				handled, cut := context.WithCancel(t.Context())
				defer cut()
				call = begin(t, l, "b", false)
				require.NoError(t, call.Sync(t.Context(), bytes, cut))
				call.End()
				time.Sleep(2 * l.CallTimeout) //nolint:forbidigo // the time of the bubble
				require.NoError(t, handled.Err())
			})
		})
	}
}

func TestOneLargeRequestOfACallerIsHandledAtATime(t *testing.T) {
	synctest.Test(t, testLargeRequestsOfOneCaller)
}

func testLargeRequestsOfOneCaller(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	first, second, other := begin(t, l, "a", false), begin(t, l, "a", false), begin(t, l, "b", false)
	done, err := first.Read(t.Context(), true)
	require.NoError(t, err)
	done()
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = second.Read(soon, true)
	require.ErrorIs(t, err, context.DeadlineExceeded, "two large requests of one caller")
	_, err = other.Read(t.Context(), true)
	require.NoError(t, err)
	first.End()
	_, err = second.Read(t.Context(), true)
	require.NoError(t, err)
}

func TestRequestsOfOneCallerAreCheckedOneAtATime(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	first, second := begin(t, l, "a", false), begin(t, l, "a", false)
	done, err := first.Check(t.Context())
	require.NoError(t, err)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = second.Check(over)
	require.ErrorIs(t, err, context.Canceled)
	_, err = begin(t, l, "b", false).Check(t.Context())
	require.NoError(t, err)
	done()
	_, err = second.Check(t.Context())
	require.NoError(t, err)
}

// However many callers send requests that take long to validate, few are validated at a time. Small
// requests do not wait for them, not even those of the same caller.
func TestFewLargeRequestsAreCheckedAtATime(t *testing.T) {
	const small, large = 4 << 10, 4<<10 + 1
	l, _, registry := limiter(t, func(*limits.Options) {})
	hold := func(identity string, bytes int) *limits.Call {
		call := begin(t, l, identity, false)
		require.NoError(t, call.Hold(bytes))
		return call
	}
	waiting := func(calls int) {
		t.Helper()
		awaitWaiting(t, registry, "check", calls)
	}
	within, end := context.WithTimeout(t.Context(), 10*time.Second)
	defer end()
	done := func() {}
	for i := range max(1, runtime.GOMAXPROCS(0)/2) {
		var err error
		done, err = hold(strconv.Itoa(i), large).Check(within)
		require.NoError(t, err)
	}
	check := func(ctx context.Context, call *limits.Call) <-chan error {
		waited := make(chan error, 1)
		go func() {
			_, err := call.Check(ctx)
			waited <- err
		}()
		return waited
	}
	over, cancel := context.WithCancel(within)
	waited := check(over, hold("late", large))
	waiting(1)
	require.NoError(t, <-check(within, hold("late", small)), "the same caller's")
	require.NoError(t, <-check(within, hold("other", small)))
	cancel()
	require.ErrorIs(t, <-waited, context.Canceled)
	waiting(0)

	waited = check(within, hold("late", large))
	waiting(1)
	done()
	require.NoError(t, <-waited)
	waiting(0)
}

// The caller determines how long a request takes to arrive, and the hub how long it takes to be
// handled.
func TestRequestsThatArriveOrAreHandledKeepNoOtherCallerWaiting(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for i := range 40 {
		identity := strconv.Itoa(i)
		for read := range 8 {
			_, err := begin(t, l, identity, false).Read(ctx, read == 0)
			require.NoError(t, err, "request %d of %s", read, identity)
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := begin(t, l, "0", false).Read(over, false)
	require.ErrorIs(t, err, context.Canceled, "of one caller, eight are read at once")
}

func TestThreeLargeRequestsAreDecodedAtATime(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	var done func()
	for _, identity := range []string{"a", "b", "c"} {
		var err error
		done, err = begin(t, l, identity, false).Decode(t.Context())
		require.NoError(t, err)
	}
	fourth := begin(t, l, "d", false)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := fourth.Decode(over)
	require.ErrorIs(t, err, context.Canceled)
	done()
	_, err = fourth.Decode(t.Context())
	require.NoError(t, err)
}

func TestAFewLargeSyncsAreDecodedAndHandledAtATime(t *testing.T) {
	const mebibyte = 1 << 20
	l, _, registry := limiter(t, func(*limits.Options) {})
	over, cancel := context.WithCancel(t.Context())
	cancel()
	first, second := begin(t, l, "a", false), begin(t, l, "b", false)
	require.NoError(t, first.Sync(t.Context(), 4*mebibyte, func() {}))
	require.NoError(t, second.Sync(t.Context(), 4*mebibyte, func() {}))
	require.ErrorIs(t, begin(t, l, "c", false).Sync(over, 65<<10, func() {}), context.Canceled)
	_, err := begin(t, l, "d", false).Decode(t.Context())
	require.NoError(t, err, "what keeps little does not wait for them")

	// They are served in the order of their arrival, whatever their size, and keep no small one
	// waiting meanwhile.
	turns := make(chan string, 20)
	waiting := func(calls int) {
		t.Helper()
		awaitWaiting(t, registry, "large", calls)
	}
	for i := range 20 {
		call := begin(t, l, strconv.Itoa(i), false)
		go func() {
			if call.Sync(t.Context(), 4*mebibyte-i<<15, func() {}) == nil {
				turns <- strconv.Itoa(i)
			}
			call.End()
		}()
		waiting(i + 1)
	}
	require.NoError(t, begin(t, l, "small", false).Sync(t.Context(), 64<<10, func() {}))
	first.End()
	for i := range 20 {
		require.Equal(t, strconv.Itoa(i), <-turns)
	}
	waiting(0)
	second.End()
}

func TestLargeSyncsLeaveTurnsToSmallOnes(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	turns := func(bytes, expected int) {
		t.Helper()
		for i := range expected {
			require.NoError(t, begin(t, l, strconv.Itoa(i), false).Sync(soon, bytes, func() {}))
		}
		brief, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, begin(t, l, "late", false).Sync(brief, bytes, func() {}), context.DeadlineExceeded)
	}
	turns(64<<10+1, 12)
	turns(64<<10, 4)
}

// This is the most that a shim of 5,000 Nodes does: it claims all of them, releases half of them at
// once, and reports the rest.
func TestAShimOfFiveThousandNodesIsNeverRefused(t *testing.T) {
	l, _, _ := limiter(t, func(*limits.Options) {})
	open := make([]*limits.Call, 0, 1000)
	for range 15 {
		for range 500 {
			open = append(open, begin(t, l, "shim", false))
		}
		for _, call := range open {
			call.End()
		}
		open = open[:0]
	}
	sync := begin(t, l, "shim", false)
	require.NoError(t, sync.Hold(3<<20))
	sync.End()
}
