package abuse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/loadgen"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// Limits. Each attack has its own limits of memory, except for memoryLimit; see docs/limits.md.
const (
	// slowdown limits the 99th percentile of the victim's calls during an attack, as a multiple of
	// that without one.
	slowdown = 2.0
	// memoryLimit leaves room for one identity at its worst. memoryOfAll is what all identities
	// together can occupy in addition to the agent's own memory (docs/sizing.md).
	memoryLimit, memoryOfAll = 1 << 30, 2 << 30
	// heapShare is the ratio of resident memory to held memory: Go collects garbage when the heap
	// has doubled (docs/performance.md).
	heapShare = 2
	// largestWrite is how much etcd grows by what counts as one request at most: 4 KiB of a
	// MachineClaim (docs/limits.md), to which the API server and etcd add their records.
	largestWrite = 8 * kibibyte
	// etcdSlack is how much more etcd may grow during an attack than at rest for other reasons:
	// Cluster API, and partly filled pages. Without rest to compare with, it also covers the
	// trickle.
	etcdSlack = 32 * mebibyte
	// roundWithin is the shim's --agent-timeout, which bounds a single call of a round. A new
	// connection may take as long.
	roundWithin = 10 * time.Second
	// endedClaims is --max-ended-claims-per-cluster. What agents create within a second may exceed
	// it (docs/claims.md).
	endedClaims, endedSlack = 10000, 500
	// servedWithin is how long after an attack the attackers' identities may still be refused.
	servedWithin = time.Minute
)

// servedAttempt bounds one attempt to be served again, including the client's own retries.
const servedAttempt = 2 * time.Second

const (
	startWithin = 10 * time.Minute
	// createdAtOnce is how many of the attackers' Clusters are created at once.
	createdAtOnce = 4
	// attackWithin bounds one attack with all its rounds.
	attackWithin = 30 * time.Minute
)

// Options configures a run.
type Options struct {
	// Name is the name of the sandbox.
	Name string
	// Attacks are the names of the attacks to run. Empty means all.
	Attacks []string
	// Tenants is the number of Clusters that carry out each attack at once, each with a certificate
	// and a node group of its own. Zero means one.
	Tenants int
	// Rounds is the number of alternations between rest and attack, and Claims the number of claims
	// that the victim makes in each of the two.
	Rounds, Claims int
	// Agents is the number of agents. Attacker and victim call the first.
	Agents int
	// Agent is the agent's executable. Empty means bin/capi-agent.
	Agent string
	// Untimed skips the judgement of times, which mean little on a machine that is busy with other
	// work, and the rest that attacks are compared with.
	Untimed bool
	// Say prints progress. REQUIRED.
	Say func(format string, args ...any)
	// Log receives the attackers' messages. Nil means standard error.
	Log io.Writer
}

// Row is the result of one attack.
type Row struct {
	Attack string
	// Tenants is the number of Clusters that have attacked at once.
	Tenants int
	Figures
	// Under summarises the victim's calls during the attack. Rest summarises those at rest, in the
	// phases of this attack and of the one before and after it: those of one attack have too few
	// calls for a 99th percentile, and those of the whole run were made in a hub with more and more
	// objects.
	Under, Rest Latencies
	// Ratio is by what factor the 99th percentile of the victim's calls exceeded that at rest, of
	// CreateClaim or of ReleaseClaim, whichever is larger. It is zero if times are not judged.
	Ratio float64
	// MemoryBefore and MemoryPeak are the attacked agent's memory, and MemoryBound is its limit.
	MemoryBefore, MemoryPeak, MemoryBound int64
	// Etcd is the growth of the hub's database during the attacks and until the attackers are
	// served again, EtcdBound its limit, and EtcdAtRest the growth in as many phases of rest, each
	// like the one with the least: a later one may still have writes that an attack has caused.
	Etcd, EtcdBound, EtcdAtRest int64
	// Ended is the number of ended claims in the hub afterwards, of the attackers' Cluster with the
	// most.
	Ended int
	// Served is how long the last of the attackers was still refused after the last attack.
	Served time.Duration
	// Took is the duration of the attacks, without the rest between them.
	Took time.Duration
	// Wrong lists the violations. Err is why the attack could not be carried out.
	Wrong []string
	Err   error

	// rest is what the victim's calls took between the rounds of this attack.
	rest samples
}

