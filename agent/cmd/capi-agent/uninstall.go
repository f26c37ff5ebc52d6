package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

func newUninstall() *cobra.Command {
	o := options.New()
	var (
		timeout time.Duration
		how     claims.UninstallOptions
	)
	command := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove everything that agents have written to the hub",
		Long: `Remove everything that agents have written to the hub: ledgers, marks, finalizers and hooks, and the MachineClaims. Releases in progress are
completed first, which requires Cluster API to be running. All other Machines stay, and are the user's from then on. Stop the agents first. The
command can be repeated, and continues where it stopped.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return uninstall(command.Context(), o, timeout, how, command.OutOrStdout())
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	o.AddScopeFlags(flags)
	flags.DurationVar(&timeout, "timeout", 10*time.Minute, "How long to wait for releases that are in progress.")
	addDryRunFlag(flags, &how.DryRun)
	flags.BoolVar(&how.Force, "force", false,
		"Do not wait for releases: leave their Machines as they are. Cluster API may replace them, so a MachineDeployment may stay larger by that many.")
	return command
}

// uninstall removes everything that agents have written to the hub, and reports on out.
func uninstall(ctx context.Context, o *options.Options, timeout time.Duration, how claims.UninstallOptions, out io.Writer) error {
	if err := o.ValidateScope(); err != nil {
		return err
	}
	if timeout <= 0 {
		return fmt.Errorf("--timeout: %s is not above 0", timeout)
	}
	log.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	config, err := hubConfig(o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	fmt.Fprintln(out, "hub:", config.Host)
	how.Report = func(format string, arguments ...any) { fmt.Fprintf(out, format+"\n", arguments...) }
	if err := agent.Uninstall(ctx, config, o, how); err != nil {
		return fmt.Errorf("uninstall: %w", err)
	}
	scope := lo.Ternary(len(o.Namespaces)+len(o.Clusters) > 0, " for the selected Clusters", "")
	fmt.Fprintln(out, lo.Ternary(how.DryRun, "dry run: nothing was changed", "nothing of the agent is left"+scope))
	return nil
}
