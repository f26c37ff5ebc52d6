package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/events"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

func TestAFailureIsAWarningOnTheClaimAndOnItsNodeGroup(t *testing.T) {
	e := engineWith(t, groupOf("workers", 0, nil))
	e.spawn = func(run func()) { run() } // no work in the background
	c, err := e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", DisplayName: "default-abc", Candidates: []string{"workers"},
	})
	require.NoError(t, err)
	key := Key{Namespace: namespace, Cluster: clusterName, ID: c.Spec.ClaimID}
	c, err = e.stored(t.Context(), key)
	require.NoError(t, err)
	c.Status.NodeGroupUID = "uid"
	recorder := events.NewFakeRecorder(10)
	e.Recorder = recorder
	why := v1alpha1.Event{Reason: protocol.ReasonFailed, Message: "there is no capacity"}
	require.NoError(t, e.takeBack(t.Context(), protocol.Action{Kind: protocol.Fail, Claim: c, Event: why}))
	assert.Equal(t, "Warning Failed there is no capacity", <-recorder.Events)
	assert.Equal(t, "Warning ClaimFailed claim a (default-abc) failed: there is no capacity", <-recorder.Events)

	c, err = e.stored(t.Context(), key)
	require.NoError(t, err)
	require.NoError(t, e.endClaim(t.Context(), c, v1alpha1.Event{Reason: protocol.ReasonReleased, Message: "its instance and its Node are gone"}))
	assert.Equal(t, "Normal Released its instance and its Node are gone", <-recorder.Events)
}
