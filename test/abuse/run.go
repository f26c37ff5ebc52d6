package abuse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/samber/lo"
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
	// memoryLimit is the agent's memory limit in the chart (deploy/charts/agent/values.yaml).
	memoryLimit = 1 << 30
	// heapShare is the ratio of resident memory to held memory: Go collects garbage when the heap
	// has doubled (docs/performance.md).
	heapShare = 2
	// An identity's calls make at most writeBurst requests to the hub at once and writesPerSecond
	// (--kube-api-burst, and half of --kube-api-qps). A request can store at most one MachineClaim:
	// 16 candidates of 253 bytes, and texts of at most 1,024 bytes, of which the attacker controls
	// two.
	writeBurst, writesPerSecond, largestWrite = 1000, 250, 16 * kibibyte
	// etcdSlack is the growth of etcd not caused by the attack: the trickle, Cluster API, and
	// partly filled pages.
	etcdSlack = 32 * mebibyte
	// endedClaims is --max-ended-claims-per-cluster. What agents create within a second may exceed
	// it (docs/claims.md).
	endedClaims, endedSlack = 10000, 500
	// servedWithin is how long after an attack the attacker's identity may still be refused.
	servedWithin = time.Minute
)

// servedAttempt bounds one attempt to be served again, including the client's own retries.
const servedAttempt = 2 * time.Second

const (
	attackerCluster = "attacker"
	attackerGroup   = "attacker"
	startWithin     = 5 * time.Minute
	// attackWithin bounds one attack with all its rounds.
	attackWithin = 30 * time.Minute
)

// Options configures a run.
type Options struct {
	// Name is the name of the sandbox.
	Name string
	// Attacks are the names of the attacks to run. Empty means all.
	Attacks []string
	// Rounds is the number of alternations between rest and attack, and Claims the number of claims
	// that the victim makes in each of the two.
	Rounds, Claims int
	// Agents is the number of agents. Attacker and victim call the first.
	Agents int
	// Agent is the agent's executable. Empty means bin/capi-agent.
	Agent string
	// Untimed skips the judgement of times, which mean little on a machine that is busy with other
	// work.
	Untimed bool
	// Say prints progress. REQUIRED.
	Say func(format string, args ...any)
	// Log receives the attackers' messages. Nil means standard error.
	Log io.Writer
}

// Row is the result of one attack.
type Row struct {
	Attack string
	Figures
	// Idle and Under are the latencies of the victim's calls between and during the attacks.
	Idle, Under Latencies
	// MemoryBefore and MemoryPeak are the attacked agent's memory, and MemoryBound is its limit.
	MemoryBefore, MemoryPeak, MemoryBound int64
	// Etcd is the growth of the hub's database over rest and attacks, and EtcdBound its limit.
	Etcd, EtcdBound int64
	// Ended is the number of the attacker's ended claims in the hub afterwards.
	Ended int
	// Served is how long the attacker was still refused after its last attack.
	Served time.Duration
	// Took is the duration of the attacks, without the rest between them.
	Took time.Duration
	// Wrong lists the violations. Err is why the attack could not be carried out.
	Wrong []string
	Err   error
}

// Latencies summarises the durations of the victim's calls.
type Latencies struct {
	CreateP50, CreateP99, ReleaseP99, ConnectMax time.Duration
}

