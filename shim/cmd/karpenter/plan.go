package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/adoption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/options"
)

// planAdoption is the subcommand that says what would be adopted, and changes nothing.
const planAdoption = "plan-adoption"

// planWithin bounds the whole of it.
const planWithin = 2 * time.Minute

// plan prints what this process would do about machines that were there before it, if it ran with these settings.
func plan(ctx context.Context, args []string, to io.Writer) error {
	output := ""
	ctx, err := parse(ctx, args, func(flags *flag.FlagSet) {
		flags.StringVar(&output, "o", "text", "How plan-adoption prints: text or json.")
	})
	if err != nil {
		return err
	}
	if output != "text" && output != "json" {
		return fmt.Errorf("-o: %q is neither text nor json", output)
	}
	klog.SetLogger(logr.Discard()) // what is printed is for people, or for a parser
	log.SetLogger(logr.Discard())
	ctx, cancel := context.WithTimeout(log.IntoContext(ctx, logr.Discard()), planWithin)
	defer cancel()

	opts := options.FromContext(ctx)
	setUpCore(opts)
	agent, err := agentclient.New(agentOptions(ctx, opts))
	if err != nil {
		return fmt.Errorf("making the agent's client: %w", err)
	}
	defer func() { _ = agent.Close() }()
	cluster := &agentv1alpha1.ClusterRef{Namespace: opts.ClusterNamespace, Name: opts.ClusterName}
	config, err := controllerruntime.GetConfig()
	if err != nil {
		return fmt.Errorf("finding the workload cluster: %w", err)
	}
	kube, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	if err != nil {
		return fmt.Errorf("making the workload cluster's client: %w", err)
	}

	nodeGroups := agent.MirrorNodeGroups(cluster)
	groups := catalogue.New(clock.RealClock{}, nodeGroups, kube, opts.UnavailableOfferingTTL)
	running, stop := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer stop()
	for _, run := range []func(context.Context) error{nodeGroups.Run, groups.Start} {
		work.Go(func() { _ = run(running) })
	}
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, opts.AgentTimeout+10*time.Second, true, func(context.Context) (bool, error) {
		return groups.Snapshot() != nil, nil
	})
	if err != nil {
		return fmt.Errorf("hearing of the node groups: %w", errors.Join(err, nodeGroups.State().LastError))
	}
	provider := cloudprovider.New(cloudprovider.Config{
		Cluster: cluster, Kube: kube, Client: agent, Catalogue: groups, Timeout: opts.AgentTimeout, Clock: clock.RealClock{},
	})
	planner := &adoption.Planner{
		Kube: kube, CloudProvider: provider, Provider: provider, Catalogue: groups, Agent: agent, Cluster: cluster, Clock: clock.RealClock{},
	}
	made, err := planner.Plan(ctx)
	if err != nil {
		return err
	}
	if output == "json" {
		encoder := json.NewEncoder(to)
		encoder.SetIndent("", "  ")
		return encoder.Encode(made)
	}
	return made.Write(to)
}