// Latencies summarises the durations of the victim's calls.
type Latencies struct {
	CreateP50, CreateP99, ReleaseP99, ConnectMax, RoundMax time.Duration
}

// ratio returns by what factor the 99th percentile of calls exceeds that at rest.
func (l Latencies) ratio(rest Latencies) float64 {
	return max(ratio(l.CreateP99, rest.CreateP99), ratio(l.ReleaseP99, rest.ReleaseP99))
}

func ratio(of, to time.Duration) float64 {
	if to == 0 {
		return 0
	}
	return of.Seconds() / to.Seconds()
}

// Good reports whether the attack was carried out without violations.
func (r *Row) Good() bool { return r.Err == nil && len(r.Wrong) == 0 }

func (r *Row) wrong(format string, args ...any) {
	r.Wrong = append(r.Wrong, fmt.Sprintf(format, args...))
}

// Names returns the names of the attacks.
func Names() []string { return lo.Map(attacks, func(a attack, _ int) string { return a.name }) }

// List writes the descriptions of all attacks.
func List(w io.Writer) {
	for _, a := range attacks {
		fmt.Fprintf(w, "%s: %s\n", a.name, a.about)
	}
}

// run is one run of the suite.
type run struct {
	Options

	env     *loadgen.Env
	victim  *victim
	order   order
	agents  []process
	attacks int
}

// Run starts a sandbox, attacks its agent, and stops it. The error is why there is no report, or
// only a partial one.
func Run(ctx context.Context, o Options) (*Report, error) {
	chosen := lo.CoalesceSliceOrEmpty(o.Attacks, Names())
	for _, name := range chosen {
		if _, err := attackOf(name); err != nil {
			return nil, err
		}
	}
	if o.Log == nil {
		o.Log = os.Stderr
	}
	o.Tenants = max(o.Tenants, 1)
	began := time.Now()
	r := &run{Options: o}
	if err := r.start(ctx); err != nil {
		return nil, err
	}
	defer r.stop()
	report := &Report{Tenants: o.Tenants, Timed: !o.Untimed, Logs: r.env.Sandbox.State().Paths.Logs}
	defer report.judgeTimes()
	for _, name := range chosen {
		a, err := attackOf(name)
		if err != nil {
			return nil, err
		}
		row := r.attack(ctx, a)
		report.Rows = append(report.Rows, row)
		report.Took = time.Since(began)
		o.Say("%s", row)
		if ctx.Err() != nil {
			return report, context.Cause(ctx)
		}
	}
	return report, nil
}

func (r *run) start(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	r.Say("a sandbox with %d agents comes up", r.Agents)
	if r.env, err = loadgen.Start(ctx, sandbox.Options{Name: r.Name, Agents: r.Agents, AgentBinary: r.Agent}); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			r.stop()
		}
	}()
	r.Say("victim and %d attackers get their node groups and claims", r.Tenants)
	if err := r.createAttackers(ctx); err != nil {
		return err
	}
	if r.victim, err = newVictim(ctx, r.env); err != nil {
		return err
	}
	if err := r.identify(); err != nil {
		return err
	}
	r.agents = agentsOf(r.env.Sandbox.State())
	return nil
}

// attackers returns the names of the attackers' Clusters, which are those of their node groups too.
func (r *run) attackers() []string {
	return lo.Times(r.Tenants, func(i int) string { return fmt.Sprintf("attacker-%d", i+1) })
}

func (r *run) createAttackers(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(createdAtOnce)
	for _, name := range r.attackers() {
		all.Go(func() error {
			if err := r.env.CreateCluster(ctx, name); err != nil {
				return err
			}
			// Like every tenant, an attacker may claim a few machines.
			return r.env.CreateGroup(ctx, loadgen.Group{Name: name, Cluster: name, Max: 10, Held: true})
		})
	}
	return all.Wait()
}

