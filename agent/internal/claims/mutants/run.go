package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// modelTest is the property test that checks random histories of the protocol.
const modelTest = "TestProtocolAgainstAdversary"

// otherTests stands for all other tests of the package. They run when no history shows the
// breakage, because the rule has a second guard or the failure takes a rare coincidence.
const otherTests = "other tests"

// round is one run of a test with a number of random histories that are all made from one seed.
type round struct {
	seed      uint64
	histories int
	steps     int
}

// rounds are tried one after the other until a mutant is caught. They are fixed, so that a run can
// be repeated. Short histories come first, because most breakages show in a few steps, then more
// and longer ones.
var rounds = []round{
	{seed: 1, histories: 100, steps: 30},
	{seed: 2, histories: 500, steps: 40},
	{seed: 3, histories: 2000, steps: 50},
}

// lastRounds are tried if neither the rounds nor the other tests caught a mutant.
var lastRounds = []round{
	{seed: 4, histories: 6000, steps: 60},
	{seed: 5, histories: 12000, steps: 50},
}

var (
	errSurvived = errors.New("not caught")
	errTime     = errors.New("not caught in its time; a test that hangs is no catch")
)

// catch is how a mutant was caught.
type catch struct {
	// invariant is the violated invariant that the test reported.
	invariant string
	// histories is how many histories were needed, and rounds how many of the rounds.
	histories, rounds int
}

// runner builds and runs the tests of packages claims and protocol, or the explorer, mutated or
// not.
type runner struct {
	root   string        // the root of the repository
	budget time.Duration // for the histories of one mutant
	rounds []round
	// control means that the unmodified engine is tested.
	control bool
}

// The mutated packages. Their tests share no names.
const (
	claimsPackage   = "agent/internal/claims"
	protocolPackage = "agent/protocol"
	explorerPackage = "test/claimmodel"
)

func (r runner) folder(pkg string) string { return filepath.Join(r.root, filepath.FromSlash(pkg)) }

// sources returns the folders of the mutated packages.
func (r runner) sources() []string {
	return []string{r.folder(claimsPackage), r.folder(protocolPackage)}
}

// home returns the package that a test belongs to.
func (r runner) home(test string) (string, error) {
	if test == "" || test == otherTests {
		return claimsPackage, nil
	}
	for _, pkg := range []string{claimsPackage, protocolPackage} {
		files, err := filepath.Glob(filepath.Join(r.folder(pkg), "*_test.go"))
		if err != nil {
			return "", fmt.Errorf("looking for tests: %w", err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file) //nolint:gosec // a file of this repository
			if err != nil {
				return "", fmt.Errorf("looking for tests: %w", err)
			}
			if strings.Contains(string(text), "\nfunc "+test+"(") {
				return pkg, nil
			}
		}
	}
	return "", fmt.Errorf("there is no test %s", test)
}

