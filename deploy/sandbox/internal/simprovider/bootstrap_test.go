package simprovider

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

func TestBootstrapDataWaitsForItsMachineAndForAPause(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, simv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	cluster := &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}, Spec: clusterv1.ClusterSpec{Paused: new(true)},
	}
	config := &simv1.SimBootstrapConfig{ObjectMeta: metav1.ObjectMeta{
		Namespace: "fleet", Name: "one", UID: "1", Labels: map[string]string{clusterv1.ClusterNameLabel: "spoke"},
	}}
	key := client.ObjectKeyFromObject(config)
	r := &bootstrapReconciler{hub: fake.NewClientBuilder().WithScheme(scheme).
		WithStatusSubresource(&simv1.SimBootstrapConfig{}).WithObjects(cluster, config).Build()}
	reconciled := func() bool {
		t.Helper()
		if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: key}); err != nil {
			t.Fatal(err)
		}
		err := r.hub.Get(t.Context(), key, &corev1.Secret{})
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		return !apierrors.IsNotFound(err)
	}
	update := func(o client.Object, change func()) {
		t.Helper()
		if err := r.hub.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			t.Fatal(err)
		}
		change()
		if err := r.hub.Update(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if reconciled() {
		t.Error("no Machine owns it")
	}
	update(config, func() {
		config.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: "one", UID: "2"}}
	})
	if reconciled() {
		t.Error("its Cluster is paused")
	}
	update(cluster, func() { cluster.Spec.Paused = nil })
	if requests := r.configsOf(t.Context(), cluster); len(requests) != 1 || requests[0].NamespacedName != key {
		t.Errorf("the Cluster's configurations are %v", requests)
	}
	if !reconciled() {
		t.Error("there is no bootstrap data")
	}
	if err := r.hub.Get(t.Context(), key, config); err != nil || config.Status.DataSecretName != "one" {
		t.Errorf("the status is %+v, %v", config.Status, err)
	}
}
