package main

import (
	"cmp"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func source(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../../..")
	require.NoError(t, err)
	return path
}

func TestEveryMutantApplies(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants {
		assert.False(t, names[m.name], "two mutants are called %q", m.name)
		names[m.name] = true
		r := runner{root: source(t)}
		_, err := m.overlay(r.sources(), t.TempDir())
		require.NoError(t, err)
		_, err = r.home(m.test)
		require.NoError(t, err)
		assert.Equal(t, m.world == "", m.violation == "", m.name)
	}
}

// TestEveryMutantCompiles type-checks the packages with each mutant's edits. A mutant that does not
// compile catches nothing.
func TestEveryMutantCompiles(t *testing.T) {
	if raced {
		t.Skip("one goroutine checks types, several times slower with the race detector")
	}
	r := runner{root: source(t)}
	files := token.NewFileSet()
	known := importer.ForCompiler(files, "gc", exported(t, r))
	for _, m := range mutants {
		replace, err := m.overlay(r.sources(), t.TempDir())
		require.NoError(t, err)
		folders := map[string]bool{}
		for path := range replace {
			folders[filepath.Dir(path)] = true
		}
		for folder := range folders {
			parsed, err := parsedWith(files, folder, replace)
			require.NoError(t, err, m.name)
			_, err = (&types.Config{Importer: known}).Check(folder, files, parsed, nil)
			assert.NoError(t, err, m.name)
		}
	}
}

// exported returns a lookup of the compiler's export data for the packages that the mutated ones
// import.
func exported(t *testing.T, r runner) func(path string) (io.ReadCloser, error) {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".")
	list.Dir, list.Stderr = r.folder(claimsPackage), os.Stderr
	out, err := list.Output()
	require.NoError(t, err)
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	return func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
}

// parsedWith parses a package's files, with some of them replaced.
func parsedWith(files *token.FileSet, folder string, replace map[string]string) ([]*ast.File, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	var parsed []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(files, cmp.Or(replace[path], path), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, file)
	}
	return parsed, nil
}

// TestThePageOfBugsNamesMutantsAndTests checks that each command in docs/bugs.md names a mutant or
// a test that exists.
func TestThePageOfBugsNamesMutantsAndTests(t *testing.T) {
	r := runner{root: source(t)}
	page, err := os.ReadFile(filepath.Join(r.root, "docs", "bugs.md"))
	require.NoError(t, err)
	named := regexp.MustCompile(`make mutants MUTANTS_FLAGS="-run='([^"]+)'"`).FindAllStringSubmatch(string(page), -1)
	require.NotEmpty(t, named)
	for _, found := range named {
		selected, err := regexp.Compile(found[1])
		require.NoError(t, err)
		assert.True(t, slices.ContainsFunc(mutants, func(m mutant) bool { return selected.MatchString(m.name) }), found[1])
	}
	tests := regexp.MustCompile(`go test \./(\S+) -run (\w+)`).FindAllStringSubmatch(string(page), -1)
	require.NotEmpty(t, tests)
	for _, found := range tests {
		files, err := filepath.Glob(filepath.Join(r.root, found[1], "*_test.go"))
		require.NoError(t, err)
		assert.True(t, slices.ContainsFunc(files, func(file string) bool {
			text, err := os.ReadFile(file)
			return err == nil && strings.Contains(string(text), "func "+found[2]+"(t *testing.T)")
		}), "%s in %s", found[2], found[1])
	}
}

// A reader looks at the commits.
func TestThePageOfBugsNamesCommits(t *testing.T) {
	r := runner{root: source(t)}
	// It declares the history as an input of the test cache.
	_ = os.Getenv("TESTED_COMMIT")
	if shallow, err := exec.CommandContext(t.Context(), "git", "-C", r.root, "rev-parse", "--is-shallow-repository").Output(); err != nil ||
		strings.TrimSpace(string(shallow)) != "false" {
		t.Skip("there is no history")
	}
	page, err := os.ReadFile(filepath.Join(r.root, "docs", "bugs.md"))
	require.NoError(t, err)
	commits := regexp.MustCompile(`\| ([0-9a-f]{7,40}) \|`).FindAllStringSubmatch(string(page), -1)
	require.Greater(t, len(commits), 30)
	for _, commit := range commits {
		err := exec.CommandContext(t.Context(), "git", "-C", r.root, "cat-file", "-e", commit[1]+"^{commit}").Run()
		assert.NoError(t, err, "there is no commit %s", commit[1])
	}
}

// TestTheQuickestMutantsAreCaught tries the mutants that a few histories catch; `make mutants`
// tries all.
func TestTheQuickestMutantsAreCaught(t *testing.T) {
	r := runner{root: source(t), budget: 5 * time.Minute, rounds: rounds[:2]}
	tried := 0
	for _, m := range mutants {
		if !m.smoke {
			continue
		}
		tried++
		t.Run(m.name, func(t *testing.T) {
			found, err := r.try(t.Context(), m)
			require.NoError(t, err)
			t.Logf("caught in %d histories: %s", found.histories, found.invariant)
		})
	}
	assert.GreaterOrEqual(t, tried, 4)
}