// identify issues the attackers' certificates.
func (r *run) identify() error {
	state := r.env.Sandbox.State()
	r.order = order{Address: state.AgentAddress, CAFile: state.Paths.AgentCA}
	for _, name := range r.attackers() {
		t := tenant{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: name},
			Group:   sandbox.ClusterNamespace + "/" + name,
		}
		identity := sandbox.ClusterIdentity(sandbox.ClusterNamespace, name, "")
		var err error
		if t.Identity.Certificate, t.Identity.Key, err = r.env.Sandbox.AgentCertificate(name, identity); err != nil {
			return err
		}
		// It is signed but has no rights.
		stranger := strings.Replace(identity, "/cluster/", "/nothing/", 1)
		if t.Stranger.Certificate, t.Stranger.Key, err = r.env.Sandbox.AgentCertificate("stranger-of-"+name, stranger); err != nil {
			return err
		}
		r.order.Tenants = append(r.order.Tenants, t)
	}
	return nil
}

func (r *run) stop() {
	if r.victim != nil {
		r.victim.close()
	}
	r.env.Stop()
}

// attack runs an attack, alternating with rest, and judges the result.
func (r *run) attack(ctx context.Context, a *attack) *Row {
	ctx, cancel := context.WithTimeout(ctx, attackWithin)
	defer cancel()
	r.Say("%s: %s", a.name, a.about)
	row := &Row{Attack: a.name, Tenants: r.Tenants}
	row.Err = func() error {
		first := r.agents[0]
		var err error
		if row.MemoryBefore, _, err = first.resident(); err != nil {
			return err
		}
		if err := first.forgetPeak(); err != nil {
			return err
		}
		if err := r.rounds(ctx, a, row); err != nil {
			return err
		}
		if _, row.MemoryPeak, err = first.resident(); err != nil {
			return err
		}
		row.Ended, err = r.ended(ctx)
		return err
	}()
	r.evaluate(a, row)
	return row
}

// rounds alternates between rest and attack.
func (r *run) rounds(ctx context.Context, a *attack, row *Row) error {
	var under samples
	// They also explain why a call of the victim has failed.
	defer func() { row.Under = latencies(under) }()
	size, err := databaseSize(ctx, r.env.Sandbox.State())
	if err != nil {
		return err
	}
	grown := func(by *int64) error {
		now, err := databaseSize(ctx, r.env.Sandbox.State())
		*by += now - size
		size = now
		return err
	}
	least := int64(math.MaxInt64)
	for range max(r.Rounds, 1) {
		if !r.Untimed {
			taken, err := r.victim.trickle(ctx, r.Claims)
			row.rest.add(taken)
			var growth int64
			if err := errors.Join(err, grown(&growth)); err != nil {
				return fmt.Errorf("at rest: %w", err)
			}
			least = min(least, growth)
			row.EtcdAtRest = least * int64(max(r.Rounds, 1))
		}
		r.attacks++
		o := r.order
		o.Attack, o.Run = a.name, fmt.Sprintf("abuse-%d", r.attacks)
		began := time.Now()
		assault, err := launch(ctx, o, r.Log)
		if err != nil {
			return err
		}
		taken, lost := r.victim.trickle(ctx, r.Claims)
		under.add(taken)
		figures, err := assault.end()
		row.Took += time.Since(began)
		row.add(figures)
		if err := errors.Join(lost, err); err != nil {
			return err
		}
		if row.Served, err = r.served(ctx); err != nil {
			return err
		}
		if err := errors.Join(r.victim.whole(ctx), grown(&row.Etcd)); err != nil {
			return err
		}
	}
	return nil
}

func latencies(s samples) Latencies {
	return Latencies{
		CreateP50: percentile(s.create, 50), CreateP99: percentile(s.create, 99), ReleaseP99: percentile(s.release, 99),
		ConnectMax: percentile(s.connect, 100), RoundMax: percentile(s.round, 100),
	}
}

// served waits until all attackers are served again, now that they behave, and returns how long
// that took.
func (r *run) served(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, servedWithin)
	defer cancel()
	all, ctx := errgroup.WithContext(ctx)
	for _, t := range r.order.Tenants {
		all.Go(func() error {
			if err := testenv.Poll(ctx, func(ctx context.Context) (string, error) { return "", r.serves(ctx, t) }); err != nil {
				return fmt.Errorf("%s is not served again: %w", t.Cluster.GetName(), err)
			}
			return nil
		})
	}
	err := all.Wait()
	return time.Since(began), err
}

