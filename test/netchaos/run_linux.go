package netchaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/test/badlink"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/metrics"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	// podsWithin is how long pods may take to run or to end, on any link that passes something.
	podsWithin = 5 * time.Minute
	// settleWithin is how long everything may take to come to rest on a good link.
	settleWithin = 2 * time.Minute
	// noticedWithin is how long a shim may take to notice a dead connection: 30 s, by three
	// heartbeats or gRPC's keepalive, plus a margin.
	noticedWithin = 45 * time.Second
	// backWithin is how long a shim may take to follow the agents again, once the link is good or
	// once it knows that the connection is dead. A name is resolved again at most every 30 s.
	backWithin = time.Minute
	// forgottenWithin is how long an agent may keep the connection of a shim that has left it: 40 s
	// by keepalive, plus a margin.
	forgottenWithin = time.Minute
	// rounds is how often pods come and go in a scenario without an outage.
	rounds = 2
	// step is how long the number of pods stays constant during an outage.
	step = 3 * time.Second
)

// Options configures a run.
type Options struct {
	// Name is the name of the sandbox.
	Name string
	// Scenarios matches the names of the scenarios to run. Nil means all.
	Scenarios *regexp.Regexp
	// Pods is the maximum number of pods, and Nodes, besides those that stay.
	Pods int
	// Compress divides the longest partition, and the product's own periods in all scenarios. One
	// leaves them unchanged.
	Compress int
	// Seed determines the numbers of pods during an outage.
	Seed uint64
	// Say prints progress. REQUIRED.
	Say func(format string, args ...any)
}

// Row is the result of one scenario.
type Row struct {
	Scenario string
	// RTT is the link's round-trip time.
	RTT time.Duration
	// Outage is set if the link was good except for an outage. Lasted is the outage's duration, or
	// zero if it did not end.
	Outage bool
	Lasted time.Duration
	// Launches are the times from the creation of NodeClaims to Karpenter's receipt of Create's
	// result.
	Launches timeline.Latency
	// Call is the median time of a CreateClaim call while nothing else happens, without an outage.
	Call time.Duration
	// Create is the mean duration of the shim's Create calls, and Creates their number. Failed is
	// the number of failed calls of its cloud provider.
	Create          time.Duration
	Creates, Failed int
	// Prompt is the number of Create calls that certainly took less than two round trips, according
	// to the shim's histogram. It is negative if the histogram has no bound between one and two
	// round trips.
	Prompt int
	// Noticed is the time from the beginning of the outage until the shim noticed it, and NotReady
	// the time until its NodeClass reported it. Zero means never.
	Noticed, NotReady time.Duration
	// Back is the time until the shim followed the agents again, from when the link was good again,
	// or from Noticed if it never was. It is zero if the shim never lost them. Ready is the same
	// for the NodeClass.
	Back, Ready time.Duration
	// Lost is the number of packets that the link lost.
	Lost int
	Took time.Duration
	// Err is what is wrong.
	Err error
}

// violated is an error that lists violations.
type violated struct{ violations []invariants.Violation }

func (v *violated) Error() string {
	return "invariants are violated:\n" + invariants.Describe(v.violations)
}

// Run starts everything, runs the scenarios, and stops everything. The program must have called
// [badlink.Apart]. The error is why it could not run at all; the results, including failures of the
// product, are in the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	chosen := lo.Filter(scenarios(), func(s scenario, _ int) bool {
		return s.name == good.name || o.Scenarios == nil || o.Scenarios.MatchString(s.name)
	})
	switch {
	case len(chosen) == 1 && o.Scenarios != nil && !o.Scenarios.MatchString(good.name):
		return nil, fmt.Errorf("no scenario's name matches %q; there are: %s", o.Scenarios,
			strings.Join(lo.Map(scenarios(), func(s scenario, _ int) string { return s.name }), ", "))
	case o.Pods < 1 || o.Compress < 1:
		return nil, errors.New("there have to be pods, and what periods are divided by is at least 1")
	}
	began := time.Now()
	s, err := newEnvironment(ctx, o)
	if err != nil {
		return nil, err
	}
	o.Say("netchaos: the sandbox is up after %.0f s; seed %d", time.Since(began).Seconds(), o.Seed)
	report := &Report{Logs: s.Sandbox.State().Paths.Logs, Compress: o.Compress}
	random := rand.New(rand.NewPCG(o.Seed, o.Seed))
	for _, scenario := range chosen {
		o.Say("netchaos: %s: %s", scenario.name, scenario.about)
		row := (&run{environment: s, options: o, random: random}).play(ctx, scenario)
		report.Rows = append(report.Rows, row)
		o.Say("  %s", row)
		if row.Err != nil {
			// What it left behind would affect the next scenario.
			break
		}
	}
	report.check()
	report.Err = errors.Join(context.Cause(ctx), s.stop())
	report.Took = time.Since(began)
	return report, nil //nolint:nilerr // it is in its row
}

