package abuse_test

import (
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/test/abuse"
)

func TestMain(m *testing.M) {
	abuse.Attacker()
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// TestNoAttackCostsAnotherTenantAnything is the short form of `make abuse`: a few seconds of each
// attack by two Clusters at once, without judging times.
func TestNoAttackCostsAnotherTenantAnything(t *testing.T) {
	// The sandbox must be stopped when the test is interrupted.
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	report, err := abuse.Run(ctx, abuse.Options{
		Name: "abuse-short", Tenants: 2, Rounds: 1, Claims: 4, Agents: 1, Untimed: true, Say: t.Logf, Log: t.Output(),
	})
	require.NoError(t, err)
	report.Write(t.Output())

	require.Len(t, report.Rows, len(abuse.Names()))
	for _, row := range report.Rows {
		require.NoError(t, row.Err, row.Attack)
		require.Empty(t, row.Wrong, row.Attack)
		require.Positive(t, row.Calls+row.Connections, row.Attack)
		require.Positive(t, row.MemoryPeak, row.Attack)
	}
	require.True(t, report.Good())
}
