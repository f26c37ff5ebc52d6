// Command mutants shows that the model test of package claims, and the explorer, can find mistakes.
// It deliberately breaks the engine and its protocol, one rule at a time, and requires that each
// breakage violates an invariant and that the unmodified engine violates none. The last line of its
// output and its exit status give the result.
//
// Tools that mutate Go change single operators at random. These breakages are mistakes that a
// person would make in a rule, several edits each, and each names the test that must find it.
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
	"regexp"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("mutants", flag.ContinueOnError)
	source := flags.String("source", ".", "Root of the repository to mutate.")
	only := flags.String("run", "", "Regular expression of the names of the mutants to try. Defaults to all.")
	budget := flags.Duration("budget", 15*time.Minute, "Maximum time for the histories of one mutant.")
	parallel := flags.Int("parallel", 2, "Number of mutants that are tried at a time.")
	if err := flags.Parse(args); err != nil {
		return err
	}
	selected, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	var chosen []mutant
	for _, m := range mutants {
		if selected.MatchString(m.name) {
			chosen = append(chosen, m)
		}
	}
	if len(chosen) == 0 {
		return errors.New("-run selects no mutant")
	}
	folder, err := filepath.Abs(*source)
	if err != nil {
		return fmt.Errorf("-source: %w", err)
	}
	return tryAll(ctx, runner{root: folder, budget: *budget, rounds: rounds}, chosen, *parallel, out)
}

// tryAll tries the control and the mutants, and prints a row for each and a verdict.
func tryAll(ctx context.Context, r runner, chosen []mutant, parallel int, out io.Writer) error {
	start := time.Now()
	var (
		mu     sync.Mutex
		caught int
		needed int
		work   errgroup.Group
	)
	var tests []string
	for _, m := range chosen {
		if m.test != "" && !slices.Contains(tests, m.test) {
			tests = append(tests, m.test)
		}
	}
	width := len(lo.MaxBy(chosen, func(a, b mutant) bool { return len(a.name) > len(b.name) }).name)
	row := func(name, verdict string, histories int, took time.Duration) {
		fmt.Fprintf(out, "%-*s %9d %7.0f  %s\n", width, name, histories, took.Seconds(), verdict)
	}
	fmt.Fprintf(out, "%-*s %9s %7s  %s\n", width, "mutant", "histories", "seconds", "caught by")
	work.SetLimit(max(1, parallel))
	for _, m := range chosen {
		work.Go(func() error {
			begun := time.Now()
			found, err := r.try(ctx, m)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				row(m.name, "FAIL "+err.Error(), found.histories, time.Since(begun))
				return nil
			}
			caught++
			needed = max(needed, found.rounds)
			row(m.name, found.invariant, found.histories, time.Since(begun))
			return nil
		})
	}
	_ = work.Wait() // failures are in the table
	begun := time.Now()
	found, err := r.soundness(ctx, tests, needed)
	sound := errors.Is(err, errSurvived)
	said := "control: nothing to catch"
	if err == nil {
		of := slices.Concat(r.rounds, lastRounds)[max(found.rounds, 1)-1]
		said = fmt.Sprintf("FAIL control violates %s; with -rapid.seed=%d -rapid.steps=%d", found.invariant, of.seed, of.steps)
	} else if !sound {
		said = "FAIL " + err.Error()
	}
	row("(none)", said, found.histories, time.Since(begun))
	verdict := "PASS"
	if caught < len(chosen) || !sound {
		verdict = "FAIL"
	}
	fmt.Fprintf(out, "mutants: %s %d of %d caught, seconds=%.0f\n", verdict, caught, len(chosen), time.Since(start).Seconds())
	if verdict != "PASS" {
		return errors.New("a mutant was not caught, or the control is not sound")
	}
	return nil
}
