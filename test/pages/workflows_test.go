package pages_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// workflow is what these tests read of a workflow of GitHub.
type workflow struct {
	Jobs map[string]struct {
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
	} `json:"jobs"`
}

// madeBy returns the targets of make that a job runs.
func madeBy(run string, suites []string) []string {
	var targets []string
	for _, match := range regexp.MustCompile(`\bmake (\$\{\{ matrix\.suite \}\}|[a-z][a-z0-9-]*)`).FindAllStringSubmatch(run, -1) {
		if strings.HasPrefix(match[1], "$") {
			targets = append(targets, suites...)
		} else {
			targets = append(targets, match[1])
		}
	}
	return targets
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
	files, err := filepath.Glob(filepath.Join(root(t), ".github/workflows/*.yaml"))
	require.NoError(t, err)
	run := map[string][]string{} // targets by workflow
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var w workflow
		require.NoError(t, yaml.Unmarshal(text, &w), file)
		name := filepath.Base(file)
		for _, job := range w.Jobs {
			suites := job.Strategy.Matrix.Suite
			for _, more := range job.Strategy.Matrix.Include {
				suites = append(suites, more["suite"])
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
				made := madeBy(step.Run, suites)
				if slices.Contains(made, "test") {
					require.True(t, python, "%s: the Python example's test skips itself without its packages", name)
				}
				targets = append(targets, made...)
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
}
