package client_test

import (
	"context"
	"fmt"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func ExampleNew() {
	c, err := client.New(client.Options{
		Address: "localhost:1",
		TLS:     &client.TLS{CertFile: "/tls/tls.crt", KeyFile: "/tls/tls.key", CAFile: "/tls/ca.crt"},
		Timeout: 5 * time.Second,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close() //nolint:errcheck // Nothing is left to lose.

	// Nothing has been dialled yet; the first call does that. Here it finds no certificate and no
	// agent.
	_, err = c.Status.GetStatus(context.Background(), &agentv1alpha1.GetStatusRequest{})
	if agenterrors.IsUnavailable(err) {
		fmt.Println("try later")
	}
	// Output: try later
}

func ExampleClient_MirrorNodeGroups() {
	agent := fakeagent.New() // Stands for a real one; see ExampleNew.
	defer agent.Close()
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers"})
	c := agent.Client()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	mirror := c.MirrorNodeGroups(fakeagent.DefaultCluster())
	subscription := mirror.Subscribe()
	defer subscription.Close()
	ended := make(chan error, 1)
	go func() { ended <- mirror.Run(ctx) }()
	if err := mirror.WaitForSync(ctx); err != nil {
		fmt.Println(err)
		return
	}
	groups, _ := mirror.List()
	fmt.Println("groups:", len(groups))

	<-subscription.Changed()
	for _, id := range subscription.Take() {
		group, ok := mirror.Get(id)
		fmt.Println("changed:", id, ok, group.GetInstanceType())
	}
	cancel()
	fmt.Println("ended:", <-ended)
	// Output:
	// groups: 1
	// changed: default/workers true workers
	// ended: <nil>
}
