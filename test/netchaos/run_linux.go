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
	"github.com/karpenter-capi/karpenter-capi/test/journey"
	"github.com/karpenter-capi/karpenter-capi/test/metrics"
)

const (
	// podsWithin is how long pods may take to run or to go, on any link that anything passes.
	podsWithin = 5 * time.Minute
	// settleWithin is how long everything may take to come to rest on a good link.
	settleWithin = 2 * time.Minute
	// noticedWithin is how long a shim may take a dead connection for a live one: 30 s, by three heartbeats or gRPC's keepalive, and time to be late.
	noticedWithin = 45 * time.Second
	// backWithin is how long a shim may take to follow the agents again: once the link is good, or once it knows that the connection is dead. A name is
	// resolved again at most every 30 s.
	backWithin = time.Minute
	// forgottenWithin is how long an agent may keep the connection of a shim that has left it: 40 s by keepalive, and time to be late.
	forgottenWithin = time.Minute
	// rounds is how often pods come and go in a scenario without an outage.
	rounds = 2
	// step is how long the number of pods stays the same in an outage.
	step = 3 * time.Second
)

// Options say what to run.
type Options struct {
	// Name of the sandbox.
	Name string
	// Scenarios are those whose name matches; nil for all.
	Scenarios *regexp.Regexp
	// Pods is how many pods, and Nodes, there are at most beside those that stay.
	Pods int
	// Compress is what the longest partition, and the product's own periods in all scenarios, are divided by. One for as they are.
	Compress int
	// Seed decides how many pods there are at each moment of an outage.
	Seed uint64
	// Say is told what happens. REQUIRED.
	Say func(format string, args ...any)
}

// Row is what came of one scenario.
type Row struct {
	Scenario string
	// RTT is the link's.
	RTT time.Duration
	// Outage says that the link was good but for an outage, and Lasted how long that was; zero if it did not end.
	Outage bool
	Lasted time.Duration
	// Launches are from the creation of NodeClaims to Karpenter's having the answer of Create.
	Launches journey.Latency
	// Call is the median time of a CreateClaim call while nothing else happens, without an outage.
	Call time.Duration
	// Create is the mean time of the shim's Create calls, of which there were Creates. Failed is how many calls of its cloud provider failed.
	Create          time.Duration
	Creates, Failed int
	// Prompt is how many of the Create calls certainly took less than two round trips, by the shim's own histogram. Less than zero where that has no
	// bound between one and two.
	Prompt int
	// Noticed is how long after the outage's begin the shim knew, and NotReady how long after it the node class said so. Zero for never.
	Noticed, NotReady time.Duration
	// Back is how long after the link was good again, or after Noticed if it never was, the shim followed the agents; zero if it never ceased to.
	// Ready is the same of the node class.
	Back, Ready time.Duration
	// Lost is how many packets the link lost.
	Lost int
	Took time.Duration
	// Err is what is wrong.
	Err error
}

// violated is an error that names what does not hold.
type violated struct{ violations []invariants.Violation }

func (v *violated) Error() string {
	return "invariants are violated:\n" + invariants.Describe(v.violations)
}

// Run brings everything up, runs the scenarios and takes everything down. The program must be [badlink.Apart]. The error says what kept it from
// running at all; what came of it, and what the product did wrong, is in the report.
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
	s, err := newStage(ctx, o)
	if err != nil {
		return nil, err
	}
	o.Say("netchaos: the sandbox is up after %.0f s; seed %d", time.Since(began).Seconds(), o.Seed)
	report := &Report{Logs: s.Sandbox.State().Paths.Logs, Compress: o.Compress}
	random := rand.New(rand.NewPCG(o.Seed, o.Seed))
	for _, scenario := range chosen {
		o.Say("netchaos: %s: %s", scenario.name, scenario.about)
		row := (&run{stage: s, options: o, random: random}).play(ctx, scenario)
		report.Rows = append(report.Rows, row)
		o.Say("  %s", row)
		if row.Err != nil {
			// What it left would be in the way of the next one.
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
	*stage

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
	row.Launches = journey.LatencyOf(lo.Filter(r.Recorder.State().Journeys, func(j journey.Journey, _ int) bool {
		return j.At(journey.Created).After(began)
	}), journey.Created, journey.Launched)
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
		err = r.breathe(ctx, scenario.conditions)
	} else {
		err = r.endure(ctx, scenario.outage)
	}
	if err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	return r.awaitOneConnection(ctx)
}

// breathe has pods come and go while the link is as it is.
func (r *run) breathe(ctx context.Context, conditions badlink.Conditions) error {
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

// endure has pods come and go in an outage, and everything be as before it afterwards.
func (r *run) endure(ctx context.Context, o *outage) error {
	if err := r.scaleAndWait(ctx, r.options.Pods/2); err != nil {
		return err
	}
	if err := o.begin(ctx, r.stage); err != nil {
		return err
	}
	began := time.Now()
	if o.lasts == 0 {
		if err := r.endureUntilBack(ctx, began); err != nil {
			return err
		}
	} else {
		r.row.Lasted = o.lasts
		if o.compressed {
			r.row.Lasted /= time.Duration(r.options.Compress)
		}
		over := time.NewTimer(r.row.Lasted)
		defer over.Stop()
		if err := r.restlessly(ctx, over.C); err != nil {
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

// restlessly changes how many pods there are until the channel has something.
func (r *run) restlessly(ctx context.Context, until <-chan time.Time) error {
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

// endureUntilBack changes how many pods there are until the shim has noticed the outage and found another way.
func (r *run) endureUntilBack(ctx context.Context, began time.Time) error {
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
	if err := r.restlessly(ctx, back); err != nil {
		return err
	}
	lost, notReady := r.watch.lostAfter(began)
	return errors.Join(context.Cause(ctx), r.note(began, lost, lost, notReady))
}

// awaitBack waits until the shim follows the agents, and is Ready, on a link that has been good since a time.
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

// note writes down what became known of an outage that began at a time and could have been got over since another.
func (r *run) note(began, since, lost, notReady time.Time) error {
	if lost.IsZero() {
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

// awaitOneConnection waits until the agents have forgotten connections that the shim has left.
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

// poll asks until the answer is yes.
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

// counters since the processes began.
type counters struct {
	creates  int
	creating time.Duration
	// bounds has how many creates took no longer.
	bounds map[time.Duration]int
	failed float64
	lost   int
}

func (r *run) read(ctx context.Context) (counters, error) {
	families, err := metrics.Read(ctx, r.Sandbox.State().ShimMetrics)
	if err != nil {
		return counters{}, err
	}
	// Core asks for machines that are gone until it is told so, which is counted as another error.
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

// boundBetween returns the largest bound that is longer than least and no longer than most, and false if there is none.
func boundBetween(bounds map[time.Duration]int, least, most time.Duration) (time.Duration, bool) {
	fit := lo.Filter(slices.Collect(maps.Keys(bounds)), func(bound time.Duration, _ int) bool { return bound > least && bound <= most })
	return lo.Max(fit), len(fit) > 0
}
