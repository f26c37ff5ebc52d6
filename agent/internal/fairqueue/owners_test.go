package fairqueue_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
)

func TestOwners(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, clusterv1.AddToScheme(scheme))
	cache := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "small"}, Spec: clusterv1.MachineDeploymentSpec{ClusterName: "spoke"},
		},
		&clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "m"}, Spec: clusterv1.MachineSpec{ClusterName: "spoke"}},
	).Build()
	spoke, unknown := types.NamespacedName{Namespace: "fleet", Name: "spoke"}, types.NamespacedName{Namespace: "fleet"}
	require.Equal(t, spoke, fairqueue.OwnerOfDeployment(cache)(request("small")))
	require.Equal(t, unknown, fairqueue.OwnerOfDeployment(cache)(request("gone")))
	require.Equal(t, spoke, fairqueue.OwnerOfMachine(cache)(request("m")))
	require.Equal(t, unknown, fairqueue.OwnerOfMachine(cache)(request("gone")))
	require.Equal(t, spoke, fairqueue.OwnerOfClaim(request(v1alpha1.ObjectName("spoke", "a"))))
	require.Equal(t, types.NamespacedName{Namespace: "fleet", Name: "a.b"}, fairqueue.OwnerOfClaim(request(v1alpha1.ObjectName("a.b", "c"))))
	require.Equal(t, unknown, fairqueue.OwnerOfClaim(request("nonsense")))
	require.Equal(t, unknown, fairqueue.OwnerOfNamespace(reconcile.Request{NamespacedName: types.NamespacedName{Name: "fleet"}}))
}
