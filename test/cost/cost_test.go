package cost_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/cost"
	"github.com/karpenter-capi/karpenter-capi/test/loadgen"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	claims = 100
	// patience allows for a machine that is busy with other work.
	patience = 5 * time.Minute
)

// Maximum cost of 100 claims in writes to their single MachineDeployment. The other numbers are
// exact.
const (
	maxRaises     = 10
	maxLedgerOnly = 10
	maxLowerings  = 15
	maxReleasing  = 15
	// Of a hundred adoptions or returns.
	maxAdoptionLedgers = 20
)

// Maximum cost of one of 100 claims in requests of both agents, without Events: until its Machine
// has its label, and for its release. The writes exclude those to the MachineDeployment, which all
// claims share.
const (
	bindWrites, bindRequests       = 4, 6
	releaseWrites, releaseRequests = 5, 8
	adoptWrites, adoptRequests     = 3, 6
	returnWrites, returnRequests   = 3, 8
)

// maxRefused is how many writes for a hundred claims or releases may be refused. Of two agents, one
// leaves a node group to the other only while it can tell that the other makes progress.
const maxRefused = claims / 2

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	code := m.Run()
	if shared != nil {
		if err := shared.stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared is the sandbox of all tests, which follow each other, each with a node group of its own. A
// test that fails keeps its sandbox's logs, and leaves the next test to start another sandbox.
var shared *measured

// measured is a sandbox whose hub keeps an audit log.
type measured struct {
	*loadgen.Env

	log *cost.Log
	dir string
}

// stop stops the sandbox and removes its files.
func (m *measured) stop() error {
	m.Stop()
	return os.RemoveAll(m.dir)
}

// TestWhatAHundredClaimsCost is a single test because each of its parts begins where the previous
// one ended.
func TestWhatAHundredClaimsCost(t *testing.T) {
	const group = "crowd"
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	s, log := start(ctx, t)
	must(t, s.CreateGroup(ctx, loadgen.Group{Name: group, Max: claims, Held: true, Termination: time.Second}))
	requested := lo.Times(claims, func(i int) loadgen.ClaimRequest {
		return loadgen.ClaimRequest{ID: fmt.Sprintf("crowd-%03d", i), Groups: []string{group}}
	})
	next(t, log) // skip the setup

	if _, err := s.Claim(ctx, requested); err != nil {
		t.Fatal(err)
	}
	// Infrastructure is slower than Cluster API.
	must(t, s.AwaitBound(ctx, requested))
	binding := next(t, log)
	report(t, "binding", binding)
	t.Run("binding a claim takes few requests", func(t *testing.T) { eachCosts(t, binding, claims, bindWrites, bindRequests) })
	must(t, s.Unhold(ctx))
	must(t, s.AwaitServed(ctx, requested))
	must(t, testenv.Poll(ctx, inFlight(s, group)))
	must(t, testenv.Poll(ctx, everyNodeIsNoted(s, requested)))
	joining := next(t, log)
	report(t, "joining", joining)
	claiming := slices.Concat(binding, joining)
	t.Run("few writes of claims are refused", func(t *testing.T) { fewRefused(t, claiming) })
	t.Run("claiming writes the MachineDeployment seldom", func(t *testing.T) {
		raises, lowerings, ledgerOnly := ledgerWrites(t, claiming)
		if raises == 0 || raises > maxRaises || lowerings > 0 || ledgerOnly > maxLedgerOnly {
			t.Errorf("replicas were raised in %d writes (1 to %d), lowered in %d (none), and there were %d ledger-only writes (at most %d)",
				raises, maxRaises, lowerings, ledgerOnly, maxLedgerOnly)
		}
	})
	t.Run("each Machine is bound by one write", func(t *testing.T) { eachMachineOnce(t, s, group, claiming) })
	t.Run("each claim is made by one write", func(t *testing.T) {
		if made := count(claiming, "create", "machineclaims"); made != claims {
			t.Errorf("%d claims took %d creations", claims, made)
		}
	})

	t.Run("nothing is written when nothing changes", func(t *testing.T) {
		idle(ctx, t, s, group)
		if written := lo.Filter(next(t, log), func(r cost.Request, _ int) bool { return r.Writes() }); len(written) > 0 {
			t.Errorf("%d writes, such as %v", len(written), written[0])
		}
	})

	if _, err := s.Release(ctx, requested); err != nil {
		t.Fatal(err)
	}
	must(t, s.AwaitGone(ctx, group))
	must(t, testenv.Poll(ctx, inFlight(s, group)))
	releasing := next(t, log)
	report(t, "releasing", releasing)
	t.Run("releasing a claim takes few requests", func(t *testing.T) { eachCosts(t, releasing, claims, releaseWrites, releaseRequests) })
	t.Run("few writes of releases are refused", func(t *testing.T) { fewRefused(t, releasing) })
	t.Run("releasing writes the MachineDeployment seldom", func(t *testing.T) {
		raises, lowerings, ledgerOnly := ledgerWrites(t, releasing)
		if raises > 0 || lowerings == 0 || lowerings > maxLowerings || ledgerOnly > maxReleasing {
			t.Errorf("replicas were raised in %d writes (none), lowered in %d (1 to %d), and there were %d ledger-only writes (at most %d)",
				raises, lowerings, maxLowerings, ledgerOnly, maxReleasing)
		}
	})
	t.Run("each Machine is marked, deleted and let go by one write each", func(t *testing.T) {
		if marked, deleted := count(releasing, "patch", "machines"), count(releasing, "delete", "machines"); marked != 2*claims || deleted != claims {
			t.Errorf("%d Machines took %d patches and %d deletions", claims, marked, deleted)
		}
	})
	t.Run("nothing is written when nothing is left", func(t *testing.T) {
		idle(ctx, t, s, group)
		if written := lo.Filter(next(t, log), func(r cost.Request, _ int) bool { return r.Writes() }); len(written) > 0 {
			t.Errorf("%d writes, such as %v", len(written), written[0])
		}
	})
}

// TestWhatAdoptionsCost lets claims adopt the user's Machines, and return them.
func TestWhatAdoptionsCost(t *testing.T) {
	const group = "adopted"
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	s, log := start(ctx, t)
	must(t, s.CreateGroup(ctx, loadgen.Group{Name: group}))
	must(t, s.Scale(ctx, group, *adopted))
	var names []string
	must(t, s.AwaitMachines(ctx, func(machines []loadgen.Machine) string {
		names = lo.FilterMap(machines, func(m loadgen.Machine, _ int) (string, bool) { return m.Name, m.Group == group && m.Node != "" })
		return lo.Ternary(len(names) == *adopted, "", fmt.Sprintf("%d Machines to have a Node: %d have", *adopted, len(names)))
	}))
	requested := lo.Map(names, func(name string, i int) loadgen.ClaimRequest {
		return loadgen.ClaimRequest{ID: fmt.Sprintf("adopted-%03d", i), Groups: []string{group}, Adopt: name}
	})
	next(t, log)

	began := time.Now()
	if _, err := s.Claim(ctx, requested); err != nil {
		t.Fatal(err)
	}
	must(t, s.AwaitServed(ctx, requested))
	t.Logf("%d Machines were adopted in %.1f s", *adopted, time.Since(began).Seconds())
	must(t, testenv.Poll(ctx, inFlight(s, group)))
	must(t, testenv.Poll(ctx, everyNodeIsNoted(s, requested)))
	adopting := next(t, log)
	report(t, "adopting", adopting)
	t.Run("adopting a Machine takes few requests", func(t *testing.T) { eachCosts(t, adopting, *adopted, adoptWrites, adoptRequests) })
	t.Run("replicas stay", func(t *testing.T) { replicasStay(t, adopting) })

	began = time.Now()
	if _, err := s.Return(ctx, requested); err != nil {
		t.Fatal(err)
	}
	must(t, testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		left, err := s.Claims(ctx)
		return lo.Ternary(len(left) == 0, "", fmt.Sprintf("%d claims to end", len(left))), err
	}))
	t.Logf("%d Machines were returned in %.1f s", *adopted, time.Since(began).Seconds())
	must(t, testenv.Poll(ctx, inFlight(s, group)))
	returning := next(t, log)
	report(t, "returning", returning)
	t.Run("returning a Machine takes few requests", func(t *testing.T) { eachCosts(t, returning, *adopted, returnWrites, returnRequests) })
	t.Run("replicas stay again", func(t *testing.T) { replicasStay(t, returning) })
}

