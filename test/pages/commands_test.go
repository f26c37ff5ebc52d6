package pages_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// ran has, by page, the tests that run its blocks marked sh, and the sections of these blocks.
var ran = map[string]struct {
	test     string // file:function, with further functions of the file after commas, and further files after spaces
	sections []string
}{
	"README.md": {"test/docstest/grpcurl_test.go:TestCookbook", []string{"Talk to the agent"}},
	"docs/cluster-autoscaler.md": {
		"test/pages/autoscaler_test.go:TestTheClusterAutoscalersPageCanBeFollowed", []string{"Run it"},
	},
	"docs/disaster-recovery.md": {
		"test/pages/recovery_test.go:TestUpgradesAndRecoveryAreFollowedAsThePagesSay",
		[]string{"", "Moving to another hub", "Restoring the hub", "Restoring a spoke"},
	},
	"docs/first-fifteen-minutes.md": {"test/docstest/sandbox_test.go:TestTheSandboxIsUsedAsThePagesSay", []string{"A node of your own"}},
	"docs/fleet.md":                 {"test/pages/fleet_test.go:TestFleetExamples", []string{"ClusterResourceSet"}},
	"docs/gitops.md":                {"test/docstest/grpcurl_test.go:TestCookbook", []string{"Check a manifest"}},
	"docs/grpcurl.md": {"test/docstest/grpcurl_test.go:TestCookbook", []string{
		"", "What is served", "Who am I, and is the agent ready?", "The fleet", "Node groups", "Claiming a machine", "Releasing the machine",
		"Adopting an existing machine", "Mistakes",
	}},
	"docs/install.md": {
		"test/pages/install_test.go:TestTheInstallationCanBeFollowedInItsOrder " +
			"test/pages/operations_test.go:TestASpokeCanBeOnboardedAsThePageSays " +
			"test/pages/uninstall_test.go:TestTheHubIsClearedAsThePageSays",
		[]string{
			"Before you begin", "The agent", "Hub and spoke", "Joined", "Hub-hosted", "Sidecar", "Node groups", "What Karpenter may use",
			"Access for others", "Metrics", "Upgrading", "CRDs",
		},
	},
	"docs/kubectl-plugin.md": {"test/pages/plugin_test.go:TestThePluginsPageCanBeFollowed", []string{
		"What it needs", "Why is my pod pending", "Node groups and claims", "The fleet", "Before an adoption",
	}},
	"docs/migrate-from-cluster-autoscaler.md": {
		"test/pages/migration_test.go:TestTheMigrationFromTheClusterAutoscaler",
		[]string{"Before you begin", "Move a node group", "What happens to the Nodes", "Going back"},
	},
	"docs/migrate-from-karpenter-provider-cluster-api.md": {
		"test/pages/migration_test.go:TestTheMigrationFromTheOtherProvider",
		[]string{"Before you begin", "1. Look first", "2. Stop the other provider", "3. Start Karpenter", "4. Allow disruption", "Going back"},
	},
	"docs/nodepools-from-the-hub.md": {
		"test/pages/operations_test.go:TestASpokeCanBeOnboardedAsThePageSays",
		[]string{"Turn it on", "A NodePoolSet", "In the spoke", "The status in the hub"},
	},
	"docs/operations.md": {
		"test/pages/operations_test.go:TestASpokeCanBeOnboardedAsThePageSays",
		[]string{"Onboard a spoke", "See the spokes", "Renewal", "Shut a spoke out"},
	},
	"docs/releases.md": {"deploy/tools/releaser/release_test.go:TestAReleaseIsVerifiedAsThePageSays", []string{"Signing and verifying"}},
	"docs/sandbox.md": {"test/docstest/sandbox_test.go:TestTheSandboxIsUsedAsThePagesSay", []string{
		"", "A pod becomes a node", "How machines behave", "What machines cost", "A second spoke",
	}},
	"docs/uninstall.md": {
		"test/pages/uninstall_test.go:TestTheRemovalTouchesOnlyWhatIsOurs,TestTheHubIsClearedAsThePageSays " +
			"test/pages/operations_test.go:TestASpokeCanBeOnboardedAsThePageSays",
		[]string{
			"1. In each spoke", "2. In the hub: stop the agents", "3. Remove what the agents wrote", "4. Remove the agent and its CRDs",
		},
	},
	"docs/upgrades.md": {
		"test/pages/recovery_test.go:TestUpgradesAndRecoveryAreFollowedAsThePagesSay", []string{"Upgrade a workload cluster", "Unhealthy nodes"},
	},
}

