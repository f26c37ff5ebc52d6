// Command claimmodel explores the claim protocol: every state that a small world can reach, or random runs of a larger one.
//
//	claimmodel                       # the standard table of runs
//	claimmodel -short                # the short one, which the tests run
//	claimmodel -only 'hook'          # those whose name matches
//	claimmodel -model engine -claims 1 -stale 1 -outsiders 1 -without fence
//
// See docs/model.md for what is modelled, what is not, and the results.
package main

import (
	"encoding/json"
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
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/section5"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, "claimmodel:", err)
		os.Exit(1)
	}
}

// run returns an error when a run did not end as it must, or the arguments cannot be used.
func run(arguments []string, out io.Writer) error {
	flags := flag.NewFlagSet("claimmodel", flag.ContinueOnError)
	var (
		short     = flags.Bool("short", false, "the short table")
		only      = flags.String("only", "", "only the runs of the table whose name matches this regular expression")
		model     = flags.String("model", "", "one run of this model instead of the table: engine or section5")
		limit     = flags.Int("states", 20_000_000, "states visited at most")
		limitTime = flags.Duration("for", 0, "time taken at most; 0 for no limit")
		walks     = flags.Int("walks", 0, "random runs instead of a search")
		depth     = flags.Int("depth", 200, "steps of a random run")
		seed      = flags.Uint64("seed", 1, "seed of the random runs")
		first     = flags.Bool("first", false, "stop at the first violation")
		ignore    = flags.String("ignore", "", "kinds of violations that are not reported, by their first word, separated by commas")
		cases     = flags.Int("cases", 0, "instead of a run of the engine: this many snapshots and decisions, as JSON")
		without   = flags.String("without", "", "rules that are left out, separated by commas")
	)
	var (
		p engine.Protocol
		q section5.Protocol
	)
	flags.IntVar(&p.Groups, "groups", 1, "engine: node groups")
	flags.IntVar(&p.Claims, "claims", 1, "claims")
	flags.IntVar(&p.Floor, "floor", 1, "floor of each group")
	flags.IntVar(&p.Max, "max", 0, "engine: max size of each group; 0 for none")
	flags.IntVar(&p.StaleAgents, "stale", 1, "agents that act on what they read earlier")
	flags.IntVar(&p.Machines, "machines", 0, "engine: Machines that one group makes at most; 0 for the model's bound")
	flags.IntVar(&p.Sets, "sets", 1, "engine: MachineSets at first")
	flags.BoolVar(&p.RollingUpdate, "rolling", false, "engine: RollingUpdate instead of OnDelete")
	flags.BoolVar(&p.Young, "young", false, "engine: the floor's Machines have no Node yet at first")
	flags.BoolVar(&p.Hooks, "hooks", false, "engine: the pre-terminate hook")
	flags.BoolVar(&p.Adopt, "adopt", false, "engine: the last claim adopts the first Machine")
	flags.BoolVar(&p.Repeat, "repeat", false, "engine: calls arrive twice, late, or out of order")
	flags.BoolVar(&p.Forget, "forget", false, "engine: tombstones are forgotten")
	flags.IntVar(&p.Outsiders, "outsiders", 0, "Machines that somebody else deletes")
	flags.IntVar(&p.Raises, "raises", 0, "replicas that humans add")
	flags.IntVar(&p.Lowers, "lowers", 0, "engine: replicas that humans take away")
	flags.IntVar(&p.Rollouts, "rollouts", 0, "engine: changes of the template")
	flags.IntVar(&p.Wipes, "wipes", 0, "engine: times that the ledger is wiped")
	flags.IntVar(&p.Pauses, "pauses", 0, "engine: times that a human pauses the MachineDeployment")
	flags.IntVar(&p.Blocks, "blocks", 0, "engine: times that creation is blocked")
	flags.BoolVar(&p.BlockedForGood, "blocked-for-good", false, "engine: what is blocked stays so")
	if err := flags.Parse(arguments); err != nil {
		return err
	}

	o := explore.Options{
		States: *limit, For: *limitTime, StopAtFirst: *first, Walks: *walks, Depth: *depth, Seed: *seed,
		Ignore: strings.Split(*ignore, ","),
	}
	var r explore.Result
	switch *model {
	case "engine":
		var err error
		if p.Without, err = engine.ParseRules(*without); err != nil {
			return err
		}
		if *cases > 0 {
			return json.NewEncoder(out).Encode(p.Cases(*cases, *seed)) //nolint:musttag // both ends are ours and use the fields' names
		}
		r = search(&p, o)
	case "section5":
		q = section5.Protocol{Claims: p.Claims, Floor: p.Floor, StaleAgents: p.StaleAgents, Outsiders: p.Outsiders, Raises: p.Raises}
		var err error
		if q.Rules, err = section5.ParseRules(*without); err != nil {
			return err
		}
		r = search(&q, o)
	case "":
		match, err := regexp.Compile(*only)
		if err != nil {
			return fmt.Errorf("-only: %w", err)
		}
		return runTable(table(*short), match, out)
	default:
		return fmt.Errorf("no model %q; there are engine and section5", *model)
	}
	r.Report(out)
	if len(r.Violations) > 0 {
		return fmt.Errorf("%d kinds of violations", len(r.Violations))
	}
	return nil
}

func search[S any](m explore.Model[S], o explore.Options) explore.Result {
	if o.Walks > 0 {
		return explore.Walk(m, o)
	}
	return explore.Search(m, o)
}

// row is one run of the table, and how it must end.
type row struct {
	name string
	run  func() explore.Result
	// violation is the first word of the kind that must be found; "" for none.
	violation string
	// complete says that the search must visit every state.
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
	fmt.Fprintf(out, "claimmodel: PASS %d runs\n", ran)
	return nil
}
