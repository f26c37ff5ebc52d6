// Command core-suites runs Karpenter core's own end-to-end suites against its own sandbox, whose
// shim is the provider under test.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/coresuites"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	startWithin  = 3 * time.Minute
	settleWithin = 3 * time.Minute
	// suiteWithin bounds one suite.
	suiteWithin = 2 * time.Hour
	// repairAfter is how long Karpenter tolerates an unhealthy Node: the specs only wait for
	// minutes.
	repairAfter = 10 * time.Second
)

var errFailed = errors.New("not all specs passed")

type settings struct {
	name, focus, bin, record string
	suites                   []string
	lanes                    int
}

func main() {
	var s settings
	suites := flag.String("suites", strings.Join(coresuites.Suites(), ","), "`Suites` to run, separated by commas.")
	flag.StringVar(&s.name, "name", "core-suites", "Prefix of the `names` of the sandboxes. Each suite has a sandbox of its own.")
	flag.IntVar(&s.lanes, "lanes", 2, "Number of suites that run at a time.")
	flag.StringVar(&s.record, "record", "",
		"Page of the documentation, as a `file`, to which the list of the specs that passed is written. If empty, it is not written.")
	flag.StringVar(&s.focus, "focus", "", "`Regular expression` of the names of the specs to run. Defaults to all.")
	flag.StringVar(&s.bin, "bin", "bin", "`Folder` with the suites: core-<name>.test for each.")
	flag.Parse()
	s.suites = strings.Split(*suites, ",")
	if err := s.validate(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, s); err != nil {
		if !errors.Is(err, errFailed) { // it has been reported already
			say("core-suites: FAIL %v", err)
		}
		stop()
		os.Exit(1) //nolint:gocritic // nothing but stop is deferred
	}
}

