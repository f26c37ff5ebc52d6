package nodepools

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// agent answers reports with an error.
type agent struct {
	agentv1alpha1.NodePoolServiceClient

	err   error
	calls int
}

func (a *agent) ReportNodePools(
	context.Context, *agentv1alpha1.ReportNodePoolsRequest, ...grpc.CallOption,
) (*agentv1alpha1.ReportNodePoolsResponse, error) {
	a.calls++
	return nil, a.err
}

// The agent accepts large reports seldom.
func TestAReportIsNotRepeatedBeforeTheAgentAcceptsIt(t *testing.T) {
	a := &agent{err: agenterrors.Throttled("the last change was reported a moment ago", 100*time.Second)}
	clk := clocktesting.NewFakePassiveClock(time.Now())
	c := New(Config{Agent: a, Clock: clk, Timeout: time.Minute})
	start := clk.Now()
	for second := range 100 {
		clk.SetTime(start.Add(time.Duration(second) * time.Second))
		c.report(t.Context(), &agentv1alpha1.ReportNodePoolsRequest{})
	}
	require.Equal(t, 1, a.calls)
	clk.SetTime(start.Add(100 * time.Second))
	a.err = nil
	c.report(t.Context(), &agentv1alpha1.ReportNodePoolsRequest{})
	require.Equal(t, 2, a.calls)
}
