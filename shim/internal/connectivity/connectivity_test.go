package connectivity_test

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func connected(t *testing.T) float64 {
	t.Helper()
	families, err := crmetrics.Registry.Gather()
	assert.NoError(t, err)
	for _, family := range families {
		if family.GetName() == "karpenter_capi_agent_connected" {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return -1
}

func TestTheConnectionIsAMetric(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	mirrors := map[string]connectivity.Mirror{"nodegroups": w.NodeGroups}
	registry := prometheus.NewRegistry()
	require.NoError(t, connectivity.RegisterMirrors(registry, mirrors))
	observer := connectivity.New(mirrors)
	assert.False(t, observer.NeedLeaderElection())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- observer.Start(ctx) }()
	w.Eventually(func() bool { return connected(t) == 1 }, "connected")
	following := shimtest.Scraped(t, time.Now())
	w.Disconnect()
	w.Eventually(func() bool { return connected(t) == 0 }, "lost")
	scrapes.Record(t, "KarpenterCapiAgentUnreachable", following, shimtest.Scraped(t, time.Now()), scrapes.Only("stream", "nodegroups"))
	assert.Empty(t, observer.Reconnected())
	w.Reconnect()
	select {
	case <-observer.Reconnected():
	case <-time.After(10 * time.Second):
		t.Error("the event of a reconnected agent is missing")
	}
	problems, err := testutil.GatherAndLint(
		crmetrics.Registry,
		"karpenter_capi_agent_connected",
	)
	require.NoError(t, err)
	assert.Empty(t, problems)
	problems, err = testutil.GatherAndLint(registry)
	require.NoError(t, err)
	assert.Empty(t, problems)
	cancel()
	assert.NoError(t, <-done)
}
