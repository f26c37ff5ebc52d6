package claims

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// looks is a controller's queue that records which node groups are to be looked at, and after how
// long.
type looks struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]

	after map[string]time.Duration
}

func (l *looks) AddAfter(r reconcile.Request, after time.Duration) { l.after[r.Name] = after }

func recordLooks(t *testing.T, e *Engine) *looks {
	t.Helper()
	l := &looks{after: map[string]time.Duration{}}
	require.NoError(t, e.wakeIn(t.Context(), l))
	return l
}

// A run that a call starts is not the controller's. What it leaves for later would otherwise wait
// for the next event, if there is one.
func TestARunForACallIsContinuedByTheController(t *testing.T) {
	key := types.NamespacedName{Namespace: namespace, Name: "small"}
	deciding := func(requeueAfter time.Duration) *Engine {
		e := engineWith(t, groupOf("small", 0, nil))
		e.spawn = func(run func()) { run() }
		e.decide = func(*protocol.Snapshot) *protocol.Decision { return &protocol.Decision{RequeueAfter: requeueAfter} }
		return e
	}
	t.Run("when it asks for it", func(t *testing.T) {
		e := deciding(7 * time.Second)
		recorded := recordLooks(t, e)
		e.group(key.Namespace, key.Name).kick(t.Context())
		assert.Equal(t, map[string]time.Duration{"small": 7 * time.Second}, recorded.after)
	})
	t.Run("not when nothing is left", func(t *testing.T) {
		e := deciding(0)
		recorded := recordLooks(t, e)
		e.group(key.Namespace, key.Name).kick(t.Context())
		assert.Empty(t, recorded.after)
	})
	t.Run("when it failed", func(t *testing.T) {
		e := deciding(0)
		recorded := recordLooks(t, e)
		hub, ok := e.Client.(client.WithWatch)
		require.True(t, ok)
		e.Reader = interceptor.NewClient(hub, interceptor.Funcs{
			Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
				return errors.New("the API server does not answer")
			},
		})
		e.group(key.Namespace, key.Name).kick(t.Context())
		assert.Equal(t, map[string]time.Duration{"small": failedDelay}, recorded.after)
	})
	t.Run("at the earliest of all times", func(t *testing.T) {
		clock := clocktesting.NewFakeClock(newTestTime())
		queue := workqueue.NewTypedRateLimitingQueueWithConfig(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request](),
			workqueue.TypedRateLimitingQueueConfig[reconcile.Request]{Clock: clock})
		t.Cleanup(queue.ShutDown)
		for _, requeueAfter := range []time.Duration{time.Hour, 7 * time.Second, time.Minute} {
			e := deciding(requeueAfter)
			require.NoError(t, e.wakeIn(t.Context(), queue))
			e.group(key.Namespace, key.Name).kick(t.Context())
		}
		require.Eventually(t, func() bool {
			clock.SetTime(newTestTime().Add(7 * time.Second))
			return queue.Len() == 1
		}, 10*time.Second, time.Millisecond)
	})
	t.Run("or at once when the controller starts", func(t *testing.T) {
		e := deciding(7 * time.Second)
		e.group(key.Namespace, key.Name).kick(t.Context())
	})
}
