package scenario_test

import (
	"context"
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// A scenario in which the first attempt to create a claim fails.
func ExampleScenario_Start() {
	parsed, err := scenario.Parse([]byte(`
clusters:
- name: fleet/spoke
nodeGroups:
- name: small
  capacity: {cpu: 4, memory: 16Gi}
calls:
- method: CreateClaim
  fail: {reason: HUB_UNREACHABLE, times: 1}
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	play, err := parsed.Start(scenario.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer play.Close()

	request := &agentv1alpha1.CreateClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}, ClaimId: "a-claim", Holder: "karpenter",
		Candidates: []string{"fleet/small"},
	}
	for range 2 {
		_, err := play.Agent.Client().Claims.CreateClaim(context.Background(), request)
		fmt.Println("created:", err == nil, "try later:", agenterrors.IsUnavailable(err))
	}
	// Output:
	// created: false try later: true
	// created: true try later: false
}

// A mistake is reported with its field.
func ExampleParse() {
	_, err := scenario.Parse([]byte("heartbeatInterval: soon\n"))
	fmt.Println(err)
	// Output: heartbeatInterval: "soon" is not a duration; write for example 90s or 1m30s
}