func (s settings) validate() error {
	switch {
	case s.lanes < 1:
		return fmt.Errorf("-lanes: %d is below 1", s.lanes)
	case len(lo.FindDuplicates(s.suites)) > 0:
		return fmt.Errorf("-suites: %s is named twice", lo.FindDuplicates(s.suites)[0])
	case len(lo.Without(s.suites, coresuites.Suites()...)) > 0:
		return fmt.Errorf("-suites: there is no suite %q that can run; there are %s",
			lo.Without(s.suites, coresuites.Suites()...)[0], strings.Join(coresuites.Suites(), " and "))
	case s.record != "" && (s.focus != "" || len(s.suites) < len(coresuites.Suites())):
		return errors.New("-record: only a run of all specs of all suites can be recorded")
	}
	return nil
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// run runs the suites, each in a sandbox of its own.
func run(ctx context.Context, s settings) error {
	began := time.Now()
	all, err := coresuites.Exceptions()
	if err != nil {
		return err
	}
	version, err := versionOfCore()
	if err != nil {
		return err
	}
	var (
		specs      = make([][]coresuites.Spec, len(s.suites))
		violations = make([][]invariants.Violation, len(s.suites))
		suites     errgroup.Group
	)
	suites.SetLimit(s.lanes)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i, suite := range s.suites {
		suites.Go(func() (err error) {
			specs[i], violations[i], err = runSuite(ctx, s, suite, all)
			if err != nil {
				cancel() // the others are of no use then
				return fmt.Errorf("suite %s: %w", suite, err)
			}
			return nil
		})
	}
	if err := suites.Wait(); err != nil {
		return err
	}
	ran := slices.Concat(specs...)
	if s.focus != "" { // exceptions are then not complete
		ran = lo.Reject(ran, func(sp coresuites.Spec, _ int) bool { return sp.State == "skipped" })
		all = nil
	}
	verdict := coresuites.Evaluate(ran, all)
	if err := tell(verdict, slices.Concat(violations...), time.Since(began)); err != nil || s.record == "" {
		return err
	}
	return coresuites.Record(s.record, version, verdict.Passed)
}

// versionOfCore returns the version of Karpenter's core that this program is built with, which is
// also the one of the suites.
func versionOfCore() (string, error) {
	const core = "sigs.k8s.io/karpenter"
	info, _ := debug.ReadBuildInfo()
	if info != nil {
		for _, module := range info.Deps {
			if module.Path == core {
				return module.Version, nil
			}
		}
	}
	return "", fmt.Errorf("this program does not know its version of %s", core)
}

// runSuite returns the results of a suite, and which invariants do not hold at its end.
func runSuite(
	ctx context.Context, s settings, suite string, all []coresuites.Exception,
) ([]coresuites.Spec, []invariants.Violation, error) {
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	w, err := testenv.Start(starting, sandbox.Options{
		Name: s.name + "-" + suite, Agents: 2, FeatureGates: coresuites.FeatureGates(suite),
		ShimEnv: []string{"NODE_REPAIR_AFTER=" + repairAfter.String()},
	}, nil)
	if err != nil {
		return nil, nil, err
	}
	defer w.Stop()
	if err := coresuites.Prepare(starting, w.Hub, w.Spoke, suite); err != nil {
		return nil, nil, err
	}
	var specs []coresuites.Spec
	exceptions := lo.Filter(all, func(e coresuites.Exception, _ int) bool { return e.Suite == suite })
	for _, part := range coresuites.Parts(suite) {
		of, err := runPart(ctx, s, part, w.Sandbox.State().Paths, exceptions)
		if err != nil {
			return nil, nil, err
		}
		of = lo.Filter(of, func(sp coresuites.Spec, _ int) bool { return part.Has(sp) })
		tellPart(part, of)
		specs = append(specs, of...)
	}
	settling, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	violations, err := w.Checker.Settle(settling)
	if err != nil {
		return nil, nil, fmt.Errorf("checking the invariants: %w", err)
	}
	return specs, violations, nil
}

// runPart runs a part of a suite without its exceptions. The returned specs are those of the whole
// suite; those of other parts are skipped.
func runPart(
	ctx context.Context, s settings, part coresuites.Part, paths sandbox.Paths, exceptions []coresuites.Exception,
) ([]coresuites.Spec, error) {
	bin, err := filepath.Abs(filepath.Join(s.bin, "core-"+part.Suite+".test"))
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "core-suites-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	nodeClass, nodePool, err := part.WriteDefaults(dir)
	if err != nil {
		return nil, err
	}
	focus, name := s.focus, nameOf(part)
	if part.Specs != "" {
		focus = specsNamed(part.Specs) + ".*" + strings.TrimPrefix(focus, part.Specs)
	}
	report := filepath.Join(dir, "report.json")
	args := []string{
		"-ginkgo.json-report=" + report, "-ginkgo.timeout=" + suiteWithin.String(), "-test.timeout=0", "-ginkgo.succinct", "-ginkgo.no-color",
		"-ginkgo.focus=" + focus, "-default-nodeclass=" + nodeClass, "-default-nodepool=" + nodePool, "-repair-condition=Ready=False",
	}
	for _, e := range exceptions {
		args = append(args, "-ginkgo.skip="+specsNamed(e.Specs))
	}
	for _, other := range part.Others() {
		args = append(args, "-ginkgo.skip="+specsNamed(other))
	}
	log, err := os.Create(filepath.Join(paths.Logs, "core-"+name+".log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	say("core-suites: %s runs, see %s", name, log.Name())
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.Env = append(os.Environ(), "KUBECONFIG="+paths.SpokeKubeconfig)
	ended := cmd.Run() // it fails if specs fail; the report has the details
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	file, err := os.Open(report)
	if err != nil {
		return nil, fmt.Errorf("suite %s left no report: %w", name, errors.Join(ended, err))
	}
	defer func() { _ = file.Close() }()
	specs, err := coresuites.Read(file, part.Suite)
	if err != nil {
		return nil, err
	}
	failed := func(s coresuites.Spec) bool {
		return s.State != "passed" && s.State != "skipped" && s.State != "pending"
	}
	if ended != nil && !slices.ContainsFunc(specs, failed) { // it was cut off, for example
		return nil, fmt.Errorf("suite %s failed, and none of its specs: %w", name, ended)
	}
	return specs, nil
}

func nameOf(part coresuites.Part) string { return strings.TrimSuffix(part.Suite+"-"+part.Specs, "-") }

// tellPart says what a part has come to, as the whole takes long and may be interrupted.
func tellPart(part coresuites.Part, specs []coresuites.Spec) {
	states := lo.CountValuesBy(specs, func(s coresuites.Spec) string { return s.State })
	say("core-suites: %s has ended: %s", nameOf(part), strings.Join(lo.Map(slices.Sorted(maps.Keys(states)), func(state string, _ int) string {
		return fmt.Sprintf("%d %s", states[state], state)
	}), ", "))
	for _, s := range specs {
		if s.State != "passed" && s.State != "skipped" {
			say("core-suites: %s: %s %s: %s", nameOf(part), s.Name, s.State, brief(s.Message))
		}
	}
}

// brief returns the beginning of a message, in one line.
func brief(message string) string {
	return lo.Ellipsis(strings.Join(strings.Fields(message), " "), 400)
}

// specsNamed returns a regular expression of the specs whose names begin with a prefix. Ginkgo puts
// the suite's own name before it, which is one word.
func specsNamed(prefix string) string { return `^\w+ ` + regexp.QuoteMeta(prefix) }

func tell(v coresuites.Verdict, violations []invariants.Violation, took time.Duration) error {
	for _, s := range v.Passed {
		say("passed  %5.0f s  %s: %s", s.Took.Seconds(), s.Suite, s.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(v.Excepted)) {
		say("cannot           %s: %s", name, v.Excepted[name].Why)
	}
	for _, e := range v.Left {
		say("cannot           %s, as a whole: %s", e.Suite, e.Why)
	}
	for _, s := range v.Unexplained {
		say("SKIPPED          %s: %s: no exception says why", s.Suite, s.Name)
	}
	for _, e := range v.Stale {
		say("STALE            %s: %s: no spec was left out for this exception", e.Suite, e.Specs)
	}
	for _, s := range v.Failed {
		say("FAILED  %5.0f s  %s: %s: %s: %s", s.Took.Seconds(), s.Suite, s.Name, s.State, brief(s.Message))
	}
	if len(violations) > 0 {
		say("invariants are violated:\n%s", invariants.Describe(violations))
	}
	ok := v.OK() && len(violations) == 0
	say("core-suites: %s %d passed, %d failed, %d cannot run, %d unexplained, violations=%d seconds=%.0f",
		lo.Ternary(ok, "PASS", "FAIL"), len(v.Passed), len(v.Failed), len(v.Excepted), len(v.Unexplained)+len(v.Stale), len(violations), took.Seconds())
	if !ok {
		return errFailed
	}
	return nil
}
