package coresuites

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestThePageHasEachSpecThatPassed(t *testing.T) {
	text := page("v1.2.3", time.Date(2026, 11, 30, 23, 0, 0, 0, time.UTC), []Spec{
		{Suite: "regression", Name: "Integration a|b <c>", Took: 1600 * time.Millisecond},
		{Suite: "disruption", Name: "Drift", Took: 30 * time.Second},
		{Suite: "regression", Name: "Chaos", Took: time.Minute},
	})
	require.Contains(t, text, "of Karpenter v1.2.3, run on 2026-11-30")
	require.Contains(t, text, "\n## disruption: 1 specs\n\n| spec | seconds |\n|---|---|\n| Drift | 30 |\n"+
		"\n## regression: 2 specs\n\n| spec | seconds |\n|---|---|\n| Chaos | 60 |\n| Integration a\\|b &lt;c&gt; | 2 |\n")
}
