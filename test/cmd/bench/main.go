// Command bench measures, on its own sandbox, how much longer machines take through claims than
// through a manual raise of replicas, which is as fast as Cluster API makes them. It alternates
// between both in one run, on the same node groups.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/loadgen"
)

const (
	// limit is the maximum time for claims until the last machine has its provider ID, as a
	// multiple of Cluster API's time without claims.
	limit = 1.10
	// join is how long a machine takes from its provider ID to its Node.
	join = 5 * time.Second
	// patience is the timeout of one round.
	patience = 10 * time.Minute
)

var errSlow = errors.New("machines take too long through claims")

type settings struct {
	name             string
	machines, rounds int
	serial           int
	boots            []time.Duration
}

func main() {
	var s settings
	boots := flag.String("boot", "0s,2s", "`Delays` between a Machine's creation and its provider ID, separated by commas.")
	flag.StringVar(&s.name, "name", "bench", "Name of the sandbox.")
	flag.IntVar(&s.machines, "machines", 100, "Number of machines that are requested at once.")
	flag.IntVar(&s.rounds, "rounds", 3, "Number of times that each way is measured.")
	flag.IntVar(&s.serial, "serial", 10,
		"Number of machines that are requested one after the other, each as soon as the previous one exists. 0 omits this measurement.")
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, s, strings.Split(*boots, ",")); err != nil {
		if !errors.Is(err, errSlow) { // it has been reported already
			say("bench: FAIL %v", err)
		}
		stop()
		os.Exit(1) //nolint:gocritic // nothing but stop is deferred
	}
}

func run(ctx context.Context, s settings, boots []string) error {
	for _, boot := range boots {
		d, err := time.ParseDuration(boot)
		if err != nil {
			return fmt.Errorf("--boot: %w", err)
		}
		s.boots = append(s.boots, d)
	}
	env, err := loadgen.Start(ctx, sandbox.Options{Name: s.name})
	if err != nil {
		return err
	}
	defer env.Stop()
	worst := map[milestone]float64{}
	say("%d machines, median of %d rounds each\n", s.machines, s.rounds)
	say("%-12s %6s  %-24s %10s %10s %6s   %s", "node groups", "boot", "until the last machine", "by hand", "by claims", "ratio", "rounds")
	for _, boot := range s.boots {
		for _, groups := range []int{1, 5} {
			c := course{env: env, machines: s.machines, cpu: map[string]processors{byHand: {}, byClaims: {}}}
			for i := range groups {
				c.groups = append(c.groups, fmt.Sprintf("bench-%d-%d-%s", groups, i, boot))
			}
			hand, claims, calls, err := c.measure(ctx, s.rounds, boot)
			if err != nil {
				return fmt.Errorf("%d node groups, boot %s: %w", groups, boot, err)
			}
			for m := range milestones {
				ratio := median(claims[m]).Seconds() / median(hand[m]).Seconds()
				worst[m] = max(worst[m], ratio)
				say("%-12d %6s  %-24s %10s %10s %6.2f   by hand %s; by claims %s",
					groups, boot, m, round(median(hand[m])), round(median(claims[m])), ratio, all(hand[m]), all(claims[m]))
			}
			say("%-12s %6s  CreateClaim p50 %s, p99 %s", "", "", round(percentile(calls, 50)), round(percentile(calls, 99)))
			say("%-12s %6s  processor seconds by hand: %s; by claims: %s", "", "", c.cpu[byHand].per(s.rounds), c.cpu[byClaims].per(s.rounds))
			if groups == 1 && s.serial > 0 {
				took, err := c.serial(ctx, s.serial)
				if err != nil {
					return fmt.Errorf("one after the other, boot %s: %w", boot, err)
				}
				say("%-12s %6s  %10s for %d machines, one after the other", "", boot, round(took), s.serial)
			}
		}
	}
	verdict := lo.Ternary(worst[served] <= limit, "PASS", "FAIL")
	say("bench: %s ratio-made=%.2f ratio-served=%.2f ratio-joined=%.2f", verdict, worst[made], worst[served], worst[joined])
	if verdict != "PASS" {
		return errSlow
	}
	return nil
}

// The two ways of getting machines.
const (
	byHand   = "by hand"
	byClaims = "by claims"
)

// milestone is a stage that the last machine has reached.
type milestone int

const (
	made   milestone = iota // the Machine exists
	served                  // it has a provider ID and, if claimed, the agent reports it
	joined                  // Cluster API has seen its Node
	milestones
)

func (m milestone) String() string {
	return [...]string{"is made", "has its provider ID", "has its Node"}[m]
}

// course is the workload that is run repeatedly: machines on some node groups.
type course struct {
	env      *loadgen.Env
	machines int
	groups   []string
	claimed  int
	// cpu is the CPU time of each way over all rounds, by component.
	cpu map[string]processors
}

// measure alternates between the two ways, so that other load on the machine affects both alike. It
// returns the time of each round to each milestone.
func (c *course) measure(
	ctx context.Context, rounds int, boot time.Duration,
) (hand, claims [milestones][]time.Duration, calls []time.Duration, err error) {
	for _, name := range c.groups {
		if err := c.env.CreateGroup(ctx, loadgen.Group{Name: name, Boot: boot, Join: join}); err != nil {
			return hand, claims, nil, err
		}
	}
	ways := []func(context.Context) error{
		func(ctx context.Context) error {
			took, err := c.byHand(ctx)
			for m := range milestones {
				hand[m] = append(hand[m], took[m])
			}
			return err
		},
		func(ctx context.Context) error {
			took, each, err := c.byClaims(ctx)
			for m := range milestones {
				claims[m] = append(claims[m], took[m])
			}
			calls = append(calls, each...)
			return err
		},
	}
	for range rounds {
		for _, way := range ways {
			bounded, cancel := context.WithTimeout(ctx, patience)
			err := way(bounded)
			cancel()
			if err != nil {
				return hand, claims, nil, err
			}
		}
		slices.Reverse(ways) // so that neither is always second
	}
	return hand, claims, calls, nil
}

