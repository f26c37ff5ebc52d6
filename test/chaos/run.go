package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
	"github.com/karpenter-capi/karpenter-capi/test/faults"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
)

const (
	// settleWithin is the time in which everything must come to rest after the last fault.
	settleWithin = 120 * time.Second
	// scenarioWithin bounds one scenario, so that none hangs forever. The longest takes
	// [killsWithin], and then comes to rest.
	scenarioWithin = killsWithin + 10*time.Minute
)

// Options configures a run.
type Options struct {
	// Name is the name of the sandbox.
	Name string
	// Scenarios are the names of the scenarios to run. Empty means all.
	Scenarios []string
	// Short selects the form that takes a few minutes.
	Short bool
	// Rounds is how often each scenario runs. Zero means once.
	Rounds int
	// Claims is the minimum number of claims and of releases. The scenario with random kills
	// continues until it is reached.
	Claims int
	// Agent is the agent's executable. Empty means bin/capi-agent.
	Agent string
	// Say prints progress. REQUIRED.
	Say func(format string, args ...any)
}

// Row is the result of one scenario.
type Row struct {
	Scenario string
	Runs     int
	// Kills counts the kills of agents and shims. Faults counts other faults: failed requests,
	// suspended processes, and interference by users.
	Kills, Faults    int
	Claims, Releases int
	// Counts of forbidden outcomes.
	Leaked, Duplicated, Innocent, Unsettled int
	Took                                    time.Duration
	// Notes are additional figures.
	Notes []string
	// Violations lists what is wrong, and Err is why the scenario could not be carried out.
	Violations []invariants.Violation
	Err        error
}

// Good reports whether there are no forbidden outcomes and no error.
func (r *Row) Good() bool {
	return r.Err == nil && r.Leaked+r.Duplicated+r.Innocent+r.Unsettled == 0
}

// scenario is one kind of trouble.
type scenario struct {
	name string
	// about describes the trouble in one sentence.
	about string
	run   func(ctx context.Context, r *run) error
	// short is the scenario's run in the short form, or nil if it has none.
	short func(ctx context.Context, r *run) error
	// losses are the reasons with which wanted claims may end, because another actor took the
	// Machine.
	losses []string
}

// run is one run of one scenario.
type run struct {
	*environment
	options  Options
	scenario *scenario
	row      *Row
	short    bool
}

// say prints a message about the scenario.
func (r *run) say(format string, args ...any) {
	r.options.Say("  "+format, args...)
}

// phase returns the claim's phase as last seen by the auditor.
func (r *run) phase(id string) agentv1.Phase {
	if c := r.auditor.Claim(id); c != nil {
		return c.Phase
	}
	return agentv1.PhasePending
}

// forgive drops the claims that ended for a reason that the scenario causes.
func (r *run) forgive() {
	for _, id := range r.holders.wanted() {
		if c := r.auditor.Claim(id); c != nil && c.Phase == agentv1.PhaseEnded && lo.Contains(r.scenario.losses, c.Reason) {
			r.holders.drop(id)
		}
	}
}

// fault counts a fault that is not a kill.
func (r *run) fault(format string, args ...any) {
	r.count.Add(1)
	r.journal.add("fault: "+format, args...)
}

// rest ends all faults and waits until all checks pass. The row records those that do not pass in
// time.
func (r *run) rest(ctx context.Context) error {
	r.points.Disarm()
	r.plans(nil)
	for _, p := range r.proxies {
		p.Thaw()
	}
	began := time.Now()
	r.journal.add("the last fault is over")
	bounded, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	// Interrupted callers complete their releases.
	for _, id := range r.holders.unreleased() {
		if err := r.holders.release(bounded, id, false); err != nil {
			r.row.Unsettled++
			return fmt.Errorf("no agent takes a release %s after the last fault", settleWithin)
		}
	}
	r.Checker.Expected = func() invariants.Expected {
		r.forgive()
		return r.intent.expected()
	}
	violations, err := r.Checker.Settle(bounded)
	if err != nil {
		return fmt.Errorf("checking what is there: %w", err)
	}
	if len(violations) > 0 {
		r.row.Violations = append(r.row.Violations, violations...)
		r.row.Unsettled++
		return fmt.Errorf("not at rest %s after the last fault", settleWithin)
	}
	if err := r.watched.settled(bounded, r.serving); err != nil {
		r.row.Unsettled++
		return err
	}
	r.journal.add("at rest after %s", time.Since(began))
	return nil
}

