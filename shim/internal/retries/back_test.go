package retries_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/state/nodepoolhealth"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/retries"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// launching stands for core's controller, whose retries come late: this one has none.
type launching struct{ names chan string }

func (launching) Name() string { return "nodeclaim.lifecycle" }

func (l launching) Reconcile(_ context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	l.names <- nodeClaim.Name
	return reconcile.Result{}, nil
}

func (l launching) Register(_ context.Context, m manager.Manager) error {
	return builder.ControllerManagedBy(m).Named(l.Name()).For(&karpv1.NodeClaim{}).Complete(reconcile.AsReconciler(m.GetClient(), l))
}

// managed returns a manager whose client is the environment's, and whose cache tells of nothing.
func managed(t *testing.T, w *shimtest.Env) manager.Manager {
	t.Helper()
	m, err := manager.New(&rest.Config{Host: "127.0.0.1:1"}, manager.Options{
		Scheme:  w.Kube.Scheme(),
		Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: new(true)},
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return w.Kube.RESTMapper(), nil },
		NewCache: func(*rest.Config, cache.Options) (cache.Cache, error) {
			return &informertest.FakeInformers{Scheme: w.Kube.Scheme()}, nil
		},
		NewClient: func(*rest.Config, client.Options) (client.Client, error) { return w.Kube, nil },
	})
	require.NoError(t, err)
	return m
}

func TestNodeClaimsThatWaitForTheHubAreTriedAgainWhenItIsBack(t *testing.T) {
	w := shimtest.New(t, nil)
	w.Create(w.NodeClaim("waits"))
	w.Create(w.NodeClaim("runs", func(c *karpv1.NodeClaim) { c.Status.ProviderID = "sim:///1" }))
	names := make(chan string, 10)
	core, err := retries.WhenBack([]controller.Controller{launching{names}}, w.Claims, w.Kube)
	require.NoError(t, err)
	m := managed(t, w)
	require.NoError(t, core[0].Register(t.Context(), m))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	twice := func() {
		t.Helper()
		for range 2 { // at once, and when the node groups are known
			select {
			case name := <-names:
				require.Equal(t, "waits", name)
			case err := <-ended:
				t.Fatal("the manager ended", err)
			case <-time.After(20 * time.Second):
				t.Fatal("it is not tried again")
			}
		}
	}
	twice()
	w.Disconnect()
	w.Eventually(func() bool { return !w.Claims.State().Connected }, "the mirror is disconnected")
	require.Empty(t, names)
	w.Reconnect()
	twice()
	cancel()
	require.NoError(t, <-ended)
}

// core's own controller gets the source as well, and is missed if it is not there.
func TestCoresLifecycleIsWrappedOrMissed(t *testing.T) {
	w := shimtest.New(t, nil)
	cluster := state.NewCluster(w.Clock, w.Kube, w.CloudProvider)
	theirs := lifecycle.NewController(w.Clock, w.Kube, w.CloudProvider, w.Recorder, cluster, nodepoolhealth.NewState(), nil)
	core, err := retries.WhenBack([]controller.Controller{theirs}, w.Claims, w.Kube)
	require.NoError(t, err)
	require.NoError(t, core[0].Register(w.Context(), managed(t, w)), "fails unless the source is added")
	_, err = retries.WhenBack(nil, w.Claims, w.Kube)
	require.EqualError(t, err, `core has no controller "nodeclaim.lifecycle" of NodeClaims`)
	core, err = retries.WhenBack([]controller.Controller{unregistered{launching{}}}, w.Claims, w.Kube)
	require.NoError(t, err)
	require.ErrorContains(t, core[0].Register(t.Context(), managed(t, w)), "was not seen")
}

// unregistered adds nothing to the manager.
type unregistered struct{ launching }

func (unregistered) Register(context.Context, manager.Manager) error { return nil }
