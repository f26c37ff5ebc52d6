package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/metadata"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing/tracingtest"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// traced is an agent that is traced according to the process's environment, with a node group that
// accepts claims.
type traced struct {
	namespace string
	ref       *agentv1alpha1.ClusterRef
	client    *client.Client
}

func startTraced(t *testing.T) traced {
	t.Helper()
	traces, err := tracing.FromEnvironment(t.Context(), tracing.Config{Service: "capi-agent"})
	require.NoError(t, err)
	t.Cleanup(traces.Shutdown)
	namespace := plane.Namespace(t)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), capitest.NewInfrastructureTemplate(namespace, "group", nil),
		capitest.NewMachineDeployment(namespace, "group", "spoke", 0))
	running := start(t, agent.Config{Options: testOptions(namespace), TracerProvider: traces.Provider()})
	a := traced{
		namespace: namespace, ref: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}, client: running.client(namespace, "spoke"),
	}
	eventually(t, "the node group takes claims", func(ctx context.Context) (bool, error) {
		// Otherwise it would count against the limit of traced calls.
		ctx = from(ctx, callersTrace, notSampled)
		group, err := a.client.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: a.ref, Id: namespace + "/group"})
		return err == nil && group.GetNodeGroup().GetAvailability().GetAvailable(), nil
	})
	return a
}

func (a traced) claim(ctx context.Context, id string) error {
	_, err := a.client.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
		Cluster: a.ref, ClaimId: id, Holder: "karpenter", Candidates: []string{a.namespace + "/group"},
	})
	return err
}

// annotations returns the annotations of a claim's object.
func (a traced) annotations(t *testing.T, id string) map[string]string {
	t.Helper()
	claim := &v1alpha1.MachineClaim{}
	require.NoError(t, plane.Client.Get(t.Context(), ctrlclient.ObjectKey{Namespace: a.namespace, Name: v1alpha1.ObjectName("spoke", id)}, claim))
	return claim.Annotations
}

const (
	callersTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	callersSpan  = "00f067aa0ba902b7"
	sampled      = "01"
	notSampled   = "00"
)

// from returns the context of a caller with a span of its own.
func from(ctx context.Context, trace, flags string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "traceparent", "00-"+trace+"-"+callersSpan+"-"+flags, "tracestate", "vendor=secret")
}

const createClaim = "capi.agent.v1alpha1.ClaimService/CreateClaim"

func TestOneTraceFromTheCallToTheHubsWrites(t *testing.T) {
	collector := tracingtest.Start(t)
	collector.SetEnvironment(t)
	a := startTraced(t)

	ctx := metadata.AppendToOutgoingContext(from(t.Context(), callersTrace, sampled), client.RequestIDKey, "request-1")
	require.NoError(t, a.claim(ctx, "claim"))

	assert.Equal(t, map[string]string{
		v1alpha1.RequestIDAnnotation: "request-1", v1alpha1.TraceIDAnnotation: callersTrace,
	}, a.annotations(t, "claim"))

	// The response is sent before the claim is marked as admitted, and a span ends after its child
	// spans.
	eventually(t, "every span of the trace has arrived", func(context.Context) (bool, error) {
		spans := collector.Spans()
		ended := lo.SliceToMap(spans, func(s tracingtest.Span) (string, bool) { return s.ID, true })
		ended[callersSpan] = true
		return len(collector.Named(createClaim)) == 1 && len(collector.Named("PUT machineclaims")) > 0 &&
			lo.EveryBy(spans, func(s tracingtest.Span) bool { return ended[s.Parent] }), nil
	})
	call := collector.Named(createClaim)[0]
	assert.Equal(t, callersTrace, call.Trace)
	assert.Equal(t, callersSpan, call.Parent)
	assert.True(t, call.Server)
	assert.Empty(t, call.State, "a caller's tracestate is not taken over")
	assert.Equal(t, "request-1", call.Attributes["capi_agent.request_id"])
	assert.Equal(t, "claim", call.Attributes["capi_agent.claim"])
	assert.Equal(t, a.namespace+"/spoke", call.Attributes["capi_agent.cluster"])
	assert.Equal(t, "spiffe://karpenter-capi/cluster/"+a.namespace+"/spoke", call.Attributes["capi_agent.identity"])
	assert.Equal(t, "capi-agent", call.Resource["service.name"])
	var engine []string
	for _, span := range engineSpans(collector) {
		assert.Equal(t, callersTrace, span.Trace)
		assert.Equal(t, call.ID, span.Parent)
		assert.Equal(t, a.namespace+"/group", span.Attributes["capi_agent.node_group"])
		engine = append(engine, span.ID)
	}
	for name, parents := range map[string][]string{
		"POST machineclaims": {call.ID}, "PATCH machinedeployments": engine, "PUT machineclaims": engine,
	} {
		spans := collector.Named(name)
		require.NotEmpty(t, spans, name)
		for _, span := range spans {
			assert.Equal(t, callersTrace, span.Trace, name)
			assert.Contains(t, parents, span.Parent, name)
			assert.True(t, span.Client, name)
		}
	}

	for _, span := range collector.Spans() {
		assert.Equal(t, callersTrace, span.Trace, "%s: what the agent does for no call is not traced", span.Name)
	}
}

