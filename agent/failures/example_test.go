package failures_test

import (
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/agent/failures"
)

func ExampleOf() {
	verdict := failures.Of("OpenStackMachine", "InstanceStateError", "No valid host was found. There are not enough hosts available.")
	fmt.Println(verdict.Class, "after", verdict.After)

	verdict = failures.Of("OpenStackMachine", "InstanceNotReady", "Instance status: BUILD")
	fmt.Println(verdict.Class)
	// Output:
	// Capacity after 0s
	// Transient
}
