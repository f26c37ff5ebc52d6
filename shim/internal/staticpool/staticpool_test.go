package staticpool_test

import (
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

	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/staticpool"
)

func of(nodePool, name string) *karpv1.NodeClaim {
	return &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{karpv1.NodePoolLabelKey: nodePool}}}
}

func TestAStaticNodePoolWithoutRoomIsLeftAloneForAWhile(t *testing.T) {
	const ttl = 2 * time.Second
	kube := shimtest.FakeKube(interceptor.Funcs{})
	for name, replicas := range map[string]*int64{"static": new(int64(3)), "another": new(int64(3)), "dynamic": nil} {
		require.NoError(t, kube.Create(t.Context(), &karpv1.NodePool{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: karpv1.NodePoolSpec{Replicas: replicas},
		}))
	}
	recorder := &shimtest.Recorder{}
	gate := staticpool.New(kube, recorder, ttl)
	through := gate.Client(kube)
	require.NoError(t, through.Create(t.Context(), of("static", "first")))

	for _, refused := range []*karpv1.NodeClaim{of("static", "first"), of("dynamic", "one"), of("gone", "one"), of("", "standalone")} {
		gate.Refused(t.Context(), refused, errors.New("default/a is at its max size"))
	}
	err := through.Create(t.Context(), of("static", "second"))
	require.True(t, apierrors.IsTooManyRequests(err), err)
	require.ErrorContains(t, err, "default/a is at its max size")
	for _, other := range []*karpv1.NodeClaim{of("another", "c"), of("dynamic", "d"), of("gone", "e"), of("", "f")} {
		require.NoError(t, through.Create(t.Context(), other), "it is the static NodePool's alone")
	}
	require.NoError(t, through.Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{karpv1.NodePoolLabelKey: "static"}},
	}), "other kinds are made")
	assert.Equal(t, []string{"NoRoomForReplicas"}, recorder.Reasons())

	require.Eventually(t, func() bool { return through.Create(t.Context(), of("static", "second")) == nil }, 10*time.Second, 10*time.Millisecond,
		"it is tried again")
}
