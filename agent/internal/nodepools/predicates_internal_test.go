package nodepools

import (
	"testing"

	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Hundreds of Spokes are written every few minutes, and each look at a namespace plans for all its
// Clusters.
func TestOnlyWhatBecameOfPublishedObjectsIsLookedAt(t *testing.T) {
	before := &v1alpha1.Spoke{}
	before.Status.Published = []v1alpha1.SpokePublished{{Name: "a"}}
	synced := before.DeepCopy()
	synced.Status.LastSyncTime = new(metav1.Now())
	assert.False(t, reportsAnew(event.UpdateEvent{ObjectOld: before, ObjectNew: synced}))
	changed := before.DeepCopy()
	changed.Status.Published[0].Message = "refused"
	assert.True(t, reportsAnew(event.UpdateEvent{ObjectOld: before, ObjectNew: changed}))
}
