// Command claimmodel explores the claim protocol: every state that a small world can reach, or
// random runs of a larger one. The decisions are those of the agent's package protocol.
//
//	claimmodel                       # the standard table of runs
//	claimmodel -short                # the short one, which the tests run
//	claimmodel -only 'wiped'         # those whose name matches
//	claimmodel -world -claims 1 -stale 1 -outsiders 1 -without check-ledger
//
// No existing model checker is used: each has a language of its own, in which the decisions would
// have to be written a second time.
//
// See docs/model.md for what is modelled, what is not, and the results.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/engine"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, "model:", err)
		os.Exit(1)
	}
}

// run returns an error if a run did not end as expected, or the arguments are invalid.
func run(arguments []string, out io.Writer) error {
	flags := flag.NewFlagSet("claimmodel", flag.ContinueOnError)
	var (
		short     = flags.Bool("short", false, "Run the short table.")
		only      = flags.String("only", "", "Regular expression of the names of the runs to make. Defaults to all of the table.")
		world     = flags.Bool("world", false, "Run the world that the other flags describe, instead of the table.")
		limit     = flags.Int("states", 20_000_000, "Maximum number of states to visit.")
		limitTime = flags.Duration("for", 0, "Maximum duration. 0 means no limit.")
		walks     = flags.Int("walks", 0, "Number of random runs, instead of a search.")
		depth     = flags.Int("depth", 200, "Number of steps of a random run.")
		seed      = flags.Uint64("seed", 1, "Seed of the random runs.")
		until     = flags.String("until", "", "Stop at the first violation of this kind, given by its first word, or \"any\".")
		ignore    = flags.String("ignore", "", "Kinds of violations that are not reported, given by their first words and separated by commas.")
		without   = flags.String("without", "", "Rules to omit, separated by commas.")
	)
	var p engine.Protocol
	flags.IntVar(&p.Groups, "groups", 1, "Number of node groups.")
	flags.IntVar(&p.Claims, "claims", 1, "Number of claims.")
	flags.IntVar(&p.Floor, "floor", 1, "Floor of each group.")
	flags.IntVar(&p.Max, "max", 0, "Max size of each group. 0 means none.")
	flags.IntVar(&p.StaleAgents, "stale", 1, "Number of agents that act on what they read earlier.")
	flags.IntVar(&p.Machines, "machines", 0, "Maximum number of Machines that one group creates. 0 means the model's bound.")
	flags.IntVar(&p.Sets, "sets", 1, "Initial number of MachineSets.")
	flags.BoolVar(&p.RollingUpdate, "rolling", false, "Use the strategy RollingUpdate instead of OnDelete.")
	flags.BoolVar(&p.Young, "young", false, "Start without Nodes of the floor's Machines.")
	flags.BoolVar(&p.Adopt, "adopt", false, "Let the last claim adopt the first Machine.")
	flags.BoolVar(&p.Return, "return", false, "Let claims return their Machines to the user.")
	flags.BoolVar(&p.Repeat, "repeat", false, "Deliver calls twice, late, or out of order.")
	flags.BoolVar(&p.Forget, "forget", false, "Forget tombstones.")
	flags.IntVar(&p.Outsiders, "outsiders", 0, "Number of Machines that another actor deletes.")
	flags.IntVar(&p.Raises, "raises", 0, "Number of replicas that people add.")
	flags.IntVar(&p.Lowers, "lowers", 0, "Number of replicas that people remove.")
	flags.IntVar(&p.Rollouts, "rollouts", 0, "Number of changes of the template.")
	flags.IntVar(&p.Wipes, "wipes", 0, "Number of times that the ledger is deleted.")
	flags.IntVar(&p.Pauses, "pauses", 0, "Number of times that a person pauses the MachineDeployment.")
	flags.IntVar(&p.Sizes, "sizes", 0, "Number of times that a person sets the max or the min size, or makes it invalid.")
	flags.BoolVar(&p.AtOnce, "at-once", false, "Let the stale agents admit claims at once, as the caches show them, and do nothing else.")
	flags.IntVar(&p.Blocks, "blocks", 0, "Number of times that creation is blocked.")
	flags.BoolVar(&p.BlockedForGood, "blocked-for-good", false, "Keep blocked what is blocked.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if !*world {
		match, err := regexp.Compile(*only)
		if err != nil {
			return fmt.Errorf("-only: %w", err)
		}
		return runTable(table(*short), match, out)
	}
	var err error
	if p.Without, err = engine.ParseRules(*without); err != nil {
		return err
	}
	o := explore.Options{
		States: *limit, For: *limitTime, StopAtFirst: *until == "any", Until: *until, Walks: *walks, Depth: *depth, Seed: *seed,
		Ignore: strings.Split(*ignore, ","),
	}
	r := search(&p, o)
	r.Report(out)
	if len(r.Violations) > 0 {
		return fmt.Errorf("%d kinds of violations", len(r.Violations))
	}
	return nil
}

func search(m *engine.Protocol, o explore.Options) explore.Result {
	if o.Walks > 0 {
		return explore.Walk(m, o)
	}
	return explore.Search(m, o)
}

// row is one run of the table, with its expected result.
type row struct {
	name string
	run  func() explore.Result
	// violation is the first word of the kind of violation that must be found, or "" for none.
	violation string
	// complete is set if the search must visit every state.
	complete bool
}

func runTable(rows []row, match *regexp.Regexp, out io.Writer) error {
	ran, failed := 0, 0
	fmt.Fprintf(out, "%-64s %12s %9s %9s  %s\n", "run", "states", "complete", "seconds", "violations")
	for _, row := range rows {
		if !match.MatchString(row.name) {
			continue
		}
		ran++
		begun := time.Now()
		r := row.run()
		var kinds []string
		found := row.violation == ""
		for _, v := range r.Violations {
			kinds = append(kinds, v.Kind)
			first, _, _ := strings.Cut(v.Kind, " ")
			found = found || row.violation == first
		}
		said := strings.Join(kinds, "; ")
		if said == "" {
			said = "none"
		}
		verdict := ""
		if !found || row.violation == "" && len(kinds) > 0 || row.complete && !r.Complete {
			verdict = "  <- NOT AS IT MUST BE"
			failed++
		}
		fmt.Fprintf(out, "%-64s %12d %9v %9.1f  %s%s\n", row.name, r.States, r.Complete, time.Since(begun).Seconds(), said, verdict)
		if verdict != "" {
			r.Report(out)
		}
	}
	if ran == 0 {
		return errors.New("-only selects no run")
	}
	if failed > 0 {
		return fmt.Errorf("FAIL %d of %d runs did not end as they must", failed, ran)
	}
	fmt.Fprintf(out, "model: PASS %d runs\n", ran)
	return nil
}
