// Command fake-agent serves a fake agent over TCP that plays a scenario. It lets tools in any
// language be tested without a hub.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/fakeserver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := fakeserver.Run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fake-agent:", err)
		os.Exit(1)
	}
}
