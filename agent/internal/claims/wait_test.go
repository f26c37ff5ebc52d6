package claims

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// An agent records when it started: until the holders have reported, it fails no waiting claim.
func TestAnAgentKnowsWhenItStarted(t *testing.T) {
	assert.False(t, New(Config{}).started.IsZero())
}

func TestWhenAClaimBeganToWaitIsNotedOnIt(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil))
	e.spawn = func(run func()) { run() }
	c, err := e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"small"}})
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c))
	require.NotNil(t, c.Status.WaitingSince, "when it is entered")

	clock := testclock.NewFakeClock(c.Status.WaitingSince.Add(time.Hour))
	e.Clock = clock
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.WaitAnew, Claim: c}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c))
	require.WithinDuration(t, clock.Now(), c.Status.WaitingSince.Time, time.Second, "when its wait begins anew")
}
