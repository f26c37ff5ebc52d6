package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
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
	c, err = e.getUncached(t.Context(), key)
	require.NoError(t, err)
	c.Status.NodeGroupUID = "uid"
	recorder := events.NewFakeRecorder(10)
	e.Recorder = recordsCluster{recorder, t}
	why := v1alpha1.Event{Reason: protocol.ReasonFailed, Message: "there is no capacity"}
	require.NoError(t, e.takeBack(t.Context(), protocol.Action{Kind: protocol.Fail, Claim: c, Class: failures.Capacity, Event: why}))
	assert.Equal(t, "Warning Failed there is no capacity", <-recorder.Events)
	assert.Equal(t, "Warning ClaimFailed claim a (default-abc) failed: there is no capacity", <-recorder.Events)

	c, err = e.getUncached(t.Context(), key)
	require.NoError(t, err)
	assert.Equal(t, "Capacity", c.Status.FailureClass)
	require.NoError(t, e.endClaim(t.Context(), c, v1alpha1.Event{Reason: protocol.ReasonReleased, Message: "its instance and its Node are gone"}))
	assert.Equal(t, "Normal Released its instance and its Node are gone", <-recorder.Events)
}

// recordsCluster requires that the Cluster of every object is known: events are limited for each.
type recordsCluster struct {
	events.EventRecorder

	t *testing.T
}

func (r recordsCluster) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	switch object := regarding.(type) {
	case *clusterv1.MachineDeployment:
		assert.Equal(r.t, clusterName, object.Spec.ClusterName)
	case *v1alpha1.MachineClaim:
		assert.Equal(r.t, clusterName, object.Spec.ClusterName)
	default:
		assert.Fail(r.t, "another object", "%T", regarding)
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, note, args...)
}

// Only what failed has a class: a late Machine may still come, and a release is no failure.
func TestOnlyAClaimThatFailedHasAClass(t *testing.T) {
	release := func(o ReleaseOptions) func(*Engine, *v1alpha1.MachineClaim) error {
		return func(e *Engine, c *v1alpha1.MachineClaim) error {
			_, err := e.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: c.Spec.ClaimID}, o)
			return err
		}
	}
	for want, end := range map[string]func(*Engine, *v1alpha1.MachineClaim) error{
		"Reported": release(ReleaseOptions{Failed: true}),
		"Quota": func(e *Engine, c *v1alpha1.MachineClaim) error {
			return e.takeBack(t.Context(), protocol.Action{Kind: protocol.Fail, Claim: c, Class: failures.Quota})
		},
	} {
		e := quiet(engineWith(t, groupOf("a", 1, nil), heldClaim("c", newTestTime())))
		c, err := e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		require.NoError(t, end(e, c))
		c, err = e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		assert.NotNil(t, c.Status.FailedAt)
		assert.Equal(t, want, c.Status.FailureClass)
	}
	for name, end := range map[string]func(*Engine, *v1alpha1.MachineClaim) error{
		"released": release(ReleaseOptions{}),
		"late": func(e *Engine, c *v1alpha1.MachineClaim) error {
			return e.takeBack(t.Context(), protocol.Action{Kind: protocol.TimeOut, Claim: c, Class: failures.TimedOut})
		},
	} {
		e := quiet(engineWith(t, groupOf("a", 1, nil), heldClaim("c", newTestTime())))
		c, err := e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		require.NoError(t, end(e, c))
		c, err = e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		assert.Nil(t, c.Status.FailedAt, name)
		assert.Empty(t, c.Status.FailureClass, name)
	}
}
