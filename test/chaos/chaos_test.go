package chaos_test

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/test/chaos"
)

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// TestNothingIsLostWhenTheAgentDiesAnywhere is the short form of `make chaos`.
func TestNothingIsLostWhenTheAgentDiesAnywhere(t *testing.T) {
	// The sandbox must be stopped when the test is interrupted.
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	report, err := chaos.Run(ctx, chaos.Options{Name: "chaos-short", Short: true, Say: t.Logf})
	require.NoError(t, err)
	report.Write(t.Output())

	require.NoError(t, context.Cause(ctx))
	for _, row := range report.Rows {
		require.NoError(t, row.Err, row.Scenario)
		require.Empty(t, row.Violations, row.Scenario)
		require.Positive(t, row.Claims, row.Scenario)
	}
	sum := report.Total()
	require.Zero(t, sum.Leaked, "leaked")
	require.Zero(t, sum.Duplicated, "duplicated")
	require.Zero(t, sum.Innocent, "innocent")
	require.Zero(t, sum.Unsettled, "unsettled")
	require.Positive(t, report.Calls, "calls of which the history was checked")
	require.Greater(t, report.Streams.Streams, 10, "streams, as agents were killed")
	require.Positive(t, report.Streams.Lists, "lists that streams were compared with")
	require.Empty(t, report.Strange, "writes and answers that are not known")
	for _, point := range chaos.CorePoints() {
		require.Positive(t, report.Hits(point), "the agent was killed %s %q", point.When, point.Class)
	}
	require.True(t, report.Good())
}
