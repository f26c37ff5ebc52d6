package staticpool_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	static "sigs.k8s.io/karpenter/pkg/controllers/static/provisioning"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	"sigs.k8s.io/karpenter/pkg/state/virtualpods"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/staticpool"
)

func of(nodePool, name string) *karpv1.NodeClaim {
	return &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{karpv1.NodePoolLabelKey: nodePool}}}
}

// as returns a context as core's controller of that name passes it to the client.
func as(t *testing.T, controller interface{ Name() string }) context.Context {
	t.Helper()
	return injection.WithControllerName(t.Context(), controller.Name())
}

func TestAStaticNodePoolWithoutRoomIsLeftAloneForAWhile(t *testing.T) {
	kube := shimtest.FakeKube(interceptor.Funcs{})
	for name, replicas := range map[string]*int64{"static": new(int64(3)), "another": new(int64(3)), "dynamic": nil} {
		require.NoError(t, kube.Create(t.Context(), &karpv1.NodePool{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: karpv1.NodePoolSpec{Replicas: replicas},
		}))
	}
	recorder := &shimtest.Recorder{}
	gate := staticpool.New(kube, recorder, time.Hour)
	through := gate.Client(kube)
	ctx := as(t, &static.Controller{})
	require.NoError(t, through.Create(ctx, of("static", "first")))

	for _, refused := range []*karpv1.NodeClaim{of("static", "first"), of("dynamic", "one"), of("gone", "one"), of("", "standalone")} {
		gate.Refused(t.Context(), refused, errors.New("default/a is at its max size"))
	}
	err := through.Create(ctx, of("static", "second"))
	require.True(t, apierrors.IsTooManyRequests(err), err)
	require.ErrorContains(t, err, "default/a is at its max size")
	for _, other := range []*karpv1.NodeClaim{of("another", "c"), of("dynamic", "d"), of("gone", "e"), of("", "f")} {
		require.NoError(t, through.Create(ctx, other), "it is the static NodePool's alone")
	}
	require.NoError(t, through.Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{karpv1.NodePoolLabelKey: "static"}},
	}), "other kinds are made")
	assert.Equal(t, []string{"NoRoomForReplicas"}, recorder.Reasons())

	gate = staticpool.New(kube, recorder, time.Second)
	gate.Refused(t.Context(), of("static", "first"), errors.New("default/a is at its max size"))
	through = gate.Client(kube)
	require.Eventually(t, func() bool { return through.Create(ctx, of("static", "second")) == nil }, 30*time.Second, 10*time.Millisecond,
		"it is tried again")
}

// Core taints a Node before it creates the Node's replacement, and ends its pass of disruption,
// tainted Node included, if the replacement cannot be created.
func TestTheReplacementOfAStaticNodePoolsNodeIsCreatedWhileThereIsNoRoom(t *testing.T) {
	kube := shimtest.FakeKube(interceptor.Funcs{})
	require.NoError(t, kube.Create(t.Context(), &karpv1.NodePool{
		ObjectMeta: metav1.ObjectMeta{Name: "static"}, Spec: karpv1.NodePoolSpec{Replicas: new(int64(3))},
	}))
	gate := staticpool.New(kube, &shimtest.Recorder{}, time.Hour)
	gate.Refused(t.Context(), of("static", "first"), errors.New("default/a is at its max size"))
	through := gate.Client(kube)
	require.Error(t, through.Create(as(t, &static.Controller{}), of("static", "another replica")))
	require.NoError(t, through.Create(as(t, &disruption.Controller{}), of("static", "replacement")))
}

// Core taints a Node before it knows whether its replacement can be created.
func TestNoNodeOfAStaticNodePoolIsReplacedWhileThereIsNoRoom(t *testing.T) {
	kube := shimtest.FakeKube(interceptor.Funcs{})
	for name, replicas := range map[string]*int64{"full": new(int64(3)), "static": new(int64(3)), "dynamic": nil} {
		require.NoError(t, kube.Create(t.Context(), &karpv1.NodePool{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: karpv1.NodePoolSpec{Replicas: replicas},
		}))
	}
	gate := staticpool.New(kube, &shimtest.Recorder{}, time.Hour)
	gate.Refused(t.Context(), of("full", "first"), errors.New("default/a is at its max size"))
	seen := func(ctx context.Context) (names []string) {
		var nodePools karpv1.NodePoolList
		require.NoError(t, gate.Client(kube).List(ctx, &nodePools))
		for i := range nodePools.Items {
			names = append(names, nodePools.Items[i].Name)
		}
		return names
	}
	require.ElementsMatch(t, []string{"static", "dynamic"}, seen(as(t, &disruption.Controller{})))
	require.ElementsMatch(t, []string{"full", "static", "dynamic"}, seen(as(t, &static.Controller{})), "it is hidden from disruption alone")
}

func TestCoresControllerOfStaticNodePoolsIsTheOneThatWaits(t *testing.T) {
	w := shimtest.New(t, nil)
	pool := w.NodePool(func(np *karpv1.NodePool) { np.Spec.Replicas = new(int64(3)) })
	gate := staticpool.New(w.Kube, w.Recorder, time.Hour)
	kube := gate.Client(w.Kube)
	reconcile := func() error {
		cluster := state.NewCluster(w.Clock, w.Kube, w.CloudProvider)
		virtual := virtualpods.NewVirtualPodCache(w.Kube)
		_, err := static.NewController(kube, cluster, w.Recorder, w.CloudProvider, nil, w.Clock, nil, virtual).Reconcile(w.Context(), pool)
		return err
	}
	gate.Refused(w.Context(), of(pool.Name, "first"), errors.New("default/a is at its max size"))
	require.True(t, apierrors.IsTooManyRequests(reconcile()))
	nodeClaims := &karpv1.NodeClaimList{}
	require.NoError(t, w.Kube.List(t.Context(), nodeClaims))
	require.Empty(t, nodeClaims.Items)

	kube = w.Kube // it would create them
	require.NoError(t, reconcile())
	require.NoError(t, w.Kube.List(t.Context(), nodeClaims))
	require.Len(t, nodeClaims.Items, 3)
}
