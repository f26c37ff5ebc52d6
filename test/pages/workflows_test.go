package pages_test

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// workflow is what these tests read of a workflow of GitHub.
type workflow struct {
	Jobs map[string]job `json:"jobs"`
}

type job struct {
	Strategy struct {
		Matrix struct {
			Suite   []string            `json:"suite"`
			Include []map[string]string `json:"include"`
		} `json:"matrix"`
	} `json:"strategy"`
	Steps []struct {
		Uses string         `json:"uses"`
		Run  string         `json:"run"`
		With map[string]any `json:"with"`
	} `json:"steps"`
}

// suites returns the suites of the job's matrix.
func (j job) suites() []string {
	suites := slices.Clone(j.Strategy.Matrix.Suite)
	for _, more := range j.Strategy.Matrix.Include {
		suites = append(suites, more["suite"])
	}
	return suites
}

// workflows returns the workflows by file.
func workflows(t *testing.T) map[string]workflow {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root(t), ".github/workflows/*.y*ml"))
	require.NoError(t, err)
	all := map[string]workflow{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var w workflow
		require.NoError(t, yaml.Unmarshal(text, &w), file)
		all[filepath.Base(file)] = w
	}
	return all
}

// otherCommands has the commands of workflows that are no targets of make, each with the reason. A command
// that builds, checks or tests is a target, so that everyone can run what CI runs.
var otherCommands = map[string]string{
	"[ ! -e bin/hugo ] || touch bin/hugo":               "make compares times, and a checkout is newer than what the cache of CI brings",
	"[ ! -d bin ] || find bin -type f -exec touch {} +": "the same",
	"sudo apt-get update && sudo apt-get install --yes --no-install-recommends python3-grpcio python3-protobuf": "make installs nothing, and the " +
		"Python example's test needs these packages",
}

// asRoot is how a suite that needs root is run, with the environment of the workflow.
const asRoot = `sudo --preserve-env env "PATH=$PATH"`

// made is a command that runs a target of make, or that of the matrix.
var made = regexp.MustCompile(`^(?:\$\{\{ matrix\.as \}\} )?make (\$\{\{ matrix\.suite \}\}|[a-z][a-z0-9-]*)$`)

// commandsOf returns the targets of make that a step runs, and its other commands.
func commandsOf(run string, suites []string) (targets, others []string) {
	for command := range strings.Lines(run) {
		command = strings.TrimSpace(command)
		match := made.FindStringSubmatch(command)
		switch {
		case command == "":
		case match == nil:
			others = append(others, command)
		case strings.HasPrefix(match[1], "$"):
			targets = append(targets, suites...)
		default:
			targets = append(targets, match[1])
		}
	}
	return targets, others
}

func TestACommandOfAWorkflowIsATargetOrAnother(t *testing.T) {
	suites := []string{"chaos", "e2e"}
	for run, want := range map[string]struct{ targets, others []string }{
		"make docs-site": {targets: []string{"docs-site"}},
		"${{ matrix.as }} make ${{ matrix.suite }}": {targets: suites},
		"make test\n\ngo test ./...\n":              {targets: []string{"test"}, others: []string{"go test ./..."}},
		"make test && go test ./...":                {others: []string{"make test && go test ./..."}},
		"go test ./... # make test":                 {others: []string{"go test ./... # make test"}},
		"make test; true":                           {others: []string{"make test; true"}},
		"make -C elsewhere test":                    {others: []string{"make -C elsewhere test"}},
		"cd pkg\nmake test":                         {targets: []string{"test"}, others: []string{"cd pkg"}},
	} {
		targets, others := commandsOf(run, suites)
		require.Equal(t, want.targets, targets, run)
		require.Equal(t, want.others, others, run)
	}
}

func TestWorkflowsRunTargetsOfMake(t *testing.T) {
	// The suites that no change has to wait for.
	nightly := []string{"abuse", "chaos", "core-suites", "dashboards", "e2e", "fuzz", "many-nodes", "model", "mutants", "netchaos", "vuln"}
	// They need the history: the version before is run, and a commit of the protocol is looked for.
	// In a shallow checkout these tests skip themselves.
	ofHistory := []string{"test", "test-unit", "e2e"}

	var rules strings.Builder
	for _, file := range []string{"Makefile", "deploy/tools/release.mk"} {
		text, err := os.ReadFile(filepath.Join(root(t), file))
		require.NoError(t, err)
		rules.Write(text)
	}
	run := map[string][]string{} // targets by workflow
	seen := map[string]bool{}    // other commands
	for name, w := range workflows(t) {
		for _, job := range w.Jobs {
			for _, more := range job.Strategy.Matrix.Include {
				require.Contains(t, []string{"", asRoot}, more["as"], "%s: how a suite is run", name)
			}
			var targets []string
			whole, python := false, false
			for _, step := range job.Steps {
				// An attacker who controls the action can move a tag.
				require.Regexp(t, `^$|@[0-9a-f]{40}$`, step.Uses, "%s: actions are pinned to a commit", name)
				if strings.HasPrefix(step.Uses, "actions/checkout@") {
					whole = step.With["fetch-depth"] == 0.0
				}
				python = python || strings.Contains(step.Run, "python3-grpcio") && strings.Contains(step.Run, "python3-protobuf")
				of, others := commandsOf(step.Run, job.suites())
				for _, command := range others {
					require.NotEmpty(t, otherCommands[command], "%s: %s is no target of make", name, command)
					seen[command] = true
				}
				if slices.Contains(of, "test") {
					require.True(t, python, "%s: the Python example's test skips itself without its packages", name)
				}
				targets = append(targets, of...)
			}
			for _, target := range targets {
				is := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(target) + `:`).MatchString(rules.String())
				require.True(t, is, "%s runs make %s, which is no target", name, target)
				if slices.Contains(ofHistory, target) {
					require.True(t, whole, "%s: make %s needs fetch-depth 0", name, target)
				}
			}
			run[name] = append(run[name], targets...)
		}
	}
	require.ElementsMatch(t, nightly, run["nightly.yaml"])
	require.Contains(t, run["test.yaml"], "test")
	for command := range otherCommands {
		require.True(t, seen[command], "otherCommands has %s, which no workflow runs", command)
	}
}

// A contributor sees which suites run without them.
func TestThePageForContributorsSaysWhatCIRuns(t *testing.T) {
	when := map[string]string{"test.yaml": "each change", "nightly.yaml": "nightly", "docs.yaml": "changed pages"}
	run := map[string]string{} // when, by target
	for name, w := range workflows(t) {
		for _, job := range w.Jobs {
			for _, step := range job.Steps {
				targets, _ := commandsOf(step.Run, job.suites())
				for _, target := range targets {
					if when[name] != "" { // a release is no suite
						run[target] = when[name]
					}
				}
			}
		}
	}
	page, err := pages.Read(root(t), ".github/CONTRIBUTING.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(page.Text, "\n## Which suite, and when\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	rows := regexp.MustCompile("(?m)^\\| (`make .+`) \\| (.+) \\| (.+) \\| .+ \\| .+ \\|$").FindAllStringSubmatch(section, -1)
	require.Greater(t, len(rows), 10, "suites were found")
	for _, row := range rows {
		for _, target := range regexp.MustCompile("`make ([a-z0-9-]+)[^`]*`").FindAllStringSubmatch(row[1], -1) {
			if target[1] == "verify" {
				require.Equal(t, "in `make test`", row[3], "the Makefile's test runs it")
				continue
			}
			require.Equal(t, cmp.Or(run[target[1]], "no"), row[3], "when CI runs make %s", target[1])
		}
	}
}