// engineSpans returns the spans of the claim engine.
func engineSpans(collector *tracingtest.Collector) []tracingtest.Span {
	return slices.DeleteFunc(collector.Spans(), func(s tracingtest.Span) bool { return !strings.HasPrefix(s.Name, "claims.") })
}

// Claims that gather during a write are admitted by one run, whose span is in the trace of one of
// the calls.
func TestEveryCallOfACrowdLeadsToWhatEnteredItsClaim(t *testing.T) {
	collector := tracingtest.Start(t)
	collector.SetEnvironment(t)
	a := startTraced(t)
	const crowd = 40
	trace := func(i int) string { return fmt.Sprintf("%032x", i+1) }

	var calls errgroup.Group
	for i := range crowd {
		calls.Go(func() error { return a.claim(from(t.Context(), trace(i), sampled), fmt.Sprint("claim-", i)) })
	}
	require.NoError(t, calls.Wait())

	eventually(t, "every call leads to the engine", func(context.Context) (bool, error) {
		served := map[string]bool{}
		for _, engine := range engineSpans(collector) {
			for _, call := range append(engine.Links, engine.Parent) {
				served[call] = true
			}
		}
		created := collector.Named(createClaim)
		return len(created) == crowd && lo.EveryBy(created, func(call tracingtest.Span) bool { return served[call.ID] }), nil
	})
	for i := range crowd {
		assert.Equal(t, trace(i), a.annotations(t, fmt.Sprint("claim-", i))[v1alpha1.TraceIDAnnotation])
	}
}

func TestACallThatIsNotSampledIsNotTraced(t *testing.T) {
	collector := tracingtest.Start(t)
	collector.SetEnvironment(t)
	a := startTraced(t)
	require.NoError(t, a.claim(from(t.Context(), callersTrace, notSampled), "claim"))
	assert.Equal(t, []string{v1alpha1.RequestIDAnnotation}, lo.Keys(a.annotations(t, "claim")), "an id without a trace would lead nowhere")

	const later = "00000000000000000000000000000001"
	require.NoError(t, a.claim(from(t.Context(), later, sampled), "later"))
	eventually(t, "the later call's trace has arrived", func(context.Context) (bool, error) {
		return len(collector.Named(createClaim)) > 0, nil
	})
	for _, span := range collector.Spans() {
		assert.NotEqual(t, callersTrace, span.Trace, span.Name)
	}
}

func TestWithoutTheVariablesNothingIsTraced(t *testing.T) {
	a := startTraced(t)
	require.NoError(t, a.claim(from(t.Context(), callersTrace, sampled), "claim"))
	assert.Equal(t, []string{v1alpha1.RequestIDAnnotation}, lo.Keys(a.annotations(t, "claim")))
}
