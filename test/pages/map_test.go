package pages_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// A row of the map begins with one or more packages in code.
var (
	mapRow     = regexp.MustCompile("(?m)^\\| (`[a-z][a-z0-9/-]*`(?:, `[a-z][a-z0-9/-]*`)*) \\| \\S")
	mapPackage = regexp.MustCompile("`([^`]+)`")
)

func TestTheMapShowsEveryPackage(t *testing.T) {
	page, err := pages.Read(root(t), "docs/architecture.md")
	require.NoError(t, err)
	_, packageMap, found := strings.Cut(page.Text, "\n## Every package\n")
	require.True(t, found, "docs/architecture.md has a map")
	packageMap, _, _ = strings.Cut(packageMap, "\n## ")
	var shown []string
	for _, row := range mapRow.FindAllStringSubmatch(packageMap, -1) {
		for _, name := range mapPackage.FindAllStringSubmatch(row[1], -1) {
			shown = append(shown, name[1])
		}
	}
	require.ElementsMatch(t, packagesOf(t), shown)
}

// packagesOf returns the folders with Go code, relative to the repository's root.
func packagesOf(t *testing.T) []string {
	t.Helper()
	seen := map[string]bool{}
	for _, module := range []string{"agent", "deploy", "docs", "pkg", "proto", "shim", "test"} {
		err := filepath.WalkDir(filepath.Join(root(t), module), func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && entry.Name() == "testdata":
				return filepath.SkipDir
			case !entry.IsDir() && filepath.Ext(path) == ".go":
				folder, err := filepath.Rel(root(t), filepath.Dir(path))
				seen[filepath.ToSlash(folder)] = true
				return err
			}
			return nil
		})
		if err != nil {
			t.Fatalf("looking for packages: %v", err)
		}
	}
	folders := make([]string, 0, len(seen))
	for folder := range seen {
		folders = append(folders, folder)
	}
	return folders
}

// What others may import shows its use, in an example that is run. Packages without one say why.
func TestEveryPublicPackageHasAnExample(t *testing.T) {
	without := map[string]string{
		"pkg/scrapes":                          "it is for the tests of this repository",
		"pkg/tracing/tracingtest":              "it takes a testing.TB, which an example has not",
		"proto/clusterautoscaler/externalgrpc": "it is the cluster-autoscaler's",
	}
	public := 0
	for _, name := range packagesOf(t) {
		module, _, _ := strings.Cut(name, "/")
		if module == "deploy" || module == "docs" || module == "test" || strings.Contains(name, "/internal/") || strings.Contains(name, "/cmd/") {
			continue
		}
		public++
		require.Equal(t, without[name] == "", hasExample(t, name), "%s has an example", name)
	}
	require.Greater(t, public, 15, "packages were found")
}

// An example without an expected output is compiled, and not run.
var executed = regexp.MustCompile(`(?ms)^func Example\w*\(\) \{.*?^\t// Output:.*?^\}`)

func hasExample(t *testing.T, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root(t), name, "*_test.go"))
	if err != nil {
		t.Fatalf("looking for tests: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatalf("reading a test: %v", err)
		}
		if executed.Match(text) {
			return true
		}
	}
	return false
}