// run is one run of one scenario.
type run struct {
	*environment

	options Options
	random  *rand.Rand
	row     Row
}

// play runs a scenario, and leaves the link good.
func (r *run) play(ctx context.Context, scenario scenario) *Row {
	row := &r.row
	row.Scenario, row.RTT, row.Outage, row.Prompt = scenario.name, scenario.conditions.RTT, scenario.outage != nil, -1
	began, restarts := time.Now(), r.restarts()
	before, err := r.read(ctx)
	if err == nil {
		err = r.course(ctx, scenario)
	}
	if err == nil {
		var after counters
		after, err = r.read(ctx)
		row.Creates, row.Failed = after.creates-before.creates, int(after.failed-before.failed)
		row.Lost = after.lost - before.lost
		if bound, ok := boundBetween(after.bounds, row.RTT, 2*row.RTT); ok {
			row.Prompt = after.bounds[bound] - before.bounds[bound]
		}
		if row.Creates > 0 {
			row.Create = (after.creating - before.creating) / time.Duration(row.Creates)
		}
	}
	row.Launches = timeline.LatencyOf(lo.Filter(r.Recorder.State().Timelines, func(j timeline.Timeline, _ int) bool {
		return j.At(timeline.Created).After(began)
	}), timeline.Created, timeline.Launched)
	if incidents := r.bystander.Incidents(); len(incidents) > 0 {
		err = errors.Join(err, fmt.Errorf("%d things happened to what should stay as it is, such as: %s", len(incidents), incidents[0]))
	}
	if died := r.restarts() - restarts; died > 0 {
		err = errors.Join(err, fmt.Errorf("agents or shim died %d times", died))
	}
	row.Err, row.Took = errors.Join(err, r.link.Set(badlink.Conditions{})), time.Since(began)
	return row
}

func (r *run) course(ctx context.Context, scenario scenario) error {
	var err error
	if scenario.outage == nil {
		err = r.scaleUnder(ctx, scenario.conditions)
	} else {
		err = r.scaleThrough(ctx, scenario.outage)
	}
	if err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	return r.awaitOneConnection(ctx)
}

// scaleUnder lets pods come and go under constant conditions.
func (r *run) scaleUnder(ctx context.Context, conditions badlink.Conditions) error {
	if err := r.link.Set(conditions); err != nil {
		return err
	}
	for range rounds {
		for _, pods := range []int{r.options.Pods, 0} {
			if err := r.scaleAndWait(ctx, pods); err != nil {
				return err
			}
		}
	}
	var err error
	if r.row.Call, err = r.callAlone(ctx); err != nil {
		return err
	}
	return r.link.Set(badlink.Conditions{})
}

// scaleThrough lets pods come and go during an outage, and verifies that everything recovers
// afterwards.
func (r *run) scaleThrough(ctx context.Context, o *outage) error {
	if err := r.scaleAndWait(ctx, r.options.Pods/2); err != nil {
		return err
	}
	if err := o.begin(ctx, r.environment); err != nil {
		return err
	}
	began := time.Now()
	if o.lasts == 0 {
		if err := r.scaleUntilBack(ctx, began); err != nil {
			return err
		}
	} else {
		r.row.Lasted = o.lasts
		if o.compressed {
			r.row.Lasted /= time.Duration(r.options.Compress)
		}
		over := time.NewTimer(r.row.Lasted)
		defer over.Stop()
		if err := r.scaleUntil(ctx, over.C); err != nil {
			return err
		}
		if err := r.link.Set(badlink.Conditions{}); err != nil {
			return err
		}
		if err := r.awaitBack(ctx, began, time.Now()); err != nil {
			return err
		}
	}
	for _, pods := range []int{r.options.Pods, 0} {
		if err := r.scaleAndWait(ctx, pods); err != nil {
			return err
		}
	}
	return nil
}