func TestEveryCommandWithoutAPromptIsRun(t *testing.T) {
	all, err := pages.All(root(t))
	require.NoError(t, err)
	found := map[string][]string{}
	for _, page := range all {
		for _, block := range page.Blocks() {
			if block.Language != "sh" {
				require.False(t, block.Language == "" && program.MatchString(block.Code),
					"%s: commands are in a block marked sh, or console with a prompt", at(page, block))
				continue
			}
			if !slices.Contains(found[page.Path], block.Section) {
				found[page.Path] = append(found[page.Path], block.Section)
			}
			require.NotRegexp(t, prompt, block.Code, "%s: a command that is run has no prompt", at(page, block))
		}
	}
	require.Equal(t, lo.MapValues(ran, func(e struct {
		test     string
		sections []string
	}, _ string,
	) []string {
		return e.sections
	}), found)
	for page, e := range ran {
		for test := range strings.FieldsSeq(e.test) {
			file, functions, _ := strings.Cut(test, ":")
			content, err := os.ReadFile(filepath.Join(root(t), file))
			require.NoError(t, err)
			for function := range strings.SplitSeq(functions, ",") {
				require.Contains(t, string(content), "\nfunc "+function+"(t *testing.T) {")
			}
			require.Contains(t, string(content), filepath.Base(page), "%s reads %s", file, page)
		}
	}
}

// notRun has the pages on which the paragraph above each command after a prompt says why no test runs it,
// with the sections of these commands.
var notRun = map[string][]string{
	"docs/disaster-recovery.md": {"Moving to another hub", "Restoring the hub", "Restoring the hub"},
	"docs/install.md":           {"Before you begin", "Sidecar", "Metrics", "Upgrading"},
	"docs/uninstall.md":         nil,
	"docs/upgrades.md":          nil,
}

// reason is what such a paragraph has.
var reason = regexp.MustCompile("(?:No test runs|`make test` does not run) (?:this|these), because \\S+(?: \\S+){2,}")

func TestACommandThatIsNotRunHasItsReason(t *testing.T) {
	for path, sections := range notRun {
		page, err := pages.Read(root(t), path)
		require.NoError(t, err)
		var found []string
		for _, block := range page.Blocks() {
			if prompt.MatchString(block.Code) {
				found = append(found, block.Section)
				require.Regexp(t, reason, above(page, block), "%s: No test runs this, because …", at(page, block))
			}
		}
		require.Equal(t, sections, found, path)
	}
}

func TestTheParagraphAboveACommandIsFound(t *testing.T) {
	page := pages.Page{Text: "No test runs this, because it needs a cloud:\n\n```console\n$ a\n```\n\n" +
		"No test runs\nthis,\nbecause it may be slow.\n```console\n$ b\n```\n\nOther.\n\n```console\n$ c\n```\n" +
		"- No test runs this, because it needs a cloud.\n- Other\n  item.\n\n  ```console\n  $ d\n  ```\n"}
	blocks := page.Blocks()
	require.Len(t, blocks, 4)
	require.Equal(t, "No test runs this, because it needs a cloud:", above(page, blocks[0]))
	require.Equal(t, "No test runs this, because it may be slow.", above(page, blocks[1]))
	require.Equal(t, "Other.", above(page, blocks[2]))
	require.Equal(t, "- Other item.", above(page, blocks[3]))
	require.Regexp(t, reason, above(page, blocks[1]))
	require.NotRegexp(t, reason, above(page, blocks[2]))
	require.NotRegexp(t, reason, "No test runs this, because of.")
}

// item is the first line of a list's item.
var item = regexp.MustCompile(`^ *(?:-|\d+\.) `)

// above returns the paragraph or the list's item above a block, in one line.
func above(page pages.Page, block pages.Block) string {
	lines := strings.Split(page.Text, "\n")[:block.Line-2]
	for len(lines) > 0 && strings.TrimSpace(lines[len(lines)-1]) == "" {
		lines = lines[:len(lines)-1]
	}
	begin := len(lines)
	for begin > 0 && strings.TrimSpace(lines[begin-1]) != "" {
		if begin--; item.MatchString(lines[begin]) {
			break
		}
	}
	return strings.Join(strings.Fields(strings.Join(lines[begin:], " ")), " ")
}

