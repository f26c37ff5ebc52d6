// Command sim-provider is the simulated infrastructure provider of the sandbox.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/simprovider"
)

func main() {
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "sim-provider:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var kubeconfig, healthAddress string
	cmd := &cobra.Command{
		Use:           "sim-provider",
		Short:         "Cluster API infrastructure provider whose machines are simulated",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctrl.SetLogger(klog.Background())
			hub, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
			if err != nil {
				return fmt.Errorf("reading the kubeconfig: %w", err)
			}
			return simprovider.Run(cmd.Context(), hub, healthAddress)
		},
	}
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig of the hub; empty: the cluster it runs in")
	cmd.Flags().StringVar(&healthAddress, "health-probe-bind-address", "127.0.0.1:9440", "address of /healthz and /readyz")
	return cmd
}
