package nodepools

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// An agent is ready once its views are complete, and controller-runtime recovers a panic.
func TestAPanicOfOneNamespaceLeavesTheAgentReady(t *testing.T) {
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	objects := watchcache.New(watchcache.Options[*agentv1alpha1.PublishedObject]{Equal: Equal, Buffer: 1, Heartbeat: time.Minute})
	p, err := New(Config{Cache: objects, Scope: hub.NewScope(nil, nil)})
	require.NoError(t, err)
	set := func(namespace string) client.Object {
		return &v1alpha1.NodePoolSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "set"}}
	}
	p.client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(set("broken"), set("whole")).WithStatusSubresource(set("")).
		WithInterceptorFuncs(interceptor.Funcs{List: func(
			ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption,
		) error {
			var of client.ListOptions
			of.ApplyOptions(options)
			if _, isClusters := list.(*clusterv1.ClusterList); isClusters && of.Namespace == "broken" {
				panic("a bug")
			}
			return c.List(ctx, list, options...)
		}}).Build()
	require.NoError(t, p.expect(t.Context()))
	for _, namespace := range []string{"broken", "whole"} {
		func() {
			defer func() { require.Equal(t, namespace == "broken", recover() != nil) }()
			_, err := p.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: namespace}})
			require.NoError(t, err)
		}()
	}
	select {
	case <-objects.Ready():
	default:
		t.Fatal("the view is not complete")
	}
}
