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
	recorder := registration.CoreRecorder(&all)
	others := disruptionevents.Blocked(&corev1.Node{}, &karpv1.NodeClaim{}, "pdb prevents pod evictions")
	recorder.Publish(append(others, events.Event{Reason: events.UnregisteredTaintMissing})...)
	recorder.Publish(events.Event{Reason: events.UnregisteredTaintMissing})
	require.Equal(t, recorded(others), all)
}

// NodePools that are hidden from core for a while exist.
func TestNoNodeIsSaidToHaveNoNodePool(t *testing.T) {
	var all recorded
	registration.CoreRecorder(&all).Publish(disruptionevents.Blocked(&corev1.Node{}, &karpv1.NodeClaim{}, "NodePool not found (NodePool=general)")...)
	require.Empty(t, all)
}
