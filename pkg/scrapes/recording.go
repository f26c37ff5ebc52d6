package scrapes

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
)

// Recording is what a test has recorded for an alert.
type Recording struct {
	// Test is the name of the test.
	Test   string
	Series []Series
}

// Kind is a kind of series.
type Kind string

// Kinds of series.
const (
	// Gauge is that of a value which is recorded as it is.
	Gauge Kind = "gauge"
	// Counter is that of a value which is recorded as its difference to the scrape without the
	// cause. The buckets of histograms are counters.
	Counter Kind = "counter"
)

// Series is a series in two scrapes.
type Series struct {
	Kind Kind
	// Name has the labels, in the notation of Prometheus.
	Name string
	// Without and With are the values in the scrapes without the cause of the alert and with it.
	Without, With Value
}

func (s Series) String() string { return fmt.Sprintf("%s %s %s %s", s.Kind, s.Name, s.Without, s.With) }

// Value is the value of a series in a scrape.
type Value struct {
	// Found is false if the scrape does not have the series.
	Found bool
	// FromNow is true for a time. Number is then its distance from the time of the scrape, in
	// seconds.
	FromNow bool
	Number  float64
}

func (v Value) String() string {
	switch {
	case !v.Found:
		return "_"
	case v.FromNow:
		return fmt.Sprintf("now%+.0f", v.Number)
	default:
		return fmt.Sprint(v.Number)
	}
}

// near reports whether the values of a series differ by no more than those of two runs of a test
// do: times by a minute, and sizes by what has been stored by then.
func (s Series) near(o Series) bool {
	share := 0.01
	if strings.Contains(s.Name, "_bytes") {
		share = 0.2
	}
	near := func(a, b Value) bool {
		tolerance := share * math.Abs(a.Number)
		if a.FromNow {
			tolerance += 60
		}
		return a.Found == b.Found && a.FromNow == b.FromNow && math.Abs(a.Number-b.Number) <= tolerance
	}
	return near(s.Without, o.Without) && near(s.With, o.With)
}

// names returns the series without their values.
func (r Recording) names() []string {
	names := make([]string, 0, len(r.Series))
	for _, s := range r.Series {
		names = append(names, string(s.Kind)+" "+s.Name)
	}
	return names
}

// by precedes the name of the test in the first line of a recording.
const by = "# Recorded by "

func (r Recording) text(alert string) string {
	var text strings.Builder
	fmt.Fprintf(&text, by+"%s: what %s reads, without its cause and with it. Counters begin at 0, and _ is no sample.\n", r.Test, alert)
	for _, s := range r.Series {
		fmt.Fprintln(&text, s)
	}
	return text.String()
}

// Read returns the recording in a file.
func Read(path string) (Recording, error) {
	content, err := os.ReadFile(path) //nolint:gosec // the caller's own file
	if err != nil {
		return Recording{}, err
	}
	var r Recording
	for line := range strings.SplitSeq(strings.TrimSuffix(string(content), "\n"), "\n") {
		if test, found := strings.CutPrefix(line, by); found {
			r.Test, _, _ = strings.Cut(test, ":")
			continue
		}
		s, err := parse(line)
		if err != nil {
			return Recording{}, fmt.Errorf("%s: %s: %w", path, line, err)
		}
		r.Series = append(r.Series, s)
	}
	return r, nil
}

// parse is the inverse of [Series.String]. A label's value may have spaces.
func parse(line string) (Series, error) {
	kind, rest, _ := strings.Cut(line, " ")
	s := Series{Kind: Kind(kind)}
	for _, v := range []*Value{&s.With, &s.Without} {
		i := strings.LastIndex(rest, " ")
		if i < 0 {
			return Series{}, errors.New("two values are missing")
		}
		text := rest[i+1:]
		rest = rest[:i]
		if text == "_" {
			continue
		}
		v.Found = true
		text, v.FromNow = strings.CutPrefix(text, "now")
		var err error
		if v.Number, err = strconv.ParseFloat(text, 64); err != nil {
			return Series{}, err
		}
	}
	s.Name = rest
	return s, nil
}
