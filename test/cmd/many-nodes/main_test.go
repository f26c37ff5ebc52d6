package main

import (
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	ctrl "sigs.k8s.io/controller-runtime"
)

// TestAFewNodesAreMeasured is the short form of `make many-nodes`.
func TestAFewNodesAreMeasured(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	const nodes, terminate = 6, 2
	costs, err := run(t.Context(), settings{
		nodes: nodes, terminate: terminate, step: 4, name: "many-nodes-short", rest: time.Second, within: 5 * time.Minute,
	})
	require.NoError(t, err)
	require.Len(t, costs, 3)
	come, leave := costs[0], costs[2]
	require.GreaterOrEqual(t, come.calls["CreateClaim"], float64(nodes))
	require.GreaterOrEqual(t, leave.calls["ReleaseClaim"], float64(terminate))
	for _, phase := range []cost{come, leave} {
		require.Positive(t, phase.agentReads)
		require.Positive(t, phase.agentWrites)
		require.Positive(t, phase.shimReads)
		require.Positive(t, phase.shimWrites)
	}
}
