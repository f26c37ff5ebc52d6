package abuse

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/samber/lo"
)

// Report is the result of all attacks.
type Report struct {
	Rows []*Row
	// Tenants is the number of Clusters that have attacked at once.
	Tenants int
	Took    time.Duration
	// Timed is set if times were judged. Rest then summarises the victim's calls of all phases of
	// rest.
	Timed bool
	Rest  Latencies
	// Logs is the folder of the components' logs.
	Logs string
}

// Good reports whether there are rows and all of them are good.
func (r *Report) Good() bool { return len(r.Rows) > 0 && lo.EveryBy(r.Rows, (*Row).Good) }

var header = []string{
	"create p50", "p99", "release p99", "new connection", "shim's round", "ratio", "tenants", "calls", "connections", "sent",
	"memory", "peak", "bound", "etcd at rest", "under attack", "bound", "",
}

func (l Latencies) cells() []string {
	return []string{millis(l.CreateP50), millis(l.CreateP99), millis(l.ReleaseP99), millis(l.ConnectMax), millis(l.RoundMax)}
}

func (r *Row) cells() []string {
	return append(r.Under.cells(), fmt.Sprintf("%.2f", r.Ratio),
		strconv.Itoa(r.Tenants), strconv.FormatInt(r.Calls, 10), strconv.FormatInt(r.Connections, 10), bytesOf(r.Bytes),
		bytesOf(r.MemoryBefore), bytesOf(r.MemoryPeak), bytesOf(r.MemoryBound), bytesOf(r.EtcdAtRest), bytesOf(r.Etcd), bytesOf(r.EtcdBound),
		lo.Ternary(r.Good(), "PASS", "FAIL"))
}

func (r *Row) String() string { return r.Attack + ": " + strings.Join(r.notes(), "; ") }

// notes are the results that have no column.
func (r *Row) notes() []string {
	answers := lo.Map(slices.Sorted(maps.Keys(r.Answers)), func(answer string, _ int) string { return fmt.Sprintf("%s %d", answer, r.Answers[answer]) })
	notes := []string{
		"answers: " + strings.Join(answers, ", "),
		fmt.Sprintf("attacked for %.0f s with %.1f s of a processor, served again after %s", r.Took.Seconds(), r.Processor.Seconds(), millis(r.Served)),
		fmt.Sprintf("at most %d ended claims of an attacker in the hub", r.Ended),
	}
	if r.Rest != (Latencies{}) {
		notes = append(notes, fmt.Sprintf("at rest around it: create p99 %s, release p99 %s", millis(r.Rest.CreateP99), millis(r.Rest.ReleaseP99)))
	}
	notes = append(notes, r.Wrong...)
	if r.Err != nil {
		notes = append(notes, r.Err.Error())
	}
	return notes
}

// Write prints the table and, as the last line, the verdict.
func (r *Report) Write(w io.Writer) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "\nattack\t%s\t\n", strings.Join(header, "\t"))
	if r.Timed {
		fmt.Fprintf(table, "(at rest)\t%s\t\n", strings.Join(r.Rest.cells(), "\t"))
	}
	for _, row := range r.Rows {
		fmt.Fprintf(table, "%s\t%s\t\n", row.Attack, strings.Join(row.cells(), "\t"))
	}
	_ = table.Flush()
	fmt.Fprintln(w)
	for _, row := range r.Rows {
		for _, note := range row.notes() {
			fmt.Fprintf(w, "%s: %s\n", row.Attack, note)
		}
	}
	if !r.Good() {
		fmt.Fprintf(w, "logs: %s\n", r.Logs)
	}
	worst := lo.Max(lo.Map(r.Rows, func(row *Row, _ int) float64 { return row.Ratio }))
	fmt.Fprintf(w, "abuse: %s tenants=%d attacks=%d failed=%d worst-ratio=%.2f peak-memory=%s seconds=%.0f\n",
		lo.Ternary(r.Good(), "PASS", "FAIL"), r.Tenants, len(r.Rows), lo.CountBy(r.Rows, func(row *Row) bool { return !row.Good() }), worst,
		bytesOf(lo.Max(lo.Map(r.Rows, func(row *Row, _ int) int64 { return row.MemoryPeak }))), r.Took.Seconds())
}

func bytesOf(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/mebibyte) }

func millis(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