// serves returns why a tenant's list is refused, or the release of a claim that it has left.
func (r *run) serves(ctx context.Context, t tenant) error {
	c, err := agentclient.New(agentclient.Options{
		Address: r.order.Address, Timeout: servedAttempt,
		TLS: &agentclient.TLS{CertFile: t.Identity.Certificate, KeyFile: t.Identity.Key, CAFile: r.order.CAFile},
	})
	if err != nil {
		return err
	}
	list, err := c.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: t.Cluster, Holder: holder})
	// The next attack needs the room of the claims that this one has left.
	for _, claim := range list.GetClaims() {
		_, released := c.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{Cluster: t.Cluster, ClaimId: claim.GetClaimId(), Drained: true})
		err = errors.Join(err, released)
	}
	return errors.Join(err, c.Close())
}

// ended returns the number of ended claims in the hub, of the attackers' Cluster with the most.
func (r *run) ended(ctx context.Context) (most int, err error) {
	for _, name := range r.attackers() {
		var list agentv1.MachineClaimList
		err := r.env.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.ClusterLabel: name})
		if err != nil {
			return 0, err
		}
		most = max(most, lo.CountBy(list.Items, func(c agentv1.MachineClaim) bool { return c.CurrentPhase() == agentv1.PhaseEnded }))
	}
	return most, nil
}

// limit sets the limits of memory and of etcd.
func (r *run) limit(a *attack, row *Row) {
	tenants := int64(row.Tenants)
	most := lo.Ternary(tenants == 1, memoryLimit, row.MemoryBefore+memoryOfAll)
	row.MemoryBound = min(most, row.MemoryBefore+heapShare*a.holds(tenants))
	row.EtcdBound = row.EtcdAtRest + etcdSlack
	if a.writes {
		row.EtcdBound += largestWrite * (int64(max(r.Rounds, 1))*hubBurst + int64(row.Took.Seconds()*hubWrites))
	}
}

// evaluate records the violations, except for those of times.
func (r *run) evaluate(a *attack, row *Row) {
	r.limit(a, row)
	if row.Err != nil {
		return
	}
	if row.MemoryPeak > row.MemoryBound {
		row.wrong("the agent had %s of memory; at most %s", bytesOf(row.MemoryPeak), bytesOf(row.MemoryBound))
	}
	if row.Etcd > row.EtcdBound {
		row.wrong("etcd grew by %s; at most %s", bytesOf(row.Etcd), bytesOf(row.EtcdBound))
	}
	if row.Ended > endedClaims+endedSlack {
		row.wrong("the hub holds %d ended claims of an attacker; at most %d", row.Ended, endedClaims)
	}
	for _, answer := range a.must {
		if row.Answers[answer] == 0 {
			row.wrong("no %q among the answers", answer)
		}
	}
	for answer, n := range row.Answers {
		if !lo.Contains(a.must, answer) && !lo.Contains(a.may, answer) {
			row.wrong("%d times %q, which is no answer to it", n, answer)
		}
	}
	now := agentsOf(r.env.Sandbox.State())
	for i, agent := range now {
		if agent != r.agents[i] {
			row.wrong("%s has died", agent.name)
		}
	}
	r.agents = now
}

// judgeTimes compares the victim's calls during each attack with those at rest, and records the
// violations.
func (r *Report) judgeTimes() {
	if !r.Timed {
		return
	}
	around := func(from, to int) Latencies {
		var all samples
		for _, row := range r.Rows[max(0, from):min(to, len(r.Rows))] {
			all.add(row.rest)
		}
		return latencies(all)
	}
	r.Rest = around(0, len(r.Rows))
	for i, row := range r.Rows {
		row.Rest = around(i-1, i+2)
		if row.Ratio = row.Under.ratio(row.Rest); row.Ratio > slowdown {
			row.wrong("the victim's slowest hundredth of calls took %.2f times as long as at rest; at most %.1f", row.Ratio, slowdown)
		}
		if row.Under.RoundMax > roundWithin {
			row.wrong("a round of the victim's shim took %s; at most %s", millis(row.Under.RoundMax), millis(roundWithin))
		}
		if row.Under.ConnectMax > roundWithin {
			row.wrong("the first answer on a new connection of the victim took %s; at most %s", millis(row.Under.ConnectMax), millis(roundWithin))
		}
	}
}
