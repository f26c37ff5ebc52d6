package warmup_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/warmup"
)

func TestCompleteOnceEveryExpectedObjectWasSeen(t *testing.T) {
	a, b, c := types.NamespacedName{Name: "a"}, types.NamespacedName{Name: "b"}, types.NamespacedName{Name: "c"}
	for name, play := range map[string]func(tracker *warmup.Tracker, completed func() int, t require.TestingT){
		"seen first": func(tracker *warmup.Tracker, completed func() int, t require.TestingT) {
			tracker.Seen(a)
			tracker.Seen(b)
			require.Zero(t, completed())
			tracker.Expect([]types.NamespacedName{a, b})
		},
		"expected first": func(tracker *warmup.Tracker, completed func() int, t require.TestingT) {
			tracker.Expect([]types.NamespacedName{a, b})
			tracker.Seen(c)
			tracker.Seen(a)
			require.Zero(t, completed())
			tracker.Seen(b)
			tracker.Seen(b)
		},
		"nothing there": func(tracker *warmup.Tracker, _ func() int, _ require.TestingT) { tracker.Expect(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			count := 0
			play(warmup.New(func() { count++ }), func() int { return count }, t)
			require.Equal(t, 1, count)
		})
	}
}