// Ratio returns by what factor the 99th percentile of the victim's calls grew during the attack, of
// CreateClaim or of ReleaseClaim, whichever is larger.
func (r *Row) Ratio() float64 {
	return max(ratio(r.Under.CreateP99, r.Idle.CreateP99), ratio(r.Under.ReleaseP99, r.Idle.ReleaseP99))
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
	began := time.Now()
	r := &run{Options: o}
	if err := r.start(ctx); err != nil {
		return nil, err
	}
	defer r.stop()
	report := &Report{Timed: !o.Untimed, Logs: r.env.Sandbox.State().Paths.Logs}
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
	r.Say("victim and attacker get their node groups and claims")
	if err := r.env.CreateCluster(ctx, attackerCluster); err != nil {
		return err
	}
	// Like every tenant, the attacker may claim a few machines.
	if err := r.env.CreateGroup(ctx, loadgen.Group{Name: attackerGroup, Cluster: attackerCluster, Max: 10, Held: true}); err != nil {
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

// identify issues the attacker's certificates.
func (r *run) identify() error {
	state := r.env.Sandbox.State()
	r.order = order{
		Address: state.AgentAddress, CAFile: state.Paths.AgentCA,
		Cluster: &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: attackerCluster},
		Group:   sandbox.ClusterNamespace + "/" + attackerGroup,
	}
	tenant := sandbox.ClusterIdentity(sandbox.ClusterNamespace, attackerCluster, "")
	var err error
	if r.order.Tenant.Certificate, r.order.Tenant.Key, err = r.env.Sandbox.AgentCertificate("attacker", tenant); err != nil {
		return err
	}
	// It is signed but has no rights.
	stranger := strings.Replace(tenant, "/cluster/", "/nothing/", 1)
	r.order.Stranger.Certificate, r.order.Stranger.Key, err = r.env.Sandbox.AgentCertificate("stranger", stranger)
	return err
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
	row := &Row{Attack: a.name}
	row.Err = func() error {
		state := r.env.Sandbox.State()
		before, err := databaseSize(ctx, state)
		if err != nil {
			return err
		}
		first := r.agents[0]
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
		after, err := databaseSize(ctx, state)
		row.Etcd = after - before
		if err != nil {
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
	var idle, under samples
	for range max(r.Rounds, 1) {
		taken, err := r.victim.trickle(ctx, r.Claims)
		idle.add(taken)
		if err != nil {
			return fmt.Errorf("at rest: %w", err)
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
		if err := r.victim.whole(ctx); err != nil {
			return err
		}
	}
	row.Idle, row.Under = latencies(idle), latencies(under)
	return nil
}

func latencies(s samples) Latencies {
	return Latencies{
		CreateP50: percentile(s.create, 50), CreateP99: percentile(s.create, 99), ReleaseP99: percentile(s.release, 99),
		ConnectMax: percentile(s.connect, 100),
	}
}

// served waits until the attacker is served again, now that it behaves, and returns how long that
// took.
func (r *run) served(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, servedWithin)
	defer cancel()
	began := time.Now()
	err := testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		c, err := agentclient.New(agentclient.Options{
			Address: r.order.Address, Timeout: servedAttempt,
			TLS: &agentclient.TLS{CertFile: r.order.Tenant.Certificate, KeyFile: r.order.Tenant.Key, CAFile: r.order.CAFile},
		})
		if err != nil {
			return "", err
		}
		_, err = c.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: r.order.Cluster, Holder: holder})
		return "", errors.Join(err, c.Close())
	})
	if err != nil {
		return 0, fmt.Errorf("the attacker is not served again: %w", err)
	}
	return time.Since(began), nil
}

// ended returns the number of the attacker's ended claims in the hub.
func (r *run) ended(ctx context.Context) (int, error) {
	var list agentv1.MachineClaimList
	err := r.env.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.ClusterLabel: attackerCluster})
	return lo.CountBy(list.Items, func(c agentv1.MachineClaim) bool { return c.CurrentPhase() == agentv1.PhaseEnded }), err
}

// evaluate records the violations.
func (r *run) evaluate(a *attack, row *Row) {
	row.MemoryBound = min(memoryLimit, row.MemoryBefore+heapShare*a.holds)
	row.EtcdBound = etcdSlack
	if a.writes {
		row.EtcdBound += largestWrite * int64(max(r.Rounds, 1)*writeBurst+int(row.Took.Seconds()*writesPerSecond))
	}
	if row.Err != nil {
		return
	}
	if !r.Untimed && row.Ratio() > slowdown {
		row.wrong("the victim's slowest hundredth of calls took %.2f times as long as at rest; at most %.1f", row.Ratio(), slowdown)
	}
	if row.MemoryPeak > row.MemoryBound {
		row.wrong("the agent had %s of memory; at most %s", bytesOf(row.MemoryPeak), bytesOf(row.MemoryBound))
	}
	if row.Etcd > row.EtcdBound {
		row.wrong("etcd grew by %s; at most %s", bytesOf(row.Etcd), bytesOf(row.EtcdBound))
	}
	if row.Ended > endedClaims+endedSlack {
		row.wrong("the hub holds %d ended claims of the attacker; at most %d", row.Ended, endedClaims)
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