func replicasStay(t *testing.T, requests []cost.Request) {
	t.Helper()
	raises, lowerings, ledgerOnly := ledgerWrites(t, requests)
	if raises+lowerings > 0 || ledgerOnly == 0 || ledgerOnly > maxAdoptionLedgers {
		t.Errorf("replicas were raised in %d writes and lowered in %d (none), and there were %d ledger-only writes (1 to %d)",
			raises, lowerings, ledgerOnly, maxAdoptionLedgers)
	}
}

// adopted is the number of Machines that are adopted and returned.
var adopted = flag.Int("adopted", 100, "how many Machines are adopted, and returned")

// TestWhatOneClaimCosts prints the cost of the whole life of a claim that has the node group to
// itself.
func TestWhatOneClaimCosts(t *testing.T) {
	const group = "alone"
	if testing.Short() {
		t.Skip("it prints a table and asserts little that the other test does not")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, log := start(ctx, t)
	must(t, s.CreateGroup(ctx, loadgen.Group{Name: group, Boot: time.Second, Join: time.Second, Termination: time.Second}))
	requested := []loadgen.ClaimRequest{{ID: group, Groups: []string{group}}}
	next(t, log)
	if _, err := s.Claim(ctx, requested); err != nil {
		t.Fatal(err)
	}
	must(t, s.AwaitServed(ctx, requested))
	must(t, testenv.Poll(ctx, everyNodeIsNoted(s, requested)))
	must(t, testenv.Poll(ctx, inFlight(s, group)))
	all := next(t, log)
	report(t, "claiming", all)
	if _, err := s.Release(ctx, requested); err != nil {
		t.Fatal(err)
	}
	must(t, s.AwaitGone(ctx, group))
	must(t, testenv.Poll(ctx, inFlight(s, group)))
	releasing := next(t, log)
	report(t, "releasing", releasing)
	fewRefused(t, append(all, releasing...))
	raises, lowerings, _ := ledgerWrites(t, append(all, releasing...))
	if raises != 1 || lowerings != 1 {
		t.Errorf("replicas were raised in %d writes and lowered in %d", raises, lowerings)
	}
}

// start returns a sandbox in which no other test is running, and its log.
func start(ctx context.Context, t *testing.T) (*loadgen.Env, *cost.Log) {
	t.Helper()
	if shared == nil {
		shared = startSandbox(ctx, t)
	}
	m := shared
	t.Cleanup(func() {
		if t.Failed() {
			shared = nil
			m.Stop()
			t.Logf("the sandbox's logs are in %s", m.Sandbox.State().Paths.Logs)
		}
	})
	return m.Env, m.log
}

func startSandbox(ctx context.Context, t *testing.T) *measured {
	t.Helper()
	dir, err := os.MkdirTemp("", "cost-") // It outlives the test, and the logs stay if the test fails.
	must(t, err)
	s, err := loadgen.Start(ctx, sandbox.Options{StateDir: filepath.Join(dir, "sandbox"), AuditHub: true, Agents: *agents})
	must(t, err)
	log, err := cost.Open(s.Sandbox.State().Paths.HubAudit)
	if err != nil {
		s.Stop()
		t.Fatal(err)
	}
	return &measured{s, log, dir}
}

// agents defaults to one: on a machine that is busy with other tests, a second agent cannot tell a
// slow agent from a dead one, and helps it.
var agents = flag.Int("agents", 1, "how many agents there are; the first is called")

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// next returns the agent's requests since the last call.
func next(t *testing.T, log *cost.Log) []cost.Request {
	t.Helper()
	requests, err := log.Next(cost.AgentUser)
	must(t, err)
	return requests
}

// eachCosts checks the cost per claim of the requests.
func eachCosts(t *testing.T, asked []cost.Request, claims, maxWrites, maxRequests int) {
	t.Helper()
	asked = lo.Filter(asked, func(r cost.Request, _ int) bool { return r.Resource != "events" && r.Verb != "watch" })
	writes := lo.CountBy(asked, func(r cost.Request) bool { return r.Writes() && !r.Refused() && r.Resource != "machinedeployments" })
	t.Logf("%.2f writes and %.2f requests a claim", float64(writes)/float64(claims), float64(len(asked))/float64(claims))
	if writes > maxWrites*claims || len(asked) > maxRequests*claims {
		t.Errorf("%d claims took %d writes and %d requests; at most %d and %d for each", claims, writes, len(asked), maxWrites, maxRequests)
	}
}

func count(requests []cost.Request, verb, resource string) int {
	return lo.CountBy(requests, func(r cost.Request) bool { return r.Verb == verb && r.Resource == resource && !r.Refused() })
}

// report prints the number of requests by kind.
func report(t *testing.T, what string, requests []cost.Request) {
	t.Helper()
	counts := lo.CountValuesBy(requests, func(r cost.Request) string {
		return fmt.Sprintf("%-8s %-24s %d", r.Verb, r.Resource, r.Code)
	})
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&b, "\n  %5d %s", counts[key], key)
	}
	raises, lowerings, ledgerOnly := ledgerWrites(t, requests)
	t.Logf("%s: replicas raised in %d writes, lowered in %d, %d ledger-only writes%s", what, raises, lowerings, ledgerOnly, b.String())
}

