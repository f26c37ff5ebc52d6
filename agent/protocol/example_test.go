package protocol_test

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// A node group without Machines gets its first claim: replicas and ledger change in one write.
func ExampleDecide() {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	decision := protocol.Decide(&protocol.Snapshot{
		Deployment: &clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "small"},
			Spec:       clusterv1.MachineDeploymentSpec{ClusterName: "spoke", Replicas: ptr.To[int32](0)},
		},
		Group: eligibility.Group{Replicas: 0},
		Claims: []*v1alpha1.MachineClaim{{
			ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.ObjectName("spoke", "7c9e"), CreationTimestamp: metav1.NewTime(now)},
			Spec:       v1alpha1.MachineClaimSpec{ClusterName: "spoke", ClaimID: "7c9e", NodeGroup: "small"},
			Status:     v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
		}},
		Sets:       []*clusterv1.MachineSet{{ObjectMeta: metav1.ObjectMeta{Name: "small-a"}, Spec: clusterv1.MachineSetSpec{Replicas: ptr.To[int32](0)}}},
		Now:        now,
		SpareGrace: time.Minute,
	})

	fmt.Println("replicas:", decision.Replicas)
	fmt.Println("floor:", decision.Ledger.Floor, "pending:", len(decision.Ledger.Pending))
	fmt.Println("a call waits for this write:", decision.Urgent)
	// Output:
	// replicas: 1
	// floor: 0 pending: 1
	// a call waits for this write: true
}
