package nodegroupview

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// The goroutine that maps a channel's events is controller-runtime's, which recovers no panic
// there.
func TestAPanicCostsOneEventOfAChannelAlone(t *testing.T) {
	events := make(chan event.TypedGenericEvent[types.NamespacedName])
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Millisecond, time.Second))
	defer queue.ShutDown()
	require.NoError(t, each(events, func(ctx context.Context, name types.NamespacedName) []reconcile.Request {
		if name.Name == "broken" {
			panic("a bug")
		}
		return itself(ctx, name)
	}).Start(t.Context(), queue))
	for _, name := range []string{"broken", "whole"} {
		events <- event.TypedGenericEvent[types.NamespacedName]{Object: types.NamespacedName{Name: name}}
	}
	next, _ := queue.Get() // waits for it
	require.Equal(t, "whole", next.Name)
}
