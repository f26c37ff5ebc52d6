package hub

import (
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"
)

// Clock is the agent's clock, corrected by the API server's: the agent compares its own time with
// times that the API server wrote, such as creation timestamps, and with those that other agents
// wrote. It is corrected only by as much as is certain: responses have a Date of whole seconds, and
// take a while. Timers and tickers are those of the system. It is safe for concurrent use.
type Clock struct {
	clock.WithTicker

	log    logr.Logger
	mu     sync.Mutex
	offset time.Duration
}

// logFrom is the change of the offset that is logged.
const logFrom = 5 * time.Second

// NewClock returns a clock that is not corrected before the first response that passes through
// [Clock.Transport].
func NewClock(system clock.WithTicker, log logr.Logger) *Clock {
	return &Clock{WithTicker: system, log: log}
}

// Now returns the corrected time, without a monotonic clock reading. If the system's clock is set,
// the offset changes by as much in the other direction, and the corrected time goes on evenly. The
// monotonic reading does not change with the system's clock, so the new offset would distort it.
func (c *Clock) Now() time.Time { return c.WithTicker.Now().Round(0).Add(c.Offset()) }

// Since returns the time that has passed since the given corrected time.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Offset returns what is added to the system's time. It is positive while the system's clock is
// behind the API server's.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.offset
}

// Collector returns the metric of the offset.
func (c *Clock) Collector() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "capi_agent_clock_offset_seconds",
		Help: "How far the hub's API server's clock is ahead of the agent's. The agent adds it to its own time. " +
			"Zero if the clocks agree to within about a second, the precision of the measurement.",
	}, func() float64 { return c.Offset().Seconds() })
}

// Transport returns a transport that reads the time from each response.
func (c *Clock) Transport(next http.RoundTripper) http.RoundTripper { return timed{next, c} }

type timed struct {
	next  http.RoundTripper
	clock *Clock
}

// RoundTrip implements [http.RoundTripper].
func (t timed) RoundTrip(request *http.Request) (*http.Response, error) {
	sent := t.clock.WithTicker.Now()
	response, err := t.next.RoundTrip(request)
	if err != nil {
		return nil, err //nolint:wrapcheck // a transport returns the error of the one that it wraps
	}
	if date, err := http.ParseTime(response.Header.Get("Date")); err == nil {
		t.clock.see(sent, t.clock.WithTicker.Now(), date)
	}
	return response, nil
}

// see corrects the clock by a response. The server wrote its date, without fractions of a second,
// after the request was sent and before the response was received. The offset is moved only as far
// as that requires, so that it does not follow each response.
func (c *Clock) see(sent, received, date time.Time) {
	least, most := date.Sub(received), date.Add(time.Second).Sub(sent)
	c.mu.Lock()
	before := c.offset
	c.offset = max(least, min(before, most))
	change := c.offset - before
	c.mu.Unlock()
	if change >= logFrom || change <= -logFrom {
		c.log.Info("the clocks of this machine and of the hub's API server differ; the API server's is used",
			"offset", (before + change).Round(time.Second).String())
	}
}
