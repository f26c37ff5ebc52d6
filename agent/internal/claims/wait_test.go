package claims

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// An agent that starts knows when it did: until the holders have reported, it judges no claim that waits.
func TestAnAgentKnowsWhenItStarted(t *testing.T) {
	assert.False(t, New(Config{}).started.IsZero())
}

func TestWhenAClaimBeganToWaitIsNotedOnIt(t *testing.T) {
	clock := testclock.NewFakeClock(time.Now())
	e := engineWith(t, groupOf("small", 0, nil))
	e.Clock, e.spawn = clock, func(run func()) { run() }
	claim := movingClaim("a", "", "", func(c *v1alpha1.MachineClaim) { c.CreationTimestamp = metav1.NewTime(clock.Now()) })
	require.NoError(t, e.Client.Create(t.Context(), claim))
	e.group(namespace, "small").kick()
	c := &v1alpha1.MachineClaim{}
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), c))
	require.Empty(t, c.Status.Phase, "most claims have their Machine before")
	clock.Step(30 * time.Second)
	e.group(namespace, "small").kick()
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), c))
	require.NotNil(t, c.Status.WaitingSince)

	clock.SetTime(c.Status.WaitingSince.Add(time.Hour))
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.WaitAnew, Claim: c}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c))
	require.WithinDuration(t, clock.Now(), c.Status.WaitingSince.Time, time.Second, "when its wait begins anew")
}