// said has, by page, the sentence that says which commands no test runs, if it is another than the usual one.
var said = map[string]string{
	"docs/bugs.md":              "`make test` runs these tests, and the nightly workflow all mutants.",
	"docs/providers/gcp.md":     "nothing on this page was run",
	"docs/providers/vsphere.md": "nothing on this page was run",
	"docs/migrate-from-karpenter-provider-cluster-api.md": "and are not run.",
}

// noCommands has the pages whose sentences have no commands for a reader to run, with the reason.
var noCommands = map[string]string{
	"docs/options.md": "it is generated, and shows how each command is called",
	"docs/values.md":  "it is generated, and names flags of Helm",
}

func TestEveryPageSaysWhichCommandsNoTestRuns(t *testing.T) {
	all, err := pages.All(root(t))
	require.NoError(t, err)
	blocks, sentences := 0, 0
	for _, page := range all {
		commands := false
		for _, block := range page.Blocks() {
			if !prompt.MatchString(block.Code) {
				continue
			}
			blocks++
			commands = true
			require.Equal(t, "console", block.Language, "%s: a command after a prompt is not run", at(page, block))
		}
		if inline := commandsInSentences(page); noCommands[page.Path] == "" {
			sentences += len(inline)
			commands = commands || len(inline) > 0
		} else {
			require.NotEmpty(t, inline, "%s need not be excused", page.Path)
		}
		if !commands {
			continue
		}
		text := strings.Join(strings.Fields(page.Text), " ")
		if sentence, other := said[page.Path]; other {
			require.Contains(t, text, sentence, page.Path)
		} else {
			require.True(t, usual.MatchString(text), "%s: No test runs the commands after a `$` … or: No test runs the commands of this page …", page.Path)
		}
	}
	require.Greater(t, blocks, 50, "commands after a prompt were found")
	require.Greater(t, sentences, 60, "commands in sentences were found")
}

func TestACommandInASentenceIsFound(t *testing.T) {
	page := pages.Page{Text: "Run `kubectl get pods -A`, `go test\n./a -run B` or `helm upgrade`.\n" +
		"```sh\nkubectl get nodes\n```\n| `capi-agent policy check FILE` |\n"}
	require.Equal(t, []string{"kubectl get pods -A", "go test ./a -run B", "capi-agent policy check FILE"}, commandsInSentences(page))
}

// commandsInSentences returns the commands in a page's text outside of its blocks. A program with a single
// word after it is the name of a command.
func commandsInSentences(page pages.Page) []string {
	var found []string
	for _, match := range inCode.FindAllStringSubmatch(strings.Join(prose(page), "\n"), -1) {
		found = append(found, strings.Join(strings.Fields(match[1]), " "))
	}
	return found
}

var (
	prompt = regexp.MustCompile(`(?m)^ *\$ `)
	// program is what a block begins with that a reader would run.
	program = regexp.MustCompile(`^\s*(capi-agent|clusterctl|cosign|curl|docker|export|git|go|grpcurl|helm|kubectl|make|openssl) `)
	inCode  = regexp.MustCompile("`((?:capi-agent|curl|go (?:run|test)|helm|kubectl|openssl)(?:\\s+[^`\\s]+){2,})`")
	usual   = regexp.MustCompile("after (a|the) `\\$`|No test runs the (other )?commands of this page")
)

// A figure of a machine that no test looks at has the day on which it was taken down.
func TestTheFirstFifteenMinutesHaveTheirDays(t *testing.T) {
	page, err := pages.Read(root(t), "docs/first-fifteen-minutes.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(page.Text, "\n| step | time | was it run |\n|---|---|---|\n")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n\n")
	timed := 0
	for row := range strings.Lines(table) {
		cells := regexp.MustCompile(`^\| (.+) \| (.*) ?\| (.+) \|\n?$`).FindStringSubmatch(row)
		require.NotNil(t, cells, row)
		if strings.TrimSpace(cells[2]) == "" {
			require.Contains(t, cells[3], "its commands are run by tests", "%s has no time", cells[1])
			continue
		}
		timed++
		require.Regexp(t, `\d (?:min|s)\b`, cells[2], cells[1])
		recorded := regexp.MustCompile(`^yes, recorded on (\d{4}-\d{2}-\d{2})$`).FindStringSubmatch(cells[3])
		require.NotNil(t, recorded, "%s: yes, recorded on <day>", cells[1])
		_, err := time.Parse(time.DateOnly, recorded[1])
		require.NoError(t, err, cells[1])
	}
	require.GreaterOrEqual(t, timed, 3, "steps were timed")
}

