package registration_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
)

type recorded []events.Event

func (r *recorded) Publish(published ...events.Event) { *r = append(*r, published...) }

func TestAMissingTaintIsNoEventOfEachNodeClaim(t *testing.T) {
	var all recorded
	recorder := registration.CoreRecorder(&all)
	other := events.Event{Reason: events.DisruptionBlocked}
	recorder.Publish(events.Event{Reason: events.UnregisteredTaintMissing}, other)
	recorder.Publish(events.Event{Reason: events.UnregisteredTaintMissing})
	require.Equal(t, recorded{other}, all)
}
