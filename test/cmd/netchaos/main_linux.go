package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/test/badlink"
	"github.com/karpenter-capi/karpenter-capi/test/netchaos"
)

func command(args []string) int {
	began := time.Now()
	o := netchaos.Options{Seed: uint64(began.UnixNano()), Say: func(format string, args ...any) {
		fmt.Printf("%6.1f s  "+format+"\n", append([]any{time.Since(began).Seconds()}, args...)...)
	}}
	flags := flag.NewFlagSet("netchaos", flag.ContinueOnError)
	flags.StringVar(&o.Name, "name", "netchaos", "Name of the sandbox.")
	flags.Func("scenarios", "Regular expression of the scenarios to run in addition to the good link. Defaults to all.", func(text string) (err error) {
		o.Scenarios, err = regexp.Compile(text)
		return err
	})
	flags.IntVar(&o.Pods, "pods", 6, "Maximum number of pods, and of Nodes, in addition to those that stay.")
	flags.IntVar(&o.Compress, "compress", 10, "Divisor of the longest partition and of the product's own periods. 1 leaves them as they are.")
	flags.Uint64Var(&o.Seed, "seed", o.Seed, "Seed of the number of pods at each moment of an outage.")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	if err := badlink.Apart(); err != nil {
		return fail(err)
	}
	// Discard the clients' logs: what matters is in the components' logs.
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	report, err := netchaos.Run(ctx, o)
	if err != nil {
		return fail(err)
	}
	if report.Write(os.Stdout) != nil || !report.Good() {
		return 1
	}
	return 0
}

func fail(err error) int {
	fmt.Printf("netchaos: FAIL %v\n", err)
	return 1
}
