package eligibility_test

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// A typo in a size: the group neither grows nor shrinks until it is corrected.
func ExampleOf() {
	group := eligibility.Of(&clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "fleet", Name: "small", Labels: map[string]string{v1alpha1.MemberLabel: ""},
			Annotations: map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "three"},
		},
		Spec: clusterv1.MachineDeploymentSpec{ClusterName: "spoke", Replicas: new(int32(2))},
	}, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}})

	fmt.Println("may grow:", group.MayGrow(), "may shrink:", group.MayShrink())
	fmt.Println("refusal:", group.Refusal().Reason)
	for _, problem := range group.Problems {
		fmt.Printf("%s\n%q %s\n", problem.Field, problem.Value, problem.Message)
	}
	// Output:
	// may grow: false may shrink: false
	// refusal: Invalid
	// metadata.annotations[cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size]
	// "three" is not a size; write a whole number of machines, 0 or more
}
