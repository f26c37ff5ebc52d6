package claims

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// panicking returns an engine whose decision panics for the node group broken, and that runs groups
// in place.
func panicking(t *testing.T) (e *Engine, clock *clocktesting.FakeClock, decisions *int) {
	t.Helper()
	e = engineWith(t, groupOf("broken", 0, nil), groupOf("whole", 0, nil))
	clock, decisions = clocktesting.NewFakeClock(newTestTime()), new(int)
	e.Clock = clock
	e.spawn = func(run func()) { run() }
	e.decide = func(s *protocol.Snapshot) *protocol.Decision {
		if s.Deployment.Name == "broken" {
			*decisions++
			panic("a bug")
		}
		return protocol.Decide(s)
	}
	return e, clock, decisions
}

func asking(id string, candidates ...string) Request {
	return Request{Namespace: namespace, Cluster: clusterName, ID: id, Holder: "karpenter", Candidates: candidates}
}

func TestAPanicCostsOneNodeGroupAlone(t *testing.T) {
	e, _, _ := panicking(t)
	before, none := measured(t, "capi_agent_claim_panics_total", nil), scraped(t, e)
	_, err := e.Create(t.Context(), asking("a", "broken"))
	require.ErrorContains(t, err, "an internal error of the agent", "the call is answered, and not at its deadline")
	assert.Greater(t, measured(t, "capi_agent_claim_panics_total", nil), before)
	scrapes.Record(t, "CapiAgentStepPanicked", none, scraped(t, e))

	c, err := e.Create(t.Context(), asking("b", "whole"))
	require.NoError(t, err)
	assert.Equal(t, "whole", c.Spec.NodeGroup)
}

func TestAGroupThatPanickedIsLeftAloneLongerEachTime(t *testing.T) {
	e, clock, decisions := panicking(t)
	request := reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: "broken"}}
	for _, pause := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
		result, err := e.Reconcile(t.Context(), request)
		require.NoError(t, err)
		assert.Equal(t, pause, result.RequeueAfter)
		decided := *decisions
		clock.Step(pause - time.Millisecond)
		result, err = e.Reconcile(t.Context(), request)
		require.NoError(t, err)
		assert.Equal(t, time.Millisecond, result.RequeueAfter)
		_, err = e.group(namespace, "broken").run(t.Context())
		require.ErrorContains(t, err, "an internal error of the agent")
		assert.Equal(t, decided, *decisions, "it is not tried before")
		clock.Step(time.Millisecond)
	}
	// The cause of the panic has changed.
	e.decide = protocol.Decide
	_, err := e.Create(t.Context(), asking("a", "broken"))
	require.NoError(t, err)
	assert.Zero(t, e.group(namespace, "broken").panics)
}

func TestACandidateThatPanicsIsPassedOver(t *testing.T) {
	full := map[string]string{clusterv1.AutoscalerMaxSizeAnnotation: "1"}
	e, _, _ := panicking(t)
	must(t, e.Client.Delete(t.Context(), groupOf("broken", 0, nil)))
	must(t, e.Client.Create(t.Context(), groupOf("broken", 1, full)))
	c, err := e.Create(t.Context(), asking("a", "broken", "whole"))
	require.NoError(t, err)
	assert.Equal(t, "whole", c.Spec.NodeGroup)
	_, err = e.Create(t.Context(), asking("b", "broken"))
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "goroutine", "the stack is for the log")
}
