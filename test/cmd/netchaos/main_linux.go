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
	flags.StringVar(&o.Name, "name", "netchaos", "name of the sandbox")
	flags.Func("scenarios", "a regular expression: which scenarios to run besides the good link; empty for all", func(text string) (err error) {
		o.Scenarios, err = regexp.Compile(text)
		return err
	})
	flags.IntVar(&o.Pods, "pods", 6, "how many pods, and Nodes, there are at most besides those that stay")
	flags.IntVar(&o.Compress, "compress", 10, "what the longest partition, and the product's own periods, are divided by; 1 for as they are")
	flags.Uint64Var(&o.Seed, "seed", o.Seed, "decides how many pods there are at each moment of an outage")
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
