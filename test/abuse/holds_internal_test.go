package abuse

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The bounds of memory are computed from the limits that docs/limits.md states.
func TestBoundsFollowThePage(t *testing.T) {
	_ = os.Getenv("TESTED_REFERENCE") // declares the page as an input of the test cache
	text, err := os.ReadFile("../../docs/limits.md")
	require.NoError(t, err)
	page := strings.ReplaceAll(string(text), ",", "") // of numbers and sentences

	for what, s := range map[string]struct {
		share share
		own   string
		all   string
	}{
		"calls":       {openCalls, "unary calls open | %d |", "[%d](#what-all-identities-share) | `--limit-all-calls-at-once`"},
		"streams":     {openStreams, "streams open | %d |", "[%d](#what-all-identities-share) | `--limit-all-watches-at-once`"},
		"connections": {openConnections, "connections | %d |", "[%d](#what-all-identities-share) | `--limit-all-connections`"},
		"lists":       {builtLists, "being built | %d and", "being built | 2 and %d over all identities"},
	} {
		require.Contains(t, page, fmt.Sprintf(s.own, s.share.own), what)
		require.Contains(t, page, fmt.Sprintf(s.all, s.share.all), what)
	}
	require.Contains(t, page, fmt.Sprintf("fewer than %d connections %d calls %d streams 4 MiB of requests",
		openConnections.assured, openCalls.assured, openStreams.assured))
	require.Contains(t, page, fmt.Sprintf("requests being read | %d |", readAtOnce))

	const many = 1000
	for row, bytes := range map[string]struct{ own, all int64 }{
		"unread answers | %d MiB | %d MiB": {unreadHeld(1), unreadHeld(many) - many*mebibyte},
		"lists being built of up to 64 MiB each | 2: %d MiB | 8: %d MiB": {
			builtLists.each(largestList)(1), builtLists.each(largestList)(many),
		},
		"requests being read: one of up to 4 MiB the others of up to 256 KiB | 8: %d MiB | %d MiB for each": {
			readHeld(1), readHeld(many) / many,
		},
		"encoded requests that wait or are handled | %d MiB | %d MiB and those of up to 4 KiB": {
			encodedHeld(1), encodedHeld(many) - openCalls.of(many)*smallRequest - many*4*mebibyte,
		},
	} {
		require.Contains(t, page, fmt.Sprintf(row, bytes.own/mebibyte, bytes.all/mebibyte))
	}
}

func TestIdentitiesShareWhatIsLimitedForAll(t *testing.T) {
	s := share{own: 100, all: 250, assured: 2}
	for identities, most := range map[int64]int64{1: 100, 2: 200, 3: 256, 100: 450} {
		require.Equal(t, most, s.of(identities), identities)
	}
}

// The victim writes at rest, too.
func TestEtcdMayGrowAsAtRestAndByWhatTheAttackMayWrite(t *testing.T) {
	r := &run{Options: Options{Rounds: 2}}
	for writes, want := range map[bool]int64{false: 0, true: largestWrite * (2*hubBurst + 10*hubWrites)} {
		row := &Row{Tenants: 1, EtcdAtRest: 100 * mebibyte, Took: 10 * time.Second}
		r.limit(&attack{holds: func(int64) int64 { return 0 }, writes: writes}, row)
		require.Equal(t, 100*mebibyte+etcdSlack+want, row.EtcdBound)
	}
}
