package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/identity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/options"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/planning"
)

// planAdoption is the subcommand that reports what would be adopted. It changes nothing but the
// identity secret: if Karpenter has not run before, it requests the first client certificate, which
// Karpenter then continues to use.
const planAdoption = "plan-adoption"

// obtainWithin bounds the wait for the client certificate.
const obtainWithin = time.Minute

// planUsage describes the command, with its own options only: it takes all of Karpenter's, too.
func planUsage(to io.Writer, addOwn func(*flag.FlagSet)) {
	fmt.Fprintf(to, `Show which existing machines Karpenter would adopt with the current NodePools and NodeClasses, and what prevents
it from adopting the others. Options of karpenter apply, by flags and environment variables.

Usage:
  karpenter %s [flags]

Flags:
`, planAdoption)
	own := flag.NewFlagSet(planAdoption, flag.ContinueOnError)
	own.SetOutput(to)
	addOwn(own)
	own.PrintDefaults()
}

// plan prints what this process would do about existing machines if it ran with these settings.
func plan(ctx context.Context, args []string, to io.Writer) error {
	output := ""
	ctx, err := parse(ctx, args, func(flags *flag.FlagSet) {
		own := func(flags *flag.FlagSet) {
			flags.StringVar(&output, "o", "text", "Format of the output: text or json.")
		}
		own(flags)
		flags.Usage = func() { planUsage(flags.Output(), own) }
	})
	if err != nil {
		return err
	}
	if output != "text" && output != "json" {
		return fmt.Errorf("-o: %q is neither text nor json", output)
	}
	klog.SetLogger(logr.Discard()) // standard output must hold only the plan, for parsers
	log.SetLogger(logr.Discard())
	ctx = log.IntoContext(ctx, logr.Discard())

	opts := options.FromContext(ctx)
	setUpCore(opts)
	cluster := &agentv1alpha1.ClusterRef{Namespace: opts.ClusterNamespace, Name: opts.ClusterName}
	config, err := workloadCluster(ctx)
	if err != nil {
		return err
	}
	kube, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	if err != nil {
		return fmt.Errorf("making the spoke's client: %w", err)
	}
	held := identity.NewHeld(opts.AgentBootstrapSecret, cluster)
	agent, err := agentclient.New(agentOptions(ctx, opts, held))
	if err != nil {
		return fmt.Errorf("making the agent's client: %w", err)
	}
	defer func() { _ = agent.Close() }()
	if opts.AgentIdentitySecret.Name != "" {
		if err := obtain(ctx, newKeeper(ctx, opts, kube, kube, agent, held, cluster, func(context.Context, string, string) {})); err != nil {
			return err
		}
	}

	ctx, cancel := context.WithTimeout(ctx, planning.Within)
	defer cancel()
	made, err := planning.Make(ctx, planning.Config{
		Kube: kube, Agent: agent, Cluster: cluster, Timeout: opts.AgentTimeout, UnavailableOfferingTTL: opts.UnavailableOfferingTTL,
	})
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

// obtain waits for the client certificate.
func obtain(ctx context.Context, keeper *identity.Keeper) error {
	ctx, cancel := context.WithTimeout(ctx, obtainWithin)
	defer cancel()
	if err := keeper.Obtain(ctx); err != nil {
		return fmt.Errorf("getting a client certificate: %w", err)
	}
	return nil
}
