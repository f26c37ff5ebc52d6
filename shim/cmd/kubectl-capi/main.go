// Command kubectl-capi is a plugin for kubectl that shows why pods and nodes are where they are, in
// the workload cluster and in the management cluster.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"
	coreoperator "sigs.k8s.io/karpenter/pkg/operator"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}

func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	// The clients log nothing that an error or the output does not say.
	klog.SetLogger(logr.Discard())
	log.SetLogger(logr.Discard())
	command := kubectl.Command(coreoperator.Version)
	command.SetArgs(args)
	command.SetOut(out)
	command.SetErr(errOut)
	if err := command.ExecuteContext(ctx); err != nil {
		fmt.Fprint(errOut, kubectl.Describe(err))
		return 1
	}
	return 0
}
