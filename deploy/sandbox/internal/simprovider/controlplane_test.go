package simprovider

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

func TestAControlPlaneHasItsNewVersionWhenItsUpgradeEnds(t *testing.T) {
	b := newBench(t, simv1.SimMachineSpec{})
	plane := &simv1.SimControlPlane{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: "spoke", UID: "1"},
		}},
		Spec: simv1.SimControlPlaneSpec{Version: "v1.36.3", UpgradeDelay: metav1.Duration{Duration: time.Minute}},
	}
	hub := fake.NewClientBuilder().WithScheme(b.hub.Scheme()).WithStatusSubresource(plane).WithObjects(plane).Build()
	reconciled := func(version string, upgrading bool, again time.Duration) {
		t.Helper()
		// A provider that has just started, without any state in memory.
		result, err := (&controlPlaneReconciler{hub: hub, workloads: b, clock: b.clock}).
			Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(plane)})
		if err != nil {
			t.Fatal(err)
		}
		if err := hub.Get(t.Context(), client.ObjectKeyFromObject(plane), plane); err != nil {
			t.Fatal(err)
		}
		if plane.Status.Version != version || result.RequeueAfter != again ||
			meta.IsStatusConditionTrue(plane.Status.Conditions, clusterv1.RollingOutCondition) != upgrading {
			t.Fatalf("version %s, again after %s, conditions %v", plane.Status.Version, result.RequeueAfter, plane.Status.Conditions)
		}
	}
	reconciled("v1.36.3", false, 0)
	plane.Spec.Version = "v1.36.4"
	if err := hub.Update(t.Context(), plane); err != nil {
		t.Fatal(err)
	}
	b.clock.Step(time.Hour)
	reconciled("v1.36.3", true, time.Minute)
	b.clock.Step(20 * time.Second)
	reconciled("v1.36.3", true, 40*time.Second)
	b.clock.Step(40 * time.Second)
	reconciled("v1.36.4", false, 0)
}
