package fakeagent_test

import (
	"context"
	"fmt"

	"k8s.io/utils/ptr"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The life of a claim. The test plays the infrastructure.
func Example() {
	ctx := context.Background()
	agent := fakeagent.New()
	defer agent.Close()
	cluster := fakeagent.DefaultCluster()
	workers := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers", Zone: "zone-a"})

	c := agent.ClientFor(cluster)
	created, err := c.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
		Cluster: cluster, ClaimId: "a-claim", Holder: "karpenter", Candidates: []string{workers},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("created:", created.GetClaim().GetPhase())

	machine := agent.Provision(cluster, "a-claim", "example://instance-1")
	agent.Join(cluster, machine.GetName(), "node-1")
	got, err := c.Claims.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: cluster, ClaimId: "a-claim"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("machine:", got.GetClaim().GetMachine().GetProviderId(), got.GetClaim().GetMachine().GetNodeName())

	released, err := c.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{Cluster: cluster, ClaimId: "a-claim", Drained: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("released:", released.GetClaim().GetPhase(), released.GetClaim().GetReason())
	fmt.Println("replicas:", agent.NodeGroup(workers).GetReplicas())
	// Output:
	// created: CLAIM_PHASE_PENDING
	// machine: example://instance-1 node-1
	// released: CLAIM_PHASE_ENDED Released
	// replicas: 0
}

// A node group without room, as a user writes it, and how a caller reads the error.
func ExampleAgent_AddMachineDeployment() {
	agent := fakeagent.New()
	defer agent.Close()
	full := agent.AddMachineDeployment(fakeagent.MachineDeployment{
		Name: "full",
		Annotations: map[string]string{
			"cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size": "1",
			"capacity.cluster-autoscaler.kubernetes.io/cpu":               "8",
		},
		Replicas: ptr.To[int32](1),
	})

	_, err := agent.Client().Claims.CreateClaim(context.Background(), &agentv1alpha1.CreateClaimRequest{
		Cluster: fakeagent.DefaultCluster(), ClaimId: "a-claim", Holder: "karpenter", Candidates: []string{full},
	})
	if agenterrors.IsNoRoom(err) {
		for _, rejection := range agenterrors.Rejections(err) {
			fmt.Println(rejection.NodeGroup, rejection.Unavailable, rejection.Message)
		}
	}
	// Output:
	// default/full UNAVAILABLE_REASON_AT_MAX_SIZE 1 of at most 1 machines
}

// A lost response: the claim was created, and repeating the call finds it.
func ExampleAgent_FailAfter() {
	agent := fakeagent.New()
	defer agent.Close()
	workers := agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers"})
	agent.FailAfter("CreateClaim", 1, agenterrors.HubUnreachable("the reply was lost"))

	request := &agentv1alpha1.CreateClaimRequest{
		Cluster: fakeagent.DefaultCluster(), ClaimId: "a-claim", Holder: "karpenter", Candidates: []string{workers},
	}
	_, err := agent.Client().Claims.CreateClaim(context.Background(), request)
	fmt.Println("unavailable:", agenterrors.IsUnavailable(err))
	_, err = agent.Client().Claims.CreateClaim(context.Background(), request)
	fmt.Println("again:", err)
	fmt.Println("replicas:", agent.NodeGroup(workers).GetReplicas())
	// Output:
	// unavailable: true
	// again: <nil>
	// replicas: 1
}
