package pages_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// A pattern that matches no test passes, and a package's own flags are only found when it runs.
func TestEveryGoTestCommandOfAPageRunsATest(t *testing.T) {
	all, err := pages.All(root(t))
	require.NoError(t, err)
	found := 0
	for _, page := range all {
		for _, command := range goTestsOf(page) {
			found++
			require.Empty(t, wrongIn(t, command), "%s: go test %s", page.Path, command)
		}
	}
	require.Greater(t, found, 20, "commands were found")
}

func TestAGoTestCommandThatRunsNothingIsFound(t *testing.T) {
	page := pages.Page{Text: "`go test ./test/pages -run TestA`\n```console\n$ cd test && go test ./pages\n```\n"}
	require.Equal(t, []goTest{{folder: ".", arguments: "./test/pages -run TestA"}, {folder: "test", arguments: "./pages"}}, goTestsOf(page))
	for arguments, wrong := range map[string]bool{
		"./test/pages -run TestAGoTestCommandThatRunsNothing":        false,
		"-race -count=1 ./test/pages -run '^TestAGoTest(A|Command)'": false,
		"-race ./...": false,
		"./test/monitoring -run=TestTheTableOfAlerts -args -write-alerts": false,
		"./test/pages -run NoTestHasThisName":                             true,
		"./test/nowhere":                                                  true,
		"./test/monitoring -args -write-nothing":                          true,
		"-run TestA":                                                      true,
	} {
		require.Equal(t, wrong, wrongIn(t, goTest{folder: ".", arguments: arguments}) != "", arguments)
	}
}

// goTest is a command of a page, and the folder in which it runs.
type goTest struct{ folder, arguments string }

func (c goTest) String() string { return c.arguments }

var (
	goTestLine = regexp.MustCompile(`(?m)^ *\$ (?:cd (\S+) && )?go test ([^#\n]+?) *(?:#.*)?$`)
	shellWord  = regexp.MustCompile(`[^\s'"]*(?:'[^']*'|"[^"]*"|[^\s'"]+)[^\s'"]*`)
	ownFlag    = regexp.MustCompile(`= flag\.\w+\("([a-z-]+)"`)
)

// goTestsOf returns the commands after a prompt and those in sentences.
func goTestsOf(page pages.Page) []goTest {
	var found []goTest
	for _, command := range commandsInSentences(page) {
		if arguments, is := strings.CutPrefix(command, "go test "); is {
			found = append(found, goTest{folder: ".", arguments: arguments})
		}
	}
	for _, block := range page.Blocks() {
		for _, line := range goTestLine.FindAllStringSubmatch(block.Code, -1) {
			found = append(found, goTest{folder: filepath.Join(".", line[1]), arguments: line[2]})
		}
	}
	return found
}

// wrongIn returns why a command runs no test, or "".
func wrongIn(t *testing.T, command goTest) string {
	t.Helper()
	var folders, own []string
	pattern := "."
	ofGo := []string{"args", "bench", "benchtime", "count", "race", "timeout", "v"}
	words := shellWord.FindAllString(command.arguments, -1)
	for i := 0; i < len(words); i++ {
		name, value, assigned := strings.Cut(strings.TrimLeft(words[i], "-"), "=")
		switch {
		case !strings.HasPrefix(words[i], "-"):
			folders = append(folders, filepath.Join(command.folder, words[i]))
		case slices.Contains([]string{"run", "bench", "benchtime", "count", "timeout"}, name):
			if !assigned && i+1 < len(words) {
				i++
				value = words[i]
			}
			if name == "run" {
				pattern = strings.Trim(value, `'"`)
			}
		case !slices.Contains(ofGo, name) && !strings.Contains(name, "."): // a library's, such as rapid.checks, has a dot
			own = append(own, name)
		}
	}
	if len(folders) == 0 {
		return "it names no package"
	}
	for _, folder := range folders {
		if filepath.Base(folder) == "..." {
			continue
		}
		names := slices.Collect(maps.Keys(functionsIn(t, folder)))
		if !slices.ContainsFunc(names, func(name string) bool {
			return strings.HasPrefix(name, "Test") && regexp.MustCompile(pattern).MatchString(name)
		}) {
			return fmt.Sprintf("no test of %s matches %s", folder, pattern)
		}
		for _, name := range own {
			if !slices.Contains(flagsIn(t, folder), name) {
				return fmt.Sprintf("the tests of %s have no flag -%s", folder, name)
			}
		}
	}
	return ""
}

// flagsIn returns the flags that the tests of a package define.
func flagsIn(t *testing.T, folder string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root(t), folder, "*_test.go"))
	require.NoError(t, err)
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, match := range ownFlag.FindAllStringSubmatch(string(text), -1) {
			names = append(names, match[1])
		}
	}
	return names
}
