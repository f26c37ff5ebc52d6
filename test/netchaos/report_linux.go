package netchaos

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/samber/lo"
)

// measurable is the shortest round-trip time for which the number of round trips of a call is
// reported.
const measurable = 50 * time.Millisecond

// mostRoundTrips limits the extra cost of a CreateClaim call compared to a good link. It applies
// only where the link is slow enough for this to exceed the noise of a busy machine.
const mostRoundTrips = 1.5

// Report is the result of all scenarios.
type Report struct {
	Rows []*Row
	// Compress is the divisor of the longest partition and of the product's periods.
	Compress int
	// Err is what kept scenarios from being run.
	Err error
	// Logs is the folder of the components' logs.
	Logs string
	Took time.Duration
}

// Good reports whether nothing is wrong.
func (r *Report) Good() bool {
	return r.Err == nil && len(r.Rows) > 0 && lo.EveryBy(r.Rows, func(row *Row) bool { return row.Err == nil })
}

// check compares the durations of calls with the link's round-trip time.
func (r *Report) check() {
	for _, row := range r.Rows {
		if row.RTT == 0 || row.Err != nil {
			continue
		}
		base, most := r.Rows[0], time.Duration(mostRoundTrips*float64(row.RTT))
		switch {
		case row.Call < row.RTT || row.Create < row.RTT:
			row.Err = fmt.Errorf("a call takes %s, or %s, and a round trip %s: the link is not what it should be", row.Call, row.Create, row.RTT)
		case row.RTT >= slow && row.Call > base.Call+most:
			row.Err = fmt.Errorf("a call takes %s, and %s on a good link: more than %.1f round trips of %s", row.Call, base.Call, mostRoundTrips, row.RTT)
		case row.RTT >= slow && row.Prompt == 0:
			row.Err = fmt.Errorf("each of the shim's %d Create calls took two round trips of %s or longer", row.Creates, row.RTT)
		}
	}
}

// roundTrips returns the number of the link's round trips that a call costs, compared to a good
// link, or a dash if the round-trip time is too short.
func (r *Row) roundTrips(base time.Duration) string {
	if r.RTT < measurable {
		return "–"
	}
	return fmt.Sprintf("%.2f", (r.Call-base).Seconds()/r.RTT.Seconds())
}

// String formats the row on one line.
func (r *Row) String() string {
	if r.Err != nil {
		return fmt.Sprintf("FAIL %v", r.Err)
	}
	return fmt.Sprintf("PASS after %.0f s: %d launches, median %s; Create %s; %s", r.Took.Seconds(), r.Launches.Count, millis(r.Launches.Median),
		millis(r.Create), lo.Ternary(r.Noticed > 0, "noticed after "+seconds(r.Noticed)+" s, back after "+seconds(r.Back)+" s", "the connection was kept"))
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.0f ms", float64(d)/float64(time.Millisecond))
}

func seconds(d time.Duration) string { return lo.Ternary(d == 0, "", fmt.Sprintf("%.1f", d.Seconds())) }

// Write writes the tables, the problems, and the verdict.
func (r *Report) Write(w io.Writer) error {
	tables := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(cells ...string) {
		for _, cell := range cells {
			_, _ = fmt.Fprintf(tables, "%s\t", cell)
		}
		_, _ = fmt.Fprintln(tables)
	}
	steady := func(row *Row, _ int) bool { return !row.Outage }
	line("no outage", "CreateClaim alone, median", "round trips", "launches", "median", "longest", "Create, mean", "in less than 2 RTT",
		"calls failed", "packets lost", "seconds")
	for _, row := range lo.Filter(r.Rows, steady) {
		line(row.Scenario, millis(row.Call), row.roundTrips(r.Rows[0].Call),
			strconv.Itoa(row.Launches.Count), millis(row.Launches.Median), millis(row.Launches.Max),
			millis(row.Create), lo.Ternary(row.Prompt < 0, "–", fmt.Sprintf("%d of %d", row.Prompt, row.Creates)),
			strconv.Itoa(row.Failed), strconv.Itoa(row.Lost), fmt.Sprintf("%.0f", row.Took.Seconds()))
	}
	_ = tables.Flush()
	_, _ = fmt.Fprintln(w)
	line("outage", "lasted s", "noticed after s", "not Ready after s", "back after s", "Ready after s", "calls failed", "packets lost", "seconds")
	for _, row := range lo.Reject(r.Rows, steady) {
		line(row.Scenario, cmp.Or(seconds(row.Lasted), "for good"), cmp.Or(seconds(row.Noticed), "–"), cmp.Or(seconds(row.NotReady), "–"),
			cmp.Or(seconds(row.Back), "–"), cmp.Or(seconds(row.Ready), "–"), strconv.Itoa(row.Failed), strconv.Itoa(row.Lost),
			fmt.Sprintf("%.0f", row.Took.Seconds()))
	}
	_ = tables.Flush()
	_, _ = fmt.Fprintf(w, "\nThe product's periods, and the longest partition, are divided by %d.\n", r.Compress)
	var wrong []error
	if r.Err != nil {
		wrong = append(wrong, r.Err)
	}
	for _, row := range r.Rows {
		if row.Err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", row.Scenario, row.Err))
		}
	}
	if len(wrong) > 0 {
		_, _ = fmt.Fprintf(w, "%v\nlogs: %s\n", errors.Join(wrong...), r.Logs)
	}
	_, err := fmt.Fprintf(w, "netchaos: %s scenarios=%d launches=%d wrong=%d seconds=%.0f\n", lo.Ternary(r.Good(), "PASS", "FAIL"), len(r.Rows),
		lo.SumBy(r.Rows, func(row *Row) int { return row.Launches.Count }), len(wrong), r.Took.Seconds())
	return err
}
