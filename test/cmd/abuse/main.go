// Command abuse attacks the agent as one tenant with many Clusters and measures the effect on
// another tenant's claims; see package abuse. The last line of its output and its exit status
// report the result.
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

	"github.com/karpenter-capi/karpenter-capi/test/abuse"
)

func main() {
	abuse.Attacker()
	// Discard the clients' logs: what matters is in the components' logs.
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(command(os.Args[1:]))
}

func command(args []string) int {
	var only string
	var list bool
	began := time.Now()
	o := abuse.Options{Say: func(format string, args ...any) {
		fmt.Printf("%6.1f s  "+format+"\n", append([]any{time.Since(began).Seconds()}, args...)...)
	}}
	flags := flag.NewFlagSet("abuse", flag.ContinueOnError)
	flags.StringVar(&o.Name, "name", "abuse", "Name of the sandbox.")
	flags.StringVar(&only, "attacks", "", "Attacks to carry out, separated by commas. Defaults to all.")
	flags.IntVar(&o.Tenants, "tenants", 16, "Number of Clusters that carry out each attack at once.")
	flags.IntVar(&o.Rounds, "rounds", 3, "Number of times that rest and attack take turns.")
	flags.IntVar(&o.Claims, "claims", 100, "Number of claims that the victim makes in each turn.")
	flags.IntVar(&o.Agents, "agents", 2, "Number of agents. The first one is attacked.")
	flags.StringVar(&o.Agent, "agent", "", "Path of the agent's executable. Defaults to bin/capi-agent.")
	flags.BoolVar(&list, "list", false, "List the attacks, and exit.")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	if list {
		abuse.List(os.Stdout)
		return 0
	}
	if only != "" {
		o.Attacks = strings.Split(only, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	report, err := abuse.Run(ctx, o)
	if report != nil {
		report.Write(os.Stdout)
	}
	switch {
	case err != nil:
		fmt.Printf("abuse: FAIL %v\n", err)
		return 1
	case !report.Good():
		return 1
	}
	return 0
}
