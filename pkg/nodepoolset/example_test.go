package nodepoolset_test

import (
	"encoding/json"
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func ExampleTemplate_Object() {
	policy := agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN
	written := nodepoolset.Template{Name: "default", Spec: json.RawMessage(`{"weight": 10, "limits": {"cpu": 1000}}`)}
	fmt.Println(written.Object("fleet", policy, nodepoolset.NodePool, "spec.nodePools[0]").GetSpecJson())

	written.Labels = map[string]string{"team": "the platform team"}
	invalid := written.Object("fleet", policy, nodepoolset.NodePool, "spec.nodePools[0]")
	fmt.Println(invalid.GetSpecJson() == "", invalid.GetProblem()[:31])
	// Output:
	// {"limits":{"cpu":1000},"weight":10}
	// true spec.nodePools[0].labels[team]:
}