// ledgerWrites classifies the writes to MachineDeployments.
func ledgerWrites(t *testing.T, requests []cost.Request) (raises, lowerings, ledgerOnly int) {
	t.Helper()
	for _, r := range requests {
		if !r.Writes() || !strings.HasPrefix(r.Resource, "machinedeployments") {
			continue
		}
		by, err := cost.ReplicasBy(r)
		must(t, err)
		switch {
		case by > 0:
			raises++
		case by < 0:
			lowerings++
		default:
			ledgerOnly++
		}
	}
	return raises, lowerings, ledgerOnly
}

func fewRefused(t *testing.T, requests []cost.Request) {
	t.Helper()
	refused := lo.Filter(requests, func(r cost.Request, _ int) bool { return r.Writes() && r.Refused() })
	if len(refused) > maxRefused {
		lines := lo.Map(refused, func(r cost.Request, _ int) string { return r.String() })
		t.Errorf("%d writes were refused:\n  %s", len(refused), strings.Join(lines, "\n  "))
	}
}

// eachMachineOnce verifies that every Machine of the node group was written to once, and thereby
// has its claim.
func eachMachineOnce(t *testing.T, s *loadgen.Env, group string, requests []cost.Request) {
	t.Helper()
	writes := lo.CountValuesBy(
		lo.Filter(requests, func(r cost.Request, _ int) bool {
			return r.Writes() && !r.Refused() && strings.HasPrefix(r.Resource, "machines")
		}),
		func(r cost.Request) string { return r.Verb + " " + r.Resource + " " + r.Name },
	)
	var machines clusterv1.MachineList
	must(t, s.Hub.List(t.Context(), &machines, client.InNamespace(sandbox.ClusterNamespace),
		client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: group}))
	if len(machines.Items) != claims || len(writes) != claims {
		t.Errorf("%d claims brought %d Machines, written to in %d ways", claims, len(machines.Items), len(writes))
	}
	for i := range machines.Items {
		m := &machines.Items[i]
		if n := writes["patch machines "+m.Name]; n != 1 || m.Labels[agentv1.ClaimLabel] == "" {
			t.Errorf("Machine %s has claim %q after %d writes", m.Name, m.Labels[agentv1.ClaimLabel], n)
		}
	}
}

