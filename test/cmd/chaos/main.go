// Command chaos runs the product on real control planes while its dependencies are made to fail;
// see package chaos. The last line of its output and its exit status report the result.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/test/chaos"
)

func main() {
	// Discard the clients' logs: what matters is in the components' logs.
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(command(os.Args[1:]))
}

func command(args []string) int {
	var only string
	var list bool
	began := time.Now()
	o := chaos.Options{Say: func(format string, args ...any) {
		fmt.Printf("%6.1f s  "+format+"\n", append([]any{time.Since(began).Seconds()}, args...)...)
	}}
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	flags.StringVar(&o.Name, "name", "chaos", "Name of the sandbox.")
	flags.StringVar(&only, "scenarios", "", "Scenarios to run, separated by commas. Defaults to all.")
	flags.IntVar(&o.Rounds, "rounds", 1, "Number of times that each scenario runs.")
	flags.IntVar(&o.Claims, "claims", 2000,
		"Minimum number of claims and of releases when all scenarios run. The last scenario goes on until there are as many.")
	flags.BoolVar(&o.Short, "short", false, "Run the short form, as the tests do.")
	flags.StringVar(&o.Agent, "agent", "", "Path of the agent's executable. Defaults to bin/capi-agent.")
	flags.BoolVar(&list, "list", false, "List the scenarios, and exit.")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	if list {
		chaos.List(os.Stdout)
		return 0
	}
	if only != "" {
		o.Scenarios, o.Claims = strings.Split(only, ","), 0
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	report, err := chaos.Run(ctx, o)
	if report != nil {
		report.Write(os.Stdout)
	}
	switch {
	case err != nil:
		fmt.Printf("chaos: FAIL %v\n", err)
		return 1
	case !report.Good():
		return 1
	}
	return 0
}
