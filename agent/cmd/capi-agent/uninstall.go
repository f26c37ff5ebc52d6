package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

// uninstall removes everything that agents have written to the hub, and reports on out.
func uninstall(ctx context.Context, arguments []string, out io.Writer) error {
	o := options.New()
	flags := pflag.NewFlagSet("capi-agent uninstall", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), `Usage: capi-agent uninstall [flags]

Removes everything that agents wrote from the hub: ledgers, marks, finalizers and hooks, and the MachineClaims. Releases that
are under way are finished first, for which Cluster API must run. All other Machines stay, and are the user's then.
Stop the agents before. It can be repeated, and goes on where it stopped.

%s`, flags.FlagUsages())
	}
	o.AddScopeFlags(flags)
	timeout := flags.Duration("timeout", 10*time.Minute, "How long to wait for releases that are under way.")
	force := flags.Bool("force", false,
		"Do not wait for releases: let their Machines go as they are. Cluster API may replace them, and a MachineDeployment may be left larger by them.")
	if err := flags.Parse(arguments); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("uninstall takes no arguments but flags; %q is none", flags.Arg(0))
	}
	if err := o.ValidateScope(); err != nil {
		return err
	}
	if *timeout <= 0 {
		return fmt.Errorf("--timeout: %s is not above 0", *timeout)
	}
	log.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	config, err := hubConfig(o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	err = agent.Uninstall(ctx, config, o, *force, func(format string, arguments ...any) { fmt.Fprintf(out, format+"\n", arguments...) })
	if err != nil {
		return fmt.Errorf("uninstall: %w", err)
	}
	fmt.Fprintln(out, "nothing of the agent is left in", config.Host)
	return nil
}