// await waits until the given number of the course's machines have reached a milestone, according
// to the hub's Machines.
func (c *course) await(ctx context.Context, m milestone) error {
	reached := func(machine loadgen.Machine) bool {
		return slices.Contains(c.groups, machine.Group) && (m < served || machine.ProviderID != "") && (m < joined || machine.Node != "")
	}
	return c.env.AwaitMachines(ctx, func(machines []loadgen.Machine) string {
		n := lo.CountBy(machines, reached)
		return lo.Ternary(n == c.machines, "", fmt.Sprintf("%d Machines of which the last %s: %d do", c.machines, m, n))
	})
}

// byHand raises replicas and returns the time to each milestone.
func (c *course) byHand(ctx context.Context) (took [milestones]time.Duration, err error) {
	before, began := used(c.env.Sandbox), time.Now()
	if err := c.scale(ctx, c.machines/len(c.groups)); err != nil {
		return took, err
	}
	for m := range milestones {
		if err := c.await(ctx, m); err != nil {
			return took, err
		}
		took[m] = time.Since(began)
		if m == served {
			c.charge(byHand, before)
		}
	}
	if err := c.scale(ctx, 0); err != nil {
		return took, err
	}
	return took, c.env.AwaitGone(ctx, c.groups...)
}

func (c *course) scale(ctx context.Context, replicas int) error {
	_, err := loadgen.AtOnce(ctx, c.groups, func(ctx context.Context, name string) error { return c.env.Scale(ctx, name, replicas) })
	return err
}

// byClaims claims as many machines and returns the time to each milestone, and the duration of each
// call.
func (c *course) byClaims(ctx context.Context) (took [milestones]time.Duration, calls []time.Duration, err error) {
	requested := c.newRequests(c.machines)
	before, began := used(c.env.Sandbox), time.Now()
	if calls, err = c.env.Claim(ctx, requested); err != nil {
		return took, nil, err
	}
	for m := range milestones {
		if err := c.await(ctx, m); err != nil {
			return took, nil, err
		}
		if m == served {
			if err := c.env.AwaitServed(ctx, requested); err != nil {
				return took, nil, err
			}
			c.charge(byClaims, before)
		}
		took[m] = time.Since(began)
	}
	return took, calls, c.releaseJoined(ctx, requested)
}

// serial claims machines one after the other, as if each raise of replicas had to complete before
// the next.
func (c *course) serial(ctx context.Context, machines int) (time.Duration, error) {
	requested := c.newRequests(machines)
	began := time.Now()
	for _, w := range requested {
		if _, err := c.env.Claim(ctx, []loadgen.ClaimRequest{w}); err != nil {
			return 0, err
		}
		if err := c.env.AwaitServed(ctx, []loadgen.ClaimRequest{w}); err != nil {
			return 0, err
		}
	}
	took := time.Since(began)
	return took, c.releaseJoined(ctx, requested)
}

func (c *course) releaseJoined(ctx context.Context, requested []loadgen.ClaimRequest) error {
	// A Machine without its Node would be handed over instead of being removed.
	ids := lo.SliceToMap(requested, func(w loadgen.ClaimRequest) (string, bool) { return w.ID, true })
	if err := c.env.AwaitMachines(ctx, func(machines []loadgen.Machine) string {
		joined := lo.CountBy(machines, func(m loadgen.Machine) bool { return ids[m.Claim] && m.Node != "" })
		return lo.Ternary(joined == len(requested), "", fmt.Sprintf("%d Nodes to join: %d have", len(requested), joined))
	}); err != nil {
		return err
	}
	if _, err := c.env.Release(ctx, requested); err != nil {
		return err
	}
	return c.env.AwaitGone(ctx, c.groups...)
}

// newRequests distributes claims with new ids over the node groups.
func (c *course) newRequests(n int) []loadgen.ClaimRequest {
	c.claimed += n
	return lo.Times(n, func(i int) loadgen.ClaimRequest {
		group := c.groups[i%len(c.groups)]
		return loadgen.ClaimRequest{ID: fmt.Sprintf("%s-%d", group, c.claimed-i), Groups: []string{group}}
	})
}

// charge adds the CPU time used since then to a way's total.
func (c *course) charge(way string, since processors) {
	for component, now := range used(c.env.Sandbox) {
		c.cpu[way][component] += now - since[component]
	}
}

func median(d []time.Duration) time.Duration { return percentile(d, 50) }

// percentile returns the smallest value that p percent of the values do not exceed.
func percentile(d []time.Duration, p int) time.Duration {
	sorted := slices.Sorted(slices.Values(d))
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}

func all(d []time.Duration) string {
	return strings.Join(lo.Map(d, func(d time.Duration, _ int) string { return round(d).String() }), " ")
}

func round(d time.Duration) time.Duration {
	return d.Round(lo.Ternary(d < time.Second, time.Millisecond, 10*time.Millisecond))
}

func say(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }
