package timeline_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"

	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

func TestASightingIsTheFirstEventThatShowsIt(t *testing.T) {
	caches := &informertest.FakeInformers{}
	events, err := caches.FakeInformerFor(t.Context(), &corev1.Node{})
	require.NoError(t, err)
	cordoned, err := timeline.Sight(t.Context(), caches, &corev1.Node{}, func(n *corev1.Node, gone bool) bool { return !gone && n.Spec.Unschedulable })
	require.NoError(t, err)
	gone, err := timeline.Sight(t.Context(), caches, &corev1.Node{}, func(_ *corev1.Node, gone bool) bool { return gone })
	require.NoError(t, err)
	node := func(name string, unschedulable bool) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Unschedulable: unschedulable}}
	}

	events.Add(node("a", false))
	events.Add(node("b", true))
	_, seen := cordoned.Of("a")
	assert.False(t, seen, "it is not as described yet")
	first, seen := cordoned.Of("b")
	require.True(t, seen)

	events.Update(node("a", false), node("a", true))
	events.Update(node("b", true), node("b", true))
	again, _ := cordoned.Of("b")
	assert.Equal(t, first, again, "a later event changes nothing")
	last, seen := cordoned.Of("a")
	require.True(t, seen)
	assert.Equal(t, []time.Time{first, last}, cordoned.Times(), "in order")
	assert.Empty(t, gone.Times())

	events.Delete(node("a", true))
	_, seen = gone.Of("a")
	assert.True(t, seen)
}
