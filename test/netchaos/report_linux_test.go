package netchaos

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

func TestACallCostsOneRoundTrip(t *testing.T) {
	for _, test := range []struct {
		shows             string
		rtt, call, create time.Duration
		prompt            int
		wrong             string
	}{
		{"one round trip", 250 * ms, 255 * ms, 300 * ms, 6, ""},
		{"no round trip is no far away agent", 250 * ms, 5 * ms, 300 * ms, 6, "the link is not what it should be"},
		{"nor is it one of the shim's", 250 * ms, 255 * ms, 50 * ms, 6, "the link is not what it should be"},
		{"two are too many", 250 * ms, 505 * ms, 550 * ms, 6, "more than 1.5 round trips"},
		{"two of the shim's are too many", 250 * ms, 255 * ms, 550 * ms, 0, "took two round trips"},
		{"a busy machine is no round trip", 250 * ms, 255 * ms, 950 * ms, 1, ""},
		{"a short round trip does not stand out", 50 * ms, 180 * ms, 950 * ms, 0, ""},
	} {
		t.Run(test.shows, func(t *testing.T) {
			report := &Report{Rows: []*Row{
				{Scenario: good.name, Call: 5 * ms, Create: 50 * ms},
				{Scenario: "far", RTT: test.rtt, Call: test.call, Create: test.create, Prompt: test.prompt},
			}}
			report.check()
			if test.wrong == "" {
				require.NoError(t, report.Rows[1].Err)
			} else {
				require.ErrorContains(t, report.Rows[1].Err, test.wrong)
			}
			require.Equal(t, test.wrong == "", report.Good())
		})
	}
}

func TestTheLastLineIsTheVerdict(t *testing.T) {
	last := func(r Report) string {
		var out bytes.Buffer
		require.NoError(t, r.Write(&out))
		return lo.LastOrEmpty(strings.Split(strings.TrimSpace(out.String()), "\n"))
	}
	require.Regexp(t, "^netchaos: FAIL", last(Report{}), "nothing was run")
	require.Regexp(t, "^netchaos: FAIL scenarios=1", last(Report{Rows: []*Row{{}}, Err: errors.New("interrupted")}))
	require.Regexp(t, "^netchaos: PASS scenarios=2", last(Report{Rows: []*Row{{}, {Outage: true}}}))
	require.Regexp(t, "^netchaos: FAIL scenarios=2 launches=0 wrong=1", last(Report{Rows: []*Row{{}, {Outage: true, Err: errors.New("it hangs")}}}))
}

func TestAnOutageIsTimed(t *testing.T) {
	began := time.Now()
	at := func(seconds int) time.Time { return began.Add(time.Duration(seconds) * time.Second) }
	changes := func(lost, back int) []change { return []change{{at(-60), true}, {at(lost), false}, {at(back), true}} }
	for _, test := range []struct {
		shows            string
		connected, ready []change
		over             int
		lasted           time.Duration
		want             Row
		wrong            bool
	}{
		{"what is not noticed is not timed", []change{{at(-60), true}}, []change{{at(-60), true}}, 1, time.Second, Row{}, false},
		{"what lasts longer has to be noticed", []change{{at(-60), true}}, []change{{at(-60), true}}, 45, noticedWithin, Row{}, true},
		{
			"noticed, and back after it is over", changes(20, 47), changes(25, 48), 45, 0,
			Row{Noticed: 20 * time.Second, NotReady: 25 * time.Second, Back: 2 * time.Second, Ready: 3 * time.Second},
			false,
		},
		{"noticed when it is over", changes(31, 33), []change{{at(-60), true}}, 30, 0, Row{Noticed: 31 * time.Second, Back: 3 * time.Second}, false},
		{"noticed too late", changes(50, 61), []change{{at(-60), true}}, 60, 0, Row{Noticed: 50 * time.Second}, true},
	} {
		t.Run(test.shows, func(t *testing.T) {
			r := &run{environment: &environment{watch: &watch{connected: test.connected, ready: test.ready}}, row: Row{Lasted: test.lasted}}
			lost, notReady := r.watch.lostAfter(began)
			err := r.note(began, at(test.over), lost, notReady)
			require.Equal(t, test.wrong, err != nil, "%v", err)
			r.row.Lasted = 0
			require.Equal(t, test.want, r.row)
		})
	}
}

func TestABoundStandsForLessThanTwoRoundTrips(t *testing.T) {
	bounds := map[time.Duration]int{10 * ms: 0, 50 * ms: 1, 100 * ms: 2, 250 * ms: 3, 500 * ms: 4}
	bound, ok := boundBetween(bounds, 250*ms, 500*ms)
	require.True(t, ok)
	require.Equal(t, 500*ms, bound)
	_, ok = boundBetween(bounds, ms, 2*ms)
	require.False(t, ok)
}
