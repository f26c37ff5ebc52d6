// Command sandbox starts a hub and a spoke on this machine, reports their status, and stops them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second Ctrl-C ends this process at once, and with it all its child processes.
	context.AfterFunc(ctx, stop)
	// The clients log nothing that the components' logs do not contain.
	ctrl.SetLogger(logr.Discard())
	if err := command().ExecuteContext(ctx); err != nil {
		if !errors.Is(err, errNotReady) {
			_, _ = fmt.Fprintln(os.Stderr, "sandbox:", err)
		}
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var options sandbox.Options
	root := &cobra.Command{
		Use:           "sandbox",
		Short:         "A Cluster API hub and a spoke on this machine, with the agent and the shim between them",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&options.Name, "name", sandbox.DefaultName, "name of the sandbox; several can run at once")
	root.PersistentFlags().StringVar(&options.Root, "root", "", "folder of the repository; empty: the one around the working directory")

	up := &cobra.Command{
		Use:   "up",
		Short: "Bring a sandbox up and leave it running",
		Args:  cobra.NoArgs,
	}
	startFlags(up, &options)
	timeout := up.Flags().Duration("timeout", 5*time.Minute, "how long everything may take to be ready")
	up.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeoutCause(cmd.Context(), *timeout, fmt.Errorf("not ready within %s", *timeout))
		defer cancel()
		return bringUp(ctx, cmd.OutOrStdout(), options)
	}

	run := &cobra.Command{
		Use:   "run",
		Short: "Bring a sandbox up and hold it until interrupted; `up` runs this in the background",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := sandbox.Start(cmd.Context(), options)
			if err != nil {
				return err
			}
			<-cmd.Context().Done()
			s.Stop()
			return nil
		},
	}
	startFlags(run, &options)

	down := &cobra.Command{
		Use:   "down",
		Short: "Take a sandbox down and remove its files",
		Args:  cobra.NoArgs,
	}
	keepLogs := down.Flags().Bool("keep-logs", false, "keep the components' logs")
	down.RunE = func(cmd *cobra.Command, _ []string) error {
		return takeDown(cmd.Context(), cmd.OutOrStdout(), options, *keepLogs)
	}

	status := &cobra.Command{
		Use:   "status",
		Short: "Show what runs; the exit status is 0 if everything is ready",
		Args:  cobra.NoArgs,
	}
	asJSON := status.Flags().Bool("json", false, "print the state as JSON")
	status.RunE = func(cmd *cobra.Command, _ []string) error {
		return tellStatus(cmd.OutOrStdout(), options, *asJSON)
	}

	root.AddCommand(up, run, down, status)
	return root
}

func startFlags(cmd *cobra.Command, options *sandbox.Options) {
	cmd.Flags().StringVar((*string)(&options.Topology), "topology", string(sandbox.HubAndSpoke),
		"where agent and shim run, as in docs/install.md: hub-spoke, joined, sidecar or hub-hosted")
	cmd.Flags().BoolVar(&options.HubOnly, "hub-only", false, "leave out the spoke, its Cluster and the shim: a hub to move a Cluster to")
	cmd.Flags().StringVar(&options.HubOf, "hub-of", "",
		"name of a sandbox that runs: bring up a spoke with a shim only, whose Cluster, named as this sandbox, is added to that one's hub")
	cmd.Flags().BoolVar(&options.WithoutShim, "no-shim", false, "leave out the shim")
	cmd.Flags().BoolVar(&options.WithoutAgent, "no-agent", false, "leave out the agent, and with it the shim")
	cmd.Flags().StringArrayVar(&options.AgentArgs, "agent-arg", nil, "flag to add to the agent's command line; may be repeated")
	cmd.Flags().StringArrayVar(&options.FeatureGates, "feature-gate", nil, "feature gate of Karpenter to turn on; may be repeated")
	cmd.Flags().StringArrayVar(&options.ShimEnv, "shim-env", nil, "NAME=value to add to the shim's environment; may be repeated")
}

// relative returns the path relative to the working directory, if that is shorter.
func relative(path string) string {
	dir, err := os.Getwd()
	if err != nil {
		return path
	}
	short, err := filepath.Rel(dir, path)
	if err != nil || len(short) > len(path) {
		return path
	}
	return short
}
