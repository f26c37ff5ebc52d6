package features_test

import (
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/pkg/features"
)

// What a caller asks of an agent's GetStatus before it relies on something.
func ExampleMissing() {
	listed := []string{features.AdoptMachines, features.Clusters}
	fmt.Println(features.Missing(listed, []string{features.Clusters, features.Certificates}))

	// An agent that lists nothing is older than the list.
	fmt.Println(features.Missing(nil, []string{features.ReturnMachines, features.Clusters}))
	// Output:
	// [certificates]
	// [clusters]
}