// foreignFlags are those of other programs.
var foreignFlags = []string{
	"--balance-similar-node-groups", "--cores-total", "--enable-provisioning-requests", "--enforce-node-group-min-size", "--expander",
	"--expendable-pods-priority-cutoff", "--ignore-taint", "--max-node-provision-time", "--max-nodes-total", "--memory-total",
	"--node-group-auto-discovery", "--scale-down-enabled", "--scale-down-gpu-utilization-threshold", "--scale-down-unneeded-time",
	"--scale-down-unready-time", "--scale-down-utilization-threshold", "--scan-interval", "--skip-nodes-with-local-storage",
	"--skip-nodes-with-system-pods", "--startup-taint", // cluster-autoscaler
	"--exclude-resources",                                            // Velero
	"--cascade", "--force-conflicts", "--overwrite", "--server-side", // kubectl
	"--create-namespace", "--kube-context", "--reset-then-reuse-values", "--reuse-values", "--set", "--set-string",
	"--show-only", "--take-ownership", "--values", // Helm
	"--node-labels", "--register-with-taints", // kubelet
	"--node-provisioner",      // KAITO
	"--hub-only", "--version", // the sandbox; of every command
}

// A flag of ours on a page must exist.
func TestEveryFlagOfAPageExists(t *testing.T) {
	options, err := pages.Read(root(t), "docs/options.md")
	require.NoError(t, err)
	flag := regexp.MustCompile("`(--[a-z][a-z0-9-]+)")
	known := lo.Map(flag.FindAllStringSubmatch(options.Text, -1), func(match []string, _ int) string { return match[1] })
	require.Greater(t, len(known), 100, "options were found")
	require.Empty(t, lo.Intersect(known, foreignFlags))
	all, err := pages.All(root(t))
	require.NoError(t, err)
	for _, page := range all {
		for _, match := range flag.FindAllStringSubmatch(page.Text, -1) {
			require.True(t, slices.Contains(known, match[1]) || slices.Contains(foreignFlags, match[1]), "%s: %s", page.Path, match[1])
		}
	}
}

// A value of a chart on a page must exist.
func TestEveryValueOfAPageExists(t *testing.T) {
	var charts []map[string]any
	for _, chart := range []string{"agent", "shim"} {
		content, err := os.ReadFile(filepath.Join(root(t), "deploy/charts", chart, "values.yaml"))
		require.NoError(t, err)
		values := map[string]any{}
		require.NoError(t, yaml.Unmarshal(content, &values))
		charts = append(charts, values)
	}
	set := regexp.MustCompile(`--set(?:-string)? "?([^ "\n]+)`)
	key := regexp.MustCompile(`(?:^|,)([a-zA-Z.]+)(?:\[0\][a-zA-Z.]*)?=`)
	inline := regexp.MustCompile("`([a-z][A-Za-z]+(?:\\.[a-z][A-Za-z]+)+)(?:`|=)")
	file := regexp.MustCompile(`\.(crt|key|yaml|go|md)$`)
	all, err := pages.All(root(t))
	require.NoError(t, err)
	found := 0
	for _, page := range all {
		for _, match := range set.FindAllStringSubmatch(page.Text, -1) {
			for _, assigned := range key.FindAllStringSubmatch(match[1], -1) {
				found++
				require.True(t, has(charts, assigned[1]), "%s: --set %s", page.Path, assigned[1])
			}
		}
		for _, match := range inline.FindAllStringSubmatch(page.Text, -1) {
			first, _, _ := strings.Cut(match[1], ".")
			if slices.Contains(notOnlyValues, first) || !has(charts, first) || file.MatchString(match[1]) {
				continue // the field of an object, a package, a file
			}
			found++
			require.True(t, has(charts, match[1]), "%s: %s", page.Path, match[1])
		}
	}
	require.Greater(t, found, 50, "values were found")
}

// notOnlyValues are values of the charts whose names other things have as well.
var notOnlyValues = []string{"agent", "clusters"}

// has reports whether a chart has a value. What is below a map that is empty by default is the user's.
func has(charts []map[string]any, path string) bool {
	return slices.ContainsFunc(charts, func(values map[string]any) bool {
		var at any = values
		for name := range strings.SplitSeq(path, ".") {
			m, isMap := at.(map[string]any)
			if !isMap {
				return false
			}
			if len(m) == 0 {
				return true
			}
			var exists bool
			if at, exists = m[name]; !exists {
				return false
			}
		}
		return true
	})
}
