// Command capi-agent-conformance checks that an agent keeps the contract of the API: this project's
// agent, the fake, or any other. The last line of its output is the verdict. The exit status is 0
// if the agent conforms, 1 if it does not, and 2 if it could not be checked, or the verdict could
// not be written.
//
// It uses pflag without cobra: it has no subcommands, and this module's requirements are also those
// of every module that imports the client.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/program"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
)

// environmentPrefix is the prefix of every environment variable.
const environmentPrefix = "CAPI_AGENT_CONFORMANCE_"

// Exit statuses.
const (
	conforms  = 0
	breaks    = 1
	unchecked = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}

func run(ctx context.Context, arguments []string, out, errOut io.Writer) int {
	fail := func(err error) int {
		fmt.Fprintln(errOut, "capi-agent-conformance:", err)
		return unchecked
	}
	o := newOptions()
	flags := pflag.NewFlagSet("capi-agent-conformance", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.SetOutput(errOut)
	flags.Usage = func() {
		fmt.Fprintf(errOut, "Usage: capi-agent-conformance --address=host:port [flags]\n\nChecks that an agent keeps the contract of the API.\n\n%s",
			flags.FlagUsages())
	}
	o.addFlags(flags)
	list := flags.Bool("list", false, "Print all behaviours as a Markdown table, and exit.")
	showVersion := flags.Bool("version", false, "Print the version and exit.")
	if err := flags.Parse(arguments); errors.Is(err, pflag.ErrHelp) {
		return conforms
	} else if err != nil {
		return fail(err)
	}
	if err := program.FromEnvironment(flags, environmentPrefix); err != nil {
		return fail(err)
	}
	switch {
	case flags.NArg() > 0:
		return fail(fmt.Errorf("%q is not a flag; the agent is given with --address", flags.Arg(0)))
	case *showVersion:
		fmt.Fprintln(out, program.Version())
		return conforms
	case *list:
		fmt.Fprint(out, conformance.Table())
		return conforms
	}
	if err := o.validate(); err != nil {
		return fail(err)
	}
	return check(ctx, o, out, fail)
}

// check runs the checks, and prints each result once it is known.
func check(ctx context.Context, o *options, out io.Writer, fail func(error) int) int {
	target, done, err := o.target(ctx)
	if err != nil {
		status := fail(err)
		fmt.Fprintln(out, conformance.Verdict{}.Line())
		return status
	}
	defer done()
	verdict := conformance.Check(ctx, conformance.Checks{
		NewEnv: target.NewEnv, Lacks: target.Lacks, Profiles: o.selected(), Only: o.only.MatchString,
		Progress: func(r conformance.Result) { show(out, r) },
	})
	status := conforms
	if !verdict.Pass() {
		status = breaks
	}
	for file, write := range map[string]func(io.Writer) error{o.junit: verdict.WriteJUnit, o.json: verdict.WriteJSON} {
		if file == "" {
			continue
		}
		if err := writeFile(file, write); err != nil {
			status = fail(err) // a verdict of before may be in its place
		}
	}
	if ctx.Err() != nil {
		status = fail(errors.New("interrupted: behaviours that were not checked count as failed"))
	}
	fmt.Fprintln(out, verdict.Line())
	return status
}

// show prints a result, with its message unless it passed.
func show(out io.Writer, r conformance.Result) {
	word := map[conformance.Outcome]string{conformance.Passed: "pass", conformance.Failed: "FAIL", conformance.Skipped: "skip"}[r.Outcome]
	fmt.Fprintf(out, "%s  %-31s %6.2fs  %s: %s\n", word, r.ID, r.Seconds, r.Area, r.Behaviour)
	if r.Outcome != conformance.Passed {
		fmt.Fprintln(out, "      "+strings.ReplaceAll(r.Message, "\n", "\n      "))
	}
}

func writeFile(path string, write func(io.Writer) error) error {
	file, err := os.Create(path) //nolint:gosec // The caller names the file.
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}
