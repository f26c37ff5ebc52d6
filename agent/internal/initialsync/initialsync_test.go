package initialsync_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/initialsync"
)

func TestCompleteOnceEveryExpectedObjectWasSeen(t *testing.T) {
	a, b, c := types.NamespacedName{Name: "a"}, types.NamespacedName{Name: "b"}, types.NamespacedName{Name: "c"}
	for name, play := range map[string]func(tracker *initialsync.Tracker, completed func() int, g Gomega){
		"seen first": func(tracker *initialsync.Tracker, completed func() int, g Gomega) {
			tracker.Seen(a)
			tracker.Seen(b)
			g.Expect(completed()).To(BeZero())
			tracker.Expect([]types.NamespacedName{a, b})
		},
		"expected first": func(tracker *initialsync.Tracker, completed func() int, g Gomega) {
			tracker.Expect([]types.NamespacedName{a, b})
			tracker.Seen(c)
			tracker.Seen(a)
			g.Expect(completed()).To(BeZero())
			tracker.Seen(b)
			tracker.Seen(b)
		},
		"nothing there": func(tracker *initialsync.Tracker, _ func() int, _ Gomega) { tracker.Expect(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			count := 0
			play(initialsync.New(func() { count++ }), func() int { return count }, g)
			g.Expect(count).To(Equal(1))
		})
	}
}
