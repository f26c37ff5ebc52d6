package server_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestAReportThatComesTooSoonIsThrottled(t *testing.T) {
	f := start(t, func(_ *fixture, c *server.Config) {
		c.NodePools = &server.NodePools{
			Cache: newCache[*agentv1alpha1.PublishedObject](4),
			Report: func(context.Context, *clusterv1.Cluster, spokes.Report) error {
				return &spokes.TooSoonError{RetryAfter: time.Hour}
			},
		}
		c.NodePools.Cache.SetReady()
	})
	_, err := f.cluster().NodePools.ReportNodePools(f.ctx(), &agentv1alpha1.ReportNodePoolsRequest{Cluster: spokeRef})
	require.True(t, agenterrors.IsThrottled(err), "%v", err)
	delay, _ := agenterrors.RetryDelay(err)
	require.Equal(t, time.Hour, delay)
}