// try compiles the engine with the mutant's edits and runs histories until the test fails. Errors:
// [errSurvived], [errTime], or why there is no verdict, for example because the mutant does not
// compile.
func (r runner) try(ctx context.Context, m mutant) (catch, error) {
	dir, err := os.MkdirTemp("", "mutant-")
	if err != nil {
		return catch{}, fmt.Errorf("making a folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if m.world != "" {
		if found, err := r.explore(ctx, dir, m); err != nil || !m.both {
			return found, err
		}
	}
	pkg, err := r.home(m.test)
	if err != nil {
		return catch{}, fmt.Errorf("mutant %q: %w", m.name, err)
	}
	binary, err := r.compile(ctx, m, pkg, dir)
	if err != nil {
		return catch{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.budget)
	defer cancel()
	total := 0
	histories := func(rounds []round) (catch, error) {
		for _, round := range rounds {
			found, err := r.run(ctx, binary, dir, m, round)
			total += found.histories
			found.histories, found.rounds = total, 1+slices.Index(slices.Concat(r.rounds, lastRounds), round)
			if err == nil || !errors.Is(err, errSurvived) || ctx.Err() != nil || m.test != "" { // a mutant's own test needs no second round
				return found, err
			}
		}
		return catch{histories: total}, errSurvived
	}
	if found, err := histories(r.rounds); m.test != "" || !errors.Is(err, errSurvived) || ctx.Err() != nil {
		return found, err
	}
	others := m
	others.test = otherTests
	found, err := r.run(ctx, binary, dir, others, rounds[0])
	found.histories, found.rounds = total, len(r.rounds)
	if !errors.Is(err, errSurvived) || r.control {
		return found, err
	}
	protocolTests, err := r.compile(ctx, m, protocolPackage, dir)
	if err != nil {
		return catch{}, err
	}
	found, err = r.run(ctx, protocolTests, dir, others, rounds[0])
	found.histories, found.rounds = total, len(r.rounds)
	if !errors.Is(err, errSurvived) {
		return found, err
	}
	return histories(lastRounds)
}

// violated matches the explorer's report of a violation.
var violated = regexp.MustCompile(`(?m)^VIOLATION (.*) \(\d+ times\)$`)

// explore runs the mutant's world until the expected violation is found.
func (r runner) explore(ctx context.Context, dir string, m mutant) (catch, error) {
	binary, err := r.compile(ctx, m, explorerPackage, dir)
	if err != nil {
		return catch{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.budget)
	defer cancel()
	//nolint:gosec // the binary was just built
	cmd := exec.CommandContext(ctx, binary, append(strings.Fields(m.world), "-world", "-until", m.violation)...)
	out, err := cmd.CombinedOutput()
	switch {
	case err == nil:
		return catch{}, errSurvived
	case ctx.Err() != nil:
		return catch{}, errTime
	}
	for _, found := range violated.FindAllStringSubmatch(string(out), -1) {
		if first, _, _ := strings.Cut(found[1], " "); first == m.violation {
			return catch{invariant: "explored: " + found[1], histories: 1}, nil
		}
	}
	return catch{}, fmt.Errorf("mutant %q brings no %s: %w\n%s", m.name, m.violation, err, first(string(out), 40))
}

// controlBudget only ends a run that hangs.
const controlBudget = time.Hour

// soundness runs the unmodified engine through the rounds that the mutants needed, and through the
// other tests that judged them. What caught the mutants must find nothing there. It returns
// [errSurvived] if all is well.
func (r runner) soundness(ctx context.Context, tests []string, needed int) (catch, error) {
	all := slices.Concat(r.rounds, lastRounds)
	r.rounds = all[:max(1, min(len(all), needed))]
	r.budget, r.control = controlBudget, true
	for _, test := range tests {
		if found, err := r.try(ctx, mutant{name: "(none)", test: test}); !errors.Is(err, errSurvived) {
			return found, err
		}
	}
	return r.try(ctx, mutant{name: "(none)"})
}

// compile builds the test binary of a package, or the explorer, with the mutant's edits.
func (r runner) compile(ctx context.Context, m mutant, pkg, dir string) (string, error) {
	replace, err := m.overlay(r.sources(), dir)
	if err != nil {
		return "", err
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", fmt.Errorf("encoding the overlay: %w", err)
	}
	overlay := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, data, 0o600); err != nil {
		return "", fmt.Errorf("writing the overlay: %w", err)
	}
	binary := filepath.Join(dir, filepath.Base(pkg)+".test")
	build := []string{"test", "-c", "-vet=off"}
	if pkg == explorerPackage {
		build = []string{"build"}
	}
	//nolint:gosec // the flags are ours
	cmd := exec.CommandContext(ctx, "go", append(build, "-ldflags=-s -w", "-overlay", overlay, "-o", binary, ".")...)
	cmd.Dir = r.folder(pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mutant %q does not compile: %w\n%s", m.name, err, out)
	}
	return binary, nil
}

var (
	// failed matches rapid's report of a history that a test rejected. The message begins with the
	// invariant.
	failed = regexp.MustCompile(`\[rapid\] failed after (\d+) tests: ([IR]\d: .*)`)
	// failing matches the name of an ordinary test that failed. said matches its message, from
	// testing itself or from testify.
	failing = regexp.MustCompile(`(?m)^--- FAIL: (\S+)`)
	said    = regexp.MustCompile(`(?m)^\s+(?:\S+_test\.go:\d+: |Error: +\t)\S.*$`)
)

// run runs one round. A failure counts only if an invariant was violated, or if an assertion of the
// mutant's own test failed. A panic or another error is a mistake of the mutant.
func (r runner) run(ctx context.Context, binary, dir string, m mutant, round round) (catch, error) {
	name := m.test
	if name == "" {
		name = modelTest
	}
	which := "-test.run=^" + name + "$"
	if name == otherTests {
		which = "-test.skip=^" + modelTest + "$"
	}
	//nolint:gosec // the binary was just built
	cmd := exec.CommandContext(ctx, binary, which, "-test.v", "-test.timeout=0",
		"-rapid.nofailfile", "-rapid.shrinktime=0s",
		fmt.Sprintf("-rapid.seed=%d", round.seed), fmt.Sprintf("-rapid.checks=%d", round.histories), fmt.Sprintf("-rapid.steps=%d", round.steps))
	cmd.Dir = dir // without histories of earlier failures
	if pkg, err := r.home(m.test); err == nil && m.test != "" {
		cmd.Dir = r.folder(pkg) // where such a test expects to run
	}
	data, err := cmd.CombinedOutput()
	out := string(data)
	switch {
	case err == nil && name != otherTests && !strings.Contains(out, "--- PASS: "+name):
		return catch{}, fmt.Errorf("mutant %q: there is no test %s", m.name, name)
	case err == nil:
		return catch{histories: round.histories}, errSurvived
	case ctx.Err() != nil && !strings.Contains(out, "--- FAIL: "):
		return catch{}, errTime
	}
	if found := failed.FindStringSubmatch(out); found != nil {
		histories, err := strconv.Atoi(found[1])
		if err != nil {
			return catch{}, fmt.Errorf("reading the test's output: %w", err)
		}
		return catch{invariant: strings.TrimSpace(found[2]), histories: histories + 1}, nil
	}
	if test := failing.FindStringSubmatch(out); m.test != "" && test != nil && said.MatchString(out) {
		return catch{invariant: test[1], histories: 1}, nil
	}
	return catch{}, fmt.Errorf("mutant %q fails without violating an invariant: %w\n%s", m.name, err, first(out, 40))
}

// first returns the first lines of a text.
func first(text string, lines int) string {
	parts := strings.SplitN(text, "\n", lines+1)
	return strings.Join(parts[:min(len(parts), lines)], "\n")
}
