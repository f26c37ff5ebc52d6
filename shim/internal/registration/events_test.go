package registration_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	disruptionevents "sigs.k8s.io/karpenter/pkg/controllers/disruption/events"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
)

type recorded []events.Event

func (r *recorded) Publish(published ...events.Event) { *r = append(*r, published...) }

func TestAMissingTaintIsNoEventOfEachNodeClaim(t *testing.T) {
	var all recorded
	recorder := registration.CoreRecorder(&all, nil)
	others := disruptionevents.Blocked(&corev1.Node{}, &karpv1.NodeClaim{}, "pdb prevents pod evictions")
	recorder.Publish(append(others, events.Event{Reason: events.UnregisteredTaintMissing})...)
	recorder.Publish(events.Event{Reason: events.UnregisteredTaintMissing})
	require.Equal(t, recorded(others), all)
}

// NodePools that are hidden from core for a while exist.
func TestNoNodeIsSaidToHaveNoNodePoolIfThatExists(t *testing.T) {
	var all recorded
	recorder := registration.CoreRecorder(&all, func(nodePool string) bool { return nodePool == "general" })
	publish := func(nodePool string) []events.Event {
		about := disruptionevents.Blocked(&corev1.Node{}, &karpv1.NodeClaim{}, "NodePool not found (NodePool="+nodePool+")")
		recorder.Publish(about...)
		return about
	}
	publish("general")
	require.Empty(t, all)
	require.Equal(t, recorded(publish("gone")), all)
}
