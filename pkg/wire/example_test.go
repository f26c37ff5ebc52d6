package wire_test

import (
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Usable quantities are returned even if others are not.
func ExampleResourceList() {
	capacity, err := wire.ResourceList(map[string]string{"cpu": "4", "memory": "16Gi", "pods": "many"})
	fmt.Println(capacity.Cpu(), capacity.Memory(), len(capacity))
	fmt.Println("usable as a whole:", err == nil)
	// Output:
	// 4 16Gi 2
	// usable as a whole: false
}

func ExampleTaint() {
	taint, err := wire.Taint(&agentv1alpha1.Taint{Key: "dedicated", Value: "gpu", Effect: "NoSchedule"})
	fmt.Println(taint.ToString(), err)
	// Output: dedicated=gpu:NoSchedule <nil>
}

func ExampleParseCapacityType() {
	capacityType, err := wire.ParseCapacityType("spot")
	fmt.Println(capacityType, err, wire.CapacityType(capacityType))
	// Output: CAPACITY_TYPE_SPOT <nil> spot
}