// scaleUntil changes the number of pods until the channel receives a value.
func (r *run) scaleUntil(ctx context.Context, until <-chan time.Time) error {
	ticker := time.NewTicker(step)
	defer ticker.Stop()
	for {
		if err := r.scale(ctx, r.random.IntN(r.options.Pods+1)); err != nil {
			return err
		}
		select {
		case <-until:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

// scaleUntilBack changes the number of pods until the shim has noticed the outage and has found
// another way.
func (r *run) scaleUntilBack(ctx context.Context, began time.Time) error {
	ctx, cancel := context.WithTimeoutCause(ctx, noticedWithin+backWithin,
		fmt.Errorf("the shim does not follow the agents again within %s", noticedWithin+backWithin))
	defer cancel()
	back := make(chan time.Time)
	go func() {
		defer close(back)
		_ = poll(ctx, func() bool {
			lost, _ := r.watch.lostAfter(began)
			if lost.IsZero() {
				return false
			}
			found, _ := r.watch.backAfter(lost)
			return !found.IsZero()
		})
	}()
	if err := r.scaleUntil(ctx, back); err != nil {
		return err
	}
	lost, notReady := r.watch.lostAfter(began)
	return errors.Join(context.Cause(ctx), r.note(began, lost, lost, notReady))
}

// awaitBack waits until the shim follows the agents and is Ready. The link must have been good
// since the given time.
func (r *run) awaitBack(ctx context.Context, began, since time.Time) error {
	ctx, cancel := context.WithTimeoutCause(ctx, backWithin, fmt.Errorf("the shim does not follow the agents %s after the outage", backWithin))
	defer cancel()
	if err := poll(ctx, func() bool {
		connected, ready, err := r.watch.now()
		return connected && ready && err == nil
	}); err != nil {
		return err
	}
	lost, notReady := r.watch.lostAfter(began)
	return r.note(began, since, lost, notReady)
}

// note records the effects of an outage that began at the one time and could have been overcome
// since the other.
func (r *run) note(began, since, lost, notReady time.Time) error {
	switch {
	case lost.IsZero() && r.row.Lasted >= noticedWithin:
		return fmt.Errorf("the shim took a dead connection for a live one, for all of %s", r.row.Lasted)
	case lost.IsZero():
		return nil
	}
	if r.row.Noticed = lost.Sub(began); r.row.Noticed > noticedWithin {
		return fmt.Errorf("the shim took a dead connection for a live one for %s", r.row.Noticed)
	}
	later := func(a, b time.Time) time.Time { return lo.Ternary(a.After(b), a, b) }
	connected, _ := r.watch.backAfter(later(since, lost))
	r.row.Back = connected.Sub(since)
	if !notReady.IsZero() {
		r.row.NotReady = notReady.Sub(began)
		_, ready := r.watch.backAfter(later(since, notReady))
		r.row.Ready = ready.Sub(since)
	}
	return nil
}

// awaitOneConnection waits until the agents have dropped connections that the shim has left.
func (r *run) awaitOneConnection(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, forgottenWithin, errors.New("an agent keeps connections that the shim has left"))
	defer cancel()
	var failed error
	err := poll(ctx, func() bool {
		var held int
		held, failed = r.link.Connections()
		return held == 1 && failed == nil
	})
	return errors.Join(err, failed)
}

// poll polls until the condition is true.
func poll(ctx context.Context, is func() bool) error {
	ticker := time.NewTicker(sampleInterval)
	defer ticker.Stop()
	for !is() {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
	return nil
}

// counters are totals since the processes began.
type counters struct {
	creates  int
	creating time.Duration
	// bounds maps histogram bounds to the number of creates within them.
	bounds map[time.Duration]int
	failed float64
	lost   int
}

func (r *run) read(ctx context.Context) (counters, error) {
	families, err := metrics.Read(ctx, r.Sandbox.State().ShimMetrics)
	if err != nil {
		return counters{}, err
	}
	// Core asks for machines that are gone until it gets a NotFound, which is counted as another
	// error.
	c := counters{
		failed: families.Sum("karpenter_cloudprovider_errors_total", metrics.Labels{"error": "unknown"}), bounds: map[time.Duration]int{},
	}
	for _, m := range families.Of("karpenter_cloudprovider_duration_seconds", metrics.Labels{"method": "Create"}) {
		for _, bucket := range m.GetHistogram().GetBucket() {
			if bound := bucket.GetUpperBound(); !math.IsInf(bound, 1) {
				c.bounds[time.Duration(bound*float64(time.Second))] += int(bucket.GetCumulativeCount())
			}
		}
		c.creates += int(m.GetHistogram().GetSampleCount())
		c.creating += time.Duration(m.GetHistogram().GetSampleSum() * float64(time.Second))
	}
	if c.creates == 0 {
		return counters{}, errors.New("the shim does not tell how long Create takes")
	}
	c.lost, err = r.link.Lost()
	return c, err
}

// boundBetween returns the largest bound that exceeds least and does not exceed most, or false if
// there is none.
func boundBetween(bounds map[time.Duration]int, least, most time.Duration) (time.Duration, bool) {
	fit := lo.Filter(slices.Collect(maps.Keys(bounds)), func(bound time.Duration, _ int) bool { return bound > least && bound <= most })
	return lo.Max(fit), len(fit) > 0
}
