package e2e_test

import (
	"cmp"
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
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	startWithin  = 5 * time.Minute
	settleWithin = 2 * time.Minute
	// soon bounds what should take a few seconds.
	soon = time.Minute
	// slow multiplies the timeouts: machines are shared, and some are half as fast.
	slow = 2
	// gracePeriod is how long the shim tolerates an unreachable agent; the product's default is
	// minutes.
	gracePeriod = 10 * time.Second
	// spareGrace is how long the agent keeps an unclaimed Machine; the product's default is a
	// minute.
	spareGrace = 20 * time.Second
	// agents is the number of agents; the shim follows the first.
	agents = 2
	// interrupted is the exit status after an interrupt.
	interrupted = 130
)

// w is the sandbox that all tests of a process share. `make e2e` runs several processes at once,
// and names the sandbox of each.
var w *testenv.Env

func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrl.SetLogger(logr.Discard())
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	say("e2e: bringing a sandbox up")
	began := time.Now()
	var err error
	w, err = testenv.Start(starting, hasty(sandbox.Options{
		Name: cmp.Or(os.Getenv("E2E_SANDBOX"), "e2e"),
		// The short run only uses the charts' default permissions.
		FeatureGates: lo.Ternary(testing.Short(), nil, []string{"NodeOverlay", "StaticCapacity", "CapacityBuffer", "SpotToSpotConsolidation"}),
	}), nil)
	if err != nil {
		say("e2e: %v", err)
		if errors.Is(err, sandbox.ErrNotBuilt) {
			say("e2e: `make e2e` builds what is missing")
		}
		return 1
	}
	say("e2e: the sandbox is up after %.0f s", time.Since(began).Seconds())
	stop()
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
	go func() {
		// The testing package cannot be stopped early, and the sandbox must be stopped.
		<-interrupts
		w.Stop()
		os.Exit(interrupted)
	}()

	code := m.Run()
	tellTable()
	faults := faultsInLogs(w, append(lo.Times(agents, sandbox.AgentName), sandbox.Shim)...)
	for _, fault := range faults {
		say("e2e: FAIL %s", fault)
	}
	if code != 0 || len(faults) > 0 {
		say("e2e: look at the logs in %s", w.Sandbox.State().Paths.Logs)
		code = max(code, 1)
	}
	w.Stop()
	return code
}

// hasty adds to a sandbox's options the agents and the short times that all tests expect.
func hasty(o sandbox.Options) sandbox.Options {
	o.Agents = agents
	o.AgentArgs = append([]string{"--spare-grace-period=" + spareGrace.String()}, o.AgentArgs...)
	o.ShimEnv = append([]string{"HUB_UNREACHABLE_GRACE_PERIOD=" + gracePeriod.String(), "CLAIM_SYNC_INTERVAL=10s"}, o.ShimEnv...)
	return o
}

// inSandbox gives the test its own sandbox as [w].
func inSandbox(t *testing.T, options sandbox.Options) {
	t.Helper()
	own, err := testenv.Start(within(t, startWithin), hasty(options), nil)
	if err != nil {
		t.Fatal(err)
	}
	shared := w
	w = own
	t.Cleanup(func() {
		w = shared
		if faults := faultsInLogs(own, append(lo.Times(agents, sandbox.AgentName), sandbox.Shim)...); len(faults) > 0 {
			t.Errorf("faults in the logs:\n%s", strings.Join(faults, "\n"))
		}
		if t.Failed() {
			t.Logf("logs: %s", own.Sandbox.State().Paths.Logs)
		}
		own.Stop()
	})
}

func say(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }

// faults matches what must not occur in the logs of agent and shim, whatever the tests do: missing
// permissions in the charts, and crashes.
var faults = regexp.MustCompile(`(?i)is forbidden:|"reason":"Forbidden"|panic:|runtime error|nil pointer dereference|DATA RACE`)

func faultsInLogs(w *testenv.Env, components ...string) []string {
	return faultsInLogsBut(nil, w, components...)
}

// faultsInLogsBut ignores the lines that are expected, which may be nil.
func faultsInLogsBut(expected func(line string) bool, w *testenv.Env, components ...string) []string {
	var found []string
	for _, component := range components {
		data, err := os.ReadFile(w.Status(component).Log)
		if err != nil {
			found = append(found, err.Error())
			continue
		}
		lines := lo.Filter(strings.Split(string(data), "\n"), func(line string, _ int) bool {
			return faults.MatchString(line) && (expected == nil || !expected(line))
		})
		if len(lines) > 0 {
			found = append(found, fmt.Sprintf("%s.log has %d lines like: %.600s", component, len(lines), lines[0]))
		}
	}
	return found
}

// row is one scenario in the table.
type row struct {
	shows, result string
	figures       []string
	took          time.Duration
}

// table has a row for each test that calls [shows]. The tests run one after the other.
var table []*row

// shows adds the test to the table with a description. If called before any clean-up is registered,
// it includes the clean-up. The returned function adds a figure.
func shows(t *testing.T, what string) (figure func(format string, args ...any)) {
	t.Helper()
	r := &row{shows: what}
	table = append(table, r)
	began := time.Now()
	t.Cleanup(func() {
		r.took = time.Since(began)
		switch {
		case t.Failed():
			r.result = "FAIL"
		case t.Skipped():
			r.result = "skipped"
		default:
			r.result = "PASS"
		}
	})
	return func(format string, args ...any) { r.figures = append(r.figures, fmt.Sprintf(format, args...)) }
}

