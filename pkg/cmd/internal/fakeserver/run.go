// Package fakeserver implements the command fake-agent: it serves a fake agent over TCP that plays
// a scenario.
//
// The command uses pflag without cobra: it has no subcommands, and this module's requirements are
// also those of every module that imports the client.
package fakeserver

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/program"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
)

// environmentPrefix is the prefix of every environment variable.
const environmentPrefix = "FAKE_AGENT_"

// Run runs the command. It serves until the context ends, or prints what the arguments request.
func Run(ctx context.Context, arguments []string, out, log io.Writer) error {
	o := newOptions()
	flags := pflag.NewFlagSet("fake-agent", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.SetOutput(log)
	flags.Usage = func() {
		fmt.Fprintf(log, "Usage: fake-agent [flags]\n\nServes a fake agent that plays a scenario.\n\n%s", flags.FlagUsages())
	}
	o.addFlags(flags)
	printExample := flags.Bool("print-example", false, "Print a scenario that uses every field, and exit.")
	check := flags.Bool("check", false, "Check the scenario and the flags, and exit.")
	showVersion := flags.Bool("version", false, "Print the version and exit.")
	if err := flags.Parse(arguments); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if err := program.FromEnvironment(flags, environmentPrefix); err != nil {
		return err
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("%q is not a flag; the scenario is given with --scenario", flags.Arg(0))
	case *showVersion:
		fmt.Fprintln(out, program.Version())
		return nil
	case *printExample:
		_, err := out.Write(scenario.Example())
		return err
	}
	if err := o.validate(); err != nil {
		return err
	}
	s, err := o.load()
	if err != nil {
		return err
	}
	if *check {
		fmt.Fprintln(out, "fake-agent: the scenario can be played")
		return nil
	}
	return serve(ctx, o, s, log)
}
