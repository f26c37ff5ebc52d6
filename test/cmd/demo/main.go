// Command demo shows pods becoming nodes and nodes being removed again, on real control planes with
// simulated machines. It starts a sandbox, runs the scenario, checks the invariants, and stops the
// sandbox. On a terminal it draws a table; otherwise it prints a line per change. The last line of
// its output and its exit status report the result.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/term"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/scenario"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// startWithin bounds the start of the sandbox.
const startWithin = 5 * time.Minute

// errUsage means a mistake in the command line that has already been reported.
var errUsage = errors.New("usage")

type config struct {
	name  string
	chaos bool
	plain bool
	// picture is the file to which a picture of the table is written. Empty for none.
	picture string
}

// screen shows the progress. Its methods are safe for concurrent use.
type screen interface {
	// title begins a part, note prints a message, and event a change of an object.
	title(format string, args ...any)
	note(format string, args ...any)
	event(event timeline.Event)
	// starting shows the progress of the sandbox's start.
	starting(state sandbox.State)
	// follow shows what the recorder sees from now on.
	follow(recorder *timeline.Recorder)
	// close restores the terminal. Nothing is shown afterwards.
	close()
}

func main() {
	// Discard the clients' logs: what matters is in the components' logs.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrl.SetLogger(logr.Discard())
	os.Exit(command(os.Args[1:]))
}

func command(args []string) int {
	c, err := parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()

	began := time.Now()
	result, logs, err := show(ctx, c, began)
	seconds := time.Since(began).Round(time.Second) / time.Second
	if err != nil {
		fmt.Printf("\n%v\n%s\n", err, lookAt(logs))
		fmt.Printf("demo: FAIL seconds=%d: %s; see above\n", seconds, firstLine(err.Error()))
		return 1
	}
	fmt.Printf("demo: PASS pods=%d nodes=%d consolidated=%d final-replicas=%s seconds=%d\n",
		result.Pods, result.Nodes, result.Consolidated, scenario.Replicas(result.FinalReplicas), seconds)
	return 0
}

func parse(args []string) (config, error) {
	c := config{}
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&c.name, "name", "demo", "Name of the sandbox; those of different names can run at the same time.")
	flags.BoolVar(&c.chaos, "chaos", os.Getenv("CHAOS") == "1", "Kill the shim and the agent (kill -9) while nodes are being made. Also CHAOS=1.")
	flags.BoolVar(&c.plain, "plain", false, "Write lines on a terminal, too.")
	flags.StringVar(&c.picture, "picture", "", "Write a picture of the table to this SVG file, of the moment with the most NodeClaims in use.")
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(flags.Output(), "demo takes no arguments: %s\n", strings.Join(flags.Args(), " "))
		return c, errUsage
	}
	return c, nil
}

// show runs everything, and always stops the sandbox. logs is the folder of the logs, which are
// kept, or empty if there is none.
func show(ctx context.Context, c config, began time.Time) (result scenario.Result, logs string, err error) {
	var s screen = newLines(os.Stdout, began)
	if !c.plain && term.IsTerminal(int(os.Stdout.Fd())) {
		s = newTable(began)
	}
	defer s.close()

	s.title("Bringing the sandbox %q up: a hub with Cluster API and the agent, a spoke with the shim", c.name)
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	w, err := testenv.Start(starting, sandbox.Options{
		Name: c.name, OnChange: s.starting,
	}, s.event)
	if err != nil {
		state, _ := sandbox.ReadState(sandbox.Options{Name: c.name})
		return result, state.Paths.Logs, fmt.Errorf("bringing the sandbox up: %w", err)
	}
	state := w.Sandbox.State()
	logs = state.Paths.Logs
	defer func() {
		s.title("Taking the sandbox down")
		w.Stop()
	}()
	s.follow(w.Recorder)
	s.note("the sandbox is up; to look into the spoke: kubectl --kubeconfig %s get nodeclaims -w (make bin/kubectl if you have none)",
		relative(state.Paths.SpokeKubeconfig))

	if c.picture != "" {
		p := photograph(w.Recorder, began)
		defer func() { err = errors.Join(err, p.save(c.picture)) }()
	}
	result, err = scenario.Run(ctx, w, scenario.Options{Chaos: c.chaos, Title: s.title, Note: s.note})
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	return result, logs, err
}

// lookAt returns a hint on where to look after a failure.
func lookAt(logs string) string {
	if logs == "" {
		return "There are no logs."
	}
	return fmt.Sprintf("Look at the logs in %s, first at %s.log and %s.log.", relative(logs), sandbox.Agent, sandbox.Shim)
}

// relative returns the path relative to the working directory, if it is inside.
func relative(path string) string {
	dir, err := os.Getwd()
	if err != nil {
		return path
	}
	short, err := filepath.Rel(dir, path)
	if err != nil || strings.HasPrefix(short, "..") {
		return path
	}
	return short
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
