package abuse

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A hub with more objects is slower with and without an attack.
func TestAnAttackIsComparedWithTheRestAroundIt(t *testing.T) {
	calls := func(each time.Duration) samples {
		all := slices.Repeat([]time.Duration{each}, 100)
		return samples{create: all, release: all}
	}
	var rows []*Row
	for i := range 6 {
		each := time.Duration(i+1) * 100 * time.Millisecond
		rows = append(rows, &Row{rest: calls(each), Under: latencies(calls(each * 3 / 2))})
	}
	rows[0].Under = latencies(calls(500 * time.Millisecond))
	report := Report{Rows: rows, Timed: true}
	report.judgeTimes()
	for i, row := range rows {
		assert.Equal(t, i != 0, row.Good(), "%d: %v", i, row.Wrong)
	}
	require.InDelta(t, 2.5, rows[0].Ratio, 0.01, "the next phase of rest had at most 200 ms")
	require.InDelta(t, 1.5, rows[5].Ratio, 0.01)
	require.Equal(t, 600*time.Millisecond, report.Rest.CreateP99)

	report = Report{Rows: []*Row{{Under: latencies(calls(time.Hour))}}}
	report.judgeTimes()
	require.True(t, report.Good(), "times are not judged")
}
