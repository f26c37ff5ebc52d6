package retries_test

import (
	"context"
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/manager"
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

func TestNodeClaimsThatWaitForTheHubAreTriedAgainWhenItIsBack(t *testing.T) {
	w := shimtest.New(t, nil)
	w.Create(w.NodeClaim("waits"))
	w.Create(w.NodeClaim("runs", func(c *karpv1.NodeClaim) { c.Status.ProviderID = "sim:///1" }))
	names := make(chan string, 10)
	core, err := retries.WhenBack([]controller.Controller{launching{names}}, w.Claims, w.Kube)
	require.NoError(t, err)
	m := w.Manager(&informertest.FakeInformers{Scheme: w.Kube.Scheme()})
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
	m := w.Manager(&informertest.FakeInformers{Scheme: w.Kube.Scheme()})
	require.NoError(t, core[0].Register(w.Context(), m), "fails unless the source is added")
	_, err = retries.WhenBack(nil, w.Claims, w.Kube)
	require.EqualError(t, err, `core has no controller "nodeclaim.lifecycle" of NodeClaims`)
	core, err = retries.WhenBack([]controller.Controller{unregistered{launching{}}}, w.Claims, w.Kube)
	require.NoError(t, err)
	require.ErrorContains(t, core[0].Register(t.Context(), m), "was not seen")
}

// unregistered adds nothing to the manager.
type unregistered struct{ launching }

func (unregistered) Register(context.Context, manager.Manager) error { return nil }
