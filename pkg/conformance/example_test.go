package conformance_test

import (
	"context"
	"fmt"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Checks an agent that runs already, with the rights of a reader only. Nothing is changed there.
func ExampleGiven() {
	agent := fakeagent.New(fakeagent.WithHeartbeatInterval(50 * time.Millisecond)) // Stands for a real one.
	defer agent.Close()
	workers := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers"})

	ctx := context.Background()
	given := conformance.Given{
		Of: fakeagent.DefaultCluster(), Caller: agent.Client(), NodeGroups: []string{workers}, Within: time.Minute,
	}
	target, err := given.Target(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	verdict := conformance.Check(ctx, conformance.Checks{
		NewEnv: target.NewEnv, Lacks: target.Lacks, Profiles: []conformance.Profile{conformance.ProfileReader},
	})
	fmt.Println("pass:", verdict.Pass(), "failed:", verdict.Count(conformance.Failed))
	// Output: pass: true failed: 0
}
