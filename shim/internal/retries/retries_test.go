package retries_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/awslabs/operatorpkg/reconciler"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/garbagecollection"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/retries"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// late returns how long after an outage of an hour the next try comes, at most.
func late(limiter workqueue.TypedRateLimiter[reconcile.Request]) (longest time.Duration) {
	for elapsed := time.Duration(0); elapsed < time.Hour; {
		wait := limiter.When(reconcile.Request{})
		elapsed += wait
		longest = max(longest, wait)
	}
	return longest
}

// This is why the package exists.
func TestCoreItselfTriesAgainLate(t *testing.T) {
	w := shimtest.New(t, nil)
	w.Disconnect()
	_, err := garbagecollection.NewController(w.Clock, w.Kube, w.CloudProvider).Reconcile(w.Context())
	require.Error(t, err, "it fails while the agent is away")
	assert.Greater(t, late(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]()), 10*time.Minute)
	assert.LessOrEqual(t, late(retries.Limiter()), 30*time.Second)
}

// failing is a controller of core that fails each time.
type failing struct {
	name string
	at   chan time.Time
}

func (f failing) Name() string                                  { return f.name }
func (failing) Register(context.Context, manager.Manager) error { return errors.New("it is wrapped") }

func (f failing) Reconcile(context.Context) (reconciler.Result, error) {
	select {
	case f.at <- time.Now():
	default:
	}
	return reconciler.Result{}, errors.New("the hub is away")
}

// controller-runtime's default begins with milliseconds.
func TestTheControllersUseTheLimiter(t *testing.T) {
	at := make(chan time.Time, 2)
	core, err := retries.Soon([]controller.Controller{
		failing{"disruption", at}, failing{"nodeclaim.garbagecollection", make(chan time.Time)},
	})
	require.NoError(t, err)
	m, err := manager.New(&rest.Config{Host: "127.0.0.1:1"}, manager.Options{
		Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: new(true)},
	})
	require.NoError(t, err)
	require.NoError(t, core[0].Register(t.Context(), m))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	first, second := <-at, <-at
	assert.GreaterOrEqual(t, second.Sub(first), 900*time.Millisecond)
	cancel()
	require.NoError(t, <-ended)
}

func TestTheControllersAreNamedIfCoreHasNone(t *testing.T) {
	w := shimtest.New(t, nil)
	collector := garbagecollection.NewController(w.Clock, w.Kube, w.CloudProvider)
	queue := disruption.NewQueue(w.Kube, w.Recorder, nil, w.Clock, nil)
	for want, core := range map[string][]controller.Controller{
		`core has no controller "disruption"`:                  {collector},
		`core has no controller "nodeclaim.garbagecollection"`: {&disruption.Controller{}, queue},
	} {
		_, err := retries.Soon(core)
		require.ErrorContains(t, err, want)
	}
	before := []controller.Controller{queue, &disruption.Controller{}, collector}
	after, err := retries.Soon(before)
	require.NoError(t, err)
	require.Len(t, after, 3)
	assert.Same(t, queue, after[0], "others are left alone")
	for i, name := range map[int]string{1: "disruption", 2: "nodeclaim.garbagecollection"} {
		named, is := after[i].(interface{ Name() string })
		require.True(t, is)
		assert.Equal(t, name, named.Name())
		assert.NotEqual(t, before[i], after[i])
	}
}