func tellTable() {
	if len(table) == 0 {
		return
	}
	tabs := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tabs, "result\tseconds\tscenario\tfigures")
	for _, r := range table {
		_, _ = fmt.Fprintf(tabs, "%s\t%.0f\t%s\t%s\n", r.result, r.took.Seconds(), r.shows, strings.Join(r.figures, "; "))
	}
	_ = tabs.Flush()
}

// within returns a context that ends with the test or after a duration.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// leaveAsFound verifies, at the end of the test and after its clean-up, that all invariants hold,
// no claim is left, and neither agent nor shim has crashed.
func leaveAsFound(t *testing.T) {
	t.Helper()
	restarts := func() map[string]int {
		return lo.SliceToMap(append(lo.Times(agents, sandbox.AgentName), sandbox.Shim), func(component string) (string, int) {
			return component, w.Status(component).Restarts
		})
	}
	before := restarts()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs: %s", w.Sandbox.State().Paths.Logs)
		}
		ctx, cancel := context.WithTimeout(context.Background(), settleWithin)
		defer cancel()
		if err := w.Recorder.Await(ctx, nothingLives); err != nil {
			t.Error(err)
		}
		violations, err := w.Checker.Settle(ctx)
		if err != nil {
			t.Errorf("checking the invariants: %v", err)
		}
		if len(violations) > 0 {
			t.Errorf("invariants are violated:\n%s", invariants.Describe(violations))
		}
		if after := restarts(); !lo.ElementsMatch(lo.Entries(after), lo.Entries(before)) && !killed[t.Name()] {
			t.Errorf("agent or shim died: restarts were %v and are %v", before, after)
		}
	})
}

// killed are the tests that kill processes themselves.
var killed = map[string]bool{}

func nothingLives(s timeline.State) string {
	if live := s.Live(); len(live) > 0 {
		return fmt.Sprintf("%d NodeClaims to go, such as %s", len(live), live[0].NodeClaim)
	}
	return ""
}

func everyMachineRuns(s timeline.State) string {
	for _, group := range s.Groups {
		if group.Running != group.Machines || int(group.Replicas) != group.Machines {
			return fmt.Sprintf("the Machines of %s to run: %d of %d do", group.Name, group.Running, group.Replicas)
		}
	}
	return ""
}

// running returns a condition: this many pods run, and no others are left.
func running(pods int) func(timeline.State) string {
	return func(s timeline.State) string {
		if s.Pods.Running == pods && s.Pods.Total() == pods {
			return ""
		}
		return fmt.Sprintf("%d pods to run: %d of %d do", pods, s.Pods.Running, s.Pods.Total())
	}
}

// await fails the test if the recorder does not see the condition in time, multiplied by [slow].
func await(t *testing.T, d time.Duration, condition func(timeline.State) string) {
	t.Helper()
	if err := w.Recorder.Await(within(t, slow*d), condition); err != nil {
		pending, _ := w.Pending(context.Background())
		t.Fatalf("%v\npods without a Node:\n  %s", err, strings.Join(lo.Slice(pending, 0, 3), "\n  "))
	}
}

// poll fails the test if the condition, as for [testenv.Poll], does not come true in time,
// multiplied by [slow].
func poll(t *testing.T, d time.Duration, condition func(context.Context) (string, error)) {
	t.Helper()
	if err := testenv.Poll(within(t, slow*d), condition); err != nil {
		t.Fatal(err)
	}
}

// throughout makes the checks at each interval, for as long as d.
func throughout(t *testing.T, d, interval time.Duration, checks func()) {
	t.Helper()
	over, tick := time.After(d), time.Tick(interval)
	for {
		checks()
		select {
		case <-over:
			return
		case <-tick:
		}
	}
}

// settle fails the test if an invariant is still violated after d.
func settle(t *testing.T, in *testenv.Env, d time.Duration) {
	t.Helper()
	violations, err := in.Checker.Settle(within(t, d))
	require.NoError(t, err)
	require.Empty(t, violations, invariants.Describe(violations))
}

// apply applies files. At the end of the test it deletes their objects and waits until they are
// gone.
func apply(t *testing.T, c client.Client, files ...string) {
	t.Helper()
	for _, file := range files {
		if err := manifests.Apply(within(t, soon), c, file); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		for _, file := range slices.Backward(files) {
			if err := manifests.Delete(ctx, c, file); err != nil {
				t.Error(err)
			}
		}
	})
}

// scale sets the number of pods of a Deployment. At the end of the test it scales to zero and waits
// for that.
func scale(t *testing.T, deployment string, replicas int32) {
	t.Helper()
	name := client.ObjectKey{Namespace: "default", Name: deployment}
	if err := w.Scale(within(t, soon), name, replicas); err != nil {
		t.Fatal(err)
	}
}

// goHome scales Deployments to zero at the end of the test, and waits until no NodeClaim is left.
//
// The timeout allows for a hundred machines on a machine that is busy with other work.
func goHome(t *testing.T, deployments ...string) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
		defer cancel()
		for _, d := range deployments {
			if err := w.Scale(ctx, client.ObjectKey{Namespace: "default", Name: d}, 0); err != nil {
				t.Error(err)
			}
		}
		if err := w.Recorder.Await(ctx, nothingLives); err != nil {
			t.Error(err)
		}
	})
}

// agentAs returns a client of the agent that authenticates with a certificate.
func agentAs(t *testing.T, certificate, key string) *agentclient.Client {
	t.Helper()
	state := w.Sandbox.State()
	c, err := agentclient.New(agentclient.Options{
		Address: state.AgentAddress,
		TLS:     &agentclient.TLS{CertFile: certificate, KeyFile: key, CAFile: state.Paths.AgentCA},
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
	return filepath.Dir(filepath.Dir(w.Sandbox.State().Paths.Dir))
}