// releaseAll releases all wanted claims concurrently.
func (r *run) releaseAll(ctx context.Context) error {
	var group errgroup.Group
	group.SetLimit(16)
	for i, id := range r.holders.wanted() {
		group.Go(func() error { return r.holders.release(ctx, id, i%2 == 0) })
	}
	return group.Wait()
}

// releaseOf releases the claims of a group, also those that an interrupted caller has given up:
// they would fill a small group, and those of a group whose Machines never come would never be at
// rest.
func (r *run) releaseOf(ctx context.Context, g *group) error {
	for _, id := range slices.Concat(r.holders.wanted(), r.holders.unreleased()) {
		if c := r.auditor.Claim(id); c != nil && c.Group == g.name {
			if err := r.holders.release(ctx, id, false); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// settle checks twice: with the wanted claims, and after their release.
func (r *run) settle(ctx context.Context) error {
	if err := r.rest(ctx); err != nil {
		return err
	}
	if err := r.releaseAll(ctx); err != nil {
		return err
	}
	return r.rest(ctx)
}

// with builds groups, runs do, and removes the groups once everything has come to rest.
func (r *run) with(ctx context.Context, groups []*group, do func() error) error {
	if err := r.build(ctx, groups...); err != nil {
		return fmt.Errorf("building node groups: %w", err)
	}
	if err := do(); err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	if err := r.raze(ctx, groups...); err != nil {
		return fmt.Errorf("taking node groups down: %w", err)
	}
	return nil
}

// killing kills each of the components at random intervals until stop is called: mostly some time
// after it is ready, sometimes while it starts.
func (r *run) killing(ctx context.Context, least, most time.Duration, components ...string) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var working sync.WaitGroup
	for _, c := range components {
		working.Go(func() {
			for wait(ctx, between(least, most)) == nil {
				_ = r.kill(c) // it may already be dead
				if wait(ctx, 2*restartAfter) != nil {
					return
				}
				if rand.IntN(4) > 0 {
					_ = r.Sandbox.WaitReady(ctx, c)
				}
			}
		})
	}
	return func() {
		cancel()
		working.Wait()
	}
}

// counts are totals at one moment.
type counts struct {
	kills, faults, claims, releases, violations, odd, strange, mistold int
}

func (s *environment) counts() counts {
	_, mistold := s.watched.check()
	return counts{
		kills: int(s.kills.Load()), faults: int(s.count.Load()),
		claims: s.auditor.Count(func(c invariants.ClaimRecord) bool { return c.Group != "" && (c.Entered || c.Releasing) }),
		releases: s.auditor.Count(func(c invariants.ClaimRecord) bool {
			return c.Group != "" && c.Releasing && c.Phase == agentv1.PhaseEnded
		}),
		violations: len(s.auditor.Violations()), odd: len(s.holders.oddities()), strange: len(s.strangeWrites()),
		mistold: len(mistold),
	}
}

// tally assigns the violations to the row's columns.
func (r *Row) tally() {
	for _, v := range r.Violations {
		switch v.Rule {
		case invariants.NothingLeaked, invariants.UnwantedClaims, invariants.MaxSize:
			r.Leaked += v.Count
		case invariants.OneClaimOneMachine, invariants.OneProviderID:
			r.Duplicated += v.Count
		case invariants.NothingTaken, invariants.WantedClaims:
			r.Innocent += v.Count
		default: // something is still in progress, or the numbers do not agree; counted once each time rest was not reached
		}
	}
}

// Run starts everything, runs the scenarios, and stops everything. The error is why it could not
// run; failures of the product are in the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	chosen, err := choose(o)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	s, err := newEnvironment(ctx, o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	report := &Report{Logs: s.Sandbox.State().Paths.Logs, points: s.points, short: o.Short, full: len(o.Scenarios) == 0}
	o.Say("chaos: the sandbox is up after %.0f s", time.Since(began).Seconds())
	for _, scenario := range chosen {
		row := s.play(ctx, o, scenario)
		report.Rows = append(report.Rows, row)
		if row.Err != nil {
			o.Say("  %v", row.Err)
		}
		for _, v := range row.Violations {
			o.Say("  %s", v)
		}
		if row.Err == nil {
			continue
		}
		if err := s.clear(ctx); err != nil {
			o.Say("  what it left cannot be taken down, so the rest is left out: %v", err)
			break
		}
	}
	report.Took = time.Since(began)
	var wrong []string
	report.Calls, report.Claims, wrong = s.holders.told.Check()
	var mistold []string
	report.Streams, mistold = s.watched.check()
	report.Strange = slices.Concat(s.strangeWrites(), s.holders.oddities(), wrong, mistold)
	return report, context.Cause(ctx)
}

// choose returns the requested scenarios.
func choose(o Options) ([]*scenario, error) {
	all := lo.Filter(scenarios(), func(s *scenario, _ int) bool { return !o.Short || s.short != nil })
	if len(o.Scenarios) == 0 {
		return all, nil
	}
	var chosen []*scenario
	for _, name := range o.Scenarios {
		s, found := lo.Find(all, func(s *scenario) bool { return s.name == name })
		if !found {
			return nil, fmt.Errorf("there is no scenario %q; there are: %s", name,
				strings.Join(lo.Map(all, func(s *scenario, _ int) string { return s.name }), ", "))
		}
		chosen = append(chosen, s)
	}
	return chosen, nil
}

// play runs one scenario as often as requested.
func (s *environment) play(ctx context.Context, o Options, scenario *scenario) *Row {
	row := &Row{Scenario: scenario.name}
	began, before := time.Now(), s.counts()
	o.Say("chaos: %s: %s", scenario.name, scenario.about)
	s.journal.add("SCENARIO %s", scenario.name)
	for range max(1, o.Rounds) {
		bounded, cancel := context.WithTimeoutCause(ctx, scenarioWithin, errors.New("the scenario takes too long"))
		do := scenario.run
		if o.Short {
			do = scenario.short
		}
		r := &run{environment: s, options: o, scenario: scenario, row: row, short: o.Short}
		err := do(bounded, r)
		if cause := context.Cause(bounded); err != nil && cause != nil {
			err = errors.Join(err, cause)
		}
		cancel()
		row.Runs++
		if row.Err = err; err != nil {
			break
		}
	}
	after := s.counts()
	row.Took = time.Since(began)
	row.Kills, row.Faults = after.kills-before.kills, after.faults-before.faults
	row.Claims, row.Releases = after.claims-before.claims, after.releases-before.releases
	row.Violations = append(row.Violations, s.auditor.Violations()[before.violations:]...)
	row.tally()
	if odd := s.holders.oddities()[before.odd:]; len(odd) > 0 && row.Err == nil {
		row.Err = fmt.Errorf("%d answers that no agent may give, such as: %s", len(odd), odd[0])
	}
	if _, _, wrong := s.holders.told.Check(); len(wrong) > 0 {
		row.Err = errors.Join(row.Err, fmt.Errorf("%d claims of which callers were told what cannot be, such as: %s", len(wrong), wrong[0]))
	}
	if _, mistold := s.watched.check(); len(mistold) > before.mistold {
		row.Err = errors.Join(row.Err, fmt.Errorf("watchers were told what cannot be: %s", streams.Summary(mistold[before.mistold:])))
	}
	if strange := s.strangeWrites()[before.strange:]; len(strange) > 0 && row.Err == nil {
		row.Err = fmt.Errorf("%d writes of no known class, such as: %s", len(strange), strange[0])
	}
	o.Say("  %s", row)
	return row
}

// pointsLeft lists fail points.
func pointsLeft(points []faults.Point) string {
	return strings.Join(lo.Map(points, func(p faults.Point, _ int) string { return fmt.Sprintf("%s %q", p.When, string(p.Class)) }), ", ")
}

// List writes the scenarios with their descriptions.
func List(w io.Writer) {
	for _, s := range scenarios() {
		_, _ = fmt.Fprintf(w, "%s%s: %s\n", s.name, lo.Ternary(s.short != nil, " (also in the short form)", ""), s.about)
	}
}
