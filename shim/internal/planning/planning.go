// Package planning makes the plan of an adoption from an API server and an agent alone, without the
// controllers that carry it out.
package planning

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/adoption"
)

// Within bounds the making of a plan: there are two calls for each machine, one after the other,
// and there may be thousands of machines.
const Within = 15 * time.Minute

// Config is what a plan is made from. Every field is REQUIRED.
type Config struct {
	// Kube reads the workload cluster, and creates objects as dry runs only.
	Kube client.Client
	// Agent must act for the Cluster.
	Agent   *agentclient.Client
	Cluster *agentv1alpha1.ClusterRef
	// Timeout is the deadline of a call to the agent.
	Timeout time.Duration
	// UnavailableOfferingTTL is as in the shim's options.
	UnavailableOfferingTTL time.Duration
}

// Make returns what a shim with this configuration would do about existing machines. The globals of
// Karpenter core must be set up.
func Make(ctx context.Context, config Config) (*adoption.Plan, error) {
	nodeGroups := config.Agent.MirrorNodeGroups(config.Cluster)
	groups := catalogue.New(clock.RealClock{}, nodeGroups, config.Kube, config.UnavailableOfferingTTL)
	running, stop := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer stop()
	for _, run := range []func(context.Context) error{nodeGroups.Run, groups.Start} {
		work.Go(func() { _ = run(running) })
	}
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, config.Timeout+10*time.Second, true, func(context.Context) (bool, error) {
		return groups.Snapshot() != nil, nil
	})
	if err != nil {
		return nil, fmt.Errorf("receiving the node groups: %w", errors.Join(err, nodeGroups.State().LastError))
	}
	provider := cloudprovider.New(cloudprovider.Config{
		Cluster: config.Cluster, Kube: config.Kube, Client: config.Agent, Catalogue: groups, Timeout: config.Timeout, Clock: clock.RealClock{},
	})
	planner := &adoption.Planner{
		Kube: config.Kube, CloudProvider: provider, Provider: provider, Catalogue: groups, Agent: config.Agent, Cluster: config.Cluster,
		Clock: clock.RealClock{},
	}
	return planner.Plan(ctx)
}
