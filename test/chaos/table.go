package chaos

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
	"github.com/karpenter-capi/karpenter-capi/test/faults"
)

// Report is the result of all scenarios.
type Report struct {
	Rows []*Row
	Took time.Duration
	// Logs is the folder of the components' logs. Its journal.log has a line for each write and
	// each fault.
	Logs string
	// Calls is the number of calls that the callers made, on Claims claims. All their answers form
	// one history; a row's Err reports where they contradict each other.
	Calls, Claims int
	// Streams summarises what watchers of all agents received.
	Streams streams.Figures
	// Strange lists writes of unknown class, answers that no agent may give, and events that
	// watchers must not receive.
	Strange []string

	points *faults.Points
	short  bool
	full   bool
}

// Hits returns how often an agent was killed at the fail point.
func (r *Report) Hits(p faults.Point) int { return r.points.Hits(p) }

// Missed returns the required fail points that were not hit.
func (r *Report) Missed() []faults.Point {
	if !r.full {
		return nil
	}
	return lo.Filter(r.Points(), func(p faults.Point, _ int) bool { return r.points.Hits(p) == 0 })
}

// Points returns the required fail points.
func (r *Report) Points() []faults.Point {
	if r.short {
		return CorePoints()
	}
	return faults.PointsOf(faults.Classes...)
}

// Good reports whether nothing is wrong.
func (r *Report) Good() bool {
	return lo.EveryBy(r.Rows, (*Row).Good) && len(r.Strange) == 0 && len(r.Missed()) == 0
}

// Total returns the sum of all rows.
func (r *Report) Total() *Row {
	sum := &Row{Scenario: "all", Took: r.Took}
	for _, row := range r.Rows {
		sum.Runs += row.Runs
		sum.Kills += row.Kills
		sum.Faults += row.Faults
		sum.Claims += row.Claims
		sum.Releases += row.Releases
		sum.Leaked += row.Leaked
		sum.Duplicated += row.Duplicated
		sum.Innocent += row.Innocent
		sum.Unsettled += row.Unsettled
	}
	return sum
}

func (r *Row) cells() []string {
	cells := []string{r.Scenario}
	for _, n := range []int{r.Runs, r.Kills, r.Faults, r.Claims, r.Releases, r.Leaked, r.Duplicated, r.Innocent, r.Unsettled} {
		cells = append(cells, strconv.Itoa(n))
	}
	return append(cells, fmt.Sprintf("%.0f", r.Took.Seconds()))
}

var header = []string{
	"scenario", "runs", "kills", "faults", "claims", "releases", "leaked", "duplicated", "innocent", "unsettled", "seconds",
}

func (r *Row) String() string {
	cells := lo.Map(r.cells()[1:], func(cell string, i int) string { return header[i+1] + "=" + cell })
	return strings.Join(append([]string{strings.Join(cells, " ")}, r.Notes...), "; ")
}

// Write prints the tables and, as the last line, the verdict.
func (r *Report) Write(w io.Writer) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	line := func(first string, cells []string) {
		_, _ = fmt.Fprintf(table, "%s\t", first)
		for _, c := range cells {
			_, _ = fmt.Fprintf(table, "%s\t", c)
		}
		_, _ = fmt.Fprintln(table)
	}
	_, _ = fmt.Fprintln(w)
	line(header[0], header[1:])
	for _, row := range append(r.Rows, r.Total()) {
		cells := row.cells()
		line(cells[0], cells[1:])
	}
	_ = table.Flush()
	for _, row := range r.Rows {
		for _, note := range row.Notes {
			_, _ = fmt.Fprintf(w, "%s: %s\n", row.Scenario, note)
		}
	}

	_, _ = fmt.Fprintln(w)
	line("fail point: the agent is killed at this write", []string{"writes", "before", "after", "late"})
	for _, class := range faults.Classes {
		cells := []string{strconv.Itoa(r.points.Seen(class))}
		for _, when := range []faults.When{faults.Before, faults.After, faults.Late} {
			cells = append(cells, strconv.Itoa(r.points.Hits(faults.Point{Class: class, When: when})))
		}
		line(string(class), cells)
	}
	_ = table.Flush()
	_, _ = fmt.Fprintln(w)

	_, _ = fmt.Fprintf(w, "history: %d calls on %d claims\n", r.Calls, r.Claims)
	_, _ = fmt.Fprintf(w, "watchers: %s\n", &r.Streams)
	for _, row := range r.Rows {
		if row.Err != nil {
			_, _ = fmt.Fprintf(w, "%s: %v\n", row.Scenario, row.Err)
		}
		for _, v := range row.Violations {
			_, _ = fmt.Fprintf(w, "%s: %s\n", row.Scenario, v)
		}
	}
	for _, s := range lo.Slice(lo.Uniq(r.Strange), 0, 20) {
		_, _ = fmt.Fprintln(w, s)
	}
	if missed := r.Missed(); len(missed) > 0 {
		_, _ = fmt.Fprintf(w, "fail points that were not hit: %s\n", pointsLeft(missed))
	}
	if !r.Good() {
		_, _ = fmt.Fprintf(w, "logs: %s\n", r.Logs)
	}
	sum := r.Total()
	points := r.Points()
	hit := lo.CountBy(points, func(p faults.Point) bool { return r.points.Hits(p) > 0 })
	_, _ = fmt.Fprintf(w, "chaos: %s claims=%d releases=%d kills=%d fail-points=%d/%d leaked=%d duplicated=%d innocent=%d unsettled=%d seconds=%.0f\n",
		lo.Ternary(r.Good(), "PASS", "FAIL"), sum.Claims, sum.Releases, sum.Kills, hit, len(points),
		sum.Leaked, sum.Duplicated, sum.Innocent, sum.Unsettled, r.Took.Seconds())
}
