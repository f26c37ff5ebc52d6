package server_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// loadOf returns the values of a metric by caller, as namespace/cluster and role.
func loadOf(t *testing.T, registry *prometheus.Registry, name string) map[string]int {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	values := map[string]int{}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			values[labels["namespace"]+"/"+labels["cluster"]+" "+labels["role"]] = int(metric.GetCounter().GetValue())
		}
	}
	return values
}

func TestMetricsTellWhichClusterMakesTheLoad(t *testing.T) {
	const admitted = 10
	var gone atomic.Bool
	f := start(t, func(_ *fixture, config *server.Config) {
		config.Onboarded = func(_ context.Context, name types.NamespacedName) (string, bool, error) {
			return "", name == spoke && !gone.Load(), nil
		}
		config.Limits = limits.Defaults()
		config.Limits.CallsPerSecond, config.Limits.CallBurst = 0.001, admitted
	})
	cluster := f.cluster()
	for range admitted {
		require.NoError(t, f.list(cluster))
	}
	_, err := cluster.NodeGroups.ListNodeGroups(f.ctx(), &agentv1alpha1.ListNodeGroupsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "other"},
	})
	require.Error(t, err)
	// A certificate may name a Cluster that does not exist.
	for n := range 5 {
		require.Error(t, f.list(f.as(fmt.Sprintf("spiffe://karpenter-capi/cluster/fleet/invented-%d", n))))
	}
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")))
	require.Error(t, f.list(f.as("spiffe://karpenter-capi/nobody")))

	calls, refused := loadOf(t, f.registry, "capi_agent_caller_calls_total"), loadOf(t, f.registry, "capi_agent_caller_refused_calls_total")
	require.Len(t, calls, 6, "%v: one known Cluster, and all others by role", calls)
	require.GreaterOrEqual(t, calls["fleet/spoke cluster"], admitted+1, "retries count as well")
	require.Equal(t, calls["fleet/spoke cluster"]-admitted, refused["fleet/spoke cluster"])
	require.GreaterOrEqual(t, calls["/ cluster"], 5)
	require.Equal(t, calls["/ cluster"], refused["/ cluster"])
	require.Equal(t, 1, calls["/ reader"])
	require.Zero(t, refused["/ reader"])
	require.Positive(t, calls["/ none"])
	require.Equal(t, calls["/ none"], refused["/ none"])
	require.Zero(t, calls["/ admin"]+calls["/ autoscaler"])

	gone.Store(true)
	require.NotContains(t, loadOf(t, f.registry, "capi_agent_caller_calls_total"), "fleet/spoke cluster", "a deleted Cluster leaves nothing behind")
}
