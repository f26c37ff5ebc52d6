package timeline

import (
	"slices"
	"time"
)

// Excess compares rounds of something with rounds of a baseline that alternate with them. excess is
// how much longer the median round takes than the baseline's. noise is how far the baseline's own
// rounds are apart: what else the machine does changes durations by as much. Both need at least one
// round.
func Excess(rounds, baseline []time.Duration) (excess, noise time.Duration) {
	return Median(rounds) - Median(baseline), slices.Max(baseline) - slices.Min(baseline)
}

// Median returns the median of the durations, or the lower of the two middle ones. It needs at
// least one.
func Median(d []time.Duration) time.Duration {
	return percentile(slices.Sorted(slices.Values(d)), 50)
}
