package connectivity_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func TestAgentsAreJudged(t *testing.T) {
	const served = "capi.agent.v1alpha1"
	lacking := features.All()[1:] // without the first, which the shim needs
	for name, c := range map[string]struct {
		agent  *agentv1alpha1.GetStatusResponse
		shim   string
		reason string
		says   string
	}{
		"the same version": {&agentv1alpha1.GetStatusResponse{
			Version: "v0.3.0", ServedApiVersions: []string{served}, Features: features.All(),
		}, "v0.3.1", "", ""},
		"an agent that is a minor version older, and lists nothing": {
			&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "v0.2.0"}, "v0.3.0", "", "",
		},
		"an agent that is a minor version newer": {
			&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "v0.4.9"}, "v0.3.0", "", "",
		},
		"an agent that is two minor versions older": {
			&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "v0.2.0"}, "v0.4.0", connectivity.ReasonVersionSkew, "upgrade the agent",
		},
		"an agent that is two minor versions newer": {
			&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "v0.5.0"}, "v0.3.0", connectivity.ReasonVersionSkew, "upgrade the shim",
		},
		"an agent of the next major version": {
			&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "v1.0.0"}, "v0.9.0", connectivity.ReasonVersionSkew, "upgrade the shim",
		},
		"an agent that is no release": {&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "devel"}, "v7.0.0", "", ""},
		"a shim that is no release":   {&agentv1alpha1.GetStatusResponse{ApiVersion: served, Version: "v7.0.0"}, "devel", "", ""},
		"an agent that serves a newer API too": {&agentv1alpha1.GetStatusResponse{
			ApiVersion: "capi.agent.v1beta1", ServedApiVersions: []string{served, "capi.agent.v1beta1"},
		}, "devel", "", ""},
		"an agent that serves this API no more": {&agentv1alpha1.GetStatusResponse{
			ApiVersion: "capi.agent.v1beta1", ServedApiVersions: []string{"capi.agent.v1beta1"},
		}, "devel", connectivity.ReasonAPIVersionNotServed, "serves the API capi.agent.v1beta1"},
		"an agent that lacks a feature": {&agentv1alpha1.GetStatusResponse{
			ServedApiVersions: []string{served}, Features: lacking,
		}, "devel", connectivity.ReasonFeaturesMissing, features.AdoptMachines},
	} {
		t.Run(name, func(t *testing.T) {
			result := connectivity.CompatibilityOf(c.agent, c.shim)
			assert.True(t, result.Known)
			assert.Equal(t, c.reason == "", result.Compatible())
			assert.Equal(t, c.reason, result.Reason)
			assert.Contains(t, result.Message, c.says)
		})
	}
	assert.False(t, connectivity.Compatibility{}.Compatible(), "nothing is known")
}

// answers responds to GetStatus as the test says, and counts the calls.
type answers struct {
	mu     sync.Mutex
	status *agentv1alpha1.GetStatusResponse
	err    error
	calls  int
}

func (a *answers) GetStatus(context.Context, *agentv1alpha1.GetStatusRequest, ...grpc.CallOption) (*agentv1alpha1.GetStatusResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	return a.status, a.err
}

func (a *answers) set(status *agentv1alpha1.GetStatusResponse, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status, a.err = status, err
}

func (a *answers) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls
}

// line is a connection whose changes the test makes.
type line chan struct{}

func (line) State() agentclient.State                  { return agentclient.State{} }
func (l line) StateChanges() (<-chan struct{}, func()) { return l, func() {} }

func TestTheAgentIsCheckedAtTheStartAndAgain(t *testing.T) {
	clk, connection := clocktesting.NewFakeClock(time.Now()), make(line)
	agent := &answers{err: errors.New("no route")}
	check := connectivity.NewCompatibilityCheck(connectivity.CompatibilityConfig{
		Status: agent, Connection: connection, Version: "v0.4.0", Timeout: time.Second, Clock: clk,
	})
	assert.False(t, check.NeedLeaderElection())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- check.Start(ctx) }()
	waits := func(calls int) {
		t.Helper()
		require.Eventually(t, func() bool { return agent.count() == calls && clk.HasWaiters() }, 10*time.Second, time.Millisecond)
	}
	waits(1)
	assert.Equal(t, connectivity.Compatibility{}, check.Result(), "no agent has answered")

	agent.set(&agentv1alpha1.GetStatusResponse{ApiVersion: "capi.agent.v1alpha1", Version: "v0.2.0"}, nil)
	clk.Step(5 * time.Second)
	waits(2)
	<-check.Changes()
	assert.Equal(t, connectivity.ReasonVersionSkew, check.Result().Reason)
	assert.Zero(t, shimtest.Metric(t, "karpenter_capi_agent_compatible", nil))
	incompatible := shimtest.Scraped(t, clk.Now())

	agent.set(&agentv1alpha1.GetStatusResponse{ApiVersion: "capi.agent.v1alpha1", Version: "v0.3.0"}, nil)
	connection <- struct{}{}
	waits(3)
	<-check.Changes()
	assert.True(t, check.Result().Compatible())
	assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_agent_compatible", nil), 0)
	scrapes.Record(t, "KarpenterCapiAgentIncompatible", shimtest.Scraped(t, clk.Now()), incompatible)

	agent.set(nil, grpcstatus.Error(codes.Unavailable, "restarting"))
	connection <- struct{}{}
	waits(4)
	assert.True(t, check.Result().Compatible(), "an agent that does not answer changes nothing")

	agent.set(nil, grpcstatus.Error(codes.Unimplemented, "unknown service"))
	clk.Step(5 * time.Second)
	waits(5)
	<-check.Changes()
	assert.Equal(t, connectivity.ReasonAPIVersionNotServed, check.Result().Reason)
	cancel()
	assert.NoError(t, <-ended)
}

func TestTheShimFitsTheAgentOfThisVersionAndOneThatListsNothing(t *testing.T) {
	for name, options := range map[string][]fakeagent.Option{
		"of this version": nil, "that lists nothing": {fakeagent.WithFeatures(), fakeagent.WithAPIVersions()},
	} {
		t.Run(name, func(t *testing.T) {
			agent := fakeagent.New(options...)
			defer agent.Close()
			status, err := agent.Client().Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
			require.NoError(t, err)
			assert.Equal(t, connectivity.Compatibility{Known: true}, connectivity.CompatibilityOf(status, "v0.1.0"))
		})
	}
}