// inFlight returns a condition: the node group's ledger has no entries in flight.
func inFlight(s *loadgen.Env, group string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		md, err := s.Deployment(ctx, group)
		if err != nil {
			return "", err
		}
		var ledger struct {
			Pending   map[string]json.RawMessage `json:"pending"`
			Releasing map[string]json.RawMessage `json:"releasing"`
			Returning map[string]json.RawMessage `json:"returning"`
		}
		if err := json.Unmarshal([]byte(md.Annotations[agentv1.LedgerAnnotation]), &ledger); err != nil {
			return "", err
		}
		if n := len(ledger.Pending) + len(ledger.Releasing) + len(ledger.Returning); n > 0 {
			return fmt.Sprintf("%d entries to leave the ledger", n), nil
		}
		return "", nil
	}
}

// everyNodeIsNoted returns a condition: each of the claims names its Node, which is the last thing
// written to it.
func everyNodeIsNoted(s *loadgen.Env, requested []loadgen.ClaimRequest) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var list agentv1.MachineClaimList
		if err := s.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return "", err
		}
		named := lo.SliceToMap(list.Items, func(c agentv1.MachineClaim) (string, bool) {
			return c.Spec.ClaimID, c.Status.Machine != nil && c.Status.Machine.NodeName != ""
		})
		without := lo.CountBy(requested, func(w loadgen.ClaimRequest) bool { return !named[w.ID] })
		return lo.Ternary(without == 0, "", fmt.Sprintf("%d claims to name their Node", without)), nil
	}
}

// idle makes the agent reconcile the node group many times with nothing to do: another writer
// changes what does not concern it, and the agent's own metrics show the reconciles.
func idle(ctx context.Context, t *testing.T, s *loadgen.Env, group string) {
	t.Helper()
	url := s.Sandbox.State().AgentMetrics
	md, err := s.Deployment(ctx, group)
	must(t, err)
	for i := range 10 {
		before, err := looks(ctx, url)
		must(t, err)
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"example.com/touched":"%d"}}}`, i)
		must(t, s.Hub.Patch(ctx, md, client.RawPatch(types.MergePatchType, []byte(patch))))
		must(t, testenv.Poll(ctx, func(ctx context.Context) (string, error) {
			now, err := looks(ctx, url)
			return lo.Ternary(now > before, "", "the agent to look at the node group"), err
		}))
	}
	// Callers that only read cause no changes either.
	for range 10 {
		_, err := s.Claims(ctx)
		must(t, err)
	}
}

// looks returns how often the agent's claim controller has reconciled a node group.
func looks(ctx context.Context, url string) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err
	}
	total, found := 0, false
	for line := range strings.Lines(string(text)) {
		var value float64
		if name, rest, ok := strings.Cut(line, "} "); ok && strings.HasPrefix(name, `controller_runtime_reconcile_total{controller="claims"`) {
			if _, err := fmt.Sscan(rest, &value); err != nil {
				return 0, err
			}
			total, found = total+int(value), true
		}
	}
	if !found {
		return 0, fmt.Errorf("%s does not tell how often the claim controller has looked", url)
	}
	return total, nil
}
