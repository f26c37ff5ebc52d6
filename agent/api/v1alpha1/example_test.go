package v1alpha1_test

import (
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Every agent derives the same name, so that the creation of the object decides between them.
func ExampleObjectName() {
	fmt.Println(v1alpha1.ObjectName("spoke", "7c9e6679-7425-40de-944b-e07fc1f90ae7"))
	// Output: spoke.7c9e6679-7425-40de-944b-e07fc1f90ae7
}
