package retries_test

import (
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/util/workqueue"
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
